"""The decoder, pipelined: the numbers of one device, the bytes of the papers."""

import jax
import numpy as np
import pytest
from conftest import equals_the_oracle, on_devices, random_tokens, resolved, run, small, with_embedding
from test_tensor_step import moves_what_the_papers_say

from nanotrain_jax import step as steps

# Every schedule meets every number of stages it can have here, and every stage of ZeRO; the rest is spread over them.
COVER = [  # pipe, data, tensor, schedule, chunks, microbatches, zero, family, remat, idle
    (2, 2, 2, "1f1b", 1, 4, 3, "gpt2", "none", "skip"),
    (2, 2, 2, "gpipe", 1, 4, 2, "llama", "selective", "mask"),
    (2, 2, 2, "zero_bubble", 1, 4, 3, "llama", "none", "skip"),
    (2, 2, 2, "interleaved", 2, 8, 1, "gpt2", "full", "skip"),
    (2, 2, 2, "zb_h1", 1, 2, 1, "llama", "full", "mask"),
    (2, 4, 1, "interleaved", 4, 4, 3, "llama", "selective", "mask"),
    (2, 4, 1, "1f1b_lean", 1, 8, 0, "gpt2", "none", "skip"),
    (2, 1, 4, "zb_h2", 1, 8, 0, "gpt2", "selective", "skip"),
    (2, 4, 1, "zb_h1", 1, 8, 3, "gpt2", "block:2", "skip"),
    (4, 2, 1, "1f1b", 1, 16, 1, "llama", "full", "mask"),
    (4, 2, 1, "gpipe", 1, 8, 3, "gpt2", "block:2", "skip"),
    (4, 1, 2, "zero_bubble", 1, 16, 2, "gpt2", "none", "mask"),
    (4, 2, 1, "interleaved", 2, 4, 0, "gpt2", "none", "skip"),
    (4, 1, 2, "1f1b_lean", 1, 4, 2, "llama", "block:2", "skip"),
    (4, 2, 1, "zb_h1", 1, 8, 2, "llama", "selective", "skip"),
    (4, 2, 1, "zb_h2", 1, 16, 3, "llama", "none", "skip"),
    (8, 1, 1, "1f1b", 1, 32, 0, "gpt2", "selective", "skip"),
    (8, 1, 1, "1f1b", 1, 2, 2, "llama", "none", "skip"),  # fewer microbatches than stages
    (8, 1, 1, "gpipe", 1, 16, 1, "llama", "full", "skip"),
    (8, 1, 1, "zero_bubble", 1, 8, 0, "llama", "none", "skip"),
    (8, 1, 1, "zb_h1", 1, 16, 0, "gpt2", "none", "skip"),
    (8, 1, 1, "1f1b_lean", 1, 8, 3, "llama", "none", "mask"),
]


def piped(pipe, data, tensor, schedule, chunks, microbatches, zero, family, remat, idle, **more):
    parallel = {
        "pipe": pipe,
        "data": data,
        "tensor": tensor,
        "schedule": schedule,
        "chunks": chunks,
        "microbatches": microbatches,
        "zero": zero,
        "idle": idle,
        "persist_below": 64,
    }
    return small(family, model={"num_layers": 8}, parallel=parallel | more, memory={"remat": remat})


@pytest.mark.parametrize("layout", COVER, ids=lambda layout: "-".join(map(str, layout)))
def test_the_pipelined_decoder_equals_the_oracle_and_moves_what_the_papers_say(layout, expected):
    equals_the_oracle(piped(*layout), expected)
    if layout[-1] == "skip":  # masked stages also move what they throw away
        moves_what_the_papers_say(piped(*layout))


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ((2, 1, 2, "1f1b", 1, 4, 0, "llama", "none", "skip"), {"replica": 2}),
        ((2, 2, 1, "zb_h1", 1, 4, 2, "gpt2", "none", "skip"), {"replica": 2, "bucket_mb": 0.0}),
        ((2, 2, 2, "zero_bubble", 1, 8, 1, "llama", "full", "skip"), {"sequence_parallel": False}),
        ((2, 1, 4, "interleaved", 2, 4, 3, "gpt2", "none", "skip"), {"sequence_parallel": False}),
    ],
)
def test_replicas_and_whole_activations_go_with_stages(layout, more, expected):
    equals_the_oracle(piped(*layout, **more), expected)
    moves_what_the_papers_say(piped(*layout, **more))
