"""The vision-language model of 74 billion parameters, compiled for 128 H100s: its stages of training fit, and what
frozen parts and the shared encoder store and move is what the closed forms say."""

import math

import jax
import pytest
from conftest import cover, needs_cuda_compiler
from planning import ROOT

from nanotrain_jax.audit import topology
from nanotrain_jax.config.load import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.training_stages import of_span, spans
from nanotrain_jax.costs import counts, hardware
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import MEMORY_FRACTION
from nanotrain_jax.step import build as steps

STATE_BYTES = 2, 12 / 16  # weights in bfloat16; master weights and moments, over data 16


def config_of(stage):
    config = load(ROOT / "configs/vision_language_74b.yaml")
    span = next(span for span in spans(config) if span.name == stage)
    config = of_span(config, span)
    return resolve(config, config.parallel.axes)


def local_elements(step):
    """Parameters of a device: trained, frozen; before ZeRO."""
    found = {True: 0, False: 0}
    plan = step.plan
    leaves = map(jax.tree.leaves, (step.state.params, plan.trainable))
    for x, trains in zip(*leaves, strict=True):
        found[trains] += math.prod(x.sharding.shard_shape(x.shape))
    return found[True], found[False]


@needs_cuda_compiler
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize("stage", cover(["encoder"], ["adapter", "all"]))
def test_a_stage_fits_and_moves_what_it_should(stage):
    config = config_of(stage)
    mesh = meshes.make(**config.parallel.axes, devices=topology.compile_only("h100", counts.devices(config)))
    trained, frozen = local_elements(steps.build(config, mesh))
    compiled = compile_step(config, "h100")
    assert compiled["peak_bytes"] <= MEMORY_FRACTION * hardware.find("h100").memory_bytes
    weights, optimizer = STATE_BYTES
    state = weights * (trained + frozen) + optimizer * trained
    assert compiled["argument_bytes"] == pytest.approx(state, rel=2e-3)  # small arrays are not sharded
    p, d = config.parallel, config.data
    encoded = d.batch_size / p.data * config.vision.max_tokens * config.model.d_model * 2
    starts = d.batch_size / p.data * d.seq_len * 4
    moved = {row["op"]: row["bytes_per_device"] for row in compiled["collectives"] if row["axis"] == "pipe"}
    assert moved["all_gather"] == pytest.approx((encoded + starts) / 2)  # (P-1)/P
    assert moved["reduce_scatter"] == pytest.approx(encoded / 2)
