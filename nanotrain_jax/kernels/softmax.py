"""The softmax of the loss as two Pallas kernels, lowered by Triton: its maximum and sum, and the gradient of logits.

A program takes a token and reads its logits once, a block after another. XLA's reduction of pairs (maximum, sum) and
its fusion for the gradient read each once too, but at 1.9 and 3.2 TB/s on an H200, where these reach 3.3 and 3.8.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nanotrain_jax.kernels import tiles

BLOCK = 2048  # logits in registers
WARPS = 4


class Weights(NamedTuple):
    """Of each token, float32 [c] but own: gradient = of_exp exp(logit - top) - of_own at its target."""

    top: jax.Array
    of_exp: jax.Array
    of_own: jax.Array
    own: jax.Array  # the target's column, int32; out of range: none


def maximum_and_sum(x_cV: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """x[c V] -> its maximum, and the sum of exp(x - maximum), over V: float32 [c] each

    Milakov and Gimelshein, arXiv 1805.02867. x is finite, and has at most MAX_ELEMENTS elements.
    """
    of_token = tiles.like(x_cV, (len(x_cV),), jnp.float32)
    run = pl.pallas_call(
        _maximum_and_sum,
        grid=(len(x_cV),),
        out_shape=[of_token, of_token],
        name="maximum_and_sum",
        **tiles.parameters(WARPS, interpret),
    )
    return run(x_cV)


def _maximum_and_sum(x_ref: jax.Ref, top_ref: jax.Ref, sum_ref: jax.Ref) -> None:
    """The kernel of a token; refs are whole arrays."""
    token, width = pl.program_id(0), x_ref.shape[1]
    lowest = float(jnp.finfo(x_ref.dtype).min)

    def read(block: jax.Array) -> jax.Array:
        columns = block * BLOCK + jnp.arange(BLOCK)
        return tiles.load(x_ref, token, columns, where=columns < width, other=lowest)

    def add_block(block: jax.Array, carry: tuple) -> tuple:
        x, top, sums = carry
        following, x = read(block + 1), x.astype(jnp.float32)
        new_top = jnp.maximum(top, jnp.max(x))
        return following, new_top, sums * jnp.exp(top - new_top) + jnp.exp(x - new_top)

    start = read(jnp.int32(0)), jnp.float32(lowest), jnp.zeros(BLOCK, jnp.float32)
    _, top, sums = lax.fori_loop(0, pl.cdiv(width, BLOCK), add_block, start)
    tiles.store(top_ref, top, token)
    tiles.store(sum_ref, jnp.sum(sums), token)


def gradient(x_cV: jax.Array, weights: Weights, dtype: jnp.dtype, interpret: bool = False) -> jax.Array:
    """logits x[c V] -> their gradient [c V] of that dtype; in place, if it is that of x. All arrays vary over the same
    mesh axes."""
    in_place = {0: 0} if x_cV.dtype == dtype else {}
    run = pl.pallas_call(
        _gradient,
        grid=(len(x_cV),),
        out_shape=tiles.like(x_cV, x_cV.shape, dtype),
        input_output_aliases=in_place,
        name="gradient_of_logits",
        **tiles.parameters(WARPS, interpret),
    )
    return run(x_cV, *weights)


def _gradient(x_ref: jax.Ref, *refs: jax.Ref) -> None:
    """The kernel of a token; refs are whole arrays: those of Weights, the result."""
    *weights, g_ref = refs
    token, width = pl.program_id(0), x_ref.shape[1]
    of_token = Weights(*(tiles.load(ref, token) for ref in weights))

    def write_block(block: jax.Array, _: None) -> None:
        columns = block * BLOCK + jnp.arange(BLOCK)
        x = tiles.load(x_ref, token, columns, where=columns < width).astype(jnp.float32)
        g = of_token.of_exp * jnp.exp(x - of_token.top) - jnp.where(columns == of_token.own, of_token.of_own, 0.0)
        tiles.store(g_ref, g, token, columns, where=columns < width)

    lax.fori_loop(0, pl.cdiv(width, BLOCK), write_block, None)
