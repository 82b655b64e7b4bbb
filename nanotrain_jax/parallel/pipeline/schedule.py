"""Pipeline schedules as tables: the work of each stage in each tick. Plain numpy; nothing runs here.

P stages, each with C chunks of layers; M microbatches. Chunk c of stage s is virtual stage c P + s of the model, so
activations always go to the next stage. A unit (Megatron-LM's virtual microbatch) is one microbatch in one chunk. In
each tick a stage has up to three kinds of work, in this order:

    F   forward of one unit
    B   its backward; in schedules with W only the gradient of the input
    W   the rest of its backward: the gradients of the weights

After F the output goes to the next stage, after B the gradient of the input to the previous one; both arrive in the
next tick. All stages run one program and synchronize in every tick, so a tick lasts as long as its busiest stage: 1F1B
with F and B in one tick has a smaller bubble than with one per tick (1f1b_lean), unless F = B. If a stage
takes F and B = dX + W per microbatch, through all of its chunks:

    schedule          bubble per stage        microbatches in flight   needs
    gpipe             (P-1) (F+B)             M                                        arXiv 1811.06965
    1f1b              (P-1) (F+B)             2 P - 1                                  arXiv 2104.04473, section 2.2.1
    1f1b_lean         the same if F = B       P                                        the same, F or B per tick
    interleaved       (P-1) (F+B) / C         P + (P-1) / C            M = n P         the same, section 2.2.2
    zero_bubble       (P-1) (F+dX-W) / C      P + (P-1) / C            M = n P if C > 1, M C >= P C + P - 2, else more
                                                                       bubble; like ZB-H1 of arXiv 2401.10241
    zb_h1             (P-1) (F+dX-W)          P                        M >= P          arXiv 2401.10241, section 2.3
    zb_h2             (P-1) (F+dX-2W)         2 P - 1                  M >= 2 P - 1    the same

zb_h1 and zb_h2 have one kind of work per tick: these bubbles hold if F, dX and W take the same time, else they are
larger. zero_bubble has F, B and W in one tick; its bubble holds whenever W takes no longer than F and dX. A microbatch
that waits for W takes more memory than one that waits for B (`slots.buffers`: intermediates): 2 P - 1 units may.

With split ends (`LayeredModel.split_ends`) all stages together embed a unit in the tick before its first F, compute its
loss in the tick after its last F, and finish its backward in the tick after its last B. Schedules that have F and B in
one tick run every B one tick later: one more microbatch in flight, the same time, since more ticks have only F, and as
many fewer have both.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from nanotrain_jax.config.values import near_multiples

IDLE = -1


class Schedule(NamedTuple):
    """A schedule as tables. Entries are units, numbered chunk M + microbatch, or IDLE."""

    chunks: int
    microbatches: int
    forward: np.ndarray  # [ticks P]
    backward: np.ndarray  # [ticks P]
    weight: np.ndarray  # [ticks P n]: up to n in a tick; n = 0: the backward is not split
    split_ends: bool = False  # True: for `LayeredModel.split_ends`

    @property
    def stages(self) -> int:
        return self.forward.shape[1]

    @property
    def ticks(self) -> int:
        """The number of ticks: iterations of the loop that runs the table."""
        return self.forward.shape[0]

    def work(self, tick: int, stage: int) -> list[tuple[str, int]]:
        """Return the work of a stage in a tick, in order: pairs of F, B or W and a unit."""
        work = [("F", self.forward[tick, stage]), ("B", self.backward[tick, stage])]
        work += [("W", unit) for unit in self.weight[tick, stage]]
        return [(kind, int(unit)) for kind, unit in work if unit != IDLE]


def gpipe(P: int, M: int) -> Schedule:
    """All forwards, then all backwards."""
    ticks, stage = np.arange(2 * (M + P - 1))[:, None], np.arange(P)[None]
    return _unsplit(1, M, _consecutive(ticks - stage, M), _consecutive(ticks - (M + P - 1) - (P - 1 - stage), M))


def interleaved(P: int, M: int, C: int = 1, delay: int = 0) -> Schedule:
    """Interleaved 1F1B over C chunks per stage: P microbatches through one chunk, then through the next. With one chunk
    1F1B. One forward and one backward in every tick of the steady state: stage s begins its M C forwards in tick s, its
    backwards in tick P C - 1 + delay + (P - 1 - s). delay: ticks from the last stage's F to its B.
    """
    ticks, stage = np.arange(M * C + P * C + P - 2 + delay)[:, None], np.arange(P)[None]

    def units(index: np.ndarray, reverse: bool) -> np.ndarray:
        round_, offset = np.divmod(index, P * C)  # rounds of P microbatches through all chunks
        chunk, microbatch = offset // P, round_ * P + offset % P
        chunk = C - 1 - chunk if reverse else chunk
        return np.where(index == IDLE, IDLE, chunk * M + (index if C == 1 else microbatch))

    forward = _consecutive(ticks - stage, M * C)
    backward = _consecutive(ticks - (P * C - 1 + delay) - (P - 1 - stage), M * C)
    return _unsplit(C, M, units(forward, False), units(backward, True))


def lean(P: int, M: int) -> Schedule:
    """1F1B with a forward or a backward per tick: fewest in flight, but ticks as long as the backward."""
    return _one_at_a_time(P, M, [P - s for s in range(P)], None)


def zb_h1(P: int, M: int) -> Schedule:
    """ZB-H1: as many microbatches in flight as 1F1B; weight gradients fill the bubble."""
    _needs("zb_h1", P, M, P)
    return _one_at_a_time(P, M, [P - s for s in range(P)], P)


def zb_h2(P: int, M: int) -> Schedule:
    """ZB-H2: twice as many in flight; no bubble between a stage's first and last work if F = dX = W."""
    _needs("zb_h2", P, M, 2 * P - 1)
    return _one_at_a_time(P, M, [2 * (P - s) - 1 for s in range(P)], 2 * P - 1)


def zero_bubble(P: int, M: int, C: int = 1, delay: int = 0) -> Schedule:
    """Interleaved 1F1B (1F1B, with one chunk) with deferred weight gradients.

    One W per tick from the first stage's first B on, none in the P - 1 ticks in which forwards run out, and one more
    where a stage has no forward, or no backward, while others do: so W fills the ticks that these shorten.
    """
    plain, forwards_end = interleaved(P, M, C, delay), M * C + P - 1
    tick = np.arange(plain.ticks)[:, None]
    usual = (tick >= P * C + P - 2 + delay) & ((tick < M * C) | (tick >= forwards_end))
    idle = np.where(tick < forwards_end, plain.forward, plain.backward) == IDLE  # while other stages are not
    most = usual.astype(int) + idle.astype(int)
    weight = np.full((plain.ticks, P, 2), IDLE)
    for s in range(P):
        units = plain.backward[:, s]
        order, ready, done = units[units != IDLE], (units != IDLE).cumsum(), 0
        for t in range(plain.ticks):
            count = min(most[t, s], ready[t] - done)
            weight[t, s, :count] = order[done : done + count]
            done += count
    return plain._replace(weight=weight[..., (weight != IDLE).any((0, 1))])


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": interleaved,
    "1f1b_lean": lean,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}


FUSED = ("1f1b", "interleaved", "zero_bubble")  # F and B of a unit in one tick on the last stage; they take `delay`
CHUNKED = ("interleaved", "zero_bubble")  # they take several chunks per stage
SPLIT = ("zero_bubble", "zb_h1", "zb_h2")  # they have W


def make(name: str, stages: int, microbatches: int, chunks: int = 1, split_ends: bool = False) -> Schedule:
    """Return a schedule by name. split_ends: for `LayeredModel.split_ends`.

    Raises ValueError if the schedule does not support these sizes; the message has valid ones.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; use {', '.join(SCHEDULES)}")
    for number, what in ((stages, "stages"), (microbatches, "microbatches"), (chunks, "chunks")):
        if number < 1:
            raise ValueError(f"{name}: {number} {what}; use 1 or more")
    if chunks > 1 and name not in CHUNKED:
        raise ValueError(f"{name}: {chunks} chunks per stage; use 1, or {' or '.join(CHUNKED)}")
    if chunks > 1 and microbatches % stages:
        multiples = near_multiples(microbatches, stages)
        raise ValueError(f"{name}: {microbatches} microbatches are not a multiple of {stages} stages; use {multiples}")
    sizes = (stages, microbatches, chunks) if name in CHUNKED else (stages, microbatches)
    delay = {"delay": 1} if split_ends and name in FUSED else {}
    table = SCHEDULES[name](*sizes, **delay)
    return with_split_ends(table) if split_ends else table


def with_split_ends(schedule: Schedule) -> Schedule:
    """Return a schedule for split ends: with an idle tick before it, to embed, and one after it.

    Needs B of a unit on the last stage at least one tick after its F (`schedule_text.validate`).
    """

    def padded(table: np.ndarray) -> np.ndarray:
        return np.pad(table, [(1, 1)] + [(0, 0)] * (table.ndim - 1), constant_values=IDLE)

    tables = (padded(table) for table in (schedule.forward, schedule.backward, schedule.weight))
    return Schedule(schedule.chunks, schedule.microbatches, *tables, split_ends=True)


def layer_order(schedule: Schedule, layers: int) -> np.ndarray:
    """-> order[layers]: row i of the stacked weights, sharded over pipe, is layer order[i] of the model.

        in_stage_order = jax.tree.map(lambda w: w[order], in_model_order)
        in_model_order = jax.tree.map(lambda w: w[np.argsort(order)], in_stage_order)

    0, 1, 2, ... with one chunk per stage. With several, a stage has layers that are not adjacent: weights stacked in
    model order would run in a wrong order without an error. Raises ValueError unless stages x chunks divides layers.
    """
    parts = schedule.stages * schedule.chunks
    if layers % parts:
        raise ValueError(
            f"{layers} layers cannot be split over {schedule.stages} stages x {schedule.chunks} chunks; "
            f"use a multiple of {parts}"
        )
    return row_order(schedule.stages, schedule.chunks, layers)


def row_order(stages: int, chunks: int, layers: int, loss: float = 0.0, first: float = 0.0) -> np.ndarray:
    """-> order[rows]: the layer of each row of the stacked weights, for any schedule with these stages and chunks.

    Every chunk has as many rows. Where it has fewer layers (`layers_of_chunks`), its last rows are padding: order has
    layers, layers + 1, ... for them.
    """
    counts = layers_of_chunks(stages, chunks, layers, loss, first)
    end = counts.cumsum().reshape(chunks, stages, 1)
    row = np.arange(counts.max())
    order = end - counts[..., None] + row
    is_padding = row >= counts[..., None]
    order[is_padding] = np.arange(layers, order.size)
    return order.swapaxes(0, 1).ravel()


def layers_of_chunks(stages: int, chunks: int, layers: int, loss: float = 0.0, first: float = 0.0) -> np.ndarray:
    """Return the number of layers of each chunk of each stage, [C P]; stages and chunks need not divide layers.

    All chunks have the same number n, except that the busiest chunk loses a layer until the sum is right; of equally
    busy ones the last. No chunk has more than without padding. loss, first: times of the loss on the last stage, and of
    what the first runs before its layers, in layers.
    """
    counts = np.full(stages * chunks, -(-layers // (stages * chunks)))
    load = counts.astype(float)
    load[0] += first
    load[-1] += loss
    for _ in range(counts.sum() - layers):
        busiest = counts.size - 1 - np.where(counts > 0, load, 0.0)[::-1].argmax()
        counts[busiest] -= 1
        load[busiest] -= 1
    return counts.reshape(chunks, stages)


def forward_only(P: int, M: int, C: int = 1, split_ends: bool = False) -> Schedule:
    """Return the forwards of a schedule with C chunks, for evaluation; any M."""
    full = -(-M // P) * P  # M rounded up: the last round of P microbatches may be partial
    units = interleaved(P, full, C).forward
    chunk, microbatch = np.divmod(units, full)
    forward = np.where((units != IDLE) & (microbatch < M), chunk * M + microbatch, IDLE)
    num_ticks = (forward != IDLE).any(1).nonzero()[0].max() + 1
    table = _unsplit(C, M, forward[:num_ticks], np.full((num_ticks, P), IDLE))
    return with_split_ends(table) if split_ends else table


def _needs(name: str, stages: int, microbatches: int, least: int) -> None:
    if microbatches < least:
        raise ValueError(
            f"{name}: {microbatches} microbatches are too few for {stages} stages; use at least {least}, or 1f1b"
        )


def _unsplit(C: int, M: int, forward: np.ndarray, backward: np.ndarray) -> Schedule:
    return Schedule(C, M, forward, backward, np.zeros((*forward.shape, 0), int))


def _consecutive(index: np.ndarray, length: int) -> np.ndarray:
    """Return index where it is in 0 .. length - 1, else IDLE."""
    return np.where((index >= 0) & (index < length), index, IDLE)


def _one_at_a_time(P: int, M: int, warm_up: Sequence[int], limit: int | None) -> Schedule:
    """One kind of work per tick: warm_up[s] forwards on stage s, then 1F1B, each as soon as its input has arrived.

    limit: None, or split the backward; W runs when a stage would be idle, or when `limit` microbatches are in flight.
    """
    planned = [deque(_order(M, warm_up[s], limit)) for s in range(P)]
    done = [dict.fromkeys("FBW", 0) for _ in range(P)]
    ticks: dict[tuple[str, int, int], int] = {}  # (kind, stage, microbatch) -> tick

    def ready(kind: str, s: int, t: int) -> bool:
        i = done[s][kind]
        if kind == "W":
            return limit is not None and i < done[s]["B"]
        source = ("F", s - 1) if kind == "F" else ("F", s) if s == P - 1 else ("B", s + 1)
        return source[1] < 0 or ticks.get((*source, i), t) < t

    def next_work(s: int, t: int) -> str:
        if planned[s] and ready(planned[s][0], s, t):
            return planned[s].popleft()
        return "W" if ready("W", s, t) else ""

    def run_tick(t: int) -> list[str]:
        row = [next_work(s, t) for s in range(P)]
        for s, kind in enumerate(row):
            if kind:
                ticks[kind, s, done[s][kind]] = t
                done[s][kind] += 1
        return row

    rows: list[list[str]] = []  # [ticks P]
    while any(done[s]["B" if limit is None else "W"] < M for s in range(P)):
        rows.append(run_tick(len(rows)))
    kinds = np.array(rows)
    tables = []
    for kind in "FBW":
        is_kind = kinds == kind
        tables.append(np.where(is_kind, is_kind.cumsum(0) - 1, IDLE))
    return Schedule(1, M, tables[0], tables[1], tables[2][..., None][..., : 0 if limit is None else 1])


def _order(M: int, warm_up: int, limit: int | None) -> list[str]:
    """Return the order of a stage's work: warm_up forwards, then B and F alternate; W where limit is reached."""
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
