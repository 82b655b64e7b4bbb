"""What kernels share: rows of an array in registers, and the types of results.

Arrays have at most MAX_ELEMENTS elements (limits.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:  # JAX deprecates this backend
    triton = None


def on_gpus(kernel: Callable, twin: Callable, *arrays: jax.Array) -> Any:
    """Return kernel(*arrays) on GPUs of CUDA, twin(*arrays), the same in plain JAX, on any other device."""
    return lax.platform_dependent(*arrays, cuda=kernel, default=twin)


def parameters(warps: int, interpret: bool) -> dict:
    """Return arguments of `pallas_call` for programs of so many warps; interpret: for any device, slowly."""
    compiled = {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=2)}
    return {"interpret": True} if interpret else compiled


def like(x: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Return the type of a result that varies over the same mesh axes as x."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def load(ref: jax.Ref, *index: jax.Array, where: jax.Array | None = None, other: float = 0.0) -> jax.Array:
    """Return elements of a whole array, `other` where the mask is false, in the dtype of the array."""
    return triton.load(ref.at[index], mask=where, other=None if where is None else other)


def store(ref: jax.Ref, value: jax.Array, *index: jax.Array, where: jax.Array | None = None) -> None:
    """Write elements of a whole array where the mask is true."""
    triton.store(ref.at[index], value.astype(ref.dtype), mask=where)


def turns(count: int, programs: int | jax.Array) -> jax.Array:
    """Return how many of count rows this program has, if it takes every programs-th."""
    return (count - pl.program_id(0) + programs - 1) // programs
