"""The pipelined decoder: the numbers of one device, the bytes of the papers."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import (
    cover,
    equals_the_oracle,
    evaluates_as_it_trains,
    on_devices,
    resolved,
    run,
    skips_an_overflow,
    small,
    stays_near_the_oracle,
)
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.step import build as steps


class Layout(NamedTuple):
    """The config keys that these tests vary."""

    pipe: int
    data: int = 1
    tensor: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 4
    zero: int = 0
    family: str = "gpt2"
    remat: str = "none"
    idle: str = "skip"


# The third, with a split backward, is in the default run. That all schedules give the same bits is shown with foreign
# layers (test_pipeline.py). MORE has each with every number of stages.
COVER = [
    Layout(pipe=2, data=2, tensor=2, schedule="gpipe", zero=2, family="llama", remat="selective", idle="mask"),
    Layout(pipe=2, data=2, tensor=2, schedule="interleaved", chunks=2, microbatches=8, zero=1, remat="full"),
    Layout(pipe=4, data=2, schedule="zb_h1", microbatches=8, zero=3, remat="full"),
    Layout(pipe=4, tensor=2, schedule="zero_bubble", microbatches=16, zero=2, idle="mask"),
    Layout(pipe=4, tensor=2, schedule="1f1b_lean", zero=2, family="llama", remat="block:2"),
]
MORE = [
    Layout(pipe=8, microbatches=32, remat="selective"),
    Layout(pipe=2, data=2, tensor=2, zero=3),
    Layout(pipe=4, data=2, schedule="zb_h2", microbatches=16, zero=3, family="llama"),
    Layout(pipe=2, data=2, tensor=2, schedule="zero_bubble", zero=3, family="llama"),
    Layout(
        pipe=2, data=2, tensor=2, schedule="zb_h1", microbatches=2, zero=1, family="llama", remat="full", idle="mask"
    ),
    Layout(pipe=2, data=4, schedule="interleaved", chunks=4, zero=3, family="llama", remat="selective", idle="mask"),
    Layout(pipe=2, data=4, schedule="1f1b_lean", microbatches=8),
    Layout(pipe=2, tensor=4, schedule="zb_h2", microbatches=8, remat="selective"),
    Layout(pipe=2, data=4, schedule="zb_h1", microbatches=8, zero=3, remat="selective"),
    Layout(pipe=2, data=2, tensor=2, schedule="interleaved", chunks=2, zero=3, remat="block:2"),
    Layout(pipe=4, data=2, microbatches=16, zero=1, family="llama", remat="full", idle="mask"),
    Layout(pipe=4, data=2, schedule="gpipe", microbatches=8, zero=3, remat="block:2"),
    Layout(pipe=4, data=2, schedule="interleaved", chunks=2, microbatches=16, zero=2, family="llama", remat="full"),
    Layout(pipe=4, data=2, schedule="zb_h1", microbatches=8, zero=2, family="llama", remat="selective"),
    Layout(pipe=4, data=2, schedule="zb_h2", microbatches=8, zero=1, remat="full", idle="mask"),
    Layout(pipe=8, microbatches=2, zero=2, family="llama"),  # fewer microbatches than stages
    Layout(pipe=8, schedule="gpipe", microbatches=16, zero=1, family="llama", remat="full"),
    Layout(pipe=8, schedule="zero_bubble", microbatches=32, zero=1, remat="full"),
    Layout(pipe=8, schedule="zb_h1", microbatches=16),
    Layout(pipe=8, schedule="zb_h2", microbatches=16, zero=2, family="llama", remat="selective"),
    Layout(pipe=8, schedule="1f1b_lean", microbatches=8, zero=3, family="llama", idle="mask"),
    Layout(pipe=8, schedule="1f1b_lean", microbatches=16, zero=1, remat="full"),
    Layout(pipe=8, schedule="interleaved", microbatches=8, zero=3, family="llama"),
]


def piped(layout, **more):
    parallel = layout._asdict() | {"persist_below": 64} | more
    family, remat = parallel.pop("family"), parallel.pop("remat")
    return small(family, model={"num_layers": 8}, parallel=parallel, memory={"remat": remat})


@pytest.mark.parametrize("layout", cover(COVER[2:3], [*COVER[:2], *COVER[3:], *MORE]))
def test_the_decoder_equals_the_oracle_and_moves_the_bytes_of_the_papers(layout, expected):
    equals_the_oracle(piped(layout), expected)
    if layout.idle == "skip":  # masked stages also move discarded values
        moves_the_bytes_of_the_papers(piped(layout))


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(pipe=2, data=2, schedule="zb_h1", zero=2), {"replica": 2, "bucket_mb": 0.0}),
        (Layout(pipe=2, tensor=4, schedule="interleaved", chunks=2, zero=3), {"sequence_parallel": False}),
    ],
)
def test_replicas_and_no_sequence_parallelism_work_with_stages(layout, more, expected):
    equals_the_oracle(piped(layout, **more), expected)
    moves_the_bytes_of_the_papers(piped(layout, **more))


@pytest.mark.parametrize(
    "layout",
    cover(
        [],
        [
            Layout(pipe=2, data=2, tensor=2, zero=3, family="llama", remat="full"),
            Layout(pipe=2, data=4, schedule="zero_bubble", microbatches=8, zero=3),
            Layout(pipe=2, data=2, schedule="interleaved", chunks=2, zero=3, remat="block:2", idle="mask"),
        ],
    ),
)
def test_prefetch_changes_no_number_and_no_byte(layout, expected):
    equals_the_oracle(piped(layout, prefetch=True), expected)
    if layout.idle == "skip":
        moves_the_bytes_of_the_papers(piped(layout, prefetch=True))


@pytest.mark.parametrize(
    "layout",
    cover(
        [],
        [
            Layout(pipe=2, data=2, tensor=2, schedule="zb_h2", zero=1, family="llama"),
            Layout(pipe=2, data=2, tensor=2, schedule="zb_h1", zero=1, family="llama"),
            Layout(pipe=4, data=2, schedule="gpipe", microbatches=8, remat="block:2"),  # one block of layers per stage
            Layout(pipe=2, data=2, tensor=2, family="llama", remat="full"),
            Layout(pipe=2, data=4, schedule="interleaved", chunks=2, microbatches=8, zero=1),
            Layout(pipe=4, data=2, schedule="zero_bubble", microbatches=16, zero=1, family="llama"),
        ],
    ),
)
def test_per_layer_reduction_changes_no_number_and_no_byte(layout, expected):
    equals_the_oracle(piped(layout, grad_reduce="per_layer"), expected)
    moves_the_bytes_of_the_papers(piped(layout, grad_reduce="per_layer"))


@pytest.mark.long
def test_tied_embeddings_of_a_llama_learn_on_the_first_and_last_stage(expected):
    tree = piped(Layout(pipe=2, data=2, tensor=2, schedule="zb_h2", microbatches=8, zero=2, family="llama"))
    tree["model"]["tie_embeddings"] = True
    equals_the_oracle(tree, expected)
    moves_the_bytes_of_the_papers(tree)


@pytest.mark.long
def test_chunked_losses_and_clipping_work_with_stages():
    layout = {"pipe": 4, "data": 2, "vocab_over_pipe": True}
    plain, split = (
        small(model={"num_layers": 5, "loss_chunk": 16}, optimizer={"grad_clip": 0.5}, parallel=parallel)
        for parallel in ({"data": 1}, layout | {"microbatches": 4, "zero": 2, "persist_below": 64})
    )
    for a, b in zip(run(plain)[1], run(split)[1], strict=True):
        np.testing.assert_allclose([a["loss"], a["grad_norm"]], [b["loss"], b["grad_norm"]], rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=4, data=2, microbatches=8, zero=3),
        Layout(pipe=2, data=2, tensor=2, schedule="interleaved", chunks=2, family="llama", remat="full", idle="mask"),
    ],
)
def test_evaluation_gives_the_loss_of_training_and_counts_targets(layout):
    step, tokens, batch, total = evaluates_as_it_trains(piped(layout))
    halves = [on_devices(half, step) for half in np.split(tokens, 2)]  # smaller batches give the same sums
    of_halves = [step.evaluate(step.init().params, half) for half in halves]
    assert [int(count) for _, count in of_halves] == [16 * 16] * 2
    np.testing.assert_allclose(of_halves[0][0] + of_halves[1][0], total, rtol=2e-6)
    batch["targets"] = jax.device_put(np.where(tokens[:, 1:] > 30, -1, tokens[:, 1:]), batch["targets"].sharding)
    assert int(step.evaluate(step.init().params, batch)[1]) == (tokens[:, 1:] <= 30).sum()


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize(
    ("layout", "compute", "error"),
    [
        (Layout(pipe=2, data=2, tensor=2, schedule="zero_bubble", zero=1, family="llama"), "bfloat16", 2**-8),
        (Layout(pipe=4, data=2, microbatches=8, zero=3, family="llama", remat="full"), "bfloat16", 2**-8),
        (
            Layout(
                pipe=2, data=2, tensor=2, schedule="interleaved", chunks=2, zero=2, family="llama", remat="selective"
            ),
            "float16",
            2**-11,
        ),
    ],
)
def test_16_bit_runs_are_close_to_float32(layout, compute, error, expected):
    tree = piped(layout, vocab_over_pipe=layout.schedule == "zero_bubble")
    tree["precision"] = {"compute": compute, "loss_scale": "dynamic" if compute == "float16" else "none"}
    stays_near_the_oracle(tree, expected, error)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(
    "layout",
    cover(
        [],
        [
            Layout(pipe=2, data=2, tensor=2, schedule="zb_h1", zero=3, family="llama"),
            Layout(pipe=4, data=2, schedule="zb_h1", zero=3, family="llama"),
            Layout(pipe=4, data=2, family="llama"),
        ],
    ),
)
def test_an_overflow_on_one_device_skips_the_step_on_all(layout):
    tree = piped(layout)
    tree["precision"] = {"compute": "float16", "loss_scale": "dynamic"}
    skips_an_overflow(tree)


def test_each_stage_stores_its_layers_and_program_size_is_independent_of_microbatches():
    def built(microbatches):
        config, mesh = resolved(piped(Layout(pipe=4, data=2, microbatches=microbatches, zero=1, family="llama")))
        step = steps.build(config, mesh)
        return step, len(step.train.lower(step.state, step.batch).as_text().splitlines())

    step, lines = built(4)
    layers = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape)[0], step.state.params["layers"])
    assert set(jax.tree.leaves(layers)) == {2}
    assert built(16)[1] == pytest.approx(lines, rel=0.01)  # the tables are constants
