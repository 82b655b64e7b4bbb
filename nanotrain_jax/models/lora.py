"""LoRA (Hu et al. 2021, arXiv 2106.09685): y = x W + scale (x A) B, with A [D R], B [R F]; W is frozen.

B begins as zeros, so a model with new adapters computes what it computes without. A matmul with A is of the kind of its
matrix: for a column-parallel W one more column-parallel matmul, of the same gathered x; for a row-parallel W one more
row-parallel matmul, whose sums x A of width R are reduced over tensor. B multiplies what a device then has.

    column-parallel   A [D R] replicated       B [R F/tensor]      moves nothing
    row-parallel      A [F/tensor R]           B [R D] replicated  leaves with R instead of D elements per token

Adapters multiply in the dtype of their weights, also beside a base in 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.tensor import tensor
from nanotrain_jax.parallel.tensor.tensor import MatmulOptions

ADAPTER = re.compile(r"^(\w+)_[AB]_[A-Z]+$")  # the name of an array A or B


class Adapter(NamedTuple):
    """The matrices beside a weight: a[inputs R], b[R outputs]; scale multiplies a b."""

    a: jax.Array
    b: jax.Array
    scale: float


def columns(
    x_BTD: jax.Array,
    weights: Mapping[str, jax.Array],
    adapters: Mapping[str, Adapter],
    axis: str | None,
    sequence_parallel: bool,
    options: MatmulOptions,
) -> list[jax.Array]:
    """`tensor.columns` of weights by name, each with its adapter, if it has one."""
    adapted = [name for name in weights if name in adapters]
    inner = [adapters[name].a for name in adapted]
    results = tensor.columns(x_BTD, list(weights.values()), axis, sequence_parallel, options, inner)
    outputs = dict(zip(weights, results[: len(weights)], strict=True))
    for name, u_BTR in zip(adapted, results[len(weights) :], strict=True):
        outputs[name] += _outer(u_BTR, adapters[name])
    return list(outputs.values())


def row(
    x_BTF: jax.Array, adapter: Adapter, axis: str | None, sequence_parallel: bool, rows: int | None = None
) -> jax.Array:
    """x[B T F/tensor] -> scale (x A) B [B T/tensor D], to add to `tensor.row` of the same x. rows: as there."""
    return _outer(tensor.row(x_BTF, adapter.a, axis, sequence_parallel, rows=rows), adapter)


def _outer(u_BTR: jax.Array, adapter: Adapter) -> jax.Array:
    """x A[B T R] -> scale (x A) B[B T F]"""
    return tensor.column(remat.name(u_BTR, "adapter") * jnp.asarray(adapter.scale, u_BTR.dtype), adapter.b)
