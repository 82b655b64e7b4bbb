"""The backward of GELU, with the gradient of the bias before it, as one Pallas kernel, lowered by Triton.

A program takes LANES columns of every P-th group of ROWS tokens, and sums the gradients of the bias in registers: their
sum over programs is XLA's. XLA alone needs two kernels: one writes the gradient of x, one reads it again to sum it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nanotrain_jax.kernels import tiles

ROWS, LANES, PROGRAMS, WARPS = 8, 128, 256, 4
SCALE, CUBIC = (2 / jnp.pi) ** 0.5, 0.044715  # of the tanh form, arXiv 1606.08415, section 2
LARGEST = 80.0  # exponent: exp(80) is finite in float32


def slope(x: jax.Array) -> jax.Array:
    """Return the derivative of the tanh form of GELU, float32: x sigmoid(2 u) with u = SCALE (x + CUBIC x^3)."""
    exp = jnp.exp(jnp.minimum(-2 * SCALE * (x + CUBIC * x * x * x), LARGEST))
    sigmoid = 1 / (1 + exp)
    of_sigmoid = exp * sigmoid * sigmoid  # sigmoid (1 - sigmoid) would lose digits
    return sigmoid + 2 * SCALE * x * of_sigmoid * (1 + 3 * CUBIC * x * x)


def backward(x_TF: jax.Array, g_TF: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """x[T F], gradient of gelu(x) [T F] -> gradient of x[T F] in its dtype, and its sum over tokens [F], float32

    Both arrays vary over the same mesh axes, and have at most MAX_ELEMENTS. Reads and writes each once.
    """
    tokens, width = x_TF.shape
    programs = min(PROGRAMS, pl.cdiv(tokens, ROWS))
    run = pl.pallas_call(
        _backward,
        grid=(programs, pl.cdiv(width, LANES)),
        out_shape=[tiles.like(x_TF, x_TF.shape, x_TF.dtype), tiles.like(x_TF, (programs, width), jnp.float32)],
        name="gelu_backward",
        **tiles.parameters(WARPS, interpret),
    )
    of_x_TF, sums_PF = run(x_TF, g_TF)
    return of_x_TF, sums_PF.sum(0)


def _backward(x_ref: jax.Ref, g_ref: jax.Ref, of_x_ref: jax.Ref, sums_ref: jax.Ref) -> None:
    """The kernel of a program; refs are whole arrays."""
    tokens, width = x_ref.shape
    program, programs = pl.program_id(0), pl.num_programs(0)
    columns = pl.program_id(1) * LANES + jnp.arange(LANES)

    def add_rows(turn: jax.Array, sums: jax.Array) -> jax.Array:
        rows = (program + turn * programs) * ROWS + jnp.arange(ROWS)
        at, inside = (rows[:, None], columns[None]), (rows < tokens)[:, None] & (columns < width)[None]
        x, g = (tiles.load(ref, *at, where=inside).astype(jnp.float32) for ref in (x_ref, g_ref))
        of_x = g * slope(x)
        tiles.store(of_x_ref, of_x, *at, where=inside)
        return sums + of_x

    turns = tiles.turns(pl.cdiv(tokens, ROWS), programs)
    sums = lax.fori_loop(0, turns, add_rows, jnp.zeros((ROWS, LANES), jnp.float32))
    tiles.store(sums_ref, sums.sum(0), program, columns, where=columns < width)
