"""Matmuls in 8-bit floating point (FP8 Formats for Deep Learning, arXiv 2209.05433), or in the dtype of their operands.

A matmul of the forward takes e4m3 operands, those of the backward an e5m2 gradient and an e4m3 operand:

    y = x w             x e4m3, w e4m3
    dx = g w^T          g e5m2, w e4m3
    dw = x^T g          x e4m3, g e5m2

Current scaling: each tensor is divided by one power of two, so that its largest value on this device is representable;
multiplying by a power of two is exact. Results are in the dtype of the operands, sums in float32. XLA:GPU compiles the
multiplications by the scales into the matmul, which then runs on FP8 tensor cores (Hopper and later); on other devices
the same numbers are computed from operands that are converted back. Dims must be multiples of 16.

`PLAIN`, `WIDE` and `FLOAT8` have one interface, so that a matmul is written once (`tensor.columns`). Nothing here
communicates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import as_varying, varying_axes
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.transposed import Transposed, is_transposed, tensordot

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SMALLEST = 1e-30  # a tensor with smaller values alone is rounded to zeros
Axes = int | tuple[tuple[int, ...], tuple[int, ...]]  # as of jnp.tensordot


class Scaled(NamedTuple):
    """An 8-bit tensor: value * scale."""

    value: jax.Array
    scale: jax.Array  # a power of two, in the dtype of the tensor that was quantized


class Matmul(NamedTuple):
    """How to multiply.

    operand(x) -> an operand; gradient(g) -> the gradient of a result as an operand
    contract(a, b, axes, exact) -> tensordot of two operands. exact: accumulate in float32, as backwards do
    batched(equation, a, b, exact) -> einsum of two operands that have a batch dim
    wide: gradients of weights leave the matmul in float32. Where float32 follows, as in a reduction over devices, XLA
    then never rounds them, and saves a pass.
    """

    operand: Callable[[jax.Array], Any]
    gradient: Callable[[jax.Array], Any]
    contract: Callable[[Any, Any, Axes, bool], jax.Array]
    batched: Callable[[str, Any, Any, bool], jax.Array]
    wide: bool = False


def quantize(x: jax.Array, dtype: jnp.dtype) -> Scaled:
    """Divide x by a power of two with which its largest value fits an 8-bit dtype and uses its range, and round."""
    largest = float(jnp.finfo(dtype).max)
    top = jnp.maximum(jnp.abs(x).max().astype(jnp.float32), SMALLEST)
    _, exponent = jnp.frexp(top / largest)
    scale = jnp.ldexp(jnp.ones(()), exponent)  # exp2 rounds
    value = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(dtype)
    return Scaled(value, scale.astype(x.dtype))


def dequantize(x: Scaled) -> jax.Array:
    """Return the tensor in the dtype from which it was quantized."""
    return x.value.astype(x.scale.dtype) * x.scale


def _tensordot(a: jax.Array, b: jax.Array, axes: Axes, exact: bool = False) -> jax.Array:
    return jnp.tensordot(a, b, axes)


def _einsum(equation: str, a: jax.Array, b: jax.Array, exact: bool = False) -> jax.Array:
    return jnp.einsum(equation, a, b)


def _scaled_tensordot(a: Scaled, b: Scaled, axes: Axes, exact: bool = False) -> jax.Array:
    return _of_scaled(partial(jnp.tensordot, axes=axes), a, b, exact)


def _scaled_einsum(equation: str, a: Scaled, b: Scaled, exact: bool = False) -> jax.Array:
    return _of_scaled(partial(jnp.einsum, equation), a, b, exact)


def _of_scaled(multiply: Callable, a: Scaled, b: Scaled, exact: bool) -> jax.Array:
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    dtype = a.scale.dtype
    a, b = lax.optimization_barrier((a, b))  # else XLA may convert weights back once, outside a loop over rows
    return multiply(dequantize(a), dequantize(b), precision=precision, preferred_element_type=dtype)


PLAIN = Matmul(lambda x: x, lambda g: g, _tensordot, _einsum)
WIDE = PLAIN._replace(wide=True)
FLOAT8 = Matmul(partial(quantize, dtype=E4M3), partial(quantize, dtype=E5M2), _scaled_tensordot, _scaled_einsum)


def multiply(matmul: Matmul, x: jax.Array, w: jax.Array | Transposed, contracted: int = 1) -> jax.Array:
    """x[... K], w[K ...] -> x w, differentiable. contracted: number of dims that K stands for.

    FLOAT8 stores x in 8 bits for the backward, and w as it is: stacked weights are not stored again. PLAIN alone takes
    w `Transposed`.
    """
    if is_transposed(w):
        return tensordot(x, w, contracted)
    axes = sorted(varying_axes(x) | varying_axes(w))
    run = with_backward(_forward, _backward, (0, 1))
    return run(matmul, contracted, as_varying(x, axes), as_varying(w, axes))


def _forward(matmul: Matmul, contracted: int, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
    operand = matmul.operand(x)
    return matmul.contract(operand, matmul.operand(w), contracted, False), (operand, w)


def _backward(matmul: Matmul, contracted: int, residuals: tuple, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    g = matmul.gradient(g)
    return input_gradient(matmul, g, w, contracted), weight_gradient(matmul, x, g, w, contracted)


def input_gradient(matmul: Matmul, g: Any, w: jax.Array, contracted: int = 1) -> jax.Array:
    """g[... F] (an operand), w[K F] -> g w^T [... K]. contracted: number of dims that K stands for."""
    of_weight = tuple(range(contracted, w.ndim))
    of_gradient = tuple(range(-len(of_weight), 0))
    return matmul.contract(g, matmul.operand(w), (of_gradient, of_weight), True)


def weight_gradient(matmul: Matmul, x: Any, g: Any, w: jax.Array, contracted: int = 1) -> jax.Array:
    """x[... K], g[... F] (operands) -> x^T g [K F], in the dtype of w. contracted: number of dims that K stands for."""
    rows = tuple(range(len(jax.tree.leaves(x)[0].shape) - contracted))
    if matmul.wide:
        return jnp.tensordot(x, g, (rows, rows), preferred_element_type=jnp.float32).astype(w.dtype)
    return matmul.contract(x, g, (rows, rows), True).astype(w.dtype)
