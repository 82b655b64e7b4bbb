"""The decoder, pipelined: the numbers of one device, the bytes of the papers."""

import jax
import numpy as np
import pytest
from conftest import (
    cover,
    equals_the_oracle,
    on_devices,
    random_tokens,
    resolved,
    run,
    skips_an_overflow,
    small,
    stays_near_the_oracle,
)
from test_tensor_step import moves_what_the_papers_say

from nanotrain_jax import step as steps

# Every schedule, stage of ZeRO and remat policy, with 2, 4 and 8 stages; in MORE every schedule with every number of
# stages and every stage of ZeRO that it can have here.
COVER = [  # pipe, data, tensor, schedule, chunks, microbatches, zero, family, remat, idle
    (2, 2, 2, "gpipe", 1, 4, 2, "llama", "selective", "mask"),
    (2, 2, 2, "interleaved", 2, 8, 1, "gpt2", "full", "skip"),
    (4, 2, 1, "zb_h1", 1, 8, 3, "gpt2", "full", "skip"),
    (4, 1, 2, "zero_bubble", 1, 16, 2, "gpt2", "none", "mask"),
    (4, 1, 2, "1f1b_lean", 1, 4, 2, "llama", "block:2", "skip"),
    (8, 1, 1, "1f1b", 1, 32, 0, "gpt2", "selective", "skip"),
]
MORE = [
    (2, 2, 2, "1f1b", 1, 4, 3, "gpt2", "none", "skip"),
    (4, 2, 1, "zb_h2", 1, 16, 3, "llama", "none", "skip"),
    (2, 2, 2, "zero_bubble", 1, 4, 3, "llama", "none", "skip"),
    (2, 2, 2, "zb_h1", 1, 2, 1, "llama", "full", "mask"),
    (2, 4, 1, "interleaved", 4, 4, 3, "llama", "selective", "mask"),
    (2, 4, 1, "1f1b_lean", 1, 8, 0, "gpt2", "none", "skip"),
    (2, 1, 4, "zb_h2", 1, 8, 0, "gpt2", "selective", "skip"),
    (2, 4, 1, "zb_h1", 1, 8, 3, "gpt2", "selective", "skip"),
    (2, 2, 2, "interleaved", 2, 4, 3, "gpt2", "block:2", "skip"),
    (4, 2, 1, "1f1b", 1, 16, 1, "llama", "full", "mask"),
    (4, 2, 1, "1f1b", 1, 8, 2, "gpt2", "none", "skip"),
    (4, 2, 1, "gpipe", 1, 8, 3, "gpt2", "block:2", "skip"),
    (4, 2, 1, "interleaved", 2, 4, 0, "gpt2", "none", "skip"),
    (4, 2, 1, "interleaved", 2, 16, 2, "llama", "full", "skip"),
    (4, 2, 1, "zb_h1", 1, 8, 2, "llama", "selective", "skip"),
    (4, 2, 1, "zb_h2", 1, 8, 1, "gpt2", "full", "mask"),
    (8, 1, 1, "1f1b", 1, 2, 2, "llama", "none", "skip"),  # fewer microbatches than stages
    (8, 1, 1, "gpipe", 1, 16, 1, "llama", "full", "skip"),
    (8, 1, 1, "gpipe", 1, 8, 0, "gpt2", "none", "skip"),
    (8, 1, 1, "zero_bubble", 1, 8, 0, "llama", "none", "skip"),
    (8, 1, 1, "zero_bubble", 1, 32, 1, "gpt2", "full", "skip"),
    (8, 1, 1, "zb_h1", 1, 16, 0, "gpt2", "none", "skip"),
    (8, 1, 1, "zb_h2", 1, 16, 2, "llama", "selective", "skip"),
    (8, 1, 1, "1f1b_lean", 1, 8, 3, "llama", "none", "mask"),
    (8, 1, 1, "1f1b_lean", 1, 16, 1, "gpt2", "full", "skip"),
    (8, 1, 1, "interleaved", 1, 8, 3, "llama", "none", "skip"),
]


def piped(pipe, data, tensor, schedule, chunks, microbatches, zero, family, remat, idle, **more):
    parallel = {
        "pipe": pipe,
        "data": data,
        "tensor": tensor,
        "schedule": schedule,
        "chunks": chunks,
        "microbatches": microbatches,
        "zero": zero,
        "idle": idle,
        "persist_below": 64,
    }
    return small(family, model={"num_layers": 8}, parallel=parallel | more, memory={"remat": remat})


@pytest.mark.parametrize("layout", cover(COVER, MORE))
def test_the_pipelined_decoder_equals_the_oracle_and_moves_what_the_papers_say(layout, expected):
    equals_the_oracle(piped(*layout), expected)
    if layout[-1] == "skip":  # masked stages also move what they throw away
        moves_what_the_papers_say(piped(*layout))


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ((2, 2, 1, "zb_h1", 1, 4, 2, "gpt2", "none", "skip"), {"replica": 2, "bucket_mb": 0.0}),
        ((2, 1, 4, "interleaved", 2, 4, 3, "gpt2", "none", "skip"), {"sequence_parallel": False}),
    ],
)
def test_replicas_and_whole_activations_go_with_stages(layout, more, expected):
    equals_the_oracle(piped(*layout, **more), expected)
    moves_what_the_papers_say(piped(*layout, **more))


def test_tied_embeddings_of_a_llama_learn_at_both_ends(expected):
    tree = piped(2, 2, 2, "zb_h2", 1, 8, 2, "llama", "none", "skip")
    tree["model"]["tie_embeddings"] = True
    equals_the_oracle(tree, expected)
    moves_what_the_papers_say(tree)


def test_chunked_losses_and_clipped_gradients_go_with_stages():
    plain, split = (
        small(model={"num_layers": 4, "loss_chunk": 16}, optimizer={"grad_clip": 0.5}, parallel=parallel)
        for parallel in ({"data": 1}, {"pipe": 4, "data": 2, "microbatches": 4, "zero": 2, "persist_below": 64})
    )
    for a, b in zip(run(plain)[1], run(split)[1], strict=True):
        np.testing.assert_allclose([a["loss"], a["grad_norm"]], [b["loss"], b["grad_norm"]], rtol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        (4, 2, 1, "1f1b", 1, 8, 3, "gpt2", "none", "skip"),
        (2, 2, 2, "interleaved", 2, 4, 0, "llama", "full", "mask"),
    ],
)
def test_evaluation_gives_the_loss_of_training_and_counts_targets(layout):
    config, mesh = resolved(piped(*layout))
    step = steps.build(config, mesh)
    (tokens,) = random_tokens(config)
    batch, state = on_devices(tokens, step), step.init()
    total, count = step.evaluate(state.params, batch)
    assert int(count) == 32 * 16
    _, metrics = step.train(state, batch)
    np.testing.assert_allclose(total / np.float32(count), metrics["loss"], rtol=2e-6)
    halves = [on_devices(half, step) for half in np.split(tokens, 2)]  # smaller batches are as good
    of_halves = [step.evaluate(step.init().params, half) for half in halves]
    assert [int(count) for _, count in of_halves] == [16 * 16] * 2
    np.testing.assert_allclose(of_halves[0][0] + of_halves[1][0], total, rtol=2e-6)
    batch["targets"] = jax.device_put(np.where(tokens[:, 1:] > 30, -1, tokens[:, 1:]), batch["targets"].sharding)
    assert int(step.evaluate(step.init().params, batch)[1]) == (tokens[:, 1:] <= 30).sum()


@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize(
    ("layout", "compute", "error"),
    [
        ((2, 2, 2, "zero_bubble", 1, 4, 1, "llama", "none", "skip"), "bfloat16", 2**-8),
        pytest.param((4, 2, 1, "1f1b", 1, 8, 3, "llama", "full", "skip"), "bfloat16", 2**-8, marks=pytest.mark.long),
        ((2, 2, 2, "interleaved", 2, 4, 2, "llama", "selective", "skip"), "float16", 2**-11),
    ],
)
def test_16_bit_runs_stay_near_float32(layout, compute, error, expected):
    tree = piped(*layout)
    tree["precision"] = {"compute": compute, "loss_scale": "dynamic" if compute == "float16" else "none"}
    stays_near_the_oracle(tree, expected, error)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(("zero", "schedule"), [pytest.param(0, "1f1b", marks=pytest.mark.long), (3, "zb_h1")])
def test_an_overflow_on_one_stage_skips_the_step_on_all(zero, schedule):
    tree = piped(4, 2, 1, schedule, 1, 4, zero, "llama", "none", "skip")
    tree["precision"] = {"compute": "float16", "loss_scale": "dynamic"}
    skips_an_overflow(tree)


def test_each_stage_stores_its_layers_and_the_program_does_not_grow_with_microbatches():
    def built(microbatches):
        config, mesh = resolved(piped(4, 2, 1, "1f1b", 1, microbatches, 1, "llama", "none", "skip"))
        step = steps.build(config, mesh)
        return step, len(step.train.lower(step.state, step.batch).as_text().splitlines())

    step, lines = built(4)
    layers = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape)[0], step.state.params["layers"])
    assert set(jax.tree.leaves(layers)) == {2}
    assert built(16)[1] == pytest.approx(lines, rel=0.01)  # the tables are constants
