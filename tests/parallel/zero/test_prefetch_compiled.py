"""ZeRO 3 compiled for H100s: what layers gather and scatter ahead is behind matmuls; XLA flags are accepted."""

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT, cover, needs_cuda_compiler

from nanotrain_jax.audit import topology
from nanotrain_jax.config import load
from nanotrain_jax.costs.counts import is_sharded, local_elements
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import ENDS
from nanotrain_jax.parallel.xla_options import gpu_options
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import estimate, margin, on_gpus

pytestmark = pytest.mark.usefixtures("no_cache_of_programs")
KEYS = ["parallel.zero=3", "parallel.prefetch=true", "model.num_layers=6", "data.seq_len=8192"]


def not_hidden(config):
    """Wire bytes that no matmul hides, for each microbatch: the gathers of the embedding and the first layer before it,
    at most two layers' scatters after it."""
    N, gradient = config.parallel.data, {"float32": 4, "bfloat16": 2}[config.precision.grad_reduce]
    rows = [row for row in table(config.model).values() if is_sharded(row, config)]
    embedding = next(local_elements(row, config) for row in rows if row.part == ENDS and row.used == "first")
    layer = sum(local_elements(row, config) for row in rows if row.part != ENDS) / config.model.num_layers
    return (N - 1) / N * (2 * embedding + (2 + 2 * gradient) * layer)


TWO = [
    ["memory.remat=selective", "parallel.microbatches=2", "data.batch_size=16"],
    ["memory.remat=none", "parallel.microbatches=2", "data.batch_size=16"],
]


@needs_cuda_compiler
@pytest.mark.parametrize(
    "overrides",
    [
        *cover(
            [["memory.remat=selective", "parallel.microbatches=1", "data.batch_size=8"]],
            [["memory.remat=full", "parallel.microbatches=1", "data.batch_size=8", "precision.grad_reduce=bfloat16"]],
            str,
        ),
        *(pytest.param(keys, id=str(keys), marks=pytest.mark.long) for keys in TWO),
    ],
)
def test_all_but_the_ends_is_behind_matmuls_at_the_bytes_of_the_closed_form(overrides):
    config = on_gpus(load.load(str(ROOT / "configs" / "llama3_8b.yaml"), [*KEYS, *overrides]), 8, "h100")
    e, compiled = estimate(config, "h100"), compile_step(config, "h100")
    wire, hidden, exposed = (
        sum(row[key] for row in compiled["collectives"])
        for key in ("bytes_per_device", "behind_matmuls_bytes", "exposed_bytes")
    )
    assert wire == pytest.approx(sum(t.bytes for t in e.transfers), rel=1e-3)
    assert compiled["flops"] == pytest.approx(e.flops, rel=1e-3)
    assert abs(compiled["peak_bytes"] / e.peak_bytes - 1) < margin(config)
    assert wire - hidden <= 1.02 * config.parallel.microbatches * not_hidden(config)
    assert exposed < 0.01 * wire


@needs_cuda_compiler
def test_the_compiler_knows_every_flag_of_ours():
    device = topology.compile_only("h100", 1)[0]
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    ours = gpu_options(25.0, gathered_bytes=2**29, in_flight=8, offload=True)
    assert ours["xla_gpu_all_gather_combine_threshold_bytes"] == 2**29
    jax.jit(jnp.dot, compiler_options=ours).lower(x, x).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_flag"):
        jax.jit(jnp.dot).lower(x, x).compile(compiler_options={"xla_gpu_no_such_flag": True})
