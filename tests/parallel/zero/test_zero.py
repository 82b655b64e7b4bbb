"""ZeRO and rematerialization: the same numbers with less memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import case
from conftest import (
    collectives,
    cover,
    equals_the_oracle,
    on_devices,
    random_tokens,
    relative_errors,
    resolved,
    run,
    small,
    stays_near_the_oracle,
    with_embedding,
)
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import wire
from nanotrain_jax.models import decoder
from nanotrain_jax.parallel.collectives import buckets
from nanotrain_jax.parallel.zero.cuts import UNSHARDED, choose_cuts
from nanotrain_jax.parallel.zero.zero import zero_specs
from nanotrain_jax.step import build as steps

# Every stage, policy, family and number of devices, replicas, prefetch, arrays in one bucket and in several. With MORE
# every stage has each of them (stage 0 with remat none: test_step.py). Stage 1: CHUNKED and PER_LAYER.
BUCKET_MB = {1: 0.01, 4: 25}  # by microbatches
COVER = [
    case("data 8", "llama", "selective", zero=0, microbatches=4),
    case("data 2", "llama", "full", zero=2, microbatches=4),
    case("replica 2 data 4", "gpt2", "selective", zero=2, microbatches=1),
    case("data 4", "llama", "block:2", zero=3, microbatches=4),
    case("data 4", "gpt2", "full", zero=3, microbatches=4, prefetch=True),
]
MORE = [
    case("data 4", "gpt2", "selective", zero=1, microbatches=4),
    case("data 8", "gpt2", zero=3, microbatches=1),
    case("replica 2 data 2", "llama", zero=3, microbatches=4),
    case("data 2", "gpt2", "block:2", zero=0, microbatches=4),
    case("replica 2 data 2", "gpt2", "block:1", zero=1, microbatches=4),
    case("data 4", "gpt2", "full", zero=0, microbatches=1),
    case("data 2", "llama", zero=1, microbatches=1),
    case("data 8", "llama", "full", zero=1, microbatches=1),
    case("data 4", "gpt2", "block:2", zero=2, microbatches=1),
    case("data 8", "llama", zero=2, microbatches=4),
    case("data 1", "llama", zero=3, microbatches=1),
    case("data 2", "gpt2", "selective", zero=3, microbatches=1),
    case("data 8", "llama", "full", zero=3, microbatches=4),
    case("replica 2 data 4", "gpt2", "selective", zero=3, microbatches=1),
    case("data 4", "llama", "selective", zero=3, microbatches=1, prefetch=True),
    case("replica 2 data 2", "llama", "block:2", zero=3, microbatches=4, prefetch=True),
]


def sharded(family="llama", remat="none", more=None, **parallel):
    return small(family, parallel={"persist_below": 64} | parallel, memory={"remat": remat}, **(more or {}))


def bucketed(case, **parallel):
    """The config of a case, with all small arrays in one bucket or in several."""
    return case.tree(parallel={"persist_below": 64, "bucket_mb": BUCKET_MB[case.parallel["microbatches"]]} | parallel)


@pytest.mark.parametrize("case", cover(COVER[-1:], COVER[:-1] + MORE, str))
def test_every_stage_equals_the_oracle(case, expected):
    equals_the_oracle(bucketed(case), expected)


CHUNKED = [
    case("data 4", "llama", model={"loss_chunk": 32}, zero=0, microbatches=1),
    case("data 2", "gpt2", model={"loss_chunk": 16}, zero=1, microbatches=4),
    case("data 8", "llama", model={"loss_chunk": 8}, zero=2, microbatches=1),
    case("data 4", "gpt2", model={"loss_chunk": 16}, zero=3, microbatches=2),
]


@pytest.mark.parametrize("case", cover(CHUNKED[1:2], [*CHUNKED[:1], *CHUNKED[2:]], str))
def test_chunked_losses_equal_the_oracle(case, expected):
    equals_the_oracle(case.tree(parallel={"persist_below": 64}), expected)


PER_LAYER = [
    case("replica 2 data 4", "llama", "full", zero=0, microbatches=4),
    case("data 8", "gpt2", zero=0, microbatches=1),
    case("replica 2 data 4", "gpt2", "block:1", zero=1, microbatches=1),
    case("data 8", "llama", zero=1, microbatches=4),
]


@pytest.mark.parametrize("case", cover(PER_LAYER[3:], PER_LAYER[:3], str))
def test_per_layer_reduction_equals_the_oracle(case, expected):
    equals_the_oracle(bucketed(case, grad_reduce="per_layer"), expected)


@pytest.mark.long
def test_all_stages_agree_after_five_updates():
    runs = [run(sharded(zero=zero, data=4, microbatches=2)) for zero in range(4)]
    for state, log in runs[1:]:
        np.testing.assert_allclose([m["loss"] for m in log], [m["loss"] for m in runs[0][1]], rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), state.params, runs[0][0].params
        )


def local_bytes(tree):
    """Return the bytes of a tree on a device: of arrays, or of the shapes and shardings that a step takes and returns
    (`equals_the_oracle` holds its arrays to these)."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("case", [("bfloat16", 2, 12), ("float32", 4, 8)])
def test_stored_bytes_per_parameter_are_the_papers(case):
    compute, *stored = case
    for zero in range(4):
        weights, optimizer = (4, 8) if zero == 3 else stored  # stage 3 stores no copy in 16 bit
        config, mesh = resolved(sharded(zero=zero, data=8, persist_below=0, more={"precision": {"compute": compute}}))
        step = steps.build(config, mesh)
        state, shapes = step.state, step.state.params
        cuts = choose_cuts(shapes, {"data": 8}, 0, ("layers",), jax.tree.map(lambda _: P(), shapes))
        sized = zip(jax.tree.leaves(shapes), jax.tree.leaves(cuts), strict=True)
        replicated = sum(p.size for p, cut in sized if cut == UNSHARDED)
        total = sum(p.size for p in jax.tree.leaves(shapes))
        assert replicated < (total - replicated) / 100
        per_device = replicated + (total - replicated) // 8
        assert local_bytes(state.params) == weights * (per_device if zero == 3 else total)
        assert local_bytes(state.opt) == optimizer * (per_device if zero else total) + 8  # 8: two counts of updates


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("case", cover([(0, "bfloat16")], [(3, "float32"), (1, "float32"), (2, "bfloat16")]))
def test_bfloat16_runs_of_all_stages_are_close_to_float32(case, expected):
    zero, reduce = case
    precision = {"precision": {"compute": "bfloat16", "grad_reduce": reduce}}
    tree = sharded(zero=zero, data=4, microbatches=2, more=precision)
    stays_near_the_oracle(tree, expected, loss_error=2**-8)  # one unit in the last place


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("zero", cover([0], [3], str))
def test_updates_too_small_for_bfloat16_accumulate_in_master_weights(zero):
    more = {"precision": {"compute": "bfloat16"}, "optimizer": {"lr": 1e-5}}
    config, mesh = resolved(sharded(zero=zero, data=4, microbatches=2, more=more))
    step, batches = steps.build(config, mesh), random_tokens(config, count=3)
    before = decoder.init(config.model, config.train.seed)
    after, *_ = oracle.train(before, batches, lr=1e-5)
    state = step.init()
    for tokens in batches:
        state, _, _ = step.train(state, on_devices(tokens, step))
    state = step.in_layer_order(state)  # at stage 3 the step stores master weights alone
    gains = jax.tree.leaves(state.params["ends"]["norm"])[0]
    assert {float(gain) for gain in gains} == {1.0}  # each update is lost in bfloat16
    moved = jax.tree.map(np.subtract, jax.device_get((after, state.opt.master)), (before, before))
    errors = relative_errors(moved[1], moved[0])
    assert max(errors.values()) < 0.03, errors


@pytest.mark.long  # test_step.py has stage 0, and the test below stage 3
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_step_whose_gradients_are_not_finite_is_skipped_at_every_stage(zero):
    config, mesh = resolved(sharded(zero=zero, data=4))
    step = steps.build(config, mesh)
    # One embedding row is not finite; only one row of the batch, on one device, uses it.
    good, bad, last = (np.where(t == 60, 0, t) for t in random_tokens(config, count=3))
    bad[5, 3] = 60

    def after(batches):
        state = with_embedding(step.init(), 60, np.nan)
        for tokens in batches:
            state, _, _ = step.train(state, on_devices(tokens, step))
        return jax.device_get(state)

    state, clean = after([good, bad, last]), after([good, last])
    assert (int(state.step), int(state.skipped), int(clean.skipped)) == (3, 1, 0)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt), (clean.params, clean.opt))


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("case", cover([(3, "dynamic")], [(0, "dynamic"), (1, 1024.0), (2, "dynamic")]))
def test_a_float16_overflow_halves_the_scale_and_skips_that_step_on_all_devices(case):
    zero, scale = case
    precision = {"precision": {"compute": "float16", "loss_scale": scale}}
    config, mesh = resolved(sharded(zero=zero, data=4, microbatches=2, more=precision))
    step = steps.build(config, mesh)
    # One embedding row overflows float16; only one row of the second batch, on one device, uses it.
    good, bad, last = (np.where(t == 60, 0, t) for t in random_tokens(config, count=3))
    bad[5, 3] = 60

    states, log = [with_embedding(step.init(), 60, 7e4)], []
    for tokens in good, bad, last:
        state, metrics, _ = step.train(jax.tree.map(jnp.copy, states[-1]), on_devices(tokens, step))
        states.append(state)
        log.append(jax.device_get(metrics))
    _, before, after, end = states
    first = 2.0**16 if scale == "dynamic" else scale
    left = first / 2 if scale == "dynamic" else scale
    assert [float(m["loss_scale"]) for m in log] == [first, first, left]
    assert [int(m["skipped_steps"]) for m in log] == [0, 1, 1]
    assert [bool(np.isfinite(m["grad_norm"])) for m in log] == [True, False, True]
    jax.tree.map(np.testing.assert_array_equal, (before.params, before.opt), (after.params, after.opt))
    for copies in (x.addressable_shards for x in jax.tree.leaves((end.skipped, end.scale))):
        assert {float(copy.data) for copy in copies} == {float(copies[0].data)}
    assert (int(end.opt.moments[0].count), int(end.step), float(end.scale.value)) == (2, 3, left)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("zero", cover([3], [0], str))
def test_float16_with_a_loss_scale_is_close_to_float32(zero, expected):
    precision = {"precision": {"compute": "float16", "loss_scale": "dynamic"}}
    tree = sharded(zero=zero, data=4, microbatches=2, more=precision)
    stays_near_the_oracle(tree, expected, loss_error=2**-11)  # one unit in the last place


@pytest.mark.long
def test_memory_decreases_with_each_stage_and_with_remat():
    def held(zero, remat):
        config, mesh = resolved(
            sharded(
                zero=zero,
                data=8,
                microbatches=2,
                remat=remat,
                more={"model": {"d_model": 64, "d_ff": 256, "num_layers": 8}, "data": {"seq_len": 32}},
            )
        )
        step = steps.build(config, mesh)
        memory = step.train.lower(step.state, step.batch).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    by_stage = [held(zero, "none") for zero in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert len(set(by_stage)) == 4
    assert held(3, "none") > held(3, "selective") > held(3, "full")


@pytest.mark.parametrize("remat", cover(["full"], ["none"]))
@pytest.mark.parametrize("zero", range(4))
def test_each_stage_communicates_as_its_table_says(zero, remat):
    config, mesh = resolved(sharded(zero=zero, data=8, microbatches=2, remat=remat))
    step = steps.build(config, mesh)
    places = {}
    for where, operation in collectives(step.train.lower(step.state, step.batch).compile().as_text()):
        places.setdefault(operation, set()).add(where)
    in_loops = {operation: len(found - {"ENTRY"}) for operation, found in places.items()}
    once = {operation for operation, found in places.items() if "ENTRY" in found}
    gathers, scatters = in_loops.get("all-gather", 0), in_loops.get("reduce-scatter", 0)
    # Computations inside loops that gather (layers forward and backward), and that scatter (layers, ends); the others
    # run once per step. XLA:CPU gathers the ends of stage 3 once, before the loop of microbatches.
    assert (gathers, scatters > 0, once) == [
        (0, False, {"all-reduce"}),
        (0, False, {"all-reduce", "reduce-scatter", "all-gather"}),
        (0, True, {"all-reduce", "all-gather"}),
        (2, True, {"all-reduce", "all-gather"}),
    ][zero]
    assert in_loops["all-reduce"] == 0


@pytest.mark.parametrize("zero", cover([], [0, 1], str))
def test_per_layer_reduction_runs_once_per_step_inside_the_backward(zero):
    def moved(microbatches, when):
        config, mesh = resolved(sharded(zero=zero, data=8, microbatches=microbatches, grad_reduce=when))
        step = steps.build(config, mesh)
        found = wire.collectives(step.train.lower(step.state, step.batch).compile().as_text(), mesh.shape)
        return sum(c.bytes * c.count for c in found), [c.count for c in found]

    (bytes_before, counts_before), *others = [
        moved(microbatches, when) for microbatches, when in ((1, "after_backward"), (1, "per_layer"), (4, "per_layer"))
    ]
    assert set(counts_before) == {1}
    for bytes_moved, counts in others:
        assert bytes_moved == bytes_before
        assert max(counts) == 2  # layers


@pytest.mark.parametrize(
    ("sizes", "limit", "groups"),
    [
        ([], 10, []),
        ([4, 4, 4], 10, [[0, 1], [2]]),
        ([4, 6, 1], 10, [[0, 1], [2]]),
        ([4, 20, 4, 4], 10, [[0], [1], [2, 3]]),
        ([1, 2], 0, [[0], [1]]),
    ],
)
def test_buckets_are_filled_in_order_and_larger_arrays_have_their_own(sizes, limit, groups):
    assert buckets(sizes, limit) == groups


@pytest.mark.parametrize(
    ("zero", "together"),
    [
        pytest.param(1, {"reduce_scatter": 1, "all_gather": 1}, marks=pytest.mark.long),
        (3, {"reduce_scatter": 1 + 4, "all_gather": 1 + 2 * 4}),
    ],
)
def test_small_arrays_are_communicated_in_flat_buckets(zero, together):
    def moved(bucket_mb):
        config, mesh = resolved(sharded(zero=zero, data=4, bucket_mb=bucket_mb, more={"model": {"num_layers": 4}}))
        step = steps.build(config, mesh)
        found = wire.collectives(step.train.lower(step.state, step.batch).compile().as_text(), mesh.shape)
        found = [c for c in found if c.operation in together]
        counts = {kind: sum(c.count for c in found if c.operation == kind) for kind in together}
        return counts, sum(c.bytes * c.count for c in found)

    (counts, bytes_moved), (alone, the_same_bytes) = moved(25), moved(0)
    assert counts == together
    assert all(alone[kind] > 3 * counts[kind] for kind in together)
    assert bytes_moved == the_same_bytes


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(jax.nn.relu(linen.Dense(512)(x)))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 512, rngs=rngs), nnx.Linear(512, 8, rngs=rngs)


@pytest.mark.parametrize(
    "params",
    [
        jax.eval_shape(lambda: LinenMLP().init(jax.random.key(0), jnp.ones((1, 8))))["params"],
        nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: NnxMLP(nnx.Rngs(0))), nnx.Param)),
    ],
    ids=["linen", "nnx"],
)
def test_zero_specs_fit_a_foreign_model(params):
    _, mesh = resolved(small(parallel={"data": 8}))
    for stage in range(4):
        weights, state = zero_specs(params, mesh, stage, persist_below=100)
        split = {(8, 512): P("data"), (512, 8): P("data"), (512,): P("data"), (8,): P()}
        for specs, sharded in (weights, stage == 3), (state, stage > 0):
            for spec, param in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
                assert spec == (split[param.shape] if sharded else P())
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
        jax.device_put(zeros, jax.tree.map(lambda s: jax.NamedSharding(mesh, s), weights))
    with pytest.raises(ValueError, match="stage 4 is unknown"):
        zero_specs(params, mesh, 4)
