"""The decoder (Flax NNX): two families from one set of parts, stacked layers run by `lax.scan`.

    llama  RMSNorm, rotary positions, SwiGLU, grouped-query attention       Touvron et al. 2023, arXiv 2302.13971
    gpt2   LayerNorm, learned positions, GELU, biases, tied embeddings      Radford et al. 2019

Names: B batch, T tokens, S key tokens, D model, F ffn, N query heads, K kv heads, H head dim, V vocab, L layers.
A module has the parameters that models/decoder_table.py lists under its path, with their layouts and initial values.
Weights under `layers` carry one more, leading dim L in storage; inside the scan each layer sees its own.

Matmuls run in the dtype of the weights they are given; norms, softmax, rotary angles and loss in float32.

With a Split the same code runs on local shards (Megatron-LM, arXiv 1909.08053): heads, F and V are split over the
tensor axis as `rules` says, and under sequence parallelism T between the matmuls. Docstrings give whole shapes. There
the B sequences of a microbatch lie in one row, x[1 BT/tensor D]: what is gathered over T then needs no transposing
(Megatron-LM has T before B for this).

Initialisation (GPT-2 and its successors): normal, std 0.02; the two projections that write to the residual stream
0.02 / sqrt(2 L), so that its variance does not grow with depth; gains one, biases zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from nanotrain_jax.config import Config, Model, fits_flash
from nanotrain_jax.models import contract, decoder_table
from nanotrain_jax.models.parameters import ENDS, LAYERS, TENSOR, Parameter, Table, under
from nanotrain_jax.ops import add, gelu, normalize, project, rotate, swiglu
from nanotrain_jax.parallel import remat, tensor
from nanotrain_jax.parallel.collectives import position
from nanotrain_jax.sharding import Rules

EVERY = {path.rpartition("/")[2]: row for path, row in decoder_table.every_parameter().items()}  # by name


class Split(NamedTuple):
    """How a decoder is split over the devices of a mesh axis."""

    axis: str | None = None  # None: it is not
    size: int = 1
    sequence_parallel: bool = False  # between matmuls over tokens
    regather: bool = True  # what entered a matmul is gathered again in the backward (`tensor.columns`)


ONE_DEVICE = Split()


def _initial(row: Parameter, rngs: nnx.Rngs | None) -> jax.Array:
    if row.init != "normal":
        return jnp.zeros(row.shape) if row.init == "zeros" else jnp.ones(row.shape)
    rows, *dims = row.shape
    drawn = row.std * jax.random.normal(rngs.params(), (rows - row.padding, *dims), jnp.float32)
    return jnp.pad(drawn, [(0, row.padding)] + [(0, 0)] * len(dims)) if row.is_padded else drawn


def _fill(module: nnx.Module, rows: Table, rngs: nnx.Rngs | None = None) -> None:
    """Give a module its parameters, drawn in the order of the table."""
    for name, row in rows.items():
        setattr(module, name, nnx.Param(_initial(row, rngs)))


class Norm(nnx.Module):
    """x[B T D] -> x[B T D], normalised over D in float32: RMSNorm (arXiv 1910.07467), LayerNorm (arXiv 1607.06450)."""

    def __init__(self, config: Model, path: str):
        self.eps, self.center = config.norm_eps, config.features.centered_norms
        _fill(self, under(decoder_table.table(config), path))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        bias_D = self.bias_D[...] if self.center else None
        return normalize(x_BTD, self.gain_D[...], bias_D, self.eps)


class Attention(nnx.Module):
    """x[B T D] -> y[B T D]: causal attention with N query heads, each group of N / K sharing one key and value head.

    sequences: B, where x has them in one row.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.features, self.split, self.num_kv_heads = config.features, split, config.num_kv_heads
        self.theta, self.kernel = config.rope_theta, config.attention
        _fill(self, under(decoder_table.table(config, split.size), decoder_table.ATTENTION), rngs)

    def __call__(self, x_BTD: jax.Array, sequences: int) -> jax.Array:
        axis, sequence_parallel, regather = self.split.axis, self.split.sequence_parallel, self.split.regather
        weights = self.q_DNH[...], self.own_head(self.k_DKH[...]), self.own_head(self.v_DKH[...])
        qkv = tensor.columns(x_BTD, weights, axis, sequence_parallel, regather)
        q_BTNH, k_BSKH, v_BSKH = (x.reshape(sequences, -1, *x.shape[2:]) for x in qkv)
        if self.features.biases:
            q_BTNH = add(q_BTNH, self.bias_q_NH[...])
            k_BSKH = add(k_BSKH, self.own_head(self.bias_k_KH[...]))
            v_BSKH = add(v_BSKH, self.own_head(self.bias_v_KH[...]))
        if not self.features.learned_positions:
            q_BTNH, k_BSKH = rotate(q_BTNH, self.theta), rotate(k_BSKH, self.theta)
        qkv = remat.name(q_BTNH, "q"), remat.name(k_BSKH, "k"), remat.name(v_BSKH, "v")
        if self.kernel == "xla" and x_BTD.dtype == jnp.float16:  # XLA:CPU lacks the float16 matmul that JAX asks for
            qkv = [x.astype(jnp.float32) for x in qkv]
        kernel = None if self.kernel == "auto" else self.kernel
        y_BTNH = jax.nn.dot_product_attention(*qkv, is_causal=True, implementation=kernel).astype(x_BTD.dtype)
        y_BTD = jnp.tensordot(y_BTNH, self.out_NHD[...], 2).reshape(len(x_BTD), -1, x_BTD.shape[2])
        y_BTD = remat.name(tensor.leave(y_BTD, axis, sequence_parallel), "attention_out")
        return add(y_BTD, self.bias_out_D[...]) if self.features.biases else y_BTD

    def own_head(self, w_KH: jax.Array) -> jax.Array:
        """w[... K H] -> w[... 1 H], the head that this device's queries look at, where there are fewer than devices."""
        if self.split.size <= self.num_kv_heads:
            return w_KH
        head = position(self.split.axis) // (self.split.size // self.num_kv_heads)
        return jax.lax.dynamic_slice_in_dim(w_KH, head, 1, w_KH.ndim - 2)


class MLP(nnx.Module):
    """x[B T D] -> y[B T D]: SwiGLU (arXiv 2002.05202), or GELU (tanh form, as GPT-2)."""

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.features, self.split = config.features, split
        _fill(self, under(decoder_table.table(config, split.size), decoder_table.MLP), rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        axis, sequence_parallel, regather = self.split.axis, self.split.sequence_parallel, self.split.regather
        weights = [self.up_DF[...]] + ([self.gate_DF[...]] if self.features.gated_mlp else [])
        up_BTF, *gates = tensor.columns(x_BTD, weights, axis, sequence_parallel, regather)
        gates = [remat.name(gate_BTF, "gate") for gate_BTF in gates]
        up_BTF = remat.name(up_BTF, "up")
        if self.features.biases:
            up_BTF = add(up_BTF, self.bias_up_F[...])
        h_BTF = swiglu(*gates, up_BTF) if gates else gelu(up_BTF)
        y_BTD = tensor.row(h_BTF, self.down_FD[...], axis, sequence_parallel)
        return add(y_BTD, self.bias_down_D[...]) if self.features.biases else y_BTD


class Layer(nnx.Module):
    """x[B T D] -> x[B T D]: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.norm_attention = Norm(config, decoder_table.NORM_ATTENTION)
        self.attention = Attention(config, rngs, split)
        self.norm_mlp = Norm(config, decoder_table.NORM_MLP)
        self.mlp = MLP(config, rngs, split)

    def __call__(self, x_BTD: jax.Array, sequences: int) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), sequences)
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))


class Ends(nnx.Module):
    """What comes before and after the layers: tokens[B T] -> x[B T D], and x[B T D] -> logits or loss.

    With a Split, V is padded (`config.padded_vocab`) by rows of zeros, which no loss sees and no gradient changes.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.vocab_size, self.loss_chunk, self.split = config.vocab_size, config.loss_chunk, split
        rows = under(decoder_table.table(config, split.size), ENDS)
        _fill(self, {name: row for name, row in rows.items() if row.is_used("first")}, rngs)
        self.norm = Norm(config, decoder_table.NORM_LAST)
        _fill(self, {name: row for name, row in rows.items() if not row.is_used("first")}, rngs)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """tokens[B T] -> x[B T D], under sequence parallelism x[1 BT/tensor D]"""
        if not self.split.sequence_parallel:
            x_BTD = self.look_up(tokens_BT)
            return add(x_BTD, self.positions_TD[: x_BTD.shape[1]]) if hasattr(self, "positions_TD") else x_BTD
        x_BTD = self.look_up(tokens_BT.reshape(1, -1))
        if hasattr(self, "positions_TD"):
            tokens = x_BTD.shape[1]
            own_T = (position(self.split.axis) * tokens + jnp.arange(tokens)) % tokens_BT.shape[1]
            x_BTD = add(x_BTD, self.positions_TD[...].astype(jnp.float32)[own_T])
        return x_BTD

    def look_up(self, tokens_BT: jax.Array) -> jax.Array:
        """tokens[B T] -> their embeddings x[B T D]"""
        return tensor.look_up(self.embedding_VD[...], tokens_BT, self.split.axis, self.split.sequence_parallel)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """x[B T D] -> logits[B T V] in float32. Not with a Split."""
        return project(self.norm(x_BTD), self.head())

    def head(self) -> jax.Array:
        """head[V D]"""
        return self.head_VD[...] if hasattr(self, "head_VD") else self.embedding_VD[...]

    def loss(self, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x[B T D], targets[B T] -> (sum of cross-entropies in nats, number of targets), float32 and int32 scalars.

        A negative target counts for nothing (padding).
        """
        axis = self.split.axis
        if axis or self.loss_chunk:
            x_BTD = tensor.enter(self.norm(x_BTD), axis, self.split.sequence_parallel)
            options = tensor.LossOptions(self.vocab_size, self.loss_chunk)
            return tensor.cross_entropy(x_BTD, self.head(), targets_BT, axis, options)
        counted_BT = targets_BT >= 0
        logits_BTV = self.logits(x_BTD)
        labels_BTV = jax.nn.one_hot(targets_BT, logits_BTV.shape[-1])
        losses_BT = optax.softmax_cross_entropy(logits_BTV, labels_BTV)
        return jnp.where(counted_BT, losses_BT, 0.0).sum(), counted_BT.sum(dtype=jnp.int32)


class Decoder(nnx.Module):
    """tokens[B T] -> logits[B T V] in float32. Takes a resolved `config.Model`.

    With a Split it is a store of parameters: the step runs its parts inside `shard_map`. order: which layer each row
    of the stacked weights is, where they do not lie in the order in which they run.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split = ONE_DEVICE, order: Sequence[int] | None = None):
        self.ends = Ends(config, rngs, split)

        @nnx.split_rngs(splits=config.num_layers)
        def stack(rngs: nnx.Rngs) -> Layer:
            if order is not None:
                rngs = jax.tree.map(lambda keys: keys[np.asarray(order)], rngs)
            return nnx.vmap(lambda rngs: Layer(config, rngs, split), in_axes=0, out_axes=0)(rngs)

        self.layers = stack(rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        layer, weights = nnx.split(self.layers)

        def run(x_BTD: jax.Array, weights: nnx.State) -> jax.Array:
            return nnx.merge(layer, weights)(x_BTD, len(tokens_BT))

        x_BTD = remat.scan(run, self.ends.embed(tokens_BT), weights, remat.Policy())
        return self.ends.logits(x_BTD)


class Graphs(NamedTuple):
    """The structure of the decoder without its parameters: `nnx.merge(graph, parameters)` makes the module."""

    ends: nnx.GraphDef
    layer: nnx.GraphDef


def init(
    config: Model,
    seed: int,
    split: Split = ONE_DEVICE,
    order: Sequence[int] | jax.Array | None = None,
    put: Callable[[dict], dict] | None = None,
) -> dict:
    """Parameters as a nested dict of float32 arrays. The same seed gives the same values on every mesh and layout.

    order: which layer each row of the stacked weights is. put: makes one at a time and sends each where it is to rest.
    """
    rngs = nnx.Rngs(params=seed)
    if put is None:
        return nnx.to_pure_dict(nnx.state(Decoder(config, rngs, split, order), nnx.Param))
    ends = nnx.to_pure_dict(nnx.state(Ends(config, rngs, split), nnx.Param))

    @nnx.split_rngs(splits=config.num_layers)
    def stack(rngs: nnx.Rngs) -> dict:
        graph, keys = nnx.split(rngs)
        if order is not None:
            keys = jax.tree.map(lambda keys: keys[jnp.asarray(order)], keys)

        def one(keys: nnx.State) -> dict:
            return put(nnx.to_pure_dict(nnx.state(Layer(config, nnx.merge(graph, keys), split), nnx.Param)))

        return jax.lax.map(one, keys)

    return {ENDS: ends, LAYERS: stack(rngs)}


def abstract(config: Model, split: Split = ONE_DEVICE) -> tuple[Graphs, dict]:
    """The structure of the decoder, and its parameters as ShapeDtypeStructs: {"ends": ..., "layers": stacked}.

    No memory is touched.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0), split))
    graphs = Graphs(nnx.split(decoder.ends)[0], nnx.split(decoder.layers)[0])
    return graphs, nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


def used_by_embed(ends: dict) -> dict:
    """Of a tree like the parameters of the ends, what `Ends.embed` looks at."""
    return _used(ends, "first")


def used_by_loss(ends: dict) -> dict:
    """Of a tree like the parameters of the ends, what `Ends.loss` looks at."""
    return _used(ends, "last")


def _used(ends: dict, end: Literal["first", "last"]) -> dict:
    is_tied = decoder_table.HEAD.removeprefix(f"{ENDS}/") not in ends
    rows = decoder_table.every_parameter(is_tied).items()
    names = {path.split("/")[1] for path, row in rows if row.is_used(end)}
    return {name: tree for name, tree in ends.items() if name in names}


def rules(config: Model, split: Split, stages: str | None = None) -> Rules:
    """The layout of every parameter: layers over the axis of pipeline stages, and within them over the tensor axis.

    Key and value heads are split while there is one for each device, else every device stores all and uses its own.
    """
    axis = f"/{split.axis}" if split.axis else ""
    lead = {ENDS: "", LAYERS: f"L/{stages} " if stages else "L "}
    rows = decoder_table.table(config, split.size).items()
    return Rules([(path, lead[row.part] + row.layout.replace(TENSOR, axis)) for path, row in rows])


def is_padded(path: str) -> bool:
    """Whether the array at this path ("params/ends/head_VD") has rows of padding where there is a Split."""
    name = path.rpartition("/")[2]
    return name in EVERY and EVERY[name].is_padded


def has_partial_gradient(path: tuple, split: Split) -> bool:
    """Whether the gradient of a parameter that all devices of the tensor axis store is a partial sum on each of them.

    It is where devices see different tokens (sequence parallelism) or different query heads (keys and values).
    """
    return split.sequence_parallel or (split.axis is not None and EVERY[path[-1].key].is_partial)


def attention_kernel(config: Model, dtype: jnp.dtype, device: jax.Device) -> str:
    """What `auto` stands for on a device: cudnn (flash attention) where it can run, else xla.

    Raises ValueError if cudnn is asked for where it cannot run.
    """
    H = config.d_model // config.num_heads
    ampere = float(getattr(device, "compute_capability", None) or 8.0) >= 8.0
    can = device.platform in ("gpu", "cuda") and ampere and fits_flash(config, dtype.name)
    if config.attention == "cudnn" and not can:
        raise ValueError(
            "model.attention=cudnn needs an NVIDIA GPU (Ampere or newer), a 16-bit precision.compute and a head dim of "
            f"at most 128 that 8 divides; here are {device.platform}, {dtype} and {H}: use auto or xla"
        )
    return ("cudnn" if can else "xla") if config.attention == "auto" else config.attention


def is_decayed(path: tuple) -> bool:
    """Whether weight decay applies to the parameter at this tree path: not to gains, biases and learned positions."""
    return EVERY[path[-1].key].decay


def build(config: Config, mesh: Mesh) -> contract.Model:
    """The decoder of a resolved config, as the training step takes it."""
    p = config.parallel
    kernel = attention_kernel(config.model, jnp.dtype(config.precision.compute), mesh.devices.flat[0])
    decoder = config.model.model_copy(update={"attention": kernel})
    # Where a whole layer is computed again, it has just gathered what its backward needs.
    regather = config.memory.rematerialization.policy != "full"
    split = Split("tensor", p.tensor, p.sequence_parallel, regather) if p.tensor > 1 else ONE_DEVICE
    graphs, shapes = abstract(decoder, split)

    def initialize(seed: int, order: Sequence[int] | None = None, put: Callable | None = None) -> dict:
        return init(decoder, seed, split, order, put)

    def merged(weights: dict) -> Ends:
        """The module, with these of its weights."""
        return nnx.merge(graphs.ends, shapes[ENDS] | weights[ENDS])

    def first(weights: dict, batch: dict, run: Callable) -> jax.Array:
        return merged(weights).embed(batch["inputs"])

    def layer(weights: dict, x_BTD: jax.Array) -> jax.Array:
        is_one_row = split.sequence_parallel
        sequences = x_BTD.shape[1] * split.size // config.data.seq_len if is_one_row else len(x_BTD)
        return nnx.merge(graphs.layer, weights)(x_BTD, sequences)

    def last(weights: dict, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        return merged(weights).loss(x_BTD, batch["targets"])

    return contract.Model(
        init=initialize,
        first=first,
        layer=layer,
        last=last,
        rules=rules(decoder, split),
        used_by_first=lambda weights: {ENDS: used_by_embed(weights[ENDS])},
        used_by_last=lambda weights: {ENDS: used_by_loss(weights[ENDS])},
        is_decayed=is_decayed,
        has_partial_gradient=partial(has_partial_gradient, split=split),
        is_padded=is_padded,
    )
