"""A vision-language model: the decoder of the section model behind an encoder of pictures, for the training step.

    candidates[B C E] = patches of the picture at several scales          models/vision/texture.py, patches.py
    kept[B K E]       = the relevant ones for this question, gated        models/vision/relevance.py
    image[B K D]      = adapter(encoder(kept + positions))                models/vision/encoder.py
    x[B T D]          = image in the first K places, then the text        the decoder, which predicts the answer

Rows have K = vision.max_tokens places for the picture before the text; what is not kept is padding, before the patches:
as in rows of several documents, starts say that no later token looks back at it, and positions count from the first
patch. Which patches are kept depends on the text of the row, but not on the tokens that the model predicts.

Weights: "vision/patches", "vision/relevance", "vision/adapter", the stack "encoder", and the decoder's "ends" and
"layers". The encoder runs on whole rows on each device along tensor; all-reduces are those of its layers, one of the
embeddings of the text for the relevance, 2 (t-1)/t B (T - K) D elements, and with sequence parallelism that of the
picture's gradient (`with_image`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.vision import Vision
from nanotrain_jax.models import decoder, decoder_table, vision_table
from nanotrain_jax.models.contract import Model
from nanotrain_jax.models.parameters import ENCODER, ENDS, VISION
from nanotrain_jax.models.vision import encoder, patches, relevance
from nanotrain_jax.parallel.collectives import Tree, as_varying, own_shard
from nanotrain_jax.parallel.sharding import Rules, path_name
from nanotrain_jax.parallel.tensor import embedding

EMBEDDING = decoder_table.EMBEDDING.removeprefix(f"{ENDS}/")


def build(config: Config, mesh: Mesh) -> Model:
    """Build the model of a resolved config for the training step. Raises ValueError if it cannot run."""
    check(config)
    text = decoder.build(config, mesh, counts_correct=True)
    vision, p = config.vision, config.parallel
    axis = "tensor" if p.tensor > 1 else None
    split_rows = axis if p.sequence_parallel else None

    def init(seed: int, order: Sequence[int] | None = None, put: Callable | None = None) -> Tree:
        return text.init(seed, order, put) | init_vision(config, seed)

    def encode(weights: Tree, batch: Tree, run: Callable) -> Tree:
        tokens_BQ = batch["inputs"][:, vision.max_tokens :]
        x_BQD = embedding.look_up(weights[ENDS][EMBEDDING], tokens_BQ, axis, False, p.vocab_axes)
        is_asked_BQ = not_predicted(batch["targets"][:, vision.max_tokens :])
        x_BKE, budget = look(vision, weights[VISION], batch["images"], relevance.Question(x_BQD, is_asked_BQ))
        x_BKE = run(ENCODER, partial(encoder.layer, is_kept_BK=budget.is_kept_BK, axis=axis), x_BKE)
        image_BKD = encoder.adapt(weights[VISION]["adapter"], x_BKE)
        return {"image": image_BKD, "starts": starts(budget, batch["inputs"].shape[1])}

    def first(weights: Tree, batch: Tree, run: Callable) -> jax.Array:
        return with_image(text.first(weights, batch, run), batch["image"], batch["inputs"].shape[1], split_rows)

    def is_decayed(path: tuple) -> bool:
        return vision_table.INVENTORY[path_name(path)].decay if is_of_vision(path) else text.is_decayed(path)

    def is_partial(path: tuple) -> bool:
        return not is_of_vision(path) and text.has_partial_gradient(path)

    return replace(
        text,
        init=init,
        encode=encode,
        first=first,
        rules=Rules([*vision_table.rules(), *text.rules.pairs]),
        stacks=(ENCODER,),
        used_by_encode=used_by_encode,
        is_decayed=is_decayed,
        has_partial_gradient=is_partial,
        further_inputs={"images": jax.ShapeDtypeStruct((vision.image_size, vision.image_size, 3), jnp.uint8)},
    )


def check(config: Config) -> None:
    """Raise ValueError for a config that no vision-language model can run."""
    p, d, vision = config.parallel, config.data, config.vision
    if p.context > 1:
        raise ValueError(f"vision with parallel.context={p.context}: rows stay whole; use parallel.context=1")
    if p.vocab_over_pipe:
        raise ValueError(
            "vision with parallel.vocab_over_pipe=true: pictures are encoded from whole embeddings; remove the key"
        )
    if not d.attend_across_documents:
        raise ValueError(
            "vision with data.attend_across_documents=false: a row is a picture and its text; remove the key"
        )
    if d.seq_len <= vision.max_tokens:
        raise ValueError(
            f"data.seq_len={d.seq_len} has no place for text after vision.max_tokens={vision.max_tokens} patches; use "
            "more tokens per row, or fewer patches"
        )
    if d.seq_len % 2 and fits_flash(config.model, config.precision.compute):
        raise ValueError(
            f"vision with data.seq_len={d.seq_len}: flash attention cuts rows in two; use data.seq_len="
            f"{d.seq_len + 1}, or model.attention=xla"
        )
    if vision.num_heads % p.tensor:
        raise ValueError(
            f"parallel.tensor={p.tensor} does not divide vision.num_heads={vision.num_heads}; use "
            f"vision.num_heads={-(-vision.num_heads // p.tensor) * p.tensor}"
        )


def is_of_vision(path: tuple) -> bool:
    """True if the weight at this tree path is not the decoder's."""
    return path[0].key in (VISION, ENCODER)


def used_by_encode(ends: Tree) -> Tree:
    """Select what `encode` uses from a tree like the ends: the weights of vision and the embedding of the text."""
    return {VISION: ends[VISION], ENDS: {EMBEDDING: ends[ENDS][EMBEDDING]}}


def init_vision(config: Config, seed: int) -> Tree:
    """Initialize all but the decoder. The same seed gives the same values on every mesh."""
    vision, d_model = config.vision, config.model.d_model
    *keys, layer_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), 4)
    layer_keys = jax.random.split(layer_key, vision.num_layers)
    return {
        VISION: {
            "patches": patches.init(vision, keys[0]),
            "relevance": relevance.init(vision, d_model, keys[1]),
            "adapter": encoder.init_adapter(vision, d_model, keys[2]),
        },
        ENCODER: jax.vmap(partial(encoder.init, vision))(layer_keys),
    }


def not_predicted(targets_BQ: jax.Array) -> jax.Array:
    """targets[B Q] -> True for tokens that are no target of the token before them: questions, but no answers [B Q]"""
    return jnp.pad(targets_BQ[:, :-1] < 0, [(0, 0), (1, 0)], constant_values=True)


def look(
    vision: Vision, weights: Tree, image_BHWc: jax.Array, question: relevance.Question
) -> tuple[jax.Array, relevance.Budget]:
    """pictures uint8 [B H W 3] -> the kept patches x[B K E], gated and with positions; which ones they are"""
    x_BCE = patches.embed(vision, weights["patches"], image_BHWc)
    relevance_BC = relevance.relevance(weights["relevance"], x_BCE, question, patches.surroundings(vision))
    budget = relevance.allocate(relevance_BC, vision)
    position_FE = weights["patches"]["position_FE"]
    position_CE = patches.position_features(vision).astype(position_FE.dtype) @ position_FE
    return relevance.kept(x_BCE, relevance_BC, budget) + position_CE[budget.candidate_BK], budget


def starts(budget: relevance.Budget, tokens: int) -> jax.Array:
    """Return for each place of a row where attention begins, int32 [B T]: at the first patch; in padding at 0."""
    padding_B = (~budget.is_kept_BK).sum(1, dtype=jnp.int32)
    place_T = jnp.arange(tokens, dtype=jnp.int32)
    return jnp.where(place_T[None] < padding_B[:, None], 0, padding_B[:, None])


def with_image(x: jax.Array, image_BKD: jax.Array, tokens: int, axis: str | None) -> jax.Array:
    """x[B T D], image[B K D] -> x[B T D] with the image in its first K places. tokens: T.

    axis: x is x[1 BT/axis D], its tokens split over this mesh axis; None: it is whole. Moves nothing; the backward
    all-reduces the gradient of the image over axis, as each device has a part of it: 2 (t-1)/t B K D elements.
    """
    B, K = image_BKD.shape[:2]
    if axis is not None:
        image_BKD = as_varying(image_BKD, (axis,))  # here, not where it is padded to B T D
    image = jnp.pad(image_BKD.astype(x.dtype), [(0, 0), (0, tokens - K), (0, 0)])
    is_image = jnp.broadcast_to(jnp.arange(tokens)[None] < K, (B, tokens))[..., None]
    if axis is not None:
        image, is_image = (own_shard(part.reshape(1, B * tokens, -1), axis, 1) for part in (image, is_image))
    return jnp.where(is_image, image, x)
