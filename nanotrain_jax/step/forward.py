"""How a plan runs its model on one device: gathered by ZeRO, rematerialised, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.execution import Execution
from nanotrain_jax.mesh import BATCH_AXES
from nanotrain_jax.models.contract import LAYERS, split_layers
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.collectives import as_varying
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.zero import ZERO, Shards, Zero, gather_ahead
from nanotrain_jax.step.plan import Plan

Tree = Any  # a pytree of arrays


def local(plan: Plan, params: Tree) -> Tree:
    """params, such that gradients which are partial sums over tensor stay local: `zero.reduce` sums them once."""

    def cast(path: tuple, w: jax.Array, spec: jax.sharding.PartitionSpec) -> jax.Array:
        is_local = "tensor" not in spec and plan.model.has_partial_gradient(path)
        return as_varying(w, ("tensor",)) if is_local else w

    return jax.tree_util.tree_map_with_path(cast, params, plan.specs)


class Weights(NamedTuple):
    """The arguments of `zero.gather`: trees like the parameters."""

    stored: Tree
    inputs: Tree  # what is differentiated, from `zero.inputs`
    sums: Tree | None = None  # gradients of earlier microbatches

    def part(self, key: str) -> Weights:
        """Those under a key."""
        return Weights(self.stored[key], self.inputs[key], self.sums and self.sums[key])


def loss(plan: Plan, zero: Zero, weights: Weights, batch: Tree) -> tuple[jax.Array, jax.Array]:
    """-> sum of the losses of a microbatch, number of its targets. Autodiff of it is the backward."""
    weights = weights._replace(stored=as_varying(weights.stored, BATCH_AXES))
    model = plan.model
    ends = gather_ends(plan, zero, weights)
    run = partial(run_stack, plan, zero, weights)
    x = model.first(model.used_by_first(ends), batch, run)
    x = run(LAYERS, model.layer, x)
    return in_float32(model.last(model.used_by_last(ends), x, batch))


def in_float32(sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """What `Model.last` returned. Raises ValueError unless the sum of losses is a float32 scalar."""
    kind = jax.typeof(sums[0])
    if (kind.shape, kind.dtype) != ((), jnp.float32):
        raise ValueError(f"the model's last returned {kind} as sum of losses; make it a float32 scalar")
    return sums


def gather_ends(plan: Plan, zero: Zero, weights: Weights) -> Tree:
    """The weights outside of stacks of layers, whole, as `first` and `last` take them."""
    *weights, dims = (outside_stacks(plan, tree) for tree in (*weights, plan.shards.dims))
    return zero.gather(*weights, plan.shards._replace(dims=dims))


def outside_stacks(plan: Plan, tree: Tree | None) -> Tree | None:
    """Of a tree like the parameters, what is not in a stack of layers."""
    return tree and {key: part for key, part in tree.items() if key not in (LAYERS, *plan.model.stacks)}


def run_stack(plan: Plan, zero: Zero, weights: Weights, stack: str, layer: Callable, x: Tree) -> Tree:
    """x after all layers of a stack, each gathered when it is its turn. Models call it as run(stack, layer, x)."""
    run = partial(run_layer, plan.shards_of_layer(stack), zero, layer)
    return remat.scan(run, x, weights.part(stack), plan.remat)


def run_layer(shards: Shards, zero: Zero, layer: Callable, x: Tree, weights: Weights) -> Tree:
    """x after one layer."""
    return layer(zero.gather(*weights, shards), x)


def layered(plan: Plan, params: Tree) -> LayeredModel:
    """The model for loops whose backward is written by hand. `last` gives the sum of losses and the number of targets.

    `first` and `last` gather what they use of ends, each for itself.
    """
    params = as_varying(params, plan.loss_axes)
    zero, model = plan.zero, plan.model
    fetches = plan.config.parallel.prefetch and plan.execution is Execution.PIPELINE
    of_layers = ZERO[2] if fetches else zero  # what is fetched is whole, as at stage 2
    policy = plan.remat._replace(prefetch=False, regather=plan.remat.regather and not fetches)
    run, block = remat.unit(partial(run_layer, plan.shards_of_layer(), of_layers, model.layer), policy)
    stored_ends, layers = split_layers(params)
    end_dims, stacked_dims = split_layers(plan.shards.dims)
    row_shards = plan.shards._replace(dims=stacked_dims) if block else plan.shards_of_layer()

    def gathered(inputs: Tree, used: Callable[[Tree], Tree]) -> Tree:
        stored, inputs, dims = (used(outside_stacks(plan, tree)) for tree in (stored_ends, inputs, end_dims))
        return zero.gather(stored, inputs, None, plan.shards._replace(dims=dims))

    def first(inputs: Tree, batch: Tree) -> Tree:
        run = partial(run_stack, plan, zero, Weights(stored_ends, inputs))
        return model.first(gathered(inputs, model.used_by_first), batch, run)

    def last(inputs: Tree, x: Tree, batch: Tree) -> tuple:
        return in_float32(model.last(gathered(inputs, model.used_by_last), x, batch))

    return LayeredModel(
        first=first,
        layer=lambda weights, inputs, x: run(x, Weights(weights, inputs)),
        last=last,
        ends=zero.inputs(stored_ends, end_dims),
        layers=remat.stacked(layers, block),
        inputs=lambda weights: of_layers.inputs(weights, row_shards.dims),
        fetch=partial(gather_ahead, shards=row_shards) if fetches else None,
    )


def ends_used(plan: Plan, ends: Tree) -> tuple[Tree, Tree]:
    """-> of a tree like `ends` what `first` uses, stacks among it, and what `last` uses."""
    outside = outside_stacks(plan, ends)
    stacks = {key: ends[key] for key in plan.model.stacks}
    return plan.model.used_by_first(outside) | stacks, plan.model.used_by_last(outside)
