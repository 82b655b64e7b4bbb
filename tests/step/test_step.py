"""The step: equal to the oracle on every mesh, one all-reduce, stable state types, skipped steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import (
    LOSS,
    STATE,
    collectives,
    cover,
    equals_the_oracle,
    on_devices,
    padded,
    random_tokens,
    resolved,
    small,
)

from nanotrain_jax.models import decoder
from nanotrain_jax.step import build as steps

COVER = [  # data, replica, microbatches, family
    (1, 1, 4, "gpt2"),
    (2, 2, 4, "llama"),
]
MORE = [
    (2, 1, 4, "llama"),
    (8, 1, 1, "gpt2"),
    (2, 2, 4, "gpt2"),
    (1, 1, 1, "llama"),
    (2, 1, 1, "gpt2"),
    (4, 1, 1, "llama"),
    (4, 1, 4, "gpt2"),
    (8, 1, 4, "llama"),
    (2, 2, 1, "llama"),
]
close = np.testing.assert_allclose


@pytest.mark.parametrize("case", cover(COVER, MORE))
def test_loss_gradients_and_state_after_three_updates_equal_the_oracle(case, expected):
    data, replica, microbatches, family = case
    parallel = {"data": data, "replica": replica, "microbatches": microbatches}
    equals_the_oracle(small(family, parallel=parallel), expected)


@pytest.mark.parametrize("tensor", cover([4], [1], str))  # 4: more devices than kv heads, which are replicated
def test_clipping_uses_the_global_norm(tensor):
    config, mesh = resolved(small(optimizer={"grad_clip": 0.05}, parallel={"tensor": tensor}))
    step = steps.build(config, mesh)
    tokens = random_tokens(config, count=3)
    params, *_, log = oracle.train(decoder.init(config.model, config.train.seed), tokens, lr=1e-2, clip=0.05)
    assert all(norm > 0.1 for *_, norm in log)  # so that clipping has an effect
    state = step.init()
    for batch in tokens:
        state, _, _ = step.train(state, on_devices(batch, step))
    jax.tree.map(lambda a, b: close(a, b, **STATE), state.params, padded(params, state.params))


@pytest.mark.parametrize("microbatches", cover([4], [1, 2], str))
def test_the_compiled_step_has_one_collective_for_any_number_of_microbatches(microbatches):
    config, mesh = resolved(small(parallel={"data": 8, "microbatches": microbatches}))
    step = steps.build(config, mesh)
    text = step.train.lower(step.state, step.batch).compile().as_text()
    assert collectives(text) == [("ENTRY", "all-reduce")]
    (line,) = [line for line in text.splitlines() if " all-reduce(" in line]
    result = line.split(" all-reduce")[0]
    elements = sum(
        np.prod([int(n) for n in dims.split(",") if n], dtype=int) for dims in re.findall(r"f32\[([\d,]*)\]", result)
    )
    assert elements == sum(p.size for p in jax.tree.leaves(step.state.params)) + 1  # gradients in float32, and the loss


def test_a_step_keeps_types_and_shardings_of_the_state():
    config, mesh = resolved(small())
    step = steps.build(config, mesh)
    state = step.init()

    def describe(state):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.sharding), state)

    assert describe(state) == describe(step.state)
    after, _, _ = step.train(state, on_devices(random_tokens(config)[0], step))
    assert describe(after) == describe(step.state)
    assert jax.tree.leaves(state.params)[0].is_deleted()  # donated


@pytest.mark.parametrize("microbatches", cover([2], [1], str))
def test_a_step_whose_gradients_are_not_finite_is_skipped_on_every_device(microbatches):
    parallel = {"data": 4, "microbatches": microbatches}
    config, mesh = resolved(small(parallel=parallel, optimizer={"schedule": "linear", "warmup_steps": 5}))
    step = steps.build(config, mesh)
    # One embedding row is not finite; only one row of the batch, on one device, uses it.
    good, bad, last = (np.where(t == 60, 0, t) for t in random_tokens(config, count=3))
    bad[5, 3] = 60

    def break_row(state):
        broken = state.params["ends"]["embedding_VD"].at[60].set(jnp.nan)
        ends = state.params["ends"] | {"embedding_VD": broken}
        return state._replace(params=state.params | {"ends": ends})

    def run(batches):
        state, log = break_row(step.init()), []
        for tokens in batches:
            state, metrics, _ = step.train(state, on_devices(tokens, step))
            log.append(jax.device_get(metrics))
        return state, log

    state, log = run([good, bad, last])
    clean, clean_log = run([good, last])
    assert [int(m["skipped_steps"]) for m in log] == [0, 1, 1]
    assert not np.isfinite(log[1]["grad_norm"])
    assert (int(state.step), int(state.skipped)) == (3, 1)
    assert log[2]["lr"] == clean_log[1]["lr"] == log[1]["lr"]
    # Bitwise equal to a run without the batch, on every device.
    for a, b in zip(
        jax.tree.leaves((state.params, state.opt)), jax.tree.leaves((clean.params, clean.opt)), strict=True
    ):
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(x.data, y.data)


@pytest.mark.parametrize("case", cover([(8, 2)], [(0, 1), (8, 1), (0, 4)]))
def test_evaluation_is_the_oracles_mean_over_valid_targets(case):
    chunk, tensor = case
    config, mesh = resolved(small(parallel={"microbatches": 2, "tensor": tensor}, model={"loss_chunk": chunk}))
    step = steps.build(config, mesh)
    state, tokens = step.init(), random_tokens(config)[0]
    batch = on_devices(tokens, step)
    masked = np.array(tokens[:, 1:])
    masked[20:] = -1
    batch["targets"] = jax.device_put(masked, step.batch["targets"].sharding)
    loss, count = step.evaluate(state.params, batch)
    assert int(count) == 20 * 16
    close(loss / 320, oracle.loss(decoder.init(config.model, config.train.seed), tokens[:20]), **LOSS)


@pytest.mark.long
def test_the_same_seed_gives_the_same_parameters_on_every_mesh():
    trees = []
    for data, tensor in (1, 1), (8, 1), (2, 4):
        config, mesh = resolved(small("gpt2", parallel={"data": data, "tensor": tensor, "zero": 3}))
        trees.append(steps.build(config, mesh).init().params)
    first, second, third = trees
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, padded(first, third), third)


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_bfloat16_gradients_are_close_to_float32_also_for_long_sums(family):
    losses, grads = [], []
    for compute in ("float32", "bfloat16"):
        tree = small(family, precision={"compute": compute}, parallel={"data": 2})
        tree["data"] |= {"seq_len": 64, "batch_size": 64}
        tree["model"] |= {"norm_eps": 1e-5, "rope_theta": 1e4}
        tree["train"] = {"seed": 0}
        config, mesh = resolved(tree)
        step = steps.build(config, mesh)
        (tokens,) = random_tokens(config)
        tokens = np.where(tokens < 40, 7, tokens)  # one token is most of the text, as the space is in bytes
        state, metrics, _ = step.train(step.init(), on_devices(tokens, step))
        losses.append(float(metrics["loss"]))
        grads.append(jax.device_get(state.opt.moments[0].mu))
    close(losses[1], losses[0], rtol=2**-8)
    for (path, exact), near in zip(
        jax.tree_util.tree_leaves_with_path(grads[0]), jax.tree.leaves(grads[1]), strict=True
    ):
        if path[-1].key != "bias_k_KH":  # its true gradient is zero
            error = np.linalg.norm(near - exact) / np.linalg.norm(exact)
            assert error < 0.03, (path, error)
