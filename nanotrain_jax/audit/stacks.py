"""Where the instructions of a compiled program were traced: stacks of source lines, parsed from its HLO text."""

from __future__ import annotations

import re
from typing import NamedTuple

from nanotrain_jax.audit.hlo import Instruction

ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
FIELD = re.compile(r"(\w+)=(\d+)")
STACK = re.compile(r"stack_frame_id=(\d+)")


class Frame(NamedTuple):
    """A line of source."""

    file: str
    line: int
    function: str  # with its outer ones: `Layer.__call__`


Stack = tuple[Frame, ...]  # innermost first


def stacks(text: str) -> dict[str, Stack]:
    """Return the stack of each stack_frame_id, innermost first, from the tables at the head of a compiled program."""
    tables: dict[str, dict[str, dict | str]] = {}
    for line in text[: text.index("\n%")].splitlines():
        row = ROW.match(line)
        if not row:
            table = tables.setdefault(line, {})
        else:
            table[row[1]] = row[2] if row[3] is None else dict(FIELD.findall(row[3]))
    found: dict[str, Stack] = {"0": ()}
    for name, row in tables.get("StackFrames", {}).items():
        at = tables["FileLocations"][row["file_location_id"]]
        file, function = tables["FileNames"][at["file_name_id"]], tables["FunctionNames"][at["function_name_id"]]
        outer = found[str(int(row["parent_frame_id"]) - 1)]
        found[name] = (Frame(file, int(at["line"]), function), *outer)
    return found


def of(i: Instruction, found: dict[str, Stack]) -> Stack:
    """Return the stack of an instruction; () if it has none. found: the result of `stacks`."""
    number = STACK.search(i.attributes)
    return found.get(number[1], ()) if number else ()
