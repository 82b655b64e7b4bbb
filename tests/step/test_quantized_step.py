"""Steps with gradients and weights in 8 bits: near the oracle, the bytes of the closed form, overflows, training."""

import jax
import numpy as np
import oracle
import pytest
from cases import case
from conftest import (
    LOSS,
    built,
    compiled_text,
    cover,
    in_words,
    key_of,
    on_devices,
    padded,
    random_tokens,
    relative_errors,
    resolved,
    run,
    skips_an_overflow,
    small,
    starting_from,
    with_embedding,
)
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.audit import wire
from nanotrain_jax.costs.communication import on_a_ring
from nanotrain_jax.costs.parameter_traffic import parameter_buffers
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.step import build as steps

PER_LAYER = {"grad_reduce": "per_layer"}
COVER = [
    (case("replica 2 data 2", "llama", "block:2", zero=0, microbatches=2, **PER_LAYER), "float8"),
    (case("replica 2 data 2 tensor 2", "llama", "full", zero=2, microbatches=2), "int8"),
    (case("replica 2 data 4", "llama", "block:2", zero=3, microbatches=2, persist_below=300), "int8"),
    (case("pipe 2 data 2 tensor 2", "llama", zero=1, microbatches=4, schedule="zb_h1", **PER_LAYER), "int8"),
]
MORE = [
    (case("data 4", "gpt2", "full", zero=3, microbatches=2, prefetch=True), "float8"),
    (case("data 2 context 4", "llama", zero=1), "float8"),
    (case("data 4", "gpt2", zero=1, microbatches=2, **PER_LAYER), "int8"),
    (case("data 4", "gpt2", zero=0, microbatches=2), "int8"),
    (case("data 8", "llama", zero=2, microbatches=2), "float8"),
    (case("replica 4 data 2", "gpt2", "block:2", {"num_layers": 8}, zero=3, prefetch=True), "int8"),
    (case("replica 2 data 2", "gpt2", zero=1, bucket_mb=0.0, **PER_LAYER), "float8"),
    (case("pipe 2 data 4", "llama", "selective", zero=3, microbatches=2, vocab_over_pipe=True), "float8"),
    (case("pipe 2 data 2", "gpt2", "block:2", {"num_layers": 8}, zero=1, microbatches=4, **PER_LAYER), "int8"),
    (case("pipe 2 data 2", "llama", "full", {"num_layers": 3}, zero=3, microbatches=4, prefetch=True), "int8"),
    (case("pipe 2 replica 2 data 2", "gpt2", zero=0, microbatches=4, **PER_LAYER), "int8"),
    (case("data 2 tensor 4", "llama", zero=0, sequence_parallel=False, **PER_LAYER), "float8"),
]
# One rounding of normal values is off by 0.6% and 2.4% of their norm; a gradient is rounded up to three times, and the
# terms of a sum partly cancel.
ERROR = {"int8": 0.02, "float8": 0.06}


def tree(case, kind, **precision):
    parallel = {"persist_below": 64} | case.parallel
    return case.tree(parallel=parallel, precision={"compute": "float32", "grad_reduce": kind} | precision)


@pytest.mark.parametrize("case", cover(COVER[:1], COVER[1:] + MORE))
def test_gradients_are_near_the_oracle_and_move_the_bytes_of_the_closed_form(case, expected):
    case, kind = case
    step = built(tree(case, kind))
    config = step.plan.config
    start, (*_, log) = expected[key_of(config)]
    loss, exact, _ = log[0]
    state, metrics, _ = step.train(starting_from(step, start), on_devices(random_tokens(config, count=3)[0], step))
    np.testing.assert_allclose(metrics["loss"], loss, **LOSS)
    moments = jax.device_get(step.in_layer_order(state).opt.moments[0].mu)
    gradients = jax.tree.map(lambda m: m / (1 - oracle.B1), moments)
    errors = relative_errors(gradients, padded(exact, gradients))
    assert 2e-3 < max(errors.values()) < ERROR[kind], errors
    moves_the_bytes_of_the_papers(tree(case, kind))


FIRST_DENSE = {"num": 8, "top_k": 2, "d_ff": 64, "shared": 1, "capacity": 8.0, "first_dense": 1}
GATHERS = [
    ({}, {"data": 4}, "int8"),
    ({"num_layers": 3, "experts": FIRST_DENSE}, {"data": 4, "expert": 2}, "int8"),
    ({"num_layers": 3, "experts": FIRST_DENSE}, {"data": 4, "expert": 2}, "float8"),
]


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize("case", GATHERS, ids=in_words)
def test_gathers_in_8_bits_move_the_bytes_of_the_closed_form_and_change_losses_little(case):
    model, layout, kind = case
    losses, moved, closed = [], [], []
    for gather in ("bfloat16", kind):
        precision = {"compute": "bfloat16", "gather": gather, "grad_reduce": "int8"}
        plain = small(model=model, parallel=layout | {"zero": 3, "persist_below": 64}, precision=precision)
        step = built(plain)
        found = (c for c in wire.collectives(compiled_text(step), step.plan.mesh.shape) if c.operation == "all_gather")
        moved.append(sum(c.bytes * c.count for c in found))
        closed.append(gathered_on_cpus(step.plan.config))
        _, log = run(plain, updates=3)
        losses.append([float(metrics["loss"]) for metrics in log])
    as_they_are, in_8_bits = np.array(losses)
    assert 0 < np.abs(in_8_bits / as_they_are - 1).max() < 0.01
    assert moved[0] - moved[1] == pytest.approx(closed[0] - closed[1])
    assert closed[0] > 2 * closed[1]


def gathered_on_cpus(config):
    """Wire bytes of gathered weights: XLA:CPU sends 16 bit as float32, and 8 bits as they are."""
    gathers = (b._replace(itemsize=4 if b.itemsize == 2 else b.itemsize) for b in parameter_buffers(config))
    sizes = ((b, b.times * b.itemsize * b.elements) for b in gathers if b.what is Traffic.WEIGHTS)
    return sum(on_a_ring(b.axes, b.op, size, config.parallel) for b, size in sizes)


@pytest.mark.long  # as without quantization: tests/step/test_step.py
@pytest.mark.parametrize("case", [(3, "float8"), (1, "int8"), (0, "float8"), (2, "int8")], ids=in_words)
def test_a_step_whose_gradients_are_not_finite_is_skipped(case):
    zero, kind = case
    config, mesh = resolved(
        small(
            parallel={"data": 4, "zero": zero, "persist_below": 64},
            precision={"compute": "float32", "grad_reduce": kind},
        )
    )
    step = steps.build(config, mesh)
    good, bad = (np.where(t == 60, 0, t) for t in random_tokens(config, count=2))
    bad[5, 3] = 60  # one embedding row is not finite; only one row of the batch, on one device, uses it
    state, _, _ = step.train(with_embedding(step.init(), 60, np.nan), on_devices(good, step))
    before = jax.device_get(state)
    state, metrics, _ = step.train(state, on_devices(bad, step))
    assert not np.isfinite(metrics["grad_norm"])
    assert int(state.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, (before.params, before.opt), jax.device_get((state.params, state.opt)))


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("case", cover([], [(2, "int8"), (0, "int8"), (1, "float8"), (3, "float8")]))
def test_a_float16_overflow_halves_the_scale_and_skips_that_step(case):
    zero, kind = case
    precision = {"compute": "float16", "loss_scale": "dynamic", "grad_reduce": kind}
    skips_an_overflow(small(parallel={"data": 4, "zero": zero, "persist_below": 64}, precision=precision))


@jax.numpy_dtype_promotion("standard")
@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_losses_of_a_few_steps_are_near_those_in_float32(kind):
    def losses(reduce, gather):
        precision = {"compute": "bfloat16", "grad_reduce": reduce, "gather": gather}
        plain = small(parallel={"data": 4, "zero": 3, "persist_below": 64}, precision=precision)
        config, mesh = resolved(plain)
        step = steps.build(config, mesh)
        batch, state, log = on_devices(random_tokens(config)[0], step), step.init(), []
        for _ in range(12):
            state, metrics, _ = step.train(state, batch)
            log.append(float(metrics["loss"]))
        return np.array(log)

    plain, found = losses("float32", None), losses(kind, kind)
    assert found[-1] < found[0] - 0.5
    assert 0 < np.abs(found / plain - 1).max() < 0.02
