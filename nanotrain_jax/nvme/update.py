"""The optimizer update after the training step for optimizer state on NVMe, one subgroup at a time.

The step returns the gradients (`step.update.Pending`). Then the store of their state (nvme/store.py) calls, for each
subgroup,

    weights[subgroup], state[subgroup] = update(weights[subgroup], gradients[subgroup], state[subgroup])

A group holds all layers, or one other array (embedding, head). A subgroup is each device's shard of one layer, or of a
slice of the other array of about the same size (ZeRO-Infinity, arXiv 2104.07857, section 5.2.2). Its arrays have the
layout of the stacked arrays with fewer rows: the i-th of equal slices of each device's rows. The step itself updates
arrays below parallel.persist_below.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.models.contract import join_layers, split_layers
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.offload import host_offload
from nanotrain_jax.parallel.zero import optimizer_step
from nanotrain_jax.parallel.zero.optimizer_step import Opt, merge, select, without_counts
from nanotrain_jax.step.build import on_mesh, pending_specs, shardings
from nanotrain_jax.step.plan import Plan, layers_of_rows
from nanotrain_jax.step.state import REPLICATED, abstract, moments_like
from nanotrain_jax.step.update import Pending


class Group(NamedTuple):
    """Arrays split into the same number of subgroups: the layers, or one other array.

    init(i) -> the state of subgroup i before the first step
    update(weights, Pending, state of subgroup i, i) -> weights, that state; donates weights
    weights: the parameters of the group, None for the others.
    """

    members: Tree  # like the parameters: True for those of the group
    state: Opt  # ShapeDtypeStructs of its stacked state, None for the rest
    num_subgroups: int
    init: Callable[[jax.Array], Opt]
    update: Callable[[Tree, Pending, Opt, jax.Array], tuple[Tree, Opt]]


@lru_cache(maxsize=4)  # the groups hold jitted functions
def groups(plan: Plan) -> dict[str, Group]:
    """Return all that the step does not update, by name: "layers", or the path of an array. Empty: nothing."""
    specs, state = abstract(plan)
    by_name = {}
    largest = host_offload.SLICE_ELEMENTS
    for name, members in sorted(
        optimizer_step.update_groups(plan.pending).items(), key=lambda item: item[0] != "layers"
    ):
        if name == "device":
            continue
        moments = optimizer_step.moments_of(plan.optimizer, state.opt.moments, members)
        stacked = Opt(select(state.opt.master, members), moments)
        if name == "layers":
            num_subgroups, largest = _layers(stacked, members)
        else:
            num_subgroups = _slices(plan, stacked, members, largest)
        by_name[name] = Group(
            members,
            stacked,
            num_subgroups,
            _init(plan, members, stacked, num_subgroups),
            _update(plan, specs.params, members, stacked, num_subgroups),
        )
    return by_name


def _layers(stacked: Opt, members: Tree) -> tuple[int, int]:
    """Return the number of layers on a device, and the elements of each."""
    shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(stacked)]
    count = shapes[0][0]
    copies = len(shapes) // sum(jax.tree.leaves(members))  # master weights and moments
    return count, sum(map(math.prod, shapes)) // (copies * count)


def _slices(plan: Plan, stacked: Opt, members: Tree, largest: int) -> int:
    """Return into how many subgroups an array outside the layers is split."""
    first = jax.tree.leaves(stacked)[0]
    shape = first.sharding.shard_shape(first.shape)
    # Stages 1 and 2 all-gather the new weights, so that the rows of a slice must be those of a device's shard.
    rows_are_sharded = [cut.dim for cut in jax.tree.leaves(select(plan.shards.cuts, members))] == [0]
    if plan.config.parallel.zero in (1, 2) and rows_are_sharded:
        return 1
    return host_offload.num_slices(math.prod(shape), shape[0], largest)


def subgroup_shapes(stacked: Tree, num_subgroups: int) -> Tree:
    """ShapeDtypeStructs of stacked arrays -> those of one subgroup."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // num_subgroups, *x.shape[1:]), x.dtype, sharding=x.sharding),
        stacked,
    )


def lower(group: Group, params: Tree, pending: Pending) -> jax.stages.Lowered:
    """Lower the update, for ShapeDtypeStructs of all parameters and of `Pending`."""
    subgroup = subgroup_shapes(group.state, group.num_subgroups)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return group.update.lower(select(params, group.members), pending, subgroup, index)


def _init(plan: Plan, members: Tree, stacked: Opt, count: int) -> Callable[[jax.Array], Opt]:
    """Return `Group.init`: the state of subgroup i as in `state.init`, computing only its layers."""
    first = jax.tree.leaves(stacked)[0]
    num_shards = first.shape[0] // first.sharding.shard_shape(first.shape)[0]

    def init_subgroup(i: jax.Array) -> Opt:
        order = jnp.asarray(layers_of_rows(plan.config))[jnp.arange(num_shards) * count + i]  # only layers are selected
        params = plan.model.init(plan.config.train.seed, order, lambda layer: layer)
        master = select(params, members)
        ends, layers = split_layers(master)
        master = join_layers(jax.tree.map(partial(_rows_of_shards, num_shards, count, i), ends), layers)
        zeros = jax.tree.map(jnp.zeros_like, master)
        return Opt(stacked.master and master, moments_like(plan, zeros, lambda _: None))

    return jax.jit(init_subgroup, out_shardings=shardings(stacked))


def _rows_of_shards(num_shards: int, count: int, i: jax.Array, x: jax.Array) -> jax.Array:
    """x[shards count n ...] -> slice i of each shard [shards n ...]"""
    return x.reshape(num_shards, count, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:])


def _update(plan: Plan, params_specs: Tree, members: Tree, stacked: Opt, count: int) -> Callable:
    """Return `Group.update`. Communicates as `zero.gather_updated` does."""
    shards = plan.shards._replace(cuts=select(plan.shards.cuts, members))
    on_host = jax.tree.map(lambda is_member: False if is_member else None, members)

    def update_subgroup(weights: Tree, pending: Pending, opt: Opt, i: jax.Array) -> tuple[Tree, Opt]:
        def rows(tree: Tree) -> Tree:
            return host_offload.to_device(jax.tree.map(lambda x: host_offload.get_slice(x, i, len(x) // count), tree))

        opt = Opt(opt.master, merge(opt.moments, pending.counts))
        own = plan.zero.own_shards(rows(weights), shards)
        grads = rows(select(pending.grads, members))
        own, opt = optimizer_step.update(plan.optimizer, own, grads, opt, pending.clip, on_host)
        new = plan.zero.gather_updated(own, shards)
        weights = jax.tree.map(lambda x, y: host_offload.put_slice(x, i, y), weights, new)
        return weights, Opt(opt.master, without_counts(plan.optimizer, opt.moments))

    weights_specs = select(params_specs, members)
    opt_specs = jax.tree.map(lambda x: x.sharding.spec, stacked)
    inputs = weights_specs, pending_specs(plan), opt_specs, REPLICATED
    return jax.jit(on_mesh(plan.mesh, update_subgroup, inputs, (weights_specs, opt_specs)), donate_argnums=0)
