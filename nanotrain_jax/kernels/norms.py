"""The backward of RMSNorm and LayerNorm as one Pallas kernel, lowered by Triton.

A program takes every P-th token. It reads x, the gradient of the norm's result and that of the residual stream, all [D]
of a token, once, and writes the gradient of x. The gradients of gain and bias are summed in registers, and written once
by each program: their sum over programs is XLA's. XLA alone needs three kernels, each of which reads x and g: one
for the sums over D, one for the gradient of x, one for the sums over tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MAX_SIZE = 2**31 - 1  # elements of x: Triton computes addresses in 32 bits
PROGRAMS = 1024  # at most: each writes sums of D elements
ELEMENTS = 2**20  # of the sums of all programs, at most
ELEMENTS_PER_WARP = 256  # 8 per thread


class Norm(NamedTuple):
    """Which norm."""

    eps: float
    centered: bool  # LayerNorm, with a bias; else RMSNorm


def backward(
    x_TD: jax.Array,
    gain_D: jax.Array,
    g_TD: jax.Array,
    residual_TD: jax.Array,
    norm: Norm,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """x[T D], gain[D], gradients of norm(x) and of x elsewhere [T D] -> gradients of x[T D] (their sum, in the dtype of
    x), of gain[D] and, of LayerNorm, of its bias[D], both float32.

    All four arrays vary over the same mesh axes; x has at most MAX_SIZE elements. Reads and writes each array once.
    interpret: run on any device, slowly, for tests.
    """
    tokens, width = x_TD.shape
    lanes = pl.next_power_of_2(width)
    programs = min(tokens, PROGRAMS, max(1, ELEMENTS // lanes))
    num_sums = 2 if norm.centered else 1
    of_x, sums = _like(x_TD, x_TD.shape, x_TD.dtype), _like(x_TD, (programs, num_sums, width), jnp.float32)
    warps = max(4, min(16, lanes // ELEMENTS_PER_WARP))
    run = pl.pallas_call(
        partial(_backward, norm=norm),
        grid=(programs,),
        out_shape=[of_x, sums],
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps, num_stages=2),
        name="norm_backward",
    )
    of_x_TD, sums_PSD = run(x_TD, gain_D, g_TD, residual_TD)
    of_gain_D, *of_bias_D = sums_PSD.sum(0)
    return of_x_TD, of_gain_D, *(of_bias_D or [None])


def _like(x: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _backward(
    x_ref: jax.Ref, gain_ref: jax.Ref, g_ref: jax.Ref, residual_ref: jax.Ref, *results: jax.Ref, norm: Norm
) -> None:
    """The kernel of a program. Each ref is a whole array; results: the gradient of x, the sums of each program."""
    of_x_ref, sums_ref = results
    tokens, width = x_ref.shape
    lanes = pl.next_power_of_2(width)
    columns = jnp.arange(lanes)
    is_column = columns < width  # a block of Triton has a power of two of them
    program, programs = pl.program_id(0), pl.num_programs(0)

    def read(ref: jax.Ref, *row: jax.Array) -> jax.Array:
        return triton.load(ref.at[*row, columns], mask=is_column, other=0.0).astype(jnp.float32)

    def write(ref: jax.Ref, value: jax.Array, *row: jax.Array) -> None:
        triton.store(ref.at[*row, columns], value.astype(ref.dtype), mask=is_column)

    gain = read(gain_ref)

    def add_token(turn: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        token = program + turn * programs
        x, g = read(x_ref, token), read(g_ref, token)
        if norm.centered:
            x = jnp.where(is_column, x - jnp.sum(x) / width, 0.0)
        scale = lax.rsqrt(jnp.sum(x * x) / width + norm.eps)
        x, through = x * scale, g * gain
        of_x = through - x * (jnp.sum(through * x) / width)
        if norm.centered:
            of_x -= jnp.sum(through) / width
        write(of_x_ref, scale * of_x + read(residual_ref, token), token)
        return tuple(total + part for total, part in zip(sums, (g * x, g), strict=False))

    turns = (tokens - program + programs - 1) // programs
    sums = lax.fori_loop(0, turns, add_token, tuple(jnp.zeros(lanes, jnp.float32) for _ in range(sums_ref.shape[1])))
    for k, total in enumerate(sums):
        write(sums_ref, total, program, jnp.int32(k))
