"""One optimizer step on a device's shards of weights, gradients and state: at once, or streamed from host memory.

The optimizer is any element-wise optax transformation (e.g. AdamW), so it runs unchanged on shards and slices of them;
one that is not, and communicates itself (`muon.py`), runs on shards at once.
State in host memory streams through the device (`host_offload.py`): layers in slices of one layer or a fraction of it,
other arrays in slices of at most that size if their rows can be divided. Bytes: each array in host memory once in each
direction.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanotrain_jax.parallel.collectives import Tree, all_reduce, varying_axes
from nanotrain_jax.parallel.mesh import AXES
from nanotrain_jax.parallel.offload import host_offload

SLICES_PER_LAYER = 4  # if it divides the first dim of all arrays of a layer


class Opt(NamedTuple):
    """Optimizer state: float32 master weights (None where the stored parameters are float32), and optax state."""

    master: Tree
    moments: Tree


def global_norm(grads: Tree, apart: Sequence[str] = ()) -> jax.Array:
    """Return the L2 norm of all elements, each counted once, whatever axes they are sharded over.

    apart: mesh axes along which devices have other gradients, each with its own norm (`local_steps.py`). All-reduces
    one scalar, if any gradient is sharded. Gradients in host memory are copied to the device once, in
    slices no larger than a layer's largest array.
    """
    squares: dict[frozenset, list] = {}
    limit = max((g.size // len(g) for g in jax.tree.leaves(grads["layers"])), default=host_offload.SLICE_ELEMENTS)
    for g in jax.tree.leaves(grads):
        count = host_offload.num_slices(g.size, len(g), limit) if host_offload.on_host(g) else 1
        square = host_offload.sum_over_slices(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), g, count)
        squares.setdefault(varying_axes(g).difference(apart), []).append(square)
    replicated = sum(squares.pop(frozenset(), []), jnp.zeros(()))
    over = frozenset().union(*squares)
    copies = {axes: math.prod(jax.lax.axis_size(axis) for axis in over - axes) for axes in squares}
    sharded = sum((sum(terms, jnp.zeros(())) / copies[axes] for axes, terms in squares.items()), jnp.zeros(()))
    return jnp.sqrt(replicated + all_reduce(sharded, [axis for axis in AXES if axis in over]))


class Clip(NamedTuple):
    """The global norm of a step's gradients, and what follows from it."""

    norm: jax.Array  # float32, before clipping
    is_finite: jax.Array  # bool
    factor: jax.Array  # float32; multiply gradients by it to clip them and to remove the loss scale


@jax.named_scope("clip")
def clip_by_global_norm(grads: Tree, max_norm: float, loss_scale: jax.Array | float, apart: Sequence[str] = ()) -> Clip:
    """Compute the clip factor of gradients of the scaled loss (arXiv 1211.5063). max_norm: 0 disables clipping.

    apart: see `global_norm`.
    """
    norm = global_norm(grads, apart) / loss_scale
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    return Clip(norm, jnp.isfinite(norm), jnp.asarray(factor / loss_scale, jnp.float32))


def update(
    optimizer: optax.GradientTransformation, weights: Tree, grads: Tree, opt: Opt, clip: Clip, on_host: Tree
) -> tuple[Tree, Opt]:
    """Apply clipped gradients -> weights in the dtype in which they are stored, optimizer state.

    Both are unchanged if gradients are not finite. weights and grads: {"layers": arrays stacked along a leading dim,
    ...}. on_host: True where an array's state, and perhaps the array itself, is in host memory.
    """
    if not any(jax.tree.leaves(on_host)):
        weights, master, moments = _apply(optimizer, clip, (weights, opt.master, opt.moments), grads)
        return weights, Opt(master, moments)

    nothing = jax.tree.map(lambda _: None, weights)
    counts = without_arrays(optimizer, opt.moments)  # the number of steps: the same for every slice

    def update_slice(values: tuple, grads: Tree) -> tuple:
        weights, master, moments = values
        weights, master, moments = _apply(optimizer, clip, (weights, master, merge(moments, counts)), grads)
        return weights, master, without_counts(optimizer, moments)

    slices, slice_size = _slices_of_layer(weights["layers"], on_host["layers"])
    updated = nothing, opt.master and nothing, _apply(optimizer, clip, (nothing, None, counts), nothing)[2]
    for group, members in update_groups(on_host).items():
        moments = moments_of(optimizer, opt.moments, members)
        values = select(weights, members), select(opt.master, members), moments
        group_grads = select(grads, members)
        first = jax.tree.leaves(values)[0]
        if group == "device":
            new = update_slice(values, group_grads)
        elif group == "layers":
            # x[L D ...] -> x[L slices, D / slices, ...], and back
            as_slices = jax.tree.map(
                lambda x: x.reshape(len(x) * slices, x.shape[1] // slices, *x.shape[2:]), (values, group_grads)
            )
            new = host_offload.stream(update_slice, *as_slices, len(first) * slices, clip.factor)
            new = jax.tree.map(lambda y, x: y.reshape(x.shape), new, values)
        else:
            count = host_offload.num_slices(first.size, len(first), slice_size)
            new = host_offload.stream(update_slice, values, group_grads, count, clip.factor)
        updated = merge(updated, new)
    return updated[0], Opt(*updated[1:])


def _apply(optimizer: optax.GradientTransformation, clip: Clip, values: tuple, grads: Tree) -> tuple:
    """Return (weights, master weights, moments) after a step with these gradients; unchanged if not finite."""
    weights, master, moments = values
    current = weights if master is None else master
    scaled = jax.tree.map(lambda g: g.astype(jnp.float32) * clip.factor, grads)
    updates, new = optimizer.update(scaled, moments, current)
    new = optax.apply_updates(current, updates), new
    updated, moments = jax.tree.map(lambda new, old: jnp.where(clip.is_finite, new, old), new, (current, moments))
    stored = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, weights)
    return stored, None if master is None else updated, moments


def _slices_of_layer(layers: Tree, on_host: Tree) -> tuple[int, int]:
    """-> number of slices in which a layer is streamed, elements of a slice."""
    streamed = [x for x, is_on_host in zip(*map(jax.tree.leaves, (layers, on_host)), strict=True) if is_on_host]
    slices = next(n for n in (SLICES_PER_LAYER, 2, 1) if n == 1 or all(x.shape[1] % n == 0 for x in streamed))
    return slices, max(sum(x.size // len(x) for x in streamed) // slices, 1)


def map_moments(
    optimizer: optax.GradientTransformation, function: Callable, moments: Tree, *trees: Tree, other: Callable
) -> Tree:
    """Apply function to each array of optax state and the leaves of its parameter in trees; other to step counts.

    None stays: arrays that some parameters have and others do not (`muon.py`).
    """

    def of_array(x: Any, *leaves: Any) -> Any:
        return None if x is None else function(x, *leaves)

    return optax.tree_utils.tree_map_params(
        optimizer, of_array, moments, *trees, transform_non_params=other, is_leaf=lambda x: x is None
    )


def moments_of(optimizer: optax.GradientTransformation, moments: Tree, members: Tree) -> Tree:
    """Select the arrays of optax state that belong to members; None for other parameters and for counts."""
    return map_moments(optimizer, _leaf_if, moments, members, other=lambda _: None)


def without_counts(optimizer: optax.GradientTransformation, moments: Tree) -> Tree:
    """Return optax state with None for its step counts."""
    return map_moments(optimizer, lambda x: x, moments, other=lambda _: None)


def without_arrays(optimizer: optax.GradientTransformation, moments: Tree) -> Tree:
    """Return optax state with None for its arrays: only its step counts."""
    return map_moments(optimizer, lambda _: None, moments, other=lambda x: x)


def update_groups(streamed: Tree) -> dict[str, Tree]:
    """Group the arrays that are updated together -> trees of booleans: all that are not streamed ("device"), the
    streamed layers ("layers"), and each other streamed array (its path)."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(streamed)

    def name(path: tuple, is_streamed: bool) -> str:
        if not is_streamed:
            return "device"
        return "layers" if path[0].key == "layers" else ".".join(str(key.key) for key in path)

    names = [name(path, is_streamed) for path, is_streamed in leaves]
    return {group: tree.unflatten([name == group for name in names]) for group in dict.fromkeys(names)}


def _leaf_if(x: jax.Array, is_chosen: bool) -> jax.Array | None:
    return x if is_chosen else None


def select(tree: Tree, chosen: Tree) -> Tree:
    """Select the chosen leaves of a tree; None for the others."""
    return tree and jax.tree.map(_leaf_if, tree, chosen, is_leaf=lambda x: x is None)


def merge(first: Tree, second: Tree) -> Tree:
    """Return first, with the leaves that are None taken from second."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)
