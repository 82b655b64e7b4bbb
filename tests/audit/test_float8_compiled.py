"""8 bits compiled for H100s: which matmuls run in FP8, and what is on the wire."""

import re
from collections import Counter

import pytest
from conftest import needs_cuda_compiler
from test_audit import LLAMA, ROOT, request

from nanotrain_jax.audit import hlo, matmuls, topology, wire
from nanotrain_jax.costs import communication
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner.compiled import compile_step, wire_bytes
from nanotrain_jax.planner.estimate import estimate, margin, on_gpus
from nanotrain_jax.step import build as steps

L = 2


def compiled(*overrides):
    """-> text of the compiled step of two layers of Llama-3-8B on 8 GPUs, its config, its mesh."""
    short = f"model.num_layers={L}", "data.seq_len=2048", "data.batch_size=8", "parallel.microbatches=1"
    config = on_gpus(request.load(str(ROOT / "configs" / f"{LLAMA}.yaml"), [*short, *overrides]), 8, "h100")
    mesh = meshes.make(**config.parallel.axes, devices=topology.compile_only("h100", 8))
    step = steps.build(config, mesh)
    return step.train.lower(step.state, step.batch).compile().as_text(), config, mesh


def cublas_matmuls(text):
    """Count the cuBLAS matmuls that a program runs, by target."""
    program, found = hlo.parse(text), Counter()
    for name, index, count in hlo.walk(program):
        attributes = program.computations[name][index].attributes
        if '"__cublas$' in attributes:
            found["float8" if '"__cublas$lt$matmul$f8"' in attributes else "other"] += count
    return found


@needs_cuda_compiler
@pytest.mark.parametrize(
    ("layout", "remat", "per_layer"),
    [
        pytest.param(("parallel.zero=3",), "none", 21, marks=pytest.mark.long),
        # All but the last of the forward's seven run again.
        pytest.param(("parallel.zero=3",), "full", 27, marks=pytest.mark.long),
        (("parallel.tensor=8", "parallel.data=1", "parallel.overlap_tensor=true"), "none", 9 * 8 + 12),
    ],
)
def test_all_matmuls_of_layers_run_in_float8(layout, remat, per_layer):
    text, config, _ = compiled(*layout, f"memory.remat={remat}", "precision.matmul=float8")
    # Over tensor, the forward's seven and two of the backward in as many parts as devices.
    assert cublas_matmuls(text) == {"float8": per_layer * L, "other": 3}  # the head
    assert matmuls.flops(text) == pytest.approx(estimate(config, "h100").flops, rel=1e-2)


@needs_cuda_compiler
@pytest.mark.long
def test_matmuls_of_experts_run_in_float8_but_the_router():
    short = "model.num_layers=2", "data.seq_len=2048", "data.batch_size=64"
    keys = "parallel.microbatches=1", "memory.remat=full", "precision.matmul=float8"
    config = on_gpus(request.load(str(ROOT / "configs" / "moe_16b.yaml"), [*short, *keys]), 8, "h100")
    mesh = meshes.make(**config.parallel.axes, devices=topology.compile_only("h100", 8))
    step = steps.build(config, mesh)
    text = step.train.lower(step.state, step.batch).compile().as_text()
    calls = [re.search(r'"(__cublas[^"]*)".*op_name="([^"]*)"', line) for line in text.splitlines()]
    calls = [call.groups() for call in calls if call]
    of_experts = [target for target, name in calls if re.search("E[CDF]*,E[CDF]*->", name)]
    assert len(of_experts) >= 9 and {*of_experts} == {"__cublas$lt$matmul$f8"}
    others = {name for target, name in calls if "/layer/" in name and target != "__cublas$lt$matmul$f8"}
    assert others and all("/mlp/router/" in name for name in others)


@needs_cuda_compiler
def test_zero_3_gathers_layers_in_half_the_bytes():
    moved = {}
    for gather in ("bfloat16", "float8"):
        text, config, mesh = compiled(f"precision.gather={gather}", "memory.remat=full")
        found = [c for c in wire.collectives(text, mesh.shape) if c.operation == "all_gather"]
        moved[gather] = sum(c.bytes * c.count for c in found)
        rows = [row for row in communication.communication(config) if row["op"] == "all_gather"]
        assert moved[gather] == pytest.approx(sum(row["bytes_per_device"] for row in rows), rel=1e-4)
    ends = 7 / 8 * 2 * 2 * 128_256 * 4096
    assert (moved["float8"] - ends) / (moved["bfloat16"] - ends) == pytest.approx(0.5, rel=1e-3)


@needs_cuda_compiler
def test_8_bit_gradients_and_weights_move_the_closed_form_behind_matmuls():
    short = "model.num_layers=8", "data.seq_len=8192", "data.batch_size=8", "parallel.microbatches=1"
    keys = "parallel.prefetch=true", "memory.remat=full", "precision.grad_reduce=int8", "precision.gather=int8"
    config = on_gpus(request.load(str(ROOT / "configs" / f"{LLAMA}.yaml"), [*short, *keys]), 8, "h100")
    e, compiled = estimate(config, "h100"), compile_step(config, "h100")
    theory = wire_bytes(e)
    for row in compiled["collectives"]:
        assert row["bytes_per_device"] == pytest.approx(theory[row["axis"], row["op"]], rel=1e-6, abs=20), row
        assert row["op"] != "reduce_scatter"
        if row["op"] == "all_to_all":
            assert row["behind_matmuls_bytes"] > 0.75 * row["bytes_per_device"]
            assert row["exposed_bytes"] == 0
    assert abs(compiled["peak_bytes"] / e.peak_bytes - 1) < margin(config)
