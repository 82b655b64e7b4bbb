"""Instructions and memory of a compiled program, parsed from its HLO text.

The text is `jax.jit(f).lower(...).compile().as_text()` of any JAX program on CPU or GPU. Instructions in a loop count
once per iteration. A loop that runs at most once, from a `jax.named_scope("at_most_once_NAME")`, or as often as data
need it, from "as_needed_NAME", counts as rates[NAME] executions on average, by default one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

Number = int | Fraction
Rates = Mapping[str, Number]  # name of an at-most-once loop -> average executions
NO_RATES: Rates = {}


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
ARRAY = re.compile(r"\b(pred|bf16|f8\w+|[sufc]\d+)\[([\d,]*)\]")
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
AT_MOST_ONCE = re.compile(r'(?:at_most_once|as_needed)_(\w+)/while"')
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


def shapes(kind: str) -> list[tuple[int, ...]]:
    """Return the shape of each array of an HLO type."""
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
    yield from walk_from(program, program.entry, 1, rates)


def walk_from(program: Program, name: str, count: Number, rates: Rates = NO_RATES) -> Iterator[tuple[str, int, Number]]:
    """Yield what `walk` yields, for a computation that runs `count` times."""
    for index, i in enumerate(program.computations[name]):
        yield name, index, count
        inner = count * _trip_count(program, i, rates) if i.opcode == "while" else count
        for other in called(i):
            yield from walk_from(program, other, inner, rates)


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
    return (program.computations[c][index] for c, index, _ in walk_from(program, name, 1))


def _matters(i: Instruction) -> bool:
    return i.opcode == "dot" or i.opcode.removesuffix("-start") in OPERATIONS


def sources(text: str) -> dict[str, str]:
    """Return the op_name of each instruction of a compiled program that has one, by name."""
    of_each = (i for block in parse(text).computations.values() for i in block)
    return {i.name: op_name(i) for i in of_each if op_name(i)}


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
