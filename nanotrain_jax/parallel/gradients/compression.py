"""Sums over slow links that send little: top-k, random-k and low-rank gradients, with error feedback.

Device i sends a part of its gradient g_i, and keeps the rest for the next step (error feedback, arXiv 1901.09847):

    x_i    = g_i + e_i           e_i: its residual, zeros at first
    sum    = sum_i C(x_i)        what all devices receive; C compresses
    e_i    = x_i - C(x_i)        so the sum of all that was sent and of the residuals is the sum of all gradients

Each function below returns the sum and this device's x - C(x). With R devices along `axis`, and S elements of x:

    function   C(x)                                          wire bytes per device
    top_k      the k largest of each block of 1,024          (R-1) S k / 1024 (b + 2), all-gather; b per value
    random_k   k of 1,024, the same places on all devices    2 (R-1)/R S k / 1024 b, all-reduce
    low_rank   P P^T x, with P orthonormal [rows rank]       2 (R-1)/R 4 rank (rows + columns), two all-reduces

The sum is the same on all devices, bit for bit: it is added up in one order. Gradients may be sharded over other axes.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from nanotrain_jax.parallel.collectives import all_gather, all_reduce, as_varying, varying_axes
from nanotrain_jax.parallel.loops import zeros_after
from nanotrain_jax.parallel.mesh import AXES

BLOCK = 1024  # elements of which k are sent
DEPENDENT = 1e-5  # of the squared norm of P: shorter columns are dependent, or rounding errors that must not grow


class Sum(NamedTuple):
    """A compressed sum over an axis."""

    total: jax.Array  # the sum of what all devices sent; invarying over the axis
    kept: jax.Array  # what this device has not sent: x - C(x)


class Matrices(NamedTuple):
    """An array [stack rows columns] as a stack of matrices, each group of dims flattened."""

    rows: int  # index of the first dim of rows: 1 in a stack of layers, else 0
    columns: int  # index of the first dim of columns
    row_axes: tuple[str, ...]  # mesh axes that shard rows
    column_axes: tuple[str, ...]

    def flat(self, x: jax.Array) -> jax.Array:
        """x[stack rows columns] -> [S A B]."""
        stack, rows = (prod(x.shape[i:j]) for i, j in ((0, self.rows), (self.rows, self.columns)))
        return x.reshape(stack, rows, -1)


def top_k(x: jax.Array, axis: str, count: int, dtype: jnp.dtype) -> Sum:
    """Sum the entries of x that are the `count` largest of their block of 1,024, by magnitude (arXiv 1712.01887).

    Values travel in dtype, their places in a block as int16. With count=1024 all entries travel.
    """
    blocks = _in_blocks(x)
    _, places = lax.top_k(jnp.abs(blocks), count)
    values = jnp.take_along_axis(blocks, places, axis=1).astype(dtype)
    of_all = [all_gather([part[None]], axis, [0], invarying=True)[0] for part in (values, places.astype(jnp.int16))]

    def add(total: jax.Array, of_one: list[jax.Array]) -> tuple[jax.Array, None]:
        return _added(total, *of_one), None

    start = zeros_after(of_all, blocks.shape, jnp.float32, varying_axes(of_all[0]))
    total, _ = lax.scan(add, start, of_all)
    return Sum(_out_of_blocks(total, x), _out_of_blocks(_added(blocks, -values, places), x))


def random_k(x: jax.Array, axis: str, count: int, key: jax.Array, dtype: jnp.dtype) -> Sum:
    """Sum `count` random places of every block of 1,024, the same in all blocks (arXiv 1809.07599).

    key: the same on all devices, so that no places travel; each place is as likely. Values travel in dtype.
    """
    blocks = _in_blocks(x)
    places = jax.random.permutation(key, BLOCK)[:count]
    values = blocks[:, places].astype(dtype)
    sums = all_reduce(values, [axis]).astype(jnp.float32)
    total = zeros_after(sums, blocks.shape, jnp.float32, varying_axes(sums)).at[:, places].set(sums)
    kept = blocks.at[:, places].add(-values.astype(jnp.float32))
    return Sum(_out_of_blocks(total, x), _out_of_blocks(kept, x))


def low_rank(x: jax.Array, axis: str, basis: jax.Array, matrices: Matrices) -> tuple[Sum, jax.Array]:
    """Sum the projections of matrices on one subspace of their columns (PowerSGD, arXiv 1905.13727, algorithm 1).

    x[stack rows columns], basis[stack columns rank], equal along axis -> sum, and the basis for the next step. Matrices
    are whole whatever axes shard them, so every layout computes the same:

        P[S A r] = sum x Q             all-reduce over column axes, then over axis
        P        = orthonormal P       all-reduce over row axes: r^2
        Q[S B r] = sum x^T P           all-reduce over row axes, then over axis
        basis    = Q, unit columns     all-reduce over column axes: r
    """
    flat = matrices.flat(x)
    start = basis.reshape(len(flat), -1, basis.shape[-1])
    columns = all_reduce(_dot("sab,sbr->sar", flat, start), matrices.column_axes)
    columns = _orthonormal(all_reduce(columns, [axis]), matrices.row_axes)
    own = all_reduce(_dot("sab,sar->sbr", flat, columns), matrices.row_axes)
    total = all_reduce(own, [axis])
    projected, sent = (_dot("sar,sbr->sab", columns, part).reshape(x.shape) for part in (total, own))
    squares = all_reduce(jnp.square(total).sum(1, keepdims=True), matrices.column_axes)
    after = jnp.where(squares > 0, total * lax.rsqrt(squares), start)  # a column that was dependent starts again
    return Sum(projected, x - sent), after.reshape(basis.shape)


def matrices_of(shape: Sequence[int], spec: PartitionSpec, stacked: bool) -> Matrices:
    """Return an array as matrices: its dims are divided into rows and columns where their sum is least.

    shape, spec: of the whole array, with at least two dims beside that of layers. stacked: the first dim is of layers.
    """
    first = int(stacked)
    dims = shape[first:]
    columns = first + min(range(1, len(dims)), key=lambda i: prod(dims[:i]) + prod(dims[i:]))
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    of_rows, of_columns = (jax.tree.leaves(part) for part in (entries[first:columns], entries[columns:]))
    row_axes, column_axes = (tuple(axis for axis in AXES if axis in used) for used in (of_rows, of_columns))
    return Matrices(first, columns, row_axes, column_axes)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply in float32 also where the default is less: what is sent and what is kept must add up."""
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)


def _orthonormal(p: jax.Array, row_axes: Sequence[str]) -> jax.Array:
    """p[S A r] -> p w with orthonormal columns (Gram-Schmidt); zeros for columns that depend on earlier ones.

    All-reduces p^T p, from which w[S r r] follows. Written in JAX because batches of LAPACK's solves deadlock on
    simulated devices (XLA:CPU, jax 0.10).
    """
    rank = p.shape[-1]
    gram = all_reduce(_dot("sar,saq->srq", p, p), row_axes)
    least = DEPENDENT * jnp.trace(gram, axis1=1, axis2=2)

    def column(j: jax.Array, w: jax.Array) -> jax.Array:
        along_earlier = _dot("srk,sr->sk", w, lax.dynamic_index_in_dim(gram, j, 2, keepdims=False))
        rest = (jnp.arange(rank) == j).astype(jnp.float32)[None] - _dot("srk,sk->sr", w, along_earlier)
        square = _dot("sr,sr->s", rest, _dot("srq,sq->sr", gram, rest))
        rest = rest * jnp.where(square > least, lax.rsqrt(square), 0)[:, None]
        return lax.dynamic_update_index_in_dim(w, rest, j, 2)

    w = lax.fori_loop(0, rank, column, as_varying(jnp.zeros_like(gram), sorted(varying_axes(gram))))
    return _dot("sar,srq->saq", p, w)


def _in_blocks(x: jax.Array) -> jax.Array:
    """x[...] -> [n 1024] in float32, padded with zeros."""
    flat = x.astype(jnp.float32).ravel()
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _out_of_blocks(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_in_blocks`, in the shape of `like`."""
    return blocks.ravel()[: like.size].reshape(like.shape)


def _added(blocks: jax.Array, values: jax.Array, places: jax.Array) -> jax.Array:
    """Add values[n k] to blocks[n 1024] at their places[n k], distinct in a block."""
    rows = jnp.arange(len(values))[:, None]
    return blocks.at[rows, places.astype(jnp.int32)].add(values.astype(jnp.float32), unique_indices=True)
