"""Sampling: the distributions of temperature, top-k, top-p and min-p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanotrain_jax.generation.sampling import Sampling, choose

LOGITS = np.asarray([0.0, 2.0, 1.0, -1.0, 0.5])


def expected(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0):
    """The shares of tokens, one rule after another."""
    shares = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    order = np.argsort(-shares)
    shares[order[top_k:]] = 0
    shares /= shares.sum()
    before = np.cumsum(shares[order]) - shares[order]
    cut = shares.copy()
    cut[order[before >= top_p]] = 0
    cut[shares < min_p * shares.max()] = 0
    return cut / cut.sum()


@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.7, "top_k": 3}, {"top_p": 0.6}, {"temperature": 2.0, "min_p": 0.4}, {"top_k": 4, "top_p": 0.9}],
    ids=str,
)
def test_tokens_are_drawn_as_the_options_say(how):
    draws = 20_000
    logits_BV = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (draws, 5))
    sampling = Sampling(**{"temperature": 1.0, "top_k": None, "seed": 3} | how)
    found = np.bincount(jax.jit(choose, static_argnums=1)(logits_BV, sampling, jnp.arange(draws)), minlength=5) / draws
    exact = expected(**how)
    np.testing.assert_allclose(found, exact, atol=0.015)
    assert (found[exact == 0] == 0).all()


def test_greedy_and_the_smallest_top_p_take_the_most_likely():
    logits_BV = jnp.asarray([LOGITS, -LOGITS], jnp.float32)
    for sampling in Sampling(temperature=0.0), Sampling(top_p=1e-9), Sampling(top_k=1), Sampling(min_p=1.0):
        assert choose(logits_BV, sampling, jnp.arange(2)).tolist() == [1, 3]
