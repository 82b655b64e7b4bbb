"""The pipeline executor with plain layers."""

import functools
import importlib.util
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, cover, resolved, small
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_layers import D, F, T, V, a_model, first, last, layer, one_device, some_tokens

from nanotrain_jax import LayeredModel, layer_order, run_schedule
from nanotrain_jax.audit import matmuls, wire
from nanotrain_jax.parallel.collectives import as_varying
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline.executor import run_forward
from nanotrain_jax.step.plan import layers_of_rows

NAMES = [*schedules.SCHEDULES]


ROWS = 64  # of a microbatch, in what is compiled


class Case(NamedTuple):
    """A schedule and its idle mode."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int = 1
    idle: str = "skip"

    @property
    def table(self):
        return schedules.make(self.schedule, self.stages, self.microbatches, self.chunks)


def case_of(name, stages, microbatches):
    """A schedule by name, with two chunks if it supports several."""
    return Case(name, stages, microbatches, chunks=2 if name == "interleaved" else 1)


def a_mesh(pipe, data=1):
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((pipe, data), ("pipe", "data"), axis_types=types, devices=jax.devices()[: pipe * data])


def pipelined(schedule, mesh, idle="skip", first=first, layer=layer, last=last):
    """(ends, layers in model order, tokens) -> loss, gradients of ends, of layers."""

    def body(ends, layers, tokens):
        ends, layers = as_varying((ends, layers), ("data",))
        model = LayeredModel(first, layer, last, ends, layers)
        loss, (of_ends, of_layers) = run_schedule(schedule, model, tokens, idle=idle)
        return *lax.psum((loss, of_ends), ("pipe", "data")), lax.psum(of_layers, "data")

    specs = (P(), P("pipe"), P(None, "data"))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P("pipe"))))

    def in_order(ends, layers, tokens):
        rows = layer_order(schedule, len(layers["up"]))
        loss, of_ends, of_layers = run(ends, jax.tree.map(lambda w: w[rows], layers), tokens)
        return loss, (of_ends, jax.tree.map(lambda g: g[np.argsort(rows)], of_layers))

    return in_order, run


# Together each schedule at 2, 4, 8 stages, with P, 2 P, 4 P and odd numbers of microbatches. In the default run all
# schedules agree bitwise with gpipe at 4 stages, below.
RUNS = [
    Case("gpipe", stages=8, microbatches=3),
    Case("1f1b", stages=1, microbatches=3),
    Case("interleaved", stages=2, microbatches=4, chunks=4),
    Case("zb_h1", stages=4, microbatches=5, idle="mask"),
]
MORE = [
    Case("1f1b", stages=4, microbatches=3),
    Case("1f1b", stages=2, microbatches=5, idle="mask"),
    Case("1f1b_lean", stages=4, microbatches=7, idle="mask"),
    Case("zero_bubble", stages=4, microbatches=16),
    Case("zb_h2", stages=2, microbatches=3, idle="mask"),
    Case("gpipe", stages=2, microbatches=2),
    Case("gpipe", stages=4, microbatches=8, idle="mask"),
    Case("1f1b", stages=8, microbatches=32),
    Case("1f1b_lean", stages=2, microbatches=8),
    Case("1f1b_lean", stages=8, microbatches=16),
    Case("interleaved", stages=4, microbatches=8, chunks=2, idle="mask"),
    Case("interleaved", stages=8, microbatches=8),
    Case("interleaved", stages=1, microbatches=3, chunks=2),
    Case("zero_bubble", stages=2, microbatches=5, idle="mask"),
    Case("zero_bubble", stages=8, microbatches=21),
    Case("zb_h1", stages=2, microbatches=2),
    Case("zb_h1", stages=8, microbatches=16),
    Case("zb_h2", stages=4, microbatches=9),
    Case("zb_h2", stages=8, microbatches=32),
]


@pytest.mark.parametrize("case", cover(RUNS, MORE))
def test_any_schedule_gives_the_loss_and_gradients_of_one_device(case):
    data = 2 if case.stages in (2, 4) else 1
    ends, layers = a_model(8)
    tokens = some_tokens(case.microbatches, 2)
    loss, grads = pipelined(case.table, a_mesh(case.stages, data), case.idle)[0](ends, layers, tokens)
    true_loss, true_grads = jax.value_and_grad(one_device, argnums=(0, 1))(ends, layers, tokens)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), grads, true_grads)


@pytest.mark.parametrize(
    ("schedule", "layers", "order"),
    [
        (schedules.make("interleaved", 2, 4, 2), 8, [0, 1, 4, 5, 2, 3, 6, 7]),
        (schedules.make("interleaved", 2, 4, 3), 6, [0, 2, 4, 1, 3, 5]),
        (schedules.make("1f1b", 4, 4), 8, [*range(8)]),
    ],
)
def test_layer_order_gives_the_model_layer_of_each_row(schedule, layers, order):
    np.testing.assert_array_equal(layer_order(schedule, layers), order)
    parallel = {"data": 1, "pipe": schedule.stages, "chunks": schedule.chunks, "microbatches": 4}
    parallel["schedule"] = "interleaved" if schedule.chunks > 1 else "1f1b"
    config, _ = resolved(small(model={"num_layers": layers}, parallel=parallel))
    np.testing.assert_array_equal(layers_of_rows(config), order)


def test_layer_order_raises_unless_layers_can_be_split_evenly():
    with pytest.raises(ValueError, match=r"^8 layers cannot be split over 4 stages x 3 chunks; use a multiple of 12$"):
        layer_order(schedules.make("interleaved", 4, 4, 3), 8)


def test_a_schedule_can_be_given_by_name():
    ends, layers = a_model(4)
    tokens = some_tokens(4, 2)
    made, named = (pipelined(s, a_mesh(2))[1] for s in (schedules.make("zb_h1", 2, 4), "zb_h1"))
    jax.tree.map(np.testing.assert_array_equal, named(ends, layers, tokens), made(ends, layers, tokens))


def test_gradients_of_replicated_parameters_are_summed_over_data():
    ends, layers = a_model(4)
    tokens = some_tokens(3, 4)

    def body(ends, layers, tokens):
        loss, (of_ends, of_layers) = run_schedule("1f1b", LayeredModel(first, layer, last, ends, layers), tokens)
        return lax.psum(loss, ("pipe", "data")), lax.psum(of_ends, "pipe"), of_layers

    specs = (P(), P("pipe"), P(None, "data"))
    run = jax.jit(jax.shard_map(body, mesh=a_mesh(2, 2), in_specs=specs, out_specs=(P(), P(), P("pipe"))))
    loss, *grads = run(ends, layers, tokens)
    true_loss, true_grads = jax.value_and_grad(one_device, argnums=(0, 1))(ends, layers, tokens)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), tuple(grads), true_grads)


@pytest.mark.long
def test_the_example_script_equals_one_device(capsys, monkeypatch):
    path = ROOT / "scripts" / "examples" / "pipeline_your_model.py"
    monkeypatch.syspath_prepend(path.parent)  # scripts import each other
    spec = importlib.util.spec_from_file_location("pipeline_your_model", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        script.main()
    _, *rows = capsys.readouterr().out.splitlines()
    alone, staged, difference = np.array([row.split()[-3:] for row in rows], float).T
    assert len(rows) == 18  # the loss, and for 17 parameters the gradient's norm and largest difference
    assert (alone > 0.1).sum() >= 17  # the gradient of the keys' bias is zero
    np.testing.assert_allclose(staged, alone, rtol=1e-5, atol=1e-5)
    assert difference.max() < 1e-5


@pytest.mark.parametrize("idle", ["skip", pytest.param("mask", marks=pytest.mark.long)])
def test_schedules_agree_bitwise_because_all_sum_microbatches_in_order(idle):
    ends, layers = a_model(8)
    tokens = some_tokens(16, 2)
    found = {}
    for name in NAMES:
        found[name] = pipelined(case_of(name, 4, 16).table, a_mesh(4, 2), idle)[0](ends, layers, tokens)
    for name in NAMES[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[name], found[NAMES[0]])


@pytest.mark.parametrize("case", cover([(4, 6, 1), (2, 5, 2)], [(8, 3, 1)]))
def test_run_forward_gives_the_loss_of_one_device(case):
    stages, microbatches, chunks = case
    ends, layers = a_model(8)
    tokens = some_tokens(microbatches, 2)
    schedule = schedules.forward_only(stages, microbatches, chunks)

    def loss_and_count(ends, x, tokens):
        return last(ends, x, tokens), tokens.size

    def body(ends, layers, tokens):
        model = LayeredModel(first, layer, loss_and_count, ends, layers)
        return lax.psum(run_forward(schedule, model, tokens), "pipe")

    mesh = a_mesh(stages)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P("pipe"), P()), out_specs=P()))
    rows = layer_order(schedule, 8)
    loss, count = run(ends, jax.tree.map(lambda w: w[rows], layers), tokens)
    np.testing.assert_allclose(loss, one_device(ends, layers, tokens), rtol=1e-6)
    assert count == tokens.size


@functools.cache
def compiled(case, layer=layer):
    arguments = (*a_model(8), some_tokens(case.microbatches, ROWS))
    return pipelined(case.table, a_mesh(case.stages), case.idle, layer=layer)[1].lower(*arguments).compile()


def temporary_bytes(case, layer=layer):
    return compiled(case, layer).memory_analysis().temp_size_in_bytes


def turns(schedule):
    """Average iterations of each at-most-once loop per tick, on a stage with both ends of the model."""
    per_tick = Fraction(schedule.microbatches * schedule.chunks, schedule.ticks)
    per_slot, ends = per_tick / max(1, schedule.weight.shape[-1]), Fraction(1, schedule.chunks)
    return {"forward": per_tick, "backward": per_tick, "weight": per_slot, "first": ends, "last": ends}


FLOPS_OF = "1f1b", "interleaved", "zero_bubble", "zb_h1"  # whose programs two tests share


@pytest.mark.parametrize("name", cover(FLOPS_OF, [name for name in NAMES if name not in FLOPS_OF]))
def test_a_tick_has_two_permutes_and_none_in_a_branch(name):
    case = case_of(name, 4, 12)
    schedule = case.table
    found = wire.collectives(compiled(case).as_text(), {"pipe": 4, "data": 1}, turns(schedule))
    permutes = [c for c in found if c.operation == "permute"]
    assert [c.count for c in permutes] == [schedule.ticks] * 2
    assert not any("at_most_once" in c.source for c in permutes)
    assert sum(c.bytes * c.count for c in permutes) == 2 * schedule.ticks * (ROWS * T * D * 4)


@pytest.mark.parametrize("name", cover(["1f1b", "interleaved", "zero_bubble"], ["1f1b_lean", "zb_h1", "zb_h2"]))
def test_temporary_memory_does_not_grow_with_the_number_of_microbatches(name):
    temp = [temporary_bytes(case_of(name, 2, M)) for M in (8, 64)]
    assert max(temp) < 1.01 * min(temp)


def test_gpipe_stores_every_microbatch():
    temp = [temporary_bytes(Case("gpipe", 2, M)) for M in (8, 64)]
    assert temp[1] > 6 * temp[0]


@pytest.mark.parametrize("name", cover(["1f1b"], ["interleaved", "gpipe"]))
def test_temporary_memory_decreases_with_stronger_remat(name):
    some = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    full = jax.checkpoint(layer)
    temp = [temporary_bytes(case_of(name, 2, 8), f) for f in (layer, some, full)]
    assert temp[0] > 1.2 * temp[1] > 1.4 * temp[2]


def useful_flops(layers, microbatches, rows):
    tokens = microbatches * rows * T
    return 3 * tokens * (layers * 2 * 2 * D * F + 2 * D * V)


@pytest.mark.parametrize("name", FLOPS_OF)
def test_executed_flops_equal_the_useful_ones(name):
    """Matmuls of each slot times its uses in the table: every forward and backward once, no part of it twice."""
    case = case_of(name, 4, 12)
    found = matmuls.flops(compiled(case).as_text(), turns(case.table))
    assert found == pytest.approx(useful_flops(8 // 4, 12, ROWS), rel=1e-9)


def test_masked_stages_compute_in_every_tick():
    case = Case("1f1b", 4, 12, idle="mask")
    assert matmuls.flops(compiled(case).as_text()) == pytest.approx(
        useful_flops(8 // 4, 12, ROWS) * case.table.ticks / 12, rel=1e-9
    )


def test_arguments_that_do_not_fit_raise():
    ends, layers = a_model(6)
    unordered = schedules.make("1f1b", 2, 4)
    unordered = unordered._replace(backward=unordered.forward)
    cases = [
        (
            schedules.make("interleaved", 2, 4, 2),
            2,
            4,
            "3 layers of a stage cannot be split into 2 chunks; use a number of chunks that divides 3, or a multiple",
        ),
        ("interleaved", 2, 4, r"'interleaved': needs a number of chunks; pass schedule.make\('interleaved', 2, 4, "),
        ("1f2b", 2, 4, "schedule '1f2b' is unknown; use gpipe, 1f1b"),
        (schedules.make("1f1b", 4, 4), 2, 4, "has 4 stages and 4 microbatches, the arguments 2 stages and 4 micro"),
        (schedules.make("1f1b", 2, 4), 2, 3, "the arguments 2 stages and 3 microbatches"),
        (unordered, 2, 4, "stage 0, tick 0: B0 is too early"),
    ]
    for schedule, stages, microbatches, message in cases:
        with pytest.raises(ValueError, match=message):
            pipelined(schedule, a_mesh(stages))[1](ends, layers, some_tokens(microbatches, 2))
    tokens = some_tokens(4, 2)

    def body(ends, layers, tokens):
        return run_schedule("1f1b", LayeredModel(first, layer, last, ends, layers), tokens)[0]

    for wrong, spec, message in (
        (layers, P(), r"layers are the same on every stage; shard their leading dim over the stages: P\('pipe'\)"),
        (layers | {"gain": jnp.ones((4, D))}, P("pipe"), "layers: arrays have 2 and 3 rows on a stage; give every"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.shard_map(body, mesh=a_mesh(2), in_specs=(P(), spec, P()), out_specs=P("pipe"))(ends, wrong, tokens)
    with pytest.raises(ValueError, match="idle='masked' is unknown; use skip or mask"):
        pipelined(schedules.make("1f1b", 2, 4), a_mesh(2), "masked")[1](ends, layers, some_tokens(4, 2))


def test_masked_work_of_idle_ticks_may_be_nan():
    """Slots are initialized with zeros: a layer that divides by the norm of x computes NaN from them, in F and B."""

    def normed(weights, x, tokens):
        return layer(weights, x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True)), tokens)

    ends, layers = a_model(4)
    tokens = some_tokens(4, 2)
    schedule = schedules.make("zb_h1", 4, 4)
    runs = (pipelined(schedule, a_mesh(4), idle, layer=normed)[0] for idle in ("skip", "mask"))
    skip, mask = (run(ends, layers, tokens) for run in runs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(skip))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), mask, skip)


@pytest.mark.parametrize("name", cover(["1f1b", "zb_h1"], ["interleaved"]))
def test_an_auxiliary_loss_travels_with_the_activation(name):
    def begin(ends, tokens):
        return {"x": first(ends, tokens), "penalty": jnp.zeros(())}

    def penalized(weights, x, tokens):
        penalty = jnp.square(jnp.tanh(x["x"] @ weights["up"])).sum()
        return {"x": layer(weights, x["x"], tokens), "penalty": x["penalty"] + penalty}

    def end(ends, x, tokens):
        return last(ends, x["x"], tokens) + 0.1 * x["penalty"]

    ends, layers = a_model(4)
    tokens = some_tokens(4, 2)
    functions = {"first": begin, "layer": penalized, "last": end}
    loss, grads = pipelined(case_of(name, 2, 4).table, a_mesh(2, 2), **functions)[0](ends, layers, tokens)
    of_one = partial(one_device, **functions)
    true_loss, true_grads = jax.value_and_grad(of_one, argnums=(0, 1))(ends, layers, tokens)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), grads, true_grads)
