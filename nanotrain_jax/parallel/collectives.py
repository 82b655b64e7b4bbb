"""Every collective of the package: the only file that calls `jax.lax` collectives.

Inside `shard_map` a value is *varying* over a mesh axis if devices along it may hold different values, else
*invarying*. JAX checks this (`check_vma=True`); these helpers say in one word what a call moves and how the type
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

Tree = Any  # a pytree of arrays


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which x is varying."""
    return frozenset(jax.typeof(x).mat.varying)


def as_varying(tree: Tree, axes: Sequence[str]) -> Tree:
    """Declare each leaf varying over axes. Moves nothing.

    Gradients with respect to the result are local to each device; without it JAX sums them over axes at every use.
    """

    def cast(x):
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def all_reduce(tree: Tree, axes: Sequence[str]) -> Tree:
    """x{varying over axes} -> sum over axes, invarying.

    One call for a whole tree, so that the compiler sees one phase. Wire bytes per device: 2 (N-1)/N S (ring), with N
    devices along axes and S the bytes of the tree.
    """
    return lax.psum(as_varying(tree, axes), tuple(axes))


def all_gather(x: jax.Array, axis: str, dim: int, invarying: bool = False) -> jax.Array:
    """x[.../axis] -> x[...]: the blocks of all devices along axis, put together along dim.

    invarying: tell the type system that the result is the same everywhere (it is), as outputs stored whole must be; its
    transpose is costly, so not for what is differentiated. Wire bytes per device: (N-1)/N of the result.
    """
    return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying" if invarying else "varying")


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """x[...] {varying over axis} -> sum over axis, of which each device gets its block along dim: x[.../axis].

    Wire bytes per device: (N-1)/N of x.
    """
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def own_shard(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """x[...], whole on each device -> this device's block of it along dim: x[.../axis]. Moves nothing."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


def gpu_options(bucket_mb: float, prefetch: bool) -> dict[str, int | bool | str]:
    """Options for XLA:GPU (`jax.jit(compiler_options=...)`) about when collectives run; what they move stays the same.

    bucket_mb: collectives that are ready at the same time become one, up to so many MiB. It takes arrays where they
    lie, without a flat copy. prefetch: an all-gather in a loop starts one turn ahead.
    """
    kinds = "all_reduce", "all_gather", "reduce_scatter"
    options = {f"xla_gpu_{kind}_combine_threshold_bytes": int(bucket_mb * 2**20) for kind in kinds}
    if prefetch and jax.__version_info__ >= (0, 12):
        options["xla_gpu_pipeline_all_gather"] = "COLLECTIVE_PIPELINING_MODE_ON"
    elif prefetch:
        options["xla_gpu_enable_pipelined_all_gather"] = True
    return options
