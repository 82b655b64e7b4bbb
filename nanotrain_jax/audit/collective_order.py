"""Collectives of a compiled CPU program that devices may run in different orders.

XLA:CPU runs the collectives of a computation one after another. But it starts a loop, a branch or a call that holds
collectives and continues: what does not depend on it runs beside it, on another thread. Then one device may meet the
collective inside before the one outside, and another the other way round. They wait for each other until XLA aborts;
or, as the collectives of the same devices share a channel, one takes part in the wrong collective and numbers mix. So
of two, one must depend on the other (`in_order` in parallel/cpu_order.py).

A GPU runs the instructions of a program in one order, the same on all devices.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nanotrain_jax.audit import hlo
from nanotrain_jax.audit.hlo import Instruction, Program

COLLECTIVES = {*hlo.OPERATIONS, "collective-broadcast"}
CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")
BODY = re.compile(r"body=%?([\w.\-]+)")
ONE_EACH = re.compile(r"replica_groups=(?:\{(?:\{\d+\},?)+\}|\[\d+,1\]<=)")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
INDEX = re.compile(r"index=(\d+)")


class Pair(NamedTuple):
    """Two instructions of a computation: a collective and a loop, branch or call that holds collectives, or two of
    these. Neither depends on the other."""

    computation: str
    first: Instruction
    second: Instruction

    def __str__(self) -> str:
        return " beside ".join(f"{i.opcode} {hlo.op_name(i) or i.name}" for i in (self.first, self.second))


def unordered(text: str) -> list[Pair]:
    """Return the pairs that XLA:CPU may run in either order, of the text of a compiled program."""
    program = hlo.parse(text)
    holds: dict[str, bool] = {}
    for name in program.computations:
        _find_collectives(program, name, holds)
    return [pair for name, block in program.computations.items() for pair in _pairs(program, name, block, holds)]


def _find_collectives(program: Program, name: str, holds: dict[str, bool]) -> bool:
    """Return True if a computation holds a collective, itself or in what it calls; holds: what is known so far."""
    if name not in holds:
        block = program.computations[name]
        inside = (_find_collectives(program, other, holds) for i in block for other in hlo.called(i))
        holds[name] = any(_is_collective(i) for i in block) or any(inside)
    return holds[name]


def _is_collective(i: Instruction) -> bool:
    return i.opcode.removesuffix("-start") in COLLECTIVES and not _is_of_one_device(i.attributes)


def _is_of_one_device(attributes: str) -> bool:
    """Return True of a collective whose groups are one device each: it waits for no other."""
    mesh = MESH.search(attributes)
    if mesh is None:
        return ONE_EACH.search(attributes) is not None
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return all(sizes[axis] == "1" for axis in re.findall(r"'(\w+)'", mesh[2]))


def _pairs(program: Program, name: str, block: list[Instruction], holds: dict[str, bool]) -> list[Pair]:
    found: list[Pair] = []
    earlier: list[tuple[Instruction, bool]] = []
    needs: dict[str, set[str]] = {}  # of each instruction, all that it depends on
    passed_on = _passed_on(program, block)
    for i in block:
        direct = [passed_on[i.name]] if i.name in passed_on else [*i.operands, *_control_predecessors(i)]
        needs[i.name] = set(direct).union(*(needs.get(other, ()) for other in direct))
        runs_others = any(holds[other] for other in hlo.called(i))
        if runs_others or _is_collective(i):
            before = [other for other, runs in earlier if (runs or runs_others) and other.name not in needs[i.name]]
            found += [Pair(name, other, i) for other in before]
            earlier.append((i, runs_others))
    return found


def _control_predecessors(i: Instruction) -> list[str]:
    return [name.strip().lstrip("%") for names in CONTROL.findall(i.attributes) for name in names.split(",")]


def _passed_on(program: Program, block: list[Instruction]) -> dict[str, str]:
    """Return the elements of results of loops that the loop does not change -> what it got: there before it runs."""
    by_name, found = {i.name: i for i in block}, {}
    for i in block:
        loop = by_name.get(i.operands[0]) if i.opcode == "get-tuple-element" else None
        if loop and loop.opcode == "while" and _is_unchanged(program, loop, _index(i)):
            start = by_name[loop.operands[0]]
            found[i.name] = start.operands[_index(i)] if start.opcode == "tuple" else start.name
    return found


def _is_unchanged(program: Program, loop: Instruction, index: int) -> bool:
    """Return True if the body of a loop returns an element of its argument as it is, in the same place."""
    body = {i.name: i for i in program.computations[BODY.search(loop.attributes)[1]]}
    result = body.get(list(body.values())[-1].operands[index])
    is_element = result is not None and result.opcode == "get-tuple-element" and _index(result) == index
    return is_element and body[result.operands[0]].opcode == "parameter"


def _index(element: Instruction) -> int:
    return int(INDEX.search(element.attributes)[1])
