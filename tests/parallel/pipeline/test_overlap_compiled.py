"""Pipelines compiled for H100s: what a stage prefetches and reduces per layer is behind matmuls, at equal bytes."""

import pytest
from conftest import ROOT, needs_cuda_compiler

from nanotrain_jax.config import load
from nanotrain_jax.costs.offload import HostCopy
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import estimate, margin, on_gpus

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_cache_of_programs")]
STAGES = ["parallel.pipe=2", "parallel.data=2", "parallel.microbatches=4", "data.batch_size=8", "model.num_layers=8"]
STAGES += ["parallel.vocab_over_pipe=false"]


def audited(*overrides):
    """Return the estimate of Llama-3-8B's layers on 2 stages x data 2, and its program for 4 H100s."""
    config = load.load(str(ROOT / "configs" / "llama3_8b.yaml"), [*STAGES, *overrides])
    config = on_gpus(config, 4, "h100")
    return estimate(config, "h100"), compile_step(config, "h100")


def wire_bytes(compiled):
    return {(row["axis"], row["op"]): row["bytes_per_device"] for row in compiled["collectives"]}


def behind_matmuls(rows, **keys):
    """Return the bytes behind matmuls of the rows with these values."""
    return sum(row["behind_matmuls_bytes"] for row in rows if keys.items() <= row.items())


@needs_cuda_compiler
def test_gradients_of_layers_are_reduced_behind_the_backward_of_other_layers():
    keys = "parallel.zero=1", "memory.remat=full"
    (_, after), (e, per_layer) = audited(*keys), audited(*keys, "parallel.grad_reduce=per_layer")
    assert wire_bytes(per_layer) == wire_bytes(after)
    assert per_layer["flops"] == after["flops"]
    assert abs(per_layer["peak_bytes"] / e.peak_bytes - 1) < margin(e.config)
    scattered = {"axis": "data", "op": "reduce_scatter"}
    assert behind_matmuls(after["collectives"], **scattered) == 0
    # 4 of 9 bytes are of layers, the others of embedding and head; the last layer reduced has nothing to hide behind.
    assert behind_matmuls(per_layer["collectives"], **scattered) > 0.3 * wire_bytes(after)["data", "reduce_scatter"]
    sent = {"axis": "pipe", "op": "permute"}
    assert behind_matmuls(per_layer["collectives"], **sent) == wire_bytes(after)["pipe", "permute"]


@needs_cuda_compiler
@pytest.mark.parametrize(
    ("copied", "overrides"),
    [
        (HostCopy.WEIGHTS, ["parallel.zero=3", "memory.remat=full", "memory.offload_params=host"]),
        (HostCopy.ACTIVATIONS, ["parallel.zero=1", "memory.remat=selective", "memory.offload_activations=host"]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_copies_from_host_memory_are_behind_the_layer_before(copied, overrides):
    if copied is HostCopy.WEIGHTS:
        overrides = [*overrides, "memory.offload_optimizer=host"]
    e, compiled = audited(*overrides)
    m, p = e.config.model, e.config.parallel
    of_ends = 2 * 2 * m.vocab_size * m.d_model * p.microbatches / p.data if copied is HostCopy.WEIGHTS else 0
    layers = sum(t.bytes for t in e.copies if t.what is copied and t.op == "to device") - of_ends
    assert behind_matmuls(compiled["host_copies"], to="device") > 0.7 * layers  # not those of a chunk's first layer
