"""What the user asks for: one YAML file plus `section.key=value` overrides -> Config; and --help.

Every error is a ValueError of one line that names the value, the rule and the remedy; `refuse` prints it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from nanotrain_jax.config import Config
from nanotrain_jax.fields import expanded, retold

MOST_BYTES = 1 << 18  # of a config file
BRIEF = reprlib.Repr()  # of values in messages
BRIEF.maxlevel = 2
BRIEF.maxstring = BRIEF.maxother = BRIEF.maxlong = 120
CONFIGS = Path(__file__).parents[2] / "configs"  # of this repository, where it is installed from one


class Parser(argparse.ArgumentParser):
    """A command's arguments: what is wrong with them is one line on stderr, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, one_line(f"error: {message}; --help tells more") + "\n")


def path_argument(text: str) -> str:
    """The path that an argument gives, for `type=`; `~` is the home directory. Raises ArgumentTypeError."""
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def refuse(error: Exception) -> int:
    """Print what is wrong with a request in one line on stderr; -> exit code 2."""
    print(f"error: {one_line(str(error))}", file=sys.stderr)
    return 2


def one_line(text: str) -> str:
    """Text without line breaks, and without the middle of what is very long; control characters, which a terminal would
    obey, as escapes."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) < 2000 else f"{line[:1000]} ... {line[-900:]}"


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides (values are YAML), validate.

    Raises ValueError (one line: value, rule, remedy) or OSError if the file cannot be read.
    """
    config = parse(read(path, overrides))
    run = Path(config.logging.dir or f"runs/{Path(path).stem}")
    config = config.replace("logging", dir=str(run))
    return config.replace("checkpoint", dir=str(Path(config.checkpoint.dir or run / "checkpoints")))


def read(path: str | Path, overrides: Sequence[str] = (), option: str = "--config") -> dict[str, Any]:
    """What a YAML file and overrides ask for, as plain nested data; not validated. Raises ValueError or OSError.

    option: which gave the path, for messages.

    Sections that begin with _ are left out: they hold what others merge (`_base: &base {...}`, `<<: *base`).
    """
    path = Path(expanded(str(path)))
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"{path} is larger than {MOST_BYTES} bytes, which no config is; give a YAML file")
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); give a YAML file") from None
    except OSError as error:
        remedy = _another_config(path) if option == "--config" else "give a YAML file"
        raise retold(error, f"{option} {path} cannot be read ({error.strerror}); {remedy}") from None
    tree = _yaml(text, str(path)) or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{option} {path} is a {type(tree).__name__}; write a mapping")
    return nested(overrides, {key: part for key, part in tree.items() if not str(key).startswith("_")})


def _another_config(path: Path) -> str:
    names = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
    if not names:
        return "give a YAML file"
    folder = CONFIGS.relative_to(Path.cwd()) if CONFIGS.is_relative_to(Path.cwd()) else CONFIGS
    near = difflib.get_close_matches(path.stem, names, n=1)
    return f"did you mean {folder / near[0]}.yaml?" if near else f"give a YAML file; {folder} has {', '.join(names)}"


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
            lines += _described(name, key)
    return "\n".join(lines)


def _described(name: str, key: FieldInfo) -> list[str]:
    default = key.default if not isinstance(key.default, tuple) else list(key.default)
    default = yaml.safe_dump(default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    line = f"  {key.alias or name:<15} {default:<12} {key.description}"
    choices = [c for c in get_args(key.annotation) if isinstance(c, str)]
    return [line, f"  {'':<15} {'':<12} one of: {', '.join(choices)}"] if choices else [line]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string, where people mean the number; PyYAML lets the last of two equal keys win."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        for key, count in keys.items():
            if count > 1:
                raise yaml.YAMLError(f"key {key!r} stands twice")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put merged mappings (`<<: *base`) in. Each key stays once: else what is merged could grow without end."""
        super().flatten_mapping(node)
        node.value = list({str(key.value): (key, value) for key, value in node.value}.values())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # PyYAML lets what its constructors raise through: `!!int foo`, `!!timestamp x`, 5,000 digits
            problem = f"{_shown(node.value)} is no {node.tag.removeprefix('tag:yaml.org,2002:')}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError:
        raise ValueError(f"{where}: not valid YAML: nested too deeply; a config has sections of keys") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {one_line(str(error))}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(
            f"override {_shown(override)} is not of the form section.key=value; write e.g. train.steps=100"
        )
    *sections, last = key.strip().split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[last] = _yaml(value, _shown(override)[1:-1])


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    place, kind, more = first["loc"], first["type"], error.error_count() - 1
    key, value = ".".join(map(str, place)), _shown(first["input"])
    if kind == "extra_forbidden":
        text = f"unknown key {_shown(key)[1:-1]}{_suggest(key)}"
    elif kind == "value_error":  # of a validator: of one key, or of a section, which names its keys itself
        reason = str(first["ctx"]["error"])
        text = f"{key}={value}: {reason}" if len(place) > 1 else reason
    elif kind == "invalid_key":
        text = f"key {value} is not a word; --help lists every key"
    elif kind == "model_type":
        text = f"{key}={value}: {key} is a section of keys; write {key}.KEY=VALUE, --help lists every key"
    else:
        text = f"{key}={value}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return text + (f" (and {more} more)" if more else "")


def _shown(value: Any) -> str:
    """repr of a value, shortened."""
    try:
        return BRIEF.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def _suggest(key: str) -> str:
    known = [
        f"{s}.{k.alias or n}" for s, f in Config.model_fields.items() for n, k in f.annotation.model_fields.items()
    ]
    same_leaf = [k for k in known if k.split(".")[1] == key.split(".")[-1]]
    near = same_leaf or difflib.get_close_matches(key, known + list(Config.model_fields), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; --help lists every key"
