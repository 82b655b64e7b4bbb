"""parallel.compress in the step: equal to the oracle where everything travels, the same in every layout, resumable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case
from conftest import cover, equals_the_oracle, on_devices, random_tokens, resolved

from nanotrain_jax.step import build as steps

close = np.testing.assert_allclose

WHOLE = [  # every gradient travels whole, in another way
    case("replica 2", compress="topk:1"),
    case("replica 4 data 2", "gpt2", zero=1, compress="randomk:1"),
    case("replica 2 data 2 tensor 2", zero=3, microbatches=2, compress="topk:1"),
    case("replica 2 data 2 pipe 2", "gpt2", zero=2, microbatches=2, compress="topk:1"),
    case("replica 2 context 2 tensor 2", zero=1, compress="randomk:1"),
    case("replica 2 data 2 pipe 2", zero=1, vocab_over_pipe=True, microbatches=2, compress="randomk:1"),
]


@pytest.mark.parametrize("layout", WHOLE, ids=str)
def test_a_ratio_of_1_equals_the_oracle(layout, expected):
    equals_the_oracle(layout.tree(parallel={"persist_below": 100}), expected)
