"""Models with an encoder: equal to one device in every layout; in pipelines shared over the stages."""

import jax
import numpy as np
import pytest
from conftest import cover, on_devices, random_tokens, resolved, small

from nanotrain_jax.audit import wire
from nanotrain_jax.costs import communication
from nanotrain_jax.step import build as steps

FACTORY = "encoder_model:build"
LAYOUTS = {
    "zero 3": {"data": 4, "zero": 3, "microbatches": 2},
    "tensor": {"data": 2, "tensor": 2, "zero": 2},
    "pipe": {"pipe": 2, "data": 2, "microbatches": 4},
    "uneven shares": {"pipe": 4, "microbatches": 6, "zero": 1, "data": 2},
    "zero bubble": {"pipe": 2, "data": 2, "microbatches": 4, "zero": 3, "schedule": "zero_bubble"},
    "interleaved": {"pipe": 2, "data": 2, "microbatches": 4, "zero": 2, "schedule": "interleaved", "chunks": 2},
    "mask": {"pipe": 2, "tensor": 2, "microbatches": 2, "idle": "mask", "zero": 1},
    "per layer": {"pipe": 2, "data": 2, "microbatches": 2, "zero": 1, "grad_reduce": "per_layer"},
    "prefetch": {"data": 4, "zero": 3, "microbatches": 2, "prefetch": True},
}
FROZEN = {"": [], "encoder": ["^encoder/", "patches"], "language": ["^layers/", "embed_VD", "head_VD"]}


def step_of(layout, frozen="", remat="none"):
    model = {"factory": FACTORY, "num_layers": 4, "num_kv_heads": 4}
    parallel = {"data": 1, "persist_below": 100} | layout
    train = {"seed": 3, "freeze": FROZEN[frozen]}
    tree = small(model=model, parallel=parallel, train=train, memory={"remat": remat}, data={"batch_size": 48})
    config, mesh = resolved(tree)
    return steps.build(config, mesh)


def trained(step):
    """Take 3 steps -> (losses, norms, validation sum), weights."""
    state, log = step.init(), []
    tokens = random_tokens(step.plan.config, count=3)
    for rows in tokens:
        state, metrics, _ = step.train(state, on_devices(rows, step))
        log.append((metrics["loss"], metrics["grad_norm"]))
    log.append(step.evaluate(state.params, on_devices(tokens[0], step)))
    return jax.device_get(log), jax.device_get(step.in_layer_order(state).params)


@pytest.fixture(scope="module")
def on_one_device():
    """What is frozen -> the result on one device, computed by the first test that needs it."""
    return {}


CASES = [
    ("pipe", "", "full"),
    ("zero bubble", "encoder", "none"),
    ("zero 3", "language", "none"),
    ("tensor", "", "none"), ("uneven shares", "", "none"), ("interleaved", "", "full"), ("mask", "", "none"),
    ("per layer", "", "full"), ("prefetch", "", "none"), ("zero bubble", "language", "full"),
    ("pipe", "encoder", "full"),
    ("uneven shares", "language", "selective"),
]  # fmt: skip


@pytest.mark.parametrize("case", cover([], CASES))
def test_a_model_with_an_encoder_equals_one_device(on_one_device, case):
    layout, frozen, remat = case
    if frozen not in on_one_device:
        on_one_device[frozen] = trained(step_of({"microbatches": 2}, frozen))
    log, params = trained(step_of(LAYOUTS[layout], frozen, remat))
    expected_log, expected = on_one_device[frozen]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), log, expected_log)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)


@pytest.mark.parametrize(("frozen", "scatters"), [("", 1), ("encoder", 0)])
def test_stages_share_an_encoder_with_one_gather_and_one_scatter(frozen, scatters):
    step = step_of(LAYOUTS["pipe"], frozen)
    text = step.train.lower(step.state, step.batch).compile().as_text()
    rates = communication.conditional_rates(step.plan.config)
    found = [row for row in wire.collectives(text, step.plan.mesh.shape, rates) if row.axes == ("pipe",)]
    counts = {op: sum(row.count for row in found if row.operation == op) for op in ("all_gather", "reduce_scatter")}
    assert counts == {"all_gather": 2, "reduce_scatter": scatters}  # floats, integers
