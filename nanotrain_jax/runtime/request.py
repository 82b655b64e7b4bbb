"""What the user asks for: one YAML file plus `section.key=value` overrides -> Config; and --help.

Every error is a ValueError of one line that names the value, the rule and the remedy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from nanotrain_jax.config import Config


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides (values are YAML), validate.

    Raises ValueError (one line: value, rule, remedy) or OSError if the file cannot be read.
    """
    path = Path(path)
    config = parse(read(path, overrides))
    run = Path(config.logging.dir or f"runs/{path.stem}").expanduser()
    config = config.replace("logging", dir=str(run))
    return config.replace("checkpoint", dir=str(Path(config.checkpoint.dir or run / "checkpoints").expanduser()))


def read(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a YAML file and overrides ask for, as plain nested data; not validated. Raises ValueError or OSError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); give a YAML file") from None
    tree = _yaml(text, str(path)) or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: a config is a mapping of sections, not a {type(tree).__name__}")
    return nested(overrides, tree)


def nested(overrides: Sequence[str], tree: dict[str, Any] | None = None) -> dict[str, Any]:
    """tree (or an empty one) with `section.key=value` overrides in it. Raises ValueError."""
    tree = {} if tree is None else tree
    for override in overrides:
        _apply(tree, override)
    return tree


def parse(tree: Mapping[str, Any]) -> Config:
    """Validate plain nested data. Raises ValueError (one line: value, rule, remedy)."""
    try:
        # A section left empty in YAML (`train:`) is None: all defaults.
        return Config.model_validate({k: {} if v is None else v for k, v in tree.items()})
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def describe() -> str:
    """Every section and key with its default and meaning, as text for --help."""
    lines = []
    for section, field in Config.model_fields.items():
        lines.append(f"{section}:")
        for name, key in field.annotation.model_fields.items():
            default = key.default if not isinstance(key.default, tuple) else list(key.default)
            default = yaml.safe_dump(default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
            choices = [c for c in get_args(key.annotation) if isinstance(c, str)]
            lines.append(f"  {key.alias or name:<15} {default:<12} {key.description}")
            if choices:
                lines.append(f"  {'':<15} {'':<12} one of: {', '.join(choices)}")
    return "\n".join(lines)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string, where people mean the number; PyYAML lets the last of two equal keys win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} stands twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"override {override!r} is not of the form section.key=value; write e.g. train.steps=100")
    *sections, last = key.strip().split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[last] = _yaml(value, override)


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key, more = ".".join(map(str, first["loc"])), error.error_count() - 1
    if first["type"] == "extra_forbidden":
        text = f"unknown key {key}{_suggest(key)}"
    elif first["type"] == "value_error":
        text = str(first["ctx"]["error"])
    else:
        text = f"{key}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return text + (f" (and {more} more)" if more else "")


def _suggest(key: str) -> str:
    known = [
        f"{s}.{k.alias or n}" for s, f in Config.model_fields.items() for n, k in f.annotation.model_fields.items()
    ]
    same_leaf = [k for k in known if k.split(".")[1] == key.split(".")[-1]]
    near = same_leaf or difflib.get_close_matches(key, known + list(Config.model_fields), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; --help lists every key"
