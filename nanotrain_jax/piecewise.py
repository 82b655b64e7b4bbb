"""The optimizer step outside of the training step, one piece at a time: for state that rests in files.

The step leaves gradients behind (`Pending`). Then, for each piece, whoever keeps its state (runtime/nvme.py) calls

    weights[piece], state[piece] = update(weights[piece], gradients[piece], state[piece])

A piece is what each device has of one layer, or of a part of embedding or head that is about as large (ZeRO-Infinity,
arXiv 2104.07857, section 5.2.2). Its arrays have the layout of the stacked ones, with fewer rows: of each device's rows
the i-th of equal parts. Arrays below parallel.persist_below stay with the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanotrain_jax import model
from nanotrain_jax.config import Config
from nanotrain_jax.parallel import offload
from nanotrain_jax.parallel.update import Opt, groups, merged, only
from nanotrain_jax.parallel.zero import Wire, Zero
from nanotrain_jax.state import Layout, State, layers_of_rows, moments_like, part

Tree = Any  # a pytree of arrays


class Pending(NamedTuple):
    """What a step leaves to be updated: gradients (None for what it updated itself), and what all pieces need."""

    grads: Tree  # laid out as master weights are
    counts: Tree  # optax state with None for its arrays: how many steps were taken before
    factor: jax.Array  # float32, of the gradients
    finite: jax.Array  # bool: else weights and state stay as they are


class Pieces(NamedTuple):
    """Arrays that are cut alike: those of layers, or another one.

    begin(i) -> the i-th piece of their state, in a run that begins
    update(weights, Pending, state of the i-th piece, i) -> weights, that state; consumes (donates) weights
    weights: of the parameters those that belong to it, None for the others.
    """

    mine: Tree  # like the parameters: whether one belongs to it
    state: Opt  # ShapeDtypeStructs of its stacked state, None for the rest
    count: int  # pieces
    begin: Callable[[jax.Array], Opt]
    update: Callable[[Tree, Pending, Opt, jax.Array], tuple[Tree, Opt]]


def cut(
    config: Config, rest: Layout, optimizer: optax.GradientTransformation, state: State
) -> dict[str, tuple[Tree, Opt, int]]:
    """What is updated piece by piece, by name: as `Pieces` has it. state: ShapeDtypeStructs of all of it."""
    outside = jax.tree.map(lambda inside: not inside, rest.inside)
    found, limit = {}, offload.PIECE
    for name, mine in sorted(groups(outside).items(), key=lambda item: item[0] != "layers"):
        if name == "near":
            continue
        stacked = part(optimizer, state.opt, mine, counts=False)
        shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(stacked)]
        sizes = [math.prod(shape) for shape in shapes]
        if name == "layers":
            count = shapes[0][0]
            limit = sum(sizes) * sum(jax.tree.leaves(mine)) // (len(sizes) * count)  # elements of a layer
        else:
            # Weights that rest whole come back from all devices: their rows must be those of a device's shard.
            whole = config.parallel.zero in (1, 2) and jax.tree.leaves(only(rest.dims, mine)) == [0]
            count = 1 if whole else offload.pieces(sizes[0], shapes[0][0], limit)
        found[name] = mine, stacked, count
    return found


def of_one(stacked: Tree, count: int) -> Tree:
    """ShapeDtypeStructs of stacked arrays -> those of one of count pieces."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype, sharding=x.sharding), stacked
    )


def lower(pieces: Pieces, params: Tree, pending: Pending) -> jax.stages.Lowered:
    """The update, for ShapeDtypeStructs of all parameters and of what a step leaves."""
    piece, i = of_one(pieces.state, pieces.count), jax.ShapeDtypeStruct((), jnp.int32)
    return pieces.update.lower(only(params, pieces.mine), pending, piece, i)


def begin(
    config: Config, rest: Layout, optimizer: optax.GradientTransformation, mine: Tree, stacked: Opt, count: int
) -> Callable[[jax.Array], Opt]:
    """-> i -> the i-th piece of the state in a run that begins, as `state.init` has it. Only its layers are made."""
    first = jax.tree.leaves(stacked)[0]
    shards = first.shape[0] // first.sharding.shard_shape(first.shape)[0]

    def piece(i: jax.Array) -> Opt:
        order = jnp.asarray(layers_of_rows(config))[jnp.arange(shards) * count + i]  # of layers; others are made whole
        made = model.init(rest.model, config.train.seed, rest.split, order, lambda layer: layer)
        take = lambda x: x.reshape(shards, count, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:])
        master = only(made, mine)
        master["ends"] = jax.tree.map(take, master["ends"])
        zeros = jax.tree.map(jnp.zeros_like, master)
        return Opt(stacked.master and master, moments_like(optimizer, rest.shapes, zeros, lambda _: None))

    return jax.jit(piece, out_shardings=jax.tree.map(lambda x: x.sharding, stacked))


def update(
    zero: Zero, optimizer: optax.GradientTransformation, wire: Wire, dims: Tree, mine: Tree, count: int
) -> Callable[[Tree, Pending, Opt, jax.Array], tuple[Tree, Opt]]:
    """-> `Pieces.update`, for a device's shards. Moves what `zero.update` does."""
    without_counts = partial(
        optax.tree_utils.tree_map_params, optimizer, lambda x: x, transform_non_params=lambda _: None
    )
    near, dims = jax.tree.map(lambda is_mine: False if is_mine else None, mine), only(dims, mine)

    def piece(weights: Tree, pending: Pending, opt: Opt, i: jax.Array) -> tuple[Tree, Opt]:
        rows = lambda tree: offload.to_device(jax.tree.map(lambda x: offload.rows(x, i, len(x) // count), tree))
        opt = Opt(opt.master, merged(opt.moments, pending.counts))
        old, grads = rows(weights), rows(only(pending.grads, mine))
        new, opt = zero.update(optimizer, old, grads, opt, dims, wire, pending.factor, pending.finite, near)
        weights = jax.tree.map(lambda x, y: offload.put_rows(x, i, y), weights, new)
        return weights, Opt(opt.master, without_counts(opt.moments))

    return piece


def counts(optimizer: optax.GradientTransformation, opt: Opt) -> Tree:
    """The optax state, with None for its arrays."""
    return optax.tree_utils.tree_map_params(optimizer, lambda _: None, opt.moments)
