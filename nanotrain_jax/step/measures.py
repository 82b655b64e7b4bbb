"""What a step brings out beside its loss: the means of the sums that `Model.last` returns by name (`Model.measures`).

Every execution returns gradients, summed over microbatches. So beside the weights it differentiates the loss with
respect to probes, zeros, whose gradients are the sums times that of the loss; no loop over layers knows of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel.collectives import Tree, as_varying, position
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.step.plan import Plan

TRAIN = "train_"  # before the name of a measure: its mean in a step, beside that of an evaluation


def probes(plan: Plan) -> Tree | None:
    """Return a zero for each measure of the model; None if it has none."""
    zeros = {name: jnp.zeros(shape) for name, shape in plan.model.measures.items()}
    return as_varying(zeros, plan.loss_axes) or None


def observed(plan: Plan, sums: tuple, probes: Tree | None) -> jax.Array:
    """Return the sum of losses of what `Model.last` returned. In the backward the gradients of probes are the measures.

    With parallel.vocab_over_pipe all stages have the same: only the last one returns them.
    """
    if probes is None:
        return sums[0]
    loss, _, measures = sums
    if plan.model.splits_vocab:
        is_last = position("pipe") == plan.config.parallel.pipe - 1
        measures = jax.tree.map(lambda x: jnp.where(is_last, x, 0.0), measures)
    measures = as_varying(jax.lax.stop_gradient(measures), plan.loss_axes)
    return with_backward(_forward, _backward)(loss, measures, probes)


def report(plan: Plan, means: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return what is logged of the means of measures (`Model.report`)."""
    return plan.model.report(means) if plan.model.report else means


def of_evaluation(plan: Plan, means: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return what an evaluation logs of the means of measures over all its batches."""
    return report(plan, means) | (plan.model.details(means) if plan.model.details else {})


def _forward(loss: jax.Array, measures: Tree, probes: Tree) -> tuple[jax.Array, Tree]:
    return loss, measures


def _backward(measures: Tree, g: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    return g, jax.tree.map(jnp.zeros_like, measures), jax.tree.map(lambda x: g * x, measures)
