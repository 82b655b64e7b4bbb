"""What a compiled program copies between host and device memory, read from its text (see audit/hlo.py).

XLA:GPU marks what rests on the host by `S(5)` in its layout; a CPU has one memory, and its programs show nothing.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from nanotrain_jax.audit import hlo

ON_HOST = re.compile(r"\{[\d,]*:[^{}]*S\(5\)[^{}]*\}")
STARTS = {"copy-start", "fusion-start", "async-start"}
OTHERS = {"copy", "fusion", "dynamic-slice", "dynamic-update-slice"}  # if they are not asynchronous


class Copy(NamedTuple):
    """One instruction that copies between host and device."""

    to: str  # device or host
    bytes: int  # each time
    count: hlo.Number  # executions in one run of the program
    flops: float  # of the matmuls between its start and its done, each time
    both_ways: bool  # a copy the other way is on its way meanwhile
    source: str  # where in the traced program it comes from


def copies(text: str, turns: hlo.Turns = hlo.NO_TURNS) -> list[Copy]:
    """Every copy between host and device. Raises ValueError if one is in a loop with an unknown number of turns."""
    program = hlo.parse(text)
    instructions = [i for block in program.computations.values() for i in block]
    wrapped = [i for i in instructions if i.opcode.startswith(("fusion", "async"))]
    inside = {name for i in wrapped for name in hlo.CALLED.findall(i.attributes)}
    blocks = {name: _of_block(block) for name, block in program.computations.items() if name not in inside}
    found = []
    for name, index, times in hlo.walk(program, turns):
        copy = blocks.get(name, {}).get(index)
        if copy and times:
            to, size, done = copy
            flops = sum(hlo.flops_inside(program, *place) for place in hlo.meanwhile(program, name, index))
            others = ((start, end) for start, (way, _, end) in blocks[name].items() if way != to)
            both_ways = any(start < done and index < end for start, end in others)
            source = (re.search(r'op_name="([^"]*)"', program.computations[name][index].attributes) or ["", ""])[1]
            found.append(Copy(to, size, times, flops, both_ways, source))
    return found


def _of_block(block: list[hlo.Instruction]) -> dict[int, tuple[str, int, int]]:
    """Index of a copy -> (to, bytes, index of its done)."""
    types, found = {i.name: i.type for i in block}, {}
    for index, i in enumerate(block):
        if i.opcode not in STARTS | OTHERS:
            continue
        inputs = [types[operand] for operand in i.operands]
        result = _parts(i.type)[0 if i.opcode == "copy-start" else 1] if i.opcode in STARTS else i.type
        near = [kind for kind in inputs if not ON_HOST.search(kind)]
        if not ON_HOST.search(result):
            to, size = "device", hlo.size(result) if len(near) < len(inputs) else 0
        else:  # all of it, or the piece that is put into what is there already
            sizes = [hlo.size(kind) for kind in near]
            to, size = "host", max(sizes, default=0) if len(near) < len(inputs) else hlo.size(result)
        if size:
            ends = (k for k, other in enumerate(block) if other.opcode.endswith("-done") and i.name in other.operands)
            found[index] = to, size, next(ends, len(block)) if i.opcode in STARTS else index
    return found


def summary(found: list[Copy]) -> list[dict[str, Any]]:
    """Copies put together by direction: count and bytes over all executions; of these, those behind matmuls, and those
    during which a copy goes the other way."""
    rows: dict[str, dict[str, Any]] = {}
    for c in found:
        zeros = dict.fromkeys(("bytes_per_device", "count", "behind_matmuls_bytes", "both_ways_bytes"), 0.0)
        row, size = rows.setdefault(c.to, {"to": c.to} | zeros), float(c.count * c.bytes)
        row["bytes_per_device"] += size
        row["count"] += float(c.count)
        row["behind_matmuls_bytes"] += size * (c.flops > 0)
        row["both_ways_bytes"] += size * c.both_ways
    return sorted(rows.values(), key=lambda row: row["to"])


def _parts(kind: str) -> list[str]:
    """The elements of a tuple type."""
    found, depth, here = [], 0, ""
    for letter in kind[1:-1]:
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            found, here = [*found, here], ""
        else:
            here += letter
    return [*found, here]
