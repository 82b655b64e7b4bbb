"""Validate, cost, draw and parse pipeline schedules. Plain numpy.

The text form has a row for each stage and a column for each tick:

     0 | F0 F1 F2B0 F3B1 B2   B3
     1 | .  F0B0 F1B1 F2B2 F3B3 .

Each F, B and W is followed by its microbatch and, with several chunks, a letter for the chunk: F2b.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np

from nanotrain_jax.parallel.pipeline.schedule import IDLE, Schedule, make
from nanotrain_jax.parallel.pipeline.slots import end_units, slots, ticks_of

Time = int | float | Fraction


class Ends(NamedTuple):
    """Times of both ends of a model, of one microbatch: on the first stage in its first F and its last B, and the loss,
    in the B of the last stage."""

    first_forward: Time = 0
    first_backward: Time = 0
    loss: Time = 0


NO_ENDS = Ends()


class Stats(NamedTuple):
    """The costs of a schedule."""

    ticks: int
    time: Time  # of all ticks, each as long as its busiest stage
    bubble: Time  # idle time between a stage's first and last work; maximum over stages
    bubble_fraction: float  # idle share of time, averaged over stages
    in_flight: list[int]  # per stage: maximum number of units between F and the end of their backward
    slots: dict[str, int]  # per buffer (`slots.buffers`)
    masked: float  # with idle="mask": work of the layers in all ticks, over useful work


class Outline(NamedTuple):
    """Summary of a schedule: what its time and memory depend on."""

    ticks: int
    slots: dict[str, int]  # per buffer (`slots.buffers`)
    weights: int  # maximum number of W in a tick
    kinds: dict[tuple[tuple[int, int, int], ...], int]  # distinct (F, B, W) counts of a tick's stages -> ticks like it

    def time(self, F: float, B: float, W: float) -> float:
        """Return the time of all ticks. F, B, W: time of one unit; B without W."""
        costs = (F, B, W) if self.weights else (F, B + W, 0.0)

        def price(work: tuple[int, int, int]) -> float:
            return sum(n * cost for n, cost in zip(work, costs, strict=True))

        return sum(number * max(map(price, kind)) for kind, number in self.kinds.items())


@cache
def outline(name: str, stages: int, microbatches: int, chunks: int = 1, split_ends: bool = False) -> Outline:
    """Return the summary of a schedule by name. Raises ValueError as `schedule.make`."""
    table = make(name, stages, microbatches, chunks, split_ends)
    counts = _counts(table)
    codes = counts @ (1, 2, 4 * counts.max(initial=1))  # of (F, B, W); F and B are 0 or 1
    _, first_ticks, numbers = np.unique(codes, axis=0, return_index=True, return_counts=True)  # most ticks are equal
    kinds: dict[tuple[tuple[int, int, int], ...], int] = {}
    for tick, number in zip(first_ticks, numbers, strict=True):
        kind = tuple(sorted({tuple(work) for work in counts[tick].tolist()}))
        kinds[kind] = kinds.get(kind, 0) + int(number)
    return Outline(table.ticks, slots(table), table.weight.shape[-1], kinds)


def _counts(schedule: Schedule) -> np.ndarray:
    """Return the numbers of F, B and W [ticks P 3]."""
    return np.stack([schedule.forward != IDLE, schedule.backward != IDLE, (schedule.weight != IDLE).sum(-1)], -1)


def validate(schedule: Schedule) -> None:
    """Raise ValueError, with the table drawn and the error marked, unless each stage has F, B (and W) of each unit
    once, after the work that it depends on."""
    units = schedule.chunks * schedule.microbatches
    P = schedule.stages
    kinds = {"F": schedule.forward, "B": schedule.backward}
    if schedule.weight.size:
        kinds["W"] = schedule.weight
    for kind, table in kinds.items():
        _each_unit_once(schedule, kind, table)
    ticks = {kind: ticks_of(table, units) for kind, table in kinds.items()}

    def check_order(kind: str, unit: int, s: int, other: str, sender: tuple[int, int], same_tick: bool) -> None:
        t = ticks[kind][unit, s]
        sent = ticks[other][sender]
        if sent > t or (sent == t and not same_tick):
            needed = _name(schedule, sender[0])
            raise ValueError(
                f"stage {s}, tick {t}: {kind}{_name(schedule, unit)} is too early; it needs {other}{needed} of stage "
                f"{sender[1]} in tick {t if same_tick else t - 1} or before, which is in tick {sent}\n"
                + draw(schedule, mark=(int(t), s))
            )

    for unit, s in np.ndindex(units, P):
        previous = (unit, s - 1) if s else (unit - schedule.microbatches, P - 1)
        following = (unit, s + 1) if s < P - 1 else (unit + schedule.microbatches, 0)
        if previous[0] >= 0:
            check_order("F", unit, s, "F", previous, same_tick=False)
        splits_loss = schedule.split_ends and following[0] >= units
        check_order("B", unit, s, "F", (unit, s), same_tick=not splits_loss)
        if following[0] < units:
            check_order("B", unit, s, "B", following, same_tick=False)
        if "W" in kinds:
            check_order("W", unit, s, "B", (unit, s), same_tick=True)


def _each_unit_once(schedule: Schedule, kind: str, table: np.ndarray) -> None:
    """Raise ValueError unless each stage has each unit exactly once in the table of one kind of work."""
    units = schedule.chunks * schedule.microbatches
    if table.min() < IDLE or table.max() >= units:
        invalid = next(int(u) for u in table.flat if not IDLE <= u < units)
        raise ValueError(f"{kind} of unit {invalid}: units are 0 to {units - 1}; use {IDLE} for idle")
    for s in range(schedule.stages):
        work = table[:, s][table[:, s] != IDLE]
        wrong = [u for u in range(units) if (work == u).sum() != 1]
        if wrong:
            text = f"stage {s} has {kind}{_name(schedule, wrong[0])} {(work == wrong[0]).sum()} times, not once"
            raise ValueError(f"{text}\n{draw(schedule)}")


def fitted(
    schedule: Schedule | str, stages: int, layers: Sequence[tuple], microbatches: Sequence[tuple]
) -> tuple[Schedule, int]:
    """-> the schedule (made if given by name), the number of layers per chunk.

    layers, microbatches: shapes of a stage's arrays, [layers of the stage, ...] and [M, ...]. Raises ValueError unless
    they fit the schedule and the stages.
    """
    count, M = _rows("layers", layers), _rows("microbatches", microbatches)
    if schedule == "interleaved":
        raise ValueError(
            f"'interleaved': needs a number of chunks; pass schedule.make('interleaved', {stages}, {M}, chunks), and "
            "the layers in its layer_order"
        )
    if isinstance(schedule, str):
        schedule = make(schedule, stages, M)
    C = schedule.chunks
    if count % C:
        raise ValueError(
            f"{count} layers of a stage cannot be split into {C} chunks; use a number of chunks that divides {count}, "
            f"or a multiple of {stages * C} layers"
        )
    if (stages, M) != (schedule.stages, schedule.microbatches):
        raise ValueError(
            f"the schedule has {schedule.stages} stages and {schedule.microbatches} microbatches, the arguments "
            f"{stages} stages and {M} microbatches; make the schedule for these"
        )
    return schedule, count // C


def _rows(what: str, shapes: Sequence[tuple]) -> int:
    """Return the leading dim that all arrays share."""
    if not all(shapes):
        raise ValueError(f"{what}: a scalar has no leading dim of {what}; stack one scalar for each")
    counts = sorted({shape[0] for shape in shapes})
    if len(counts) != 1:
        sizes = " and ".join(map(str, counts)) or "no"
        raise ValueError(f"{what}: arrays have {sizes} rows on a stage; give every array the same number of rows")
    return counts[0]


def stats(
    schedule: Schedule, F: Time = 1, dX: Time = 1, W: Time = 1, layers: np.ndarray | None = None, ends: Ends = NO_ENDS
) -> Stats:
    """Compute the costs of a schedule. Times, layers and ends: as of `stage_times`; exact in integers and Fractions.

    Raises ValueError if the schedule has no backward.
    """
    if not (schedule.backward != IDLE).any():
        raise ValueError("a schedule without a backward has no bubble; pass a training schedule")
    times = stage_times(schedule, F, dX, W, layers, ends)
    length = times.max(1)
    counts = _counts(schedule)
    bubbles = []
    for s in range(schedule.stages):
        busy = counts[:, s].any(-1).nonzero()[0]
        bubbles.append(sum(length[busy[0] : busy[-1] + 1]) - sum(times[:, s]))
    split = schedule.weight.size > 0
    begun = (schedule.forward != IDLE).cumsum(0)
    done = counts[..., 2 if split else 1].cumsum(0)
    in_flight = [int(n) for n in (begun - np.vstack([np.zeros_like(done[:1]), done[:-1]])).max(0)]
    largest = _chunk_shares(schedule, layers).max()
    in_tick = F + dX + schedule.weight.shape[-1] * W if split else F + dX + W
    masked = schedule.ticks * largest * in_tick / (schedule.microbatches * (F + dX + W))
    return Stats(
        ticks=schedule.ticks,
        time=sum(length),
        bubble=max(bubbles),
        bubble_fraction=float(1 - sum(times.ravel()) / schedule.stages / sum(length)),
        in_flight=in_flight,
        slots=slots(schedule),
        masked=float(masked),
    )


def stage_times(
    schedule: Schedule, F: Time, dX: Time, W: Time, layers: np.ndarray | None = None, ends: Ends = NO_ENDS
) -> np.ndarray:
    """Return the time of each stage's work in each tick, [ticks P], as Python numbers.

    F, dX, W: of the average stage, for one microbatch through all of its chunks. layers[C P]: the number of layers of
    each chunk of each stage; None: equal. ends: with split ends each stage computes 1/P of the loss, in a tick of its
    own, and nothing before the layers.
    """
    C, M, P = schedule.chunks, schedule.microbatches, schedule.stages
    shares, stage = _chunk_shares(schedule, layers), np.arange(P)

    def of_units(units: np.ndarray, time: Time) -> np.ndarray:
        return np.where(units == IDLE, 0, shares[units // M, stage]) * time

    is_split = schedule.weight.size > 0
    times = of_units(schedule.forward, F) + of_units(schedule.backward, dX if is_split else dX + W)
    for k in range(schedule.weight.shape[-1]):
        times = times + of_units(schedule.weight[..., k], W)
    if schedule.split_ends:
        return times + np.where(end_units(schedule).loss == IDLE, 0, Fraction(1, P) * ends.loss)[:, None]
    begins, finishes = ((table != IDLE) & (table < M) & (stage == 0) for table in (schedule.forward, schedule.backward))
    has_loss = (schedule.backward >= (C - 1) * M) & (stage == P - 1)
    of_ends = (begins, ends.first_forward), (finishes, ends.first_backward), (has_loss, ends.loss)
    return times + sum(np.where(is_there, time, 0) for is_there, time in of_ends)


def _chunk_shares(schedule: Schedule, layers: np.ndarray | None) -> np.ndarray:
    """Return the layers of each chunk over those of an average stage, [C P], as Fractions."""
    layers = np.ones((schedule.chunks, schedule.stages), int) if layers is None else np.asarray(layers)
    total = int(layers.sum())
    return np.array([[Fraction(int(n) * schedule.stages, total) for n in row] for row in layers], dtype=object)


def _name(schedule: Schedule, unit: int) -> str:
    """Return the microbatch of a unit as text and, with several chunks, a letter for its chunk."""
    chunk, microbatch = divmod(int(unit), schedule.microbatches)
    return f"{microbatch}{chr(ord('a') + chunk) if schedule.chunks > 1 else ''}"


def draw(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """Draw the table as text: a row for each stage, a column for each tick. mark: (tick, stage) to underline.

    Raises ValueError for more than 26 chunks: chunks have one letter each.
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
    """Parse the text form of a schedule, as `draw` writes it; stage numbers are optional. Does not validate it.

    Raises ValueError on a cell other than F, B and W with a microbatch and an optional chunk letter.
    """
    rows = [line.split("|")[-1].split() for line in text.strip().splitlines()]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(
            f"stages have {sorted({len(row) for row in rows})} ticks; give all the same number, with . for idle"
        )
    cells = [[_work(word) for word in row] for row in rows]
    everything = [work for row in cells for cell in row for work in cell]
    if not everything:
        raise ValueError("the table has no work; write e.g. F2B0, F1b, B3W3 or . for idle")
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
    """Parse a cell, e.g. F2bB0 -> [("F", 2, 1), ("B", 0, 0)]: kind, microbatch, chunk. Raises ValueError."""
    if not re.fullmatch(r"\.|(F\d+[a-z]?)?(B\d+[a-z]?)?(W\d+[a-z]?)*", word):
        raise ValueError(f"{word!r} is not the work of a tick; write e.g. F2B0, F1b, B3W3 or . for idle")
    work = re.findall(r"([FBW])(\d+)([a-z]?)", word)
    return [(kind, int(m), ord(c or "a") - ord("a")) for kind, m, c in work]
