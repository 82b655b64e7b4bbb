"""The decoder with a cache: the next tokens of each row attend to the keys and values of all before them.

A layer has a cache of keys[M S H] and values[M S H], S slots for tokens of M = B K rows and heads: as the matmuls of
attention take them, so that XLA stores new tokens in place and copies nothing. All rows continue at the same slot; a
shorter row starts at a later one (`Place`), and its positions count from there.

With more devices along tensor than key and value heads, each device caches the head of its own queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import contract
from nanotrain_jax.models.contract import Place
from nanotrain_jax.models.decoder_layer import Attention
from nanotrain_jax.models.modules import Split
from nanotrain_jax.parallel.collectives import Tree, all_gather, as_varying, varying_axes
from nanotrain_jax.parallel.tensor import tensor
from nanotrain_jax.parallel.transposed import alone, multiplied

KEYS, VALUES = "keys_MSH", "values_MSH"
TRANSPOSED = {"q_DNH": 1, "k_DKH": 1, "v_DKH": 1, "out_NHD": 2, "up_DF": 1, "gate_DF": 1, "down_FD": 1}
HIDDEN = -1e30  # score of a slot that a token does not see


def build(config: Model, split: Split, graphs: tuple, ends: Callable[[Tree], nnx.Module]) -> contract.Decode:
    """Return the functions of a resolved model. graphs: of `decoder.Graphs`; ends(weights) -> the module."""

    def first(weights: Tree, tokens_BT: jax.Array, place: Place) -> jax.Array:
        return ends(weights).embed_at(tokens_BT, place.positions(tokens_BT.shape[1]))

    def layer(weights: Tree, x_BTD: jax.Array, cache: Tree, place: Place) -> tuple[jax.Array, Tree]:
        module = nnx.merge(graphs.of_layer(weights), weights)
        y_BTD, cache = attend(module.attention, module.norm_attention(x_BTD), cache, place)
        return module.after_attention(x_BTD, y_BTD)[0], cache

    def last(weights: Tree, x_BTD: jax.Array) -> jax.Array:
        module, axis = ends(weights), split.axis
        x_RD = tensor.enter(module.norm(x_BTD), axis, False).reshape(-1, x_BTD.shape[-1])
        logits_BTV = multiplied(x_RD, module.head(), jnp.float32).reshape(*x_BTD.shape[:2], -1)
        if axis is not None:
            (logits_BTV,) = all_gather([logits_BTV], axis, [2], invarying=True)
        return logits_BTV[..., : config.vocab_size]

    axes = "data" if split.axis is None else f"data,{split.axis}"
    layouts = dict.fromkeys((KEYS, VALUES), f"M/{axes} S H")
    return contract.Decode(partial(cache_shapes, config, split), layouts, first, layer, last, TRANSPOSED)


def cache_shapes(config: Model, split: Split, rows: int, slots: int, dtype: jnp.dtype) -> Tree:
    """Return the types of a layer's cache."""
    heads = max(config.num_kv_heads or config.num_heads, split.size)
    shape = rows * heads, slots, config.head_width
    return dict.fromkeys((KEYS, VALUES), jax.ShapeDtypeStruct(shape, dtype))


@jax.named_scope("attention")
def attend(attention: Attention, x_BTD: jax.Array, cache: Tree, place: Place) -> tuple[jax.Array, Tree]:
    """x[B T D], cache -> y[B T D], the cache with the keys and values of x."""
    B, T, _ = x_BTD.shape
    q_BTNH, k_BTKH, v_BTKH = attention.project(x_BTD, B)
    if not attention.features.learned_positions:
        positions_BT = place.positions(T)
        q_BTNH, k_BTKH = attention.rotated(q_BTNH, positions_BT), attention.rotated(k_BTKH, positions_BT)
    cache = {KEYS: _stored(cache[KEYS], k_BTKH, place), VALUES: _stored(cache[VALUES], v_BTKH, place)}
    seen_BTS = place.seen(T, cache[KEYS].shape[1], attention.reach())
    y_BTNH = attention_to(q_BTNH, cache[KEYS], cache[VALUES], seen_BTS)
    return attention.output(y_BTNH, B), cache


def _stored(cache_MSH: jax.Array, new_BTKH: jax.Array, place: Place) -> jax.Array:
    """Write the next tokens to their slots, in place."""
    _, T, _, H = new_BTKH.shape
    new_MTH = jnp.moveaxis(new_BTKH, 2, 1).astype(cache_MSH.dtype).reshape(-1, T, H)
    new_MTH = as_varying(new_MTH, sorted(varying_axes(cache_MSH)))
    return lax.dynamic_update_slice(cache_MSH, new_MTH, (0, place.slot, 0))


@jax.named_scope("kernel")
def attention_to(q_BTNH: jax.Array, k_MSH: jax.Array, v_MSH: jax.Array, seen_BTS: jax.Array) -> jax.Array:
    """q[B T N H], k[B K S H], v[B K S H] -> y[B T N H], of the slots that each token sees; softmax in float32.

    The queries of all heads and tokens that share a key head are the rows of one matmul.
    """
    B, T, N, H = q_BTNH.shape
    K = len(k_MSH) // B
    q_BKGTH = jnp.moveaxis((q_BTNH * H**-0.5).reshape(B, T, K, N // K, H), 1, 3)
    scores_MSQ = jnp.einsum("MSH,MQH->MSQ", k_MSH, q_BKGTH.reshape(B * K, -1, H), preferred_element_type=jnp.float32)
    scores_MQS = jnp.moveaxis(alone(scores_MSQ), 1, 2)  # XLA:CPU reads the first operand two to three times as fast
    scores = jnp.where(seen_BTS[:, None, None], scores_MQS.reshape(B, K, N // K, T, -1), HIDDEN)
    share_MQS = jax.nn.softmax(scores, axis=-1).astype(q_BTNH.dtype).reshape(scores_MQS.shape)
    y_MQH = jnp.einsum("MQS,MSH->MQH", share_MQS, v_MSH)
    return jnp.moveaxis(y_MQH.reshape(B, K, N // K, T, H), 3, 1).reshape(q_BTNH.shape)
