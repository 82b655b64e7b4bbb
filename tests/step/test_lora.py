"""Adapters (train.lora): the maths of the oracle in every layout, with the bytes and FLOPs of the closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ALL, case
from closed_forms import has_flops_and_bytes_of_the_closed_forms
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

from nanotrain_jax import plan
from nanotrain_jax.audit import matmuls
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.costs import communication, counts, flops, memory, mixture
from nanotrain_jax.models import decoder
from nanotrain_jax.parallel.sharding import path_name
from nanotrain_jax.step import build as steps

LORA = {"rank": 4, "alpha": 4 * oracle.SCALE}
SOME = {"rank": 2, "alpha": 2 * oracle.SCALE, "targets": ["q", "v", "down"]}
OF_ATTENTION = LORA | {"targets": ["q", "k", "v", "out"]}
OF_MLP = LORA | {"targets": ["up", "down"]}
EXPERTS = {"num": 4, "top_k": 2, "d_ff": 64, "balance": "none", "first_dense": 2, "capacity": 4.0}
MIXTURE = {"num_layers": 4, "d_ff": 96, "experts": EXPERTS}
ONE_DENSE = MIXTURE | {"num_layers": 5, "experts": EXPERTS | {"first_dense": 1}}  # whose input needs no gradient
CASES = [
    (case("data 2 tensor 4", "llama", "selective", zero=1), LORA),  # more devices along tensor than key heads
    (case("pipe 2 data 2 tensor 2", "gpt2", schedule="zero_bubble", microbatches=4, zero=3), LORA),
]
MORE = [
    (case("data 4", "llama", "full", zero=3, microbatches=2), SOME),
    (case("data 2 tensor 4", "llama", "full", overlap_tensor=True, zero=2), LORA),
    (case("data 2 tensor 4", "gpt2", sequence_parallel=False, zero=0), LORA),
    (case("context 2 data 2 tensor 2", "llama", zero=3, microbatches=2), SOME),
    (case("data 4 tensor 2", "llama", "block:2", zero=2, grad_reduce="per_layer"), LORA),
    (case("data 4", "llama", zero=3, prefetch=True, microbatches=2), LORA),
    (case("pipe 2 data 2", "llama", "selective", zero=1, microbatches=4, vocab_over_pipe=True), LORA),
    (case("data 4 expert 2 tensor 2", model=MIXTURE, zero=3, persist_below=64), OF_ATTENTION),
    (case("pipe 2 data 2 tensor 2", "llama", "full", MIXTURE, zero=1, microbatches=4), OF_ATTENTION),
    (case("pipe 2 data 2 tensor 2", "llama", "full", ONE_DENSE, zero=1, microbatches=4), OF_ATTENTION),
    (case("data 4 tensor 2", model=ONE_DENSE, zero=3, persist_below=64, sequence_parallel=False), OF_ATTENTION),
    (case("pipe 2 data 2 tensor 2", model=MIXTURE, schedule="zero_bubble", zero=1, microbatches=4), OF_ATTENTION),
]
# A first layer that is apart from the others: nothing uses the gradient of its input. With sequence parallelism and
# layers written out XLA:CPU merges what H100s gather twice: tests/audit/test_counts_compiled.py.
OUT = {"unroll": True}
APART = [
    (case("data 2 tensor 2", model=OUT, sequence_parallel=False, microbatches=2), OF_MLP),
    (case("data 2 tensor 2", "llama", "full", OUT, microbatches=2), LORA),
    (case("data 2 tensor 2", "llama", "full", {"num_layers": 1}), OF_MLP),
    (case("data 2 tensor 2", "llama", "full", MIXTURE | OUT, microbatches=2), OF_ATTENTION),
    (case("data 4", "llama", "selective", zero=3, prefetch=True, microbatches=2), OF_MLP),
    *((case("data 2", model=OUT, microbatches=2), LORA | {"targets": [name]}) for name in "qkv"),
    *((case("data 2", model=OUT), LORA | {"targets": names}) for names in (["down"], ["out"], ["v", "gate"])),
]


def tree_of(layout, lora=LORA, **sections):
    return layout.tree(train={"seed": 3, "lora": lora}, **sections)


def in_words(case):
    return f"{case[0]} {','.join(case[1].get('targets', ['all']))}"


def is_adapter(path):
    return "_A_" in path or "_B_" in path


def by_path(tree):
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def with_values(config):
    """Return initial weights whose B are not zero, as host arrays in model order."""
    start = jax.device_get(decoder.init(config.model, config.train.seed))
    rng = np.random.default_rng(0)

    def filled(path, x):
        is_b = "_B_" in path_name(path)
        return rng.normal(scale=0.1, size=x.shape).astype(np.float32) if is_b else x

    return jax.tree_util.tree_map_with_path(filled, start)


def equals_the_oracle(step):
    """Compare 3 updates with the oracle's, which adds the products of adapters to the weights."""
    config = step.plan.config
    start = with_values(config)
    base = [path.rpartition("/")[2] for path in by_path(start) if not is_adapter(path)]
    tokens = random_tokens(config, count=3)
    params, m, _, log = oracle.train(start, tokens, lr=1e-2, frozen=base)
    state = starting_from(step, start)
    for batch, (loss, _, norm) in zip(tokens, log, strict=True):
        state, metrics, _ = step.train(state, on_devices(batch, step))
        np.testing.assert_allclose(metrics["loss"], loss, **LOSS)
        np.testing.assert_allclose(metrics["grad_norm"], norm, **GRADS)
    state = step.in_layer_order(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), state.params, padded(params, state.params))
    moments = by_path(state.opt.moments[0].mu)
    assert moments.keys() == {path for path in by_path(start) if is_adapter(path)}
    for path, moment in moments.items():
        np.testing.assert_allclose(moment, by_path(m)[path], **STATE)
    before = by_path(padded(start, state.params))
    for path, weight in by_path(state.params).items():
        assert is_adapter(path) or np.array_equal(weight, before[path])


@pytest.mark.parametrize("layout_and_lora", cover(CASES[1:], [CASES[0], *MORE], in_words))
def test_adapters_equal_the_oracle_and_the_closed_forms(layout_and_lora):
    tree = tree_of(*layout_and_lora)
    step = built(tree)
    equals_the_oracle(step)
    moves_the_bytes_of_the_papers(tree)
    config, text = step.plan.config, compiled_text(step)
    if config.parallel.context == 1:  # a ring computes parts of blocks that the closed form leaves out
        found = matmuls.flops(text, communication.conditional_rates(config))
        assert found == pytest.approx(flops.step_flops(config), rel=1e-6)  # no gradient of a base weight
    local = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.state)]
    assert sum(local) == pytest.approx(sum(memory.state(config).values()), abs=100)  # counters


@pytest.mark.parametrize("layout_and_lora", cover(APART[:1], APART[1:], in_words))
def test_gradients_that_nothing_uses_are_not_counted(layout_and_lora):
    tree = tree_of(*layout_and_lora)
    has_flops_and_bytes_of_the_closed_forms(steps.build(*resolved(tree)), scalars=64)  # loss, norm of the gradients
    config, _ = resolved(tree)
    assert flops.unused(mixture.first_layers(config) or config, 0.0)  # else none are


@pytest.mark.long
def test_adapters_beside_a_base_in_host_memory():
    layout = tree_of(case("data 2", "llama", zero=3, persist_below=100, microbatches=2))
    equals_the_oracle(built(layout | {"memory": ALL | {"remat": "full"}}))


@pytest.mark.parametrize("family", cover([], ["llama", "gpt2"]))
def test_new_adapters_change_no_bit(family):
    layout = case("data 2 tensor 2", family, "selective")
    adapted, plain = built(tree_of(layout)), steps.build(*resolved(layout.tree(train={"seed": 3})))
    weights, base = (step.init().params for step in (adapted, plain))
    for path, weight in by_path(base).items():
        np.testing.assert_array_equal(by_path(weights)[path], weight)
    batch = on_devices(random_tokens(adapted.plan.config)[0], adapted)
    assert float(adapted.evaluate(weights, batch)[0]) == float(plain.evaluate(base, batch)[0])


@pytest.mark.long
@pytest.mark.parametrize("layout", cover([case("data 2 tensor 2")], [case("data 2")], str))
def test_adapters_multiply_in_their_dtype_beside_a_base_in_8_bits(layout):
    """Rank 2, which no 8-bit matmul takes; their gradients differ by what rounding does to the base's matmuls."""
    sizes = {"model": {"d_model": 64, "d_ff": 128, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 64}}
    grads = []
    for matmul in ("bfloat16", "float8"):
        precision = {"compute": "bfloat16", "matmul": matmul}
        step = built(tree_of(layout, SOME, precision=precision, **sizes))
        state = step.init()
        weights = with_values(step.plan.config)
        types = state.params
        params = jax.tree.map(lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding), weights, types)
        batch = on_devices(random_tokens(step.plan.config)[0], step)
        with jax.numpy_dtype_promotion("standard"):
            state, _, _ = step.train(state._replace(params=params), batch)
        grads.append(jnp.concatenate([x.ravel() for x in jax.tree.leaves(state.opt.moments[0].mu)]))
    cosine = jnp.vdot(*grads) / jnp.linalg.norm(grads[0]) / jnp.linalg.norm(grads[1])
    assert 0.97 < cosine < 1 - 1e-6


def test_a_plan_counts_few_trained_parameters():
    config, _ = resolved(tree_of(case("data 2", zero=2)))
    trained = counts.all_parameters(config) - counts.frozen_parameters(config)
    rows = counts.rows(config)
    assert trained == 2 * sum(row.size for path, row in rows.items() if is_adapter(path))  # of two layers
    assert sum(memory.state(config).values()) < sum(memory.state(resolved(case("data 2", zero=2).tree())[0]).values())


def test_a_plan_says_what_adapters_save(capsys):
    assert plan.main(["--config", "llama3_8b_lora_1gpu"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    trained = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))  # q and out, k and v, the MLP's
    assert f"adapters: {trained:,} parameters train, 0.5% of the 8,030,261,248 frozen ones" in shown
    assert f"would take {14 * 8.030261248:.1f} GB of state" in shown


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"train": {"lora": {"targets": ["gate"]}}, "model": {"family": "gpt2", "num_kv_heads": 4}}, "has no gate"),
        ({"train": {"lora": LORA}, "model": {"lora": SOME}}, "set train.lora alone"),
        ({"train": {"lora": LORA}, "model": {"factory": "a.b:c"}}, "only the built-in decoder"),
        ({"train": {"lora": LORA, "stages": [{"name": "a", "steps": 1}]}}, "train.lora with train.stages"),
        ({"train": {"lora": LORA}, "parallel": {"replica": 2, "sync_every": 2}}, "train.lora with parallel.sync_every"),
        ({"train": {"lora": LORA}, "parallel": {"replica": 2, "compress": "topk:0.1"}}, "lora with parallel.compress"),
        ({"train": {"lora": {"targets": ["q", "q"]}}}, "has 'q' twice"),
        ({"train": {"lora": {"targets": ["query"]}}}, "query"),
        ({"train": {"lora": {"rank": 0}}}, "rank"),
        ({"train": {"lora": {"dropout": 0.1}}}, "dropout"),
    ],
)  # fmt: skip
def test_what_adapters_cannot_do_gives_one_line(sections, named):
    tree = case("data 2").tree()
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | keys
    with pytest.raises((Misfit, ValueError), match=named) as error:
        resolved(tree)
    assert "\n" not in str(error.value)
