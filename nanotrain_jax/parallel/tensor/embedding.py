"""Embedding look-up in a vocabulary split over mesh axes (Megatron-LM, arXiv 1909.08053, section 3).

A pure function for use inside any `shard_map` (with check_vma=True). B batch, T tokens, D model, V vocabulary;
axis=None: one device. The same maths, moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import as_varying, position, varying_axes
from nanotrain_jax.parallel.tensor.tensor import leave


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
    of_axis = (axis,) if axis else ()
    axes = of_axis if vocab_axes is None else tuple(vocab_axes)
    if axes:
        tokens_BT = tokens_BT - position(axes) * embedding_VD.shape[0]  # out of range: stored on another device
    return leave(_rows(as_varying(embedding_VD, varying_axes(tokens_BT)), tokens_BT), axis, sequence_parallel)


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
