"""The vision-language model of 74 billion parameters, compiled for 128 H100s: its stages of training fit, and compute,
store and move what the closed forms say."""

import jax
import pytest
from conftest import ROOT, cover, needs_cuda_compiler

from nanotrain_jax.config.load import load
from nanotrain_jax.planner import training_stages
from nanotrain_jax.planner.compiled import compile_step, ratios, wire_bytes
from nanotrain_jax.planner.estimate import estimate, on_gpus

SCALARS = 50  # bytes, which closed forms leave out


def config_of(stage):
    config = training_stages.config_of(load(ROOT / "configs/vision_language_74b.yaml"), stage)
    return on_gpus(config, 128, "h100")


@needs_cuda_compiler
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize("stage", cover(["encoder"], ["adapter", "all"]))
def test_a_stage_fits_and_equals_the_closed_forms(stage):
    config = config_of(stage)
    e, compiled = estimate(config, "h100"), compile_step(config, "h100")
    assert compiled["peak_bytes"] <= e.limit_bytes
    found = ratios(e, compiled)
    assert found["peak_bytes"] == pytest.approx(1, abs=0.1)
    for what in ("argument_bytes", "flops", "wire_bytes"):
        assert found[what] == pytest.approx(1, abs=1e-4), what
    theory = wire_bytes(e)
    for row in compiled["collectives"]:
        expected = theory.pop((row["axis"], row["op"]), 0)
        assert row["bytes_per_device"] == pytest.approx(expected, rel=1e-4, abs=SCALARS), row
    assert not theory
    p, d = config.parallel, config.data
    pictures = d.batch_size / p.data * config.vision.max_tokens * config.model.d_model * 2
    starts = d.batch_size / p.data * d.seq_len * 4
    moved = {row["op"]: row["bytes_per_device"] for row in compiled["collectives"] if row["axis"] == "pipe"}
    assert moved["all_gather"] == (pictures + starts) / 2  # (P-1)/P
    assert moved["reduce_scatter"] == pictures / 2
