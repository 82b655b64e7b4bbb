"""Prompts of a file, and their answers in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanotrain_jax.generation import chat
from nanotrain_jax.generation.load import Loaded
from nanotrain_jax.generation.session import Session
from nanotrain_jax.generation.text import Text

MAX_SHOWN = 60  # characters of a row in an error message


class Prompt(NamedTuple):
    """A text to go on from. given: the row of the file, or the text, for the output."""

    ids: list[int]
    given: dict[str, Any]


def read(path: Path, loaded: Loaded) -> list[Prompt]:
    """Read a JSONL file of {"prompt": text} or {"messages": conversation}. Raises ValueError or OSError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f'--prompts={str(path)!r} is empty; give rows of {{"prompt": "text"}}')
    return [_prompt(f"{path}:{number}", line, loaded) for number, line in rows]


def _prompt(place: str, line: str, loaded: Loaded) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError(f'{place}: {line[:MAX_SHOWN]!r} is not a JSON object; write {{"prompt": "text"}}')
    if isinstance(row.get("prompt"), str):
        return encode(row["prompt"], loaded, place, row)
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return encode(chat.of_folder(loaded.folder).render(messages), loaded, place, row)
    raise ValueError(f'{place}: {line[:MAX_SHOWN]!r} has neither a text "prompt" nor "messages"; write one')


def encode(text: str, loaded: Loaded, place: str, given: dict[str, Any]) -> Prompt:
    """Return the tokens of a prompt. place: for messages. Raises ValueError if there are none, or too many."""
    (ids,) = loaded.tokenizer.encode([text.encode("utf-8", "surrogateescape")])
    if not len(ids):
        raise ValueError(f"{place} gives no tokens with this model's tokenizer; give some text")
    if len(ids) >= loaded.context:
        raise ValueError(
            f"{place} has {len(ids)} tokens, but the model's context is {loaded.context} with the answer; shorten it"
        )
    return Prompt(ids.tolist(), given)


class Answer(NamedTuple):
    """What a model wrote after a prompt. is_ended: by a token or text that ends it, not by the number of tokens."""

    text: str
    tokens: int
    is_ended: bool


def answers(session: Session, loaded: Loaded, prompts: Sequence[Prompt], limit: int, stops: Sequence[str]) -> list:
    """Answer prompts together, one row each -> an `Answer` for each."""
    texts = [Text(prompt.ids, loaded.tokenizer, stops) for prompt in prompts]
    session.feed([prompt.ids for prompt in prompts])
    for new_Bn in session.tokens(limit):
        for text, new in zip(texts, new_Bn.tolist(), strict=True):
            if not text.is_ended:
                text.add(new)
        if all(text.is_ended for text in texts):
            break
    ended = [text.is_ended for text in texts]
    for text in texts:
        text.close()
    return [Answer(text.text, len(text.ids), is_ended) for text, is_ended in zip(texts, ended, strict=True)]


def batches(prompts: Sequence[Prompt], rows: int) -> Iterator[list[int]]:
    """Yield the indices of prompts that are answered together: of like lengths."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    for start in range(0, len(order), rows):
        yield order[start : start + rows]
