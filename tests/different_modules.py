"""Four different modules that classify small images: patches, pooling attention, an MLP, a head with the losses."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nanotrain_jax.parallel.pipeline.heterogeneous import StageModule

SIDE, CLASSES = 8, 5
HOW = {"window_strides": (2, 2), "padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def normal(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))


def init_patches(key):
    return {"kernel": normal(key, 2, 2, 3, 16), "bias": jnp.full(16, 0.1)}


def patches(w, x, batch):
    """image[B 8 8 3] -> x[B 16 16], a token for each patch of 2 x 2"""
    x = lax.conv_general_dilated(batch["image"], w["kernel"], **HOW)
    return jax.nn.gelu(x.reshape(x.shape[0], -1, 16) + w["bias"][None, None])


def init_pooling(key):
    keys = jax.random.split(key, 3)
    return {"query": normal(keys[0], 4, 16), "kv": {"key": normal(keys[1], 16, 16), "value": normal(keys[2], 16, 24)}}


def pooling(axis):
    """A module whose mean is over all devices along a mesh axis: it all-reduces."""

    def apply(w, x, batch):
        """x[B 16 16] -> {tokens[B 4 24], mean[B 16]}: four learned queries attend to all patches"""
        mean = x.mean((0, 1)) if axis is None else lax.pmean(x.mean((0, 1)), axis)
        x = x - mean[None, None]
        scores = jnp.einsum("QD,BTD->BQT", w["query"], x @ w["kv"]["key"])
        return {"tokens": jax.nn.softmax(scores) @ (x @ w["kv"]["value"]), "mean": x.mean(1)}

    return apply


def init_mlp(key):
    up, down, mean = jax.random.split(key, 3)
    return {
        "scale": jnp.ones(24),
        "up": normal(up, 24, 80),
        "down": normal(down, 80, 24),
        "mean": normal(mean, 16, 24),
    }


def mlp(w, x, batch):
    """{tokens[B 4 24], mean[B 16]} -> x[B 24]"""
    tokens = x["tokens"] * w["scale"][None, None]
    return (tokens + jnp.tanh(tokens @ w["up"]) @ w["down"]).sum(1) + x["mean"] @ w["mean"]


def init_head(key):
    return {"kernel": normal(key, 24, CLASSES), "bias": jnp.zeros(CLASSES)}


def head(w, x, batch):
    """x[B 24] -> losses[B]"""
    log_p = jax.nn.log_softmax(x @ w["kernel"] + w["bias"][None])
    return -jnp.take_along_axis(log_p, batch["label"][:, None], 1)[:, 0]


def modules(axis=None):
    return [
        StageModule("patches", init_patches, patches),
        StageModule("pooling", init_pooling, pooling(axis)),
        StageModule("mlp", init_mlp, mlp),
        StageModule("head", init_head, head),
    ]


def images(microbatches, rows):
    """-> {image[M B 8 8 3], label[M B]}"""
    rng = np.random.default_rng(0)
    image = rng.normal(size=(microbatches, rows, SIDE, SIDE, 3)).astype(np.float32)
    label = rng.integers(CLASSES, size=(microbatches, rows)).astype(np.int32)
    return {"image": jnp.asarray(image), "label": jnp.asarray(label)}


def one_device(weights, batch):
    """The sum of all losses, by plain composition."""

    def of_one(microbatch):
        x = None
        for module, own in zip(modules(), weights, strict=True):
            x = module.apply(own, x, microbatch)
        return x.sum()

    return lax.map(of_one, batch).sum()
