"""Stages of training (train.stages): all built before the first step, then run one after another on the same weights.

Without train.stages a run is one stage.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax

from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span
from nanotrain_jax.data.batches import Dataset
from nanotrain_jax.step import state as states
from nanotrain_jax.step.build import Step, shardings
from nanotrain_jax.step.state import State


class Stage(NamedTuple):
    """A stage of training, ready to run."""

    span: Span
    config: Config  # resolved
    dataset: Dataset
    step: Step


def begin(stage: Stage, before: State) -> State:
    """Return the state with which a stage begins, from that after the stage before it, which it donates."""
    begin_on_devices = partial(states.continued, stage.step.plan)
    return jax.jit(begin_on_devices, out_shardings=shardings(stage.step.state), donate_argnums=0)(before)


def describe(stage: Stage) -> str:
    """Return a line about a stage: its steps, what it trains, learning rate and data."""
    plan, config = stage.step.plan, stage.config
    sizes = [x.size for x in jax.tree.leaves(plan.model.shapes)]
    trained = sum(size for size, trains in zip(sizes, jax.tree.leaves(plan.trainable), strict=True) if trains)
    return (
        f"stage {stage.span.name}: steps {stage.span.first + 1} to {stage.span.last}, trains {trained:,} of "
        f"{sum(sizes):,} parameters, lr {config.optimizer.lr:g}, {config.data.source}"
    )
