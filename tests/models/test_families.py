"""Features of the families: the logits of a float64 oracle."""

from functools import partial

import families_oracle
import jax
import numpy as np
import pytest
from conftest import resolved, small
from flax import nnx

from nanotrain_jax.models import decoder
from nanotrain_jax.models.ops import Rope

TOKENS = 48  # more than the original length of a scaling
WIDE = {"head_dim": 32, "rope_theta": 100.0}  # so that frequencies are of every kind
YARN = {"type": "yarn", "factor": 3.0, "original_max_seq_len": 16, "beta_fast": 4.0, "beta_slow": 0.5}
CASES = {  # family, and keys of model: none is what the family has without them
    "gpt2": ("gpt2", {}),
    "heads wider than d_model": ("llama", {"head_dim": 12}),
    "gpt2 with exact GELU": ("gpt2", {"activation": "gelu"}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"tie_embeddings": True}),
    "qwen3": ("qwen3", {"num_kv_heads": 1, "head_dim": 10}),
    "rotary, linear": ("llama", WIDE | {"rope_scaling": {"type": "linear", "factor": 4}}),
    "rotary, llama3": ("llama", WIDE | {"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_seq_len": 32}}),
    "rotary, yarn": ("qwen3", WIDE | {"rope_scaling": YARN}),
    "rotary, yarn with a factor": ("llama", WIDE | {"rope_scaling": YARN | {"attention_factor": 1.5}}),
    "sliding window": ("mistral", {"sliding_window": 7}),
    "window longer than the row": ("mistral", {"sliding_window": 64}),
    "qwen2, a window from the second layer on": ("qwen2", {"sliding_window": 7, "global_layers": "first:1"}),
    "gemma3": ("gemma3", {"num_layers": 7, "sliding_window": 7, "rope_theta": 1e4, "rope_local_theta": 100.0}),
    "experts": ("qwen3", {"experts": {"num": 6, "top_k": 2, "d_ff": 64}}),
    "experts, sigmoids": (
        "llama",
        {"experts": {"num": 4, "top_k": 3, "d_ff": 64, "shared": 2, "router": "sigmoid", "normalize": False}},
    ),
    "experts, gates of DeepSeek-V3": (
        "llama",
        {"experts": {"num": 4, "top_k": 2, "d_ff": 64, "router": "sigmoid", "gate_scale": 2.5}},
    ),
    "gated GELU": ("llama", {"activation": "gelu"}),
    "gpt2 without biases of queries, keys and values": ("gpt2", {"qkv_bias": False}),
}


def built(family, keys):
    """The model of a small config, its decoder with random gains and biases, and its parameters."""
    config, _ = resolved(small(family, model=keys, data={"seq_len": TOKENS}))
    params = decoder.init(config.model, 0)
    rng = np.random.default_rng(1)
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: w if "is_local" in path[-1].key else w + rng.normal(0, 0.2, w.shape).astype(np.float32), params
    )
    graph, _ = nnx.split(nnx.eval_shape(lambda: decoder.Decoder(config.model, nnx.Rngs(0))), nnx.Param)
    return config.model, nnx.merge(graph, params), params


@pytest.mark.parametrize("name", ["rotary, llama3", "rotary, yarn"])
def test_a_scaling_keeps_some_frequencies_divides_others_and_some_in_part(name):
    config, _ = resolved(small(CASES[name][0], model=CASES[name][1]))
    theta, scaling = config.model.rope_theta, config.model.rope_scaling
    ratio = Rope(theta, scaling).frequencies(32) / Rope(theta).frequencies(32) * scaling.factor
    np.testing.assert_allclose([ratio[0], ratio[-1]], [scaling.factor, 1], rtol=1e-5)
    assert ((ratio > 1.01) & (ratio < scaling.factor - 0.01)).any()


def test_layers_created_one_at_a_time_and_in_another_order_are_the_same():
    config, _ = resolved(small(CASES["gemma3"][0], model=CASES["gemma3"][1]))
    order = [6, 5, 3, 4, 0, 1, 2]
    (layers,) = decoder.init(config.model, 0, order=order, put=lambda layer: (layer,))["layers"]
    together = decoder.init(config.model, 0, order=order)["layers"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), layers, together)
    assert [order[i] for i in np.flatnonzero(layers["attention"]["is_local_1"] == 0)] == [5]  # the sixth layer


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_a_float64_oracle(name):
    model, module, params = built(*CASES[name])
    tokens = np.random.default_rng(0).integers(61, size=(2, TOKENS), dtype=np.int32)
    exact = families_oracle.logits(model, params, tokens)
    np.testing.assert_allclose(module(tokens), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
