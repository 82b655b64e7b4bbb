"""One optimizer step on what a device has of weights, gradients and state: all at once, or streamed from host memory.

The optimizer is any optax transformation that works element by element (AdamW, say), so it runs unchanged on shards and
on pieces of them. What rests on the host (`offload.py`) streams through the device: layers one at a time, each of the
other arrays in pieces that are no larger than a layer. Bytes, for each array there once each way.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanotrain_jax.mesh import AXES
from nanotrain_jax.parallel import offload
from nanotrain_jax.parallel.collectives import all_reduce, varying_axes

Tree = Any  # a pytree of arrays

PARTS = 4  # into which a layer is cut, where its arrays can be


class Opt(NamedTuple):
    """Optimizer state: float32 master weights (None where the stored parameters are float32), and optax state."""

    master: Tree
    moments: Tree


def global_norm(grads: Tree) -> jax.Array:
    """Root of the sum of squares of all elements, each counted once, whatever axes they are split over.

    One scalar moves between devices, if any are. What rests on the host comes once, in pieces as large as a layer's
    largest array.
    """
    squares: dict[frozenset, list] = {}
    limit = max(g.size // len(g) for g in jax.tree.leaves(grads["layers"]))
    for g in jax.tree.leaves(grads):
        count = offload.pieces(g.size, len(g), limit) if offload.on_host(g) else 1
        square = offload.total(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), g, count)
        squares.setdefault(varying_axes(g), []).append(square)
    everywhere = sum(squares.pop(frozenset(), []), jnp.zeros(()))
    over = frozenset().union(*squares)
    copies = {axes: math.prod(jax.lax.axis_size(axis) for axis in over - axes) for axes in squares}
    split = sum((sum(some, jnp.zeros(())) / copies[axes] for axes, some in squares.items()), jnp.zeros(()))
    return jnp.sqrt(everywhere + all_reduce(split, [axis for axis in AXES if axis in over]))


class Clip(NamedTuple):
    """What the global norm says about a step's gradients."""

    norm: jax.Array  # float32, before clipping
    is_finite: jax.Array  # bool
    factor: jax.Array  # float32; gradients times factor are those of the loss, clipped


def clip_by_global_norm(grads: Tree, largest: float, loss_scale: jax.Array | float) -> Clip:
    """For gradients of the loss times loss_scale. largest: global norm after clipping (arXiv 1211.5063); 0: any."""
    norm = global_norm(grads) / loss_scale
    factor = jnp.minimum(1.0, largest / (norm + 1e-6)) if largest else 1.0
    return Clip(norm, jnp.isfinite(norm), jnp.asarray(factor / loss_scale, jnp.float32))


def update(
    optimizer: optax.GradientTransformation, weights: Tree, grads: Tree, opt: Opt, clip: Clip, on_host: Tree
) -> tuple[Tree, Opt]:
    """-> weights, in the dtype in which they are stored, and optimizer state, after a step with clipped gradients.

    Both stay as they are where gradients are not finite. weights and grads: {"layers": arrays stacked along a leading
    dim, ...}. on_host: whether an array's state, and perhaps the array itself, is in host memory.
    """
    if not any(jax.tree.leaves(on_host)):
        weights, master, moments = _apply(optimizer, clip, (weights, opt.master, opt.moments), grads)
        return weights, Opt(master, moments)

    nothing = jax.tree.map(lambda _: None, weights)
    counts = without_arrays(optimizer, opt.moments)  # the number of steps: the same for every piece

    def piece(values: tuple, grads: Tree) -> tuple:
        weights, master, moments = values
        weights, master, moments = _apply(optimizer, clip, (weights, master, merge(moments, counts)), grads)
        return weights, master, without_counts(optimizer, moments)

    parts, layer_size = _parts_of_layers(weights["layers"], on_host["layers"])
    updated = nothing, opt.master and nothing, _apply(optimizer, clip, (nothing, None, counts), nothing)[2]
    for group, members in groups(on_host).items():
        moments = moments_of(optimizer, opt.moments, members)
        values = select(weights, members), select(opt.master, members), moments
        group_grads = select(grads, members)
        first = jax.tree.leaves(values)[0]
        if group == "device":
            new = piece(values, group_grads)
        elif group == "layers":
            cut = jax.tree.map(partial(_cut, parts=parts), (values, group_grads))
            new = offload.stream(piece, *cut, len(first) * parts, clip.factor)
            new = jax.tree.map(partial(_whole, parts=parts), new)
        else:
            count = offload.pieces(first.size, len(first), layer_size)
            new = offload.stream(piece, values, group_grads, count, clip.factor)
        updated = merge(updated, new)
    return updated[0], Opt(*updated[1:])


def _apply(optimizer: optax.GradientTransformation, clip: Clip, values: tuple, grads: Tree) -> tuple:
    """(weights, master weights, moments) after a step with these gradients, or as they are if not finite."""
    weights, master, moments = values
    exact = weights if master is None else master
    scaled = jax.tree.map(lambda g: g.astype(jnp.float32) * clip.factor, grads)
    updates, new = optimizer.update(scaled, moments, exact)
    new = optax.apply_updates(exact, updates), new
    updated, moments = jax.tree.map(lambda new, old: jnp.where(clip.is_finite, new, old), new, (exact, moments))
    stored = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, weights)
    return stored, None if master is None else updated, moments


def _parts_of_layers(layers: Tree, on_host: Tree) -> tuple[int, int]:
    """-> into how many parts each layer is cut to be streamed, and the elements of a part."""
    streamed = [x for x, is_on_host in zip(*map(jax.tree.leaves, (layers, on_host)), strict=True) if is_on_host]
    parts = next(n for n in (PARTS, 2, 1) if n == 1 or all(x.shape[1] % n == 0 for x in streamed))
    return parts, max(sum(x.size // len(x) for x in streamed) // parts, 1)


def moments_of(optimizer: optax.GradientTransformation, moments: Tree, members: Tree) -> Tree:
    """The arrays of optax's state that belong to some of the parameters; None in place of others and of counts."""
    return optax.tree_utils.tree_map_params(optimizer, _if, moments, members, transform_non_params=lambda _: None)


def without_counts(optimizer: optax.GradientTransformation, moments: Tree) -> Tree:
    """optax's state with None in place of its counts of steps."""
    return optax.tree_utils.tree_map_params(optimizer, lambda x: x, moments, transform_non_params=lambda _: None)


def without_arrays(optimizer: optax.GradientTransformation, moments: Tree) -> Tree:
    """optax's state with None in place of its arrays: its counts of steps."""
    return optax.tree_utils.tree_map_params(optimizer, lambda _: None, moments, transform_non_params=lambda x: x)


def groups(streamed: Tree) -> dict[str, Tree]:
    """What is updated together, as trees of booleans: all that is not streamed ("device"), the streamed layers
    ("layers"), and each other array that is streamed (its path)."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(streamed)

    def name(path: tuple, is_streamed: bool) -> str:
        if not is_streamed:
            return "device"
        return "layers" if path[0].key == "layers" else ".".join(str(key.key) for key in path)

    names = [name(path, is_streamed) for path, is_streamed in leaves]
    return {group: tree.unflatten([name == group for name in names]) for group in dict.fromkeys(names)}


def _cut(x: jax.Array, parts: int) -> jax.Array:
    """x[L D ...] -> x[L parts, D / parts, ...]"""
    return x.reshape(len(x) * parts, x.shape[1] // parts, *x.shape[2:])


def _whole(x: jax.Array, parts: int) -> jax.Array:
    """x[L parts, D / parts, ...] -> x[L D ...]"""
    return x.reshape(len(x) // parts, x.shape[1] * parts, *x.shape[2:])


def _if(x: jax.Array, here: bool) -> jax.Array | None:
    return x if here else None


def select(tree: Tree, chosen: Tree) -> Tree:
    """The leaves of tree that are chosen, None for the others."""
    return tree and jax.tree.map(_if, tree, chosen, is_leaf=lambda x: x is None)


def merge(first: Tree, second: Tree) -> Tree:
    """What is None in first from second."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)
