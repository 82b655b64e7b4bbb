"""Chat templates: conversations as the text that a model is trained on (Jinja, as in Hugging Face model folders).

Generation and training render with this file. Templates come with models from strangers: they run sandboxed, and can
change nothing. `{% generation %} ... {% endgeneration %}` in a template marks what the assistant says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanotrain_jax.data.tokenizer import CHAT_TEMPLATE, NAMES_END, parse_json

BEGIN, END = "\ufdd0", "\ufdd1"  # around what is marked; Unicode has no characters there, so no text has them
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
        date = self.date or datetime.now()
        variables = {"tools": None, "strftime_now": date.strftime, **self.tokens}
        try:
            text = _compiled(self.source).render(messages=messages, add_generation_prompt=is_asked, **variables)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self.origin} is damaged ({error}); mend it") from None
        except Exception as error:  # templates raise anything
            raise ValueError(f"the chat template of {self.origin} refuses the conversation: {error}") from None
        return _spans(text)


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


class _Generation(Extension):
    """`{% generation %}`: renders what is in it, between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _as_json
    environment.globals |= {"raise_exception": _refuse}
    return environment.from_string(source)


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


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
