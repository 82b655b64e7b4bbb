"""How parameters, gradients and optimizer state live on the devices that share a batch (ZeRO, arXiv 1910.02054).

A stage is four pure functions; `step.py` calls them in this order, inside `shard_map`:

    storage(tree)                          where each array rests: a tree of PartitionSpecs
    gather(params, dtype, axes)            stored parameters -> what the model computes with
    reduce(tree, axes)                     each device's own sums -> the sums over all devices
    update(optimizer, params, grads, opt)  one optimizer step on what this device stores

Stage 0 is data parallelism: everything is stored everywhere, gradients are all-reduced once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from nanotrain_jax.parallel.collectives import all_reduce, as_varying

Tree = Any  # a pytree of arrays


class Zero(NamedTuple):
    """One stage of sharding, as pure functions (see the top of this file)."""

    storage: Callable[[Tree], Tree]
    gather: Callable[[Tree, jnp.dtype, Sequence[str]], Tree]
    reduce: Callable[[Tree, Sequence[str]], Tree]
    update: Callable[..., tuple[Tree, Tree, jax.Array, jax.Array]]


def _replicated(tree: Tree) -> Tree:
    """-> PartitionSpec() for every leaf: each device stores all of it."""
    return jax.tree.map(lambda _: PartitionSpec(), tree)


def _cast(params: Tree, dtype: jnp.dtype, axes: Sequence[str]) -> Tree:
    """-> params in the compute dtype, varying over axes, so that gradients stay local until `reduce`. Moves nothing."""
    return as_varying(jax.tree.map(lambda p: p.astype(dtype), params), axes)


def _update(
    optimizer: optax.GradientTransformation, params: Tree, grads: Tree, opt: Tree, clip: float
) -> tuple[Tree, Tree, jax.Array, jax.Array]:
    """-> params, optimizer state, global norm of the gradients before clipping (float32), whether it is finite.

    Gradients are scaled to a global norm of at most clip (0: never; arXiv 1211.5063). If the norm is not finite, params
    and optimizer state come back untouched. All arguments are equal on all devices, so each decides alike and
    nothing moves.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    if clip:
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)
    updates, new_opt = optimizer.update(grads, opt, params)
    new_params = optax.apply_updates(params, updates)
    params, opt = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new_params, new_opt), (params, opt))
    return params, opt, norm, finite


ZERO = {0: Zero(_replicated, _cast, all_reduce, _update)}
