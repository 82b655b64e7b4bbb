"""A matrix that is stored as its transpose, for matmuls that are bound by reading it.

Of few rows, x[B F] w[F D], XLA:CPU reads w faster if its rows in memory are long: a matrix with more rows than columns
is better stored the other way round. A transpose in the program instead would copy w for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["stored_DF"], meta_fields=[])
@dataclass(frozen=True)
class Transposed:
    """w[F D], stored as w^T[D F]: for forwards on one device, by `tensordot`."""

    stored_DF: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of w."""
        return self.stored_DF.shape[::-1]

    @property
    def ndim(self) -> int:
        """Return the number of dims of w."""
        return self.stored_DF.ndim

    def __getitem__(self, _: EllipsisType) -> Transposed:
        """Return w: `nnx.Param` gives its value by `[...]`."""
        return self


def tensordot(x: jax.Array, w_FD: jax.Array | Transposed, contracted: int = 1) -> jax.Array:
    """x[... F], w[F D] -> x w [... D]. contracted: number of dims that F stands for, one if w is `Transposed`."""
    if not isinstance(w_FD, Transposed):
        return jnp.tensordot(x, w_FD, contracted)
    return jnp.tensordot(x, w_FD.stored_DF, (-1, 1))


@jax.jit
def transposed(w_FD: jax.Array) -> Transposed:
    """w[F D] -> w, `Transposed`; a copy"""
    return Transposed(w_FD.T)


@jax.jit
def plain(w_FD: Transposed) -> jax.Array:
    """The inverse of `transposed`; a copy"""
    return w_FD.stored_DF.T


def is_transposed(x: object) -> bool:
    """True if x is `Transposed`: for functions of `jax.tree` that take it as a leaf."""
    return isinstance(x, Transposed)
