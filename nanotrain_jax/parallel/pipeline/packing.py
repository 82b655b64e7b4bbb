"""Trees of arrays in flat buffers, so that different trees have one type. Moves nothing between devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes

Buffers = dict[str, jax.Array]  # flat arrays


class Packing(NamedTuple):
    """How the leaves of a tree lie in flat buffers: one after another, those with the same key in the same buffer."""

    tree: Any  # tree structure
    shapes: list[tuple[int, ...]]
    keys: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        totals = dict.fromkeys(self.keys, 0)
        for shape, key in zip(self.shapes, self.keys, strict=True):
            totals[key] += int(np.prod(shape))
        return totals

    def unpack(self, buffers: Buffers) -> Tree:
        """Return the tree. Splits rather than slices: the gradient is then a concatenation, not a sum of paddings."""
        leaves: list[Any] = [None] * len(self.keys)
        for key in self.sizes:
            where = [i for i, k in enumerate(self.keys) if k == key]
            ends = np.cumsum([np.prod(self.shapes[i], dtype=int) for i in where])
            for i, part in zip(where, jnp.split(buffers[key], ends), strict=False):  # the last part is padding
                leaves[i] = part.reshape(self.shapes[i])
        return self.tree.unflatten(leaves)

    def pack(self, tree: Tree, like: Buffers) -> Buffers:
        """Return buffers of the types of `like`: the leaves of a tree, then zeros."""
        leaves = self.tree.flatten_up_to(tree)

        def buffer(key: str, kind: jax.Array) -> jax.Array:
            parts = [x.ravel() for x, k in zip(leaves, self.keys, strict=True) if k == key]
            padding = kind.size - sum(part.size for part in parts)
            parts = as_varying([*parts, jnp.zeros(padding, kind.dtype)], sorted(varying_axes(kind)))
            return jnp.concatenate(parts)

        return {key: buffer(key, kind) for key, kind in like.items()}


def packing_of(types: Tree, key: Callable[[tuple, Any], str]) -> Packing:
    """Return the packing of a tree of types. key(path, type of a leaf) -> its buffer."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(types)
    return Packing(tree, [x.shape for _, x in leaves], [key(path, x) for path, x in leaves])


def by_dtype(path: tuple, x: Any) -> str:
    """A buffer for each dtype."""
    return str(x.dtype)


def by_type(path: tuple, x: Any) -> str:
    """A buffer for each dtype and set of mesh axes over which arrays vary: "float32 data pipe"."""
    return " ".join([str(x.dtype), *sorted(varying_axes(x))])


def largest(packings: Sequence[Packing]) -> dict[str, int]:
    """Return for each key the size of a buffer that holds any of the trees."""
    sizes = [packing.sizes for packing in packings]
    return {key: max(s.get(key, 0) for s in sizes) for key in sorted({key for s in sizes for key in s})}


def empty(sizes: dict[str, int], axes: Sequence[str] = ()) -> Buffers:
    """Return buffers of zeros for keys `by_dtype`, varying over axes, or `by_type`."""

    def zeros(key: str, size: int) -> jax.Array:
        dtype, *of_type = key.split()
        return as_varying(jnp.zeros(size, dtype), (*axes, *of_type))

    return {key: zeros(key, size) for key, size in sizes.items()}
