"""Rows of a JSONL file that an option or a key names, each with its place for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanotrain_jax.config.values import naming

MAX_SHOWN = 60  # characters of a row in an error message


class Row(NamedTuple):
    """A line. place: file and line; shown: its first characters; content: its object, None if it is none."""

    place: str
    shown: str
    content: dict[str, Any] | None


def read(path: str | Path, key: str, kinds: str) -> Iterator[Row]:
    """Yield the lines of a file that are not blank. key: the option or key that names it; kinds: of rows, for messages.

    Raises ValueError, also of half a surrogate pair, or OSError.
    """
    named = f"{key}={str(path)!r}"
    try:
        with naming(f"{named} cannot be read", f"give a file with rows of {kinds}"):
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # other line ends may be inside of JSON
    except UnicodeDecodeError:
        raise ValueError(f"{named} is not UTF-8 text; give a file of JSON lines") from None
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{named} is empty; write rows of {kinds}")
    for number, line in rows:
        place = f"{path}:{number}"
        yield Row(place, repr(line[:MAX_SHOWN]), _content(place, line))


def _content(place: str, line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: half of a surrogate pair (\\ud800 to \\udfff) is no text; mend the line") from None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
