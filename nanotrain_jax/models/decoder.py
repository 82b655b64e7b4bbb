"""The decoder (Flax NNX): families from one set of modules, stacked layers run by `lax.scan`.

    llama    RMSNorm, rotary positions, SwiGLU, grouped-query attention     Touvron et al. 2023, arXiv 2302.13971
    gpt2     LayerNorm, learned positions, GELU, biases, tied embeddings    Radford et al. 2019
    mistral  as llama, a window                                             Jiang et al. 2023, arXiv 2310.06825
    qwen2    as llama, biases of queries, keys and values                   arXiv 2407.10671
    qwen3    as llama, norms of query and key heads                         arXiv 2505.09388
    gemma3   as qwen3, norms after attention and MLP, local layers          arXiv 2503.19786

Names: B batch, T tokens, S key tokens, D model, F ffn, N query heads, K kv heads, H head dim, V vocab, L layers.
models/decoder_layer.py has the modules of a layer, models/ends.py that of what is outside of layers. A module has the
parameters that models/decoder_table.py lists under its path, with their layouts and initial values.
Weights under `layers` have an additional leading dim L in storage; inside the scan each layer has its own slice. So
have those under `dense`, the first layers of a mixture, which have no experts.

Matmuls run in the dtype of their weights; norms, softmax, rotary angles and loss in float32.

With a Split the same code runs on local shards (Megatron-LM, arXiv 1909.08053): `rules` shards heads, F and V over the
tensor axis, and sequence parallelism shards T between the matmuls. Docstrings give global shapes. With sequence
parallelism the B sequences of a microbatch are concatenated, x[1 BT/tensor D], so that gathers over T need no transpose
(Megatron-LM puts T before B for this).

Initialization (GPT-2 and its successors): normal, std 0.02; the two projections that write to the residual stream
0.02 / sqrt(2 L), so that its variance does not grow with depth; gains one, biases zero.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from nanotrain_jax.config.execution import head_gradient, writes_layers_out
from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.models import balance, contract, decode, decoder_table, device_kernels, dpo
from nanotrain_jax.models.decoder_layer import Layer, is_local, stacked
from nanotrain_jax.models.ends import Ends
from nanotrain_jax.models.modules import ONE_DEVICE, Split
from nanotrain_jax.models.parameters import DENSE, ENDS, LAYERS, TENSOR, VOCAB
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.sharding import Rules
from nanotrain_jax.parallel.tensor import float8, tensor

PARAMETERS = {path.rpartition("/")[2]: row for path, row in decoder_table.every_parameter().items()}  # by name


class Decoder(nnx.Module):
    """tokens[B T] -> logits[B T V] in float32. Takes a resolved `config.Model`.

    With a Split it only holds parameters: the step runs its modules inside `shard_map`. order: the layer of each row of
    the stacked weights; None: model order.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split = ONE_DEVICE, order: Sequence[int] | None = None):
        self.ends = Ends(config, rngs, split)
        if config.dense_layers:
            self.dense = stacked(config.dense, rngs, split, range(config.dense_layers))
        self.layers = stacked(config, rngs, split, range(config.dense_layers, config.num_layers), order)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.ends.embed(tokens_BT)
        for stack in [self.dense, self.layers] if hasattr(self, "dense") else [self.layers]:
            layer, weights = nnx.split(stack)
            run = partial(run_layer, layer, len(tokens_BT))
            x_BTD = remat.scan(run, x_BTD, weights, remat.Policy())
        return self.ends.logits(x_BTD)


def run_layer(layer: nnx.GraphDef, sequences: int, x_BTD: jax.Array, weights: nnx.State) -> jax.Array:
    """x[B T D] -> x[B T D] by a layer with these weights. sequences: as of `Attention`."""
    return nnx.merge(layer, weights)(x_BTD, sequences)[0]


class Graphs(NamedTuple):
    """The structure of the decoder without its parameters: `nnx.merge(graph, parameters)` returns the module."""

    ends: nnx.GraphDef
    layer: nnx.GraphDef
    dense: nnx.GraphDef | None  # of the first layers without experts, if there are some

    def of_layer(self, weights: dict) -> nnx.GraphDef:
        """Return that of the layer with these weights."""
        return self.dense if self.dense and decoder_table.ROUTER not in weights["mlp"] else self.layer


def random_numbers(seed: int) -> nnx.Rngs:
    """Return the streams of initial values: of adapters one of their own, so that the rest does not depend on them."""
    return nnx.Rngs(params=seed, lora=jax.random.fold_in(jax.random.key(seed), 1))


def init(
    config: Model,
    seed: int,
    split: Split = ONE_DEVICE,
    order: Sequence[int] | jax.Array | None = None,
    put: Callable[[dict], dict] | None = None,
) -> dict:
    """Initialize parameters: a nested dict of float32 arrays. The same seed gives the same values on every mesh.

    order: the layer of each row of the stacked weights. put: create layers one at a time and apply put to each, e.g. to
    move it to host memory.
    """
    rngs = random_numbers(seed)
    if put is None:
        return nnx.to_pure_dict(nnx.state(Decoder(config, rngs, split, order), nnx.Param))
    ends = nnx.to_pure_dict(nnx.state(Ends(config, rngs, split), nnx.Param))

    main = range(config.dense_layers, config.num_layers)

    @nnx.split_rngs(splits=len(main))
    def stack(rngs: nnx.Rngs) -> dict:
        graph, keys = nnx.split(rngs)
        if order is not None:
            keys = jax.tree.map(lambda keys: keys[jnp.asarray(order)], keys)

        def init_layer(of_layer: tuple[nnx.State, jax.Array | None]) -> dict:
            keys, is_local_1 = of_layer
            weights = nnx.to_pure_dict(nnx.state(Layer(config, nnx.merge(graph, keys), split), nnx.Param))
            if is_local_1 is not None:
                weights["attention"][decoder_table.IS_LOCAL] = is_local_1
            return put(weights)

        return jax.lax.map(init_layer, (keys, is_local(config, main, order)))

    first = {}
    if config.dense_layers:
        dense = stacked(config.dense, rngs, split, range(config.dense_layers))
        first[DENSE] = nnx.to_pure_dict(nnx.state(dense, nnx.Param))
    return {ENDS: ends, **first, LAYERS: stack(rngs)}


def abstract(config: Model, split: Split = ONE_DEVICE) -> tuple[Graphs, dict]:
    """Return the structure of the decoder, and its parameters as ShapeDtypeStructs: {"ends": ..., "layers": stacked}.

    Allocates nothing.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, random_numbers(0), split))
    dense = nnx.split(decoder.dense)[0] if config.dense_layers else None
    graphs = Graphs(nnx.split(decoder.ends)[0], nnx.split(decoder.layers)[0], dense)
    return graphs, nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


def used_by(end: Literal["first", "last"], weights: dict) -> dict:
    """Select what `Ends.embed` (first) or `Ends.loss` (last) uses from a tree like the parameters."""
    ends = weights[ENDS]
    is_tied = decoder_table.HEAD.removeprefix(f"{ENDS}/") not in ends
    rows = decoder_table.every_parameter(is_tied).items()
    names = {path.split("/")[1] for path, row in rows if row.is_used(end)}
    return {ENDS: {name: tree for name, tree in ends.items() if name in names}}


def rules(config: Model, split: Split) -> Rules:
    """Return the layout of every parameter over the tensor axis, of the vocabulary over its axes.

    Key and value heads are sharded if there is at least one per device, else replicated, and each device uses its own.
    """
    axis = f"/{split.axis}" if split.axis else ""
    vocab_axes = "/" + ",".join(split.vocab_axes) if split.vocab_axes else ""
    lead = {ENDS: "", LAYERS: "L ", DENSE: "L "}
    rows = decoder_table.table(config, split.size, split.vocab_shards).items()
    layouts = ((path, lead[row.part] + row.layout) for path, row in rows)
    return Rules([(path, layout.replace(TENSOR, axis).replace(VOCAB, vocab_axes)) for path, layout in layouts])


def is_padded(path: str) -> bool:
    """True if the array at this path ("params/ends/head_VD") has rows of padding with a Split."""
    name = path.rpartition("/")[2]
    return name in PARAMETERS and PARAMETERS[name].is_padded


def has_partial_gradient(path: tuple, split: Split) -> bool:
    """True if the gradient of a parameter that is replicated over the tensor axis is a partial sum on each device.

    This holds if devices have different tokens (sequence parallelism) or different query heads (keys and values).
    """
    return split.sequence_parallel or (split.axis is not None and PARAMETERS[path[-1].key].is_partial)


def constants(config: Model) -> tuple[str, ...]:
    """Return the names of arrays of layers that have no gradient."""
    names = {
        decoder_table.IS_LOCAL: config.features.has_local_layers,
        decoder_table.BIAS: config.experts is not None and config.experts.balance == "bias",
    }
    return tuple(name for name, exists in names.items() if exists)


def is_decayed(path: tuple) -> bool:
    """True if weight decay applies to the parameter at this tree path: all but gains, biases and learned positions."""
    return PARAMETERS[path[-1].key].decay


def kind_of_matmul(config: Config) -> float8.Matmul:
    """Return how layers multiply. At stages 2 and 3 each gradient of a weight is reduced where it is made: in float32,
    it leaves the matmul so."""
    if config.precision.matmul == "float8":
        return float8.FLOAT8
    is_wide = config.parallel.zero >= 2 and config.precision.grad_reduce == "float32"
    return float8.WIDE if is_wide else float8.PLAIN


def trains_head(config: Config) -> bool:
    """True if the output head, or the embedding that it is tied to, has a gradient."""
    rows = decoder_table.frozen_table(config.model, 1, 1, config.train.freeze)
    return not rows.get(decoder_table.HEAD, rows[decoder_table.EMBEDDING]).is_frozen


def split_of(config: Config, mesh: Mesh) -> Split:
    """Return how the devices of a mesh share the decoder of a resolved config."""
    p, device = config.parallel, mesh.devices.flat[0]
    if p.expert_exchange == "ragged" and device.platform == "cpu":
        raise ValueError("parallel.expert_exchange=ragged needs GPUs: XLA:CPU has no ragged all-to-all; use padded")
    # Full remat recomputes the layer's forward, which has just gathered what its backward needs.
    regather = config.memory.rematerialization.policy != "full"
    is_flat = writes_layers_out(config, device.platform)
    matmuls = tensor.MatmulOptions(regather, p.overlap_tensor, kind_of_matmul(config), together=is_flat)
    split = Split("tensor", p.tensor, p.sequence_parallel) if p.tensor > 1 else ONE_DEVICE
    return split._replace(
        matmuls=matmuls,
        context=p.context_attention if p.context > 1 else None,
        vocab_axes=p.vocab_axes,
        vocab_shards=p.vocab_shards,
        logits=config.precision.logits,
        head_gradient=head_gradient(config),
        trains_head=trains_head(config),
        experts="expert" if p.expert > 1 else None,
        is_ragged=p.expert_exchange == "ragged",
        flat=is_flat,
        kernels=device_kernels.has_ours(config.model, device),
        grouped=device_kernels.of_experts(config, device),
    )


def build(config: Config, mesh: Mesh, counts_correct: bool = False) -> contract.Model:
    """Build the decoder of a resolved config for the training step, with its objective. counts_correct: with
    `Model.correct`."""
    kernel = device_kernels.of_attention(config.model, jnp.dtype(config.precision.compute), mesh.devices.flat[0])
    if kernel == "cudnn":
        device_kernels.check_flash_rows(config)
    decoder = config.model.model_copy(update={"attention": kernel})
    split = split_of(config, mesh)
    graphs, shapes = abstract(decoder, split)

    def initialize(seed: int, order: Sequence[int] | None = None, put: Callable | None = None) -> dict:
        return init(decoder, seed, split, order, put)

    def merged(weights: dict) -> Ends:
        """Return the module with these weights; others stay abstract."""
        return nnx.merge(graphs.ends, shapes[ENDS] | weights[ENDS])

    def first(weights: dict, batch: dict, run: Callable) -> jax.Array:
        x_BTD = merged(weights).embed(batch["inputs"], batch.get("starts"))
        return run(DENSE, jax.named_scope("layer")(partial(layer, batch=batch)), x_BTD) if graphs.dense else x_BTD

    def routed(weights: dict, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array | None]:
        return nnx.merge(graphs.of_layer(weights), weights)(x_BTD, len(batch["inputs"]), batch.get("starts"))

    def layer(weights: dict, x_BTD: jax.Array, batch: dict) -> jax.Array:
        return routed(weights, x_BTD, batch)[0]

    def last(weights: dict, x_BTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        return merged(weights).loss(x_BTD, batch["targets"])

    def token_losses(weights: dict, x_BTD: jax.Array, batch: dict) -> jax.Array:
        return merged(weights).losses(x_BTD, batch["targets"])

    def correct(weights: dict, x_BTD: jax.Array, batch: dict) -> jax.Array:
        return merged(weights).correct(x_BTD, batch["targets"])

    model = contract.Model(
        init=initialize,
        first=first,
        layer=layer,
        last=last,
        rules=rules(decoder, split),
        stacks=(DENSE,) * bool(graphs.dense),
        used_by_first=partial(used_by, "first"),
        used_by_last=partial(used_by, "last"),
        is_decayed=is_decayed,
        has_partial_gradient=partial(has_partial_gradient, split=split),
        constants=constants(decoder),
        is_padded=is_padded,
        splits_context=True,
        splits_documents=True,
        splits_vocab=bool(config.parallel.vocab_over_pipe),
        correct=correct if counts_correct else None,
        token_losses=token_losses,
        decode=decode.build(decoder, split, graphs, merged),
    )
    if config.train.objective:
        model = dpo.build(model, config)
    return balance.build(model, config, routed) if decoder.experts else model
