"""Read a config: one YAML file plus `section.key=value` overrides -> Config; and the text of --help.

Every error is a one-line ValueError with the value, the rule and the remedy; `refuse` prints it.
"""

import argparse
import difflib
import json
import math
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from nanotrain_jax.config.mixture import TAGS
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import expanded, with_message

MAX_BYTES = 1 << 18  # of a config file
BRIEF = reprlib.Repr()  # shortens values in messages
BRIEF.maxlevel = 2
BRIEF.maxstring = BRIEF.maxother = BRIEF.maxlong = 120
PACKAGE = Path(__file__).parents[1]
# The folder of example configs: installed inside the package, in a checkout beside it.
CONFIGS = next((folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()), PACKAGE)


class Parser(argparse.ArgumentParser):
    """Argument parser of the commands: a wrong argument gives one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, one_line(f"error: {message}; see --help") + "\n")


def path_argument(text: str) -> str:
    """Expand `~` in a path argument (for `type=`). Raises ArgumentTypeError."""
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def folder_argument(text: str) -> Path:
    """Expand `~` in a path argument (for `type=`). Raises ArgumentTypeError."""
    return Path(path_argument(text))


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return an argument type (for `type=`): a number of at least `least`. It raises ArgumentTypeError."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < 1 << 31:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number from {least} to {(1 << 31) - 1}")
        return value

    return number


def path_override(key: str, path: Path) -> str:
    """Return `section.key=path` as an override: quoted, so that no character of the path has a meaning in YAML."""
    return f"{key}={json.dumps(str(path))}"


def refuse(error: Exception) -> int:
    """Print an error in one line on stderr; -> exit code 2."""
    print(f"error: {one_line(str(error))}", file=sys.stderr)
    return 2


def one_line(text: str) -> str:
    """Return text without line breaks, control characters as escapes; above 2,000 characters the middle is elided."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) < 2000 else f"{line[:1000]} ... {line[-900:]}"


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a YAML file, apply `section.key=value` overrides (values are YAML) and validate.

    Raises ValueError (one line: value, rule, remedy), or OSError if the file cannot be read.
    """
    return finish(read(path, overrides), path)


def finish(tree: Mapping[str, Any], path: str | Path) -> Config:
    """Validate the tree of a config, and fill in the folders of its run. path: of its file. Raises ValueError."""
    config = parse(tree)
    run = Path(config.logging.dir or f"runs/{Path(path).stem}")
    config = config.replace("logging", dir=str(run))
    return config.replace("checkpoint", dir=str(Path(config.checkpoint.dir or run / "checkpoints")))


def read(path: str | Path, overrides: Sequence[str] = (), option: str = "--config") -> dict[str, Any]:
    """Read a YAML file and overrides as plain nested data, not validated. Raises ValueError or OSError.

    path: a file, or where there is none the name of an example config: quickstart, or configs/quickstart.yaml.
    option: the command-line option that gave the path, for messages.

    Sections that begin with _ are dropped: they are templates for YAML merges (`_base: &base {...}`, `<<: *base`).
    """
    path = Path(expanded(str(path)))
    try:
        with open(_found(path), "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"{path}: a config must be at most {MAX_BYTES} bytes; give a YAML file")
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); give a YAML file") from None
    except OSError as error:
        remedy = _another_config(path) if option == "--config" else "give a YAML file"
        raise with_message(error, f"{option} {path} cannot be read ({error.strerror}); {remedy}") from None
    tree = _yaml(text, str(path)) or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{option} {path} is a {type(tree).__name__}; write a mapping")
    return nested(overrides, {key: section for key, section in tree.items() if not str(key).startswith("_")})


def _found(path: Path) -> Path:
    """Return path, or the example config of that name where there is no such file."""
    example = CONFIGS / f"{path.stem}.yaml"
    names = {path.stem, example.name, f"configs/{example.name}"}
    return example if not path.exists() and path.as_posix() in names and example.is_file() else path


def _another_config(path: Path) -> str:
    """Return the remedy for a missing config: the closest name in configs/, or all of them."""
    names = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
    if not names:
        return "give a YAML file"
    folder = CONFIGS.relative_to(Path.cwd()) if CONFIGS.is_relative_to(Path.cwd()) else CONFIGS
    closest = difflib.get_close_matches(path.stem, names, n=1)
    if closest:
        return f"did you mean {folder / closest[0]}.yaml?"
    return f"give a YAML file; {folder} has {', '.join(names)}"


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data as section.key -> value."""
    found: dict[str, Any] = {}
    for name, keys in tree.items():
        section = keys if isinstance(keys, dict) else {}
        found |= {f"{name}.{key}": value for key, value in section.items()}
    return found


def nested(overrides: Sequence[str], tree: dict[str, Any] | None = None) -> dict[str, Any]:
    """Apply `section.key=value` overrides to a tree (default: an empty one). Raises ValueError."""
    tree = _with_sections({} if tree is None else tree)
    for override in overrides:
        _apply(tree, override)
        tree = _with_sections(tree)
    return tree


def _with_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with `parallel: auto` written as a section."""
    return {name: {"auto": True} if (name, keys) == ("parallel", "auto") else keys for name, keys in tree.items()}


def parse(tree: Mapping[str, Any]) -> Config:
    """Validate plain nested data. Raises ValueError (one line: value, rule, remedy)."""
    try:
        # An empty section in YAML (`train:`) is None: use the defaults. `vision: null` is no section.
        empty = {k: {} for k, v in tree.items() if v is None and not is_optional(k)}
        return Config.model_validate(_with_sections(tree) | empty)
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def is_optional(section: str) -> bool:
    """True if a config may have no such section."""
    return section in Config.model_fields and Config.model_fields[section].default is None


def describe() -> str:
    """Return every section and key with default, description and choices, one line per key, for --help."""
    lines = []
    for section, keys in Config.sections().items():
        lines.append(f"{section}:")
        for name, key in keys.model_fields.items():
            lines.append(_describe_key(name, key))
    return "\n".join(lines)


def _describe_key(name: str, key: FieldInfo) -> str:
    default = key.default if not isinstance(key.default, tuple) else list(key.default)
    default = yaml.safe_dump(default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    choices = [choice for choice in get_args(key.annotation) if isinstance(choice, str)]
    listed = f" ({' | '.join(choices)})" if len(choices) > 1 else ""
    return f"  {key.alias or name:<19} {default:<14} {key.description}{listed}"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number (YAML 1.1: a string) and rejects duplicate keys (PyYAML: last wins)."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        for key, count in keys.items():
            if count > 1:
                raise yaml.YAMLError(f"key {key!r} is given twice")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Expand merged mappings (`<<: *base`), keeping each key once: repeated merges would grow exponentially."""
        super().flatten_mapping(node)
        node.value = list({str(key.value): (key, value) for key, value in node.value}.values())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # PyYAML's constructors raise anything: `!!int foo`, `!!timestamp x`, 5,000 digits
            problem = f"{_shown(node.value)} is not a valid {node.tag.removeprefix('tag:yaml.org,2002:')}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _yaml(text: str, origin: str) -> Any:
    """Parse YAML text. origin: the file or override, for messages. Raises ValueError."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError:
        raise ValueError(f"{origin}: not valid YAML: nested too deeply; write section: {{key: value}}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{origin}: not valid YAML: {one_line(str(error))}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set the key of one override in a tree. Raises ValueError."""
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"override {_shown(override)} must be section.key=value; write e.g. train.steps=100")
    *sections, name = key.strip().split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[name] = _yaml(value, _shown(override)[1:-1])
    if value.count("#") > str(tree[name]).count("#"):
        raise ValueError(f"override {_shown(override)}: YAML reads a comment after #; quote the value: {key}='\"...\"'")


def _one_line(error: ValidationError) -> str:
    """Return the first validation error as `value: rule; remedy`, and the number of further ones."""
    first = error.errors()[0]
    place, kind, more = first["loc"], first["type"], error.error_count() - 1
    key, value = ".".join(str(part) for part in place if part not in TAGS), _shown(first["input"])
    if kind == "extra_forbidden":
        text = f"unknown key {_shown(key)[1:-1]}{_suggest(key)}"
    elif kind == "value_error":  # from a validator of one key, or of a section, whose message names the keys
        reason = str(first["ctx"]["error"])
        text = f"{key}={value}: {reason}" if len(place) > 1 else reason
    elif kind == "invalid_key":
        text = f"key {value} must be text; --help lists every key"
    elif kind == "model_type":
        text = f"{key}={value}: {key} is a section; write {key}.KEY=VALUE (--help lists every key)"
    else:
        text = f"{key}={value}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return text + (f" (and {more} more)" if more else "")


def _shown(value: Any) -> str:
    """Return the repr of a value, shortened."""
    try:
        return BRIEF.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "an integer of thousands of digits"


def _suggest(key: str) -> str:
    """Return the remedy for an unknown key: one of its section that is almost it, the key of the same name in another
    section, or the closest one."""
    known = [f"{s}.{k.alias or n}" for s, keys in Config.sections().items() for n, k in keys.model_fields.items()]
    same_leaf = [k for k in known if k.split(".")[1] == key.split(".")[-1]]
    beside = [k for k in known if k.split(".")[0] == key.split(".")[0]]
    closest = difflib.get_close_matches(key, beside, n=1, cutoff=0.9) or same_leaf
    closest = closest or difflib.get_close_matches(key, known + list(Config.model_fields), n=1, cutoff=0.5)
    return f"; did you mean {closest[0]}?" if closest else "; --help lists every key"
