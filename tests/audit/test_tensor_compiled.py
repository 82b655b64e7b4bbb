"""Tensor parallelism compiled for H100s: how often a layer communicates, and how much."""

import pytest
from conftest import cover, needs_cuda_compiler
from test_audit import LLAMA, ROOT, request, script

L = 8  # layers


def tensor_parallel(*overrides, microbatches=1):
    """Return the tensor collectives of a short Llama-3-8B on 8 GPUs of a host, and the wire bytes of one B T D."""
    batch = f"data.batch_size={2 * microbatches}", f"parallel.microbatches={microbatches}"
    split = "parallel.tensor=8", "parallel.data=1", f"model.num_layers={L}"
    loaded = request.load(str(ROOT / "configs" / f"{LLAMA}.yaml"), [*split, *batch, *overrides])
    audit = script.audit(loaded, "h100", 8)
    assert {c["axis"] for c in audit["compiled"]["collectives"]} == {"tensor"}
    return {c["op"]: c for c in audit["compiled"]["collectives"]}, 7 / 8 * 2 * loaded.data.seq_len * 4096 * 2


@needs_cuda_compiler
@pytest.mark.parametrize(
    "case", cover([("none", 0, "true")], [("full", 1, "false"), ("none", 0, "false"), ("selective", 0, "false")])
)
def test_a_layer_gathers_six_times_and_scatters_four_times(case):
    remat, recomputed, unroll = case
    found, size = tensor_parallel(f"memory.remat={remat}", f"model.unroll={unroll}", microbatches=2)
    M = 2
    gathers, scatters = 6 * L + 2, (4 + recomputed) * L + 2  # 2: look-up and loss
    assert (found["all_gather"]["count"], found["reduce_scatter"]["count"]) == (M * gathers, M * scatters)
    for c in found.values():
        assert c["largest_bytes"] <= size  # B T D: never logits, B T V
    # The scatters of the backward overlap with the gradients of the weights.
    assert found["reduce_scatter"]["behind_matmuls_bytes"] >= M * (2 * L) * size


@needs_cuda_compiler
@pytest.mark.parametrize("remat", cover(["block:2"], ["none", "selective", "full"]))
def test_with_overlap_everything_a_layer_moves_is_behind_matmuls(remat):
    found, size = tensor_parallel(f"memory.remat={remat}", "parallel.overlap_tensor=true")
    # of block:2 the last layer of each block does not recompute its last matmul
    hops = {"none": 6, "selective": 6, "full": 9, "block:2": 9.5}[remat]
    assert found["permute"]["count"] == hops * 7 * L
    assert found["permute"]["behind_matmuls_bytes"] == found["permute"]["bytes_per_device"] == hops * L * size
    for c in found["all_gather"], found["reduce_scatter"]:  # of the layers' backward, and two of look-up and loss
        assert c["bytes_per_device"] - c["behind_matmuls_bytes"] <= 2 * size


@needs_cuda_compiler
@pytest.mark.parametrize("case", cover([("none", 4)], [("full", 5)]))
def test_without_sequence_parallelism_a_layer_all_reduces_four_times(case):
    remat, per_layer = case
    found, size = tensor_parallel(f"memory.remat={remat}", "parallel.sequence_parallel=false")
    (op,) = found
    assert op == "all_reduce"
    few = 100 + 3 * 4 * 2 * 2 * 8192  # scalars: loss, global norm, and three per token of the loss
    assert found[op]["bytes_per_device"] == pytest.approx((per_layer * L + 2) * 2 * size, abs=few)
    assert per_layer * L + 2 <= found[op]["count"] <= per_layer * L + 2 + 6
    assert found[op]["largest_bytes"] <= 2 * size
