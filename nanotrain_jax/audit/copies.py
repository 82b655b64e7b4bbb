"""Copies between host and device memory in a compiled program, parsed from its HLO text (see audit/hlo.py).

XLA:GPU marks arrays in host memory by `S(5)` in their layout. A CPU has one memory: its programs show no copies.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from nanotrain_jax.audit import hlo, matmuls, wire

ON_HOST = re.compile(r"\{[\d,]*:[^{}]*S\(5\)[^{}]*\}")
STARTS = {"copy-start", "fusion-start", "async-start"}
SYNCHRONOUS = {"copy", "fusion", "dynamic-slice", "dynamic-update-slice"}


class Copy(NamedTuple):
    """One instruction that copies between host and device."""

    to: str  # device or host
    bytes: int  # per execution
    count: hlo.Number  # executions in one run of the program
    flops: float  # of the matmuls between its start and its done, per execution
    both_ways: bool  # overlaps with a copy in the other direction
    source: str  # its op_name in the traced program


def copies(text: str, rates: hlo.Rates = hlo.NO_RATES) -> list[Copy]:
    """Return every copy between host and device. Raises ValueError if a loop that matters has no known trip count."""
    program = hlo.parse(text)
    instructions = [i for block in program.computations.values() for i in block]
    wrapped = [i for i in instructions if i.opcode.startswith(("fusion", "async"))]
    inside = {name for i in wrapped for name in hlo.CALLED.findall(i.attributes)}
    blocks = {name: _of_block(block) for name, block in program.computations.items() if name not in inside}
    found = []
    for name, index, count in hlo.walk(program, rates):
        copy = blocks.get(name, {}).get(index)
        if copy and count:
            to, size, done = copy
            flops = sum(matmuls.flops_inside(program, *place) for place in wire.overlapped(program, name, index))
            opposite = ((start, end) for start, (other, _, end) in blocks[name].items() if other != to)
            both_ways = any(start < done and index < end for start, end in opposite)
            source = hlo.op_name(program.computations[name][index])
            found.append(Copy(to, size, count, flops, both_ways, source))
    return found


def _of_block(block: list[hlo.Instruction]) -> dict[int, tuple[str, int, int]]:
    """Return index of a copy -> (to, bytes, index of its done)."""
    types, found = {i.name: i.type for i in block}, {}
    for index, i in enumerate(block):
        if i.opcode not in STARTS | SYNCHRONOUS:
            continue
        inputs = [types[operand] for operand in i.operands]
        result = _elements(i.type)[0 if i.opcode == "copy-start" else 1] if i.opcode in STARTS else i.type
        on_device = [kind for kind in inputs if not ON_HOST.search(kind)]
        if not ON_HOST.search(result):
            to, size = "device", hlo.size(result) if len(on_device) < len(inputs) else 0
        else:  # the full array, or the slice that updates an array in host memory
            sizes = [hlo.size(kind) for kind in on_device]
            to, size = "host", max(sizes, default=0) if len(on_device) < len(inputs) else hlo.size(result)
        if size:
            ends = (k for k, other in enumerate(block) if other.opcode.endswith("-done") and i.name in other.operands)
            found[index] = to, size, next(ends, len(block)) if i.opcode in STARTS else index
    return found


def summary(found: list[Copy]) -> list[dict[str, Any]]:
    """Return the copies grouped by direction: count and bytes over all executions, bytes hidden behind matmuls, and
    bytes that overlap with a copy in the other direction."""
    rows: dict[str, dict[str, Any]] = {}
    for c in found:
        zeros = dict.fromkeys(("bytes_per_device", "count", "behind_matmuls_bytes", "both_ways_bytes"), 0.0)
        row, size = rows.setdefault(c.to, {"to": c.to} | zeros), float(c.count * c.bytes)
        row["bytes_per_device"] += size
        row["count"] += float(c.count)
        row["behind_matmuls_bytes"] += size * (c.flops > 0)
        row["both_ways_bytes"] += size * c.both_ways
    return sorted(rows.values(), key=lambda row: row["to"])


def _elements(kind: str) -> list[str]:
    """Return the element types of a tuple type."""
    elements, depth, current = [], 0, ""
    for letter in kind[1:-1]:
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            elements, current = [*elements, current], ""
        else:
            current += letter
    return [*elements, current]
