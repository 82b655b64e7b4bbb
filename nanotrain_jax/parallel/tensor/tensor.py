"""Tensor parallelism: matmuls split over one mesh axis (Megatron-LM, arXiv 1909.08053).

Pure functions for use inside any `shard_map` (with check_vma=True). B batch, T tokens, D model, F ffn; t devices
along the axis, here called tensor. A transformer block is

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

from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.parallel.collectives import (
    all_gather,
    all_reduce,
    as_varying,
    reduce_scatter,
    varying_axes,
)
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.remat import HOPS
from nanotrain_jax.parallel.tensor import float8
from nanotrain_jax.parallel.tensor.collective_matmul import gather_matmuls, matmul_scatter
from nanotrain_jax.parallel.tensor.float8 import Matmul
from nanotrain_jax.parallel.transposed import is_transposed


def enter(x_BTD: jax.Array, axis: str | None = "tensor", sequence_parallel: bool = True) -> jax.Array:
    """x[B T/tensor D] -> x[B T D], the input of `column`; without sequence_parallel x[B T D] -> x[B T D].

        x[B T D] = all_gather(x)                            (t-1)/t B T D elements
    Backward: g[B T/tensor D] = reduce_scatter(g[B T D] {sum tensor}), the same; without sequence_parallel an
    all-reduce, twice that. Raises ValueError in a `shard_map` without check_vma, where gradients would be wrong.
    """
    if axis is None:
        return x_BTD
    _check_types(x_BTD, axis)
    return all_gather([x_BTD], axis, [1])[0] if sequence_parallel else as_varying(x_BTD, (axis,))


def leave(y_BTD: jax.Array, axis: str | None = "tensor", sequence_parallel: bool = True) -> jax.Array:
    """y[B T D] {sum tensor} -> y[B T/tensor D]; without sequence_parallel y[B T D].

        y[B T/tensor D] = reduce_scatter(y)                 (t-1)/t B T D elements
        y[B T D] = all_reduce(y)                            2 (t-1)/t B T D elements
    Backward: an all-gather; without sequence_parallel nothing. Raises ValueError if t does not divide T, and if y is
    the same on all devices, whose sum would be t y.
    """
    if axis is None:
        return y_BTD
    _check_types(y_BTD, axis)
    if axis not in varying_axes(y_BTD):
        raise ValueError(
            f"y is the same on all devices along {axis}, so its sum would be {lax.axis_size(axis)} y; shard the weight "
            "of the matmul before it, or leave this out"
        )
    if not sequence_parallel:
        return all_reduce(y_BTD, (axis,))
    _check_rows(y_BTD, axis)
    return reduce_scatter([y_BTD], axis, [1])[0]


def _check_types(x: jax.Array, axis: str) -> None:
    if axis not in varying_axes(as_varying(x, (axis,))):
        raise ValueError(
            "shard_map without check_vma: JAX would sum gradients more than once or not at all; use check_vma=True"
        )


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


def _enter_again(x_BTD: jax.Array, grads: list, axis: str, sequence_parallel: bool) -> jax.Array:
    """`enter` in a backward that begins with grads."""
    if sequence_parallel:  # the barrier: where layers are written out, XLA would keep what the forward gathered
        x_BTD, _ = lax.optimization_barrier((x_BTD, grads))
    return enter(x_BTD, axis, sequence_parallel)


def _add_to(total_BTD: jax.Array, g_BTD: jax.Array) -> jax.Array:
    """g + total, in this order: XLA:GPU has the matmul that computes the first operand add to the second in place."""
    return g_BTD + total_BTD


class MatmulOptions(NamedTuple):
    """Options of `columns` and `row`."""

    regather: bool = True  # `columns` stores x[B T/tensor D] and gathers it again in the backward, else x[B T D]
    overlap: bool = False  # with sequence_parallel: communicate in hops behind matmuls (collective_matmul.py)
    matmul: Matmul = float8.PLAIN  # or float8.FLOAT8
    together: bool = False  # on one device `columns` adds gradients of x in matmuls: loops hide less behind these


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
    gathered and g is all-reduced. adapters: narrow weights, which follow in the result, multiplied in their own dtype.
    """
    if any(map(is_transposed, weights)) or (axis is None and not options.together):
        return [column(x_BTD, w_DF, options.matmul) for w_DF in weights] + [column(x_BTD, a_DR) for a_DR in adapters]
    if axis is None:
        sequence_parallel, options = False, options._replace(regather=False, overlap=False)
    of_weights = frozenset().union(*map(varying_axes, [*weights, *adapters]))
    x_BTD = as_varying(x_BTD, sorted(of_weights - {axis}))
    everywhere = varying_axes(x_BTD) | ({axis} - {None})
    weights, adapters = as_varying((list(weights), list(adapters)), sorted(everywhere))
    regather, overlap, matmul, _ = options
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
            x_BTD = kept.operand(_enter_again(x_BTD, grads, axis, sequence_parallel))
        of_adapters = grads[len(weights) :]
        pairs = [(matmul.gradient(g_BTF), w_DF) for g_BTF, w_DF in zip(grads, weights, strict=False)]
        partial_grads = [float8.input_gradient(matmul, g_BTF, w_DF) for g_BTF, w_DF in pairs]
        partial_grads += map(partial(float8.input_gradient, float8.PLAIN), of_adapters, adapters)
        g_BTD = leave(reduce(_add_to, reversed(partial_grads)).astype(dtype), axis, sequence_parallel)
        x_of_weights = matmul.operand(x_BTD) if adapters else x_BTD
        grads_DF = [float8.weight_gradient(matmul, x_of_weights, g_BTF, w_DF) for g_BTF, w_DF in pairs]
        grads_DR = list(map(partial(float8.weight_gradient, float8.PLAIN, x_BTD), of_adapters, adapters))
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
