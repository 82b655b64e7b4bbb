"""A layer of the decoder: norms, attention, MLP (Flax NNX modules). Names and layouts: models/decoder.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from nanotrain_jax.config.families import Family
from nanotrain_jax.config.model import Lora
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import decoder_table, lora
from nanotrain_jax.models.experts import Experts
from nanotrain_jax.models.modules import Split, fill
from nanotrain_jax.models.ops import (
    Rope,
    activated,
    add,
    add_constant,
    added,
    gated,
    gelu_of_sum,
    normalize,
    normalize_beside,
    rotate,
    stream,
)
from nanotrain_jax.models.parameters import under
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.collectives import position
from nanotrain_jax.parallel.context import context
from nanotrain_jax.parallel.tensor import tensor


def _gain(gain: jax.Array, features: Family) -> jax.Array:
    """What a norm multiplies with."""
    return 1.0 + gain.astype(jnp.float32) if features.gains_from_one else gain


def adapters_of(module: nnx.Module, config: Lora | None) -> dict[str, lora.Adapter]:
    """Return the adapters of a module's matrices by name: those that it has."""
    arrays = {name.rpartition("_")[0]: x[...] for name, x in vars(module).items() if lora.ADAPTER.match(name)}
    targets = config.targets if config else ()
    return {x: lora.Adapter(arrays[f"{x}_A"], arrays[f"{x}_B"], config.scale) for x in targets if f"{x}_A" in arrays}


class Norm(nnx.Module):
    """x[B T D] -> x[B T D], normalized over D in float32: RMSNorm (arXiv 1910.07467), LayerNorm (arXiv 1607.06450)."""

    def __init__(self, config: Model, path: str):
        self.eps, self.features = config.norm_eps, config.features
        fill(self, under(decoder_table.table(config), path))

    @jax.named_scope("norm")
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return normalize(x_BTD, *self.weights(), self.eps)

    @jax.named_scope("norm")
    def beside(self, x_BTD: jax.Array, bias_D: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """x[B T D] -> x, for the residual stream, and x normalized; on GPUs the backward of both is one kernel.

        bias[D]: that `add_constant` added to x.
        """
        return normalize_beside(x_BTD, self.weights(), bias_D, self.eps)

    def weights(self) -> tuple[jax.Array, jax.Array | None]:
        """Return gain[D], bias[D] or None."""
        bias_D = self.bias_D[...] if self.features.centered_norms else None
        return _gain(self.gain_D[...], self.features), bias_D


class Attention(nnx.Module):
    """x[B T D] -> y[B T D]: causal grouped-query attention; N / K query heads share each key and value head.

    sequences: B, as x may have all sequences concatenated. starts[B T]: in the row, of the document of each token, for
    attention within documents; of whole rows in natural order, also if devices along context share them.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.features, self.split, self.num_kv_heads = config.features, split, config.num_kv_heads
        self.rope, self.eps = Rope(config.rope_theta, config.rope_scaling), config.norm_eps
        self.kernel, self.window, self.lora = config.attention, config.sliding_window, config.lora
        self.leaves_bias = split.kernels and config.features.biases and not config.features.norms_after
        fill(self, under(decoder_table.table(config, split.size), decoder_table.ATTENTION), rngs)

    @jax.named_scope("attention")
    def __call__(self, x_BTD: jax.Array, sequences: int, starts_BT: jax.Array | None = None) -> jax.Array:
        q_BTNH, k_BSKH, v_BSKH = self.project(x_BTD, sequences)
        if not self.features.learned_positions:
            positions = self.split.positions(q_BTNH.shape[1], starts_BT)
            q_BTNH, k_BSKH = (self.rotated(x, positions) for x in (q_BTNH, k_BSKH))
        if not self.features.qk_norm:
            q_BTNH, k_BSKH = remat.name(q_BTNH, "q"), remat.name(k_BSKH, "k")
        y_BTNH = self.attend(q_BTNH, k_BSKH, remat.name(v_BSKH, "v"), starts_BT)
        return self.output(y_BTNH, len(x_BTD))

    def project(self, x_BTD: jax.Array, sequences: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x[B T D] -> queries q[B T N H], keys k[B T K H] and values v[B T K H], before rotary positions."""
        axis, sequence_parallel, options = self.split.axis, self.split.sequence_parallel, self.split.matmuls
        weights = {"q": self.q_DNH[...], "k": self.own_head(self.k_DKH[...]), "v": self.own_head(self.v_DKH[...])}
        adapters = adapters_of(self, self.lora)
        for name in adapters.keys() & {"k", "v"}:
            adapters[name] = adapters[name]._replace(b=self.own_head(adapters[name].b))
        heads = [w.shape[1:] for w in weights.values()]
        if self.features.qkv_bias and self.split.flat:
            weights = {name: w.reshape(len(w), -1) for name, w in weights.items()}
            adapters = {name: x._replace(b=x.b.reshape(len(x.b), -1)) for name, x in adapters.items()}
        qkv = lora.columns(x_BTD, weights, adapters, axis, sequence_parallel, options)
        if self.features.qkv_bias:
            biases = self.bias_q_NH[...], self.own_head(self.bias_k_KH[...]), self.own_head(self.bias_v_KH[...])
            qkv = [add(x, bias.reshape(x.shape[2:])) for x, bias in zip(qkv, biases, strict=True)]
        q_BTNH, k_BSKH, v_BSKH = (x.reshape(sequences, -1, *NH) for x, NH in zip(qkv, heads, strict=True))
        if self.features.qk_norm:  # whose backward needs its inputs
            q_BTNH = self.normalized(remat.name(q_BTNH, "q"), self.gain_q_H[...])
            k_BSKH = self.normalized(remat.name(k_BSKH, "k"), self.gain_k_H[...])
        return q_BTNH, k_BSKH, v_BSKH

    def output(self, y_BTNH: jax.Array, rows: int) -> jax.Array:
        """What heads attend to, y[B T N H] -> y[B T D]. rows: B of the result."""
        axis, sequence_parallel, options = self.split.axis, self.split.sequence_parallel, self.split.matmuls
        y_BTD = tensor.row(y_BTNH, self.out_NHD[...], axis, sequence_parallel, options, rows)
        if adapter := adapters_of(self, self.lora).get("out"):
            y_BTD += lora.row(y_BTNH, adapter, axis, sequence_parallel, rows)
        if self.features.norms_after:  # whose backward needs its input
            y_BTD = remat.name(y_BTD, "attention_out")
        add_bias = add_constant if self.leaves_bias else add
        return add_bias(y_BTD, self.bias_out_D[...]) if self.features.biases else y_BTD

    def left_bias(self) -> jax.Array | None:
        """Return the bias of the output, if its gradient is left to the norm after it."""
        return self.bias_out_D[...] if self.leaves_bias else None

    def rotated(self, x_BTNH: jax.Array, positions: jax.Array | None) -> jax.Array:
        """x[B T N H] -> x[B T N H], rotated by the frequencies of this layer."""
        x = rotate(x_BTNH, self.rope, positions)
        if not (self.features.has_local_layers and self.features.rope_local_theta):
            return x
        local = rotate(x_BTNH, Rope(self.features.rope_local_theta), positions)
        return jax.lax.select(self.is_local_1[0] > 0, local, x)  # saves a scalar for the backward, not a mask

    @jax.named_scope("norm")
    def normalized(self, x_BTNH: jax.Array, gain_H: jax.Array) -> jax.Array:
        """x[B T N H] -> x[B T N H]: RMSNorm of each head (arXiv 2010.04245; Qwen3, arXiv 2505.09388, section 2)."""
        B, _, _, H = x_BTNH.shape
        return normalize(x_BTNH.reshape(B, -1, H), _gain(gain_H, self.features), None, self.eps).reshape(x_BTNH.shape)

    @jax.named_scope("kernel")
    def attend(self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, starts_BT: jax.Array | None) -> jax.Array:
        """q[B T N H], k[B T K H], v[B T K H] -> y[B T N H]; over context, if the tokens are split."""
        shape = len(q_BTNH), q_BTNH.shape[1] * (jax.lax.axis_size("context") if self.split.context else 1)
        window = self.window if self.window and self.window < shape[1] else None
        if window and (self.split.context or starts_BT is not None or self.features.has_local_layers):
            starts_BT = self.first_seen(window, shape, starts_BT)
        if self.split.context:
            attention = context.ATTENTION[self.split.context]
            return attention(q_BTNH, k_BSKH, v_BSKH, "context", self.kernel, starts_BT)
        if starts_BT is not None:
            kernel = "xla" if self.kernel == "auto" else self.kernel
            return context.one_device(q_BTNH, k_BSKH, v_BSKH, kernel, starts_BT)
        qkv = q_BTNH, k_BSKH, v_BSKH
        if self.kernel == "xla" and q_BTNH.dtype == jnp.float16:  # XLA:CPU lacks the float16 matmul that JAX asks for
            qkv = [x.astype(jnp.float32) for x in qkv]
        kernel = None if self.kernel == "auto" else self.kernel
        reach = (window - 1, 0) if window else None
        attention = partial(jax.nn.dot_product_attention, is_causal=True, local_window_size=reach)
        return attention(*qkv, implementation=kernel).astype(q_BTNH.dtype)

    def first_seen(self, window: int, shape: tuple[int, int], starts_BT: jax.Array | None) -> jax.Array:
        """Return starts[B T] of whole rows, with the window if this layer has one."""
        with_window_BT = context.starts_of_window(window, shape, starts_BT)
        if not self.features.has_local_layers:
            return with_window_BT
        without_BT = jnp.zeros_like(with_window_BT) if starts_BT is None else starts_BT
        return jnp.where(self.is_local_1[...] > 0, with_window_BT, without_BT)

    def reach(self) -> jax.Array | int | None:
        """How many tokens a token attends to at most; None: all before it."""
        if self.window is None or not self.features.has_local_layers:
            return self.window
        return jnp.where(self.is_local_1[0] > 0, self.window, jnp.iinfo(jnp.int32).max)

    def own_head(self, w_KH: jax.Array) -> jax.Array:
        """w[... K H] -> w[... 1 H]: the head of this device's queries, if there are fewer heads than devices."""
        if self.split.size <= self.num_kv_heads:
            return w_KH
        head = position(self.split.axis) // (self.split.size // self.num_kv_heads)
        return jax.lax.dynamic_slice_in_dim(w_KH, head, 1, w_KH.ndim - 2)


class MLP(nnx.Module):
    """x[B T D] -> y[B T D], None: an activation, or a gated one (arXiv 2002.05202)."""

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.features, self.split, self.lora = config.features, split, config.lora
        is_gelu = config.features.activation == "gelu_tanh" and not config.features.gated_mlp
        self.leaves_bias = split.kernels and config.features.biases and is_gelu
        fill(self, under(decoder_table.table(config, split.size), decoder_table.MLP), rngs)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, None]:
        axis, sequence_parallel, options = self.split.axis, self.split.sequence_parallel, self.split.matmuls
        weights = {"up": self.up_DF[...]} | ({"gate": self.gate_DF[...]} if self.features.gated_mlp else {})
        adapters = adapters_of(self, self.lora)
        up_BTF, *gates = lora.columns(x_BTD, weights, adapters, axis, sequence_parallel, options)
        gates = [remat.name(gate_BTF, "gate") for gate_BTF in gates]
        h_BTF = self.hidden(up_BTF, gates)
        y_BTD = tensor.row(h_BTF, self.down_FD[...], axis, sequence_parallel, options)
        if "down" in adapters:
            y_BTD += lora.row(h_BTF, adapters["down"], axis, sequence_parallel)
        if self.features.norms_after:  # whose backward needs its input
            y_BTD = remat.name(y_BTD, "mlp_out")
        return (add(y_BTD, self.bias_down_D[...]) if self.features.biases else y_BTD), None

    def hidden(self, up_BTF: jax.Array, gates: Sequence[jax.Array]) -> jax.Array:
        """up[B T F], gate[B T F] if there is one -> h[B T F]"""
        if self.leaves_bias:
            bias_F = self.bias_up_F[...]
            return gelu_of_sum(remat.name(add_constant(up_BTF, bias_F), "up"), bias_F)
        up_BTF = remat.name(up_BTF, "up")
        if self.features.biases:
            up_BTF = add(up_BTF, self.bias_up_F[...])
        kind = self.features.activation
        return gated(*gates, up_BTF, kind) if gates else activated(up_BTF, kind)


class Layer(nnx.Module):
    """x[B T D] -> x[B T D]: attention and MLP, each added to the residual stream; norms before, or before and after."""

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.by_kernels = split.kernels
        self.norm_attention = Norm(config, decoder_table.NORM_ATTENTION)
        self.attention = Attention(config, rngs, split)
        self.norm_mlp = Norm(config, decoder_table.NORM_MLP)
        self.mlp = Experts(config, rngs, split) if config.experts else MLP(config, rngs, split)
        self.norms_after = config.features.norms_after
        if self.norms_after:
            self.norm_attention_out = Norm(config, decoder_table.NORM_ATTENTION_OUT)
            self.norm_mlp_out = Norm(config, decoder_table.NORM_MLP_OUT)

    def __call__(
        self, x_BTD: jax.Array, sequences: int, starts_BT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        x_BTD, normalized_BTD = self.beside(self.norm_attention, x_BTD)
        return self.after_attention(x_BTD, self.attention(normalized_BTD, sequences, starts_BT))

    def after_attention(self, x_BTD: jax.Array, y_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """x[B T D], what attention returns y[B T D] -> x[B T D], the output of the layer; what `balance.row` returns of
        its router, None without experts."""
        if self.norms_after:
            x_BTD = added(x_BTD, self.norm_attention_out(y_BTD))
        else:  # the sum: without it, the backward would add again, in each kernel of the next norm
            x_BTD = remat.name(added(x_BTD, y_BTD), "attention_out")
        x_BTD, normalized_BTD = self.beside(self.norm_mlp, x_BTD, self.attention.left_bias())
        y_BTD, of_router = self.mlp(normalized_BTD)
        return added(x_BTD, self.norm_mlp_out(y_BTD) if self.norms_after else y_BTD), of_router

    def beside(self, norm: Norm, x_BTD: jax.Array, bias_D: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """x[B T D] -> x, for the residual stream, and x normalized. bias: as of `Norm.beside`."""
        x_BTD = stream(x_BTD)
        return norm.beside(x_BTD, bias_D) if self.by_kernels else (x_BTD, norm(x_BTD))


def stacked(
    config: Model, rngs: nnx.Rngs, split: Split, layers: range, order: Sequence[int] | jax.Array | None = None
) -> Layer:
    """Return layers of these numbers, stacked. order: as of `Decoder`, counted from the first of them."""

    @nnx.split_rngs(splits=len(layers))
    def stack(rngs: nnx.Rngs) -> Layer:
        if order is not None:
            rngs = jax.tree.map(lambda keys: keys[jnp.asarray(order)], rngs)
        return nnx.vmap(lambda rngs: Layer(config, rngs, split), in_axes=0, out_axes=0)(rngs)

    made = stack(rngs)
    if config.features.has_local_layers:
        made.attention.is_local_1 = nnx.Param(is_local(config, layers, order))
    return made


def is_local(config: Model, layers: range, order: Sequence[int] | jax.Array | None) -> jax.Array | None:
    """Return for each row of the stacked weights 1 if its layer has a window, else 0, [L 1]; None: layers are alike."""
    if not config.features.has_local_layers:
        return None
    flags_L = jnp.asarray([float(config.features.is_local(layer)) for layer in layers])
    return (flags_L if order is None else flags_L[jnp.asarray(order)])[:, None]
