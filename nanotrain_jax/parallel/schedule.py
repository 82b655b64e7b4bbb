"""Pipeline schedules as tables: what each stage does in each tick. Plain numpy; nothing runs here.

P stages, each with C chunks of layers; chunk c of stage s holds piece c P + s of the model, so that every hand-over
goes one stage on. M microbatches. A tick has up to three kinds of work on each stage, in this order:

    F   forward of one microbatch through one chunk
    B   its backward; where a schedule has W, only what the stage before waits for
    W   the rest of its backward: the gradients of the weights

After F the output goes one stage on, after B the gradient of the input one stage back; both are there in the next tick.
All stages of a single program meet there, so a tick lasts as long as its busiest stage, and 1F1B is better drawn with F
and B in one tick (`one_f_one_b`) than with one of them (`lean`). With P stages that take F, B = dX + W in all:

    schedule          waiting (bubble)        microbatches in flight   needs
    gpipe             (P-1) (F+B)             M                                        arXiv 1811.06965
    1f1b              (P-1) (F+B)             2 P - 1                                  arXiv 2104.04473, section 2.2.1
    1f1b_lean         where F = B the same    P                                        the same, one at a time
    interleaved       (P-1) (F+B) / C         P + (P-1) / C            M = n P         the same, section 2.2.2
    zero_bubble       (P-1) (F+dX-W)          3 P - 2                  M >= 3 (P-1)    like ZB-H1; else waits more
    zb_h1             (P-1) (F+dX-W)          P                        M >= P          arXiv 2401.10241, section 2.3
    zb_h2             (P-1) (F+dX-2W)         2 P - 1                  M >= 2 P - 1    the same

zb_h1 and zb_h2 do one thing in a tick: they wait as little as this where F, dX and W take the same time, else longer.
zero_bubble keeps its word wherever W takes no longer than F or dX, and pays in microbatches in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

IDLE = -1


class Schedule(NamedTuple):
    """A table. Entries are units, chunk M + microbatch, or IDLE."""

    chunks: int
    microbatches: int
    forward: np.ndarray  # [ticks P]
    backward: np.ndarray  # [ticks P]
    weight: np.ndarray  # [ticks P n]: up to n of them in a tick; n = 0: they are part of the backward

    @property
    def stages(self) -> int:
        """P"""
        return self.forward.shape[1]

    @property
    def ticks(self) -> int:
        """Turns of the one loop that runs the table."""
        return self.forward.shape[0]

    def work(self, tick: int, stage: int) -> list[tuple[str, int]]:
        """-> F, B or W, and its unit: what a stage does in a tick, in the order in which it does so."""
        work = [("F", self.forward[tick, stage]), ("B", self.backward[tick, stage])]
        work += [("W", unit) for unit in self.weight[tick, stage]]
        return [(kind, int(unit)) for kind, unit in work if unit != IDLE]


class Buffer(NamedTuple):
    """Where each stage keeps something of each unit while it is needed."""

    count: int  # slots, on the stage that needs most (a single program has as many everywhere)
    slot: np.ndarray  # [units + 1, P]; the last row, which IDLE finds, is one spare slot more


def gpipe(P: int, M: int) -> Schedule:
    """All forwards, then all backwards."""
    ticks, stage = np.arange(2 * (M + P - 1))[:, None], np.arange(P)[None]
    return _whole(1, M, _stream(ticks - stage, M), _stream(ticks - (M + P - 1) - (P - 1 - stage), M))


def one_f_one_b(P: int, M: int) -> Schedule:
    """One forward and one backward in every tick of the steady state."""
    return _fused(P, M, 1)


def interleaved(P: int, M: int, C: int) -> Schedule:
    """1F1B over C chunks per stage: P microbatches through one chunk, then through the next."""
    if M % P:
        raise ValueError(f"interleaved: {M} microbatches are not a multiple of {P} stages; use {_multiples(M, P)}")
    return _fused(P, M, C)


def lean(P: int, M: int) -> Schedule:
    """1F1B with either a forward or a backward in a tick: fewest in flight; a tick lasts as long as the backward."""
    return _one_at_a_time(P, M, [P - s for s in range(P)], None)


def zb_h1(P: int, M: int) -> Schedule:
    """As many in flight as 1F1B; gradients of weights fill the time in which stages would wait."""
    _needs("zb_h1", P, M, P)
    return _one_at_a_time(P, M, [P - s for s in range(P)], P)


def zb_h2(P: int, M: int) -> Schedule:
    """Twice as many in flight; where F = dX = W no stage waits between its first and its last work."""
    _needs("zb_h2", P, M, 2 * P - 1)
    return _one_at_a_time(P, M, [2 * (P - s) - 1 for s in range(P)], 2 * P - 1)


def zero_bubble(P: int, M: int) -> Schedule:
    """1F1B whose gradients of weights wait: at first nobody makes any, for P - 1 ticks longer than the first backward
    takes to the first stage; then a stage makes one in each tick, and two where it lacks the forward or the backward
    that others have."""
    plain = _fused(P, M, 1)
    first = max(min(3 * (P - 1), M), P - 1)
    weight = np.full((plain.ticks, P, 2), IDLE)
    gone_back = (plain.backward != IDLE).cumsum(0).tolist()
    for s in range(P):
        done = 0
        for t in range(first, plain.ticks):
            lacks = plain.forward[t, s] if t < M + P - 1 else plain.backward[t, s]  # what others do in this tick
            count = min(2 if lacks == IDLE else 1, gone_back[t][s] - done)
            weight[t, s, :count] = range(done, done + count)
            done += count
    return plain._replace(weight=weight[..., (weight != IDLE).any((0, 1))])


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b_lean": lean,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}


def make(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A schedule by name. Raises ValueError if there is none for so many microbatches or chunks, and says which."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; use {', '.join(SCHEDULES)}")
    for number, what in ((stages, "stages"), (microbatches, "microbatches"), (chunks, "chunks")):
        if number < 1:
            raise ValueError(f"{name}: {number} {what}; use 1 or more")
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks)
    if chunks > 1:
        raise ValueError(f"{name}: {chunks} chunks per stage; use 1, or interleaved")
    return SCHEDULES[name](stages, microbatches)


def layer_order(schedule: Schedule, layers: int) -> np.ndarray:
    """-> order[layers]: row i of the stacked weights, sharded over pipe, is layer order[i] of the model.

        in_stage_order = jax.tree.map(lambda w: w[order], in_model_order)
        in_model_order = jax.tree.map(lambda w: w[np.argsort(order)], in_stage_order)

    0, 1, 2, ... with one chunk per stage. With several, a stage holds layers that are not neighbors: weights stacked in
    the order of the model would run in another order, without an error. Raises ValueError unless stages x chunks divide
    layers.
    """
    return row_order(schedule.stages, schedule.chunks, layers)


def row_order(stages: int, chunks: int, layers: int) -> np.ndarray:
    """`layer_order` of any schedule with that many stages and chunks."""
    if layers % (stages * chunks):
        raise ValueError(
            f"{layers} layers cannot be split over {stages} stages x {chunks} chunks; "
            f"use a multiple of {stages * chunks}"
        )
    return np.arange(layers).reshape(chunks, stages, -1).swapaxes(0, 1).ravel()


def forward_only(P: int, M: int, C: int = 1) -> Schedule:
    """The forwards of a schedule with C chunks, for evaluation; M may be any number."""
    full = -(-M // P) * P  # the last round may not be
    units = _fused(P, full, C).forward
    chunk, microbatch = np.divmod(units, full)
    forward = np.where((units != IDLE) & (microbatch < M), chunk * M + microbatch, IDLE)
    keep = (forward != IDLE).any(1).nonzero()[0].max() + 1
    return _whole(C, M, forward[:keep], np.full((keep, P), IDLE))


def _needs(name: str, stages: int, microbatches: int, least: int) -> None:
    if microbatches < least:
        raise ValueError(
            f"{name}: {microbatches} microbatches are too few for {stages} stages; use at least {least}, or 1f1b"
        )


def _multiples(number: int, of: int) -> str:
    """The multiples of `of` on either side of number."""
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n)


def _whole(C: int, M: int, forward: np.ndarray, backward: np.ndarray) -> Schedule:
    return Schedule(C, M, forward, backward, np.zeros((*forward.shape, 0), int))


def _stream(place: np.ndarray, length: int) -> np.ndarray:
    """0, 1, 2, ... where place is, IDLE before and after."""
    return np.where((place >= 0) & (place < length), place, IDLE)


def _fused(P: int, M: int, C: int) -> Schedule:
    """Stage s begins its M C forwards in tick s, and its backwards in tick P C - 1 + (P - 1 - s)."""
    ticks, stage = np.arange(M * C + P * C + P - 2)[:, None], np.arange(P)[None]

    def units(place: np.ndarray, reverse: bool) -> np.ndarray:
        turn, inside = np.divmod(place, P * C)  # rounds of P microbatches through all chunks
        chunk, microbatch = inside // P, turn * P + inside % P
        chunk = C - 1 - chunk if reverse else chunk
        return np.where(place == IDLE, IDLE, chunk * M + (place if C == 1 else microbatch))

    forward = _stream(ticks - stage, M * C)
    backward = _stream(ticks - (P * C - 1) - (P - 1 - stage), M * C)
    return _whole(C, M, units(forward, False), units(backward, True))


def _one_at_a_time(P: int, M: int, warm_up: Sequence[int], limit: int | None) -> Schedule:
    """Stage s: warm_up[s] forwards, then backward and forward in turns, each as soon as its input is there.

    limit: with gradients of weights on their own, made when a stage would wait, or when so many are in flight.
    """
    planned = [deque(_order(M, warm_up[s], limit)) for s in range(P)]
    done = [dict.fromkeys("FBW", 0) for _ in range(P)]
    when: dict[tuple[str, int, int], int] = {}

    def ready(kind: str, s: int, t: int) -> bool:
        i = done[s][kind]
        if kind == "W":
            return limit is not None and i < done[s]["B"]
        source = ("F", s - 1) if kind == "F" else ("F", s) if s == P - 1 else ("B", s + 1)
        return source[1] < 0 or when.get((*source, i), t) < t

    def next_work(s: int, t: int) -> str:
        if planned[s] and ready(planned[s][0], s, t):
            return planned[s].popleft()
        return "W" if ready("W", s, t) else ""

    def run_tick(t: int) -> list[str]:
        row = [next_work(s, t) for s in range(P)]
        for s, kind in enumerate(row):
            if kind:
                when[kind, s, done[s][kind]] = t
                done[s][kind] += 1
        return row

    rows: list[list[str]] = []  # [ticks P]
    while any(done[s]["B" if limit is None else "W"] < M for s in range(P)):
        rows.append(run_tick(len(rows)))
    kinds = np.array(rows)
    tables = []
    for kind in "FBW":
        here = kinds == kind
        tables.append(np.where(here, here.cumsum(0) - 1, IDLE))
    return Schedule(1, M, tables[0], tables[1], tables[2][..., None][..., : 0 if limit is None else 1])


def _order(M: int, warm_up: int, limit: int | None) -> list[str]:
    """The order of a stage's work: warm_up forwards, then backward and forward in turns; W where limit is reached."""
    forwards = min(warm_up, M)
    weights = 0
    kinds = ["F"] * forwards
    for _ in range(M):
        kinds.append("B")
        if forwards == M:
            continue
        if limit is not None and forwards - weights >= limit:
            kinds.append("W")
            weights += 1
        kinds.append("F")
        forwards += 1
    return kinds


def ticks_of(table: np.ndarray, units: int) -> np.ndarray:
    """table [ticks P] or [ticks P n] -> the tick of each unit on each stage [units P]; -1 where it is missing."""
    found, places = np.full((units, table.shape[1]), -1), (table != IDLE).nonzero()
    found[table[places], places[1]] = places[0]
    return found


def _piece(schedule: Schedule) -> np.ndarray:
    """[units P]: which piece of the model a unit goes through on a stage."""
    chunk = np.arange(schedule.chunks * schedule.microbatches) // schedule.microbatches
    return chunk[:, None] * schedule.stages + np.arange(schedule.stages)[None]


def arrivals(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """-> the units whose input, and those whose output's gradient, comes in at the beginning of each tick [ticks P]."""
    P, C, M = schedule.stages, schedule.chunks, schedule.microbatches

    def shifted(table: np.ndarray, step: int) -> np.ndarray:
        sent = np.roll(np.vstack([np.full((1, P), IDLE), table[:-1]]), step, 1)
        edge = 0 if step > 0 else P - 1  # the ring closes: into the next chunk, or the one before
        came = sent[:, edge] + step * M
        sent[:, edge] = np.where((sent[:, edge] != IDLE) & (came >= 0) & (came < C * M), came, IDLE)
        return sent

    return shifted(schedule.forward, 1), shifted(schedule.backward, -1)


def buffers(schedule: Schedule) -> dict[str, Buffer]:
    """What stages keep, and for how long:

    inputs       from its arrival to F
    gradients    gradients of outputs from their arrival to B; of the last piece, its output from F to B
    backward     what B needs, from F
    late         what B does not need but W does, from F; none without W
    handed       what B made for W; none without W
    """
    return {name: _slots(*span) for name, span in _spans(schedule).items()}


def slots(schedule: Schedule) -> dict[str, int]:
    """How many slots each of `buffers` has, without saying which is whose: the most that live at a time."""
    found = {}
    for name, (begin, end, kept) in _spans(schedule).items():
        changes, stage = np.zeros((end.max() + 2, schedule.stages), int), np.arange(schedule.stages) + 0 * begin
        np.add.at(changes, (begin[kept], stage[kept]), 1)
        np.add.at(changes, (end[kept] + 1, stage[kept]), -1)
        found[name] = int(changes.cumsum(0).max())
    return found


def _spans(schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Name of a buffer -> when what it keeps of each unit begins, when it ends, and whether there is any [units P].

    There are four moments in a tick: arrival, F, B, W.
    """
    units, last = schedule.chunks * schedule.microbatches, schedule.chunks * schedule.stages - 1
    F, B = ticks_of(schedule.forward, units), ticks_of(schedule.backward, units)
    W = ticks_of(schedule.weight, units) if schedule.weight.size else np.full_like(F, -1)
    x, g = (ticks_of(table, units) for table in arrivals(schedule))
    g = np.where(_piece(schedule) == last, F, g)
    spans = {"inputs": (x, 0, F, 1), "gradients": (g, 0, B, 2), "backward": (F, 1, B, 2)}
    spans |= {"late": (F, 1, W, 3), "handed": (B, 2, W, 3)}
    return {name: (4 * start + i, 4 * end + j, (start >= 0) & (end >= 0)) for name, (start, i, end, j) in spans.items()}


def _slots(begin: np.ndarray, end: np.ndarray, kept: np.ndarray) -> Buffer:
    """The lowest slot that is free from begin to end [units P], both included; none where nothing is kept."""
    units, P = begin.shape
    slot = np.full((units + 1, P), IDLE)
    for s in range(P):
        slot[:units, s] = _slots_of_stage(begin[:, s], end[:, s], kept[:, s])
    count = int(slot.max()) + 1  # IDLE is -1
    return Buffer(count, np.where(slot == IDLE, count, slot))


def _slots_of_stage(begin: np.ndarray, end: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """-> slot[units], IDLE where nothing is kept."""
    slot = np.full(begin.shape, IDLE)
    busy_until: list[int] = []  # of each slot
    for unit in np.argsort(begin, kind="stable"):
        if kept[unit]:
            free = next((i for i, t in enumerate(busy_until) if t < begin[unit]), len(busy_until))
            busy_until[free : free + 1] = [end[unit]]
            slot[unit] = free
    return slot
