"""The decoder with context parallelism: the numbers of one device, the bytes of the papers."""

import pytest
from cases import case
from conftest import cover, equals_the_oracle


def tree(case):
    return case.tree(parallel={"persist_below": 64})


def split(layout, family, kv_heads, remat="none", **parallel):
    """A decoder of 8 heads and kv_heads."""
    return case(layout, family, remat, {"num_heads": 8, "num_kv_heads": kv_heads}, **parallel)


COVER = [
    split("context 2", "llama", 8, zero=0, microbatches=1),
    split("data 2 context 4", "gpt2", 2, "selective", zero=3, microbatches=2),
    split("context 2 tensor 2", "llama", 2, "full", zero=2, context_attention="gather"),
    split("context 8", "llama", 1, zero=3, context_attention="ulysses"),
]


@pytest.mark.parametrize("case", cover(COVER, [], str))
def test_the_decoder_equals_the_oracle(case, expected):
    equals_the_oracle(tree(case), expected)
