"""Matmuls of rows with the matrix of their group: of tokens, in the order of experts, with their experts.

    y[m] = x[m] w[e]    for the rows m of group e, sizes[e] of them, one group after another

Rows after those of the last group give zeros. Shapes are static, sizes are not. A round takes at most C rows of each
group, as one batched matmul of x[E C D] and w[E D F]; C is SLACK times the mean size. As many rounds run as the largest
group needs: one where the largest is at most SLACK times the mean, which executes SLACK times the FLOPs of the rows. So
no row is ever left out, and a group that has all rows takes E / SLACK rounds.

`jax.lax.ragged_dot` computes the same; XLA:CPU and XLA:GPU expand it to a dense matmul of every row with every matrix,
E times the FLOPs. In FP8 (`float8.FLOAT8`) cuBLASLt runs the batched matmuls. A kernel (`kernels.py`) may multiply
instead, which needs no rounds. Of fewer rows, half the groups or less, each is multiplied by itself. Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import as_varying, varying_axes
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.tensor import float8
from nanotrain_jax.parallel.tensor.float8 import Matmul, Scaled

Operand = jax.Array | Scaled
SLACK = 1.25  # rows of a round over those of balanced groups
MULTIPLE = 16  # of C: tiles of a matmul, in FP8 too


def rows_of_a_round(rows: int, groups: int, most: int | None = None) -> int:
    """Return C, the most rows of a group that a round takes. most: rows that a group may have; None: all rows."""
    return min(most or rows, -(-int(SLACK * rows) // (groups * MULTIPLE)) * MULTIPLE)


def rounds(sizes_E: jax.Array, C: int) -> jax.Array:
    """Return how many rounds groups of these sizes take, an int32 scalar: 1 or more. C: `rows_of_a_round`."""
    return jnp.maximum(1, -(-sizes_E.max() // C))


class Kernel(Protocol):
    """What multiplies rows with the matrices of their groups, hashable."""

    def multiply(self, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """x[M D], w[E D F], sizes[E] -> y[M F]; zeros after the last group."""

    def outer(self, x_MD: jax.Array, g_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """x[M D], g[M F], sizes[E] -> x^T g[E D F], summed over the rows of each group."""


def grouped_matmul(
    x_MD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    rows: int | None = None,
    matmul: Matmul = float8.PLAIN,
    kernel: Kernel | None = None,
) -> jax.Array:
    """x[M D], w[E D F], sizes[E] (int32, of sum at most M) -> y[M F]. Backward: the same with w transposed, and x^T g.

    rows: the sum of sizes for which a round is made, by default M. matmul: FLOAT8 rounds all of x, w and g with one
    scale each, and stores x in 8 bits for the backward. kernel: multiplies in place of rounds, in the dtype of x; rows
    after the last group, and their gradients, must then be finite.
    """
    axes = sorted(varying_axes(x_MD) | varying_axes(w_EDF) | varying_axes(sizes_E))
    if kernel is not None:
        return with_backward(_by_kernel, _back_by_kernel, (0,))(kernel, *as_varying((x_MD, w_EDF, sizes_E), axes))
    C = rows_of_a_round(rows or len(x_MD), len(sizes_E), len(x_MD))
    run = with_backward(_forward, _backward, (0, 1))
    return run(matmul, C, *as_varying((x_MD, w_EDF, sizes_E), axes))


def _forward(matmul: Matmul, C: int, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, tuple]:
    if 2 * len(x_MD) <= len(sizes_E) and matmul is float8.PLAIN:
        return _row_by_row(x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)
    x = matmul.operand(x_MD)
    of_blocks = partial(matmul.batched, "ECD,EDF->ECF", b=matmul.operand(w_EDF), exact=False)
    return _multiply(of_blocks, x, sizes_E, C), (x, w_EDF, sizes_E)


def _backward(matmul: Matmul, C: int, residuals: tuple, g_MF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w_EDF, sizes_E = residuals
    g = matmul.gradient(g_MF)
    of_blocks = partial(matmul.batched, "ECF,EDF->ECD", b=matmul.operand(w_EDF), exact=True)
    return _multiply(of_blocks, g, sizes_E, C), _outer(matmul, x, g, sizes_E, C), None


def _by_kernel(kernel: Kernel, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, tuple]:
    return kernel.multiply(x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


def _back_by_kernel(kernel: Kernel, residuals: tuple, g_MF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MD, w_EDF, sizes_E = residuals
    return kernel.multiply(g_MF, w_EDF.swapaxes(1, 2), sizes_E), kernel.outer(x_MD, g_MF, sizes_E), None


def _multiply(of_blocks: Callable, x: Operand, sizes_E: jax.Array, C: int) -> jax.Array:
    """x[M D] -> y[M F], of all rounds. of_blocks: x[E C D] -> y[E C F]"""
    M = len(x.value if isinstance(x, Scaled) else x)
    is_row_M, group_M = _groups(M, sizes_E)
    place_M = jnp.arange(M) - (jnp.cumsum(sizes_E) - sizes_E)[group_M]  # in its group

    def of_round(turn: jax.Array | int, others: jax.Array | float) -> jax.Array:
        y_ECF = of_blocks(_blocks(x, sizes_E, turn, C))
        place = place_M - turn * C
        is_here_M1 = (is_row_M & (place >= 0) & (place < C))[:, None]
        return jnp.where(is_here_M1, y_ECF[group_M, jnp.clip(place, 0, C - 1)], others)

    return _further_rounds(sizes_E, C, of_round, of_round(0, 0.0))


def _groups(M: int, sizes_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> of each row whether it is of a group, and of which, [M]"""
    group_M = (jnp.arange(M)[:, None] >= jnp.cumsum(sizes_E)[None]).sum(1)
    return group_M < len(sizes_E), jnp.minimum(group_M, len(sizes_E) - 1)


def _row_by_row(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """x[M D] -> y[M F], for few rows, those of tokens that are generated: reads the matrix of each row, where a batched
    matmul reads those of all groups. No matmul: XLA:GPU fuses the look-up with the sum."""
    is_row_M, group_M = _groups(len(x_MD), sizes_E)
    products_MDF = x_MD[..., None].astype(jnp.float32) * w_EDF[group_M].astype(jnp.float32)
    return jnp.where(is_row_M[:, None], products_MDF.sum(1), 0.0).astype(x_MD.dtype)


def _outer(matmul: Matmul, x: Operand, g: Operand, sizes_E: jax.Array, C: int) -> jax.Array:
    """x^T g[E D F], summed over the rows of each group, of all rounds."""

    def of_round(turn: jax.Array | int) -> jax.Array:
        return matmul.batched("ECD,ECF->EDF", _blocks(x, sizes_E, turn, C), _blocks(g, sizes_E, turn, C), True)

    return _further_rounds(sizes_E, C, lambda turn, sums_EDF: sums_EDF + of_round(turn), of_round(0))


def _further_rounds(sizes_E: jax.Array, C: int, add: Callable, first: jax.Array) -> jax.Array:
    """Return add(round, result of the rounds before), from round 1 on. Each runs only if a group has rows for it."""
    with jax.named_scope("as_needed_further_rounds"):
        return lax.fori_loop(1, rounds(sizes_E, C), add, first)


def _blocks(x: Operand, sizes_E: jax.Array, turn: jax.Array | int, C: int) -> Operand:
    """x[M D] -> x[E C D], the rows of each group in a round; zeros where it has no more."""
    if isinstance(x, Scaled):
        return x._replace(value=_blocks(x.value, sizes_E, turn, C))
    place_C = turn * C + jnp.arange(C)
    row_EC = (jnp.cumsum(sizes_E) - sizes_E)[:, None] + place_C[None]
    is_row_EC1 = (place_C[None] < sizes_E[:, None])[..., None]
    x_ECD = x[jnp.clip(row_EC, 0, len(x) - 1)]
    return jnp.where(is_row_EC1, x_ECD, jnp.zeros_like(x_ECD))
