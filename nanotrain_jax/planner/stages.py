"""What each pipeline stage computes and communicates, counted in a compiled program.

The program is the same on all stages; the schedule decides which parts of it a stage executes, in which ticks. All
stages synchronize in every tick, so a step lasts as long as the busiest stage of each tick: `lockstep_flops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from nanotrain_jax.audit import hlo, matmuls, wire
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import communication, counts
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline import schedule_text


def per_stage(text: str, config: Config, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return matmul FLOPs and wire bytes of every stage, and `lockstep_flops`. text: compiled HLO; axes: `mesh.shape`.

    idle="skip" only: with idle="mask" all stages execute everything in every tick.
    """
    P, flops = config.parallel.pipe, tick_flops(text, config)
    of_kind = [wire_bytes(text, axes, rates_of_stage(config, stage)) for stage in (0, P // 2, P - 1)]
    middle = [of_kind[1]] * (P - 2)
    return {
        "flops": flops.sum(0).tolist(),
        "wire_bytes": [of_kind[0], *middle, of_kind[2]],
        "lockstep_flops": float(flops.max(1).sum()),
    }


def wire_bytes(text: str, axes: Mapping[str, int], rates: hlo.Rates) -> float:
    """Return the wire bytes of a device with these rates."""
    return float(sum(c.bytes * c.count for c in wire.collectives(text, axes, rates)))


def rates_of_stage(config: Config, stage: int) -> dict[str, Fraction]:
    """Return `communication.conditional_rates` of one stage: without split ends only the first and last have ends."""
    rates = communication.conditional_rates(config)
    if config.parallel.vocab_over_pipe:
        return rates
    has = {"first": stage == 0, "last": stage == config.parallel.pipe - 1}
    return {name: rate if has.get(name, True) else Fraction(0) for name, rate in rates.items()}


def tick_flops(text: str, config: Config) -> np.ndarray:
    """Return the matmul FLOPs of every stage in every tick, [ticks P]."""
    p, layers = config.parallel, counts.layers_of_chunks(config)
    schedule = schedules.make(p.schedule, p.pipe, p.microbatches, p.chunks, bool(p.vocab_over_pipe))
    of_part = part_flops(text, config)
    average = layers.sum() / p.pipe / layers.max()  # of a stage, over the largest chunk
    F, B, W = (average * of_part[part] for part in ("forward", "backward", "weight"))
    loss = of_part["last"] * (p.pipe if p.vocab_over_pipe else 1)
    ends = schedule_text.Ends(of_part["first_forward"], of_part["first_backward"], loss)
    return schedule_text.stage_times(schedule, F, B, W, layers, ends).astype(float)


def part_flops(text: str, config: Config) -> dict[str, float]:
    """Return the matmul FLOPs of one execution of each part of a tick: F, B and W of layers, what the first stage runs
    before them in its F and after them in its B (dense layers of a mixture), the loss."""
    schedule = counts.outline(config)
    nothing = dict.fromkeys(communication.conditional_rates(config), 0) | {"accumulate": 1, "layer": 1}

    def in_every_tick(*parts: str) -> float:
        return matmuls.flops(text, nothing | dict.fromkeys(parts, 1)) / schedule.ticks

    outside = in_every_tick()  # of ticks; encoders that `first` runs, say
    forward, backward = in_every_tick("forward"), in_every_tick("backward")
    return {
        "forward": forward - outside,
        "backward": backward - outside,
        "weight": (in_every_tick("weight") - outside) / max(1, schedule.weights),
        "first_forward": in_every_tick("forward", "first") - forward,
        "first_backward": in_every_tick("backward", "first") - backward,
        "last": in_every_tick("backward", "last") - backward,
    }
