"""Pipeline schedules for people: checked, priced, drawn as text and read again. Plain numpy.

A table as text has a row for each stage and a column for each tick, as in

     0 | F0 F1 F2B0 F3B1 B2   B3
     1 | .  F0B0 F1B1 F2B2 F3B3 .

with the microbatch behind each F, B and W, and with several chunks a letter for the chunk: F2b.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanotrain_jax.parallel.schedule import IDLE, Schedule, make, slots, ticks_of

Time = int | float | Fraction


class Stats(NamedTuple):
    """What a schedule costs."""

    ticks: int
    time: Time  # from the first tick to the last, a tick as long as its busiest stage
    bubble: Time  # the longest that a stage waits between its first and its last work
    bubble_fraction: float  # of time: how much of it the average stage does nothing
    in_flight: list[int]  # per stage: most units at a time between their forward and the last of their backward
    slots: dict[str, int]  # see `buffers`
    masked: float  # layers' work of a stage that computes in every tick and throws idle results away, over useful work


class Outline(NamedTuple):
    """All that time and memory depend on, without the units."""

    ticks: int
    slots: dict[str, int]  # see `schedule.buffers`
    weights: int  # W at most in a tick
    kinds: dict[tuple[tuple[int, int, int], ...], int]  # F, B, W of the stages of a tick, each once -> ticks like it

    def time(self, F: float, B: float, W: float) -> float:
        """From the first tick to the last, where one chunk of one microbatch takes so long; B without W."""
        costs = (F, B, W) if self.weights else (F, B + W, 0.0)

        def price(work: tuple[int, int, int]) -> float:
            return sum(n * cost for n, cost in zip(work, costs, strict=True))

        return sum(number * max(map(price, kind)) for kind, number in self.kinds.items())


@cache
def outline(name: str, stages: int, microbatches: int, chunks: int = 1) -> Outline:
    """What a schedule by name costs. Raises ValueError if there is none (`schedule.make`)."""
    table = make(name, stages, microbatches, chunks)
    counts = _counts(table)
    codes = counts @ (1, 2, 4 * counts.max(initial=1))  # of (F, B, W); F and B are 0 or 1
    _, first_ticks, numbers = np.unique(codes, axis=0, return_index=True, return_counts=True)  # most ticks are alike
    kinds: dict[tuple[tuple[int, int, int], ...], int] = {}
    for tick, number in zip(first_ticks, numbers, strict=True):
        kind = tuple(sorted({tuple(work) for work in counts[tick].tolist()}))
        kinds[kind] = kinds.get(kind, 0) + int(number)
    return Outline(table.ticks, slots(table), table.weight.shape[-1], kinds)


def _counts(schedule: Schedule) -> np.ndarray:
    """[ticks P 3]: how many F, B and W."""
    return np.stack([schedule.forward != IDLE, schedule.backward != IDLE, (schedule.weight != IDLE).sum(-1)], -1)


def validate(schedule: Schedule) -> None:
    """Raise ValueError, with the table drawn and the place marked, unless each unit of each stage is forwarded once,
    goes back once (and has the gradients of its weights made once), always after what it needs."""
    units = schedule.chunks * schedule.microbatches
    P = schedule.stages
    kinds = {"F": schedule.forward, "B": schedule.backward}
    if schedule.weight.size:
        kinds["W"] = schedule.weight
    for kind, table in kinds.items():
        _each_unit_once(schedule, kind, table)
    when = {kind: ticks_of(table, units) for kind, table in kinds.items()}

    def after(kind: str, unit: int, s: int, other: str, sender: tuple[int, int], same_tick: bool) -> None:
        t = when[kind][unit, s]
        made = when[other][sender]
        if made > t or (made == t and not same_tick):
            mark = _name(schedule, sender[0])
            raise ValueError(
                f"stage {s}, tick {t}: {kind}{_name(schedule, unit)} is too early; it needs {other}{mark} of stage "
                f"{sender[1]} in tick {t if same_tick else t - 1} or before, which is in tick {made}\n"
                + draw(schedule, mark=(int(t), s))
            )

    for unit, s in np.ndindex(units, P):
        before = (unit, s - 1) if s else (unit - schedule.microbatches, P - 1)
        behind = (unit, s + 1) if s < P - 1 else (unit + schedule.microbatches, 0)
        if before[0] >= 0:
            after("F", unit, s, "F", before, same_tick=False)
        after("B", unit, s, "F", (unit, s), same_tick=True)
        if behind[0] < units:
            after("B", unit, s, "B", behind, same_tick=False)
        if "W" in kinds:
            after("W", unit, s, "B", (unit, s), same_tick=True)


def _each_unit_once(schedule: Schedule, kind: str, table: np.ndarray) -> None:
    """Raise ValueError unless each stage has each unit once in the table of one kind of work."""
    units = schedule.chunks * schedule.microbatches
    if table.min() < IDLE or table.max() >= units:
        strange = next(int(u) for u in table.flat if not IDLE <= u < units)
        raise ValueError(f"{kind} of unit {strange}; units are 0 to {units - 1}, and {IDLE} is none")
    for s in range(schedule.stages):
        work = table[:, s][table[:, s] != IDLE]
        wrong = [u for u in range(units) if (work == u).sum() != 1]
        if wrong:
            text = f"stage {s} has {kind}{_name(schedule, wrong[0])} {(work == wrong[0]).sum()} times, not once"
            raise ValueError(f"{text}\n{draw(schedule)}")


def fitted(
    schedule: Schedule | str, stages: int, layers: Sequence[tuple], microbatches: Sequence[tuple]
) -> tuple[Schedule, int]:
    """-> the schedule, made if it is a name, and the number of layers of a chunk.

    layers, microbatches: shapes of the arrays of a stage, [its layers, ...] and [M, ...]. Raises ValueError unless all
    of it fits together.
    """
    count, M = _rows("layers", layers), _rows("microbatches", microbatches)
    if schedule == "interleaved":
        raise ValueError(
            f"'interleaved' does not say how many chunks; pass schedule.make('interleaved', {stages}, {M}, chunks), "
            "and the layers in its layer_order"
        )
    if isinstance(schedule, str):
        schedule = make(schedule, stages, M)
    C = schedule.chunks
    if count % C:
        raise ValueError(
            f"{count} layers of a stage cannot be cut into {C} chunks; use a number of chunks that divides {count}, "
            f"or a multiple of {stages * C} layers"
        )
    if (stages, M) != (schedule.stages, schedule.microbatches):
        raise ValueError(
            f"the schedule is for {schedule.stages} stages and {schedule.microbatches} microbatches; here are {stages} "
            f"stages and {M} microbatches: make one for these"
        )
    return schedule, count // C


def _rows(what: str, shapes: Sequence[tuple]) -> int:
    """The leading dim that all arrays share."""
    if not all(shapes):
        raise ValueError(f"{what}: a scalar has no dim of {what}; stack one for each of them")
    counts = sorted({shape[0] for shape in shapes})
    if len(counts) != 1:
        found = " and ".join(map(str, counts)) or "no"
        raise ValueError(f"{what}: arrays have {found} rows on a stage; give every array one row for each of them")
    return counts[0]


def stats(schedule: Schedule, F: Time = 1, dX: Time = 1, W: Time = 1) -> Stats:
    """What the schedule costs where a stage takes F, dX and W for one microbatch through all of its chunks.

    Exact in integers and Fractions. Raises ValueError if the schedule has no backward.
    """
    if not (schedule.backward != IDLE).any():
        raise ValueError("a schedule without a backward has no bubble; give one that trains")
    C = schedule.chunks
    split = schedule.weight.size > 0
    counts = _counts(schedule)
    costs = (F, dX, W) if split else (F, dX + W, 0)
    share: Any = Fraction(1, C) if all(isinstance(c, int | Fraction) for c in costs) else 1 / C

    def price(row: np.ndarray) -> Time:
        return sum((int(n) * c for n, c in zip(row, costs, strict=True)), 0 * F)

    length = [max(price(row) for row in tick) * share for tick in counts]
    work = schedule.microbatches * (F + dX + W)
    bubbles = []
    for s in range(schedule.stages):
        busy = counts[:, s].any(-1).nonzero()[0]
        bubbles.append(sum(length[busy[0] : busy[-1] + 1]) - work)
    begun = (schedule.forward != IDLE).cumsum(0)
    done = counts[..., 2 if split else 1].cumsum(0)
    in_flight = [int(n) for n in (begun - np.vstack([np.zeros_like(done[:1]), done[:-1]])).max(0)]
    masked = schedule.ticks * share * (sum(costs[:2]) + schedule.weight.shape[-1] * costs[2]) / work
    return Stats(
        ticks=schedule.ticks,
        time=sum(length),
        bubble=max(bubbles),
        bubble_fraction=float(1 - work / sum(length)),
        in_flight=in_flight,
        slots=slots(schedule),
        masked=float(masked),
    )


def _name(schedule: Schedule, unit: int) -> str:
    """The microbatch of a unit and, with several chunks, a letter for its chunk."""
    chunk, microbatch = divmod(int(unit), schedule.microbatches)
    return f"{microbatch}{chr(ord('a') + chunk) if schedule.chunks > 1 else ''}"


def draw(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """The table as text: a row for each stage, a column for each tick. mark: (tick, stage) to point at.

    Raises ValueError for more than 26 chunks, for which there are no letters.
    """
    if schedule.chunks > 26:
        raise ValueError(f"{schedule.chunks} chunks cannot be drawn with one letter each; use at most 26")
    cells = []
    for s in range(schedule.stages):
        words = ("".join(k + _name(schedule, unit) for k, unit in schedule.work(t, s)) for t in range(schedule.ticks))
        cells.append([word or "." for word in words])
    widths = [max(len(row[t]) for row in cells) for t in range(schedule.ticks)]
    lines = []
    for s, row in enumerate(cells):
        lines.append(f"{s:>2} | " + " ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        if mark and mark[1] == s:
            lines.append(" " * (5 + sum(w + 1 for w in widths[: mark[0]])) + "^" * len(row[mark[0]]))
    return "\n".join(lines)


def parse(text: str) -> Schedule:
    """The text form of a schedule, as `draw` writes it (stage numbers may be left out) -> the schedule; not validated.

    Raises ValueError on a word that is not made of F, B and W with a microbatch and perhaps a chunk's letter.
    """
    rows = [line.split("|")[-1].split() for line in text.strip().splitlines()]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"stages have {sorted({len(row) for row in rows})} ticks; give all as many, with . for idle")
    cells = [[_work(word) for word in row] for row in rows]
    everything = [work for row in cells for cell in row for work in cell]
    if not everything:
        raise ValueError("there is no work in the table; write e.g. F2B0, F1b, B3W3 or . for none")
    M = 1 + max(m for _, m, _ in everything)
    C = 1 + max(c for *_, c in everything)
    n = max(sum(kind == "W" for kind, *_ in cell) for row in cells for cell in row)
    tables = {kind: np.full((len(rows[0]), len(rows), max(n, 1)), IDLE) for kind in "FBW"}
    for kind, table in tables.items():
        for t, s in np.ndindex(table.shape[:2]):
            units = [c * M + m for other, m, c in cells[s][t] if other == kind]
            table[t, s, : len(units)] = units
    return Schedule(C, M, tables["F"][..., 0], tables["B"][..., 0], tables["W"][..., :n])


def _work(word: str) -> list[tuple[str, int, int]]:
    """A cell of the text form, say F2bB0 -> [("F", 2, 1), ("B", 0, 0)]: kind, microbatch, chunk. Raises ValueError."""
    if not re.fullmatch(r"\.|(F\d+[a-z]?)?(B\d+[a-z]?)?(W\d+[a-z]?)*", word):
        raise ValueError(f"{word!r} is not the work of a tick; write e.g. F2B0, F1b, B3W3 or . for none")
    work = re.findall(r"([FBW])(\d+)([a-z]?)", word)
    return [(kind, int(m), ord(c or "a") - ord("a")) for kind, m, c in work]
