"""The decoder (Flax NNX): two families from one set of parts, stacked layers run by `lax.scan`.

    llama  RMSNorm, rotary positions, SwiGLU, grouped-query attention       Touvron et al. 2023, arXiv 2302.13971
    gpt2   LayerNorm, learned positions, GELU, biases, tied embeddings      Radford et al. 2019

Names: B batch, T tokens, S key tokens, D model, F ffn, N query heads, K kv heads, H head dim, V vocab, L layers.
Weights under `layers` carry one more, leading dim L in storage; inside the scan each layer sees its own.

Matmuls run in the dtype of the weights they are given; norms, softmax, rotary angles and loss in float32.
Initialisation (GPT-2 and its successors): normal, std 0.02; the two projections that write to the residual stream
0.02 / sqrt(2 L), so that its variance does not grow with depth; gains one, biases zero.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from nanotrain_jax.config import Model
from nanotrain_jax.parallel import remat, tensor
from nanotrain_jax.parallel.collectives import as_varying, varying_axes

STD = 0.02


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float = STD) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class Norm(nnx.Module):
    """x[B T D] -> x[B T D], normalised over D in float32: RMSNorm (arXiv 1910.07467), LayerNorm (arXiv 1607.06450)."""

    def __init__(self, config: Model):
        self.eps, self.center = config.norm_eps, config.family == "gpt2"
        self.gain_D = nnx.Param(jnp.ones(config.d_model))
        if self.center:
            self.bias_D = nnx.Param(jnp.zeros(config.d_model))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        bias_D = self.bias_D[...] if self.center else None
        return normalize(x_BTD, self.gain_D[...], bias_D, self.eps)


class Attention(nnx.Module):
    """x[B T D] -> y[B T D]: causal attention with N query heads, each group of N / K sharing one key and value head."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        D, N, K = config.d_model, config.num_heads, config.num_kv_heads
        H = D // N
        self.family, self.theta, self.kernel = config.family, config.rope_theta, config.attention
        self.q_DNH, self.k_DKH, self.v_DKH = (_normal(rngs, (D, heads, H)) for heads in (N, K, K))
        self.out_NHD = _normal(rngs, (N, H, D), STD / math.sqrt(2 * config.num_layers))
        if config.family == "gpt2":
            self.bias_q_NH, self.bias_k_KH, self.bias_v_KH = (nnx.Param(jnp.zeros((n, H))) for n in (N, K, K))
            self.bias_out_D = nnx.Param(jnp.zeros(D))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, self.q_DNH[...])
        k_BSKH = jnp.einsum("BSD,DKH->BSKH", x_BTD, self.k_DKH[...])
        v_BSKH = jnp.einsum("BSD,DKH->BSKH", x_BTD, self.v_DKH[...])
        if self.family == "gpt2":
            q_BTNH = add(q_BTNH, self.bias_q_NH[...])
            k_BSKH = add(k_BSKH, self.bias_k_KH[...])
            v_BSKH = add(v_BSKH, self.bias_v_KH[...])
        else:
            q_BTNH, k_BSKH = rotate(q_BTNH, self.theta), rotate(k_BSKH, self.theta)
        qkv = remat.name(q_BTNH, "q"), remat.name(k_BSKH, "k"), remat.name(v_BSKH, "v")
        if self.kernel == "xla" and x_BTD.dtype == jnp.float16:  # XLA:CPU lacks the float16 matmul that JAX asks for
            qkv = [x.astype(jnp.float32) for x in qkv]
        kernel = None if self.kernel == "auto" else self.kernel
        y_BTNH = jax.nn.dot_product_attention(*qkv, is_causal=True, implementation=kernel).astype(x_BTD.dtype)
        y_BTD = remat.name(jnp.einsum("BTNH,NHD->BTD", y_BTNH, self.out_NHD[...]), "attention_out")
        return add(y_BTD, self.bias_out_D[...]) if self.family == "gpt2" else y_BTD


class MLP(nnx.Module):
    """x[B T D] -> y[B T D]: SwiGLU (arXiv 2002.05202) for llama, GELU (tanh form, as GPT-2) for gpt2."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        D, F = config.d_model, config.d_ff
        self.family = config.family
        self.up_DF = _normal(rngs, (D, F))
        self.down_FD = _normal(rngs, (F, D), STD / math.sqrt(2 * config.num_layers))
        if config.family == "llama":
            self.gate_DF = _normal(rngs, (D, F))
        else:
            self.bias_up_F, self.bias_down_D = nnx.Param(jnp.zeros(F)), nnx.Param(jnp.zeros(D))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = remat.name(jnp.einsum("BTD,DF->BTF", x_BTD, self.up_DF[...]), "up")
        if self.family == "llama":
            gate_BTF = remat.name(jnp.einsum("BTD,DF->BTF", x_BTD, self.gate_DF[...]), "gate")
            h_BTF = swiglu(gate_BTF, h_BTF)
        else:
            h_BTF = gelu(add(h_BTF, self.bias_up_F[...]))
        y_BTD = jnp.einsum("BTF,FD->BTD", h_BTF, self.down_FD[...])
        return y_BTD if self.family == "llama" else add(y_BTD, self.bias_down_D[...])


class Layer(nnx.Module):
    """x[B T D] -> x[B T D]: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        self.norm_attention, self.attention = Norm(config), Attention(config, rngs)
        self.norm_mlp, self.mlp = Norm(config), MLP(config, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))


class Ends(nnx.Module):
    """What comes before and after the layers: tokens[B T] -> x[B T D], and x[B T D] -> logits or loss."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.loss_chunk = config.loss_chunk
        self.embedding_VD = _normal(rngs, (V, D))
        if config.family == "gpt2":
            self.positions_TD = _normal(rngs, (config.max_seq_len, D))
        self.norm = Norm(config)
        if not config.tie_embeddings:
            self.head_VD = _normal(rngs, (V, D))

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """tokens[B T] -> x[B T D]"""
        x_BTD = self.look_up(tokens_BT)
        if hasattr(self, "positions_TD"):
            x_BTD = add(x_BTD, self.positions_TD[: tokens_BT.shape[1]])
        return x_BTD.astype(self.embedding_VD[...].dtype)

    def look_up(self, tokens_BT: jax.Array) -> jax.Array:
        """tokens[B T] -> their embeddings x[B T D] in float32"""
        return look_up(self.embedding_VD[...], tokens_BT)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """x[B T D] -> logits[B T V] in float32"""
        return project(self.norm(x_BTD), self.head())

    def head(self) -> jax.Array:
        """head[V D]"""
        return self.head_VD[...] if hasattr(self, "head_VD") else self.embedding_VD[...]

    def loss(self, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x[B T D], targets[B T] -> (sum of cross-entropies in nats, number of targets), float32 and int32 scalars.

        A negative target counts for nothing (padding). With model.loss_chunk only inside `shard_map`.
        """
        if self.loss_chunk:
            return tensor.cross_entropy(self.norm(x_BTD), self.head(), targets_BT, chunk=self.loss_chunk)
        counted_BT = targets_BT >= 0
        logits_BTV = self.logits(x_BTD)
        labels_BTV = jax.nn.one_hot(targets_BT, logits_BTV.shape[-1])
        losses_BT = optax.softmax_cross_entropy(logits_BTV, labels_BTV)
        return jnp.where(counted_BT, losses_BT, 0.0).sum(), counted_BT.sum(dtype=jnp.int32)


class Decoder(nnx.Module):
    """tokens[B T] -> logits[B T V] in float32. Takes a resolved `config.Model`."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        self.ends = Ends(config, rngs)
        stack = nnx.vmap(Layer, in_axes=(None, 0), out_axes=0)
        self.layers = nnx.split_rngs(splits=config.num_layers)(lambda rngs: stack(config, rngs))(rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        layer, weights = nnx.split(self.layers)
        x_BTD = remat.scan(lambda x, w: nnx.merge(layer, w)(x), self.ends.embed(tokens_BT), weights, "none", False)
        return self.ends.logits(x_BTD)


class Graphs(NamedTuple):
    """The structure of the decoder without its parameters: `nnx.merge(graph, parameters)` makes the module."""

    ends: nnx.GraphDef
    layer: nnx.GraphDef


# What is cheap keeps nothing but its inputs for its backward, as fused kernels do: else each step of a norm or of an
# activation would be kept, the norms' in float32. (Forward and backward are different loops: XLA cannot merge them.)
_keeps_inputs = partial(jax.checkpoint, prevent_cse=False)


@partial(_keeps_inputs, static_argnums=3)
def normalize(x_BTD: jax.Array, gain_D: jax.Array, bias_D: jax.Array | None, eps: float) -> jax.Array:
    """x[B T D] -> x[B T D] with root mean square 1 over D, times gain; with a bias: centred first. In float32."""
    x = x_BTD.astype(jnp.float32)
    if bias_D is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    x = x * gain_D.astype(jnp.float32)[None, None]
    if bias_D is not None:
        x = x + bias_D.astype(jnp.float32)[None, None]
    return x.astype(x_BTD.dtype)


@_keeps_inputs
def swiglu(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """gate[B T F], up[B T F] -> h[B T F] = silu(gate) up"""
    return jax.nn.silu(gate_BTF) * up_BTF


@_keeps_inputs
def gelu(x_BTF: jax.Array) -> jax.Array:
    """x[B T F] -> h[B T F], the tanh form of GPT-2"""
    return jax.nn.gelu(x_BTF, approximate=True)


def add(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x[... F], bias[F] -> x[... F], added in float32, so that the gradient of the bias is summed in float32 too."""
    bias = jnp.expand_dims(bias, range(x.ndim - bias.ndim))
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def look_up(embedding_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """embedding[V D], tokens[B T] -> x[B T D] in float32, as a row's gradient is a sum over all places of its token."""
    return _look_up(as_varying(embedding_VD, varying_axes(tokens_BT)), tokens_BT)


@jax.custom_vjp
def _look_up(embedding_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    return embedding_VD[tokens_BT].astype(jnp.float32)


def _look_up_backward(saved: tuple[jax.Array, jax.Array], g_BTD: jax.Array) -> tuple[jax.Array, None]:
    embedding_VD, tokens_BT = saved
    # A whole table in float32, which the compiler must not fill with zeros before the layers' backward is over.
    zero, g_BTD = lax.optimization_barrier((jnp.zeros_like(g_BTD, shape=()), g_BTD))
    g_VD = jnp.broadcast_to(zero, embedding_VD.shape).at[tokens_BT].add(g_BTD)
    return g_VD.astype(embedding_VD.dtype), None


_look_up.defvjp(lambda embedding, tokens: (_look_up(embedding, tokens), (embedding, tokens)), _look_up_backward)


@jax.custom_vjp
def project(x_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """x[B T D], head[V D] -> logits[B T V] in float32; the matmuls of its backward run in the dtype of x and head."""
    return jnp.einsum("BTD,VD->BTV", x_BTD, head_VD, preferred_element_type=jnp.float32)


def _project_backward(saved: tuple[jax.Array, jax.Array], g_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTD, head_VD = saved
    g_BTV = g_BTV.astype(x_BTD.dtype)
    return jnp.einsum("BTV,VD->BTD", g_BTV, head_VD), jnp.einsum("BTV,BTD->VD", g_BTV, x_BTD)


project.defvjp(lambda x_BTD, head_VD: (project(x_BTD, head_VD), (x_BTD, head_VD)), _project_backward)


def rotate(x_BTNH: jax.Array, theta: float) -> jax.Array:
    """x[B T N H] -> x[B T N H]: rotary positions (arXiv 2104.09864) in float32; dims h and h + H/2 form a pair."""
    T, H = x_BTNH.shape[1], x_BTNH.shape[3]
    frequency_h = theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    angle_Th = jnp.arange(T, dtype=jnp.float32)[:, None] * frequency_h[None]
    cos, sin = jnp.cos(angle_Th)[None, :, None], jnp.sin(angle_Th)[None, :, None]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def init(config: Model, seed: int) -> dict:
    """Parameters as a nested dict of float32 arrays. The same seed gives the same values on every mesh and layout."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=seed)), nnx.Param))


def abstract(config: Model) -> tuple[Graphs, dict]:
    """The structure of the decoder, and its parameters as ShapeDtypeStructs: {"ends": ..., "layers": stacked}.

    No memory is touched.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0)))
    graphs = Graphs(nnx.split(decoder.ends)[0], nnx.split(decoder.layers)[0])
    return graphs, nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


def attention_kernel(config: Model, dtype: jnp.dtype, device: jax.Device) -> str:
    """What `auto` stands for on a device: cudnn (flash attention) where it can run, else xla.

    Raises ValueError if cudnn is asked for where it cannot run.
    """
    H = config.d_model // config.num_heads
    ampere = float(getattr(device, "compute_capability", None) or 8.0) >= 8.0
    can = device.platform in ("gpu", "cuda") and ampere and dtype.itemsize == 2 and H <= 128 and H % 8 == 0
    if config.attention == "cudnn" and not can:
        raise ValueError(
            "model.attention=cudnn needs an NVIDIA GPU (Ampere or newer), a 16-bit precision.compute and a head dim of "
            f"at most 128 that 8 divides; here are {device.platform}, {dtype} and {H}: use auto or xla"
        )
    return ("cudnn" if can else "xla") if config.attention == "auto" else config.attention


def is_decayed(path: tuple) -> bool:
    """Whether weight decay applies to the parameter at this tree path: not to gains, biases and learned positions."""
    return not path[-1].key.startswith(("gain", "bias", "positions"))
