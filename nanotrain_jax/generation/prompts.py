"""Prompts of a file, and their answers in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanotrain_jax.data import chat_template, json_lines
from nanotrain_jax.data.json_lines import Row
from nanotrain_jax.generation.load import Loaded
from nanotrain_jax.generation.session import Session
from nanotrain_jax.generation.text import Text

KINDS = '{"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'


class Prompt(NamedTuple):
    """A text to continue. given: the row of the file, or the text, for the output."""

    ids: list[int]
    given: dict[str, Any]


def read(path: Path, loaded: Loaded) -> list[Prompt]:
    """Read a JSONL file of {"prompt": text} or {"messages": conversation}. Raises ValueError or OSError."""
    return [_prompt(row, loaded) for row in json_lines.read(path, "--prompts", KINDS)]


def _prompt(row: Row, loaded: Loaded) -> Prompt:
    place, shown, given = row
    if given is None:
        raise ValueError(f"{place}: {shown} is not a JSON object; write {KINDS}")
    text, messages = given.get("prompt"), given.get("messages")
    is_talk = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not isinstance(text, str) and not is_talk:
        raise ValueError(f'{place}: {shown} has neither a text "prompt" nor "messages"; write {KINDS}')
    if taken := [key for key in Answer._fields if key in given]:
        raise ValueError(f"{place}: {taken[0]!r} is a key of the answer, which would overwrite it; rename it")
    if isinstance(text, str):
        return encode(text, loaded, place, given)
    return encode(_rendered(place, messages, loaded), loaded, place, given, is_rendered=True)


def _rendered(place: str, messages: list[dict], loaded: Loaded) -> str:
    try:
        return chat_template.of_folder(loaded.folder).render(messages)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def encode(text: str, loaded: Loaded, place: str, given: dict[str, Any], is_rendered: bool = False) -> Prompt:
    """Return the tokens of a prompt. place: for messages; is_rendered: by a chat template, which writes the begin token
    itself if it wants one. Raises ValueError if there are none, or too many."""
    ids = tokens(text, loaded, is_rendered)
    if not ids:
        raise ValueError(f"{place} gives no tokens with this model's tokenizer; give some text")
    if len(ids) >= loaded.context:
        raise ValueError(
            f"{place} has {len(ids)} tokens, but the model's context is {loaded.context} with the answer; shorten it"
        )
    return Prompt(ids, given)


def tokens(text: str, loaded: Loaded, is_rendered: bool) -> list[int]:
    """Return the tokens of a text. is_rendered: as of `encode`."""
    (ids,) = loaded.tokenizer.encode([text.encode("utf-8", "surrogateescape")])
    return (ids if is_rendered else loaded.tokenizer.begun(ids)).tolist()


class Conversation:
    """Messages so far. system: what the model is told first; None: nothing.

    messages: since the last exchange that was forgotten. forgotten: exchanges that no longer fit the context.
    """

    def __init__(self, loaded: Loaded, template: chat_template.Template, system: str | None = None):
        self.loaded, self.template, self.forgotten = loaded, template, 0
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []

    def ask(self, line: str) -> Prompt:
        """Add what the user says -> the conversation as a prompt; the first exchanges are forgotten if it does not fit.

        Raises ValueError if it does not fit alone, or the template refuses it; then nothing was said.
        """
        messages = [*self.messages, {"role": "user", "content": line}]
        text = self.template.render(self.system + messages)
        forgotten = 0
        while len(tokens(text, self.loaded, is_rendered=True)) >= self.loaded.context and len(messages) > 2:
            messages, forgotten = messages[2:], forgotten + 1
            text = self.template.render(self.system + messages)
        prompt = encode(text, self.loaded, "the message", {"prompt": text}, is_rendered=True)
        self.messages, self.forgotten = messages, self.forgotten + forgotten
        return prompt

    def answer(self, text: str) -> None:
        """Add what the model said."""
        self.messages.append({"role": "assistant", "content": text})


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
