"""The backward of GELU with the gradient of the bias before it: right in interpret mode, and as models use it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case
from conftest import cover, equals_the_oracle

from nanotrain_jax.kernels import gelu
from nanotrain_jax.models import ops

# With 2 programs of 8 rows and 128 columns: less than one has, as much, and not a multiple.
SHAPES = [(37, 200)], [(1, 1), (8, 128), (5, 3), (64, 384)]


def arrays(shape, dtype=jnp.float32):
    x, g = (jax.random.normal(key, shape).astype(dtype) for key in jax.random.split(jax.random.key(0)))
    return 3 * x, g


def exact(x, g):
    """The gradient of x, in float64."""
    x, g = (np.asarray(y.astype(jnp.float32), np.float64) for y in (x, g))
    scale, cubic = (2 / np.pi) ** 0.5, 0.044715
    tanh = np.tanh(scale * (x + cubic * x**3))
    return g * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * scale * (1 + 3 * cubic * x**2))


@pytest.mark.parametrize("shape", cover(*SHAPES, str))
def test_the_kernel_equals_the_formula(shape, monkeypatch):
    monkeypatch.setattr(gelu, "PROGRAMS", 2)
    x, g = arrays(shape)
    found, total = gelu.backward(x, g, interpret=True)
    np.testing.assert_allclose(found, exact(x, g), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(total, exact(x, g).sum(0), rtol=2e-6, atol=1e-5)


def test_large_values_have_finite_gradients():
    x = jnp.array([[-1e4, -60.0, 0.0, 60.0, 1e4]])
    found, _ = gelu.backward(x, jnp.ones_like(x), interpret=True)
    np.testing.assert_allclose(found, [[0.0, 0.0, 0.5, 1.0, 1.0]], atol=1e-9)


def test_the_kernel_sums_before_it_rounds():
    x, g = arrays((64, 96), jnp.bfloat16)
    in_float32, total_in_float32 = gelu.backward(x.astype(jnp.float32), g.astype(jnp.float32), interpret=True)
    found, total = gelu.backward(x, g, interpret=True)
    np.testing.assert_array_equal(found, in_float32.astype(jnp.bfloat16))
    np.testing.assert_array_equal(total, total_in_float32)


def test_the_bias_gets_its_gradient_from_what_uses_the_sum():
    x, g = arrays((2, 12, 32))
    bias = jnp.linspace(-1.0, 1.0, 32)

    def apart(x, bias):
        return ops.gelu_of_sum(ops.add_constant(x, bias), bias)

    of_x, of_bias = jax.vjp(apart, x, bias)[1](g)
    (expected,) = jax.vjp(ops.gelu, x + bias[None, None])[1](g)
    np.testing.assert_array_equal(of_x, expected)
    np.testing.assert_allclose(of_bias, expected.sum((0, 1)), rtol=1e-6, atol=1e-5)


PALLAS = {"kernels": "pallas"}
COVER = [case("data 2 tensor 2", "gpt2", "selective", PALLAS, zero=1, microbatches=2)]
MORE = [
    case("data 2", "gpt2", "none", PALLAS | {"unroll": True}, zero=3, microbatches=1, persist_below=64),
    case("pipe 2", "gpt2", "full", PALLAS, microbatches=4, schedule="zb_h1"),
]


@pytest.mark.parametrize("case", cover(COVER, MORE, str))
def test_every_layout_equals_the_oracle(case, expected):
    equals_the_oracle(case.tree(), expected)
