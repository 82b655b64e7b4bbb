"""Matmuls of rows with the matrix of their group: of tokens, in the order of experts, with their experts.

    y[m] = x[m] w[e]    for the rows m of group e, sizes[e] of them, one group after another

Rows after those of the last group give zeros. Shapes are static, sizes are not. A round takes at most C rows of each
group, as one batched matmul of x[E C D] and w[E D F]; C is SLACK times the mean size. As many rounds run as the largest
group needs: one where the largest is at most SLACK times the mean, which executes SLACK times the FLOPs of the rows. So
no row is ever left out, and a group that has all rows takes E / SLACK rounds.

`jax.lax.ragged_dot` computes the same; XLA:CPU and XLA:GPU expand it to a dense matmul of every row with every matrix,
E times the FLOPs. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import as_varying, varying_axes
from nanotrain_jax.parallel.loops import with_backward

SLACK = 1.25  # rows of a round over those of balanced groups
MULTIPLE = 8  # of C: tiles of a matmul


def rows_of_a_round(rows: int, groups: int, most: int | None = None) -> int:
    """Return C, the most rows of a group that a round takes. most: rows that a group may have; None: all rows."""
    return min(most or rows, -(-int(SLACK * rows) // (groups * MULTIPLE)) * MULTIPLE)


def rounds(sizes_E: jax.Array, C: int) -> jax.Array:
    """Return how many rounds groups of these sizes take, an int32 scalar: 1 or more. C: `rows_of_a_round`."""
    return jnp.maximum(1, -(-sizes_E.max() // C))


def grouped_matmul(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, rows: int | None = None) -> jax.Array:
    """x[M D], w[E D F], sizes[E] (int32, of sum at most M) -> y[M F]. Backward: the same with w transposed, and x^T g.

    rows: the sum of sizes for which a round is made, by default M.
    """
    axes = sorted(varying_axes(x_MD) | varying_axes(w_EDF) | varying_axes(sizes_E))
    C = rows_of_a_round(rows or len(x_MD), len(sizes_E), len(x_MD))
    return with_backward(_forward, _backward, static=(3,))(*as_varying((x_MD, w_EDF, sizes_E), axes), C)


def _forward(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, C: int) -> tuple[jax.Array, tuple]:
    return _multiply(x_MD, w_EDF, sizes_E, C), (x_MD, w_EDF, sizes_E)


def _backward(C: int, residuals: tuple, g_MF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MD, w_EDF, sizes_E = residuals
    return _multiply(g_MF, w_EDF.swapaxes(1, 2), sizes_E, C), _outer(x_MD, g_MF, sizes_E, C), None


def _multiply(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, C: int) -> jax.Array:
    """y[M F], of all rounds."""
    M, E, ends_E = len(x_MD), len(sizes_E), jnp.cumsum(sizes_E)
    group_M = (jnp.arange(M)[:, None] >= ends_E[None]).sum(1)
    is_row_M, group_M = group_M < E, jnp.minimum(group_M, E - 1)
    place_M = jnp.arange(M) - (ends_E - sizes_E)[group_M]  # in its group

    def add(turn: jax.Array | int, y_MF: jax.Array) -> jax.Array:
        y_ECF = jnp.einsum("ECD,EDF->ECF", _blocks(x_MD, sizes_E, turn, C), w_EDF)
        place = place_M - turn * C
        is_here_M1 = (is_row_M & (place >= 0) & (place < C))[:, None]
        return jnp.where(is_here_M1, y_ECF[group_M, jnp.clip(place, 0, C - 1)], y_MF)

    first = add(0, jnp.zeros_like(x_MD, shape=(M, w_EDF.shape[2])))
    return _further_rounds(sizes_E, C, add, first)


def _outer(x_MD: jax.Array, g_MF: jax.Array, sizes_E: jax.Array, C: int) -> jax.Array:
    """x^T g[E D F], summed over the rows of each group, of all rounds."""

    def of_round(turn: jax.Array | int) -> jax.Array:
        return jnp.einsum("ECD,ECF->EDF", *(_blocks(rows, sizes_E, turn, C) for rows in (x_MD, g_MF)))

    return _further_rounds(sizes_E, C, lambda turn, sums_EDF: sums_EDF + of_round(turn), of_round(0))


def _further_rounds(sizes_E: jax.Array, C: int, add: Callable, first: jax.Array) -> jax.Array:
    """Return add(round, result of the rounds before), from round 1 on. Each runs only if a group has rows for it."""
    with jax.named_scope("as_needed_further_rounds"):
        return lax.fori_loop(1, rounds(sizes_E, C), add, first)


def _blocks(x_MD: jax.Array, sizes_E: jax.Array, turn: jax.Array | int, C: int) -> jax.Array:
    """x[M D] -> x[E C D], the rows of each group in a round; zeros where it has no more."""
    M = len(x_MD)
    place_C = turn * C + jnp.arange(C)
    row_EC = (jnp.cumsum(sizes_E) - sizes_E)[:, None] + place_C[None]
    is_row_EC1 = (place_C[None] < sizes_E[:, None])[..., None]
    x_ECD = x_MD[jnp.clip(row_EC, 0, M - 1)]
    return jnp.where(is_row_EC1, x_ECD, jnp.zeros_like(x_ECD))
