"""Features of the families: the logits of a float64 oracle."""

import families_oracle
import jax
import numpy as np
import pytest
from conftest import resolved, small
from flax import nnx

from nanotrain_jax.models import decoder

TOKENS = 48
CASES = {  # family, and keys of model: none is what the family has without them
    "gpt2": ("gpt2", {}),
    "heads wider than d_model": ("llama", {"head_dim": 12}),
    "gpt2 with exact GELU": ("gpt2", {"activation": "gelu"}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"tie_embeddings": True}),
    "qwen3": ("qwen3", {"num_kv_heads": 1, "head_dim": 10}),
    "gated GELU": ("llama", {"activation": "gelu"}),
    "gpt2 without biases of queries, keys and values": ("gpt2", {"qkv_bias": False}),
}


def built(family, keys):
    """The model of a small config, its decoder with random gains and biases, and its parameters."""
    config, _ = resolved(small(family, model=keys, data={"seq_len": TOKENS}))
    params = decoder.init(config.model, 0)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda w: np.asarray(w) + rng.normal(0, 0.2, w.shape).astype(np.float32), params)
    graph, _ = nnx.split(nnx.eval_shape(lambda: decoder.Decoder(config.model, nnx.Rngs(0))), nnx.Param)
    return config.model, nnx.merge(graph, params), params


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_a_float64_oracle(name):
    model, module, params = built(*CASES[name])
    tokens = np.random.default_rng(0).integers(61, size=(2, TOKENS), dtype=np.int32)
    exact = families_oracle.logits(model, params, tokens)
    np.testing.assert_allclose(module(tokens), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
