"""A small model of plain functions for tests of loops over layers: embedding, layers with an MLP and a gain, head."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

D, F, V, T = 8, 16, 11, 5


def a_model(layers, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)

    ends = {"embedding": draw(V, D), "head": draw(V, D)}
    return ends, {"up": draw(layers, D, F), "down": draw(layers, F, D), "gain": 1 + draw(layers, D)}


def some_tokens(microbatches, rows, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(V, size=(microbatches, rows, T)), jnp.int32)


def layer(weights, x, tokens):
    return x + (jnp.tanh(x @ weights["up"]) @ weights["down"]) * weights["gain"][None, None]


def first(ends, tokens):
    return ends["embedding"][tokens]


def last(ends, x, tokens):
    log_p = jax.nn.log_softmax(x @ ends["head"].T)
    return -jnp.take_along_axis(log_p, tokens[..., None], -1).sum()


def one_device(ends, layers, tokens, first=first, layer=layer, last=last):
    def of_one(tokens):
        x, _ = lax.scan(lambda x, weights: (layer(weights, x, tokens), None), first(ends, tokens), layers)
        return last(ends, x, tokens)

    return sum(of_one(microbatch) for microbatch in tokens)
