"""The decoder, tensor parallel: the numbers of one device, the bytes of the papers."""

import pytest
from conftest import equals_the_oracle, small

# Every size meets every stage, way of lying between the matmuls, family and number of kv heads.
COVER = [  # tensor, data, replica, zero, sequence_parallel, family, kv heads, microbatches, remat
    (2, 1, 1, 0, True, "llama", 8, 1, "none"),
    (2, 4, 1, 1, False, "gpt2", 1, 2, "none"),
    (2, 2, 1, 2, True, "gpt2", 2, 1, "selective"),
    (2, 4, 1, 3, True, "llama", 1, 2, "full"),
    (2, 2, 2, 3, False, "llama", 8, 1, "none"),
    (4, 2, 1, 0, False, "llama", 2, 2, "full"),
    (4, 1, 1, 1, True, "gpt2", 8, 1, "block:1"),
    (4, 2, 1, 2, False, "llama", 1, 1, "block:2"),
    (4, 2, 1, 3, True, "gpt2", 2, 2, "none"),
    (4, 1, 2, 1, True, "llama", 2, 2, "selective"),
    (8, 1, 1, 0, True, "gpt2", 1, 2, "full"),
    (8, 1, 1, 1, False, "llama", 8, 1, "none"),
    (8, 1, 1, 2, True, "llama", 2, 2, "none"),
    (8, 1, 1, 3, False, "gpt2", 2, 1, "selective"),
]


@pytest.mark.parametrize(
    ("tensor", "data", "replica", "zero", "sequence_parallel", "family", "kv_heads", "microbatches", "remat"), COVER
)
def test_the_decoder_split_over_tensor_equals_the_oracle(
    tensor, data, replica, zero, sequence_parallel, family, kv_heads, microbatches, remat, expected
):
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
    equals_the_oracle(small(family, model=heads, parallel=parallel, memory={"remat": remat}), expected)
