"""How a plan runs its model on one device: gathered by ZeRO, rematerialised, layer by layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from nanotrain_jax.mesh import BATCH_AXES
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.collectives import as_varying
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.zero import Zero
from nanotrain_jax.step.plan import Plan

Tree = Any  # a pytree of arrays


def local(plan: Plan, params: Tree) -> Tree:
    """params, such that gradients which are partial sums over tensor stay local: `zero.reduce` sums them once."""

    def cast(path: tuple, w: jax.Array, spec: jax.sharding.PartitionSpec) -> jax.Array:
        is_local = "tensor" not in spec and plan.model.has_partial_gradient(path)
        return as_varying(w, ("tensor",)) if is_local else w

    return jax.tree_util.tree_map_with_path(cast, params, plan.specs)


def loss(plan: Plan, zero: Zero, params: Tree, batch: Tree, inputs: Tree, sums: Tree | None = None) -> tuple:
    """-> sum of the losses of a microbatch, number of its targets. Autodiff of it is the backward.

    inputs: what is differentiated, from `zero.inputs`. sums: gradients of earlier microbatches, for `zero.gather`.
    """
    params = as_varying(params, BATCH_AXES)
    sums = sums or {"ends": None, "layers": None}
    ends = zero.gather(params["ends"], inputs["ends"], sums["ends"], plan.end_shards)
    x = plan.model.first(ends, batch)
    layers = params["layers"], inputs["layers"], sums["layers"]
    x = remat.scan(partial(_layer, plan, zero), x, layers, plan.remat)
    return plan.model.last(ends, x, batch)


def _layer(plan: Plan, zero: Zero, x: Tree, layer: tuple[Tree, Tree, Tree]) -> Tree:
    return plan.model.layer(zero.gather(*layer, plan.layer_shards), x)


def layered(plan: Plan, params: Tree) -> LayeredModel:
    """The model for loops whose backward is written by hand. `last` gives the sum of losses and the number of targets.

    `first` and `last` gather the parameters they use, each for itself.
    """
    params = as_varying(params, plan.loss_axes)
    zero, dims = plan.zero, plan.shards.dims
    run, size = remat.unit(partial(_layer, plan, zero), plan.remat._replace(prefetch=False))

    def gathered(inputs: Tree, used: Any) -> Tree:
        stored, inputs, shards = used(params["ends"]), used(inputs), used(dims["ends"])
        return params["ends"] | zero.gather(stored, inputs, None, plan.end_shards._replace(dims=shards))

    def first(ends: Tree, batch: Tree) -> Tree:
        return plan.model.first(gathered(ends, plan.model.used_by_first), batch)

    def last(ends: Tree, x: Tree, batch: Tree) -> tuple:
        return plan.model.last(gathered(ends, plan.model.used_by_last), x, batch)

    return LayeredModel(
        first=first,
        layer=lambda weights, inputs, x: run(x, (weights, inputs, None)),
        last=last,
        ends=zero.inputs(params["ends"], dims["ends"]),
        layers=remat.stacked(params["layers"], size),
        inputs=lambda weights: zero.inputs(weights, dims["layers"] if size else plan.layer_shards.dims),
    )
