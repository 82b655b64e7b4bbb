"""The encoder of patches: layers of attention and MLP as in a ViT (arXiv 2010.11929), and the adapter after them.

Over the tensor axis heads and F are split as in the decoder, without sequence parallelism: x[B K E] is whole on each
device, and a layer all-reduces it twice in the forward and twice in the backward, 2 (t-1)/t B K E elements each. Names:
B batch, K tokens, E width, N heads, H head dim, F = 4 E, D width of the language model.
"""

import jax
import jax.numpy as jnp
import numpy as np

from nanotrain_jax.config.vision import Vision
from nanotrain_jax.models.ops import gelu, normalize
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.tensor import tensor

Weights = dict[str, jax.Array]
EPS = 1e-5


def init(config: Vision, key: jax.Array) -> Weights:
    """Initialize a layer: normal, std one over the root of the inputs, for what is added to x also over 2 L."""
    E, N = config.width, config.num_heads
    keys = iter(jax.random.split(key, 6))

    def normal(inputs: int, *shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / np.sqrt(inputs)

    depth = 2 * config.num_layers
    return {
        **{f"{name}_ENH": normal(E, E, N, E // N) for name in "qkv"},
        "out_NHE": normal(E * depth, N, E // N, E),
        "up_EF": normal(E, E, 4 * E),
        "down_FE": normal(4 * E * depth, 4 * E, E),
        "gain_attention_E": jnp.ones(E),
        "gain_mlp_E": jnp.ones(E),
    }


def layer(weights: Weights, x_BKE: jax.Array, is_kept_BK: jax.Array, axis: str | None) -> jax.Array:
    """x[B K E] -> x[B K E]; no token attends to padding. axis: the mesh axis that splits heads and F; None: none."""
    h_BKE = normalize(x_BKE, weights["gain_attention_E"], None, EPS)
    qkv = tensor.columns(h_BKE, [weights[f"{name}_ENH"] for name in "qkv"], axis, sequence_parallel=False)
    q, k, v = (remat.name(x_BKNH, name) for x_BKNH, name in zip(qkv, "qkv", strict=True))
    y_BKNH = jax.nn.dot_product_attention(q, k, v, mask=is_kept_BK[:, None, None])
    y_BKE = tensor.row(y_BKNH, weights["out_NHE"], axis, sequence_parallel=False)
    x_BKE = x_BKE + remat.name(y_BKE, "attention_out")
    h_BKE = normalize(x_BKE, weights["gain_mlp_E"], None, EPS)
    (up_BKF,) = tensor.columns(h_BKE, [weights["up_EF"]], axis, sequence_parallel=False)
    return x_BKE + tensor.row(gelu(remat.name(up_BKF, "up")), weights["down_FE"], axis, sequence_parallel=False)


def init_adapter(config: Vision, d_model: int, key: jax.Array) -> Weights:
    """Initialize the adapter: normal, std one over the root of the inputs; the gate zero."""
    E, keys = config.width, jax.random.split(key)
    return {
        "gain_E": jnp.ones(E),
        "gate_E": jnp.zeros(E),
        "up_ED": jax.random.normal(keys[0], (E, d_model)) / np.sqrt(E),
        "down_DD": jax.random.normal(keys[1], (d_model, d_model)) / np.sqrt(d_model),
    }


def adapt(weights: Weights, x_BKE: jax.Array) -> jax.Array:
    """x[B K E] -> tokens of the language model [B K D]: an MLP, times a gate of each token, 0 to 1. Not split."""
    h_BKE = normalize(x_BKE, weights["gain_E"], None, EPS)
    gate_BK = jax.nn.sigmoid(h_BKE @ weights["gate_E"])
    return gelu(h_BKE @ weights["up_ED"]) @ weights["down_DD"] * gate_BK[..., None]
