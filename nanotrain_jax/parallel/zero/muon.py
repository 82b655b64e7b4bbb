"""Muon: momentum of matrices, orthogonalized (Keller Jordan 2024; "Muon is scalable for LLM training", 2502.16982).

A step of a matrix W[m n] with gradient G; other weights take a step of Adam:

    M = beta M + (1 - beta) G             float32: the only state beside the weights
    U = beta M + (1 - beta) G             Nesterov; both terms bias-corrected
    O = newton_schulz(U)                  near U's closest orthogonal matrix: its singular values become about 1
    W = W - lr (0.2 sqrt(max(m, n)) O + decay W)

The factor gives updates the root mean square of Adam's, about 0.2, so that one learning rate and one weight decay serve
all weights (2502.16982, section 2.2). Equal to `optax.contrib.muon` with consistent_rms=0.2, and AdamW for the others.

Momentum is element-wise, and stays sharded as ZeRO and tensor parallelism shard it. Newton-Schulz needs whole matrices,
of which a stack of layers has many: devices exchange shards of all layers for whole matrices of some
(`orthogonalize`), as the distributed optimizers of Megatron and Dion (arXiv 2504.05295, section 2) do without stacks.
"""

from collections.abc import Mapping
from math import ceil, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_map_with_path

from nanotrain_jax.parallel.collectives import Axis, Tree, all_to_all
from nanotrain_jax.parallel.gradients.compression import Matrices, matrices_of
from nanotrain_jax.parallel.zero.optimizer_step import merge

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3, x^5: Jordan's
ITERATIONS = 5
EPS = 1e-8  # added to norms
UPDATE_RMS = 0.2


class Stack(NamedTuple):
    """A stack [L rows columns] of matrices: how its dims divide, and which of them are sharded."""

    matrices: Matrices
    shards: tuple[tuple[Axis, int], ...]  # mesh axes, dim; not those of the stack
    stacked: int  # dims of the array that are stacked, which L is the product of


def stack_of(shape: tuple[int, ...], spec: PartitionSpec, stacked: int = 1) -> Stack:
    """Return an array [L ...] as a stack of matrices, which are as near to square as its dims, in order, allow
    (`matrices_of`): query [L D N H] is D x N H, all heads together; output [L N H D] is N H x D.

    shape, spec: of the whole array, which has at least two dims beside those that are stacked, and of its momentum.
    stacked: 2 of experts [L E D F], each D x F. What shards a stacked dim leaves matrices whole.
    """
    entries = [None, *spec[stacked:]]
    shards = tuple((axes, dim) for dim, axes in enumerate(entries) if axes)
    return Stack(matrices_of(shape[stacked - 1 :], PartitionSpec(*entries), stacked=True), shards, stacked)


def newton_schulz(x: jax.Array) -> jax.Array:
    """x[m n] -> about U V^T of x = U S V^T, in the dtype of x: singular values between about 0.7 and 1.2, those that
    were below 1e-3 of the norm less. 5 iterations of 4 m^2 n + 2 m^3 FLOPs, m <= n."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    norm = jnp.linalg.norm(x.astype(jnp.float32)) + EPS
    start = (x.T if is_tall else x) / norm.astype(x.dtype)

    def iterate(_: int, x: jax.Array) -> jax.Array:
        gram = x @ x.T
        return a * x + (b * gram + c * (gram @ gram)) @ x

    found = lax.fori_loop(0, ITERATIONS, iterate, start)
    return found.T if is_tall else found


@jax.named_scope("orthogonalize")
def orthogonalize(x: jax.Array, stack: Stack, dtype: jnp.dtype) -> jax.Array:
    """x[L m/N n/t] -> 0.2 sqrt(max(m, n)) newton_schulz(x), float32[L m/N n/t]

        [L m/N n/t] -> all_to_all -> [L/N m n/t] -> all_to_all -> [L/(N t) m n]     in dtype; and back

    With k = N t devices L is padded to a multiple of k, which leaves some without a matrix if L < k. Wire bytes per
    device, with S those of its padded shard: 2 S ((N-1)/N + (t-1)/t). A stack that is not sharded moves nothing:
    every device computes all of it (ZeRO 0, arrays that ZeRO leaves whole). One matrix at a time. Of experts L is that
    of all layers' experts on the device.
    """
    own = x.reshape(-1, *x.shape[stack.stacked :])
    L, k = len(own), prod(lax.axis_size(axes) for axes, _ in stack.shards)
    whole = jnp.pad(own.astype(dtype), [(0, ceil(L / k) * k - L), *[(0, 0)] * (own.ndim - 1)])
    whole = lax.optimization_barrier(whole)  # XLA:CPU fails on an all-to-all of which a block is a constant
    for axes, dim in stack.shards:
        whole = all_to_all(whole, axes, 0, dim)
    flat = stack.matrices.flat(whole)
    shards = lax.map(newton_schulz, flat).reshape(whole.shape)
    for axes, dim in reversed(stack.shards):
        shards = all_to_all(shards, axes, dim, 0)
    return shards[:L].reshape(x.shape).astype(jnp.float32) * (UPDATE_RMS * max(flat.shape[1:]) ** 0.5)


def scale_by_muon(
    stacks: Mapping[tuple, Stack], momentum: float, of_others: optax.GradientTransformation, dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Return Muon without learning rate and weight decay, for use inside `shard_map`.

    stacks: tree path of each array of matrices -> its layout. of_others: Adam, for the others. dtype: of Newton-Schulz
    and on the wire. State: that of optax's Adam, {count, mu, nu}; mu is the momentum of matrices, which have None in
    nu: 4 bytes per element instead of 8.
    """

    def split(tree: Tree) -> tuple[Tree, Tree]:
        matrices = tree_map_with_path(lambda path, x: x if path in stacks else None, tree)
        others = tree_map_with_path(lambda path, x: None if path in stacks else x, tree)
        return matrices, others

    def init(params: Tree) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, split(zeros)[1])

    def update(updates: Tree, state: optax.ScaleByAdamState, params: Tree = None) -> tuple[Tree, Tree]:
        (grads, other_grads), (mu, other_mu) = split(updates), split(state.mu)
        others, after = of_others.update(other_grads, state._replace(mu=other_mu))
        mu = optax.tree.update_moment(grads, mu, momentum, 1)
        expected = optax.tree.bias_correction(mu, momentum, after.count + 1)
        now = optax.tree.bias_correction(grads, momentum, after.count)
        nesterov = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, expected, now)
        matrices = tree_map_with_path(lambda path, u: orthogonalize(u, stacks[path], dtype), nesterov)
        return merge(matrices, others), after._replace(mu=merge(mu, after.mu))

    return optax.GradientTransformation(init, update)
