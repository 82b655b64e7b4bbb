"""The backward of norms as one kernel: equal to XLA's, in interpret mode, and as models use it."""

import jax
import jax.numpy as jnp
import pytest
from cases import case
from conftest import cover, equals_the_oracle

from nanotrain_jax.kernels import norms
from nanotrain_jax.models import ops

EPS = 1e-5


def arrays(tokens, width, dtype):
    keys = jax.random.split(jax.random.key(0), 5)
    x, g, residual = (jax.random.normal(key, (tokens, width)).astype(dtype) for key in keys[:3])
    gain, bias = (jax.random.normal(key, (width,)) for key in keys[3:])
    return 3 * x + 1, g, residual, gain, bias


def by_xla(x, g, residual, gain, bias):
    """Gradients of x, gain and bias: x is used beside its norm, too. And the sum over tokens of that of x."""

    def both(x, gain, bias):
        return x, ops.normalize(x[None], gain, bias, EPS)[0]

    gradients = jax.vjp(both, x, gain, bias)[1]((residual, g))
    return *gradients, gradients[0].astype(jnp.float32).sum(0)


def error(found, expected):
    found, expected = (x.astype(jnp.float32) for x in (found, expected))
    return jnp.abs(found - expected).max() / jnp.abs(expected).max()


# With 4 programs: fewer tokens, as many, and not a multiple; widths that are powers of two, and not.
SHAPES = [(7, 96)], [(1, 64), (4, 96), (40, 768), (1030, 17)]


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("shape", cover(*SHAPES, str))
def test_the_kernel_equals_xla(shape, centered, monkeypatch):
    monkeypatch.setattr(norms, "PROGRAMS", 4)
    x, g, residual, gain, bias = arrays(*shape, jnp.float32)
    expected = by_xla(x, g, residual, gain, bias if centered else None)
    found = norms.backward(x, gain, g, residual, norms.Norm(EPS, centered, sums_x=True), interpret=True)
    assert (found[2] is None) == (not centered)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or error(ours, theirs) < 1e-6


def test_sums_that_are_not_asked_for_are_none():
    x, g, residual, gain, _ = arrays(7, 96, jnp.float32)
    assert norms.backward(x, gain, g, residual, norms.Norm(EPS, centered=False), interpret=True)[2:] == (None, None)


def test_the_kernel_rounds_gradients_of_bfloat16_once():
    x, g, residual, gain, bias = arrays(64, 96, jnp.bfloat16)
    found = norms.backward(x, gain, g, residual, norms.Norm(EPS, True, sums_x=True), interpret=True)
    exact = by_xla(*(y.astype(jnp.float32) for y in (x, g, residual)), gain, bias)
    assert found[0].dtype == jnp.bfloat16
    assert error(found[0], exact[0]) <= 2**-8
    assert all(error(ours, theirs) < 1e-6 for ours, theirs in zip(found[1:], exact[1:], strict=True))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_models_use_it_on_gpus_alone(centered):
    x, g, residual, gain, bias = arrays(12, 32, jnp.float32)
    weights = gain, bias if centered else None
    expected = by_xla(x, g, residual, *weights)
    (same, _), backward = jax.vjp(lambda x, *weights: ops.normalize_beside(x[None], weights, None, EPS), x, *weights)
    assert (same[0] == x).all()
    found = backward((residual[None], g[None]))
    for ours, theirs in zip(found[: 2 + centered], expected[: 2 + centered], strict=True):
        assert (ours == theirs).all()


PALLAS = {"kernels": "pallas"}
COVER = [case("data 2", "llama", "none", PALLAS, zero=3, microbatches=2, persist_below=64)]
MORE = [
    case("pipe 2 tensor 2", "gpt2", "selective", PALLAS, microbatches=4, schedule="zero_bubble"),
    case("data 2 context 2", "llama", "full", PALLAS, zero=2, microbatches=1, persist_below=64),
    case("data 2", "gpt2", "block:2", PALLAS | {"unroll": True, "num_layers": 4}, zero=1, microbatches=2),
]


@pytest.mark.parametrize("case", cover(COVER, MORE, str))
def test_every_layout_equals_the_oracle(case, expected):
    equals_the_oracle(case.tree(), expected)
