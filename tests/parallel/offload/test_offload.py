"""Host memory offload: the same numbers, each array in the configured memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS, ALL, OPTIMIZER, PARAMS, WORDS
from conftest import ROOT, STATE, cover, on_devices, random_tokens, records, resolved, run, small

from nanotrain_jax import train
from nanotrain_jax.parallel.offload import host_offload
from nanotrain_jax.run import loop
from nanotrain_jax.step import build as steps

pytestmark = pytest.mark.usefixtures("no_cache_of_programs")

MIXTURE = {"model": {"d_ff": None, "experts": {"num": 4, "top_k": 2, "d_ff": 64, "balance": "bias"}}}
COVER = [  # mode, remat, parallel, family
    ("activations", "selective", {"data": 4, "zero": 0, "microbatches": 2}, "llama"),
    ("all", "block:2", {"data": 4, "zero": 3, "microbatches": 2}, "llama"),
]
MORE = [
    ("params", "none", {"data": 4, "zero": 3, "microbatches": 4}, "gpt2"),
    ("optimizer", "none", {"data": 2, "zero": 2, "tensor": 2, "microbatches": 2}, "llama"),
    ("optimizer", "none", {"data": 2, "zero": 1, "pipe": 2, "microbatches": 2}, "llama"),
    ("optimizer", "none", {"data": 4, "zero": 0}, "llama"),
    ("activations", "full", {"data": 2, "zero": 1, "pipe": 2, "microbatches": 2}, "llama"),
    *(("optimizer", "full", {"data": 4, "zero": zero, "microbatches": 2}, "gpt2") for zero in range(4)),
    *(("optimizer", "none", {"data": 2, "zero": zero, "pipe": 2, "microbatches": 2}, "gpt2") for zero in (0, 2, 3)),
    *(("optimizer", "none", {"data": 2, "zero": zero, "tensor": 2}, "llama") for zero in (0, 1, 3)),
    ("optimizer", "none", {"data": 2, "zero": 3, "replica": 2}, "llama"),
    *(
        ("activations", remat, {"data": 4, "zero": zero}, "llama")
        for remat in ("full", "block:2")
        for zero in (1, 2, 3)
    ),
    ("activations", "selective", {"data": 2, "zero": 0, "tensor": 2}, "gpt2"),
    ("activations", "selective", {"pipe": 2, "microbatches": 4, "schedule": "zb_h1"}, "llama"),
    ("activations", "full", {"pipe": 2, "microbatches": 4, "idle": "mask"}, "llama"),
    ("params", "selective", {"data": 4, "zero": 3}, "llama"),
    ("params", "full", {"data": 2, "zero": 3, "tensor": 2, "microbatches": 2}, "llama"),
    ("params", "none", {"data": 2, "zero": 3, "pipe": 2, "microbatches": 2}, "llama"),
    ("all", "full", {"data": 2, "zero": 3, "pipe": 2, "microbatches": 2}, "llama"),
    ("all", "selective", {"data": 2, "zero": 3, "pipe": 2, "microbatches": 4, "schedule": "zb_h1"}, "llama"),
    ("all", "selective", {"data": 2, "zero": 3, "replica": 2, "tensor": 2}, "llama"),
    ("all", "selective", {"data": 4, "expert": 2, "zero": 3, "microbatches": 2}, "llama"),
    ("optimizer", "none", {"data": 2, "expert": 2, "zero": 1, "tensor": 2}, "llama"),
    ("activations", "full", {"data": 2, "expert": 2, "pipe": 2, "microbatches": 2}, "llama"),
]


def case_id(case):
    mode, remat, parallel, family = case
    return "-".join([mode, remat, family, *(f"{key}={value}" for key, value in parallel.items())])


def tree(mode, remat, parallel, family, **changes):
    everything = {"persist_below": 0} | parallel  # offload small arrays too
    changes |= MIXTURE if "expert" in parallel else {}
    return small(family, parallel=everything, memory=(WORDS[mode] if mode else {}) | {"remat": remat}, **changes)


def memory_kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize("case", cover(COVER[1:], [COVER[0], *MORE], case_id))
def test_every_mode_equals_the_run_without_offload_bitwise(case):
    mode, *others = case
    norms_are_whole = others[1].get("zero", 0) < 2  # norms of slices have another order of sums
    clip = {"optimizer": {"grad_clip": 0.5}} if norms_are_whole else {}
    (state, log), (plain, plain_log) = run(tree(mode, *others, **clip), 3), run(tree(None, *others, **clip), 3)
    streams = mode == "activations" or others[1].get("zero", 0) >= 2
    is_tied = others[2] == "gpt2" and "pipe" not in others[1]
    gathers_again = others[1].get("zero") == 3 and "tensor" in others[1] and others[0] != "full"
    if streams and (is_tied or gathers_again):
        # Another order of the same sums: gradients of the two uses of tied embeddings are added at the end; of what
        # tensor gathers for the backward, XLA:CPU chooses in each program whether rows or tokens come first.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), *jax.device_get((state, plain)))
    else:
        equal(state, plain)
        assert [m["loss"] for m in log] == [m["loss"] for m in plain_log]
    np.testing.assert_allclose([m["grad_norm"] for m in log], [m["grad_norm"] for m in plain_log], rtol=1e-6)
    assert memory_kinds(state.opt) == ({"pinned_host"} if mode != "activations" else {"device"})
    on_device = {"device"} if "expert" in others[1] or mode not in ("params", "all") else set()  # a constant: its bias
    assert memory_kinds(state.params) == on_device | ({"pinned_host"} if mode in ("params", "all") else set())


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 3])
def test_on_one_device_the_last_bit_may_differ(zero):
    """XLA fuses other operations there."""
    others = "none", {"data": 1, "zero": zero}, "llama"
    (state, _), (plain, _) = run(tree("params" if zero else "optimizer", *others), 3), run(tree(None, *others), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7), *jax.device_get((state, plain)))


IN_16_BIT = [
    ("all", "full", {"data": 4, "zero": 3, "microbatches": 2}, {"compute": "bfloat16", "grad_reduce": "bfloat16"}),
    ("activations", "full", {"data": 2, "zero": 1, "microbatches": 8}, {"compute": "bfloat16"}),
]
SCALED = ("params", "full", {"data": 4, "zero": 3}, {"compute": "float16", "loss_scale": "dynamic"})


@pytest.mark.parametrize("case", cover([], [*IN_16_BIT, SCALED], lambda case: case[0]))
def test_16_bit_weights_and_master_weights_equal_those_without_offload(case):
    mode, remat, parallel, precision = case
    with jax.numpy_dtype_promotion("standard"):
        trees = [tree(m, remat, parallel, "llama", precision=precision) for m in (mode, None)]
        (state, log), (plain, plain_log) = (run(config, 3) for config in trees)
    if case == SCALED:  # XLA rounds less often inside fusions, and fuses differently
        np.testing.assert_allclose([m["loss"] for m in log], [m["loss"] for m in plain_log], rtol=2**-11)
        assert int(state.skipped) == int(plain.skipped)
        return
    saved = [steps.build(*resolved(trees[i])).in_layer_order((state, plain)[i]) for i in range(2)]
    equal(*saved)
    assert [m["loss"] for m in log] == [m["loss"] for m in plain_log]


def test_initial_weights_are_the_same_and_small_arrays_stay_on_the_device():
    config, mesh = resolved(small("gpt2", parallel={"data": 4, "zero": 3, "persist_below": 1000}, memory=PARAMS))
    step = steps.build(config, mesh)
    state = step.init()
    plain, plain_mesh = resolved(small("gpt2", parallel={"data": 1}))
    equal(state, steps.build(plain, plain_mesh).init())
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, step.state)
    layers = state.params["layers"]
    assert layers["mlp"]["up_DF"].sharding.memory_kind == "pinned_host"
    assert layers["norm_mlp"]["gain_D"].sharding.memory_kind == "device"


PIPED = {"data": 2, "zero": 3, "pipe": 2, "microbatches": 2}


@pytest.mark.parametrize("parallel", cover([], [{"data": 4, "zero": 3}, PIPED], lambda parallel: str(len(parallel))))
def test_evaluation_is_the_same_with_offloaded_weights(parallel):
    losses = []
    for mode in "params", None:
        config, mesh = resolved(tree(mode, "none", parallel, "llama"))
        step = steps.build(config, mesh)
        losses.append(step.evaluate(step.init().params, on_devices(random_tokens(config)[0], step)))
    equal(*losses)


@pytest.mark.long
def test_a_skipped_step_leaves_host_memory_unchanged():
    config, mesh = resolved(tree("params", "none", {"data": 4, "zero": 3, "microbatches": 2}, "llama"))
    step = steps.build(config, mesh)
    state = step.init()
    broken = np.array(state.params["ends"]["embedding_VD"])
    broken[60] = np.nan
    ends = state.params["ends"] | {
        "embedding_VD": jax.device_put(broken, state.params["ends"]["embedding_VD"].sharding)
    }
    state = state._replace(params=state.params | {"ends": ends})
    good, bad = (np.where(t == 60, 0, t) for t in random_tokens(config, count=2))
    bad[5, 3] = 60
    state, _, _ = step.train(state, on_devices(good, step))
    before = jax.device_get((state.params, state.opt))
    state, metrics, _ = step.train(state, on_devices(bad, step))
    assert not np.isfinite(metrics["grad_norm"])
    assert int(state.skipped) == 1
    equal((state.params, state.opt), before)


def test_reordering_layers_keeps_them_in_their_memory():
    parallel = {"pipe": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2, "persist_below": 0}
    config, mesh = resolved(small(model={"num_layers": 4}, parallel=parallel, memory=OPTIMIZER))
    step = steps.build(config, mesh)
    state = step.init()
    ordered = step.in_layer_order(state)

    def up(state):
        return np.asarray(state.params["layers"]["mlp"]["up_DF"])

    np.testing.assert_array_equal(up(ordered), up(state)[[0, 2, 1, 3]])
    assert ordered.opt.moments[0].mu["layers"]["mlp"]["up_DF"].sharding.memory_kind == "pinned_host"
    equal(step.in_stage_order(ordered), state)


@pytest.mark.parametrize("modes", cover([], [("all", "none"), ("none", "all")]))
def test_a_checkpoint_of_one_mode_resumes_in_another(modes, text_files, tmp_path):
    first, second = modes  # not clipped: norms of slices have another order of sums
    options = {"none": [], "all": [f"memory.{key}={value}" for key, value in ALL.items()]}
    base = [
        "--config", str(ROOT / "configs" / "quickstart.yaml"), f"data.source=text:{text_files}", "train.eval_every=0",
        "model.num_layers=2", "model.d_model=32", "model.num_heads=2", "data.seq_len=32", "data.batch_size=8",
        "precision.compute=float32", "runtime.simulate=8", "parallel.data=4", "parallel.zero=3",
        "logging.progress=none", "parallel.persist_below=0", "logging.tensorboard=false", "checkpoint.every=3",
        "optimizer.schedule=constant", "train.log_every=1", "memory.remat=full", "optimizer.grad_clip=0",
    ]  # fmt: skip
    for folder, steps_and_modes in (("two", [(3, first), (6, second)]), ("one", [(6, second)])):
        for number, mode in steps_and_modes:
            logging = f"logging.dir={tmp_path / folder}"
            assert train.main([*base, *options[mode], f"train.steps={number}", logging]) == 0
    two, one = ([r["loss"] for r in records(tmp_path / folder)] for folder in ("two", "one"))
    assert two == one


@pytest.mark.long
def test_a_run_warns_once_if_devices_have_no_separate_memory(tmp_path, capsys):
    arguments = ["--config", str(ROOT / "configs" / "quickstart.yaml"), f"logging.dir={tmp_path}", "train.steps=1"]
    arguments += ["data.source=synthetic", "model.vocab_size=64", "runtime.simulate=8", "model.num_layers=2"]
    arguments += ["model.d_model=32", "model.num_heads=2", "data.seq_len=32", "parallel.persist_below=0"]
    assert train.main([*arguments, "checkpoint.every=0", "memory.offload_optimizer=host"]) == 0
    output = capsys.readouterr().out
    assert output.count("on CPU devices offloading saves no memory") == 1
    assert "offloaded to host memory, per device: optimizer" in output


def test_a_gpu_without_the_requested_host_memory_raises():
    config, mesh = resolved(small(memory=OPTIMIZER, parallel={"data": 1, "persist_below": 0}))

    class Device:
        platform = "gpu"

    class Mesh:
        devices = np.array([Device()])

    class Run:
        mesh = Mesh

    Run.config = config
    Run.step = steps.build(config, mesh)
    with pytest.raises(RuntimeError, match="uses no host memory"):
        loop.check_offload(Run, 0)
    loop.check_offload(Run, 1000)


@pytest.mark.parametrize(
    ("parallel", "memory_keys", "message"),
    [
        ({"zero": 1}, PARAMS, "memory.offload_params=host with parallel.zero=1: below stage 3"),
        ({"zero": 3}, {"offload_params": "host"}, "memory.offload_params=host with memory.offload_optimizer=none"),
        ({"zero": 3, "prefetch": True}, PARAMS, "parallel.prefetch=true with memory.offload_params=host"),
        (
            {"zero": 3, "prefetch": True},
            OPTIMIZER,
            "parallel.prefetch=true with gradients or activations in host memory",
        ),
        ({}, ACTIVATIONS, "memory.offload_activations=host with memory.remat=none"),
    ],
)
def test_unsupported_combinations_raise_in_one_line(parallel, memory_keys, message):
    with pytest.raises(ValueError, match=message) as error:
        resolved(small(parallel=parallel, memory=memory_keys))
    assert "\n" not in str(error.value)
    assert "use" in str(error.value) or "leave" in str(error.value)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("is_on_host", [False, True])
def test_stream_updates_arrays_on_the_device_and_on_the_host(count, is_on_host):
    x, y = jnp.arange(24.0).reshape(8, 3), jnp.ones((8, 3))

    def double(x, y):
        x = host_offload.to_host(x) if is_on_host else x
        out, more = host_offload.stream(lambda pair, y: (pair[0] * 2 + y, pair[1] - y), (x, y), y, count)
        assert host_offload.on_host(out) == is_on_host
        return host_offload.to_device(out), more

    out, more = jax.jit(double)(x, y)
    np.testing.assert_array_equal(out, 2 * np.asarray(x) + 1)
    np.testing.assert_array_equal(more, 0 * np.asarray(y))
    total = jax.jit(
        lambda x: host_offload.sum_over_slices(jnp.sum, host_offload.to_host(x) if is_on_host else x, count)
    )(x)
    assert total == np.asarray(x).sum()


@pytest.mark.parametrize(
    ("size", "rows", "limit", "count"),
    [
        (100, 10, 100, 1),
        (100, 10, 50, 2),
        (100, 10, 30, 5),
        (100, 10, 1, 10),
        (97 * 8, 97, 400, 1),
        (96 * 8, 96, 100, 8),
        (2**50, 2**40, 2**24, 2**26),  # must not loop over rows
    ],
)
def test_slices_are_within_the_limit_if_rows_can_be_divided(size, rows, limit, count):
    assert host_offload.num_slices(size, rows, limit) == count
