"""Ring-buffer slots of a schedule: which slot holds which unit's activations and residuals, and how many it takes.

A unit occupies a slot from the tick that writes it to the tick that reads it last (`schedule.py` defines units and
ticks). The number of slots is the memory of a pipeline stage: for 1F1B it does not grow with the number of
microbatches. Plain numpy.
"""

from typing import NamedTuple

import numpy as np

from nanotrain_jax.parallel.pipeline.schedule import IDLE, Schedule


class Buffer(NamedTuple):
    """The slots of one buffer: a slot for each unit on each stage."""

    count: int  # slots on the stage that needs most: one program allocates the same on all stages
    slot: np.ndarray  # [units + 1, P]; the last row, which IDLE = -1 indexes, is the spare slot `count`


def ticks_of(table: np.ndarray, units: int) -> np.ndarray:
    """table [ticks P] or [ticks P n] -> the tick of each unit on each stage [units P]; -1 where it is missing."""
    ticks, entries = np.full((units, table.shape[1]), -1), (table != IDLE).nonzero()
    ticks[table[entries], entries[1]] = entries[0]
    return ticks


def arrivals(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """-> the units whose input, and those whose output gradient, arrives at the beginning of each tick [ticks P]."""
    P, C, M = schedule.stages, schedule.chunks, schedule.microbatches

    def shifted(table: np.ndarray, step: int) -> np.ndarray:
        sent = np.roll(np.vstack([np.full((1, P), IDLE), table[:-1]]), step, 1)
        edge = 0 if step > 0 else P - 1  # the ring wraps around to the next chunk, or the previous one
        arrived = sent[:, edge] + step * M
        sent[:, edge] = np.where((sent[:, edge] != IDLE) & (arrived >= 0) & (arrived < C * M), arrived, IDLE)
        return sent

    return shifted(schedule.forward, 1), shifted(schedule.backward, -1)


class EndUnits(NamedTuple):
    """With split ends: the units of both ends in each tick [ticks], the same on all stages, or IDLE."""

    embedded: np.ndarray  # `first`, in the tick before F on the first stage
    loss: np.ndarray  # `last`, in the tick after F on the last stage
    of_first: np.ndarray  # the backward of `first`, in the tick after B on the first stage


def end_units(schedule: Schedule) -> EndUnits:
    """Return the units of the ends in each tick."""
    C, M = schedule.chunks, schedule.microbatches
    on_first, of_first = schedule.forward[:, 0], schedule.backward[:, 0]
    on_last = schedule.forward[:, -1]
    return EndUnits(
        embedded=np.roll(np.where(on_first < M, on_first, IDLE), -1),
        loss=np.roll(np.where(on_last >= (C - 1) * M, on_last, IDLE), 1),
        of_first=np.roll(np.where(of_first < M, of_first, IDLE), 1),
    )


def buffers(schedule: Schedule) -> dict[str, Buffer]:
    """Return the buffers of a stage, by name:

    inputs           the input of a unit, from its arrival to F
    gradients        the gradient of its output, from its arrival to B; of the last virtual stage its output, F to B;
                     with split ends from the loss to B
    backward         residuals that only B needs, from F to B
    backward_weight  residuals that W needs, from F to W; empty without W
    intermediates    intermediates of the backward, from B to W; empty without W
    """
    return {name: _allocate(*span) for name, span in _spans(schedule).items()}


def slots(schedule: Schedule) -> dict[str, int]:
    """Return only the slot counts of `buffers`: the most units alive at a time."""
    counts = {}
    for name, (begin, end, is_stored) in _spans(schedule).items():
        changes, stage = np.zeros((end.max() + 2, schedule.stages), int), np.arange(schedule.stages) + 0 * begin
        np.add.at(changes, (begin[is_stored], stage[is_stored]), 1)
        np.add.at(changes, (end[is_stored] + 1, stage[is_stored]), -1)
        counts[name] = int(changes.cumsum(0).max())
    return counts


def _spans(schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return, for each buffer, the times of first write and last read of each unit, and if it is stored [units P].

    A tick has four times: arrival, F, B, W.
    """
    units, last = schedule.chunks * schedule.microbatches, schedule.chunks * schedule.stages - 1
    F, B = ticks_of(schedule.forward, units), ticks_of(schedule.backward, units)
    W = ticks_of(schedule.weight, units) if schedule.weight.size else np.full_like(F, -1)
    x, g = (ticks_of(table, units) for table in arrivals(schedule))
    chunk = np.arange(units)[:, None] // schedule.microbatches
    virtual_stage = chunk * schedule.stages + np.arange(schedule.stages)[None]
    g = np.where(virtual_stage == last, F + schedule.split_ends, g)
    if schedule.split_ends:
        x = np.where(virtual_stage == 0, F, x)
    spans = {"inputs": (x, 0, F, 1), "gradients": (g, 0, B, 2), "backward": (F, 1, B, 2)}
    spans |= {"backward_weight": (F, 1, W, 3), "intermediates": (B, 2, W, 3)}
    return {name: (4 * start + i, 4 * end + j, (start >= 0) & (end >= 0)) for name, (start, i, end, j) in spans.items()}


def _allocate(begin: np.ndarray, end: np.ndarray, is_stored: np.ndarray) -> Buffer:
    """Give each stored unit the lowest slot that is free from begin to end [units P], both inclusive."""
    units, P = begin.shape
    slot = np.full((units + 1, P), IDLE)
    for s in range(P):
        slot[:units, s] = _allocate_stage(begin[:, s], end[:, s], is_stored[:, s])
    count = int(slot.max()) + 1  # IDLE is -1
    return Buffer(count, np.where(slot == IDLE, count, slot))


def _allocate_stage(begin: np.ndarray, end: np.ndarray, is_stored: np.ndarray) -> np.ndarray:
    """-> slot[units], IDLE for units that are not stored."""
    slot = np.full(begin.shape, IDLE)
    busy_until: list[int] = []  # of each slot
    for unit in np.argsort(begin, kind="stable"):
        if is_stored[unit]:
            free = next((i for i, t in enumerate(busy_until) if t < begin[unit]), len(busy_until))
            busy_until[free : free + 1] = [end[unit]]
            slot[unit] = free
    return slot
