"""Ends split over stages, and stages with different numbers of layers: tables without a device, the executor with plain
layers."""

from fractions import Fraction
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cover
from jax import lax
from jax.sharding import PartitionSpec as P
from schedule_cases import CHUNKS, EQUAL, UNEQUAL, every_schedule, least, made
from small_layers import D, V, a_model, layer, one_device, some_tokens
from test_pipeline import Case, a_mesh

from nanotrain_jax import LayeredModel, run_schedule
from nanotrain_jax.parallel.collectives import as_varying, position
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline import schedule_text
from nanotrain_jax.parallel.pipeline.schedule import FUSED, IDLE, layers_of_chunks, row_order
from nanotrain_jax.parallel.pipeline.slots import end_units
from nanotrain_jax.parallel.tensor import embedding, vocabulary

LOSS = Fraction(4, 5)
ONLY_LOSS = schedule_text.Ends(loss=LOSS)


def sizes(name):
    """(stages, microbatches, chunks)."""
    for stages, more in product((2, 3, 4, 8), (0, 1, 9, 24)):
        if name in CHUNKS:
            yield from ((stages, stages * (1 + more), chunks) for chunks in CHUNKS[name])
        else:
            yield stages, least(name, stages) + more, 1


@every_schedule
def test_all_stages_have_the_units_of_the_ends_in_the_same_ticks_and_the_tables_stay_valid(name):
    for stages, M, C in sizes(name):
        table = made(name, stages, M, C, split_ends=True)
        schedule_text.validate(table)
        for units in end_units(table):
            assert sorted(units[units != IDLE]) == sorted({*units[units != IDLE]})
            assert (units != IDLE).sum() == M


@every_schedule
@pytest.mark.parametrize("costs", [pytest.param(EQUAL, marks=pytest.mark.long), UNEQUAL])
def test_split_ends_take_the_time_of_the_layers_and_of_one_share_of_the_loss(name, costs):
    for stages, M, C in sizes(name):
        plain = schedule_text.stats(made(name, stages, M, C), *costs)
        split = schedule_text.stats(made(name, stages, M, C, split_ends=True), *costs, ends=ONLY_LOSS)
        last = schedule_text.stats(made(name, stages, M, C), *costs, ends=ONLY_LOSS)
        late = costs[2] if name == "zero_bubble" and 3 * stages - 2 > M else 0  # at most: a W that finds no idle tick
        assert 0 <= split.time - plain.time - M * LOSS / stages <= late
        assert split.time < last.time + late
        assert max(split.in_flight) <= max(plain.in_flight) + (name in FUSED)


def test_a_loss_in_the_same_tick_as_its_forward_is_no_schedule_for_split_ends():
    table = schedules.with_split_ends(schedules.make("1f1b", 2, 4))
    with pytest.raises(ValueError, match="stage 1, tick 2: B0 is too early; it needs F0 of stage 1 in tick 1"):
        schedule_text.validate(table)


@pytest.mark.parametrize(
    ("stages", "chunks", "layers", "ends", "counts"),
    [
        (4, 1, 32, (1.7,), [[8, 8, 8, 8]]),  # even layers stay even
        (4, 1, 31, (1.7,), [[8, 8, 8, 7]]),
        (4, 1, 30, (1.7,), [[8, 8, 8, 6]]),
        (4, 1, 30, (), [[8, 8, 7, 7]]),
        (4, 1, 30, (0.5,), [[8, 8, 7, 7]]),
        (4, 1, 5, (5.0,), [[2, 2, 1, 0]]),  # no chunk has less than none
        (3, 1, 10, (), [[4, 3, 3]]),
        (2, 2, 7, (), [[2, 2], [2, 1]]),
        (4, 1, 5, (), [[2, 1, 1, 1]]),
        (4, 1, 58, (1.4, 3.7), [[13, 15, 15, 15]]),
        (4, 1, 57, (2.4, 1.9), [[14, 15, 15, 13]]),
        (2, 2, 13, (0.0, 9.0), [[1, 4], [4, 4]]),
    ],
)
def test_the_busiest_chunk_loses_layers_first(stages, chunks, layers, ends, counts):
    """ends: times of the loss, and of what the first stage runs before its layers."""
    assert layers_of_chunks(stages, chunks, layers, *ends).tolist() == counts


def test_rows_of_every_chunk_are_its_layers_in_order_and_padding_comes_last():
    for stages, chunks, layers in product((1, 2, 3, 4), (1, 2, 3), range(12, 30)):
        order, counts = row_order(stages, chunks, layers), layers_of_chunks(stages, chunks, layers)
        assert sorted(order) == [*range(order.size)]
        of_chunks = order.reshape(stages, chunks, -1).swapaxes(0, 1).reshape(stages * chunks, -1)
        assert [(rows < layers).sum() for rows in of_chunks] == counts.ravel().tolist()
        assert np.concatenate([rows[rows < layers] for rows in of_chunks]).tolist() == [*range(layers)]


def test_a_tick_lasts_as_long_as_the_stage_with_most_layers():
    table = schedules.make("1f1b", 2, 3)
    stats = schedule_text.stats(table, *EQUAL, layers=[[2, 1]])  # F and B of 1.5 layers take 1 and 2
    assert stats.time == Fraction(4, 3) + 2 + 4 + Fraction(8, 3) + Fraction(8, 3)  # F, FB of stage 1, FB, B, B
    assert stats.bubble_fraction == pytest.approx(1 - 9 / float(stats.time))


def test_what_the_first_stage_runs_before_its_layers_is_in_its_ticks_of_the_first_chunk():
    table = schedules.make("interleaved", 2, 2, 2)
    ends = schedule_text.Ends(first_forward=3, first_backward=5, loss=7)
    plain, found = (schedule_text.stage_times(table, *EQUAL, ends=e) for e in (schedule_text.Ends(), ends))
    added = found - plain
    is_first = (table.forward >= 0) & (table.forward < 2), (table.backward >= 0) & (table.backward < 2)
    assert added[:, 0].tolist() == (3 * is_first[0] + 5 * is_first[1])[:, 0].tolist()
    assert added[:, 1].tolist() == (7 * (table.backward >= 2))[:, 1].tolist()


def embed(ends, tokens):
    return embedding.look_up(ends["embedding"], tokens, None, False, ("pipe",))


def loss(ends, x, tokens):
    return vocabulary.cross_entropy(x, ends["head"], tokens, "pipe")[0]


def run(case, layers, counts=None):
    """-> loss, gradients of ends and of layers, and the same of one device. The vocabulary is split over stages."""
    rows = -(-V // case.stages) * case.stages
    ends, weights = a_model(layers)
    ends = jax.tree.map(lambda w: jnp.concatenate([w, 0.1 * jnp.ones((rows - V, D))]), ends)
    order = row_order(case.stages, case.chunks, layers)
    is_layer = None if counts is None else (order < layers).reshape(case.stages, -1)
    table = schedules.make(case.schedule, case.stages, case.microbatches, case.chunks, split_ends=True)
    tokens = some_tokens(case.microbatches, 2)

    def body(ends, layers, tokens):
        ends, layers = as_varying((ends, layers), ("data",))
        model = LayeredModel(embed, layer, loss, ends, layers, is_layer=is_layer, split_ends=True)
        total, (of_ends, of_layers) = run_schedule(table, model, tokens, idle=case.idle)
        return lax.psum(total, ("pipe", "data")), *lax.psum((of_ends, of_layers), "data")

    specs, mesh = (P("pipe"), P("pipe"), P(None, "data")), a_mesh(case.stages)
    pipelined = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P("pipe"), P("pipe"))))
    total, of_ends, of_layers = pipelined(
        ends, jax.tree.map(lambda w: w[np.minimum(order, layers - 1)], weights), tokens
    )
    of_layers = jax.tree.map(lambda g: g[np.argsort(order)], of_layers)
    for g in jax.tree.leaves(of_layers):
        np.testing.assert_array_equal(g[layers:], 0)
    found = total, (of_ends, jax.tree.map(lambda g: g[:layers], of_layers))
    return found, jax.value_and_grad(one_device, argnums=(0, 1))(ends, weights, tokens)


@pytest.mark.parametrize(
    "run_of",
    cover(
        [(Case("zb_h1", stages=3, microbatches=4), 7)],  # decoders have 1f1b, interleaved and zero_bubble
        [
            (Case("1f1b", stages=4, microbatches=5), 8),
            (Case("interleaved", stages=2, microbatches=4, chunks=2, idle="mask"), 7),
            (Case("gpipe", stages=2, microbatches=3), 5),
            (Case("zero_bubble", stages=4, microbatches=12, idle="mask"), 10),
            (Case("1f1b_lean", stages=8, microbatches=3), 8),
            (Case("zb_h2", stages=2, microbatches=3), 5),
            (Case("interleaved", stages=4, microbatches=8, chunks=3), 13),
        ],
        name=lambda case: f"{'-'.join(map(str, case[0]))}-{case[1]}",
    ),
)
def test_the_executor_gives_the_loss_and_gradients_of_one_device(run_of):
    case, layers = run_of
    parts = case.stages * case.chunks
    counts = layers_of_chunks(case.stages, case.chunks, layers) if layers % parts else None
    (total, grads), (true_total, true_grads) = run(case, layers, counts)
    np.testing.assert_allclose(total, true_total, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), grads, true_grads)


def test_a_schedule_for_split_ends_is_refused_by_other_models_and_the_reverse():
    ends, weights = a_model(4)

    def body(ends, layers, tokens):
        model = LayeredModel(embed, layer, loss, ends, layers, split_ends=True)
        return run_schedule(schedules.make("1f1b", 2, 2), model, tokens)[0] + position("data")

    specs = P(), P("pipe"), P()
    with pytest.raises(ValueError, match="make the schedule with split_ends=True"):
        jax.shard_map(body, mesh=a_mesh(2), in_specs=specs, out_specs=P("pipe"))(ends, weights, some_tokens(2, 2))
