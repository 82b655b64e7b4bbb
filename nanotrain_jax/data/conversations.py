"""Rows of .jsonl files as texts, with the spans of them that a model learns: `data.source=chat:GLOB`.

    {"messages": [{"role", "content"}, ...]}    a conversation; the chat template writes its text
    {"prompt", "completion"}                    two texts, taken as they are, or two lists of messages: one conversation
    {"text"}                                    a text, all of which is learned

Other keys are not read. What the assistant says lies between two texts that the template writes: of the messages before
it, asked for an answer, and of these with it. Each must begin with the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from nanotrain_jax.data.chat_template import BEGIN, END, Message, Span, Template

ROLES = "system", "developer", "user", "assistant", "tool"
ROW = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
BOM = b"\xef\xbb\xbf"
MAX_SHOWN = 60  # characters of a line in an error message


class Example(NamedTuple):
    """A text of which spans are learned.

    is_plain: no template wrote it, so the tokenizer's begin and end tokens go around it. trims: a span has what the
    template writes behind the answer; what follows the end token there is not learned. place: file and line, for
    messages. key: examples with the same one are all held out for validation or none is; None: the text.
    """

    text: str
    spans: Sequence[Span]
    place: str
    is_plain: bool = False
    trims: bool = False
    key: str | None = None


def read(paths: Sequence[str], of_row: Callable[[dict], Sequence[Example]], kinds: str = ROW) -> Iterator[Example]:
    """Yield the examples of each line that is not blank: what of_row makes of its object, or a ValueError.

    kinds: of rows, for messages. Raises ValueError that names file and line, or OSError.
    """
    for path in paths:
        with open(path, "rb") as lines:
            rows = enumerate((line.removeprefix(BOM).strip() for line in lines), 1)
            for number, line in ((number, line) for number, line in rows if line):
                yield from _located(f"{path}:{number}", line, of_row, kinds)


def _located(place: str, line: bytes, of_row: Callable[[dict], Sequence[Example]], kinds: str) -> list[Example]:
    try:
        found = of_row(_row(line, kinds))
        for example in found:
            example.text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: half of a surrogate pair (\\ud800 to \\udfff) is no text; mend the line") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return [example._replace(place=place) for example in found]


def _row(line: bytes, kinds: str) -> dict[str, Any]:
    """Return the object of a line. Raises ValueError."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({getattr(error, 'msg', error)}); mend the line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{line[:MAX_SHOWN].decode(errors='replace').strip()} is not an object; write {kinds}")
    if row.get("tools"):
        raise ValueError("tools are not read; leave them out, or write them into a message of the system")
    return row


def of_row(row: dict[str, Any], template: Template | None, loss_on: str) -> list[Example]:
    """Return the example of a row. loss_on: as of the config. Raises ValueError."""
    return [_example(row, template, loss_on)]


def _example(row: dict[str, Any], template: Template | None, loss_on: str) -> Example:
    prompt, completion = row.get("prompt"), row.get("completion")
    if "messages" in row:
        messages = checked(row["messages"], "messages")
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
        return conversation(messages, template, last if loss_on == "completion" else 0, loss_on == "all")
    if isinstance(prompt, str) and isinstance(completion, str):
        return completed(prompt, completion, loss_on == "all")
    if isinstance(prompt, list) and isinstance(completion, list):
        before = checked(prompt, "prompt")
        messages = before + checked(completion, "completion", before)
        return conversation(messages, template, len(prompt), loss_on == "all")
    if {"prompt", "completion"} & row.keys():
        raise ValueError("prompt and completion must both be texts, or both lists of messages")
    if isinstance(row.get("text"), str):
        if not row["text"]:
            raise ValueError("text is empty; leave the line out")
        return Example(_clean(row["text"], "text"), [(0, len(row["text"]))], "", is_plain=True)
    raise ValueError(f"a row with the keys {', '.join(map(repr, [*row][:20])) or 'of no name'}; write {ROW}")


def completed(prompt: str, completion: str, learns_all: bool = False) -> Example:
    """Return the example of two texts. Raises ValueError if the second is empty."""
    if not completion.strip():
        raise ValueError("completion is empty: there is nothing to learn; leave the line out")
    text = _clean(prompt, "prompt") + _clean(completion, "completion")
    return Example(text, [(0 if learns_all else len(prompt), len(text))], "", is_plain=True)


def checked(messages: Any, key: str, before: Sequence[Message] = ()) -> list[Message]:
    """Return messages as they are. key: of the row; before: messages that come first. Raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{key} must be a list of messages, [{{"role": "user", "content": "..."}}, ...]')
    for i, message in enumerate(messages):
        place = f"{key}[{i}]"
        if not isinstance(message, dict):
            raise ValueError(f'{place} is not an object; write {{"role": "user", "content": "..."}}')
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{place}: role={json.dumps(role)[:MAX_SHOWN]} must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            kind = {list: "a list of parts", type(None): "missing or null"}.get(type(content), "not text")
            raise ValueError(f"{place}: content is {kind}; write it as one text")
        _clean(content, place)
        if role == "assistant" and not content.strip():
            raise ValueError(f"{place}: the assistant says nothing; leave the message or the line out")
    first = next((message for message in [*before, *messages] if message["role"] not in ("system", "developer")), None)
    if first is not None and first["role"] == "assistant":
        raise ValueError(f"{key}: the assistant speaks first: nothing asks it; begin with a message of the user")
    return messages


def _clean(text: str, place: str) -> str:
    """Return a text. Raises ValueError if it has characters that mark spans."""
    if BEGIN in text or END in text:
        raise ValueError(f"{place} has U+FDD0 or U+FDD1, which are no characters; take them out")
    return text


def conversation(messages: Sequence[Message], template: Template | None, first: int, learns_all: bool) -> Example:
    """Return the example of a conversation: answers from message `first` on are learned, or all. Raises ValueError."""
    if template is None:
        raise ValueError("messages need a chat template, and the tokenizer has none; set data.chat_template")
    text, marked = template.marked(messages)
    if learns_all:
        return Example(text, [(0, len(text))], "")
    if template.marks_answers:
        before = len(template.marked(messages[:first])[1]) if first else 0
        return Example(text, marked[before:], "")
    answers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    return Example(text, [_answer(messages, i, text, template) for i in answers], "", trims=True)


def _answer(messages: Sequence[Message], i: int, text: str, template: Template) -> Span:
    """Return the span of message i, with what the template writes behind it. Raises ValueError."""
    before = template.render(messages[:i])
    until = text if i + 1 == len(messages) else template.render(messages[: i + 1], is_asked=False)
    if not (until.startswith(before) and text.startswith(until)):
        raise ValueError(
            f"the chat template of {template.origin} writes messages otherwise once others follow (messages[{i}] and "
            "those before it are not how the text begins), so what the assistant says cannot be told; use one with "
            "{% generation %} around that (data.chat_template), data.loss_on=completion, or all"
        )
    said = until[len(before) :].lstrip()
    is_headed = not said.startswith(messages[i]["content"].strip())
    if is_headed and before == template.render(messages[:i], is_asked=False):
        raise ValueError(
            f"the chat template of {template.origin} knows no add_generation_prompt, so where messages[{i}] of the "
            "assistant begins cannot be told; use one with {% generation %} around that (data.chat_template), or "
            "data.loss_on=all"
        )
    return len(before), len(until)
