"""Memory over the instructions of a compiled program: which array occupies how many bytes when, and who wrote it.

XLA:GPU gives every array an address and a live range, and writes both as text if asked (`compile_and_dump`). Arrays
that follow each other at an address share it, so memory in use is counted in addresses, not in arrays: its peak is
that of `memory_analysis`. The instructions of a loop body, or of a branch, occur once in the sequence: one iteration.

Arguments and outputs occupy their memory from start to end. What XLA computes in the memory of a donated argument,
before it writes the new value there, takes none of its own. Host memory does not count.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from nanotrain_jax.audit import hlo, stacks
from nanotrain_jax.audit.stacks import Frame

ALLOCATION = re.compile(r"allocation \d+: size (\d+),(?: color (\d+),)?(.*)")
VALUE = re.compile(r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
LIVE = re.compile(r"^ +(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
STEP = re.compile(r"^ +\d+:(\S+)$", re.MULTILINE)
HELD = "parameter", "output", "constant", "maybe-live-out"  # allocations that exist from start to end
ON_DEVICE = "0"  # color of an allocation
INDEX = re.compile(r"index=(\d+)")
CALLED = re.compile(r"(?:calls|condition|body)=%?([\w.\-]+)")
NUMBER = re.compile(r"\((\d+)\)")  # of a parameter

MAX_STEPS = 100  # from a store back to what wrote the slice

Place = tuple[str, tuple[int, ...]]  # name of an instruction, index in its result


class Dump(NamedTuple):
    """What XLA writes of a program."""

    program: str  # *-after_optimizations.txt
    live_ranges: str  # *-live-range.txt
    buffer_assignment: str  # *-buffer-assignment.txt


class Origin(NamedTuple):
    """An instruction and where it was traced. Of an array: the instruction that wrote it, before a loop carried it."""

    opcode: str  # "argument": of the program; "": unknown
    type: str  # `bf16[8,128]{1,0}`
    op_name: str  # in the traced program; of an argument its path: `state.params['w']`
    frames: tuple[Frame, ...]  # where it was traced, innermost first


class Span(NamedTuple):
    """An array at an address, from one instruction to another (both included)."""

    origin: Origin
    address: int  # bytes
    size: int  # bytes
    first: int
    last: int


class Timeline(NamedTuple):
    """Memory of a program. Instructions are numbered in order of execution."""

    instructions: tuple[Origin, ...]
    spans: tuple[Span, ...]


UNKNOWN = Origin("", "", "", ())


def compile_and_dump(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, Dump]:
    """Compile for GPUs and keep what XLA writes about memory. Raises RuntimeError if it writes nothing (XLA:CPU)."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        kinds = "", "-live-range", "-buffer-assignment"
        files = [sorted(Path(folder).glob(f"*gpu_after_optimizations{kind}.txt")) for kind in kinds]
        if not all(files):
            raise RuntimeError("XLA wrote no live ranges; compile for GPUs")
        return compiled, Dump(*(found[-1].read_text() for found in files))


def timeline(text: str, dump: Dump) -> Timeline:
    """Return the memory of a compiled program. text: its `as_text()`."""
    sequence, _, ranges = dump.live_ranges.partition("BufferLiveRange:")
    names = STEP.findall(sequence)
    live = {(name, _index(at)): (int(first), int(last)) for name, at, first, last in LIVE.findall(ranges)}
    writers, spans, base = _Writers(text, dump.program), [], 0
    for size, held, values in _allocations(dump.buffer_assignment):
        origins = [writers.origin(value.place, value.type) for value in values]
        if held:
            argument = next((origin for origin in origins if origin.opcode == "argument"), UNKNOWN)
            spans.append(Span(argument, base, size, 0, len(names) - 1))
        else:
            found = [
                (Span(origin, base + value.offset, value.size, *live[value.place]), value.is_carried)
                for value, origin in zip(values, origins, strict=True)
                if value.place in live
            ]
            spans += _joined(found)
        base += size
    return Timeline(tuple(writers.origin((name, ()), "") for name in names), tuple(spans))


def _joined(spans: list[tuple[Span, bool]]) -> list[Span]:
    """Join spans that follow each other at an address if a loop carries the array on: it has the last one's origin."""
    joined: list[Span] = []
    for span, is_carried in sorted(spans, key=lambda one: (one[0].address, one[0].size, one[0].first, one[0].last)):
        before = joined[-1] if joined else None
        follows = before and before[1:3] == span[1:3] and before.first <= span.first <= before.last + 1
        if follows and (is_carried or before.origin.frames == span.origin.frames):
            joined[-1] = span._replace(first=before.first, last=max(before.last, span.last))
        else:
            joined.append(span)
    return joined


class _Value(NamedTuple):
    """An array in an allocation."""

    place: Place
    is_carried: bool  # by a loop
    size: int
    offset: int
    type: str


def _allocations(text: str) -> Iterator[tuple[int, bool, list[_Value]]]:
    """Yield (size, whether it is held from start to end, arrays) of each allocation in device memory."""
    for block in text.split("\nallocation ")[1:]:
        head, *lines = block.splitlines()
        size, color, kind = ALLOCATION.match(f"allocation {head}").groups()
        if (color or ON_DEVICE) != ON_DEVICE or "thread-local" in kind:
            continue
        found = (VALUE.match(line).groups() for line in lines if line.startswith(" value:"))
        values = [
            _Value((name, _index(at or "")), bool(phi), int(length), int(offset), shape)
            for name, at, phi, length, offset, shape in found
        ]
        yield int(size), any(word in kind for word in HELD), values


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


class _Writers:
    """Finds the instruction that writes an array: loops and tuples only pass it on."""

    def __init__(self, text: str, dumped: str):
        # Only the dump has the bodies of asynchronous collectives; from jax 0.12 on it lacks get-tuple-element.
        programs = hlo.parse(dumped), hlo.parse(text)
        self.computations, self.entry = programs[0].computations | programs[1].computations, programs[1].entry
        self.instructions, self.home, self.frames, self.callers = {}, {}, {}, {}
        for program, frames in zip(programs, map(stacks.stacks, (dumped, text)), strict=True):
            for name, block in program.computations.items():
                self.instructions |= {i.name: i for i in block}
                self.home |= {i.name: name for i in block}
                self.frames |= {i.name: stacks.of(i, frames) for i in block}
        for i in self.instructions.values():
            self.callers |= dict.fromkeys(CALLED.findall(i.attributes), i)

    def origin(self, place: Place, kind: str) -> Origin:
        """Return the origin of the array of a type at a place."""
        if place[0] not in self.instructions:  # removed after memory was assigned
            return UNKNOWN
        writer = self.instructions[(self.writer(*place) or place)[0]]
        described = self.stored(writer) or self.named(writer)
        op_name = hlo.op_name(described).replace("\\'", "'")
        is_argument = writer.opcode == "parameter" and self.home[writer.name] == self.entry
        return Origin("argument" if is_argument else writer.opcode, kind, op_name, self.frames[described.name])

    def writer(self, name: str, index: tuple[int, ...], seen: frozenset[Place] = frozenset()) -> Place | None:
        """Return where an array is written; None if a loop only carries it round."""
        i, place = self.instructions[name], (name, index)
        if place in seen:
            return None
        seen |= {place}
        loop = i if i.opcode == "while" else self.callers.get(self.home[name]) if i.opcode == "parameter" else None
        if loop and loop.opcode == "while" and index:
            (body,) = hlo.CALLED.findall(loop.attributes)
            root = self.computations[body][-1].name
            return self.writer(root, index, seen) or self.writer(loop.operands[0], index, seen)
        if i.opcode == "get-tuple-element":
            return self.writer(i.operands[0], (int(INDEX.search(i.attributes)[1]), *index), seen)
        if i.opcode == "tuple" and index:
            return self.writer(i.operands[index[0]], index[1:], seen)
        if i.opcode in ("bitcast", "optimization-barrier") or i.opcode.endswith("-done"):
            return self.writer(i.operands[0], index, seen)
        return place

    def named(self, i: hlo.Instruction) -> hlo.Instruction:
        """Return the instruction that says where i was traced: itself, one that it calls, or the one that it reads."""
        called = [c for c in hlo.CALLED.findall(i.attributes) if i.opcode != "while"]
        others = [inner for c in called for inner in reversed(self.computations[c])]
        others += [self.instructions[name] for name in i.operands[:1]]
        return next((other for other in (i, *others) if hlo.op_name(other)), i)

    def stored(self, i: hlo.Instruction) -> hlo.Instruction | None:
        """Return what wrote the slice that i stores in a larger array; None if it stores none."""
        inside = [inner for c in hlo.CALLED.findall(i.attributes) for inner in self.computations.get(c, ())]
        stores = [inner for inner in (i, *inside) if inner.opcode == "dynamic-update-slice"]
        if i.opcode == "while" or not stores:
            return None
        stack, found = self.frames[stores[-1].name], self.instructions[stores[-1].operands[1]]
        for _ in range(MAX_STEPS):
            traced = self.frames[found.name]
            is_of_loop = not traced or traced[:1] == stack[:1] or traced == stack[-len(traced) :]
            if found.opcode not in ("bitcast", "copy") and not is_of_loop:
                return found
            caller = self.callers.get(self.home[found.name])
            if found.opcode == "parameter" and caller and caller.opcode.startswith("fusion"):
                argument = caller.operands[int(NUMBER.search(found.attributes)[1])]
                found = self.instructions[(self.writer(argument, ()) or (argument, ()))[0]]
            elif found.operands:
                found = self.instructions[found.operands[0]]
            else:
                break
        return None


def in_use(timeline: Timeline, groups: Sequence[int]) -> np.ndarray:
    """Return the bytes in use during each instruction, [instructions, groups]. groups: a number for each span."""
    numbers = np.array(groups)
    table = np.zeros((len(timeline.instructions), max(groups) + 1))
    for now, (spans, sizes) in enumerate(_occupied(timeline)):
        table[now] = np.bincount(numbers[spans], sizes, table.shape[1])
    return table


def holders(timeline: Timeline, now: int) -> Counter[int]:
    """Return the bytes of each span during an instruction."""
    found: Counter[int] = Counter()
    for span, size in zip(*next(islice(_occupied(timeline), now, None)), strict=True):
        found[int(span)] += int(size)
    return found


def _occupied(timeline: Timeline) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, for each instruction, the spans that hold memory and their sizes. A later span replaces an earlier one."""
    spans = timeline.spans
    ends = [(span.address, span.address + span.size) for span in spans]
    edges, places = np.unique(np.array(ends, np.int64), return_inverse=True)
    places, sizes = places.reshape(-1, 2), np.diff(edges)
    owner = np.full(len(sizes), -1)
    starting, ending = ({}, {})
    for number, span in enumerate(spans):
        starting.setdefault(span.first, []).append(number)
        ending.setdefault(span.last, []).append(number)
    for now in range(len(timeline.instructions)):
        for number in starting.get(now, ()):
            owner[slice(*places[number])] = number
        used = owner >= 0
        yield owner[used], sizes[used]
        for number in ending.get(now, ()):
            held = owner[slice(*places[number])]
            held[held == number] = -1
