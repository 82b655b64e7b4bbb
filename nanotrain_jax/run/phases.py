"""Run stages of training and their phases one after another on the same weights; all are built before the first step.

A run is at least one stage (train.stages), a stage at least one phase (train.batch_schedule, train.batch_growth,
parallel.full_sync_steps).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax

from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span
from nanotrain_jax.data.batches import Dataset
from nanotrain_jax.parallel.gradients import noise_scale
from nanotrain_jax.step import state as states
from nanotrain_jax.step.build import Step, shardings
from nanotrain_jax.step.state import State


class Phase(NamedTuple):
    """A phase of a stage of training, ready to run."""

    span: Span
    config: Config  # resolved, of the whole stage
    dataset: Dataset
    step: Step  # of the phase

    @property
    def batch_size(self) -> int:
        """Sequences per step."""
        return self.step.plan.config.data.batch_size


def is_over(phase: Phase, number: int, state: State) -> bool:
    """Return whether a phase ends after the step of this number, and the next one begins.

    train.batch_growth: the noise scale decides, which is in checkpoints; a phase takes at least a step. Waits for the
    device at its checks only.
    """
    growth, span = phase.config.train.batch_growth, phase.span
    if number >= span.last:
        return True
    if span.batch_size is None or not growth or number % growth.every or number <= span.first:
        return False
    return noise_scale.exceeds(state.noise, phase.batch_size)


def index_at(phases: list[Phase], number: int, batch_size: int | None) -> int:
    """Return the index of the phase that took the step of this number, with this batch (None: not known).

    With train.batch_growth: of the first phase of at least this batch.
    """

    def may_be(phase: Phase) -> bool:
        is_last = phase.span.batch_size is None or not phase.config.train.batch_growth
        return number <= phase.span.last and (is_last or phase.batch_size >= (batch_size or 0))

    return next((i for i, phase in enumerate(phases) if may_be(phase)), len(phases) - 1)


def begin(phase: Phase, last: Phase, state: State) -> State:
    """Return the state with which a phase begins, from that after the last phase, which it donates."""
    if phase.span.name != last.span.name:
        change = states.continued
    elif jax.tree.structure(phase.step.state) != jax.tree.structure(last.step.state):
        change = states.with_synchronization
    else:
        return state
    change_on_devices = partial(change, phase.step.plan)
    return jax.jit(change_on_devices, out_shardings=shardings(phase.step.state), donate_argnums=0)(state)


def describe(phase: Phase, number: int) -> list[str]:
    """Return lines about what follows the step of this number: the stage of training, what it trains, learning rate and
    data; the batch, and what replicas send, if a phase of the stage changes them."""
    plan, span, lines = phase.step.plan, phase.span, []
    lr, p = plan.config.optimizer.lr, plan.config.parallel
    if span.name:
        sizes = [x.size for x in jax.tree.leaves(plan.model.shapes)]
        trained = sum(size for size, trains in zip(sizes, jax.tree.leaves(plan.trainable), strict=True) if trains)
        lines.append(
            f"stage {span.name}: steps {number + 1} to {span.last}, trains {trained:,} of {sum(sizes):,} parameters, "
            f"lr {lr:g}, {phase.config.data.origin}"
        )
    if phase.config.train.batch_schedule or phase.config.train.batch_growth:
        lines.append(
            f"after step {number}: {phase.batch_size} sequences per step in {p.microbatches} microbatches, lr {lr:g}"
        )
    if phase.config.parallel.full_sync_steps:
        given = [f"parallel.{key}={getattr(p, key)}" for key in ("sync_every", "compress")]
        how = "gradients are summed whole over replica" if span.full_sync else ", ".join(given)
        lines.append(f"after step {number}: {how}")
    return lines
