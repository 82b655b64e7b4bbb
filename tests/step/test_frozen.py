"""Frozen parts: equal to a learning rate of zero there, without gradients, moments and master weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ALL, case
from conftest import (
    GRADS,
    LOSS,
    STATE,
    built,
    compiled_text,
    cover,
    on_devices,
    padded,
    random_tokens,
    resolved,
    starting_from,
)
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.audit import matmuls
from nanotrain_jax.costs import communication, flops, memory
from nanotrain_jax.models import decoder
from nanotrain_jax.parallel.sharding import path_name
from nanotrain_jax.step import build as steps

LAYERS, MLP, ENDS, ATTENTION = "layers/", "/mlp/", "^ends/", "attention"
CASES = [
    (case("data 2 tensor 2", zero=2), ATTENTION),
    (case("data 4", "gpt2", zero=3, microbatches=2, remat="full"), ENDS),
    (case("pipe 2 data 2", zero=3, microbatches=4, schedule="zero_bubble"), MLP),
    (case("pipe 2 tensor 2", "gpt2", microbatches=2), LAYERS),
]
MORE = [
    (case("data 2"), LAYERS),
    (case("data 2 replica 2", zero=1, microbatches=2), MLP),
    (case("data 8", "gpt2", zero=1, grad_reduce="per_layer", microbatches=2), MLP),
    (case("data 8", zero=0, grad_reduce="per_layer"), ENDS),
    (case("data 4", zero=3, prefetch=True, microbatches=2), MLP),
    (case("data 4", zero=3, prefetch=True), LAYERS),
    (case("pipe 2 data 2", zero=3, microbatches=4, schedule="zero_bubble"), LAYERS),
    (case("pipe 2 data 2", zero=1, microbatches=4, grad_reduce="per_layer"), ATTENTION),
    (case("pipe 2 data 2", zero=2, microbatches=4, idle="mask"), ENDS),
    (case("pipe 2 data 2", microbatches=4, vocab_over_pipe=True), ATTENTION),
    (case("context 2 data 2", zero=3), MLP),
]


def tree_of(layout, *patterns, **sections):
    return layout.tree(train={"seed": 3, "freeze": list(patterns)}, **sections)


def frozen_leaves(tree, pattern):
    """Return {path: array} of the leaves of a tree like the parameters in whose path a pattern is."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    word = pattern.strip("^")
    return {path_name(path): x for path, x in leaves if word in path_name(path)}


@pytest.mark.parametrize(
    "layout_and_pattern", cover(CASES[2:3], [*CASES[:2], *CASES[3:], *MORE], lambda case: f"{case[0]} {case[1]}")
)
def test_a_frozen_part_is_as_one_with_a_learning_rate_of_zero(layout_and_pattern):
    layout, pattern = layout_and_pattern
    equals_a_zero_learning_rate(built(tree_of(layout, pattern)), pattern)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # one array for embedding and head
@pytest.mark.parametrize("pattern", [LAYERS, MLP, ENDS])
def test_frozen_parts_in_host_memory(pattern, family):
    layout = case("data 2", family, zero=3, persist_below=100, microbatches=2)
    tree = layout.tree(train={"seed": 3, "freeze": [pattern]})
    equals_a_zero_learning_rate(built(tree | {"memory": ALL | {"remat": "full"}}), pattern)


def equals_a_zero_learning_rate(step, pattern):
    """Compare 3 updates with the oracle's: losses, norms of gradients, weights, moments of what is trained."""
    config = step.plan.config
    start = jax.device_get(decoder.init(config.model, config.train.seed))
    tokens = random_tokens(config, count=3)
    params, m, _, log = oracle.train(start, tokens, lr=1e-2, frozen=(pattern.strip("^"),))
    state = starting_from(step, start)
    start = padded(start, step.state.params)
    for batch, (loss, _, norm) in zip(tokens, log, strict=True):
        state, metrics, _ = step.train(state, on_devices(batch, step))
        np.testing.assert_allclose(metrics["loss"], loss, **LOSS)
        np.testing.assert_allclose(metrics["grad_norm"], norm, **GRADS)
    state = step.in_layer_order(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), state.params, padded(params, state.params))
    moments = state.opt.moments[0].mu
    assert not frozen_leaves(moments, pattern)
    for path, moment in frozen_leaves(moments, "").items():
        np.testing.assert_allclose(moment, padded(frozen_leaves(m, "")[path], moment), **STATE)
    frozen, before = (frozen_leaves(tree, pattern) for tree in (state.params, start))
    assert frozen
    for path, weight in frozen.items():
        np.testing.assert_array_equal(weight, before[path])


@pytest.mark.parametrize("zero", cover([1, 3], [0], str))
def test_a_frozen_parameter_takes_two_bytes(zero):
    layout = case("data 4", zero=zero, persist_below=0)
    config, mesh = resolved(tree_of(layout, LAYERS, precision={"compute": "bfloat16"}))
    step = steps.build(config, mesh)
    shards = 4 if zero == 3 else 1
    count = sum(x.size for x in jax.tree.leaves(step.state.params["layers"]))
    state = step.init()
    of_layers = [x for path, x in jax.tree_util.tree_leaves_with_path(state) if "layers" in jax.tree_util.keystr(path)]
    assert sum(x.addressable_shards[0].data.nbytes for x in of_layers) == 2 * count / shards
    assert {x.dtype for x in of_layers} == {jnp.dtype("bfloat16")}


PRICED = [
    (case("data 2 tensor 2", zero=2, microbatches=2), "/mlp/"),
    (case("data 2 tensor 2", "gpt2", "full", zero=3), "^layers/"),
    (case("pipe 2 data 2", zero=1, microbatches=4), "^layers/"),
]


MORE_PRICED = [
    (case("data 2 tensor 2", zero=1, microbatches=2), "embedding|/mlp/"),
    (case("data 2", remat="selective", zero=2, microbatches=2), "attention"),
]


@pytest.mark.parametrize(
    "layout_and_pattern", cover(PRICED[2:], [*PRICED[:2], *MORE_PRICED], lambda case: f"{case[0]} {case[1]}")
)
def test_bytes_and_flops_of_frozen_parts_equal_the_closed_forms(layout_and_pattern):
    layout, pattern = layout_and_pattern
    tree = tree_of(layout, pattern)
    moves_the_bytes_of_the_papers(tree)
    step = built(tree)
    config, text = step.plan.config, compiled_text(step)
    found = matmuls.flops(text, communication.conditional_rates(config))
    assert found == pytest.approx(flops.step_flops(config), rel=1e-6)
    assert found < 0.95 * flops.step_flops(config.replace("train", freeze=()))
    local = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.state)]
    assert sum(local) == pytest.approx(sum(memory.state(config).values()), abs=100)  # counters
