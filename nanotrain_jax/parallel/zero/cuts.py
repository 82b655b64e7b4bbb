"""Which dim of each array ZeRO shards, over which mesh axes (arXiv 1910.02054). Moves nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from nanotrain_jax.parallel.collectives import Tree


@dataclass(frozen=True)
class Cut:
    """How ZeRO shards an array: its dim, over which mesh axes. A leaf of a tree."""

    dim: int
    axes: tuple[str, ...]


UNSHARDED = Cut(-1, ())  # replicated over ZeRO's axes, but for those over which the array is sharded anyway


def choose_cuts(
    params: Tree, sizes: Mapping[str, int], persist_below: int, stacked: Sequence[str], specs: Tree
) -> Tree:
    """Return a Cut of each leaf: the first dim that the devices along ZeRO's axes divide, or UNSHARDED.

    To gather along another dim, XLA:GPU transposes the stacked weights of all layers, a copy that a step holds.

    sizes: of ZeRO's axes. Leaves under a top-level key in `stacked` have a leading dim of layers, which is never
    sharded and does not count towards persist_below. specs: PartitionSpecs over other axes; their dims are excluded,
    and their axes.
    """

    def choose(path: tuple, leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Cut:
        first = int(bool(path) and getattr(path[0], "key", None) in stacked)
        taken = [d for d, axes in enumerate(spec) if axes is not None]
        used = jax.tree.leaves(tuple(spec))
        axes = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)
        size = math.prod(sizes[axis] for axis in axes)
        dims = [d for d in range(first, len(leaf.shape)) if leaf.shape[d] % size == 0 and d not in taken]
        count = leaf.size // max(leaf.shape[0], 1) if first else leaf.size
        return Cut(dims[0], axes) if dims and size > 1 and count >= persist_below else UNSHARDED

    return jax.tree_util.tree_map_with_path(choose, params, specs)
