"""The end of a step: optimizer update, loss scale, counters, metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel.update import Clip, Opt, merge, select, update, without_arrays
from nanotrain_jax.runtime import optim
from nanotrain_jax.step.plan import Plan
from nanotrain_jax.step.state import State

Tree = Any  # a pytree of arrays


class Pending(NamedTuple):
    """Gradients whose optimizer state is not in the step (`Plan.in_step`), and what their update needs."""

    grads: Tree  # laid out as master weights are; None for what the step updated itself
    counts: Tree  # optax state with None for its arrays: the number of steps before this one
    clip: Clip


def apply_update(plan: Plan, state: State, grads: Tree, clip: Clip) -> tuple[Tree, Opt, Pending | None]:
    """-> parameters, optimizer state, what is left to update. Each device updates what it has the gradients of.

    Stages 1 and 2 all-gather the new weights (`zero.share`).
    """
    params, grads_in_step, dims, on_host = (
        select(tree, plan.in_step) for tree in (state.params, grads, plan.shards.dims, plan.host_memory.optimizer)
    )
    own = plan.zero.own(params, dims)
    own, opt = update(plan.optimizer, own, grads_in_step, state.opt, clip, on_host)
    params = merge(plan.zero.share(own, plan.shards._replace(dims=dims)), state.params)
    outside = jax.tree.map(lambda in_step: not in_step, plan.in_step)
    if not any(jax.tree.leaves(outside)):
        return params, opt, None
    return params, opt, Pending(select(grads, outside), without_arrays(plan.optimizer, state.opt.moments), clip)


def next_state(plan: Plan, state: State, params: Tree, opt: Opt, is_finite: jax.Array) -> State:
    """The state after a step; one whose gradients are not finite counts as skipped."""
    skipped = state.skipped + jnp.where(is_finite, 0, 1)
    scale = state.scale and optim.adjust(state.scale, is_finite, plan.config.precision)
    return State(state.step + 1, skipped, params, opt, scale)


def metrics(plan: Plan, before: State, after: State, loss: jax.Array, clip: Clip) -> dict[str, jax.Array]:
    """What `Step.train` reports of the step between two states. loss: of the batch, times the loss scale."""
    found = {
        "loss": loss / before.scale.value if before.scale else loss,
        "grad_norm": clip.norm,
        "lr": jnp.asarray(plan.lr_schedule(before.step - before.skipped), jnp.float32),
        "skipped_steps": after.skipped,
    }
    return found | ({"loss_scale": before.scale.value} if before.scale else {})
