"""The vocabulary over pipe, and stages with different numbers of layers: the numbers of one device, the bytes of the
papers."""

import chex
import jax
import pytest
from cases import case
from conftest import (
    cover,
    equals_the_oracle,
    evaluates_as_it_trains,
    resolved,
    skips_an_overflow,
    small,
)
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.audit import matmuls
from nanotrain_jax.costs import communication, flops
from nanotrain_jax.step import build as steps


def split(layout, family="llama", remat="none", layers=8, tied=None, **parallel):
    """A decoder with the vocabulary over pipe, unless vocab_over_pipe=False."""
    parallel = {"vocab_over_pipe": True, "microbatches": 4, "persist_below": 64} | parallel
    model = {"num_layers": layers} | ({} if tied is None else {"tie_embeddings": tied})
    return case(layout, family, remat, model, **parallel)


CASES = [
    split("pipe 2 data 2 tensor 2", "gpt2", "full", 7, schedule="interleaved", chunks=2, zero=1),
    split("pipe 4 tensor 2", "gpt2", layers=6, tied=False, schedule="zero_bubble", microbatches=8),
    split("pipe 4 data 2", remat="full", layers=5, microbatches=8, zero=3),
    split("pipe 3 data 2", remat="selective", layers=10, tied=True, schedule="zb_h1", zero=2, idle="mask"),
    split("pipe 8", "gpt2", schedule="1f1b_lean", microbatches=8),
    split("pipe 2 data 2 tensor 2", layers=5, schedule="zero_bubble", chunks=2, microbatches=8, zero=3),
    split("pipe 2 data 2 tensor 2", "gpt2", "block:2", schedule="zero_bubble", chunks=2, microbatches=8, zero=3),
    split("pipe 2 data 2 tensor 2", remat="block:4", schedule="zb_h1", zero=1, vocab_over_pipe=False),
    split("pipe 2 replica 2 data 2", layers=6, zero=1, grad_reduce="per_layer"),
    split("pipe 3 data 2", "gpt2", "full", 7, zero=3, prefetch=True),
    split("pipe 4 tensor 2", layers=10, sequence_parallel=False, schedule="interleaved", chunks=2, microbatches=8),
    split("pipe 4 data 2", "gpt2", "block:2", zero=2),
    split("pipe 8", "gpt2", layers=10, schedule="gpipe", microbatches=8, idle="mask"),
    split("pipe 2 data 2 tensor 2", layers=7, schedule="interleaved", chunks=2, zero=3, idle="mask"),
    split("pipe 2 data 2 tensor 2", remat="block:2", vocab_over_pipe=False, zero=3, idle="mask"),
    split("pipe 2 context 2 data 2", "gpt2", zero=2, context_attention="ring", vocab_over_pipe=False, idle="mask"),
    split("pipe 2 context 2 data 2", layers=5, zero=3, context_attention="gather"),
    split("pipe 3 tensor 2", "gpt2", layers=7, vocab_over_pipe=False, schedule="zb_h2", microbatches=8),
    split("pipe 4 data 2", layers=7, vocab_over_pipe=False, grad_reduce="per_layer", schedule="zb_h1", microbatches=8),
]


@pytest.mark.parametrize("layout", cover([], CASES, str))
def test_the_decoder_equals_the_oracle_and_moves_the_bytes_of_the_papers(layout, expected):
    equals_the_oracle(layout.tree(), expected)
    moves_the_bytes_of_the_papers(layout.tree())


def test_a_stage_stores_its_part_of_the_vocabulary_and_as_many_layers_as_the_largest():
    config, mesh = resolved(split("pipe 4 tensor 2", layers=7, tied=False).tree())
    state = steps.build(config, mesh).state
    params = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), state.params)
    assert params["ends"]["embedding_VD"] == params["ends"]["head_VD"] == (128 // 8, 32)
    moments = jax.tree.leaves(state.opt.moments[0].mu["ends"])
    assert {x.sharding.shard_shape(x.shape) for x in moments} == {(128 // 8, 32), (32,)}
    assert {x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(state.params["layers"])} == {2}


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    cover(
        [split("pipe 3 data 2", "gpt2", layers=7, zero=3)],
        [split("pipe 2 data 2 tensor 2", layers=7, schedule="interleaved", chunks=2, idle="mask")],
        str,
    ),
)
def test_evaluation_gives_the_loss_of_training_and_counts_targets(layout):
    evaluates_as_it_trains(layout.tree())


@pytest.mark.long
@pytest.mark.parametrize(
    ("remat", "schedule"), [("full", "zb_h1"), pytest.param("block:2", "zero_bubble", marks=pytest.mark.long)]
)
def test_a_stage_with_one_layer_or_block_recomputes_it_only_in_its_backwards(remat, schedule):
    """Not in every tick: XLA hoists out of the branch what does not depend on its iteration."""
    layers = 4 if remat == "full" else 8
    config, mesh = resolved(split("pipe 4", remat=remat, layers=layers, schedule=schedule, microbatches=8).tree())
    step = steps.build(config, mesh)
    text = step.train.lower(step.state, step.batch).compile().as_text()
    found = matmuls.flops(text, communication.conditional_rates(config))
    assert found == pytest.approx(flops.step_flops(config), rel=1e-3)


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")
def test_an_overflow_in_one_part_of_the_vocabulary_skips_the_step_on_all_stages():
    tree = split("pipe 4 data 2", layers=7, zero=1).tree()
    tree["precision"] = {"compute": "float16", "loss_scale": "dynamic"}
    skips_an_overflow(tree)


@pytest.mark.long  # tests against the oracle reorder states in both directions
def test_the_state_keeps_its_values_from_stage_order_to_layer_order_and_back():
    config, mesh = resolved(split("pipe 2 data 2", layers=7, schedule="interleaved", chunks=2).tree())
    step = steps.build(config, mesh)
    state = step.init()
    ordered = step.in_layer_order(state)
    one, mesh = resolved(small(model={"num_layers": 7}, parallel={"data": 1}))
    expected = steps.build(one, mesh).init()
    without_padding = jax.tree.map(lambda x, y: x[tuple(map(slice, y.shape))], ordered.params, expected.params)
    chex.assert_trees_all_close(without_padding, expected.params)
    chex.assert_trees_all_equal(step.in_stage_order(ordered), state)
