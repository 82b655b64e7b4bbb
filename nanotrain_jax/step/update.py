"""The end of a training step: optimizer update, loss scale, counters, metrics."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.models.contract import LAYERS
from nanotrain_jax.parallel.collectives import Tree, position
from nanotrain_jax.parallel.gradients import local_steps, noise_scale
from nanotrain_jax.parallel.gradients.noise_scale import Noise
from nanotrain_jax.parallel.zero.optimizer_step import Clip, Opt, global_norm, merge, select, update, without_arrays
from nanotrain_jax.step import optimizer
from nanotrain_jax.step.compressed import Feedback, sum_over_replicas
from nanotrain_jax.step.plan import Plan
from nanotrain_jax.step.state import State


class Pending(NamedTuple):
    """Gradients of the arrays that the step does not update (`Plan.in_step`), and the other inputs of their update."""

    grads: Tree  # laid out as master weights; None for arrays that the step has updated
    counts: Tree  # optax state with None for its arrays: step counts before this step
    clip: Clip


@jax.named_scope("update")
def apply_update(plan: Plan, state: State, grads: Tree, clip: Clip) -> tuple[Tree, Opt, Pending | None]:
    """-> parameters, optimizer state, pending gradients. Each device updates the shards whose gradients it has.

    ZeRO 1 and 2 all-gather the updated weights (`zero.gather_updated`).
    """
    params, grads_in_step, cuts, on_host = (
        select(tree, plan.in_step) for tree in (state.params, grads, plan.shards.cuts, plan.host_memory.optimizer)
    )
    shards = plan.shards._replace(cuts=cuts)
    own = plan.zero.own_shards(params, shards)
    own, opt = update(plan.optimizer, own, grads_in_step, state.opt, clip, on_host)
    params = merge(plan.zero.gather_updated(own, shards), state.params)
    if not any(jax.tree.leaves(plan.pending)):
        return params, opt, None
    return params, opt, Pending(select(grads, plan.pending), without_arrays(plan.optimizer, state.opt.moments), clip)


@jax.named_scope("adjust")
def adjusted(plan: Plan, params: Tree, measures: dict[str, jax.Array], is_finite: jax.Array) -> Tree:
    """Return parameters after `Model.adjust`. measures: of the whole batch; is_finite: False for a skipped step."""
    if plan.model.adjust is None:
        return params
    P, L = plan.config.parallel.pipe, plan.config.model.main_layers
    layers = jnp.minimum(jnp.arange(L) if plan.layer_order is None else jnp.asarray(plan.layer_order), L - 1)
    rows = layers.reshape(P, -1)[position("pipe")] if P > 1 else layers
    shapes = plan.model.measures
    of_rows = {name: x[rows] for name, x in measures.items() if shapes[name][:1] == (L,)}
    after = plan.model.adjust(params[LAYERS], of_rows)
    return params | {LAYERS: jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, params[LAYERS])}


def next_state(
    plan: Plan, state: State, params: Tree, opt: Opt, feedback: Feedback | None, is_finite: jax.Array
) -> State:
    """Return the state after a step. A step whose gradients are not finite counts as skipped."""
    skipped = state.skipped + jnp.where(is_finite, 0, 1)
    scale = state.scale and optimizer.adjust(state.scale, is_finite, plan.config.precision)
    step = state.step + 1
    return state._replace(step=step, skipped=skipped, params=params, opt=opt, scale=scale, feedback=feedback)


@jax.named_scope("noise_scale")
def next_noise(plan: Plan, state: State, squares: jax.Array, grads: Tree, is_finite: jax.Array) -> Noise:
    """Add a step to the averages of the gradient noise scale. All-reduces two scalars.

    squares: of `Gradients`; grads: reduced.
    """
    batch = plan.small_batches
    of_small = noise_scale.mean_square(squares, batch)
    of_batch = global_norm(select(grads, plan.measured)) ** 2
    return noise_scale.average(state.noise, of_small, of_batch, batch, is_finite)


@jax.named_scope("synchronize")
def synchronize(plan: Plan, state: State) -> State:
    """Take the outer step on this device's shards (`local_steps.outer_step`); every replica continues from its weights.

    With N devices of ZeRO: all-reduces 4 bytes per element of 1/N of the weights over replica, or less with
    parallel.compress (SparseLoCo, arXiv 2508.15706). ZeRO 1 and 2 all-gather the updated weights.
    """
    master = state.opt.master
    own = plan.zero.own_shards(state.params, plan.shards) if master is None else master
    sums, feedback = sum_over_replicas(plan, local_steps.differences(state.outer, own), state.feedback, state.step)
    outer = local_steps.outer_step(plan.outer_optimizer, state.outer, sums)
    stored = jax.tree.map(lambda theta, w: theta.astype(w.dtype), outer.theta, state.params)
    params = plan.zero.gather_updated(stored, plan.shards)
    opt = state.opt._replace(master=None if master is None else outer.theta)
    return state._replace(params=params, opt=opt, outer=outer, feedback=feedback)


def metrics(plan: Plan, before: State, after: State, means: dict[str, jax.Array], clip: Clip) -> dict[str, jax.Array]:
    """Return the metrics of the step between two states. means: of the batch."""
    values = {
        **means,
        "grad_norm": clip.norm,
        "lr": jnp.asarray(plan.lr_schedule(optimizer.num_updates(before)), jnp.float32),
        "skipped_steps": after.skipped,
    }
    if before.scale:
        values["loss_scale"] = before.scale.value
    if after.noise:
        values["noise_scale"] = noise_scale.scale(after.noise) * plan.config.data.seq_len
    return values
