"""Gradients of a step: one function per `Execution`, all with one signature.

    (plan, params, microbatches[M ...], scale) -> loss, gradients, squares, measures

squares: with train.noise_scale the squared norms of each microbatch's own gradients, for each row of layers, else None.
measures: of a model that has some their sums by name, times scale (`measures.py`), else None. loss is the sum over this
device's targets, times scale. Its gradients are local sums, or already reduced in the backward; `zero.reduce` reduces
the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.config.execution import Execution
from nanotrain_jax.models.contract import LAYERS, join_layers, split_layers
from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.mesh import BATCH_AXES
from nanotrain_jax.parallel.offload import host_offload, offloaded_layers
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline.executor import run_schedule
from nanotrain_jax.parallel.zero.optimizer_step import select
from nanotrain_jax.parallel.zero.zero import PER_LAYER, accumulate_on_host
from nanotrain_jax.step import forward, measures
from nanotrain_jax.step.encoded import before_schedule
from nanotrain_jax.step.forward import Inputs, Weights
from nanotrain_jax.step.plan import Plan


class Gradients(NamedTuple):
    """Of a step, on this device."""

    loss: jax.Array
    grads: Tree
    squares: jax.Array | None
    measures: dict[str, jax.Array] | None


def by_autodiff(plan: Plan, params: Tree, microbatches: Tree, scale: jax.Array | float) -> Gradients:
    """Accumulate over microbatches; each is a scan over layers, differentiated by JAX."""
    params = forward.local(plan, params)

    def objective(inputs: Inputs, batch: Tree) -> jax.Array:
        weights = Weights(params, inputs.weights, tap=inputs.tap)
        return measures.observed(plan, forward.loss(plan, plan.zero, weights, batch), inputs.probes) * scale

    inputs = Inputs(forward.inputs(plan, plan.zero, params), forward.tap(plan), measures.probes(plan))
    loss, grads = accumulate(objective, inputs, microbatches)
    return Gradients(loss, *grads)


def per_layer(plan: Plan, params: Tree, microbatches: Tree, scale: jax.Array | float) -> Gradients:
    """The same; the backward of the last microbatch reduces the accumulated gradients of each layer."""
    params = forward.local(plan, params)
    last = PER_LAYER[plan.config.parallel.zero]
    earlier = Gradients(0.0, None, None, None)
    weights = params
    if plan.config.parallel.microbatches > 1:
        earlier = by_autodiff(plan, params, jax.tree.map(lambda x: x[:-1], microbatches), scale)
        weights = wait_for(earlier.grads, params)  # sums and gathered weights are never alive together

    def objective(inputs: Inputs, batch: Tree) -> jax.Array:
        of_batch = Weights(weights, inputs.weights, earlier.grads, inputs.tap)
        return measures.observed(plan, forward.loss(plan, last, of_batch, batch), inputs.probes) * scale

    inputs = Inputs(forward.inputs(plan, last, params), forward.tap(plan), measures.probes(plan))
    loss, (grads, *further) = accumulate(objective, inputs, jax.tree.map(lambda x: x[-1:], microbatches))
    if earlier.grads is not None:
        further = jax.tree.map(jnp.add, further, [earlier.squares, earlier.measures])
    return Gradients(earlier.loss + loss, grads, *further)


def accumulate(
    objective: Callable[[Tree, Tree], jax.Array], inputs: Tree, microbatches: Tree
) -> tuple[jax.Array, Tree]:
    """Return loss and gradients of inputs, summed in float32 over microbatches[M ...], one at a time.

    objective(inputs, microbatch) is this device's contribution to the loss. Communicates only what its backward does:
    gradients with respect to values varying over the batch axes stay local.
    """

    def one(sums: Tree, microbatch: Tree) -> tuple[Tree, None]:
        loss, grads = jax.value_and_grad(objective)(inputs, microbatch)
        return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, (loss, grads)), None

    if len(jax.tree.leaves(microbatches)[0]) == 1:
        return jax.value_and_grad(objective)(inputs, jax.tree.map(lambda x: x[0], microbatches))
    zero = as_varying(jnp.zeros(()), BATCH_AXES)
    zeros = zero, jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), inputs)
    return lax.scan(one, zeros, microbatches)[0]


def wait_for(first: Tree, second: Tree) -> Tree:
    """Return second; each of its leaves depends on the same leaf of first, unless that is None."""

    def wait(x: jax.Array | None, y: jax.Array) -> jax.Array:
        if x is None:
            return y
        return lax.optimization_barrier((x, as_varying(y, sorted(varying_axes(x)))))[1]

    return jax.tree.map(wait, first, second, is_leaf=lambda x: x is None)


def offloaded(plan: Plan, params: Tree, microbatches: Tree, scale: jax.Array | float) -> Gradients:
    """A loop over layers that prefetches weights from host memory and sends gradients there (`offloaded_layers.py`)."""
    model = scaled(plan, forward.layered(plan, params), scale)
    of_first, of_last = forward.ends_used(plan, model.ends)
    model = model._replace(ends=(of_first, (of_last, measures.probes(plan))))
    trees = (select(tree, plan.trainable) for tree in (params, plan.shards.cuts, plan.host_memory.gradients))
    ends, (stored_layers, _, on_host) = zip(*map(split_layers, trees), strict=True)
    stored_ends, end_cuts, ends_on_host = (forward.ends_used(plan, tree) for tree in ends)
    end_shards = [plan.shards._replace(cuts=cuts) for cuts in end_cuts]
    layer_shards = plan.shards_of_layer()
    layer_shards = layer_shards._replace(cuts=select(layer_shards.cuts, plan.trainable[LAYERS]))

    def add_ends(grads: tuple, earlier: tuple | None) -> tuple:
        (of_first, (of_last, sums)), (first, (last, before)) = grads, earlier or (None, (None, None))
        trees = (of_first, of_last), stored_ends, end_shards, ends_on_host, (first, last)
        of_first, of_last = map(accumulate_on_host, *trees)
        return of_first, (of_last, sums if before is None else jax.tree.map(jnp.add, before, sums))

    def add_layer(grads: Inputs) -> Inputs:
        add = partial(accumulate_on_host, stored=stored_layers, shards=layer_shards, on_host=on_host)
        return forward.of_weights(add, grads)

    loss, (of_first, (of_last, sums)), of_layers = offloaded_layers.run_layers(model, microbatches, add_ends, add_layer)
    return Gradients(loss, join_layers(added(of_first, of_last), _unblocked(plan, of_layers.weights)), None, sums)


def added(first: Tree, second: Tree) -> Tree:
    """Merge two nested dicts; add the leaves that are in both (tied embeddings). Frozen ones are None."""
    if first is None:
        return second
    if not isinstance(first, dict):
        return host_offload.add(first, second)
    return first | {key: added(first[key], part) if key in first else part for key, part in second.items()}


def pipelined(plan: Plan, params: Tree, microbatches: Tree, scale: jax.Array | float) -> Gradients:
    """A pipeline schedule (`pipeline/executor.py`); with one stage, a loop over microbatches.

    With parallel.grad_reduce=per_layer the backward that completes a chunk reduces the gradients of its layers.
    """
    p = plan.config.parallel
    name = p.schedule if p.pipe > 1 else "1f1b"  # one stage: forward and backward of each microbatch
    schedule = schedules.make(name, p.pipe, p.microbatches, p.chunks, plan.model.splits_vocab)
    encoded, microbatches, backward = before_schedule(plan, params, forward.layered(plan, params), microbatches)
    model = scaled(plan, encoded, scale)._replace(
        first=lambda ends, batch: encoded.first(ends[0], batch), ends=(encoded.ends, measures.probes(plan))
    )
    loss, ((of_ends, sums), of_layers) = run_schedule(schedule, model, microbatches, idle=p.idle)
    of_ends = backward(of_ends)
    if model.reduce:
        stored_ends, cuts = (split_layers(select(tree, plan.trainable))[0] for tree in (params, plan.shards.cuts))
        of_ends = plan.zero.reduce(of_ends, stored_ends, plan.shards._replace(cuts=cuts))
    return Gradients(loss, join_layers(of_ends, _unblocked(plan, of_layers.weights)), of_layers.tap, sums)


def scaled(plan: Plan, model: LayeredModel, scale: jax.Array | float) -> LayeredModel:
    """Return the model with `last` taking its ends and probes, a pair, and returning the sum of losses times scale."""

    def last(ends: tuple[Tree, Tree | None], x: Tree, batch: Tree) -> jax.Array:
        weights, probes = ends
        return measures.observed(plan, model.last(weights, x, batch), probes) * scale

    return model._replace(last=last)


def _unblocked(plan: Plan, of_layers: Tree) -> Tree:
    """Gradients of blocks of layers [L/N N ...] -> of layers [L ...]."""
    if plan.remat.remat.policy != "block":
        return of_layers
    return jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), of_layers)


GRADIENTS = {
    Execution.AUTODIFF: by_autodiff,
    Execution.PER_LAYER: per_layer,
    Execution.OFFLOADED: offloaded,
    Execution.PIPELINE: pipelined,
}
