"""A model with an encoder, for model.factory: the plain one, after tokens that an encoder of two layers has mixed."""

import dataclasses

import jax
import jax.numpy as jnp
import plain_model

from nanotrain_jax import Rules, initializer

NUM_LAYERS = 2


def build(config, mesh):
    m, D = config.model, config.model.d_model
    plain = plain_model.build(config, mesh)

    def normal(key, *shape):
        return 0.05 * jax.random.normal(key, shape)

    def ends(key):
        return plain.init(config.train.seed)["ends"] | {"patches_VD": normal(key, m.vocab_size, D)}

    def layer_weights(key):
        in_key, out_key, _ = jax.random.split(key, 3)
        return {"in_DF": normal(in_key, D, 4 * D), "out_FD": normal(out_key, 4 * D, D), "gain_D": jnp.ones(D)}

    def encoder_layer(w, x_BTD):
        return plain.layer(w, jnp.flip(x_BTD, 1), {})

    def encode(w, batch, run):
        x_BTD = run("encoder", encoder_layer, w["ends"]["patches_VD"][batch["inputs"]])
        return {"encoded": x_BTD, "parity": batch["inputs"].sum(1) % 2}

    def first(w, batch, run):
        return plain.first(w, batch, run) + 3 * batch["encoded"]

    def layer(w, x_BTD, batch):
        y_BTD = plain.layer(w, x_BTD, batch)
        return jnp.where((batch["parity"] == 0)[:, None, None], y_BTD, x_BTD + 0.5 * (y_BTD - x_BTD))

    return dataclasses.replace(
        plain,
        init=initializer(ends, layer_weights, m.num_layers, {"encoder": (layer_weights, NUM_LAYERS)}),
        encode=encode,
        first=first,
        layer=layer,
        rules=Rules([*plain_model.RULES.pairs, ("patches_VD", "V D")]),
        stacks=("encoder",),
        used_by_encode=lambda ends: {"ends": {"patches_VD": ends["ends"]["patches_VD"]}},
    )
