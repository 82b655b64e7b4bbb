"""Every collective of the package: the only file that calls `jax.lax` collectives.

Inside `shard_map` a value is *varying* over a mesh axis if devices along it may hold different values, else
*invarying*. JAX checks this (`check_vma=True`). Each function states the bytes it moves and how the type changes.

In a profile and in the compiled program each is named after itself and its axes: `all_gather_tensor`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any  # a pytree of arrays
Axis = str | tuple[str, ...]  # a mesh axis, or several as one, the last of them innermost


def _named(operation: str, axes: Axis) -> AbstractContextManager:
    """Name the operations traced inside: reduce_scatter_data, all_reduce_replica_data."""
    return jax.named_scope("_".join((operation, axes) if isinstance(axes, str) else (operation, *axes)))


def varying_axes(x: jax.Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Return the mesh axes over which x is varying."""
    return frozenset((x if hasattr(x, "manual_axis_type") else jax.typeof(x)).manual_axis_type.varying)


def as_varying(tree: Tree, axes: str | Sequence[str]) -> Tree:
    """Declare each leaf varying over axes. Moves nothing.

    Gradients with respect to the result stay local to each device. Without the cast JAX sums them over axes at every
    use.
    """
    axes = (axes,) if isinstance(axes, str) else axes

    def cast(x):
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def all_reduce(tree: Tree, axes: Sequence[str]) -> Tree:
    """x{varying over axes} -> sum over axes, invarying.

    One call for a whole tree, so the compiler can combine it. Wire bytes per device: 2 (N-1)/N S (ring), with N
    devices along axes and S the bytes of the tree. Without axes: returns the tree.
    """
    if not axes:
        return tree
    with _named("all_reduce", axes):
        return lax.psum(as_varying(tree, axes), tuple(axes))


def all_gather(xs: Sequence[jax.Array], axis: Axis, dims: Sequence[int], invarying: bool = False) -> list[jax.Array]:
    """x[.../axis] -> x[...] for each of xs: the shards of all devices along axis, concatenated along its dim.

    Several arrays (of one dtype) are gathered as one: flattened, gathered as rows, split again. invarying: give the
    result an invarying type, as replicated outputs need; its transpose is costly, so do not differentiate it. Wire
    bytes per device: (N-1)/N of the result.
    """
    to = "invarying" if invarying else "varying"
    if len(xs) == 1:
        with _named("all_gather", axis):
            return [lax.all_gather(xs[0], axis, axis=dims[0], tiled=True, to=to)]
    blocks = [jnp.moveaxis(x, dim, 0) for x, dim in zip(xs, dims, strict=True)]
    with _named("all_gather", axis):
        rows = lax.all_gather(jnp.concatenate([block.ravel() for block in blocks]), axis, to=to)  # [N S/N]
    gathered = (x.reshape(-1, *block.shape[1:]) for x, block in zip(_split(rows, blocks), blocks, strict=True))
    return [jnp.moveaxis(x, 0, dim) for x, dim in zip(gathered, dims, strict=True)]


def reduce_scatter(xs: Sequence[jax.Array], axis: Axis, dims: Sequence[int]) -> list[jax.Array]:
    """x[...] {varying over axis} -> x[.../axis]: sum over axis, scattered along x's dim.

    Several arrays (of one dtype) are scattered as one: a row per device, scattered, split again. Wire bytes per device:
    (N-1)/N of xs.
    """
    if len(xs) == 1:
        with _named("reduce_scatter", axis):
            return [lax.psum_scatter(xs[0], axis, scatter_dimension=dims[0], tiled=True)]
    N = lax.axis_size(axis)
    rows = [jnp.moveaxis(x, dim, 0) for x, dim in zip(xs, dims, strict=True)]
    rows = [x.reshape(N, x.shape[0] // N, *x.shape[1:]) for x in rows]
    with _named("reduce_scatter", axis):
        own = lax.psum_scatter(jnp.concatenate([x.reshape(N, -1) for x in rows], axis=1), axis)
    blocks = (x.reshape(row.shape[1:]) for x, row in zip(_split(own, [x[0] for x in rows]), rows, strict=True))
    return [jnp.moveaxis(x, 0, dim) for x, dim in zip(blocks, dims, strict=True)]


def all_to_all(x: jax.Array, axis: Axis, split: int, concatenate: int) -> jax.Array:
    """x[... A .. Z/axis ...] -> x[... A/axis .. Z ...]: dim A, split, is cut over axis; dim Z, concatenate, made whole.

    Wire bytes per device: (N-1)/N of x.
    """
    with _named("all_to_all", axis):
        return lax.all_to_all(as_varying(x, axis), axis, split_axis=split, concat_axis=concatenate, tiled=True)


def ragged_all_to_all(x_S: jax.Array, axis: str, sent_N: jax.Array, received_N: jax.Array) -> jax.Array:
    """x[N C ...], C places for each device -> the C places for this device of each; GPUs alone have it.

    Of the places for device d the first sent[d] move, and come to the first received[this device] there; others are
    zeros. sent, received: int32 [N]. Wire bytes per device: of the rows sent to others, at most (N-1)/N of x. It has no
    gradient: of g it is the same with sent and received exchanged.
    """
    with _named("ragged_all_to_all", axis):
        x_S, sent_N, received_N = as_varying((x_S, sent_N, received_N), axis)
        devices = lax.axis_size(axis)
        places = jnp.full_like(sent_N, len(x_S) // devices)
        begins_N, here_N = places * jnp.arange(devices, dtype=places.dtype), places * lax.axis_index(axis)
        empty = jnp.zeros_like(x_S)
        return lax.ragged_all_to_all(x_S, empty, begins_N, sent_N, here_N, received_N, axis_name=axis)


def buckets(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Group arrays in order into buckets of at most limit bytes -> indices. A larger array has its own bucket."""
    groups, room = [], 0
    for i, size in enumerate(sizes):
        if not groups or size > room:
            groups, room = [*groups, []], limit
        groups[-1].append(i)
        room -= size
    return groups


def _split(x: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Split x along its last dim into arrays with the sizes of `like`."""
    return jnp.split(x, np.cumsum([y.size for y in like])[:-1], axis=-1)


def all_max(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """x{varying over axes} -> max over axes, invarying. No gradient. Wire bytes per device: 2 (N-1)/N of x."""
    x = lax.stop_gradient(x)
    if not axes:
        return x
    with _named("all_max", axes):
        return lax.pmax(as_varying(x, axes), tuple(axes))


def shift(x: jax.Array, axis: str, by: int, ring: bool = True) -> jax.Array:
    """Return x of the device `by` positions before this one along axis. Wire bytes per device: those of x.

    ring=False: the first devices (the last, if by is negative) get zeros. An axis of one device moves nothing.
    """
    N = lax.axis_size(axis)
    if N == 1:
        return as_varying(x if ring else jnp.zeros_like(x), (axis,))
    pairs = [(i, (i + by) % N) for i in range(N) if ring or 0 <= i + by < N]
    with _named("shift", axis):
        return lax.ppermute(as_varying(x, (axis,)), axis, pairs)


def send(x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Return x of the device that pairs, (from, to), name for this one along axis; zeros if none.

    Wire bytes per sender: those of x.
    """
    with _named("send", axis):
        return lax.ppermute(as_varying(x, (axis,)), axis, list(pairs))


def position(axis: Axis) -> jax.Array:
    """Return this device's index along axis. Moves nothing."""
    return lax.axis_index(axis)


def own_shard(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """x[...], replicated -> x[.../axis]: this device's shard along dim. Moves nothing."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)
