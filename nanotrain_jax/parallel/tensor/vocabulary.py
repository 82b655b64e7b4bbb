"""Cross-entropy of a vocabulary split over mesh axes (Megatron-LM, arXiv 1909.08053, section 3).

Pure functions for use inside any `shard_map` (with check_vma=True). B batch, T tokens, D model, V vocabulary, c tokens
of a chunk; t devices along the axis, here called tensor. axis=None: one device. The same maths, moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.kernels import softmax as softmax_kernels
from nanotrain_jax.kernels import tiles
from nanotrain_jax.kernels.limits import MAX_ELEMENTS
from nanotrain_jax.parallel.collectives import all_max, all_reduce, as_varying, position, varying_axes


class LossOptions(NamedTuple):
    """Options of `cross_entropy` and `losses_of_tokens`."""

    vocab_size: int | None = None  # rows of the head from this one on are padding; None: no padding
    chunk: int | None = None  # tokens per chunk; None: all
    z_loss: float = 0.0  # weight of the square of log z (PaLM, arXiv 2204.02311)
    logits: jnp.dtype | None = None  # in which logits are stored; None: that of x. The softmax is in float32
    gradient: jnp.dtype = jnp.float32  # in which the gradient of the head leaves its matmul, of a single chunk
    kernels: bool = False  # the softmax on GPUs by kernels/softmax.py
    trains_head: bool = True  # its gradient is used; else XLA leaves it out


PLAIN_LOSS = LossOptions()


def _names(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of one mesh axis, of several, or of none."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


def cross_entropy(
    x_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    axis: str | Sequence[str] | None = "tensor",
    options: LossOptions = PLAIN_LOSS,
) -> tuple[jax.Array, jax.Array]:
    """x[B T D], head[V/tensor D], targets[B T] -> sum of losses in nats (float32), number of valid targets (int32)

    Vocabulary-parallel cross-entropy, chunked over tokens; x is the output of `enter`. Targets below 0 or from
    vocab_size on are ignored. The loss of a token is log z - logit of its target + z_loss (log z)^2, with z the sum of
    exp(logits). For each chunk of tokens:

        l[c V/tensor] = x[c D] head                         moves nothing; in options.logits
        top[c] = all_max(max l)                             2 (t-1)/t c scalars
        sum[c], hit[c] = all_reduce(sum exp(l - top), l[target])   twice as many
        g[c V/tensor] = softmax(l) - onehot(target), then at once the gradients of x and head

    Only one chunk's logits exist at a time, and none is recomputed. Residuals of several chunks: the gradients of
    x[B T D] and, in float32, of head[V/tensor D], which the backward multiplies by the gradient of the sum. Of a single
    chunk: x, head and logits; the backward multiplies g, in the kernel that computes it. The gradient of x is a partial
    sum over tensor; the backward of `enter` reduces it. axis: the mesh axis that splits the vocabulary, or several, the
    last of them innermost; None: none. Raises ValueError if chunk does not divide B T.
    """
    loss = _loss_of((x_BTD, head_VD, targets_BT), _names(axis), options)
    x_BTD, head_VD = as_varying((x_BTD, head_VD), loss.everywhere)
    count = loss.counts(targets_BT).sum(dtype=jnp.int32)
    if loss.chunk == targets_BT.size:
        return _losses_of_tokens(loss, x_BTD, head_VD, targets_BT).sum(), count
    return _sum_of_losses(loss, x_BTD, head_VD, targets_BT), count


def losses_of_tokens(
    x_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    axis: str | Sequence[str] | None = "tensor",
    options: LossOptions = PLAIN_LOSS,
) -> jax.Array:
    """x[B T D], head[V/tensor D], targets[B T] -> the loss of each token, float32 [B T]; 0 for ignored targets

    The terms of `cross_entropy`, for losses that are no sum of them. Arguments, communication and errors are as there,
    but residuals are x and head, and the backward computes each chunk's logits again, with the same communication: the
    gradients of tokens are not known before.
    """
    loss = _loss_of((x_BTD, head_VD, targets_BT), _names(axis), options)
    x_BTD, head_VD = as_varying((x_BTD, head_VD), loss.everywhere)
    return _losses_of_tokens(loss, x_BTD, head_VD, targets_BT)


def _loss_of(arrays: tuple[jax.Array, jax.Array, jax.Array], axes: tuple[str, ...], options: LossOptions) -> _Loss:
    """Return the static arguments of a loss of x, head and targets. Raises ValueError if chunk does not divide B T."""
    x_BTD, head_VD, _ = arrays
    B, T, _ = x_BTD.shape
    tokens = B * T
    chunk = options.chunk or tokens
    if tokens % chunk:
        raise ValueError(f"chunk={chunk} does not divide the {B} x {T} tokens of a device; use a divisor of {tokens}")
    vocab_size = options.vocab_size or head_VD.shape[0] * (lax.axis_size(axes) if axes else 1)
    everywhere = {*axes}.union(*map(varying_axes, arrays))
    dtype = jnp.dtype(options.logits or x_BTD.dtype)
    by_kernels = options.kernels and chunk * head_VD.shape[0] <= MAX_ELEMENTS
    options = options._replace(vocab_size=vocab_size, chunk=chunk, logits=dtype, kernels=by_kernels)
    return _Loss(axes, tuple(sorted(everywhere)), *options)


@dataclass(frozen=True)
class _Loss:
    """The static arguments of `cross_entropy` and `losses_of_tokens`."""

    axes: tuple[str, ...]  # the mesh axes that split the vocabulary
    everywhere: tuple[str, ...]  # mesh axes over which any of the arrays varies
    vocab_size: int  # from here on as in LossOptions, none of them None
    chunk: int
    z_loss: float
    logits: jnp.dtype
    gradient: jnp.dtype
    by_kernels: bool
    trains_head: bool

    def is_padded(self, rows: int) -> bool:
        """True if the head has more rows, this number on each device, than the vocabulary."""
        return rows * (lax.axis_size(self.axes) if self.axes else 1) > self.vocab_size

    def counts(self, targets: jax.Array) -> jax.Array:
        """True for each valid target; the others are padding."""
        return (targets >= 0) & (targets < self.vocab_size)

    def chunks(self, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """-> x[n c D], targets[n c]: this device's tokens, one chunk per row."""
        return x_BTD.reshape(-1, self.chunk, x_BTD.shape[-1]), targets_BT.reshape(-1, self.chunk)

    def zero(self) -> jax.Array:
        """Return a zero that varies as a sum of losses does: losses are already summed over axes."""
        return as_varying(jnp.zeros(()), [name for name in self.everywhere if name not in self.axes])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_losses(loss: _Loss, x_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Sum the losses of all tokens. Both arrays vary over loss.everywhere."""

    def add_chunk(total: jax.Array, chunk: tuple) -> tuple[jax.Array, None]:
        x_cD, targets_c = chunk
        return total + _losses(loss, x_cD, head_VD, targets_c)[0].sum(), None

    return lax.scan(add_chunk, loss.zero(), loss.chunks(x_BTD, targets_BT))[0]


def _sum_and_gradients(loss: _Loss, x_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array) -> tuple:
    """The forward under differentiation: -> sum, residuals (its gradients times `_gradient_scale`)."""

    def add_chunk(sums: tuple, chunk: tuple) -> tuple[tuple, jax.Array]:
        total, grad_VD = sums
        x_cD, targets_c = chunk
        losses_c, softmax = _losses(loss, x_cD, head_VD, targets_c)
        grads = _gradients(loss, softmax, x_cD, head_VD, _gradient_scale(x_cD.dtype))
        grad_cD, grad_VD = _at_once(loss, grads[0], grad_VD + grads[1])
        return (total + losses_c.sum(), grad_VD), grad_cD

    sums = loss.zero(), as_varying(jnp.zeros(head_VD.shape, jnp.float32), loss.everywhere)
    (total, grad_VD), grad_cD = lax.scan(add_chunk, sums, loss.chunks(x_BTD, targets_BT))
    return total, (grad_cD.reshape(x_BTD.shape), grad_VD, jnp.zeros((0,), head_VD.dtype))


def _scale_gradients(_: _Loss, residuals: tuple, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """The backward: multiply the gradients that the forward computed by g, the gradient of the sum."""
    grad_BTD, grad_VD, like_head = residuals
    g = g / _gradient_scale(grad_BTD.dtype)
    grad_BTD = (g * grad_BTD.astype(jnp.float32)).astype(grad_BTD.dtype)
    return grad_BTD, (g * grad_VD).astype(like_head.dtype), None


_sum_of_losses.defvjp(_sum_and_gradients, _scale_gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses_of_tokens(loss: _Loss, x_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return the losses of all tokens [B T]. Both arrays vary over loss.everywhere."""

    def of_chunk(_: None, chunk: tuple) -> tuple[None, jax.Array]:
        x_cD, targets_c = chunk
        return None, _losses(loss, x_cD, head_VD, targets_c)[0]

    return lax.scan(of_chunk, None, loss.chunks(x_BTD, targets_BT))[1].reshape(targets_BT.shape)


def _losses_and_residuals(loss: _Loss, x_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array) -> tuple:
    """The forward under differentiation. It keeps the logits of a single chunk; those of several are computed again."""
    chunks = loss.chunks(x_BTD, targets_BT)
    if len(chunks[0]) > 1:
        return _losses_of_tokens(loss, x_BTD, head_VD, targets_BT), (x_BTD, head_VD, targets_BT, None)
    losses_1c, softmax = lax.map(lambda chunk: _losses(loss, chunk[0], head_VD, chunk[1]), chunks)
    return losses_1c.reshape(targets_BT.shape), (x_BTD, head_VD, targets_BT, softmax)


def _gradients_of_tokens(loss: _Loss, residuals: tuple, g_BT: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """The backward: gradients of x and head, given those of the losses of tokens."""
    x_BTD, head_VD, targets_BT, kept = residuals
    g_nc = as_varying(g_BT, loss.everywhere).reshape(-1, loss.chunk)
    if kept is not None:
        softmax = jax.tree.map(lambda x_1c: x_1c[0], kept)
        x_cD, g_c1 = x_BTD.reshape(loss.chunk, -1), g_nc[0, :, None]
        grad_cD, grad_VD = _at_once(loss, *_gradients(loss, softmax, x_cD, head_VD, g_c1, loss.gradient))
        return grad_cD.reshape(x_BTD.shape), grad_VD.astype(head_VD.dtype), None

    def add_chunk(grad_VD: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        (x_cD, targets_c), g_c = chunk
        _, softmax = _losses(loss, x_cD, head_VD, targets_c)
        grad_cD, of_chunk_VD = _gradients(loss, softmax, x_cD, head_VD, g_c[:, None])
        grad_cD, grad_VD = _at_once(loss, grad_cD, grad_VD + of_chunk_VD)
        return grad_VD, grad_cD

    zeros = as_varying(jnp.zeros(head_VD.shape, jnp.float32), loss.everywhere)
    grad_VD, grad_cD = lax.scan(add_chunk, zeros, (loss.chunks(x_BTD, targets_BT), g_nc))
    return grad_cD.reshape(x_BTD.shape), grad_VD.astype(head_VD.dtype), None


_losses_of_tokens.defvjp(_losses_and_residuals, _gradients_of_tokens)


def _gradient_scale(dtype: jnp.dtype) -> float:
    """Return a factor that prevents float16 underflow: the loss scale applies only in the backward."""
    return 2.0**10 if dtype == jnp.float16 else 1.0


class _Softmax(NamedTuple):
    """The intermediates of a chunk that the gradients of its losses need."""

    counts_c: jax.Array  # True for valid targets
    own_c: jax.Array  # the target's row among those of this device; out of range on others, and for ignored targets
    logits_cV: jax.Array
    top_c: jax.Array  # their maximum, over the whole vocabulary
    sum_c: jax.Array  # of exp(logits - top)
    log_z_c: jax.Array


def _losses(loss: _Loss, x_cD: jax.Array, head_VD: jax.Array, targets_c: jax.Array) -> tuple[jax.Array, _Softmax]:
    """-> losses[c] of a chunk, 0 for ignored targets; the intermediates that `_gradients` takes."""
    V, counts_c = head_VD.shape[0], loss.counts(targets_c)
    first = position(loss.axes) * V if loss.axes else 0
    logits_cV = jnp.einsum("cD,VD->cV", x_cD, head_VD, preferred_element_type=loss.logits)
    if loss.is_padded(V):
        is_padding_V = first + jnp.arange(V) >= loss.vocab_size
        logits_cV = jnp.where(is_padding_V[None], jnp.finfo(logits_cV.dtype).min, logits_cV)
    own_c = jnp.where(counts_c, targets_c - first, -1)
    is_own_c = (own_c >= 0) & (own_c < V)
    hit_c = jnp.take_along_axis(logits_cV, jnp.where(is_own_c, own_c, 0)[:, None], axis=1)[:, 0]
    own_top_c, own_sum_c = _maximum_and_sum(logits_cV) if loss.by_kernels else maximum_and_sum(logits_cV)
    top_c = all_max(own_top_c, loss.axes)
    sums = own_sum_c * jnp.exp(own_top_c - top_c), jnp.where(is_own_c, hit_c.astype(jnp.float32), 0.0)
    sum_c, hit_c = all_reduce(jnp.stack(sums), loss.axes)  # one collective
    log_z_c = top_c + jnp.log(sum_c)
    losses_c = jnp.where(counts_c, log_z_c - hit_c + loss.z_loss * jnp.square(log_z_c), 0.0)
    return losses_c, _Softmax(counts_c, own_c, logits_cV, top_c, sum_c, log_z_c)


def _maximum_and_sum(x_cV: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tiles.on_gpus(softmax_kernels.maximum_and_sum, maximum_and_sum, x_cV)


def maximum_and_sum(x_cV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x[c V] -> its maximum, and the sum of exp(x - maximum), over V: float32 [c] each

    In float32, reading x once (Milakov and Gimelshein, arXiv 1805.02867). x must not be infinite.
    """

    def joined(a: tuple, b: tuple) -> tuple[jax.Array, jax.Array]:
        """(maximum, sum) of two sets -> of both."""
        (top_a, sum_a), (top_b, sum_b) = a, b
        ratio = jnp.exp(-jnp.abs(top_a - top_b))
        return jnp.maximum(top_a, top_b), jnp.where(top_a > top_b, sum_a + sum_b * ratio, sum_a * ratio + sum_b)

    x_cV = x_cV.astype(jnp.float32)
    empty = jnp.finfo(jnp.float32).min, jnp.zeros((), jnp.float32)
    return lax.reduce((x_cV, jnp.ones_like(x_cV)), empty, joined, (1,))


def _gradients(
    loss: _Loss,
    softmax: _Softmax,
    x_cD: jax.Array,
    head_VD: jax.Array,
    scale: jax.Array | float,
    dtype: jnp.dtype = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """-> gradients of a chunk's summed losses with respect to x[c D] and, of that dtype, head[V/tensor D], times scale.

    scale: one number, or one for each token [c 1].
    """
    slope_c = jnp.where(softmax.counts_c, 1 + 2 * loss.z_loss * softmax.log_z_c, 0.0)

    def by_xla(logits_cV: jax.Array, scale: jax.Array | float) -> jax.Array:
        hit_cV = lax.broadcasted_iota(jnp.int32, logits_cV.shape, 1) == softmax.own_c[:, None]
        exp_cV = jnp.exp(logits_cV.astype(jnp.float32) - softmax.top_c[:, None])  # less log z would lose digits
        g_cV = (slope_c / softmax.sum_c)[:, None] * exp_cV - jnp.where(hit_cV, 1.0, 0.0)
        return (scale * g_cV).astype(x_cD.dtype)

    def by_kernel(logits_cV: jax.Array, scale: jax.Array | float) -> jax.Array:
        of_own_c = jnp.broadcast_to(scale, (loss.chunk, 1))[:, 0]
        of_tokens = softmax.top_c, of_own_c * slope_c / softmax.sum_c, of_own_c, softmax.own_c
        weights = softmax_kernels.Weights(*as_varying(of_tokens, loss.everywhere))
        return softmax_kernels.gradient(logits_cV, weights, x_cD.dtype)

    logits_cV = softmax.logits_cV
    g_cV = tiles.on_gpus(by_kernel, by_xla, logits_cV, scale) if loss.by_kernels else by_xla(logits_cV, scale)
    grad_VD = jnp.einsum("cV,cD->VD", g_cV, x_cD, preferred_element_type=dtype)
    return jnp.einsum("cV,VD->cD", g_cV, head_VD).astype(x_cD.dtype), grad_VD


def _at_once(loss: _Loss, grad_cD: jax.Array, grad_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both: else XLA may keep the gradient of logits for the backward of layers."""
    return lax.optimization_barrier((grad_cD, grad_VD)) if loss.trains_head else (grad_cD, grad_VD)
