"""The decoder, tensor parallel: the numbers of one device, the bytes of the papers."""

from collections import Counter

import jax
import pytest
from conftest import cover, equals_the_oracle, resolved, skips_an_overflow, small, stays_near_the_oracle

from nanotrain_jax import step as steps
from nanotrain_jax.audit import cost, hlo

# Every size, stage, way of lying between the matmuls, family and number of kv heads; together with MORE they meet.
COVER = [  # tensor, data, replica, zero, sequence_parallel, family, kv heads, microbatches, remat
    (2, 1, 1, 0, True, "llama", 8, 1, "none"),
    (2, 2, 1, 2, True, "gpt2", 2, 1, "selective"),
    (4, 1, 1, 1, True, "gpt2", 8, 1, "block:2"),
    (8, 1, 1, 1, False, "llama", 8, 1, "none"),
    (8, 1, 1, 3, False, "gpt2", 2, 1, "selective"),
]
MORE = [
    (4, 2, 1, 3, True, "gpt2", 2, 2, "none"),
    (2, 4, 1, 1, False, "gpt2", 1, 2, "none"),
    (4, 2, 1, 2, False, "llama", 1, 1, "block:2"),
    (2, 4, 1, 3, True, "llama", 1, 2, "full"),
    (2, 2, 2, 3, False, "llama", 8, 1, "none"),
    (4, 2, 1, 0, False, "llama", 2, 2, "full"),
    (4, 1, 2, 1, True, "llama", 2, 2, "selective"),
    (8, 1, 1, 0, True, "gpt2", 1, 2, "full"),
    (8, 1, 1, 2, True, "llama", 2, 2, "none"),
]


def split(tensor, data, replica, zero, sequence_parallel, family, kv_heads, microbatches, remat):
    parallel = {
        "tensor": tensor,
        "data": data,
        "replica": replica,
        "zero": zero,
        "sequence_parallel": sequence_parallel,
        "microbatches": microbatches,
        "persist_below": 64,
    }
    heads = {"num_heads": 8, "num_kv_heads": kv_heads}
    return small(family, model=heads, parallel=parallel, memory={"remat": remat})


@pytest.mark.parametrize("layout", cover(COVER, MORE))
def test_the_decoder_split_over_tensor_equals_the_oracle_and_moves_what_the_papers_say(layout, expected):
    tree = split(*layout)
    equals_the_oracle(tree, expected)
    moves_what_the_papers_say(tree)


def moves_what_the_papers_say(tree):
    config, mesh = resolved(tree)
    step = steps.build(config, mesh)
    theory, found = Counter(), Counter()
    for c in cost.communication(config):
        theory[c["axis"], c["op"]] += c["bytes_per_device"]
    text = step.train.lower(step.state, step.batch).compile().as_text()
    for c in hlo.summary(hlo.collectives(text, mesh.shape, cost.turns(config))):
        found[c["axis"], c["op"]] += c["bytes_per_device"]
    scalars = 20  # the loss and the gradients' norm
    if config.parallel.zero == 3 and config.parallel.microbatches > 1:
        del theory["data", "all_gather"], found["data", "all_gather"]  # XLA:CPU gathers the ends once for all of them
    for key in theory.keys() | found.keys():
        assert theory[key] - 1e-6 <= found[key] <= theory[key] + scalars, key


@pytest.mark.parametrize(
    ("layout", "parallel", "chunk"),
    [
        pytest.param(
            (2, 4, 1, 0, True, "llama", 2, 2, "none"), {"grad_reduce": "per_layer"}, 0, marks=pytest.mark.long
        ),
        pytest.param(
            (4, 2, 1, 1, False, "gpt2", 2, 1, "full"), {"grad_reduce": "per_layer"}, 0, marks=pytest.mark.long
        ),
        ((4, 1, 2, 1, True, "gpt2", 1, 2, "none"), {"grad_reduce": "per_layer", "bucket_mb": 0.0}, 16),
        ((2, 4, 1, 3, True, "llama", 1, 1, "none"), {"bucket_mb": 0.0}, 16),
        pytest.param((8, 1, 1, 2, False, "gpt2", 8, 2, "selective"), {}, 32, marks=pytest.mark.long),
    ],
)
def test_gradients_that_leave_early_and_chunked_losses_equal_the_oracle(layout, parallel, chunk, expected):
    tree = split(*layout)
    tree["parallel"] |= parallel
    tree["model"] |= {"loss_chunk": chunk}
    equals_the_oracle(tree, expected)
    moves_what_the_papers_say(tree)


@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize(
    ("zero", "tensor", "sequence_parallel", "compute", "error"),
    [
        (1, 4, True, "bfloat16", 2**-8),  # one unit in the last place
        pytest.param(3, 2, True, "bfloat16", 2**-8, marks=pytest.mark.long),
        pytest.param(0, 4, False, "bfloat16", 2**-8, marks=pytest.mark.long),
        (2, 4, True, "float16", 2**-11),
    ],
)
def test_16_bit_runs_stay_near_float32(zero, tensor, sequence_parallel, compute, error, expected):
    precision = {"compute": compute, "loss_scale": "dynamic" if compute == "float16" else "none"}
    parallel = {"tensor": tensor, "zero": zero, "sequence_parallel": sequence_parallel}
    tree = small(parallel=parallel | {"persist_below": 64, "microbatches": 2}, precision=precision)
    stays_near_the_oracle(tree, expected, error)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(("zero", "sequence_parallel"), [(0, False), (2, True)])
def test_an_overflow_on_one_device_skips_the_step_on_all(zero, sequence_parallel):
    parallel = {"tensor": 4, "zero": zero, "sequence_parallel": sequence_parallel, "persist_below": 64}
    skips_an_overflow(small(parallel=parallel, precision={"compute": "float16", "loss_scale": "dynamic"}))


def test_each_device_stores_its_part_of_heads_ffn_and_vocabulary():
    config, mesh = resolved(split(4, 2, 1, 1, True, "llama", 2, 1, "none"))
    params = steps.build(config, mesh).state.params
    own = jax.tree.map(lambda p: p.sharding.shard_shape(p.shape), params)
    attention, mlp = own["layers"]["attention"], own["layers"]["mlp"]
    assert attention["q_DNH"] == (2, 32, 2, 4)
    assert attention["k_DKH"] == (2, 32, 2, 4)  # two heads for four devices: all have both
    assert mlp["up_DF"] == (2, 32, 16)
    assert own["ends"]["embedding_VD"] == own["ends"]["head_VD"] == (128 // 4, 32)  # 61, padded to 128
