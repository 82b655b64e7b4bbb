"""Every collective of the package: the only file that calls `jax.lax` collectives.

Inside `shard_map` a value is *varying* over a mesh axis if devices along it may hold different values, else
*invarying*. JAX checks this (`check_vma=True`); these helpers say in one word what a call moves and how the type
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any  # a pytree of arrays


def varying_axes(x: jax.Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """The mesh axes over which x is varying."""
    return frozenset((x if hasattr(x, "manual_axis_type") else jax.typeof(x)).manual_axis_type.varying)


def as_varying(tree: Tree, axes: str | Sequence[str]) -> Tree:
    """Declare each leaf varying over axes. Moves nothing.

    Gradients with respect to the result are local to each device; without it JAX sums them over axes at every use.
    """
    axes = (axes,) if isinstance(axes, str) else axes

    def cast(x):
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def all_reduce(tree: Tree, axes: Sequence[str]) -> Tree:
    """x{varying over axes} -> sum over axes, invarying.

    One call for a whole tree, so that the compiler sees one phase. Wire bytes per device: 2 (N-1)/N S (ring), with N
    devices along axes and S the bytes of the tree. No axes: the tree as it is.
    """
    return lax.psum(as_varying(tree, axes), tuple(axes)) if axes else tree


def all_gather(xs: Sequence[jax.Array], axis: str, dims: Sequence[int], invarying: bool = False) -> list[jax.Array]:
    """x[.../axis] -> x[...] for each of xs: the blocks of all devices along axis, put together along its dim.

    Several arrays (of one dtype) travel as one: flattened, gathered as rows, cut apart. invarying: tell the type system
    that the result is the same everywhere (it is), as outputs stored whole must be; its transpose is costly, so not for
    what is differentiated. Wire bytes per device: (N-1)/N of the result.
    """
    to = "invarying" if invarying else "varying"
    if len(xs) == 1:
        return [lax.all_gather(xs[0], axis, axis=dims[0], tiled=True, to=to)]
    blocks = [jnp.moveaxis(x, dim, 0) for x, dim in zip(xs, dims, strict=True)]
    rows = lax.all_gather(jnp.concatenate([block.ravel() for block in blocks]), axis, to=to)  # [N S/N]
    whole = (x.reshape(-1, *block.shape[1:]) for x, block in zip(_cut(rows, blocks), blocks, strict=True))
    return [jnp.moveaxis(x, 0, dim) for x, dim in zip(whole, dims, strict=True)]


def reduce_scatter(xs: Sequence[jax.Array], axis: str, dims: Sequence[int]) -> list[jax.Array]:
    """x[...] {varying over axis} -> sum over axis, of which each device gets its block along x's dim: x[.../axis].

    Several arrays (of one dtype) travel as one: a row per device, scattered, cut apart. Wire bytes per device: (N-1)/N
    of xs.
    """
    if len(xs) == 1:
        return [lax.psum_scatter(xs[0], axis, scatter_dimension=dims[0], tiled=True)]
    N = lax.axis_size(axis)
    rows = [jnp.moveaxis(x, dim, 0) for x, dim in zip(xs, dims, strict=True)]
    rows = [x.reshape(N, x.shape[0] // N, *x.shape[1:]) for x in rows]
    own = lax.psum_scatter(jnp.concatenate([x.reshape(N, -1) for x in rows], axis=1), axis)
    blocks = (x.reshape(row.shape[1:]) for x, row in zip(_cut(own, [x[0] for x in rows]), rows, strict=True))
    return [jnp.moveaxis(x, 0, dim) for x, dim in zip(blocks, dims, strict=True)]


def buckets(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Indices of the arrays that travel together: in order, as many as fit into limit bytes; a larger one alone."""
    groups, room = [], 0
    for i, size in enumerate(sizes):
        if not groups or size > room:
            groups, room = [*groups, []], limit
        groups[-1].append(i)
        room -= size
    return groups


def _cut(x: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """x cut along its last dim into pieces of the sizes of `like`."""
    return jnp.split(x, np.cumsum([y.size for y in like])[:-1], axis=-1)


def all_max(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """x{varying over axes} -> the largest over axes, invarying. No gradient. Wire bytes per device: 2 (N-1)/N of x."""
    x = lax.stop_gradient(x)
    return lax.pmax(as_varying(x, axes), tuple(axes)) if axes else x


def shift(x: jax.Array, axis: str, by: int, ring: bool = True) -> jax.Array:
    """x of the device `by` places before this one along axis. Wire bytes per device: those of x.

    Not a ring: the first devices (the last, if by is negative) get zeros. Along one device nothing moves.
    """
    N = lax.axis_size(axis)
    if N == 1:
        return as_varying(x if ring else jnp.zeros_like(x), (axis,))
    pairs = [(i, (i + by) % N) for i in range(N) if ring or 0 <= i + by < N]
    return lax.ppermute(as_varying(x, (axis,)), axis, pairs)


def position(axis: str) -> jax.Array:
    """This device's index along axis. Moves nothing."""
    return lax.axis_index(axis)


def own_shard(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """x[...], whole on each device -> this device's block of it along dim: x[.../axis]. Moves nothing."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


def gpu_options(
    bucket_mb: float, prefetch: bool, pipeline: bool = False, offload: bool = False
) -> dict[str, int | bool | str]:
    """Options for XLA:GPU (`jax.jit(compiler_options=...)`) about when things are moved; what is moved stays the same.

    bucket_mb: collectives that are ready at the same time become one, up to so many MiB. prefetch: an all-gather in a
    loop starts one turn ahead. pipeline: what goes from stage to stage travels while a stage has its own collectives.
    offload: as many arrays as there are may be on their way from the host and to it, else two; and what rests there
    does not count as the device's, or XLA would compute things again to make room for it.
    """
    kinds = "all_reduce", "all_gather", "reduce_scatter"
    options = {f"xla_gpu_{kind}_combine_threshold_bytes": int(bucket_mb * 2**20) for kind in kinds}
    if pipeline:  # what goes to the next stage, while that has gathers, scatters and sums over data and tensor
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 8
    if offload:
        options["xla_gpu_experimental_parallel_async_compute_limit"] = 64
        options["xla_gpu_memory_limit_slop_factor"] = 10_000  # % of the device's memory
    if prefetch and jax.__version_info__ >= (0, 12):
        options["xla_gpu_pipeline_all_gather"] = "COLLECTIVE_PIPELINING_MODE_ON"
    elif prefetch:
        options["xla_gpu_enable_pipelined_all_gather"] = True
    return options
