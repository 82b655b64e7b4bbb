"""Bytes that kernels read and write in device memory, of small programs and of a layer of the real step.

PYTHONPATH=tests python tests/audit/test_traffic.py

compiles the cases and writes golden/hbm.json, for this version of jax.
"""

import json

import jax
import jax.numpy as jnp
import pytest
from conftest import LAYOUTS, ROOT, cover, needs_cuda_compiler

from nanotrain_jax.audit import topology, traffic
from nanotrain_jax.config import load as request
from nanotrain_jax.costs import hbm
from nanotrain_jax.costs.memory import state
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import on_gpus

JAX = "{}.{}".format(*jax.__version_info__)
GOLDEN = ROOT / "tests" / "golden" / "hbm.json"
BY_XLA = " with kernels by XLA"
CASES = {"gpt2_124m": ["parallel.zero=1"], "llama3_8b": ["parallel.zero=3"]}
CASES |= {name + BY_XLA: [*overrides, "model.kernels=xla"] for name, overrides in CASES.items()}
SIZES = "bytes", "minimum_bytes"
ROWS, SIZE = 4096, 1024
ARRAY = 4 * ROWS * SIZE  # bytes


def kernels(function, *shapes):
    sharding = jax.sharding.SingleDeviceSharding(topology.compile_only("h100", 1)[0])
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]
    return traffic.kernels(jax.jit(function).lower(*arrays).compile().as_text())


def total(found):
    return sum(kernel.count * kernel.bytes for kernel in found)


@needs_cuda_compiler
def test_elementwise_work_is_one_kernel_that_reads_and_writes_once():
    (kernel,) = kernels(lambda x, y: jnp.tanh(x) * y + x, (ROWS, SIZE), (ROWS, SIZE))
    assert sorted(kernel.read.values()) == [ARRAY, ARRAY]
    assert kernel.written == ARRAY


@needs_cuda_compiler
def test_a_reduction_reads_all_and_writes_its_sums():
    assert total(kernels(lambda x: x.sum(1), (ROWS, SIZE))) == pytest.approx(ARRAY, rel=0.01)


@needs_cuda_compiler
def test_loops_read_and_write_slices():
    """A scan that reads a row per turn and stacks what it computes reads and writes each row once or twice."""

    def scanned(rows):
        return jax.lax.scan(lambda carry, row: (carry, jnp.tanh(row)), 0.0, rows)[1]

    found = kernels(scanned, (64, SIZE, SIZE))
    assert 2 * 64 * 4 * SIZE**2 <= total(found) <= 4.01 * 64 * 4 * SIZE**2
    assert {kernel.count for kernel in found} == {1, 64} or {kernel.count for kernel in found} == {64}


@needs_cuda_compiler
def test_a_conversion_reads_all_that_it_converts():
    assert total(kernels(lambda x: x.astype(jnp.bfloat16), (ROWS, SIZE))) == 1.5 * ARRAY


@needs_cuda_compiler
def test_a_scatter_in_place_reads_and_writes_what_it_adds_to():
    def look_up_backward(table, added):
        return table.at[jnp.arange(64) * 7 % 64].add(added)

    found = kernels(look_up_backward, (ROWS, SIZE), (64, SIZE))
    (scatter,) = [kernel for kernel in found if "scatter" in kernel.name]
    assert (sum(scatter.read.values()), scatter.written) == (2 * 64 * 4 * SIZE, 64 * 4 * SIZE)


@needs_cuda_compiler
def test_a_matmul_reads_both_sides():
    found = kernels(lambda x, w: x @ w, (ROWS, SIZE), (SIZE, SIZE))
    assert total(found) == pytest.approx(2 * ARRAY + 4 * SIZE**2, rel=0.01)


def test_the_least_bytes_of_a_layer_grow_with_tokens_and_recomputation():
    def least(*overrides, config="gpt2_124m"):
        loaded = request.load(str(ROOT / "configs" / f"{config}.yaml"), list(overrides))
        return hbm.layer_bytes(on_gpus(loaded, 8, "h100"))

    full, half = least(), least("parallel.microbatches=4")
    assert half["forward"] == full["forward"] / 2
    assert half["weights"] == full["weights"]
    weights = 12 * 768**2  # of a layer
    assert (full["weights"], full["gradients"]) == (2 * 2 * weights, 4 * weights)
    assert full["recompute"] == 0 < least("memory.remat=full")["recompute"] < full["forward"]
    assert least("parallel.tensor=2", "parallel.data=4") is None
    assert least("parallel.pipe=2", "parallel.data=4") is None


def test_the_least_bytes_of_loss_and_update():
    def planned(*overrides):
        return on_gpus(request.load(str(ROOT / "configs" / "gpt2_124m.yaml"), list(overrides)), 8, "h100")

    config, in_float32 = planned(), planned("precision.logits=float32")
    tokens, width, vocabulary, microbatches = 64 * 1024, 768, 50304, 2
    parts, head = hbm.step_bytes(config), (2 * 2 + 4) * vocabulary * width
    assert parts["loss"] == 3 * 2 * tokens * (width + vocabulary) + microbatches * head
    assert hbm.step_bytes(in_float32)["loss"] - parts["loss"] == 3 * 2 * tokens * vocabulary
    assert parts["layers"] == microbatches * 12 * sum(hbm.layer_bytes(config).values())
    # master weights and moments read and written, weights written, float32 gradients read twice for their norm
    elements = state(config)["optimizer"] / 12
    assert parts["update"] == (2 * 12 + 2 + 2 * 4) * elements
    assert hbm.step_bytes(planned("optimizer.grad_clip=0"))["update"] == (2 * 12 + 2 + 4) * elements
    assert "update" not in hbm.step_bytes(planned("memory.offload_optimizer=host"))
    assert "loss" not in hbm.step_bytes(planned("parallel.tensor=2", "parallel.data=4"))


def compiled(name):
    model = name.removesuffix(BY_XLA)
    overrides = [*LAYOUTS.get(model, []), *CASES[name]]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the defaults of users
        config = on_gpus(request.load(str(ROOT / "configs" / f"{model}.yaml"), overrides), 8, "h100")
        found = compile_step(config, "h100")["hbm"]
    assert sum(part["bytes"] for part in found["parts"]) == found["bytes"]
    assert all(part["bytes"] >= part.get("minimum_bytes", 0) for part in found["parts"])
    parts = {f"{part['part']}_{key}": part[key] for part in found["parts"] for key in SIZES if key in part}
    layer = {f"layer_{key}": found["layer"][key] for key in (*SIZES, "kernels")}
    return {"step_bytes": found["bytes"], "step_kernels": found["kernels"]} | parts | layer


@needs_cuda_compiler
@pytest.mark.parametrize("name", cover(["gpt2_124m"], [name for name in CASES if name != "gpt2_124m"], str))
def test_a_layer_of_the_real_step_reads_and_writes_what_it_did(name):
    found, golden = compiled(name), json.loads(GOLDEN.read_text())[name]
    assert found["layer_bytes"] >= found["layer_minimum_bytes"]
    if JAX in golden:
        for key, value in golden[JAX].items():
            assert found[key] == pytest.approx(value, rel=0.01), key


@pytest.mark.parametrize("version", ["0.10", "0.12"])
@pytest.mark.parametrize("name", ["gpt2_124m", "llama3_8b"])
def test_our_kernels_read_less_and_are_fewer(name, version):
    golden = json.loads(GOLDEN.read_text())
    by_xla, by_kernel = golden[name + BY_XLA][version], golden[name][version]
    assert by_kernel["layers_bytes"] < 0.97 * by_xla["layers_bytes"]
    assert by_kernel["step_kernels"] < 0.95 * by_xla["step_kernels"]


if __name__ == "__main__":
    rows = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name in CASES:
        rows[name] = rows.get(name, {}) | {JAX: compiled(name)}
    GOLDEN.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
