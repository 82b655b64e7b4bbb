"""The softmax of the loss as kernels: equal to the same in plain JAX, in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cover

from nanotrain_jax.kernels import softmax
from nanotrain_jax.parallel.tensor import vocabulary

BLOCK = 128
# Fewer logits than a block has, as many, and not a multiple.
SHAPES = [(5, 300)], [(1, 1), (3, 128), (2, 127), (4, 513)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK", BLOCK)


def logits(shape, dtype=jnp.float32):
    return (6 * jax.random.normal(jax.random.key(0), shape)).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", cover(*SHAPES, str))
def test_maximum_and_sum(shape, dtype):
    x = logits(shape, dtype)
    exact = np.asarray(x.astype(jnp.float32), np.float64)
    top, total = softmax.maximum_and_sum(x, interpret=True)
    assert top.dtype == total.dtype == jnp.float32
    np.testing.assert_array_equal(top, exact.max(1))
    np.testing.assert_allclose(total, np.exp(exact - exact.max(1, keepdims=True)).sum(1), rtol=1e-6)


def test_rows_that_are_masked_sum_to_what_is_left():
    x = logits((3, 300)).at[:, 7:].set(jnp.finfo(jnp.float32).min)  # padding of the vocabulary
    np.testing.assert_allclose(
        softmax.maximum_and_sum(x, interpret=True), softmax.maximum_and_sum(x[:, :7], interpret=True), rtol=1e-6
    )


@pytest.mark.parametrize("shape", cover(*SHAPES, str))
def test_gradient_of_logits(shape):
    x, tokens = logits(shape), jnp.arange(shape[0], dtype=jnp.int32)
    top, total = vocabulary.maximum_and_sum(x)
    scale = 0.1 + tokens.astype(jnp.float32)
    own = jnp.where(tokens == 1, -1, (37 * tokens) % shape[1])  # that of token 1 is on another device
    found = softmax.gradient(x, softmax.Weights(top, scale / total, scale, own), jnp.float32, interpret=True)
    exact = np.exp(np.asarray(x, np.float64))
    expected = exact / exact.sum(1, keepdims=True) - (np.arange(shape[1]) == np.asarray(own)[:, None])
    np.testing.assert_allclose(found, expected * np.asarray(scale)[:, None], rtol=1e-5, atol=1e-6)


def test_gradient_is_rounded_once():
    x = logits((4, 300), jnp.bfloat16)
    top, total = vocabulary.maximum_and_sum(x)
    ones, own = jnp.ones(4), jnp.arange(4, dtype=jnp.int32)
    weights = softmax.Weights(top, ones / total, ones, own)
    exact = softmax.gradient(x.astype(jnp.float32), weights, jnp.float32, interpret=True)
    found = softmax.gradient(x, weights, jnp.bfloat16, interpret=True)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))
