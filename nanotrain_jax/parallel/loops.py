"""Loops run by hand: work that a turn may leave out, and arrays that wait in the slots of a larger one.

`lax.scan` carries them; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from nanotrain_jax.parallel.collectives import as_varying, varying_axes
from nanotrain_jax.parallel.offload import on_host, to_host

Tree = Any  # a pytree of arrays


def at_most_once(wanted: jax.Array, what: str, work: Callable, values: Tree, store: Tree) -> tuple[Tree, Tree]:
    """work(0, values, store) where wanted, else both as they are.

    A loop of one turn or none: XLA updates in place what a loop carries, but copies what a conditional returns. The 0
    is the turn; what depends on it XLA cannot take out of the loop. what: a name for this work in the compiled program,
    by which an audit knows how often it runs.
    """
    with jax.named_scope(f"at_most_once_{what}"):
        return lax.fori_loop(0, wanted.astype(jnp.int32), lambda turn, both: work(turn, *both), (values, store))


def when(idle: str, wanted: jax.Array, what: str, work: Callable, values: Tree, store: Tree) -> tuple[Tree, Tree]:
    """`at_most_once`, or masked: work on idle values leaves the store as it is by itself."""
    if idle == "skip":
        return at_most_once(wanted, what, work, values, store)
    new, store = work(0, values, store)
    return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), new, values), store


def get(stack: Tree, i: jax.Array) -> Tree:
    """stack[n ...] -> stack[i] of each array; i = -1 is the last."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)


def put(stack: Tree, i: jax.Array, value: Tree) -> Tree:
    """stack[n ...] with value at i, each array; i = -1 is the last."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), stack, value)


def as_stored(x: jax.Array) -> jax.Array:
    """x, row by row in memory as it came: else XLA may want it otherwise, and transpose the whole buffer it is from."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def zeros(like: Tree, axis: str, count: int | None = None, dtype: Any = None) -> Tree:
    """Zeros of each type of a tree, count of them (None: one, without a dim for it), varying over axis as well.

    Of a type in host memory: there, one after the other, so that they are never whole on the device.
    """
    return jax.tree.map(lambda x: _zeros(x, axis, count, dtype), like)


def _zeros(like: Any, axis: str, count: int | None, dtype: Any) -> jax.Array:
    shape = like.shape if count is None or on_host(like) else (count, *like.shape)
    x = as_varying(jnp.zeros(shape, dtype or like.dtype), sorted(varying_axes(like) | {axis}))
    if not on_host(like):
        return x
    return lax.scan(lambda x, _: (x, to_host(x)), x, length=count)[1]
