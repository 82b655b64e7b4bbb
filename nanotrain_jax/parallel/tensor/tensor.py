"""Tensor parallelism: matmuls, embedding and loss split over one mesh axis (Megatron-LM, arXiv 1909.08053).

Pure functions for use inside any `shard_map` (with check_vma=True). B batch, T tokens, D model, F ffn, V vocab,
c tokens of a chunk; t devices along the axis, here called tensor. A transformer block is

    h[B T F/tensor] = column(enter(x), w_in)        y = row(h, w_out)

(`columns` is the former for several weights, with a backward that stores less and overlaps more). Between blocks
activations have one of two layouts:

    sequence_parallel (arXiv 2205.05198)   x[B T/tensor D]   enter: all-gather over T     leave: reduce-scatter over T
    else                                   x[B T D]          enter: nothing               leave: all-reduce

The backward of each is the other's forward: 4 all-reduces of B T D per layer of two blocks, or 4 pairs of
reduce-scatter and all-gather, which move the same bytes. Parameters that are replicated over the axis but applied to
x[B T/tensor D] (norm gains, biases after `leave`) have gradients that are partial sums over it. JAX sums these at each
use of an invarying parameter; to sum once, cast the parameter with `as_varying` first and sum its gradient.

axis=None: one device. The same maths, moves nothing, needs no `shard_map`.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.parallel.collectives import (
    all_gather,
    all_max,
    all_reduce,
    as_varying,
    position,
    reduce_scatter,
    varying_axes,
)
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.remat import HOPS
from nanotrain_jax.parallel.tensor import float8
from nanotrain_jax.parallel.tensor.collective_matmul import gather_matmuls, matmul_scatter
from nanotrain_jax.parallel.tensor.float8 import Matmul


def enter(x_BTD: jax.Array, axis: str | None = "tensor", sequence_parallel: bool = True) -> jax.Array:
    """x[B T/tensor D] -> x[B T D], the input of `column`; without sequence_parallel x[B T D] -> x[B T D].

        x[B T D] = all_gather(x)                            (t-1)/t B T D elements
    Backward: g[B T/tensor D] = reduce_scatter(g[B T D] {sum tensor}), the same; without sequence_parallel an
    all-reduce, twice that.
    """
    if axis is None:
        return x_BTD
    return all_gather([x_BTD], axis, [1])[0] if sequence_parallel else as_varying(x_BTD, (axis,))


def leave(y_BTD: jax.Array, axis: str | None = "tensor", sequence_parallel: bool = True) -> jax.Array:
    """y[B T D] {sum tensor} -> y[B T/tensor D]; without sequence_parallel y[B T D].

        y[B T/tensor D] = reduce_scatter(y)                 (t-1)/t B T D elements
        y[B T D] = all_reduce(y)                            2 (t-1)/t B T D elements
    Backward: an all-gather; without sequence_parallel nothing. Raises ValueError if t does not divide T.
    """
    if axis is None:
        return y_BTD
    if not sequence_parallel:
        return all_reduce(y_BTD, (axis,))
    _check_rows(y_BTD, axis)
    return reduce_scatter([y_BTD], axis, [1])[0]


def _check_rows(y_BTD: jax.Array, axis: str) -> None:
    T, t = y_BTD.shape[1], lax.axis_size(axis)
    if T % t:
        raise ValueError(
            f"{axis}={t} does not divide the {T} tokens of a row of y; pad them, or use sequence_parallel=False"
        )


def column(x_BTD: jax.Array, w_DF: jax.Array, matmul: Matmul = float8.PLAIN) -> jax.Array:
    """x[B T D], w[D F/tensor] -> y[B T F/tensor]

    Column-parallel matmul; x is the output of `enter`. Moves nothing. F may be several dims, the first of them split:
    heads and head dim. Backward: JAX sums the gradient of w over each mesh axis over which w is invarying but x is not
    (data), at every use: do not sum it again. To sum once, cast w with `as_varying` first and sum the gradient.
    """
    return float8.multiply(matmul, x_BTD, w_DF)


class MatmulOptions(NamedTuple):
    """Options of `columns` and `row`."""

    regather: bool = True  # `columns` stores x[B T/tensor D] and gathers it again in the backward, else x[B T D]
    overlap: bool = False  # with sequence_parallel: communicate in hops behind matmuls (collective_matmul.py)
    matmul: Matmul = float8.PLAIN  # or float8.FLOAT8


PLAIN_MATMULS = MatmulOptions()


def columns(
    x_BTD: jax.Array,
    weights: Sequence[jax.Array],
    axis: str | None = "tensor",
    sequence_parallel: bool = True,
    options: MatmulOptions = PLAIN_MATMULS,
    adapters: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """x[B T/tensor D], w[D F/tensor] for each of weights -> y[B T F/tensor] each

    `enter` once, then `column` with each weight. The backward computes what autodiff would, with other residuals and in
    an order that overlaps communication with matmuls:

        x[B T D] = all_gather(x)              (t-1)/t B T D elements, if regather; overlaps with g w^T
        g[B T D] {sum tensor} = sum of g w^T  moves nothing
        g[B T/tensor D] = reduce_scatter(g)   (t-1)/t B T D elements; overlaps with x^T g, the weight gradients

    With options.overlap the forward's gather overlaps with the matmuls too. Without sequence_parallel nothing is
    gathered and g is all-reduced. adapters: further weights, narrow ones, which follow in the result; whatever
    options.matmul is, they multiply in their dtype, and the backward keeps x in its own.
    """
    if axis is None:
        by = [options.matmul] * len(weights) + [float8.PLAIN] * len(adapters)
        return [column(x_BTD, w_DF, matmul) for w_DF, matmul in zip([*weights, *adapters], by, strict=True)]
    of_weights = frozenset().union(*map(varying_axes, [*weights, *adapters]))
    x_BTD = as_varying(x_BTD, sorted(of_weights - {axis}))
    everywhere = sorted(varying_axes(x_BTD) | {axis})
    weights, adapters = as_varying((list(weights), list(adapters)), everywhere)
    regather, overlap, matmul = options
    kept = float8.PLAIN if adapters else matmul  # how x is kept for the backward
    dtype = x_BTD.dtype

    def forward(x_BTD: jax.Array, weights: list, adapters: list) -> tuple[list, tuple]:
        if overlap:
            results, entered_BTD = gather_matmuls(x_BTD, weights, axis, matmul)
            results = [checkpoint_name(y_BTF, HOPS[0]) for y_BTF in results]
        else:
            entered_BTD = enter(x_BTD, axis, sequence_parallel)
            operand = matmul.operand(entered_BTD)
            results = [matmul.contract(operand, matmul.operand(w_DF), 1, False) for w_DF in weights]
        results += [column(entered_BTD, a_DR) for a_DR in adapters]
        return results, (x_BTD if regather else kept.operand(entered_BTD), weights, adapters)

    def backward(residuals: tuple, grads: list) -> tuple[jax.Array, list, list]:
        x_BTD, weights, adapters = residuals
        if regather:
            x_BTD = kept.operand(enter(x_BTD, axis, sequence_parallel))
        of_adapters = grads[len(weights) :]
        pairs = [(matmul.gradient(g_BTF), w_DF) for g_BTF, w_DF in zip(grads, weights, strict=False)]
        partial_grads = [float8.input_gradient(matmul, g_BTF, w_DF) for g_BTF, w_DF in pairs]
        partial_grads += map(partial(float8.input_gradient, float8.PLAIN), of_adapters, adapters)
        g_BTD = leave(reduce(operator.add, partial_grads).astype(dtype), axis, sequence_parallel)
        x_of_weights = matmul.operand(x_BTD) if adapters else x_BTD
        grads_DF = [float8.weight_gradient(matmul, x_of_weights, g_BTF, w_DF) for g_BTF, w_DF in pairs]
        grads_DR = [
            float8.weight_gradient(float8.PLAIN, x_BTD, g_BTR, a_DR)
            for g_BTR, a_DR in zip(of_adapters, adapters, strict=True)
        ]
        gradients = g_BTD, grads_DF, grads_DR
        # The barrier makes XLA compute the weight gradients during the reduce-scatter, not after it.
        return lax.optimization_barrier(gradients) if sequence_parallel else gradients

    return with_backward(forward, backward)(x_BTD, weights, adapters)


def row(
    x_BTF: jax.Array,
    w_FD: jax.Array,
    axis: str | None = "tensor",
    sequence_parallel: bool = True,
    options: MatmulOptions = PLAIN_MATMULS,
    rows: int | None = None,
) -> jax.Array:
    """x[B T F/tensor], w[F/tensor D] -> y[B T/tensor D], or y[B T D] without sequence_parallel

    Row-parallel matmul. F may be several dims, the first of them split. rows: B of y, if it concatenates rows of x. The
    backward keeps x as it is, so that what also keeps x, as attention does its output, shares it.
        y[B T D] {sum tensor} = x w                         moves nothing
        leave(y)                                            see `leave`
    With options.overlap, leave's reduce-scatter and its backward's all-gather overlap with x w and g w^T.
    """
    rows = rows or len(x_BTF)
    if options.overlap and axis is not None:
        x_BTF = as_varying(x_BTF, sorted(varying_axes(w_FD)))
        w_FD = as_varying(w_FD, sorted(varying_axes(x_BTF)))
        return _overlapped_row(x_BTF, w_FD, axis, options.matmul, rows)
    y_BTD = float8.multiply(options.matmul, x_BTF, w_FD, w_FD.ndim - 1)
    return leave(y_BTD.reshape(rows, -1, w_FD.shape[-1]), axis, sequence_parallel)


def _overlapped_row(x_BTF: jax.Array, w_FD: jax.Array, axis: str, matmul: Matmul, rows: int) -> jax.Array:
    """`row` with options.overlap; x and w vary over the same axes."""

    def forward(x_BTF: jax.Array, w_FD: jax.Array) -> tuple[jax.Array, tuple]:
        concatenated_BTF = x_BTF.reshape(rows, -1, *x_BTF.shape[2:])
        _check_rows(concatenated_BTF, axis)
        y_BTD = checkpoint_name(matmul_scatter(concatenated_BTF, w_FD, axis, matmul), HOPS[1])
        return y_BTD, (x_BTF, w_FD)

    def backward(residuals: tuple, g_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BTF, w_FD = residuals
        (g_BTF,), g_BTD = gather_matmuls(g_BTD, [jnp.moveaxis(w_FD, -1, 0)], axis, matmul, is_gradient=True)
        g_BTD = matmul.gradient(g_BTD.reshape(*x_BTF.shape[:2], -1))
        grad_FD = float8.weight_gradient(matmul, matmul.operand(x_BTF), g_BTD, w_FD, w_FD.ndim - 1)
        return g_BTF.reshape(x_BTF.shape).astype(x_BTF.dtype), grad_FD

    return with_backward(forward, backward)(x_BTF, w_FD)


def look_up(
    embedding_VD: jax.Array,
    tokens_BT: jax.Array,
    axis: str | None = "tensor",
    sequence_parallel: bool = True,
    vocab_axes: Sequence[str] | None = None,
) -> jax.Array:
    """embedding[V/tensor D], tokens[B T] -> x[B T/tensor D], or x[B T D] without sequence_parallel

    Vocabulary-parallel embedding: each device looks up the tokens whose rows it stores, zeros for the others; then
    `leave`. The gradient of a row, a sum over all occurrences of its token, is accumulated in float32.

    vocab_axes: mesh axes that split the vocabulary; None: axis. Over those other than axis, x is a partial sum.
    """
    axes = _names(axis) if vocab_axes is None else tuple(vocab_axes)
    if axes:
        tokens_BT = tokens_BT - position(axes) * embedding_VD.shape[0]  # out of range: stored on another device
    return leave(_rows(as_varying(embedding_VD, varying_axes(tokens_BT)), tokens_BT), axis, sequence_parallel)


def _names(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of one mesh axis, of several, or of none."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


@jax.custom_vjp
def _rows(embedding_VD: jax.Array, rows_BT: jax.Array) -> jax.Array:
    """Look up rows of the embedding; zeros for indices out of range."""
    in_range_BT = (rows_BT >= 0) & (rows_BT < embedding_VD.shape[0])
    x_BTD = embedding_VD[jnp.where(in_range_BT, rows_BT, 0)]
    return jnp.where(in_range_BT[..., None], x_BTD, jnp.zeros((), x_BTD.dtype))


def _rows_backward(residuals: tuple[jax.Array, jax.Array], g_BTD: jax.Array) -> tuple[jax.Array, None]:
    embedding_VD, rows_BT = residuals
    # The float32 gradient of the table must not be allocated before the layers' backward is done.
    zero, g_BTD = lax.optimization_barrier((jnp.zeros_like(g_BTD, jnp.float32, shape=()), g_BTD))
    rows_BT = jnp.where(rows_BT < 0, embedding_VD.shape[0], rows_BT)  # a negative index would count from the end
    g_VD = jnp.broadcast_to(zero, embedding_VD.shape).at[rows_BT].add(g_BTD.astype(jnp.float32), mode="drop")
    return g_VD.astype(embedding_VD.dtype), None


_rows.defvjp(lambda embedding, rows: (_rows(embedding, rows), (embedding, rows)), _rows_backward)


class LossOptions(NamedTuple):
    """Options of `cross_entropy`."""

    vocab_size: int | None = None  # rows of the head from this one on are padding; None: no padding
    chunk: int | None = None  # tokens per chunk; None: all
    z_loss: float = 0.0  # weight of the square of log z (PaLM, arXiv 2204.02311)


PLAIN_LOSS = LossOptions()


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

        l[c V/tensor] = x[c D] head                         moves nothing; float32
        top[c] = all_max(max l)                             2 (t-1)/t c scalars
        sum[c], hit[c] = all_reduce(sum exp(l - top), l[target])   twice as many
        g[c V/tensor] = softmax(l) - onehot(target), then at once the gradients of x and head

    Only one chunk's logits exist at a time, and none is recomputed. Residuals: the gradients of x[B T D] and, in
    float32, of head[V/tensor D]. Backward: the gradient of x is a partial sum over tensor; the backward of `enter`
    reduces it. axis: the mesh axis that splits the vocabulary, or several, the last of them innermost; None: none.
    Raises ValueError if chunk does not divide B T.
    """
    B, T, _ = x_BTD.shape
    tokens = B * T
    chunk = options.chunk or tokens
    if tokens % chunk:
        raise ValueError(f"chunk={chunk} does not divide the {B} x {T} tokens of a device; use a divisor of {tokens}")
    axes = _names(axis)
    vocab_size = options.vocab_size or head_VD.shape[0] * (lax.axis_size(axes) if axes else 1)
    everywhere = sorted({*axes} | varying_axes(x_BTD) | varying_axes(head_VD) | varying_axes(targets_BT))
    loss = _Loss(axes, vocab_size, chunk, options.z_loss, tuple(everywhere))
    x_BTD, head_VD = as_varying((x_BTD, head_VD), everywhere)
    return _sum_of_losses(loss, x_BTD, head_VD, targets_BT), loss.counts(targets_BT).sum(dtype=jnp.int32)


@dataclass(frozen=True)
class _Loss:
    """The static arguments of `cross_entropy`."""

    axes: tuple[str, ...]  # the mesh axes that split the vocabulary
    vocab_size: int
    chunk: int  # tokens
    z_loss: float
    everywhere: tuple[str, ...]  # mesh axes over which any of the arrays varies

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
        grad_cD, grad_of_chunk_VD = _gradients(loss, softmax, x_cD, head_VD)
        return (total + losses_c.sum(), grad_VD + grad_of_chunk_VD), grad_cD

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


def _gradient_scale(dtype: jnp.dtype) -> float:
    """Return a factor that prevents float16 underflow: the loss scale applies only in the backward."""
    return 2.0**10 if dtype == jnp.float16 else 1.0


class _Softmax(NamedTuple):
    """The intermediates of a chunk that the gradients of its losses need."""

    counts_c: jax.Array  # True for valid targets
    hit_cV: jax.Array  # True in the row of the target
    exp_cV: jax.Array  # exp(logits - their maximum)
    sum_c: jax.Array  # of exp_cV, over the whole vocabulary
    log_z_c: jax.Array


def _losses(loss: _Loss, x_cD: jax.Array, head_VD: jax.Array, targets_c: jax.Array) -> tuple[jax.Array, _Softmax]:
    """-> losses[c] of a chunk, 0 for ignored targets; the intermediates that `_gradients` takes."""
    V = head_VD.shape[0]
    row_V = jnp.arange(V) + (position(loss.axes) * V if loss.axes else 0)
    logits_cV = jnp.einsum("cD,VD->cV", x_cD, head_VD, preferred_element_type=jnp.float32)
    logits_cV = jnp.where(row_V[None] < loss.vocab_size, logits_cV, -jnp.inf)
    counts_c = loss.counts(targets_c)
    hit_cV = (row_V[None] == targets_c[:, None]) & counts_c[:, None]
    top_c = all_max(logits_cV.max(-1), loss.axes)
    exp_cV = jnp.exp(logits_cV - top_c[:, None])
    sum_c, hit_c = all_reduce((exp_cV.sum(-1), jnp.where(hit_cV, logits_cV, 0.0).sum(-1)), loss.axes)
    log_z_c = top_c + jnp.log(sum_c)
    losses_c = jnp.where(counts_c, log_z_c - hit_c + loss.z_loss * jnp.square(log_z_c), 0.0)
    return losses_c, _Softmax(counts_c, hit_cV, exp_cV, sum_c, log_z_c)


def _gradients(loss: _Loss, softmax: _Softmax, x_cD: jax.Array, head_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> gradients of a chunk's summed losses with respect to x[c D] and head[V/tensor D], times `_gradient_scale`."""
    slope_c = jnp.where(softmax.counts_c, 1 + 2 * loss.z_loss * softmax.log_z_c, 0.0)
    g_cV = (slope_c / softmax.sum_c)[:, None] * softmax.exp_cV - jnp.where(softmax.hit_cV, 1.0, 0.0)
    g_cV = (_gradient_scale(x_cD.dtype) * g_cV).astype(x_cD.dtype)
    grad_VD = jnp.einsum("cV,cD->VD", g_cV, x_cD, preferred_element_type=jnp.float32)
    return jnp.einsum("cV,VD->cD", g_cV, head_VD).astype(x_cD.dtype), grad_VD
