"""Decoding compiled for H100s: what a step reads and writes beside its weights and caches."""

import importlib.util

import pytest
from conftest import ROOT, needs_cuda_compiler

from nanotrain_jax.audit import topology
from nanotrain_jax.config import load
from nanotrain_jax.run.model_config import resolved_model

spec = importlib.util.spec_from_file_location("measure_decode", ROOT / "scripts/measure/decode.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@needs_cuda_compiler
def test_a_token_reads_the_experts_that_it_goes_to_alone():
    """Mixtral 8x7B but for its depth: 2 of 8 experts."""
    section = resolved_model(load.load("mixtral_8x7b").model.model_dump() | {"num_layers": 2}).model_dump()
    found = script.compiled(section, topology.compile_only("h100", 4), 1, 1024)
    assert 1 <= found["ratio"] <= 1.10


@needs_cuda_compiler
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.long), 8])
def test_a_step_moves_its_weights_and_caches_once(gpus):
    """Llama-3-8B but for its depth: the share of what is beside the layers is larger than in the whole."""
    section = load.load("llama3_8b").model.model_dump() | {"num_layers": 4}
    found = script.compiled(section, topology.compile_only("h100", gpus), 2, 8192)
    assert found["layout"] == ({"tensor": 8} if gpus == 8 else {})
    assert 1 <= found["ratio"] <= 1.10
    assert found["temp_bytes"] < 0.05 * found["least_bytes"]  # no copy of a cache
