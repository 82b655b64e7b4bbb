"""The decoder with context parallelism: the numbers of one device, the bytes of the papers."""

import jax
import numpy as np
import pytest
from cases import PARAMS, case
from conftest import (
    cover,
    equals_the_oracle,
    on_devices,
    random_tokens,
    resolved,
    run,
    small,
    stays_near_the_oracle,
)
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.parallel.context import context
from nanotrain_jax.step import build as steps


def split(layout, family, kv_heads, remat="none", loss_chunk=0, **parallel):
    """A decoder of 8 heads and kv_heads."""
    model = {"num_heads": 8, "num_kv_heads": kv_heads} | ({"loss_chunk": loss_chunk} if loss_chunk else {})
    return case(layout, family, remat, model, **parallel)


def tree(case, **memory):
    plain = case.tree(parallel={"persist_below": 64})
    return plain | {"memory": plain["memory"] | memory}


GATHER, ULYSSES = {"context_attention": "gather"}, {"context_attention": "ulysses"}
# Ring and Ulysses, which is in the default run, as ring is in test_families_step.py.
COVER = [
    split("data 2 context 4", "llama", 2, "selective", zero=3, microbatches=2),
    split("context 2 tensor 4", "llama", 2, "selective", zero=1, sequence_parallel=False, microbatches=2, **ULYSSES),
]
MORE = [
    split("context 8", "gpt2", 1, zero=3, **ULYSSES),
    split("context 2", "gpt2", 8, "full", zero=0),
    split("context 8", "llama", 1, zero=3),
    split("context 4", "llama", 8, "full", zero=3, microbatches=2),
    split("data 4 context 2", "gpt2", 2, zero=1, microbatches=2, grad_reduce="per_layer"),
    split("context 4 tensor 2", "gpt2", 1, "selective", zero=2, sequence_parallel=False),
    split("data 2 context 2 tensor 2", "llama", 8, "block:2", zero=3),
    split("data 2 context 2", "llama", 2, "full", zero=3, prefetch=True, microbatches=2),
    split("replica 2 context 2 tensor 2", "gpt2", 2, loss_chunk=16, zero=2, **GATHER),
    split("context 8", "llama", 8, "full", zero=2, **GATHER),
    split("data 2 context 4", "llama", 1, zero=3, **GATHER),
    split("replica 2 data 2 context 2", "gpt2", 8, "selective", zero=3, **GATHER),
    split("context 8", "llama", 8, "full", zero=0, **ULYSSES),
    split("context 4 tensor 2", "gpt2", 2, "block:2", zero=3, **ULYSSES),
    split("data 2 context 4", "llama", 2, zero=2, microbatches=2, **ULYSSES),
]


@pytest.mark.parametrize("case", cover(COVER[1:], COVER[:1] + MORE, str))
def test_the_decoder_equals_the_oracle_and_moves_the_bytes_of_the_papers(case, expected):
    equals_the_oracle(tree(case), expected)
    moves_the_bytes_of_the_papers(tree(case))


def piped(layout, kv_heads, **parallel):
    return case(layout, "gpt2", parallel.pop("remat", "none"), {"num_layers": 8, "num_kv_heads": kv_heads}, **parallel)


@pytest.mark.parametrize(
    "case",
    cover(
        [],
        [
            piped("pipe 2 context 2 tensor 2", 4, schedule="zb_h1", microbatches=4, zero=3, **GATHER),
            piped("pipe 2 data 2 context 2", 2, remat="full", microbatches=4, zero=1, idle="mask"),
            piped("pipe 4 context 2", 4, schedule="interleaved", chunks=2, microbatches=8, zero=2, **ULYSSES),
            piped("pipe 2 context 4", 4, remat="selective", schedule="zero_bubble", microbatches=8, idle="mask"),
        ],
        str,
    ),
)
def test_stages_with_context_equal_the_oracle(case, expected):
    equals_the_oracle(tree(case), expected)
    if case.parallel.get("idle") != "mask":  # masked stages also move discarded values
        moves_the_bytes_of_the_papers(tree(case))


@pytest.mark.long
def test_offload_with_context_equals_the_oracle(expected):
    layout = split("data 2 context 2 tensor 2", "llama", 8, "selective", zero=3)
    equals_the_oracle(tree(layout, **PARAMS, offload_activations="host"), expected)


@pytest.mark.parametrize("kind", cover([], ["ulysses", "ring"]))
def test_bfloat16_stays_near_float32(kind, expected):
    layout = split("data 2 context 4", "llama", 2, "selective", zero=3, microbatches=2, context_attention=kind)
    stays_near_the_oracle(tree(layout) | {"precision": {"compute": "bfloat16"}}, expected, 2**-8)


@pytest.mark.long
def test_evaluation_is_that_of_one_device():
    losses = []
    for parallel in ({"data": 1}, {"data": 2, "context": 4}, {"context": 2, "pipe": 2, "data": 1} | GATHER):
        config, mesh = resolved(small(parallel=parallel | {"microbatches": 2}))
        step = steps.build(config, mesh)
        tokens = random_tokens(config)[0]
        tokens[3:] = -1  # rows of padding, as in the last batch of an evaluation
        batch = on_devices(np.where(tokens < 0, 0, tokens), step)
        targets = on_devices(tokens, step)["targets"]
        total, count = step.evaluate(step.init().params, batch | {"targets": targets})
        assert int(count) == 3 * config.data.seq_len
        losses.append(float(total))
    np.testing.assert_allclose(losses[1:], losses[0], rtol=2e-6)


@pytest.mark.long
def test_the_state_of_one_context_size_continues_on_another():
    layouts = (
        {"data": 8, "zero": 2},
        {"data": 2, "context": 4, "zero": 3},
        {"data": 1, "context": 8, "zero": 1} | ULYSSES,
    )
    model = {"num_heads": 8, "num_kv_heads": 8}
    start, _ = run(small(model=model, parallel=layouts[0]), updates=1)
    losses = []
    for parallel in layouts:
        config, mesh = resolved(small(model=model, parallel=parallel))
        step = steps.build(config, mesh)
        state = jax.device_put(jax.device_get(start), jax.tree.map(lambda x: x.sharding, step.state))
        state, metrics, _ = step.train(state, on_devices(random_tokens(config, seed=1)[0], step))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1:], losses[0], rtol=2e-6)


def test_positions_of_devices_are_the_order_of_tokens():
    mesh = resolved(small(parallel={"data": 2, "context": 4}))[1]

    def positions(tokens, is_zigzag):
        local = jax.shard_map(
            lambda: context.own_positions(tokens // 4, is_zigzag=is_zigzag),
            mesh=mesh, in_specs=(), out_specs=jax.P("context"),
        )  # fmt: skip
        return np.asarray(jax.jit(local)())

    np.testing.assert_array_equal(positions(48, True), context.zigzag_order(48, 4))
    np.testing.assert_array_equal(positions(48, False), np.arange(48))
