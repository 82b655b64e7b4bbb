"""Collective matmuls: a gather or a reduce-scatter over one mesh axis, hop by hop behind the matmuls that need it.

Two rings over t devices, for use inside any `shard_map` (with check_vma=True). They compute what a collective and a
matmul compute one after another, and move the same bytes (Wang et al. 2023, "Overlap communication with dependent
computation via decomposition"):

    gather_matmuls     y = all_gather(x) w      a hop brings the rows of another device, behind the matmul of the last
    matmul_scatter     y = reduce_scatter(h w)  a hop takes a partial sum on, behind the matmul of the next block

Each ring is a `lax.scan`: XLA schedules the hop of a turn behind the matmul of the same turn. Written out, it would
start all hops before the first matmul. A matmul has T/t rows: with fewer than about a thousand, it is shorter than its
hop. One direction of a link carries everything: on a switch (NVLink) that is its whole bandwidth.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import as_varying, position, shift, varying_axes
from nanotrain_jax.parallel.tensor.float8 import PLAIN, Matmul


def gather_matmuls(
    x_BTD: jax.Array,
    weights: Sequence[jax.Array],
    axis: str,
    matmul: Matmul = PLAIN,
    is_gradient: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
    """x[B T/tensor D], w[D ...] for each of weights -> y[B T ...] each, x[B T D]

        for r in 0 .. t-1: y[rows of device i-r] = x w;  x = shift(x)     (t-1)/t B T D elements, each behind a matmul
    matmul: how to multiply; x travels in its own dtype. is_gradient: x is the gradient of a result. Needs no gradient
    itself: used in `custom_vjp` (parallel/tensor/tensor.py).
    """
    t, here, T = lax.axis_size(axis), position(axis), x_BTD.shape[1]
    axes = sorted(frozenset({axis}).union(varying_axes(x_BTD), *map(varying_axes, weights)))
    x_BTD = as_varying(x_BTD, axes)
    shapes = [(x_BTD.shape[0], t * T, *w.shape[1:]) for w in weights]
    dtypes = [jnp.result_type(x_BTD, w) for w in weights]
    zeros = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    operands = [matmul.operand(w) for w in weights]
    gathered_BTD = jnp.zeros((x_BTD.shape[0], t * T, x_BTD.shape[2]), x_BTD.dtype)

    def placed(results: list[jax.Array], x_BTD: jax.Array, r: jax.Array | int) -> list[jax.Array]:
        """Write the block of device i-r into its rows of every result."""
        rows_BTD = matmul.gradient(x_BTD) if is_gradient else matmul.operand(x_BTD)
        blocks = [matmul.contract(rows_BTD, w, 1, is_gradient) for w in operands]
        row = (here - r) % t * T
        return [
            lax.dynamic_update_slice_in_dim(y, block, row, 1)
            for y, block in zip(results, [*blocks, x_BTD], strict=True)
        ]

    def hop(carry: tuple, r: jax.Array) -> tuple[tuple, None]:
        x_BTD, results = carry
        arriving = shift(x_BTD, axis, 1)
        return (arriving, placed(results, x_BTD, r)), None

    carry = x_BTD, as_varying([*zeros, gathered_BTD], axes)
    (x_BTD, results), _ = lax.scan(hop, carry, jnp.arange(t - 1))
    *results, gathered_BTD = placed(results, x_BTD, t - 1)
    return results, gathered_BTD


def matmul_scatter(h_BTF: jax.Array, w_FD: jax.Array, axis: str, matmul: Matmul = PLAIN) -> jax.Array:
    """h[B T F/tensor], w[F/tensor D] -> y[B T/tensor D], the sum over tensor. F may be several dims.

        y = h[rows of device i-1] w
        for r in 2 .. t: y = shift(y) + h[rows of device i-r] w     (t-1)/t B T D elements, each behind a matmul
    Needs no gradient: used in `custom_vjp` (parallel/tensor/tensor.py).
    """
    t, here = lax.axis_size(axis), position(axis)
    T = h_BTF.shape[1] // t
    operand_FD = matmul.operand(w_FD)

    def block(r: jax.Array | int) -> jax.Array:
        rows_BTF = lax.dynamic_slice_in_dim(h_BTF, (here - r) % t * T, T, 1)
        return matmul.contract(matmul.operand(rows_BTF), operand_FD, w_FD.ndim - 1, False)

    def hop(y_BTD: jax.Array, r: jax.Array) -> tuple[jax.Array, None]:
        # Without the barrier XLA adds inside the matmul, which then waits for the hop.
        return shift(y_BTD, axis, 1) + lax.optimization_barrier(block(r)), None

    first_BTD = as_varying(block(1), (axis,))
    return lax.scan(hop, first_BTD, jnp.arange(2, t + 1))[0]
