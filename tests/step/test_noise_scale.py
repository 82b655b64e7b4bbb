"""The gradient noise scale: the estimator against a known Gaussian; in the step the same in every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import case
from conftest import cover, on_devices, random_tokens, resolved

from nanotrain_jax.parallel.gradients import noise_scale
from nanotrain_jax.parallel.gradients.noise_scale import Batch
from nanotrain_jax.step import build as steps


def test_the_estimator_finds_the_noise_scale_of_a_known_gaussian():
    """Gradients of sequences ~ N(G, diag): 1,000 steps of 8 small batches of 4 sequences. Of one step G is 50 times as
    large, which changes no more than any other step."""
    size, batch = 500, Batch(count=8, sequences=4)
    rng = np.random.default_rng(0)
    mean, deviation = rng.normal(size=size) / 10, rng.uniform(0.5, 2, size)
    true = (deviation**2).sum() / (mean**2).sum()
    noise = noise_scale.start()
    for number in range(1000):
        small = (
            mean * (50 if number == 700 else 1)
            + deviation * rng.normal(size=(batch.count, size)) / batch.sequences**0.5
        )
        squares = (small**2).sum(1).mean(), (small.mean(0) ** 2).sum()
        noise = noise_scale.average(noise, *map(jnp.float32, squares), batch, jnp.bool_(True))
    assert float(noise_scale.scale(noise)) == pytest.approx(true, rel=0.05)
    kept = noise_scale.average(noise, jnp.float32(jnp.nan), jnp.float32(1), batch, jnp.bool_(False))
    assert kept == noise


MIXTURE = {"experts": {"num": 8, "top_k": 2, "d_ff": 64, "balance": "none", "capacity": 8.0}}  # room for all rows
LAYOUTS = [
    case("data 4 tensor 2", zero=2, microbatches=2),
    case("pipe 2 data 2", zero=3, microbatches=4, schedule="zero_bubble"),
    case("data 4", zero=0, microbatches=2),
    case("data 1", microbatches=8),
    case("data 2 replica 2 tensor 2", zero=1, microbatches=2, sequence_parallel=False),
    case("data 8", zero=3),
    case("data 8", zero=0, grad_reduce="per_layer"),
    case("data 4", zero=1, grad_reduce="per_layer", microbatches=2),
    case("data 4", zero=3, prefetch=True, microbatches=2),
    case("data 4", zero=3, prefetch=True, microbatches=2, remat="block:2"),
    case("pipe 2 data 2", zero=1, microbatches=4, idle="mask"),
    case("pipe 2 data 4", zero=1, microbatches=2, grad_reduce="per_layer"),
    case("data 4 expert 2", model=MIXTURE, zero=1, microbatches=2),
    case("data 2 expert 2 tensor 2", model=MIXTURE, zero=3, microbatches=4),
]


def averages(layout):
    """Take 3 steps of the small config with 8 small batches -> the averages, the metric."""
    config, mesh = resolved(layout.tree(train={"seed": 3, "noise_scale": True}))
    step = steps.build(config, mesh)
    state = step.init()
    for tokens in random_tokens(config, count=3):
        state, metrics, _ = step.train(state, on_devices(tokens, step))
    assert step.plan.small_batches == Batch(8, 4)
    return jax.device_get(state.noise), float(metrics["noise_scale"])


@pytest.fixture(scope="module")
def expected():
    """Return a function from a model to averages after 3 steps, from the oracle's gradients of each small batch."""
    return functools.cache(lambda has_experts: averages_of_the_oracle(MIXTURE if has_experts else {}))


def averages_of_the_oracle(model):
    config, mesh = resolved(case("data 1", model=model).tree())
    step = steps.build(config, mesh)
    state, noise = step.init(), noise_scale.start()
    for tokens in random_tokens(config, count=3):
        of_small = np.mean([squared_norm(state.params, rows) for rows in np.split(tokens, 8)])
        of_batch = squared_norm(state.params, tokens)
        noise = noise_scale.average(noise, of_small, of_batch, Batch(8, 4), jnp.bool_(True))
        state, _, _ = step.train(state, on_devices(tokens, step))
    return noise


gradients = jax.jit(jax.grad(oracle.loss))


def squared_norm(params, rows):
    """Squared norm of the gradients of the mean loss over some rows, of matrices of layers, without experts."""
    found = jax.tree_util.tree_leaves_with_path(gradients(params, rows)["layers"])
    return sum(np.sum(np.square(g)) for path, g in found if g.ndim > 2 and "E" not in path[-1].key.split("_")[-1][:-1])


@pytest.mark.parametrize("layout", cover([], LAYOUTS, str))
def test_every_layout_measures_the_same(layout, expected):
    (noise, metric), expected = averages(layout), expected("expert" in str(layout))
    np.testing.assert_allclose(noise.relative_trace, expected.relative_trace, rtol=1e-5)
    atol = 1e-5 * expected.relative_trace / 32  # a difference of two
    np.testing.assert_allclose(noise.relative_square, expected.relative_square, atol=atol)
    assert np.isnan(metric) == (expected.relative_square <= 0)  # of random tokens, nothing but noise


def test_a_noise_scale_that_is_not_known_is_above_every_batch():
    assert noise_scale.exceeds(noise_scale.start(), 4)
    assert noise_scale.exceeds(noise_scale.Noise(1.0, -1.0), 4)
    assert noise_scale.exceeds(noise_scale.Noise(5.0, 1.0), 4)
    assert not noise_scale.exceeds(noise_scale.Noise(3.0, 1.0), 4)
