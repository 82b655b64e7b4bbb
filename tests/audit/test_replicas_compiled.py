"""Slow links compiled for H100s: what travels between replicas, and the memory of what they keep."""

import pytest
from conftest import cover, needs_cuda_compiler
from test_audit import LLAMA, ROOT, request

from nanotrain_jax.audit import hlo, topology, wire
from nanotrain_jax.costs import communication
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner.compiled import compile_step, ratios
from nanotrain_jax.planner.estimate import estimate, margin, on_gpus
from nanotrain_jax.step import build as steps

LAYOUT = "parallel.replica=2", "parallel.data=4", "parallel.zero=3", "memory.remat=full", "parallel.microbatches=1"
SHORT = "model.num_layers=8", "data.seq_len=2048", "data.batch_size=8"


def on_8_gpus(*overrides):
    config = request.load(str(ROOT / "configs" / f"{LLAMA}.yaml"), [*LAYOUT, *SHORT, *overrides])
    return on_gpus(config, 8, "h100")


def between_replicas(rows):
    return sum(row["bytes_per_device"] for row in rows if "replica" in row["axis"])


@needs_cuda_compiler
@pytest.mark.parametrize("compress", cover(["topk:0.01"], ["powersgd:32", "randomk:0.01", "int8"], str))
def test_compressed_gradients_move_the_closed_form_between_replicas(compress):
    config = on_8_gpus(f"parallel.compress={compress}")
    e, compiled = estimate(config, "h100"), compile_step(config, "h100")
    found = ratios(e, compiled)
    theory = between_replicas(communication.communication(config))
    assert found["wire_bytes"] == pytest.approx(1, abs=1e-3)
    # XLA sums the small arrays over data and replica at once: fewer bytes, but all of them between replicas.
    assert between_replicas(compiled["collectives"]) == pytest.approx(theory, rel=5e-3)
    assert theory < between_replicas(communication.communication(on_8_gpus())) / 3
    assert found["argument_bytes"] == pytest.approx(1, abs=1e-4)
    assert found["flops"] == pytest.approx(1, rel=1e-2)  # those of projections are not in the closed form
    assert found["peak_bytes"] < 1 + margin(config)


@needs_cuda_compiler
def test_local_steps_move_nothing_between_replicas_until_they_synchronize():
    config = on_8_gpus("parallel.sync_every=20", "parallel.compress=int8")
    e, compiled = estimate(config, "h100"), compile_step(config, "h100")
    assert between_replicas(compiled["collectives"]) == 0
    found = ratios(e, compiled)
    assert found["argument_bytes"] == pytest.approx(1, abs=1e-4)
    assert found["peak_bytes"] < 1 + margin(config)

    mesh = meshes.make(**config.parallel.axes, devices=topology.compile_only("h100", 8))
    step = steps.build(config, mesh)
    synchronize = step.synchronize.lower(step.state).compile()
    moved = wire.summary(wire.collectives(synchronize.as_text(), mesh.shape))
    expected = communication.synchronization(config)
    assert between_replicas(moved) == pytest.approx(between_replicas(expected), rel=1e-6)
    assert hlo.memory(synchronize)["peak_bytes"] < compiled["peak_bytes"]
