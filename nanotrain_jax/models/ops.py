"""Norms, activations, rotary positions, biases and head projection: pure functions on global arrays or local shards.

None communicates. Names: B batch, T tokens, D model, F ffn, N heads, H head dim, V vocab. Norms and rotary angles are
computed in float32.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.config.model import RopeScaling
from nanotrain_jax.kernels import gelu as gelus
from nanotrain_jax.kernels import norms, tiles
from nanotrain_jax.kernels.limits import MAX_ELEMENTS
from nanotrain_jax.parallel.collectives import as_varying, varying_axes

# Cheap functions save only their inputs for the backward, as fused kernels do. Otherwise each intermediate of a norm or
# activation would be a residual, those of norms in float32. (Forward and backward are different loops: XLA cannot CSE.)
_saves_inputs = partial(jax.checkpoint, prevent_cse=False)


def added(x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
    """x[B T D] (`stream`) + y[B T D], as matrices: XLA:GPU has the matmul that computes y add x."""
    return (as_matrix(x_BTD) + as_matrix(y_BTD)).reshape(x_BTD.shape)


@jax.custom_vjp
def stream(x_BTD: jax.Array) -> jax.Array:
    """Return x[B T D], for XLA a matrix that both the norm and `added` use: of an x that it alone uses, the matmul
    which adds would first make a copy, to add in place."""
    return lax.optimization_barrier(as_matrix(x_BTD)).reshape(x_BTD.shape)


stream.defvjp(lambda x_BTD: (stream(x_BTD), None), lambda _, g_BTD: (g_BTD,))


def as_matrix(x: jax.Array) -> jax.Array:
    """x[... D] -> x[..., D]"""
    return x.reshape(-1, x.shape[-1])


def normalize(x_BTD: jax.Array, gain_D: jax.Array, bias_D: jax.Array | None, eps: float) -> jax.Array:
    """x[B T D] -> x[B T D] with root mean square 1 over D, times gain; with a bias: centered first. In float32.

    The backward sums over tokens in two dims: of three, XLA:GPU would transpose x and g to sum over the first.
    """
    gain_D, bias_D = as_varying((gain_D, bias_D), sorted(varying_axes(x_BTD)))
    return _rms_norm(x_BTD, gain_D, eps) if bias_D is None else _layer_norm(x_BTD, gain_D, bias_D, eps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x_BTD: jax.Array, gain_D: jax.Array, eps: float) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    return (x * _rms_scale(x, eps) * gain_D.astype(jnp.float32)[None, None]).astype(x_BTD.dtype)


def _rms_scale(x: jax.Array, eps: float) -> jax.Array:
    """x[... D] -> one over its root mean square over D [... 1]."""
    return lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def _rms_norm_backward(eps: float, saved: tuple, g_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTD, gain_D = saved
    x, g = (y_BTD.reshape(-1, len(gain_D)).astype(jnp.float32) for y_BTD in (x_BTD, g_BTD))
    scale = _rms_scale(x, eps)
    x = x * scale
    of_gain, g = (g * x).sum(0).astype(gain_D.dtype), g * gain_D.astype(jnp.float32)[None]
    of_x = scale * (g - x * (g * x).mean(-1, keepdims=True))
    return of_x.astype(x_BTD.dtype).reshape(x_BTD.shape), of_gain


_rms_norm.defvjp(lambda x_BTD, gain_D, eps: (_rms_norm(x_BTD, gain_D, eps), (x_BTD, gain_D)), _rms_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm(x_BTD: jax.Array, gain_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    mean, scale = _statistics(x, eps)
    gain, bias = (w_D.astype(jnp.float32)[None, None] for w_D in (gain_D, bias_D))
    return ((x - mean) * scale * gain + bias).astype(x_BTD.dtype)


def _statistics(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """x[... D] -> its mean over D, and one over its standard deviation [... 1]."""
    mean = x.mean(-1, keepdims=True)
    return mean, lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + eps)


def _layer_norm_backward(eps: float, saved: tuple, g_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_BTD, gain_D, bias_D = saved
    x, g = (y_BTD.reshape(-1, len(gain_D)).astype(jnp.float32) for y_BTD in (x_BTD, g_BTD))
    # Without the barrier XLA fuses the statistics with g x, and writes that product in float32 to sum it for the gain.
    mean, scale = lax.optimization_barrier(_statistics(x, eps))
    x = (x - mean) * scale
    of_gain, of_bias = (g * x).sum(0).astype(gain_D.dtype), g.sum(0).astype(bias_D.dtype)
    g_gain = g * gain_D.astype(jnp.float32)[None]
    of_x = g_gain - x * (g_gain * x).mean(-1, keepdims=True) - g_gain.mean(-1, keepdims=True)
    return (scale * of_x).astype(x_BTD.dtype).reshape(x_BTD.shape), of_gain, of_bias


_layer_norm.defvjp(
    lambda x_BTD, gain_D, bias_D, eps: (_layer_norm(x_BTD, gain_D, bias_D, eps), (x_BTD, gain_D, bias_D)),
    _layer_norm_backward,
)


Weights = tuple[jax.Array, jax.Array | None]  # gain[D] of a norm, and bias[D] or None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _beside(x_BTD: jax.Array, weights: Weights, added_D: jax.Array | None, eps: float) -> tuple[jax.Array, jax.Array]:
    return x_BTD, normalize(x_BTD, *weights, eps)


def normalize_beside(
    x_BTD: jax.Array, weights: Weights, added_D: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array]:
    """x[B T D] -> x, normalize(x). On GPUs one kernel makes the gradient of x of those of both (`kernels/norms.py`).

    added[D]: a bias that `add_constant` added to x; its gradient is the sum of that of x. None: there is none.
    """
    return _beside(x_BTD, *as_varying((weights, added_D), sorted(varying_axes(x_BTD))), eps)


def _beside_backward(eps: float, saved: tuple, grads: tuple[jax.Array, jax.Array]) -> tuple:
    x_BTD, (gain_D, bias_D), added_D = saved

    def by_xla(x_BTD: jax.Array, gain_D: jax.Array, residual_BTD: jax.Array, g_BTD: jax.Array) -> tuple:
        if bias_D is None:
            of_x, of_gain, of_bias = *_rms_norm_backward(eps, (x_BTD, gain_D), g_BTD), None
        else:
            of_x, of_gain, of_bias = _layer_norm_backward(eps, (x_BTD, gain_D, bias_D), g_BTD)
        of_x = residual_BTD + of_x
        return of_x, (of_gain, of_bias), None if added_D is None else _sum_over_tokens(of_x, added_D)

    def by_kernel(x_BTD: jax.Array, gain_D: jax.Array, residual_BTD: jax.Array, g_BTD: jax.Array) -> tuple:
        x, residual, g = (as_matrix(y_BTD) for y_BTD in (x_BTD, residual_BTD, g_BTD))
        norm = norms.Norm(eps, centered=bias_D is not None, sums_x=added_D is not None)
        of_x, *sums = norms.backward(x, gain_D, g, residual, norm)
        like = gain_D, bias_D, added_D
        of_gain, of_bias, of_added = (
            None if w is None else total.astype(w.dtype) for total, w in zip(sums, like, strict=True)
        )
        return of_x.reshape(x_BTD.shape), (of_gain, of_bias), of_added

    if x_BTD.size > MAX_ELEMENTS:
        return by_xla(x_BTD, gain_D, *grads)
    return tiles.on_gpus(by_kernel, by_xla, x_BTD, gain_D, *grads)


_beside.defvjp(
    lambda x_BTD, weights, added_D, eps: (_beside(x_BTD, weights, added_D, eps), (x_BTD, weights, added_D)),
    _beside_backward,
)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # arXiv 1606.08415
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),  # of GPT-2
}


@partial(_saves_inputs, static_argnums=2)
def gated(gate_BTF: jax.Array, up_BTF: jax.Array, activation: str) -> jax.Array:
    """gate[B T F], up[B T F] -> h[B T F] = activation(gate) up"""
    return ACTIVATIONS[activation](gate_BTF) * up_BTF


def activated(x_BTF: jax.Array, activation: str) -> jax.Array:
    """x[B T F] -> h[B T F]"""
    return gelu(x_BTF) if activation == "gelu_tanh" else _activated(x_BTF, activation)


@partial(_saves_inputs, static_argnums=1)
def _activated(x_BTF: jax.Array, activation: str) -> jax.Array:
    return ACTIVATIONS[activation](x_BTF)


@jax.custom_vjp
def gelu(x_BTF: jax.Array) -> jax.Array:
    """x[B T F] -> h[B T F], the tanh form: XLA:GPU has the matmul that computes x compute it too, in float32."""
    return ACTIVATIONS["gelu_tanh"](x_BTF)


def _gelu_backward(x_BTF: jax.Array, g_BTF: jax.Array) -> tuple[jax.Array]:
    x_BTF = lax.optimization_barrier(x_BTF)  # else, outside of loops, XLA would store tanh in the forward
    x, g = x_BTF.astype(jnp.float32), g_BTF.astype(jnp.float32)
    scale, cubic = (2 / jnp.pi) ** 0.5, 0.044715
    tanh = jnp.tanh(scale * (x + cubic * x * x * x))
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * cubic * x * x)
    # Else XLA would sum the gradient of the bias in the same kernel, and write a float32 copy for it.
    return (lax.optimization_barrier((g * slope).astype(x_BTF.dtype)),)


gelu.defvjp(lambda x_BTF: (gelu(x_BTF), x_BTF), _gelu_backward)


def gelu_of_sum(x_BTF: jax.Array, added_F: jax.Array) -> jax.Array:
    """x[B T F], a bias that `add_constant` added to it, added[F] -> gelu(x). On GPUs one kernel makes the gradients of
    both (`kernels/gelu.py`)."""
    return _gelu_of_sum(x_BTF, as_varying(added_F, sorted(varying_axes(x_BTF))))


@jax.custom_vjp
def _gelu_of_sum(x_BTF: jax.Array, added_F: jax.Array) -> jax.Array:
    return gelu(x_BTF)


def _gelu_of_sum_backward(saved: tuple[jax.Array, jax.Array], g_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTF, added_F = saved

    def by_xla(x_BTF: jax.Array, g_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
        (of_x_BTF,) = _gelu_backward(x_BTF, g_BTF)
        return of_x_BTF, _sum_over_tokens(of_x_BTF, added_F)

    def by_kernel(x_BTF: jax.Array, g_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_x, of_bias = gelus.backward(as_matrix(x_BTF), as_matrix(g_BTF))
        return of_x.reshape(x_BTF.shape), of_bias.astype(added_F.dtype)

    if x_BTF.size > MAX_ELEMENTS:
        return by_xla(x_BTF, g_BTF)
    return tiles.on_gpus(by_kernel, by_xla, x_BTF, g_BTF)


_gelu_of_sum.defvjp(lambda x_BTF, added_F: (gelu(x_BTF), (x_BTF, added_F)), _gelu_of_sum_backward)


def add(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x[... F], bias[F] -> x[... F]. The gradient of the bias is summed in float32.

    In the dtype of x, for which XLA:GPU has the matmul that computes x add the bias to its float32 sums.
    """
    return _add(*as_varying((x, bias), sorted(varying_axes(x) | varying_axes(bias))))


@jax.custom_vjp
def _add(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + jnp.expand_dims(bias.astype(x.dtype), range(x.ndim - bias.ndim))


def _sum_over_tokens(g: jax.Array, bias: jax.Array) -> jax.Array:
    """Gradient g[... F] of x + bias[F] -> the gradient of the bias, summed in float32."""
    return g.reshape(-1, bias.size).astype(jnp.float32).sum(0).reshape(bias.shape).astype(bias.dtype)


_add.defvjp(lambda x, bias: (_add(x, bias), bias), lambda bias, g: (g, _sum_over_tokens(g, bias)))


def add_constant(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x[... F], bias[F] -> x[... F], without a gradient of the bias: the function that uses the sum gives it."""
    return add(x, lax.stop_gradient(bias))


@jax.custom_vjp
def project(x_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """x[B T D], head[V D] -> logits[B T V] in float32; the matmuls of its backward run in the dtype of x and head."""
    return jnp.einsum("BTD,VD->BTV", x_BTD, head_VD, preferred_element_type=jnp.float32)


def _project_backward(saved: tuple[jax.Array, jax.Array], g_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTD, head_VD = saved
    g_BTV = g_BTV.astype(x_BTD.dtype)
    return jnp.einsum("BTV,VD->BTD", g_BTV, head_VD), jnp.einsum("BTV,BTD->VD", g_BTV, x_BTD)


project.defvjp(lambda x_BTD, head_VD: (project(x_BTD, head_VD), (x_BTD, head_VD)), _project_backward)


class Rope(NamedTuple):
    """Frequencies of rotary positions: theta^(-2 h / H), of a pair h; with a scaling some are divided by its factor."""

    theta: float
    scaling: RopeScaling | None = None

    def frequencies(self, H: int) -> jax.Array:
        """Return the frequencies [H/2], float32. A scaling keeps a share of each, and divides the rest by its factor:

        linear   none (arXiv 2306.15595)
        llama3   by the turns in the original length: all from high_freq_factor on, none to low_freq_factor (Llama 3.1)
        yarn     by the pair: all to the one that turns beta_fast times, none from that which turns beta_slow times
                 (arXiv 2309.00071, section 3.2; from whole pair to whole pair, as in its code)
        """
        frequency_h, s = self.theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H), self.scaling
        if s is None:
            return frequency_h
        if s.type == "linear":
            return frequency_h / s.factor
        if s.type == "llama3":
            turns_h = frequency_h * (s.original_max_seq_len / (2 * math.pi))
            kept_h = (turns_h - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        else:
            first, last = (self.pair(turns, H) for turns in (s.beta_fast, s.beta_slow))
            first, last = max(math.floor(first), 0), min(math.ceil(last), H - 1)
            kept_h = 1 - (jnp.arange(H // 2, dtype=jnp.float32) - first) / max(last - first, 0.001)
        kept_h = jnp.clip(kept_h, 0.0, 1.0)
        return frequency_h * (kept_h + (1 - kept_h) / s.factor)

    def pair(self, turns: float, H: int) -> float:
        """Return which pair turns so often in the original length."""
        return H * math.log(self.scaling.original_max_seq_len / (2 * math.pi * turns)) / (2 * math.log(self.theta))

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by (yarn, section 3.4)."""
        s = self.scaling
        return (s.attention_factor or 0.1 * math.log(s.factor) + 1) if s and s.type == "yarn" else 1.0


@jax.named_scope("rotary")
def rotate(x_BTNH: jax.Array, rope: Rope, positions: jax.Array | None = None) -> jax.Array:
    """x[B T N H] -> x[B T N H]: rotary positions (arXiv 2104.09864) in float32; dims h and h + H/2 form a pair.

    positions: of the tokens, int32 [T] or [B T]; None: 0 to T-1.
    """
    T = x_BTNH.shape[1]
    positions = jnp.arange(T) if positions is None else positions
    positions_BT = positions.reshape(-1, T)  # one row for all, or a row for each
    return _rotate(x_BTNH, as_varying(positions_BT, sorted(varying_axes(x_BTNH))), rope)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rotate(x_BTNH: jax.Array, positions_BT: jax.Array, rope: Rope) -> jax.Array:
    return _turned(x_BTNH, positions_BT, rope, 1)


def _turned(x_BTNH: jax.Array, positions_BT: jax.Array, rope: Rope, direction: int) -> jax.Array:
    """Rotate forward, direction 1, or back, -1: what a rotation does to gradients."""
    frequency_h = rope.frequencies(x_BTNH.shape[3])
    angle_BTh = positions_BT.astype(jnp.float32)[..., None] * frequency_h[None, None]
    cos, sin = jnp.cos(angle_BTh)[:, :, None], direction * jnp.sin(angle_BTh)[:, :, None]
    if rope.magnitude != 1.0:
        cos, sin = cos * rope.magnitude, sin * rope.magnitude
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


_rotate.defvjp(
    lambda x_BTNH, positions_BT, rope: (_rotate(x_BTNH, positions_BT, rope), positions_BT),
    lambda rope, positions_BT, g_BTNH: (_turned(g_BTNH, positions_BT, rope, -1), None),
)
