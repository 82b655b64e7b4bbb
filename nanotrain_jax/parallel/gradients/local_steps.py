"""Local steps: replicas train apart, and an outer optimizer joins them every H steps (DiLoCo, arXiv 2311.08105).

Algorithm 1 of the paper. R replicas start from the same weights theta. Each takes H steps of its own optimizer on its
own part of the data, and nothing moves along their mesh axis. Then

    delta = theta - mean over replicas of their weights
    theta = outer optimizer(theta, delta)                 SGD with Nesterov momentum
    weights of every replica = theta                      moments of the inner optimizers stay

A synchronization moves 2 (R-1)/R x 4 bytes per float32 element of a device's shards, once in H steps; data parallelism
moves as much in every step. theta and momentum take 8 bytes per element on every device, and are laid out as the
weights that the optimizer updates (with ZeRO: shards).

Arrays that differ between replicas have one more dim, the last, of size R: x[... R/replica]. Leading dims (layers,
rows of the vocabulary) keep their places. Inside `shard_map` a function takes its replica's arrays with `own`, and
returns them with `as_column`; in between their types are varying over the axis, so that the compiler's checks hold.
The functions take any tree of arrays and the name of any mesh axis.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from nanotrain_jax.parallel.collectives import Tree, all_reduce, as_varying

AXIS = "replica"


class Outer(NamedTuple):
    """State of the outer optimizer: float32 theta, and the optax state with its momentum. The same on all replicas."""

    theta: Tree
    moments: Any


def own(x: jax.Array) -> jax.Array:
    """x[... R/replica] -> x[...] of this device's replica, varying over the axis. Moves nothing."""
    return x[..., 0]


def as_column(x: jax.Array) -> jax.Array:
    """x[...] of this device's replica -> x[... R/replica]. Moves nothing."""
    return x[..., jnp.newaxis]


def copies(x: jax.Array, count: int) -> jax.Array:
    """x[...] -> x[... R], with count equal replicas. For global arrays."""
    return jnp.broadcast_to(as_column(x), (*x.shape, count))


def with_replicas(spec: PartitionSpec, ndim: int, axis: str = AXIS) -> PartitionSpec:
    """PartitionSpec of x[...] with ndim dims -> that of x[... R/axis]."""
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)), axis)


def has_replicas(spec: PartitionSpec, ndim: int, axis: str = AXIS) -> bool:
    """True if this is the PartitionSpec of an array x[... R/axis] with ndim dims, R counted."""
    return 0 < ndim == len(spec) and spec[-1] == axis


def mean(tree: Tree, axis: str = AXIS) -> Tree:
    """x[...] {varying over axis} -> mean over axis, in x's dtype.

    All-reduces in float32: 2 (R-1)/R x 4 bytes per element.
    """
    R = jax.lax.axis_size(axis)
    sums = all_reduce(jax.tree.map(lambda x: x.astype(jnp.float32), tree), (axis,))
    return jax.tree.map(lambda total, x: (total / R).astype(x.dtype), sums, tree)


def differences(outer: Outer, weights: Tree, axis: str = AXIS) -> Tree:
    """weights[...] {varying over axis}, float32, of this device's replica -> theta[...] - weights[...].

    weights and theta may be shards over other axes. Differences are summed over replicas, which rounds less than a sum
    of weights: 2 (R-1)/R x 4 bytes per element, or less (parallel/gradients/compression.py).
    """
    return jax.tree.map(lambda theta, w: as_varying(theta, (axis,)) - w, outer.theta, weights)


def outer_step(optimizer: optax.GradientTransformation, outer: Outer, sums: Tree, axis: str = AXIS) -> Outer:
    """sums[...]: of `differences` over axis -> the outer state after a synchronization. Moves nothing.

    theta[...], moments = optimizer(theta, sums / R)
    """
    R = jax.lax.axis_size(axis)
    delta = jax.tree.map(lambda total: total / R, sums)
    updates, moments = optimizer.update(delta, outer.moments, outer.theta)
    return Outer(optax.apply_updates(outer.theta, updates), moments)
