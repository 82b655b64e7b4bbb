"""Gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1): how large a batch still pays.

Of n small batches of b sequences each, with gradients g_i, and G_est their mean, the gradient of the whole batch:

    s     = mean of |g_i|^2                         measured before any reduction, one scalar per device
    B     = |G_est|^2
    |G|^2 = (n B - s) / (n - 1)                     without bias
    tr    = b n (s - B) / (n - 1)                   trace of the covariance of one sequence's gradient, without bias
    noise scale = EMA(tr / B) / EMA(|G|^2 / B)      in sequences: averages of both, since their ratio is biased

Divided by B, all steps count alike: one with a gradient 50 times as large, as in many a warm-up, would decide alone for
hundreds of steps. The price is a bias of the order of the relative variance of B, small where there are many weights.

A small batch is a microbatch of a device. `measured` gives |g_i|^2 of some weights: the identity, whose backward also
returns the squared norm of what passes through it, as the gradient of a tap. All-reduces one scalar per step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import all_reduce, as_varying, varying_axes
from nanotrain_jax.parallel.loops import with_backward

DECAY = 0.99  # of the averages, per step


class Noise(NamedTuple):
    """Averages over steps, float32 scalars; both begin at zero, which their ratio does not see."""

    relative_trace: jax.Array  # of tr / B
    relative_square: jax.Array  # of |G|^2 / B


class Batch(NamedTuple):
    """The sizes of a step's small batches."""

    count: int  # n
    sequences: int  # b


def start() -> Noise:
    """Return the averages before the first step."""
    return Noise(jnp.zeros(()), jnp.zeros(()))


def tap(axes: Sequence[str], rows: int) -> jax.Array:
    """-> zeros[rows], whose gradient is the squared norm of each row's gradients. axes: over which these vary."""
    return as_varying(jnp.zeros(rows), axes)


def measured(weights: Sequence[jax.Array], tap: jax.Array) -> Sequence[jax.Array]:
    """Return the weights; in the backward the gradient of tap, a scalar, is the squared norm of theirs.

    On each device of its own shards. Of weights replicated over tensor, each device returns its share.
    """
    return with_backward(lambda weights, tap: (weights, tap), _backward)(list(weights), tap)


def _backward(tap: jax.Array, grads: list) -> tuple[list, jax.Array]:
    axes = sorted(varying_axes(tap))

    def square(g: jax.Array) -> jax.Array:
        copies = 1 if "tensor" in varying_axes(g) or "tensor" not in axes else lax.axis_size("tensor")
        return as_varying(jnp.sum(jnp.square(g.astype(jnp.float32))) / copies, axes)

    return grads, sum(map(square, grads))


def mean_square(squares: jax.Array, batch: Batch) -> jax.Array:
    """-> s, from the squares[rows] of a device, summed over its microbatches: of gradients of the mean over the batch.

    All-reduces one scalar over all axes that they vary over.
    """
    return batch.count * all_reduce(squares.sum(), sorted(varying_axes(squares)))


def average(noise: Noise, of_small: jax.Array, of_batch: jax.Array, batch: Batch, is_finite: jax.Array) -> Noise:
    """Add a step to the averages. of_small: s; of_batch: B, both times any factor. Not finite, or zero: no change."""
    n, b = batch
    ratio = of_small / of_batch
    of_step = Noise(relative_trace=b * n * (ratio - 1) / (n - 1), relative_square=(n - ratio) / (n - 1))

    def add(old: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(is_finite & (of_batch > 0), DECAY * old + (1 - DECAY) * x, old)

    return jax.tree.map(add, noise, of_step)


def exceeds(noise: Noise, sequences: int) -> bool:
    """Return whether the noise scale is above a batch: also if it is not known, as where the gradient is lost in noise.
    Waits for the device."""
    trace, square = jax.device_get(noise)
    return not square > 0 or bool(trace > sequences * square)


def scale(noise: Noise) -> jax.Array:
    """-> the noise scale in sequences; nan if the gradient is lost in noise."""
    return jnp.where(noise.relative_square > 0, noise.relative_trace / noise.relative_square, jnp.nan)
