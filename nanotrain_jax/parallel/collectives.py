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
