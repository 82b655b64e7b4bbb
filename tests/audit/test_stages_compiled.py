"""Stages of a pipeline compiled for H100s: what each computes and moves, and how long a step lasts."""

import functools

import pytest
from conftest import ROOT, needs_cuda_compiler

from nanotrain_jax.config import load
from nanotrain_jax.costs import counts, flops, memory, mixture
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import on_gpus

LLAMA = ["parallel.pipe=4", "parallel.data=2", "parallel.zero=1", "memory.remat=full", "data.seq_len=4096"]
ON_LAST_STAGE = "parallel.vocab_over_pipe=false"


@functools.cache
def compiled(*overrides, microbatches=8):
    """Return the config of Llama-3-8B on 4 stages x data 2, and its program for 8 H100s."""
    batch = f"parallel.microbatches={microbatches}", f"data.batch_size={2 * microbatches}"
    config = on_gpus(load.load(str(ROOT / "configs" / "llama3_8b.yaml"), [*LLAMA, *batch, *overrides]), 8, "h100")
    return config, compile_step(config, "h100")


def lockstep_tflops(*overrides, microbatches=8):
    return compiled(*overrides, microbatches=microbatches)[1]["stages"]["lockstep_flops"] / 1e12


@needs_cuda_compiler
def test_with_the_vocabulary_over_pipe_all_stages_do_the_same_work():
    config, program = compiled()
    of_stages = program["stages"]["flops"]
    assert len(of_stages) == 4 and len(set(of_stages)) == 1
    parts, tokens = flops.local_flops(config), counts.tokens_per_device(config)
    assert of_stages[0] == pytest.approx(flops.step_flops(config), rel=1e-4)
    assert parts["head"] == 2 * 128_256 * 4096 / 4
    # 11 ticks' worth of layers and 8 losses. MaxText's program: 726.
    layers = (3 * (parts["layers"] + parts["attention"]) + parts["recompute"]) * tokens / 8
    assert lockstep_tflops() == pytest.approx((11 * layers + 8 * 3 * parts["head"] * tokens / 8) / 1e12, rel=1e-4)
    assert lockstep_tflops() < 715


@pytest.mark.long
@needs_cuda_compiler
def test_without_it_the_last_stage_has_a_fifth_more_work_and_a_step_lasts_longer():
    *others, last = compiled(ON_LAST_STAGE)[1]["stages"]["flops"]
    assert len(set(others)) == 1
    assert last == pytest.approx(1.21 * others[0], rel=0.01)
    assert lockstep_tflops(ON_LAST_STAGE) > 1.1 * lockstep_tflops()
    assert lockstep_tflops(microbatches=16) < 1250
    interleaved = "parallel.schedule=interleaved", "parallel.chunks=8"
    useful = compiled(*interleaved)[1]["stages"]["flops"][0] / 1e12
    assert lockstep_tflops(*interleaved) == pytest.approx(546, abs=1)
    assert lockstep_tflops(*interleaved) < 1.05 * useful


@needs_cuda_compiler
def test_what_stages_share_at_the_ends_is_behind_matmuls():
    rows = {(row["axis"], row["op"]): row for row in compiled()[1]["collectives"]}
    shared = rows["pipe", "all_reduce"]
    scalars = 2 * 3 / 4 * 3 * 4 * 8 * 4096  # of the losses
    assert shared["behind_matmuls_bytes"] == pytest.approx(shared["bytes_per_device"] - scalars, rel=1e-6)
    assert rows["pipe", "permute"]["behind_matmuls_bytes"] == rows["pipe", "permute"]["bytes_per_device"]


@pytest.mark.long
@needs_cuda_compiler
def test_with_layers_that_stages_do_not_divide_a_stage_computes_its_own():
    of_stages = compiled("model.num_layers=30")[1]["stages"]["flops"]
    config, _ = compiled("model.num_layers=30")
    assert counts.layers_of_chunks(config).tolist() == [[8, 8, 7, 7]]
    loss = 3 * flops.local_flops(config)["head"] * counts.tokens_per_device(config)
    layers = [stage - loss for stage in of_stages]
    assert [round(8 * x / layers[0], 3) for x in layers] == [8, 8, 7, 7]
    *others, last = compiled("model.num_layers=30", ON_LAST_STAGE)[1]["stages"]["flops"]
    assert [round(8 * x / others[0], 3) for x in others] == [8, 8, 8]
    assert last < others[0]  # 6 layers and the loss


@pytest.mark.long
@needs_cuda_compiler
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_keep_nothing_for_gradients_of_frozen_weights(schedule):
    """Adapters of q and v alone need neither what an MLP multiplies nor its gradients."""
    lora = ON_LAST_STAGE, f"parallel.schedule={schedule}", "memory.remat=none", "model.num_layers=16"
    config, program = compiled(*lora, "train.lora={rank: 16, targets: [q, v]}")
    estimate = sum(memory.peak(config)[1].values())
    assert program["peak_bytes"] == pytest.approx(estimate, rel=0.05)
    of_all, _ = compiled(*lora, "train.lora={rank: 16}")
    assert estimate < 0.85 * sum(memory.peak(of_all)[1].values())


MOE = ["model.num_layers=29", "model.experts.first_dense=3", "parallel.pipe=4", "parallel.data=2", "parallel.expert=2"]
MOE += ["parallel.vocab_over_pipe=false", "parallel.microbatches=32", "data.batch_size=64"]


@pytest.mark.long
@needs_cuda_compiler
def test_a_first_stage_with_dense_layers_has_fewer_of_a_mixture(monkeypatch):
    config = on_gpus(load.load(str(ROOT / "configs" / "moe_16b.yaml"), MOE), 8, "h100")
    found = compile_step(config, "h100")["stages"]
    assert counts.layers_of_chunks(config).tolist() == [[5, 7, 7, 7]]
    first, second, third, last = found["flops"]
    of_layer, dense = second / 7, first - 5 * second / 7
    assert third == second and last > second
    of_dense = flops.local_flops(mixture.first_layers(config))
    passes = 4 * (of_dense["layers"] + of_dense["attention"]) * counts.tokens_per_device(config)
    assert dense == pytest.approx(passes, rel=1e-3)
    assert dense == pytest.approx(counts.loads_of_ends(config)[1] * of_layer, rel=0.15)  # experts multiply padding
    assert found["lockstep_flops"] == pytest.approx(max(first, last) * (32 + 3) / 32, rel=0.05)
    loss, _ = counts.loads_of_ends(config)
    monkeypatch.setattr(counts, "loads_of_ends", lambda config: (loss, 0.0))
    assert counts.layers_of_chunks(config).tolist() == [[7, 7, 7, 5]]
    assert compile_step(config, "h100")["stages"]["lockstep_flops"] > 1.08 * found["lockstep_flops"]


@pytest.mark.long
@needs_cuda_compiler
def test_stages_without_ends_move_fewer_bytes_at_zero_3():
    first, *middle, last = compiled(ON_LAST_STAGE, "parallel.zero=3")[1]["stages"]["wire_bytes"]
    assert len(set(middle)) == 1 and middle[0] < first and middle[0] < last
    split = compiled("parallel.zero=3")[1]["stages"]["wire_bytes"]
    assert len(set(split)) == 1
