"""Muon: equal to optax's on one device, in every layout; bytes, FLOPs and state are those of the closed forms."""

import math
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from cases import case
from command import config_file, main, same, saved_state
from conftest import (
    LOSS,
    STATE,
    built,
    compiled_text,
    cover,
    on_devices,
    padded,
    random_tokens,
    resolved,
    skips_an_overflow,
    starting_from,
)
from optax.contrib import MuonDimensionNumbers, muon
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.audit import matmuls
from nanotrain_jax.costs import communication, flops, memory
from nanotrain_jax.models import decoder
from nanotrain_jax.parallel.zero.muon import newton_schulz
from nanotrain_jax.planner import explain
from nanotrain_jax.planner.estimate import estimate
from nanotrain_jax.step import build as steps

__all__ = ["config_file"]  # a fixture

MOMENTUM, LR = 0.9, 1e-2  # no defaults
MUON = {"name": "muon", "momentum": MOMENTUM}
AS_MATRIX = {  # stacked array -> its dims of rows, of columns
    "q_DNH": MuonDimensionNumbers((1,), (2, 3)),
    "k_DKH": MuonDimensionNumbers((1,), (2, 3)),
    "v_DKH": MuonDimensionNumbers((1,), (2, 3)),
    "out_NHD": MuonDimensionNumbers((1, 2), (3,)),
    "up_DF": MuonDimensionNumbers((1,), (2,)),
    "gate_DF": MuonDimensionNumbers((1,), (2,)),
    "down_FD": MuonDimensionNumbers((1,), (2,)),
    "router_DE": MuonDimensionNumbers((1,), (2,)),
    "up_EDF": MuonDimensionNumbers((2,), (3,)),  # of each expert
    "gate_EDF": MuonDimensionNumbers((2,), (3,)),
    "down_EFD": MuonDimensionNumbers((2,), (3,)),
}
MIXTURE = {"experts": {"num": 8, "top_k": 2, "d_ff": 64, "balance": "none", "capacity": 8.0}}  # room for all rows


def tree_of(layout, **sections):
    """A small float32 run with this layout; every parameter of some size is sharded by ZeRO."""
    tree = layout.tree(parallel={"persist_below": 64}, **sections)
    return tree | {"optimizer": tree["optimizer"] | MUON}


def trained_by_optax(params, batches, frozen=()):
    """Return weights and losses of optax's Muon for matrices and its AdamW for the rest, in plain JAX on one device.

    `optax.contrib.muon` alone would use Adam with Nesterov momentum for the rest.
    """
    matrices = jax.tree_util.tree_map_with_path(lambda path, _: AS_MATRIX.get(path[-1].key), params)
    mask = partial(jax.tree_util.tree_map_with_path, lambda path, _: oracle.decayed(path))
    decay = {"weight_decay": oracle.DECAY}
    of_matrices = muon(
        LR, beta=MOMENTUM, weight_decay_mask=mask, consistent_rms=0.2, muon_weight_dimension_numbers=matrices, **decay
    )
    of_rest = optax.adamw(LR, oracle.B1, oracle.B2, oracle.EPS, mask=mask, **decay)

    @jax.jit
    def update(params, states, tokens):
        loss, grads = jax.value_and_grad(oracle.loss)(params, tokens)
        grads = jax.tree_util.tree_map_with_path(lambda p, g: 0 * g if oracle.is_frozen(p, frozen) else g, grads)
        with jax.numpy_dtype_promotion("standard"):
            (a, first), (b, second) = (
                optimizer.update(grads, state, params)
                for optimizer, state in zip((of_matrices, of_rest), states, strict=True)
            )

        def chosen(path, a, b):
            update = a if path[-1].key in AS_MATRIX else b
            return 0 * update if oracle.is_frozen(path, frozen) else update

        return optax.apply_updates(params, jax.tree_util.tree_map_with_path(chosen, a, b)), (first, second), loss

    states, losses = (of_matrices.init(params), of_rest.init(params)), []
    for tokens in batches:
        params, states, loss = update(params, states, tokens)
        losses.append(loss)
    return params, losses


class Expected(dict):
    """(family, layers, has experts, frozen) -> the initial weights, and those of optax after 3 updates, with losses."""

    def __missing__(self, key):
        family, layers, has_experts, frozen = key
        model = {"num_layers": layers} | (MIXTURE if has_experts else {})
        config, _ = resolved(tree_of(case("data 1", family, model=model)))
        params = jax.device_get(decoder.init(config.model, config.train.seed))
        self[key] = params, trained_by_optax(params, random_tokens(config, count=3), frozen)
        return self[key]


@pytest.fixture(scope="module")
def optax_muon():
    return Expected()


def equals_optax(tree, optax_muon):
    """Compare weights and losses of 3 updates of a config with those of optax on one device."""
    step = built(tree)
    config = step.plan.config
    key = config.model.family, config.model.num_layers, config.model.experts is not None, config.train.freeze
    start, (expected, losses) = optax_muon[key]
    state = starting_from(step, start)
    for tokens, loss in zip(random_tokens(config, count=3), losses, strict=True):
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        np.testing.assert_allclose(metrics["loss"], loss, **LOSS)
    found = step.in_layer_order(state).params
    found["layers"] = jax.tree.map(lambda x: x[: config.model.num_layers], found["layers"])  # without padding
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), found, padded(expected, found))


def costs_what_the_closed_forms_say(tree):
    """Compare the compiled step with the closed forms: bytes of every collective, FLOPs of matmuls, state."""
    moves_the_bytes_of_the_papers(tree)
    step = built(tree)
    config, text = step.plan.config, compiled_text(step)
    found = matmuls.flops(text, communication.conditional_rates(config))
    if config.parallel.context == 1:  # the closed form of ring attention is not exact for AdamW either
        assert found == pytest.approx(flops.step_flops(config), rel=1e-6)
    local = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.state)]
    assert sum(local) == pytest.approx(sum(memory.state(config).values()), abs=100)  # counters


CASES = [
    case("data 4", zero=3, microbatches=2),  # two devices have no matrix
    case("data 2 tensor 2", zero=1),
    case("pipe 2 data 2 replica 2", zero=2, microbatches=2),
]
MORE = [
    case("data 1"),
    case("data 2", "gpt2", zero=0),
    case("data 2 tensor 2", "gpt2", zero=1),
    case("data 2", zero=3, model={"num_layers": 3}),
    case("tensor 4"),  # two heads of keys on four devices
    case("data 2 tensor 2", zero=3, microbatches=2),
    case("data 4", "gpt2", zero=1, grad_reduce="per_layer"),
    case("data 4", zero=3, prefetch=True, microbatches=2),
    case("context 2 data 2", zero=2),
    case("replica 2 data 2", zero=1, compress="topk:1"),
    case("pipe 2 data 2", zero=3, microbatches=4, schedule="zero_bubble", vocab_over_pipe=True),
    case("pipe 2 tensor 2", "gpt2", zero=1, microbatches=2, chunks=2, schedule="interleaved", model={"num_layers": 4}),
    case("pipe 2 data 4", zero=1, microbatches=2, model={"num_layers": 3}),
    case("data 4 expert 2", zero=3, model=MIXTURE),
    case("data 4 expert 4 tensor 2", zero=1, model=MIXTURE),
    case("data 2", zero=1, model=MIXTURE),
    case("pipe 2 data 2 expert 2", zero=2, microbatches=2, model=MIXTURE),
]


@pytest.mark.parametrize("layout", cover(CASES[:1], CASES[1:] + MORE, str))
def test_updates_equal_those_of_optax_and_costs_the_closed_forms(layout, optax_muon):
    equals_optax(tree_of(layout), optax_muon)
    costs_what_the_closed_forms_say(tree_of(layout))


FROZEN = [(case("data 2 tensor 2", zero=1), "mlp"), (case("pipe 2 data 2", zero=3, microbatches=2), "attention")]


@pytest.mark.parametrize("layout_and_word", cover([], FROZEN, lambda case: f"{case[0]} {case[1]}"))
def test_frozen_matrices_have_no_momentum(layout_and_word, optax_muon):
    layout, word = layout_and_word
    tree = tree_of(layout, train={"seed": 3, "freeze": [word]})
    equals_optax(tree, optax_muon)
    costs_what_the_closed_forms_say(tree)


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")
def test_an_overflow_changes_nothing():
    sections = {"precision": {"compute": "float16", "loss_scale": "dynamic"}}
    skips_an_overflow(tree_of(case("data 2 tensor 2", zero=2), **sections))


@pytest.mark.long
def test_replicas_that_step_apart_take_steps_of_their_own():
    layout = case("replica 2 data 2", zero=1, sync_every=2)
    tree = tree_of(layout)
    moves_the_bytes_of_the_papers(tree)
    config, mesh = resolved(tree)
    (tokens,) = random_tokens(config)
    step = steps.build(config, mesh)
    state, _, _ = step.train(step.init(), on_devices(tokens, step))
    alone_config, alone_mesh = resolved(tree_of(case("data 1"), data={"batch_size": 16}))
    alone = steps.build(alone_config, alone_mesh)
    for replica, rows in enumerate(np.split(tokens, 2)):
        expected, _, _ = alone.train(alone.init(), on_devices(rows, alone))
        own = jax.tree.map(lambda x: x[..., replica], state.params)  # noqa: B023
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), own, expected.params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (32, 1)])
def test_newton_schulz_brings_singular_values_near_1(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape) * 1e-6
    found = newton_schulz(jnp.asarray(x, dtype)).astype(jnp.float32)
    values = np.linalg.svd(found, compute_uv=False)
    assert values.min() > 0.65
    assert values.max() < 1.25
    u, _, v = np.linalg.svd(x, full_matrices=False)
    along = u.T @ found @ v.T  # diagonal: the same singular vectors
    rounding = 1e-4 if dtype == "float32" else 0.05
    np.testing.assert_allclose(along, np.diag(np.diag(along)), atol=rounding)
    np.testing.assert_allclose(np.sort(np.diag(along)), np.sort(values), atol=rounding)
    assert not np.any(newton_schulz(jnp.zeros(shape, dtype)))


RUN = "optimizer.name=muon", "parallel.persist_below=64", "train.eval_every=0", "data.seq_len=16"


@pytest.mark.long
def test_a_run_resumes_bitwise_and_on_another_mesh_but_not_with_adamw(config_file, tmp_path, capsys):
    def train(folder, last, *layout):
        return main(config_file, *RUN, *layout, f"logging.dir={tmp_path}/{folder}", f"train.steps={last}")

    sharded, elsewhere = ("parallel.zero=1",), ("parallel.data=2", "parallel.tensor=2", "parallel.zero=3")
    assert train("whole", 5, *sharded) == train("resumed", 3, *sharded) == 0
    shutil.copytree(tmp_path / "resumed", tmp_path / "moved")
    assert train("resumed", 5, *sharded, "optimizer.name=adamw") == 2
    assert "optimizer.name=adamw but the checkpoint was trained with muon" in capsys.readouterr().err
    assert train("resumed", 5, *sharded) == train("moved", 5, *elsewhere) == 0
    assert capsys.readouterr().out.count("resumed from step 3") == 2
    whole, resumed, moved = (saved_state(tmp_path / name)[1] for name in ("whole", "resumed", "moved"))
    same(whole, resumed)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, whole[0]["params"]["layers"], moved[0]["params"]["layers"])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"memory": {"offload_optimizer": "host"}}, "optimizer.name=muon with memory.offload_optimizer=host"),
        ({"optimizer": MUON | {"factory": "a:b"}}, "optimizer.name=muon with optimizer.factory=a:b"),
    ],
)
def test_what_muon_cannot_do_is_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        resolved(tree_of(case("data 2", zero=1)) | sections)


def test_the_planner_explains_muon():
    config, _ = resolved(tree_of(case("data 4 tensor 2", zero=1)))
    e = estimate(config, "h100")
    assert e.flops > estimate(config.replace("optimizer", name="adamw"), "h100").flops
    lines = [line for section in explain.explain(e) for line in section.lines]
    for word in ("Newton-Schulz", "of matrices (muon)", "padded to whole matrices"):
        (line,) = {line.numbers: line for line in lines if word in line.formula and "tensor" not in line.what}.values()
        found = eval(line.numbers.replace(",", "").replace(" x ", " * ").replace("^", "**"))
        assert found == pytest.approx(line.value, rel=1e-4)
