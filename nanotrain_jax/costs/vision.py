"""The encoder of pictures in closed form: FLOPs and wire bytes. For resolved configs with a section vision.

Symbols as in costs/counts.py, and b pictures in a microbatch, K = vision.max_tokens, E = vision.width, C candidates,
P values of a patch, S = vision.scorer_width, Q tokens of a row's text, D width of the language model. A device encodes
ceil(M / P) of the M microbatches of P pipeline stages (step/encoded.py).
"""

from __future__ import annotations

from typing import NamedTuple

from nanotrain_jax.config.families import FAMILIES, KEYS
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs.counts import BYTES, encodes, last_matmuls_spared, rows, rows_per_device
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.models.decoder_table import EMBEDDING
from nanotrain_jax.models.parameters import ENCODER
from nanotrain_jax.models.vision_table import ADAPTER, INVENTORY, PATCHES, RELEVANCE, table

Paths = frozenset[str]  # of weights


def _of(folder: str, *names: str) -> Paths:
    """Return the paths of some weights of a folder; without names of all."""
    if names:
        return frozenset(f"{folder}/{name}" for name in names)
    return frozenset(path for path in INVENTORY if path.startswith(f"{folder}/"))


# The weights on which a value depends.
NOTHING: Paths = frozenset()
CANDIDATES = _of(PATCHES, "embed_PE", "bias_E")  # embeddings of the candidates
ASKED = _of(RELEVANCE, "question_DS") | {EMBEDDING}  # the question
KEPT = _of(PATCHES) | _of(RELEVANCE) | {EMBEDDING}  # the input of the encoder's layers
LAYERS = KEPT | _of(ENCODER)  # of any layer, and their output: all layers are one loop
NORMED = LAYERS | _of(ADAPTER, "gain_E")
ENCODED = LAYERS | _of(ADAPTER)  # what the language model sees


class Product(NamedTuple):
    """A matmul: the FLOPs of its forward, and the weights on which each operand depends.

    The backward takes the same FLOPs for each operand that depends on a trained weight. Nothing is computed back to
    the picture, or to what is frozen.
    """

    flops: float
    left: Paths
    right: Paths

    def backward(self, trained: Paths) -> float:
        """Return the FLOPs of the backward."""
        return self.flops * (bool(self.left & trained) + bool(self.right & trained))


class Flops(NamedTuple):
    """FLOPs of the encoder, forward and backward, and those of the forward that the backward computes again."""

    forward: float
    backward: float
    recompute: float


def trained(config: Config) -> Paths:
    """Return the paths of the weights that train."""
    return frozenset(path for path, row in rows(config).items() if not row.is_frozen)


def has_backward(config: Config, of: Paths = ENCODED) -> bool:
    """True if a weight trains on which the encoded picture (of: another value) depends."""
    return bool(of & trained(config))


def text_tokens(config: Config) -> int:
    """Return Q."""
    return config.data.seq_len - config.vision.max_tokens


def outside_layers(config: Config) -> list[Product]:
    """Return the matmuls of a picture before and after the layers of the encoder. Tensor splits none of them.

    texture     18 per pixel, L*a*b*; computed again in the backward of the patches
    patches     2 C P E
    relevance   2 C^2 E around; 2 C E S each informative, salient, candidate; 2 Q D S asked; 2 C Q S match
    adapter     2 K (E D + D^2)

    Products with a vector and with the three columns of the balance are left out.
    """
    v, D, Q = config.vision, config.model.d_model, text_tokens(config)
    (P, E), C, S, K = table(v, D)[f"{PATCHES}/embed_PE"].shape, v.num_candidates, v.scorer_width, v.max_tokens
    return [
        Product(18.0 * v.image_size**2, NOTHING, _of(PATCHES, "embed_PE")),
        Product(2.0 * C * P * E, NOTHING, _of(PATCHES, "embed_PE")),
        Product(2.0 * C * C * E, NOTHING, CANDIDATES),
        *(Product(2.0 * C * E * S, CANDIDATES, _of(RELEVANCE, f"{name}_ES")) for name in ("informative", "salient")),
        Product(2.0 * Q * D * S, frozenset({EMBEDDING}), _of(RELEVANCE, "question_DS")),
        Product(2.0 * C * E * S, CANDIDATES, _of(RELEVANCE, "candidate_ES")),
        Product(2.0 * C * Q * S, CANDIDATES | _of(RELEVANCE, "candidate_ES"), ASKED),
        Product(2.0 * K * E * D, NORMED, _of(ADAPTER, "up_ED")),
        Product(2.0 * K * D * D, NORMED | _of(ADAPTER, "up_ED"), _of(ADAPTER, "down_DD")),
    ]


def in_layers(config: Config) -> dict[str, Product]:
    """Return the matmuls of a picture in all layers of the encoder, by name: 24 K E^2 + 4 K^2 E each, over t."""
    v, t = config.vision, config.parallel.tensor
    L, K, E = v.num_layers, v.max_tokens, v.width
    found = {
        path.rpartition("/")[2]: Product(2.0 * L * K * row.size / t, LAYERS, frozenset({path}))
        for path, row in table(v, config.model.d_model).items()
        if row.part == ENCODER and len(row.shape) > 1
    }
    attention = Product(2.0 * L * K * K * E / t, LAYERS, LAYERS)
    return found | {"scores": attention, "values": attention}


def picture_flops(config: Config) -> Flops:
    """Return the FLOPs of a picture on a device. memory.remat recomputes in the layers

    selective   2 K^2 E for scores, and as many for the output of attention, if the matmul after it trains
    full        the forward without the last matmul
    block:n     the forward, but the last matmul of `counts.last_matmuls_spared`
    """
    trains, layers = trained(config), in_layers(config)
    products = [*outside_layers(config), *layers.values()]
    forward = sum(product.flops for product in layers.values())
    values = layers["values"].flops if layers["out_NHE"].right & trains else 0.0
    again = {
        "none": 0.0,
        "selective": layers["scores"].flops + values,
        "full": forward - layers["down_FE"].flops,
        "block": forward - last_matmuls_spared(config, ENCODER) * layers["down_FE"].flops,
    }[config.memory.rematerialization.policy]
    return Flops(
        sum(product.flops for product in products),
        sum(product.backward(trains) for product in products),
        again if has_backward(config, LAYERS) else 0.0,
    )


def positions(config: Config) -> Product:
    """Return the matmul of the positions of the candidates, one for each microbatch: 2 C F E."""
    path = f"{PATCHES}/position_FE"
    row = table(config.vision, config.model.d_model)[path]
    return Product(2.0 * config.vision.num_candidates * row.size, NOTHING, frozenset({path}))


def step_flops(config: Config) -> float:
    """Return the hardware FLOPs of the encoder on a device in a step."""
    if config.vision is None:
        return 0.0
    of_positions = positions(config).flops + positions(config).backward(trained(config))
    return pictures(config) * sum(picture_flops(config)) + encodes(config) * of_positions


def pictures(config: Config) -> float:
    """Return how many pictures a device encodes per step: b ceil(M / P)."""
    return encodes(config) * rows_per_device(config) / config.parallel.microbatches


def model_flops(config: Config) -> float:
    """Return the model FLOPs of a picture: forward and backward, on all devices along tensor, without recomputation."""
    if config.vision is None:
        return 0.0
    whole = picture_flops(config.replace("parallel", tensor=1))
    return whole.forward + whole.backward


def as_decoder(config: Config) -> Config:
    """Return a decoder whose layers are as those of the encoder, of K tokens, without flash attention and FP8: closed
    forms of a layer's activations and time hold for both."""
    v = config.vision
    family = next(name for name, features in FAMILIES.items() if not features.gated_mlp)
    sizes = {"num_layers": v.num_layers, "d_model": v.width, "num_heads": v.num_heads, "num_kv_heads": v.num_heads}
    sizes |= dict.fromkeys(("head_dim", "sliding_window", *KEYS))  # as the family has them
    config = config.replace("model", family=family, attention="xla", d_ff=4 * v.width, loss_chunk=0, **sizes)
    one_stage = {"pipe": 1, "chunks": 1, "sequence_parallel": False, "overlap_tensor": False}
    config = config.replace("data", seq_len=v.max_tokens).replace("train", freeze=()).replace("precision", matmul=None)
    return config.replace("parallel", **one_stage).model_copy(update={"vision": None})


def all_reduces_per_layer(config: Config) -> float:
    """Return how often tensor all-reduces the activations of a layer of the encoder, K E (`buffers`): on average."""
    if not has_backward(config, LAYERS):
        return 2
    of_block = 2 - last_matmuls_spared(config, ENCODER)
    return 4 + {"full": 1, "block": of_block}.get(config.memory.rematerialization.policy, 0)


def buffers(config: Config) -> list[tuple[str, str, float, Traffic]]:
    """Return mesh axis, operation, bytes of the full buffer and kind of what a step communicates of pictures. Weights
    and their gradients: as those of ends, for each microbatch that a device encodes (costs/parameter_traffic.py).

    Bytes for each of these microbatches:

    tensor   all-reduce       w b 2 L K E forward, as much backward; `full` w b L K E more, block:n w b 2 L K E,
                      but what `counts.last_matmuls_spared` spares
             all-reduce       w b Q D, the embeddings of the question
             all-reduce       w b K D, with sequence parallelism: the gradient of the picture, for each of all M
    pipe     all-gather       P (w b K D + 4 b T): pictures, and where attention begins
             reduce-scatter   P w b K D, the gradient of the pictures

    No backward is counted where nothing trains on which the value depends (`has_backward`).
    """
    if config.vision is None:
        return []
    p, v, w, D = config.parallel, config.vision, BYTES[config.precision.compute], config.model.d_model
    K, encoded, found = v.max_tokens, pictures(config), []
    if p.tensor > 1:
        of_layers = all_reduces_per_layer(config) * v.num_layers * K * v.width
        found.append(("tensor", "all_reduce", w * encoded * of_layers, Traffic.ENCODER))
        found.append(("tensor", "all_reduce", w * D * encoded * text_tokens(config), Traffic.QUESTION))
        of_gradient = rows_per_device(config) * K if p.sequence_parallel and has_backward(config) else 0.0
        found.append(("tensor", "all_reduce", w * D * of_gradient, Traffic.ENCODED))
    if p.pipe > 1:
        picture = w * K * D * p.pipe * encoded
        starts = 4 * config.data.seq_len * p.pipe * encoded
        found.append(("pipe", "all_gather", picture + starts, Traffic.ENCODED))
        found.append(("pipe", "reduce_scatter", picture if has_backward(config) else 0.0, Traffic.ENCODED))
    return found
