"""Renders chat templates in a process of its own, whose memory and CPU time have limits; run by chat_template.py.

Templates come with models from strangers. Jinja's sandbox keeps them from Python and files, but not from asking for too
much (`'x' * 10 ** 10`, loops in loops): only the operating system counts what every operator, filter and method takes.
A line of JSON on stdin is a request, one on stdout the answer. This file imports none of ours: it starts fast.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"  # around what is marked; Unicode has no characters there, so no text has them
LONGEST_REASON = 500  # characters


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


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error)[:LONGEST_REASON].split())


def _answer(source: str, variables: dict[str, Any], date: str, longest: int) -> dict[str, str]:
    """Return the text of a template; or else how it is damaged, or why it refuses."""
    try:
        variables |= {"strftime_now": datetime.fromisoformat(date).strftime}
        text = _compiled(source).render(variables)
    except jinja2.TemplateSyntaxError as error:
        return {"damaged": _in_a_line(error)}
    except MemoryError:
        return {"refused": "it takes too much memory"}
    except Exception as error:  # templates raise anything
        return {"refused": _in_a_line(error)}
    if len(text) > longest:
        return {"refused": f"its text has {len(text):,} characters, of at most {longest:,}"}
    return {"text": text}


def main(megabytes: int, seconds: int, longest: int) -> None:
    """Answer requests until stdin ends. The system ends this process when a request takes more CPU time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends what asks
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20))
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(_answer(**request, longest=longest))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
