"""Collectives, matmul FLOPs and memory of a compiled program, parsed from its HLO text.

The text is `jax.jit(f).lower(...).compile().as_text()` of any JAX program on CPU or GPU. Instructions in a loop count
once per iteration. Wire bytes are those a device sends on a ring of N devices, S the full buffer:

    all_gather, reduce_scatter, all_to_all   (N-1)/N S
    all_reduce                               2 (N-1)/N S
    permute                                  S

A loop that runs at most once, from a `jax.named_scope("at_most_once_NAME")`, or as often as data need it, from
"as_needed_NAME", counts as rates[NAME] executions on average, by default one. So do the rows of a grouped matmul by a
kernel, traced in "as_needed_NAME": it multiplies those that groups have, of all in its buffer.

XLA:CPU sends 16-bit values as float32: audit the bytes of 16-bit programs on the GPU compile (audit/topology.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Number = int | Fraction
Rates = Mapping[str, Number]  # name of an at-most-once loop -> average executions
NO_RATES: Rates = {}


class Collective(NamedTuple):
    """One collective instruction."""

    operation: str  # all_gather, all_reduce, reduce_scatter, all_to_all, permute
    axes: tuple[str, ...]  # the mesh axes it communicates over
    bytes: float  # on the wire, per device and execution
    count: Number  # executions in one run of the program
    exposed: bool  # no compute is scheduled between its start and its done
    flops: float  # of the matmuls between them, per execution
    source: str  # its op_name in the traced program


class Instruction(NamedTuple):
    """`name = type opcode(operands), attributes`"""

    name: str
    type: str
    opcode: str
    operands: list[str]
    attributes: str


class Program(NamedTuple):
    """Computations by name, each the list of its instructions in order of execution."""

    computations: dict[str, list[Instruction]]
    entry: str


OPERATIONS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",  # of all places, which are as many as travel at most
    "collective-permute": "permute",
}
COMPUTES = {"fusion", "custom-call", "dot", "convolution", "while", "conditional", "call"}
ARRAY = re.compile(r"\b(pred|bf16|f8\w+|[sufc]\d+)\[([\d,]*)\]")
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
GEMM = re.compile(r'"__cublas\$(gemm|lt\$matmul)')  # custom calls that multiply; others solve triangular systems
GROUPED = re.compile(r"ragged_(?:contracting_dim_)?dot")  # in the op_name of a Mosaic kernel: those of tokamax
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
AT_MOST_ONCE = re.compile(r'(?:at_most_once|as_needed)_(\w+)/while"')
AS_NEEDED = re.compile(r"as_needed_(\w+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@lru_cache(maxsize=1)  # several audits of one program follow each other
def parse(text: str) -> Program:
    """Parse the text of a compiled module into its computations. Do not mutate."""
    computations, entry, block = {}, "", []
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{") and not line.startswith("HloModule"):
            words = line.split()
            name = words[words[0] == "ENTRY"].lstrip("%")
            entry = name if words[0] == "ENTRY" else entry
            computations[name] = block = []
        elif " = " in line and line.startswith(" "):
            block.append(_instruction(line))
    return Program(computations, entry)


def _instruction(line: str) -> Instruction:
    name, rest = re.sub(r"/\*.*?\*/", "", line).split(" = ", 1)
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = start + _closing(rest[start:])
    operands = re.findall(r"%([\w.\-]+)", rest[start:end])
    attributes = rest[end:] if operands else rest[start:]  # of `parameter(0)`, also its number
    return Instruction(name.split()[-1].lstrip("%"), kind, rest[:start], operands, attributes)


def _closing(text: str) -> int:
    """Return the index after the parenthesis that closes the one text starts with."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def op_name(i: Instruction) -> str:
    """Return the name of an instruction in the traced program; "" without one."""
    found = OP_NAME.search(i.attributes)
    return found[1] if found else ""


def _shapes(kind: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in dims.split(",") if n) for _, dims in ARRAY.findall(kind)]


def size(kind: str) -> int:
    """Return the bytes of an HLO type: `bf16[8,128]{1,0}`, or a tuple of such."""
    arrays = ARRAY.findall(kind)
    return sum(math.prod(int(n) for n in dims.split(",") if n) * _bits(dtype) // 8 for dtype, dims in arrays)


def itemsize(kind: str) -> float:
    """Return the bytes of an element of an array of an HLO type."""
    return _bits(ARRAY.search(kind)[1]) / 8


def _bits(dtype: str) -> int:
    return int((re.search(r"\d+", dtype) or ["8"])[0])


def walk(program: Program, rates: Rates = NO_RATES) -> Iterator[tuple[str, int, Number]]:
    """Yield (computation, index of the instruction in it, executions) for every instruction that the program runs.

    Each branch of a conditional counts as executed: an upper bound. Raises ValueError if a loop without a known trip
    count contains a collective or a matmul.
    """
    yield from _walk(program, program.entry, 1, rates)


def _walk(program: Program, name: str, count: Number, rates: Rates = NO_RATES) -> Iterator[tuple[str, int, Number]]:
    for index, i in enumerate(program.computations[name]):
        yield name, index, count
        inner = count * _trip_count(program, i, rates) if i.opcode == "while" else count
        for other in called(i):
            yield from _walk(program, other, inner, rates)


def called(i: Instruction) -> list[str]:
    """Return the computations that an instruction calls."""
    branches = [name.strip() for names in BRANCHES.findall(i.attributes) for name in names.split(",")]
    return CALLED.findall(i.attributes) + [name.lstrip("%") for name in branches if name]


def _trip_count(program: Program, loop: Instruction, rates: Rates) -> Number:
    """Return the trip count of a loop; 0 if it is unknown and the body has no collective or matmul."""
    trips = TRIPS.search(loop.attributes)
    if trips:
        return int(trips[1])
    at_most_once = AT_MOST_ONCE.search(loop.attributes)
    if at_most_once:
        return rates.get(at_most_once[1], 1)
    if any(_matters(i) for name in called(loop) for i in _instructions(program, name)):
        raise ValueError(f"loop {loop.name} has no known trip count; audit a program with static loops")
    return 0


def _instructions(program: Program, name: str) -> Iterator[Instruction]:
    return (program.computations[c][index] for c, index, _ in _walk(program, name, 1))


def _matters(i: Instruction) -> bool:
    return i.opcode == "dot" or i.opcode.removesuffix("-start") in OPERATIONS


def collectives(text: str, axes: Mapping[str, int], rates: Rates = NO_RATES) -> list[Collective]:
    """Return every collective of a compiled program. axes: mesh axis -> size, in mesh order (`mesh.shape`).

    Raises ValueError if a replica group does not span mesh axes.
    """
    program, found = parse(text), []
    for name, index, count in walk(program, rates):
        block = program.computations[name]
        i = block[index]
        operation = OPERATIONS.get(i.opcode.removesuffix("-start"))
        if not operation or not count:
            continue
        types = {other.name: other.type for other in block}
        over = _axes(i.attributes, axes)
        if not over:
            continue  # groups of one device: no communication
        group = math.prod(axes[a] for a in over)
        sent = sum(size(types[operand]) for operand in i.operands[: 1 if "ragged" in i.opcode else None])
        factor = {
            "all_gather": group - 1,  # of the input shard
            "all_reduce": 2 * (group - 1) / group,
            "reduce_scatter": (group - 1) / group,
            "all_to_all": (group - 1) / group,
            "permute": 1,
        }[operation]
        between = overlapped(program, name, index)
        exposed = not any(program.computations[c][k].opcode in COMPUTES for c, k in between)
        flops = sum(flops_inside(program, c, k) for c, k in between)
        found.append(Collective(operation, over, sent * factor, count, exposed, flops, op_name(i)))
    return found


def sources(text: str) -> dict[str, str]:
    """Return the op_name of each instruction of a compiled program that has one, by name."""
    of_each = (i for block in parse(text).computations.values() for i in block)
    return {i.name: op_name(i) for i in of_each if op_name(i)}


def overlapped(program: Program, name: str, index: int) -> list[tuple[str, int]]:
    """Return (computation, index) of the instructions scheduled between the start of a collective or copy and its
    done."""
    block = program.computations[name]
    start = block[index]
    if not start.opcode.endswith("-start"):
        wrapper = _wrapper(program, name)
        return overlapped(program, *wrapper) if wrapper else []
    if '"is_sync":true' in start.attributes:
        return []
    done = next(
        (k for k, i in enumerate(block) if i.opcode.endswith("-done") and start.name in i.operands), len(block)
    )  # else the done is in the next iteration of the loop
    return [(name, k) for k in range(index + 1, done)]


def _wrapper(program: Program, name: str) -> tuple[str, int] | None:
    """Return (computation, index) of the async-start that runs a computation, or None."""
    starts = (
        (outer, k)
        for outer, block in program.computations.items()
        for k, i in enumerate(block)
        if i.opcode == "async-start" and name in CALLED.findall(i.attributes)
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


def matmul_flops(text: str, rates: Rates = NO_RATES) -> float:
    """Return the matmul FLOPs of a compiled program per device, 2 per multiply-add.

    cuDNN attention counts as full attention, whatever the mask, with a sliding window as that many keys: 2 matmuls
    forward, 4 backward; the recomputation of scores in its backward is not counted. A grouped matmul of tokamax counts
    as the rows of its buffer times rates[NAME], without what its tiles multiply beside the rows of a group.
    """
    program = parse(text)
    return sum(count * _flops(program, name, index, rates) for name, index, count in walk(program, rates))


def _flops(program: Program, name: str, index: int, rates: Rates) -> float:
    """Return the FLOPs of one instruction, without the computations it calls."""
    block = program.computations[name]
    i = block[index]
    if is_grouped_matmul(i):
        return _grouped_flops(block, i) * rates.get((AS_NEEDED.findall(op_name(i)) or [""])[-1], 1)
    is_cublas = GEMM.search(i.attributes)
    if i.opcode != "dot" and not is_cublas and '"__cudnn$fmha' not in i.attributes:
        return 0.0
    shape = _shapes(next(other.type for other in block if other.name == i.operands[0]))[0]
    if i.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)[1]
    elif is_cublas:
        contracted = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', i.attributes)[1]
    else:
        scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', i.attributes)[1]
        window = re.search(r'"sliding_window_length":\s*(\d+)', i.attributes)
        *queries, keys = (int(n) for n in re.findall(r"\d+", scores))
        keys = min(keys, int(window[1]) or keys) if window else keys
        return (4 if "Backward" in i.attributes else 2) * 2.0 * math.prod(queries) * keys * shape[-1]
    return 2.0 * math.prod(_shapes(i.type)[0]) * math.prod(shape[int(d)] for d in re.findall(r"\d+", contracted))


def is_grouped_matmul(i: Instruction) -> bool:
    """True for a kernel that multiplies rows with the matrices of their groups."""
    is_mosaic = i.opcode == "custom-call" and 'custom_call_target="mosaic_gpu' in i.attributes
    return is_mosaic and GROUPED.search(op_name(i)) is not None


def _grouped_flops(block: list[Instruction], i: Instruction) -> float:
    """Return the FLOPs of x[M D], w[E D F] -> y[M F], or of x[D M], g[M F] -> w[E D F]: 2 M D F, of all M rows."""
    types = {other.name: other.type for other in block}
    *_, result = _shapes(i.type)
    operands = [shape for name in i.operands for shape in _shapes(types[name])]
    if len(result) == 3:
        g = [shape for shape in operands if len(shape) == 2][-1]
        return 2.0 * g[0] * math.prod(result[1:])
    w = next(shape for shape in operands if len(shape) == 3)
    return 2.0 * result[0] * math.prod(w[1:])


def flops_inside(program: Program, name: str, index: int) -> float:
    """Return the FLOPs of one instruction and of the computations it calls; of kernels for groups of all rows."""
    called = CALLED.findall(program.computations[name][index].attributes)
    inner = (count * _flops(program, *place, NO_RATES) for c in called for *place, count in _walk(program, c, 1))
    return _flops(program, name, index, NO_RATES) + sum(inner)


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


def memory(compiled: Any) -> dict[str, int]:
    """Return the bytes per device of a compiled program (`.compile()`): argument, temp, peak, and host.

    Donated arguments are updated in place and count once. XLA's own peak includes host memory; for programs that use
    it, peak is the sum of all device allocations instead.
    """
    m = compiled.memory_analysis()
    host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
    host += m.host_output_size_in_bytes - m.host_alias_size_in_bytes  # outputs that are not donated arguments
    peak = m.peak_memory_in_bytes
    if host:
        peak = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return {
        "argument_bytes": m.argument_size_in_bytes,
        "temp_bytes": m.temp_size_in_bytes,
        "peak_bytes": peak,
        "host_bytes": host,
    }
