"""A matrix that is stored as its transpose, for matmuls that are bound by reading it.

Of few rows, x[B I] w[I O], XLA:CPU reads w once, at the speed of memory, if it computes w^T[O I] x^T[I B]. Of x w it
copies w into packed blocks first, and of one row whose result other operations use it makes plain loops. A transpose in
the program would copy w for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from types import EllipsisType

import jax
import jax.numpy as jnp
from jax import lax

FEW = 64  # rows, at most


@partial(jax.tree_util.register_dataclass, data_fields=["stored_OI"], meta_fields=["inputs"])
@dataclass(frozen=True)
class Transposed:
    """w[I O], stored as w^T[O I], where I stands for its first `inputs` dims: for forwards on one device, by
    `tensordot`."""

    stored_OI: jax.Array
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of w."""
        shape = self.stored_OI.shape
        return shape[-self.inputs :] + shape[: -self.inputs]

    @property
    def ndim(self) -> int:
        """Return the number of dims of w."""
        return self.stored_OI.ndim

    def __getitem__(self, _: EllipsisType) -> Transposed:
        """Return w: `nnx.Param` gives its value by `[...]`."""
        return self


def tensordot(x: jax.Array, w: jax.Array | Transposed, contracted: int = 1) -> jax.Array:
    """x[... I], w[I O] -> x w [... O]. contracted: number of dims that I stands for, as of w if it is `Transposed`."""
    if not isinstance(w, Transposed):
        return jnp.tensordot(x, w, contracted)
    y_RO = multiplied(x.reshape(-1, prod(w.shape[:contracted])), w.stored_OI.reshape(prod(w.shape[contracted:]), -1))
    return y_RO.reshape(*x.shape[: x.ndim - contracted], *w.shape[contracted:])


def multiplied(x_RI: jax.Array, w_OI: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """x[R I], w[O I] -> x w^T [R O], of that dtype; of few rows as the transpose of w x^T."""
    if len(x_RI) > FEW:
        return jnp.matmul(x_RI, w_OI.T, preferred_element_type=dtype)
    return alone(jnp.matmul(w_OI, alone(x_RI.T), preferred_element_type=dtype)).T


def alone(x: jax.Array) -> jax.Array:
    """x, an operand or the result of a matmul. XLA:CPU then does not exchange the operands, nor fuse the matmul with
    what is beside it."""
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def transposed(w: jax.Array, inputs: int) -> Transposed:
    """w[I O], I its first `inputs` dims -> w, `Transposed`"""
    return Transposed(jnp.moveaxis(w, range(inputs), range(-inputs, 0)), inputs)


@jax.jit
def plain(w: Transposed) -> jax.Array:
    """The inverse of `transposed`; a copy"""
    return jnp.moveaxis(w.stored_OI, range(-w.inputs, 0), range(w.inputs))


def is_transposed(x: object) -> bool:
    """True if x is `Transposed`: for functions of `jax.tree` that take it as a leaf."""
    return isinstance(x, Transposed)
