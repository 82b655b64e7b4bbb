"""The optimizer update after the training step, one piece at a time, for optimizer state in files.

The step leaves gradients behind (`step.optimizer.Pending`). Then the store of their state (nvme/store.py) calls, for
each piece,

    weights[piece], state[piece] = update(weights[piece], gradients[piece], state[piece])

A piece is what each device has of one layer, or of a part of embedding or head that is about as large (ZeRO-Infinity,
arXiv 2104.07857, section 5.2.2). Its arrays have the layout of the stacked ones, with fewer rows: of each device's rows
the i-th of equal parts. Arrays below parallel.persist_below are updated by the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.models.contract import join_layers, split_layers
from nanotrain_jax.parallel import offload, update
from nanotrain_jax.parallel.update import Opt, merge, select, without_counts
from nanotrain_jax.step.build import on_mesh, pending_specs, shardings
from nanotrain_jax.step.optimizer import Pending
from nanotrain_jax.step.plan import Plan, layers_of_rows
from nanotrain_jax.step.state import REPLICATED, abstract, moments_like

Tree = Any  # a pytree of arrays


class Group(NamedTuple):
    """Arrays that are cut into the same number of pieces: those of layers, or one other array.

    init(i) -> the i-th piece of their state before the first step
    update(weights, Pending, state of the i-th piece, i) -> weights, that state; consumes (donates) weights
    weights: of the parameters those of the group, None for the others.
    """

    members: Tree  # like the parameters: whether one belongs to it
    state: Opt  # ShapeDtypeStructs of its stacked state, None for the rest
    count: int  # pieces
    init: Callable[[jax.Array], Opt]
    update: Callable[[Tree, Pending, Opt, jax.Array], tuple[Tree, Opt]]


@lru_cache(maxsize=4)  # it compiles functions
def groups(plan: Plan) -> dict[str, Group]:
    """All that the step does not update, by name: "layers", or the path of an array. Empty if it updates everything."""
    specs, state = abstract(plan)
    outside = jax.tree.map(lambda in_step: not in_step, plan.in_step)
    found = {}
    largest = offload.PIECE
    for name, members in sorted(update.groups(outside).items(), key=lambda item: item[0] != "layers"):
        if name == "device":
            continue
        moments = update.moments_of(plan.optimizer, state.opt.moments, members)
        stacked = Opt(select(state.opt.master, members), moments)
        if name == "layers":
            count, largest = _layers(stacked, members)
        else:
            count = _pieces(plan, stacked, members, largest)
        found[name] = Group(
            members,
            stacked,
            count,
            _init(plan, members, stacked, count),
            _update(plan, specs.params, members, stacked, count),
        )
    return found


def _layers(stacked: Opt, members: Tree) -> tuple[int, int]:
    """-> the layers on a device, and the elements of each."""
    shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(stacked)]
    count = shapes[0][0]
    copies = len(shapes) // sum(jax.tree.leaves(members))  # master weights and moments
    return count, sum(map(math.prod, shapes)) // (copies * count)


def _pieces(plan: Plan, stacked: Opt, members: Tree, largest: int) -> int:
    """Into how many pieces an array is cut that is not in layers."""
    first = jax.tree.leaves(stacked)[0]
    shape = first.sharding.shard_shape(first.shape)
    # Weights that are stored whole come back from all devices: their rows must be those of a device's shard.
    rows_are_sharded = jax.tree.leaves(select(plan.shards.dims, members)) == [0]
    if plan.config.parallel.zero in (1, 2) and rows_are_sharded:
        return 1
    return offload.pieces(math.prod(shape), shape[0], largest)


def of_one(stacked: Tree, count: int) -> Tree:
    """ShapeDtypeStructs of stacked arrays -> those of one of count pieces."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype, sharding=x.sharding), stacked
    )


def lower(group: Group, params: Tree, pending: Pending) -> jax.stages.Lowered:
    """The update, for ShapeDtypeStructs of all parameters and of what a step leaves."""
    piece = of_one(group.state, group.count)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return group.update.lower(select(params, group.members), pending, piece, number)


def _init(plan: Plan, members: Tree, stacked: Opt, count: int) -> Callable[[jax.Array], Opt]:
    """-> i -> the i-th piece of the state before the first step, as `state.init` has it. Only its layers are made."""
    first = jax.tree.leaves(stacked)[0]
    shards = first.shape[0] // first.sharding.shard_shape(first.shape)[0]

    def piece(i: jax.Array) -> Opt:
        order = jnp.asarray(layers_of_rows(plan.config))[jnp.arange(shards) * count + i]  # others are made whole
        made = plan.model.init(plan.config.train.seed, order, lambda layer: layer)
        master = select(made, members)
        ends, layers = split_layers(master)
        master = join_layers(jax.tree.map(partial(_rows_of_shards, shards, count, i), ends), layers)
        zeros = jax.tree.map(jnp.zeros_like, master)
        return Opt(stacked.master and master, moments_like(plan, zeros, lambda _: None))

    return jax.jit(piece, out_shardings=shardings(stacked))


def _rows_of_shards(shards: int, count: int, i: jax.Array, x: jax.Array) -> jax.Array:
    """x[shards count n ...] -> the i-th piece of each shard [shards n ...]"""
    return x.reshape(shards, count, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:])


def _update(plan: Plan, params_specs: Tree, members: Tree, stacked: Opt, count: int) -> Callable:
    """-> `Group.update`. Moves what `zero.share` does."""
    shards = plan.shards._replace(dims=select(plan.shards.dims, members))
    on_host = jax.tree.map(lambda is_member: False if is_member else None, members)

    def piece(weights: Tree, pending: Pending, opt: Opt, i: jax.Array) -> tuple[Tree, Opt]:
        def rows(tree: Tree) -> Tree:
            return offload.to_device(jax.tree.map(lambda x: offload.rows(x, i, len(x) // count), tree))

        opt = Opt(opt.master, merge(opt.moments, pending.counts))
        own = plan.zero.own(rows(weights), shards.dims)
        grads = rows(select(pending.grads, members))
        own, opt = update.update(plan.optimizer, own, grads, opt, pending.clip, on_host)
        new = plan.zero.share(own, shards)
        weights = jax.tree.map(lambda x, y: offload.put_rows(x, i, y), weights, new)
        return weights, Opt(opt.master, without_counts(plan.optimizer, opt.moments))

    weights_specs = select(params_specs, members)
    opt_specs = jax.tree.map(lambda x: x.sharding.spec, stacked)
    inputs = weights_specs, pending_specs(plan), opt_specs, REPLICATED
    return jax.jit(on_mesh(plan.mesh, piece, inputs, (weights_specs, opt_specs)), donate_argnums=0)
