"""Helpers for hand-written loops and backwards: conditional work, and stacked arrays. Nothing here communicates."""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from nanotrain_jax.parallel.collectives import Tree, as_varying


def with_backward(forward: Callable, backward: Callable, static: tuple[int, ...] = ()) -> Callable:
    """Return the function that is the first result of forward, differentiated by backward (`jax.custom_vjp`).

    forward(*arguments) -> result, residuals. backward(*static arguments, residuals, g) -> gradients of the others.
    static: which arguments are neither arrays nor trees of them.
    """
    function = jax.custom_vjp(lambda *arguments: forward(*arguments)[0], nondiff_argnums=static)
    function.defvjp(forward, backward)
    return function


def cond_in_place(predicate: jax.Array, what: str, work: Callable, values: Tree, store: Tree) -> tuple[Tree, Tree]:
    """Return work(0, values, store) if predicate, else (values, store).

    A loop of at most one iteration instead of `lax.cond`: XLA updates a loop's carry in place, but copies what a
    conditional returns. The 0 is the iteration; XLA cannot hoist what depends on it out of the loop. what: names the
    loop in the compiled program, for an audit to know how often it runs.
    """
    turns = predicate.astype(jnp.int32)
    with jax.named_scope(f"at_most_once_{what}"):
        return lax.fori_loop(0, turns, lambda turn, carry: work(turn, *carry), (values, store))


def skip_or_mask(
    idle: str, predicate: jax.Array, what: str, work: Callable, values: Tree, store: Tree
) -> tuple[Tree, Tree]:
    """idle="skip": `cond_in_place`. idle="mask": always compute, and discard new values unless predicate; work itself
    must not change the store when idle."""
    if idle == "skip":
        return cond_in_place(predicate, what, work, values, store)
    with jax.named_scope(what):
        new, store = work(0, values, store)
    return jax.tree.map(lambda new, old: jnp.where(predicate, new, old), new, values), store


def get(stack: Tree, i: jax.Array) -> Tree:
    """stack[n ...] -> stack[i], each array; i = -1 is the last."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)


def put(stack: Tree, i: jax.Array, value: Tree) -> Tree:
    """stack[n ...] with stack[i] = value, each array; i = -1 is the last."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), stack, value)


def as_stored(x: jax.Array) -> jax.Array:
    """Constrain x to row-major layout: with another one XLA might transpose the whole buffer that x is a slice of."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def zeros_after(first: Tree, shape: tuple[int, ...], dtype: jnp.dtype, axes: Collection[str]) -> jax.Array:
    """Return zeros, varying over axes, that XLA cannot allocate before `first` is computed."""
    zero, _ = lax.optimization_barrier((as_varying(jnp.zeros((), dtype), sorted(axes)), first))
    return jnp.broadcast_to(zero, shape)
