"""The backward of RMSNorm and LayerNorm as one Pallas kernel, lowered by Triton.

A program takes every P-th token. It reads x, the gradient of the norm's result and that of the residual stream, all [D]
of a token, once, and writes the gradient of x. It reads the next token before it sums over this one, so that memory is
never idle. The gradients of gain and bias are summed in registers, and written once by each program: their sum over
programs is XLA's. XLA alone needs three kernels, each of which reads x and g: one for the sums over D, one for the
gradient of x, one for the sums over tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nanotrain_jax.kernels import tiles

# What is fastest on an H200, of 132 multiprocessors: 8 programs of one warp each, for wide tokens two of 4 or more.
NARROW = 1024  # elements of a token in registers (a power of two), at most
PROGRAMS, PROGRAMS_OF_WIDE = 8 * 132, 2 * 132

Row = tuple[jax.Array, jax.Array, jax.Array]  # of a token: x, gradients of norm(x) and of x elsewhere


class Norm(NamedTuple):
    """Which norm."""

    eps: float
    centered: bool  # LayerNorm, with a bias; else RMSNorm
    sums_x: bool = False  # the gradient of x is also summed over tokens, for a bias that was added to x


def backward(
    x_TD: jax.Array,
    gain_D: jax.Array,
    g_TD: jax.Array,
    residual_TD: jax.Array,
    norm: Norm,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """x[T D], gain[D], gradients of norm(x) and of x elsewhere [T D] -> gradients of x[T D] (their sum, in the dtype of
    x), of gain[D], of LayerNorm's bias[D], and the sum over tokens of that of x[D], all float32; None: not asked for.

    All four arrays vary over the same mesh axes; x has at most MAX_ELEMENTS elements. Reads and writes each array once.
    interpret: run on any device, slowly, for tests.
    """
    tokens, width = x_TD.shape
    lanes = pl.next_power_of_2(width)
    programs = min(tokens, PROGRAMS if lanes <= NARROW else PROGRAMS_OF_WIDE)
    num_sums = 1 + norm.centered + norm.sums_x
    of_x = tiles.like(x_TD, x_TD.shape, x_TD.dtype)
    sums = tiles.like(x_TD, (programs, num_sums, width), jnp.float32)
    warps = 1 if lanes <= NARROW else max(4, min(16, lanes // NARROW))
    run = pl.pallas_call(
        partial(_backward, norm=norm),
        grid=(programs,),
        out_shape=[of_x, sums],
        name="norm_backward",
        **tiles.parameters(warps, interpret),
    )
    of_x_TD, sums_PSD = run(x_TD, gain_D, g_TD, residual_TD)
    of_gain_D, *others = sums_PSD.sum(0)
    of_bias_D = others.pop(0) if norm.centered else None
    return of_x_TD, of_gain_D, of_bias_D, others[0] if norm.sums_x else None


def _backward(
    x_ref: jax.Ref, gain_ref: jax.Ref, g_ref: jax.Ref, residual_ref: jax.Ref, *results: jax.Ref, norm: Norm
) -> None:
    """The kernel of a program. Each ref is a whole array; results: the gradient of x, the sums of each program."""
    of_x_ref, sums_ref = results
    tokens, width = x_ref.shape
    columns = jnp.arange(pl.next_power_of_2(width))
    is_column = columns < width  # a block of Triton has a power of two of them
    program, programs = pl.program_id(0), pl.num_programs(0)
    count = tiles.turns(tokens, programs)

    def read(turn: jax.Array) -> Row:
        token = program + jnp.minimum(turn, count - 1) * programs
        return tuple(tiles.load(ref, token, columns, where=is_column) for ref in (x_ref, g_ref, residual_ref))

    gain = tiles.load(gain_ref, columns, where=is_column).astype(jnp.float32)

    def add_token(turn: jax.Array, carry: tuple[Row, tuple]) -> tuple[Row, tuple]:
        row, sums = carry
        following = read(turn + 1)
        x, g, residual = (part.astype(jnp.float32) for part in row)
        if norm.centered:
            x = jnp.where(is_column, x - jnp.sum(x) / width, 0.0)
        scale = lax.rsqrt(jnp.sum(x * x) / width + norm.eps)
        x, through = x * scale, g * gain
        of_x = through - x * (jnp.sum(through * x) / width)
        if norm.centered:
            of_x -= jnp.sum(through) / width
        of_x = scale * of_x + residual
        tiles.store(of_x_ref, of_x, program + turn * programs, columns, where=is_column)
        parts = [g * x] + [g] * norm.centered + [of_x] * norm.sums_x
        return following, tuple(total + part for total, part in zip(sums, parts, strict=True))

    zeros = tuple(jnp.zeros(columns.shape, jnp.float32) for _ in range(sums_ref.shape[1]))
    _, sums = lax.fori_loop(0, count, add_token, (read(jnp.int32(0)), zeros))
    for k, total in enumerate(sums):
        tiles.store(sums_ref, total, program, jnp.int32(k), columns, where=is_column)
