"""Kernels of a compiled program and the bytes each reads and writes in device memory (HBM), parsed from its HLO text.

A kernel is an instruction that runs on the device: a fusion, a matmul, a custom call, a copy, a collective. It reads
each operand once and writes its result once; nothing stays in a cache between kernels. Except that

    a fusion that only slices or gathers from an operand     reads what it takes, converted or not
    a fusion that stores a slice into an operand, in place   writes the slice, and reads nothing of the operand
    scratch memory of a custom call (u8, s8)                 does not count
    arrays in host memory                                    do not count

parameter, constant, tuple, get-tuple-element, bitcast and control flow are no kernels. Instructions in a loop count
once per iteration (audit/hlo.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from nanotrain_jax.audit import copies, hlo, stacks
from nanotrain_jax.audit.hlo import Instruction, Program

NO_KERNELS = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "async-start",
    "async-update", "optimization-barrier", "after-all", "partition-id", "replica-id", "add-dependency",
}  # fmt: skip
SLICES = {"dynamic-slice", "slice", "gather"}
FUSED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
NUMBER = re.compile(r"\((\d+)\)")


class Kernel(NamedTuple):
    """A kernel of a program."""

    name: str
    opcode: str
    read: dict[str, int]  # operand -> bytes, per execution
    written: int  # bytes per execution
    count: hlo.Number  # executions in one run of the program
    op_name: str  # in the traced program
    stack: stacks.Stack  # where it was traced

    @property
    def bytes(self) -> int:
        """Return the bytes read and written per execution."""
        return sum(self.read.values()) + self.written


def kernels(text: str, rates: hlo.Rates = hlo.NO_RATES) -> list[Kernel]:
    """Return every kernel of a compiled program, in order of execution."""
    program, found = hlo.parse(text), stacks.stacks(text)
    inside = {name for block in program.computations.values() for i in block for name in _fused(i)}
    out = []
    for name, index, count in hlo.walk(program, rates):
        i = program.computations[name][index]
        if name not in inside and count and _is_kernel(i):
            traced = _traced(program, i)
            kernel = _kernel(program, name, i)
            out.append(kernel._replace(count=count, op_name=hlo.op_name(traced), stack=stacks.of(traced, found)))
    return out


def _traced(program: Program, i: Instruction) -> Instruction:
    """Return the instruction that says where a kernel was traced: of a fusion of several results, the last in it."""
    inner = [other for name in _fused(i) for other in program.computations[name] if hlo.op_name(other)]
    return i if hlo.op_name(i) or not inner else inner[-1]


def _fused(i: Instruction) -> list[str]:
    """Return the computations that run inside of the kernel of an instruction."""
    return [] if i.opcode in ("call", "async-start") else FUSED.findall(i.attributes)


def _is_kernel(i: Instruction) -> bool:
    return i.opcode not in NO_KERNELS and not i.opcode.endswith("-done")


def _kernel(program: Program, computation: str, i: Instruction) -> Kernel:
    block = program.computations[computation]
    types = {other.name: other.type for other in block}
    done = next((other for other in block if other.opcode.endswith("-done") and i.name in other.operands), i)
    called = _fused(i)
    read, written = {name: size(types[name]) for name in i.operands}, size(done.type, i.opcode == "custom-call")
    if i.opcode.startswith("fusion") and called:
        inner = program.computations[called[0]]
        taken = [_taken(inner, number) for number in range(len(i.operands))]
        read = {}
        for name, part in zip(i.operands, taken, strict=True):
            read[name] = read.get(name, 0) + (size(types[name]) if part is None else part)
        written = sum(_stored(inner, root) for root in _roots(inner))
    elif i.opcode in SLICES:
        read[i.operands[0]] = written
    elif i.opcode == "dynamic-update-slice":
        written = size(types[i.operands[1]])
        read[i.operands[0]] = 0
    return Kernel(i.name, i.opcode, read, written, 1, "", ())


def size(kind: str, has_scratch: bool = False) -> int:
    """Return the bytes of an HLO type in device memory. has_scratch: its byte arrays are scratch."""
    if copies.ON_HOST.search(kind):
        return 0
    arrays = (m[0] for m in hlo.ARRAY.finditer(kind) if not (has_scratch and m[1] in ("u8", "s8")))
    return sum(map(hlo.size, arrays))


def _taken(block: list[Instruction], number: int) -> int | None:
    """Return the bytes that a fusion reads of an operand; None: all of it."""
    parameter = next(i for i in block if i.opcode == "parameter" and NUMBER.search(i.attributes)[1] == str(number))
    return _part(block, parameter, hlo.itemsize(parameter.type))


def _part(block: list[Instruction], value: Instruction, width: float, converted: bool = False) -> int | None:
    """Return the bytes that the users of a value need of it; None: all. width: bytes of an element where it is stored.
    converted: the value is the stored one in another dtype."""
    if value.name in (root.name for root in _roots(block)):
        return None
    parts: list[int | None] = []
    for user, at in _users(block, value.name):
        if user.opcode in SLICES and at == 0:
            parts.append(round(size(user.type) / hlo.itemsize(user.type) * width))
        elif user.opcode == "scatter" and at == 0 and not converted:  # it adds to these elements in place
            parts.append(_stored(block, user))
        elif user.opcode == "convert":
            parts.append(_part(block, user, width, converted=True))
        elif converted or user.opcode != "dynamic-update-slice" or at != 0:
            return None
    return None if None in parts else sum(parts)


def _users(block: list[Instruction], name: str) -> Iterator[tuple[Instruction, int]]:
    """Yield (instruction, number of its operand) of what uses a value, through bitcasts."""
    for i in block:
        if i.opcode == "bitcast" and name in i.operands:
            yield from _users(block, i.name)
        elif i.opcode != "tuple":
            yield from ((i, at) for at, operand in enumerate(i.operands) if operand == name)


def _roots(block: list[Instruction]) -> list[Instruction]:
    """Return the instructions whose values a fusion writes, without bitcasts."""
    by_name, root = {i.name: i for i in block}, block[-1]
    roots = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for k, i in enumerate(roots):
        while i.opcode == "bitcast":
            i = by_name[i.operands[0]]
        roots[k] = i
    return roots


def _stored(block: list[Instruction], root: Instruction) -> int:
    """Return the bytes that a fusion writes for one of its results: of updates in place those alone."""
    updates = {"dynamic-update-slice": 1, "scatter": 2}  # number of the operand
    if root.opcode in updates:
        return size(next(i.type for i in block if i.name == root.operands[updates[root.opcode]]))
    return size(root.type)
