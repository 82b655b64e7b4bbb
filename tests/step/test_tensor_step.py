"""The tensor-parallel decoder: the numbers of one device, the bytes of the papers."""

from collections import Counter

import jax
import pytest
from cases import case
from conftest import (
    built,
    compiled_text,
    cover,
    equals_the_oracle,
    in_order,
    resolved,
    skips_an_overflow,
    small,
    stays_near_the_oracle,
)

from nanotrain_jax.audit import wire
from nanotrain_jax.costs import communication
from nanotrain_jax.step import build as steps


def split(layout, family, kv_heads, remat="none", loss_chunk=0, **parallel):
    """A decoder of 8 heads and kv_heads; sequence_parallel is true by default."""
    model = {"num_heads": 8, "num_kv_heads": kv_heads} | ({"loss_chunk": loss_chunk} if loss_chunk else {})
    return case(layout, family, remat, model, **parallel)


def tree(case):
    return case.tree(parallel={"persist_below": 64})


# Every activation layout, one and two microbatches; EARLY_OR_CHUNKED has llama, ZeRO 1 and one kv head. The first two
# and MORE, their combinations, are long.
COVER = [
    split("tensor 2", "llama", 8, zero=0, microbatches=1),
    split("tensor 8", "gpt2", 2, "selective", zero=3, sequence_parallel=False, microbatches=1),
    split("data 2 tensor 4", "gpt2", 2, zero=3, microbatches=2, overlap_tensor=True),
]
MORE = [
    split("tensor 8", "llama", 8, zero=1, sequence_parallel=False, microbatches=1),
    split("data 2 tensor 2", "gpt2", 2, "selective", zero=2, microbatches=1),
    split("tensor 4", "gpt2", 8, "block:2", zero=1, microbatches=1),
    split("tensor 8", "llama", 8, "full", zero=0, microbatches=2, overlap_tensor=True),
    split("data 4 tensor 2", "llama", 1, "selective", zero=1, microbatches=1, overlap_tensor=True),
    split("data 2 tensor 4", "gpt2", 2, zero=3, microbatches=2),
    split("data 4 tensor 2", "gpt2", 1, zero=1, sequence_parallel=False, microbatches=2),
    split("data 2 tensor 4", "llama", 1, "block:2", zero=2, sequence_parallel=False, microbatches=1),
    split("data 4 tensor 2", "llama", 1, "full", zero=3, microbatches=2),
    split("replica 2 data 2 tensor 2", "llama", 8, zero=3, sequence_parallel=False, microbatches=1),
    split("data 2 tensor 4", "llama", 2, "full", zero=0, sequence_parallel=False, microbatches=2),
    split("replica 2 tensor 4", "llama", 2, "selective", zero=1, microbatches=2),
    split("tensor 8", "gpt2", 1, "full", zero=0, microbatches=2),
    split("tensor 8", "llama", 2, zero=2, microbatches=2),
]


@pytest.mark.parametrize("case", cover(COVER[2:], [*COVER[:2], *MORE], str))
def test_the_decoder_equals_the_oracle_and_moves_the_bytes_of_the_papers(case, expected):
    equals_the_oracle(tree(case), expected)
    moves_the_bytes_of_the_papers(tree(case))


def moves_the_bytes_of_the_papers(tree):
    step = built(tree)
    config = step.plan.config
    theory, found = Counter(), Counter()
    for c in communication.communication(config):
        theory[c["axis"], c["op"]] += c["bytes_per_device"]
    text = compiled_text(step)
    in_order(text)
    for c in wire.summary(wire.collectives(text, step.plan.mesh.shape, communication.conditional_rates(config))):
        found[c["axis"], c["op"]] += c["bytes_per_device"]
    # The loss and the gradients' norm; where targets are masked their number, too.
    scalars = 20 if config.data.attend_across_documents else 24
    if config.parallel.zero == 3 and config.parallel.microbatches > 1:
        for axes in ("data", "context", "data,context"):  # XLA:CPU gathers the ends once for all microbatches
            del theory[axes, "all_gather"], found[axes, "all_gather"]
    for key in theory.keys() | found.keys():
        assert theory[key] - 1e-6 <= found[key] <= theory[key] + scalars, key


MASKED = {"idle": "mask", "overlap_tensor": True, "microbatches": 2}
OVERLAPPED = [split("pipe 2 tensor 2", "llama", 4, schedule="zero_bubble", **MASKED)]
MORE_OVERLAPPED = [split("pipe 2 tensor 4", "gpt2", 4, "full", zero=0, **MASKED)]


@pytest.mark.parametrize("case", cover([], OVERLAPPED + MORE_OVERLAPPED, str))
def test_hops_in_pipelines_equal_the_oracle(case, expected):
    equals_the_oracle(tree(case), expected)


LAYER_BY_LAYER = {"grad_reduce": "per_layer"}
EARLY_OR_CHUNKED = [
    split("replica 2 tensor 4", "gpt2", 1, loss_chunk=16, zero=1, microbatches=2, bucket_mb=0.0, **LAYER_BY_LAYER),
    split("data 4 tensor 2", "llama", 1, loss_chunk=16, zero=3, microbatches=1, bucket_mb=0.0),
]
MORE_OF_THEM = [
    split("data 4 tensor 2", "llama", 2, zero=0, microbatches=2, **LAYER_BY_LAYER),
    split("data 2 tensor 4", "gpt2", 2, "full", zero=1, sequence_parallel=False, microbatches=1, **LAYER_BY_LAYER),
    split("tensor 8", "gpt2", 8, "selective", loss_chunk=32, zero=2, sequence_parallel=False, microbatches=2),
]


@pytest.mark.parametrize("case", cover([], EARLY_OR_CHUNKED + MORE_OF_THEM, str))
def test_per_layer_reduction_and_chunked_losses_equal_the_oracle(case, expected):
    equals_the_oracle(tree(case), expected)
    moves_the_bytes_of_the_papers(tree(case))


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize(
    ("zero", "tensor", "sequence_parallel", "compute", "error"),
    [
        (1, 4, True, "bfloat16", 2**-8),  # one unit in the last place
        pytest.param(3, 2, True, "bfloat16", 2**-8, marks=pytest.mark.long),
        pytest.param(0, 4, False, "bfloat16", 2**-8, marks=pytest.mark.long),
        pytest.param(2, 4, True, "float16", 2**-11, marks=pytest.mark.long),
    ],
)
def test_16_bit_runs_are_close_to_float32(zero, tensor, sequence_parallel, compute, error, expected):
    precision = {"compute": compute, "loss_scale": "dynamic" if compute == "float16" else "none"}
    parallel = {"tensor": tensor, "zero": zero, "sequence_parallel": sequence_parallel}
    tree = small(parallel=parallel | {"persist_below": 64, "microbatches": 2}, precision=precision)
    stays_near_the_oracle(tree, expected, error)


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(("zero", "sequence_parallel"), [(0, False), (2, True)])
def test_an_overflow_on_one_device_skips_the_step_on_all(zero, sequence_parallel):
    parallel = {"tensor": 4, "zero": zero, "sequence_parallel": sequence_parallel, "persist_below": 64}
    skips_an_overflow(small(parallel=parallel, precision={"compute": "float16", "loss_scale": "dynamic"}))


def test_each_device_stores_its_shards_of_heads_ffn_and_vocabulary():
    config, mesh = resolved(tree(split("data 2 tensor 4", "llama", 2, zero=1, microbatches=1)))
    params = steps.build(config, mesh).state.params
    own = jax.tree.map(lambda p: p.sharding.shard_shape(p.shape), params)
    attention, mlp = own["layers"]["attention"], own["layers"]["mlp"]
    assert attention["q_DNH"] == (2, 32, 2, 4)
    assert attention["k_DKH"] == (2, 32, 2, 4)  # two heads for four devices: replicated
    assert mlp["up_DF"] == (2, 32, 16)
    assert own["ends"]["embedding_VD"] == own["ends"]["head_VD"] == (128 // 4, 32)  # 61, padded to 128
