"""Chat templates: conversations as the text that a model was trained on (Jinja, as in Hugging Face model folders).

Templates come with models from strangers: they run sandboxed, and can change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanotrain_jax.checkpoint.safetensors import read_json

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
Message = Mapping[str, str]  # role, content


class Template(NamedTuple):
    """A chat template. tokens: names of special tokens, as templates call them (bos_token), with their text."""

    source: str
    tokens: Mapping[str, str]
    origin: str

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, up to where the answer begins. Raises ValueError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            template = environment.from_string(self.source)
            return template.render(messages=messages, add_generation_prompt=True, tools=None, **self.tokens)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self.origin} is damaged ({error}); mend it") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template of {self.origin} refuses the conversation: {error}") from None


def of_folder(folder: Path) -> Template:
    """Return the chat template of a run or model folder. Raises ValueError if it has none, or OSError."""
    config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several, with names
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if (folder / TEMPLATE).is_file():
        source = (folder / TEMPLATE).read_text(encoding="utf-8")
    if not isinstance(source, str):
        raise ValueError(
            f"{folder} has no chat template ({TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}): it was not trained "
            "on conversations, or its tokenizer files are not all here; use --prompt"
        )
    tokens = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    return Template(source, {name: text for name, text in tokens.items() if text is not None}, str(folder))


def _text(token: Any) -> str | None:
    """Return the text of a special token: a string, or an object with it as `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
