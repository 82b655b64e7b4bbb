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
    exposed: bool  # nothing computes between its start and its done
    flops: float  # of the matmuls that do, each time
    source: str  # where in the traced program it comes from


def copies(text: str, turns: hlo.Turns = hlo.NO_TURNS) -> list[Copy]:
    """Every copy between host and device. Raises ValueError if one is in a loop with an unknown number of turns."""
    program, found = hlo.parse(text), []
    instructions = [i for block in program.computations.values() for i in block]
    inside = {
        c for i in instructions if i.opcode.startswith(("fusion", "async")) for c in hlo.CALLED.findall(i.attributes)
    }
    for name, index, times in hlo.walk(program, turns):
        block = program.computations[name]
        i = block[index]
        if i.opcode not in STARTS | OTHERS or not times or name in inside:
            continue
        types = {other.name: other.type for other in block}
        inputs = [types[operand] for operand in i.operands]
        result = _parts(i.type)[0 if i.opcode == "copy-start" else 1] if i.opcode in STARTS else i.type
        far = [bool(ON_HOST.search(kind)) for kind in inputs]
        if far.count(True) == 0 and not ON_HOST.search(result):
            continue
        if ON_HOST.search(result):  # all of it, or the piece that is put into what is there already
            into = [kind for kind, is_far in zip(inputs, far, strict=True) if is_far]
            pieces = [hlo.size(kind) for kind, is_far in zip(inputs, far, strict=True) if not is_far]
            to, moved = "host", max(pieces, default=0) if into else hlo.size(result)
        else:
            to, moved = "device", hlo.size(result)
        meanwhile = hlo.meanwhile(program, name, index)
        exposed = not any(program.computations[c][k].opcode in hlo.COMPUTES for c, k in meanwhile)
        flops = sum(hlo.flops_inside(program, c, k) for c, k in meanwhile)
        source = (re.search(r'op_name="([^"]*)"', i.attributes) or ["", ""])[1]
        found.append(Copy(to, moved, times, exposed, flops, source))
    return found


def summary(found: list[Copy]) -> list[dict[str, Any]]:
    """Copies put together by direction: count and bytes over all executions."""
    rows: dict[str, dict[str, Any]] = {}
    for c in found:
        zeros = {"to": c.to, "bytes_per_device": 0.0, "count": 0, "exposed_bytes": 0.0, "behind_matmuls_bytes": 0.0}
        row = rows.setdefault(c.to, zeros)
        row["bytes_per_device"] += float(c.count * c.bytes)
        row["count"] += float(c.count)
        row["exposed_bytes"] += float(c.count * c.bytes * c.exposed)
        row["behind_matmuls_bytes"] += float(c.count * c.bytes * (c.flops > 0))
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
