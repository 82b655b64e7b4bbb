"""A model of plain functions, for model.factory: each token gets the mean of its prefix."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from nanotrain_jax import Decode, Model, Rules, columns, initializer, row

RULES = Rules([("in_DF", "L D F/tensor"), ("out_FD", "L F/tensor D"), ("gain_D", "L D"), ("embed_VD|head_VD", "V D")])


def build(config, mesh):
    m, D = config.model, config.model.d_model
    axis = "tensor" if mesh.shape["tensor"] > 1 else None

    def normal(key, *shape):
        return 0.05 * jax.random.normal(key, shape)

    def ends(key):
        embed_key, head_key = jax.random.split(key)
        return {"embed_VD": normal(embed_key, m.vocab_size, D), "head_VD": normal(head_key, m.vocab_size, D)}

    def weights_of_layer(key):
        return {"in_DF": normal(key, D, 4 * D), "out_FD": normal(key, 4 * D, D), "gain_D": jnp.ones(D)}

    def layer(w, x_BTD, batch):
        count_T = jnp.arange(1, x_BTD.shape[1] + 1, dtype=x_BTD.dtype)
        mean_BTD = jnp.cumsum(x_BTD, 1) / count_T[None, :, None] * w["gain_D"][None, None]
        (h_BTF,) = columns(mean_BTD, [w["in_DF"]], axis, sequence_parallel=False)
        return x_BTD + row(jax.nn.gelu(h_BTF), w["out_FD"], axis, sequence_parallel=False)

    def last(w, x_BTD, batch):
        is_target_BT = batch["targets"] >= 0
        logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, w["ends"]["head_VD"], preferred_element_type=jnp.float32)
        labels_BT = jnp.where(is_target_BT, batch["targets"], 0)
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT)
        return jnp.where(is_target_BT, losses_BT, 0.0).sum(), is_target_BT.sum(dtype=jnp.int32)

    return Model(
        init=initializer(ends, weights_of_layer, m.num_layers),
        first=lambda w, batch, run: w["ends"]["embed_VD"][batch["inputs"]],
        layer=layer,
        last=last,
        rules=RULES,
        used_by_first=lambda ends: {"ends": {"embed_VD": ends["ends"]["embed_VD"]}},
        used_by_last=lambda ends: {"ends": {"head_VD": ends["ends"]["head_VD"]}},
    )


def with_decode(config, mesh):
    """The same model with a cache: a layer keeps its input of each slot."""
    model = build(config, mesh)

    def layer(w, x_BTD, cache, place):
        x_BSD = jax.lax.dynamic_update_slice(cache["x_BSD"], x_BTD, (0, place.slot, 0))
        seen_BTS = place.seen(x_BTD.shape[1], x_BSD.shape[1], None).astype(x_BTD.dtype)
        mean_BTD = jnp.einsum("BTS,BSD->BTD", seen_BTS / seen_BTS.sum(-1, keepdims=True), x_BSD)
        axis = "tensor" if mesh.shape["tensor"] > 1 else None
        (h_BTF,) = columns(mean_BTD * w["gain_D"][None, None], [w["in_DF"]], axis, sequence_parallel=False)
        return x_BTD + row(jax.nn.gelu(h_BTF), w["out_FD"], axis, sequence_parallel=False), {"x_BSD": x_BSD}

    def cache(rows, slots, dtype):
        return {"x_BSD": jax.ShapeDtypeStruct((rows, slots, config.model.d_model), dtype)}

    def first(w, tokens_BT, place):
        return w["ends"]["embed_VD"][tokens_BT]

    def last(w, x_BTD):
        return jnp.einsum("BTD,VD->BTV", x_BTD, w["ends"]["head_VD"], preferred_element_type=jnp.float32)

    decode = Decode(cache, {"x_BSD": "B/data S D"}, first, layer, last)
    return dataclasses.replace(model, decode=decode)
