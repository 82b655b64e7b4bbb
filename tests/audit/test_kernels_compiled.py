"""A step with tokamax's kernels for experts, compiled for H100s: what it executes of useful and of counted FLOPs."""

import pytest
from conftest import needs_cuda_compiler, small

from nanotrain_jax.config import load
from nanotrain_jax.costs import counts, flops
from nanotrain_jax.parallel.expert import kernels
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import on_gpus

MODEL = {"num_layers": 2, "d_model": 512, "num_heads": 8, "vocab_size": 512, "d_ff": None}
MODEL |= {"experts": {"num": 8, "top_k": 2, "d_ff": 512}, "grouped_matmul": "tokamax"}


@pytest.mark.long
@needs_cuda_compiler
@pytest.mark.skipif(not kernels.is_installed(), reason="tokamax is not installed: pip install '.[kernels]'")
def test_a_step_with_kernels_executes_the_useful_flops():
    tree = small(
        model=MODEL,
        data={"source": "synthetic", "batch_size": 4, "seq_len": 1024},
        parallel={"data": 2, "expert": 2, "zero": 1},
        precision={"compute": "bfloat16"},
        memory={"remat": "none"},
    )
    config = on_gpus(load.parse(tree), 2, "h100")
    useful = flops.flops_per_token(config)["full"] * counts.tokens_per_device(config)
    executed = compile_step(config, "h100")["flops"]
    assert executed == pytest.approx(flops.step_flops(config), rel=1e-9)
    assert executed <= 1.05 * useful
    padded = config.replace("model", grouped_matmul="padded")
    assert 1.05 * useful < flops.step_flops(padded) <= 1.30 * useful
