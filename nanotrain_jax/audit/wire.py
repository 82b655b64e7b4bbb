"""Collectives of a compiled program: the bytes that a device sends, over which mesh axes, and what they wait for.

The text is that of audit/hlo.py. Wire bytes are those of a ring of N devices, S the full buffer:

    all_gather, reduce_scatter, all_to_all   (N-1)/N S
    all_reduce                               2 (N-1)/N S
    permute                                  S

XLA:CPU sends 16-bit values as float32: audit the bytes of 16-bit programs on the GPU compile (audit/topology.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from nanotrain_jax.audit import hlo, matmuls

COMPUTES = {"fusion", "custom-call", "dot", "convolution", "while", "conditional", "call"}


class Collective(NamedTuple):
    """One collective instruction."""

    operation: str  # all_gather, all_reduce, reduce_scatter, all_to_all, permute
    axes: tuple[str, ...]  # the mesh axes it communicates over
    bytes: float  # on the wire, per device and execution
    count: hlo.Number  # executions in one run of the program
    exposed: bool  # no compute is scheduled between its start and its done
    flops: float  # of the matmuls between them, per execution
    source: str  # its op_name in the traced program


def collectives(text: str, axes: Mapping[str, int], rates: hlo.Rates = hlo.NO_RATES) -> list[Collective]:
    """Return every collective of a compiled program. axes: mesh axis -> size, in mesh order (`mesh.shape`).

    Raises ValueError if a replica group does not span mesh axes.
    """
    program, found = hlo.parse(text), []
    for name, index, count in hlo.walk(program, rates):
        block = program.computations[name]
        i = block[index]
        operation = hlo.OPERATIONS.get(i.opcode.removesuffix("-start"))
        if not operation or not count:
            continue
        types = {other.name: other.type for other in block}
        over = _axes(i.attributes, axes)
        if not over:
            continue  # groups of one device: no communication
        group = math.prod(axes[a] for a in over)
        sent = sum(hlo.size(types[operand]) for operand in i.operands[: 1 if "ragged" in i.opcode else None])
        factor = {
            "all_gather": group - 1,  # of the input shard
            "all_reduce": 2 * (group - 1) / group,
            "reduce_scatter": (group - 1) / group,
            "all_to_all": (group - 1) / group,
            "permute": 1,
        }[operation]
        between = overlapped(program, name, index)
        exposed = not any(program.computations[c][k].opcode in COMPUTES for c, k in between)
        flops = sum(matmuls.flops_inside(program, c, k) for c, k in between)
        found.append(Collective(operation, over, sent * factor, count, exposed, flops, hlo.op_name(i)))
    return found


def overlapped(program: hlo.Program, name: str, index: int) -> list[tuple[str, int]]:
    """Return (computation, index) of the instructions scheduled between the start of a collective or copy and its
    done."""
    block = program.computations[name]
    start = block[index]
    if not start.opcode.endswith("-start"):
        wrapper = _wrapper(program, name)
        return overlapped(program, *wrapper) if wrapper else []
    if '"is_sync":true' in start.attributes:
        return []
    dones = (k for k, i in enumerate(block) if i.opcode.endswith("-done") and start.name in i.operands)
    done = next(dones, len(block))  # the end of the loop's body: its done is in the next iteration
    return [(name, k) for k in range(index + 1, done)]


def _wrapper(program: hlo.Program, name: str) -> tuple[str, int] | None:
    """Return (computation, index) of the async-start that runs a computation, or None."""
    starts = (
        (outer, k)
        for outer, block in program.computations.items()
        for k, i in enumerate(block)
        if i.opcode == "async-start" and name in hlo.CALLED.findall(i.attributes)
    )
    return next(starts, None)


def _axes(attributes: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes that a replica group spans, from any of the three forms in which XLA prints groups."""
    named = re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", attributes)
    if named:
        return tuple(a for a in re.findall(r"'(\w+)'", named[1]) if axes[a] > 1)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(.*?)\}\}", attributes)
    if iota:
        groups, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        groups = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(groups)
    elif listed:
        groups = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)", listed[0] + "}")]
    else:  # all devices
        groups = [list(range(math.prod(axes.values())))]
    sizes = tuple(axes.values())
    places = [np.stack(np.unravel_index(np.asarray(group), sizes)) for group in groups]
    differ = np.any([(p != p[:, :1]).any(axis=1) for p in places], axis=0)
    over = tuple(a for a, d in zip(axes, differ, strict=True) if d)
    if "source_target_pairs" not in attributes and any(
        len(group) != math.prod(axes[a] for a in over) for group in groups
    ):
        raise ValueError(f"replica group {list(map(int, groups[0]))}: must span whole axes of the mesh {dict(axes)}")
    return over


def summary(found: list[Collective]) -> list[dict[str, Any]]:
    """Return the collectives grouped by axes and operation: count and bytes over all executions, most bytes first.

    largest_bytes: of the largest single collective.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for c in found:
        row = rows.setdefault(
            (c.axes, c.operation),
            {"axis": ",".join(c.axes), "op": c.operation, "bytes_per_device": 0.0, "count": 0}
            | {"exposed_bytes": 0.0, "behind_matmuls_bytes": 0.0, "largest_bytes": 0.0},
        )
        row["count"] += c.count
        row["bytes_per_device"] += c.count * c.bytes
        row["exposed_bytes"] += c.count * c.bytes * c.exposed
        row["behind_matmuls_bytes"] += c.count * c.bytes * (c.flops > 0)
        row["largest_bytes"] = max(row["largest_bytes"], c.bytes)
    for row in rows.values():
        row["count"] = int(row["count"]) if row["count"] == int(row["count"]) else float(row["count"])
    return sorted(rows.values(), key=lambda row: -row["bytes_per_device"])
