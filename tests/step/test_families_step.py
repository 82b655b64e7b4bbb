"""Features of the families in every layout: the numbers of one device, the bytes of the papers."""

import chex
import jax
import numpy as np
import pytest
from cases import case as layout_case
from conftest import GRADS, LOSS, built, cover, on_devices, padded, random_tokens, resolved, starting_from
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.models import decoder

ULYSSES = {"context_attention": "ulysses"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 8, "beta_fast": 2.0}
FEATURES = {  # family, and keys of model: all at once
    "qwen3": (
        "qwen3",
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 6, "qkv_bias": True, "rope_scaling": YARN, "sliding_window": 5},
    ),
    "gemma3": (
        "gemma3",
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "global_layers": "every:2", "sliding_window": 5},
    ),
}
LAYOUTS = {
    "stages": ("tensor 2 pipe 2", "none", {"microbatches": 4, "zero": 0}),
    "tensor": ("tensor 4", "selective", {"zero": 0, "sequence_parallel": False}),
    "ring": ("data 2 context 2", "full", {"zero": 3, "microbatches": 2}),
    "ulysses": ("context 2 tensor 2", "selective", {"zero": 1} | ULYSSES),
    "ZeRO 3": ("data 2", "none", {"zero": 3}),
}


def tree(name, layout):
    family, model = FEATURES[name]
    axes, remat, parallel = LAYOUTS.get(layout, (layout, "none", {}))
    plain = layout_case(axes, family, remat, model, **parallel).tree(parallel={"persist_below": 64})
    return plain | {"data": plain["data"] | {"attend_across_documents": "within documents" not in name}}


def trained(tree, start):
    """Two updates of a config, of weights in layer order -> losses and norms, the first moment after the first."""
    step = built(tree)
    state = starting_from(step, start)
    log, first = [], None
    for tokens in random_tokens(step.plan.config, count=2):
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        log.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        first = first or jax.device_get(step.in_layer_order(state).opt.moments[0].mu)
    return np.array(log), first


@pytest.fixture(scope="module")
def one_device():
    """Return weights that are all random, gains and biases too, and their updates on one device."""
    found = {}

    def of(name):
        if name not in found:
            config, _ = resolved(tree(name, "data 1"))
            rng = np.random.default_rng(0)
            params = jax.tree_util.tree_map_with_path(
                lambda path, w: w if "is_local" in path[-1].key else w + rng.normal(0, 0.1, w.shape).astype(w.dtype),
                jax.device_get(decoder.init(config.model, config.train.seed)),
            )
            found[name] = params, *trained(tree(name, "data 1"), params)
        return found[name]

    return of


CASES = [(name, layout) for name in FEATURES for layout in LAYOUTS]
FIRST = [("gemma3", "ring")]


@pytest.mark.parametrize("case", cover(FIRST, [c for c in CASES if c not in FIRST]))
def test_layouts_equal_one_device_and_move_the_bytes_of_the_papers(case, one_device):
    name, layout = case
    start, log, moment = one_device(name)
    found_log, found_moment = trained(tree(name, layout), start)
    np.testing.assert_allclose(found_log[:, 0], log[:, 0], **LOSS)
    np.testing.assert_allclose(found_log[:, 1], log[:, 1], **GRADS)
    chex.assert_trees_all_close(found_moment, padded(moment, found_moment), **GRADS)
    moves_the_bytes_of_the_papers(tree(name, layout))
