"""One optimizer step on what a device has of weights, gradients and state: all at once, or streamed from host memory.

The optimizer is any optax transformation that works element by element (AdamW, say), so it runs unchanged on shards and
on pieces of them. What rests on the host (`offload.py`) streams through the device: layers one at a time, each of the
other arrays in pieces that are no larger than a layer. Bytes, for each array there once each way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


def clipped(grads: Tree, clip: float, scale: jax.Array | float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-> global norm before clipping (float32), whether it is finite, factor, of gradients of the loss times scale.

    Times factor they are those of the loss, with a global norm of at most clip (0: never clipped; arXiv 1211.5063).
    """
    norm = global_norm(grads) / scale
    factor = jnp.minimum(1.0, clip / (norm + 1e-6)) if clip else 1.0
    return norm, jnp.isfinite(norm), jnp.asarray(factor / scale, jnp.float32)


def update(
    optimizer: optax.GradientTransformation,
    weights: Tree,
    grads: Tree,
    opt: Opt,
    factor: jax.Array,
    finite: jax.Array,
    far: Tree,
) -> tuple[Tree, Opt]:
    """-> weights, in the dtype they rest in, and optimizer state, after a step with grads times factor.

    Unless finite, they come back untouched. weights and grads: {"layers": arrays stacked along a leading dim, ...}.
    far: whether an array's state, and perhaps the array itself, rests on the host.
    """

    def step(weights: Tree, master: Tree, moments: Tree, grads: Tree) -> tuple[Tree, Tree, Tree]:
        exact = weights if master is None else master
        updates, new = optimizer.update(jax.tree.map(lambda g: g.astype(jnp.float32) * factor, grads), moments, exact)
        new = optax.apply_updates(exact, updates), new
        updated, moments = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, (exact, moments))
        stored = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, weights)
        return stored, None if master is None else updated, moments

    if not any(jax.tree.leaves(far)):
        weights, master, moments = step(weights, opt.master, opt.moments, grads)
        return weights, Opt(master, moments)

    def moments_of(f: Callable, scalars: Callable, *trees: Tree) -> Tree:
        return optax.tree_utils.tree_map_params(optimizer, f, *trees, transform_non_params=scalars)

    nothing, dropped, same = jax.tree.map(lambda _: None, weights), lambda _: None, lambda x: x
    scalars = moments_of(dropped, same, opt.moments)  # the number of steps: the same for every piece

    def piece(values: Tree, grads: Tree) -> Tree:
        weights, master, moments = step(*values[:2], merged(values[2], scalars), grads)
        return weights, master, moments_of(same, dropped, moments)

    streamed = [
        x for x, is_far in zip(*map(jax.tree.leaves, (weights["layers"], far["layers"])), strict=True) if is_far
    ]
    parts = next(n for n in (PARTS, 2, 1) if n == 1 or all(x.shape[1] % n == 0 for x in streamed))
    limit = max(sum(x.size // len(x) for x in streamed) // parts, 1)
    found = nothing, opt.master and nothing, step(nothing, None, scalars, nothing)[2]
    for kind, mine in groups(far).items():
        values = only(weights, mine), only(opt.master, mine), moments_of(_if, dropped, opt.moments, mine)
        given = only(grads, mine)
        first = jax.tree.leaves(values)[0]
        if kind == "near":
            new = piece(values, given)
        elif kind == "layers":
            cut, whole = partial(_cut, parts=parts), partial(_whole, parts=parts)
            new = offload.stream(piece, *jax.tree.map(cut, (values, given)), len(first) * parts, factor)
            new = jax.tree.map(whole, new)
        else:
            new = offload.stream(piece, values, given, offload.pieces(first.size, len(first), limit), factor)
        found = merged(found, new)
    return found[0], Opt(*found[1:])


def groups(far: Tree) -> dict[str, Tree]:
    """What is updated together, as trees of booleans: what is near; far layers; each of the others that are far."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(far)
    names = [
        "near" if not is_far else "layers" if path[0].key == "layers" else ".".join(str(key.key) for key in path)
        for path, is_far in leaves
    ]
    return {group: tree.unflatten([name == group for name in names]) for group in dict.fromkeys(names)}


def _cut(x: jax.Array, parts: int) -> jax.Array:
    """x[L D ...] -> x[L parts, D / parts, ...]"""
    return x.reshape(len(x) * parts, x.shape[1] // parts, *x.shape[2:])


def _whole(x: jax.Array, parts: int) -> jax.Array:
    """x[L parts, D / parts, ...] -> x[L D ...]"""
    return x.reshape(len(x) // parts, x.shape[1] * parts, *x.shape[2:])


def _if(x: jax.Array, here: bool) -> jax.Array | None:
    return x if here else None


def only(tree: Tree, chosen: Tree) -> Tree:
    """The leaves of tree that are chosen, None for the others."""
    return tree and jax.tree.map(_if, tree, chosen, is_leaf=lambda x: x is None)


def merged(first: Tree, second: Tree) -> Tree:
    """What is None in first from second."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)
