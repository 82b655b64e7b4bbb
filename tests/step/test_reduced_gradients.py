"""Gradients that ZeRO reduced in bfloat16 stay so until they are added or used: not a bit of the state changes."""

import jax
import numpy as np
import pytest
from cases import case
from conftest import _built, cover, resolved, run

from nanotrain_jax.config import execution
from nanotrain_jax.costs import gradient_memory
from nanotrain_jax.parallel.zero import zero

BFLOAT16 = {"compute": "float32", "grad_reduce": "bfloat16"}
COVER = [case("data 2", "llama", "full", {"unroll": True}, zero=3, microbatches=1, persist_below=64)]
MORE = [
    case("data 2", "llama", "none", zero=3, microbatches=2, persist_below=64),
    case("data 4", "gpt2", "selective", zero=2, microbatches=1, persist_below=64),
    case("replica 2 data 2", "gpt2", "none", zero=3, microbatches=1, persist_below=64),
]


@pytest.mark.parametrize("case", cover(COVER, MORE, str))
def test_not_a_bit_of_the_state_changes(case, monkeypatch):
    tree = case.tree(precision=BFLOAT16)
    kept, log = run(tree, updates=2)
    _built.cache_clear()
    inputs = zero.Zero.inputs
    monkeypatch.setattr(zero.Zero, "inputs", lambda self, stored, shards, dtype: inputs(self, stored, shards))
    in_float32, expected_log = run(tree, updates=2)
    assert log == expected_log
    assert np.isfinite(log[-1]["loss"])
    for x, y in zip(*map(jax.tree.leaves, (kept, in_float32)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("parallel", "reduce", "size"),
    [
        ({"zero": 3}, "bfloat16", 2),
        ({"zero": 2}, "bfloat16", 2),
        ({"zero": 3}, "float32", 4),
        ({"zero": 3}, "int8", 4),
        ({"zero": 3, "prefetch": True}, "bfloat16", 4),
    ],
    ids=str,
)
def test_a_gradient_of_a_microbatch_takes_the_bytes_of_its_reduction(parallel, reduce, size):
    tree = case("data 2", microbatches=1, **parallel).tree(precision=BFLOAT16 | {"grad_reduce": reduce})
    config, _ = resolved(tree)
    assert execution.keeps_reduced(config) == (size == 2 or reduce != "bfloat16")
    _, shard = gradient_memory.trained_parameters(config)
    assert gradient_memory.of_ends(config) == size * shard["ends"]
