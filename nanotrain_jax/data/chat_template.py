"""Chat templates: conversations as the text that a model is trained on (Jinja, as in Hugging Face model folders).

Generation and training render with this file. Templates come with models from strangers: they run sandboxed, in a
process of little memory and time (render.py), and can change nothing. `{% generation %} ... {% endgeneration %}` in a
template marks what the assistant says.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock
from typing import Any, NamedTuple

from nanotrain_jax.data import render
from nanotrain_jax.data.render import BEGIN, END
from nanotrain_jax.data.tokenizer import CHAT_TEMPLATE, NAMES_END, parse_json

OF_TRAINING = datetime(2024, 7, 26)  # for strftime_now: data are the same on every day
Message = Mapping[str, Any]  # role, content
Span = tuple[int, int]  # characters of a text: first, last + 1


class Template(NamedTuple):
    """A chat template.

    tokens: names of special tokens, as templates call them (bos_token), with their text. origin: for messages. date:
    what strftime_now tells; None: today's.
    """

    source: str
    tokens: Mapping[str, str]
    origin: str
    date: datetime | None = None

    @property
    def marks_answers(self) -> bool:
        """True if `{% generation %}` marks what the assistant says."""
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def render(self, messages: Sequence[Message], is_asked: bool = True) -> str:
        """Return the text of a conversation. is_asked: up to where the next answer begins. Raises ValueError."""
        return self.marked(messages, is_asked)[0]

    def marked(self, messages: Sequence[Message], is_asked: bool = False) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans that `{% generation %}` marks. Raises ValueError."""
        variables = {"tools": None, **self.tokens, "messages": messages, "add_generation_prompt": is_asked}
        date = (self.date or datetime.now()).isoformat()
        answer = RENDERER.ask({"source": self.source, "variables": variables, "date": date})
        if "damaged" in answer:
            raise ValueError(f"the chat template of {self.origin} is damaged ({answer['damaged']}); mend it")
        if "refused" in answer:
            raise ValueError(f"the chat template of {self.origin} refuses the conversation: {answer['refused']}")
        return _spans(answer["text"])


def of_folder(folder: Path) -> Template:
    """Return the chat template of a run or model folder. Raises ValueError if it has none, or OSError."""
    names = [name for name in (CHAT_TEMPLATE, NAMES_END) if (folder / name).is_file()]
    found = of_files(
        {name: (folder / name).read_text(encoding="utf-8", errors="replace") for name in names}, str(folder)
    )
    if found is None:
        raise ValueError(
            f"{folder} has no chat template ({CHAT_TEMPLATE}, or chat_template in {NAMES_END}): it was not trained "
            "on conversations, or its tokenizer files are not all here; use --prompt"
        )
    return found


def of_files(files: Mapping[str, str], origin: str) -> Template | None:
    """Return the chat template of the files of a tokenizer, name -> text; None if they have none. Raises ValueError."""
    config = parse_json(files, NAMES_END, origin)
    source = config.get("chat_template")
    if isinstance(source, list):  # several, with names
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    source = files.get(CHAT_TEMPLATE, source)
    if not isinstance(source, str):
        return None
    tokens = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    return Template(source, {name: text for name, text in tokens.items() if text is not None}, origin)


class Renderer:
    """A process that renders templates (render.py), started with the first and again after one that ended it."""

    def __init__(self, megabytes: int = 1024, seconds: int = 10, longest: int = 2**24):
        """Limits of a request: memory, CPU time, characters of the text."""
        self.limits, self.seconds, self.process, self.lock = (megabytes, seconds, longest), seconds, None, Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Return the answer to a request: `text`, or why there is none, `damaged` or `refused`."""
        with self.lock:
            process, self.process = self.process, None  # what an interrupt leaves without an answer is not used again
            if process is None or process.poll() is not None:
                command = [sys.executable, "-P", render.__file__, *map(str, self.limits)]
                process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request, default=str) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line.endswith("\n"):
                code = process.wait()
                is_late = code == -signal.SIGPROF
                late, ended = f"it takes more than {self.seconds} s", f"it ended its process (exit code {code})"
                return {"refused": late if is_late else ended}
            self.process = process
            return json.loads(line)


RENDERER = Renderer()


def _spans(text: str) -> tuple[str, list[Span]]:
    """Return a text without its marks, and the spans between them."""
    pieces, spans, length, start = [], [], 0, 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            start = length
        elif piece == END:
            spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans


def _text(token: Any) -> str | None:
    """Return the text of a special token: a string, or an object with it as `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
