"""balance=bias: which experts are chosen follows a bias that loads move, the same in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case
from conftest import built, cover, on_devices, random_tokens, resolved, run

from nanotrain_jax.models import balance
from nanotrain_jax.parallel.expert.routing import Choice, route

RATE, E, K = 0.01, 8, 2
BIAS = {"experts": {"num": E, "top_k": K, "d_ff": 64, "router": "sigmoid", "balance": "bias", "bias_rate": RATE}}
ONE = case("data 1", model=BIAS)


def of(case, **sections):
    return case.tree(parallel={"persist_below": 4}, **sections)


def biases(step, state):
    found = step.in_layer_order(state).params["layers"]["mlp"]["bias_2E"]
    return np.asarray(jax.vmap(balance.bias)(found.astype(jnp.float32)))[:2]


def test_a_step_moves_the_bias_against_the_load():
    config, _ = resolved(of(ONE))
    step = built(of(ONE))
    state = step.init()
    (tokens,) = random_tokens(config)
    state, metrics, _ = step.train(state, on_devices(tokens, step))
    for bias in biases(step, state):
        assert {*np.round(bias / RATE).astype(int)} <= {-1, 0, 1} and bias.any()
    assert metrics["train_load"] > 1


def test_a_frozen_bias_stays_and_a_loss_scale_does_not_change_what_is_logged():
    frozen = of(ONE, train={"freeze": ["^layers/mlp/"]}, precision={"compute": "float16", "loss_scale": 1024.0})
    step = built(frozen)
    state, log = run(frozen, updates=1)
    assert not np.asarray(biases(step, state)).any()
    _, plain = run(of(ONE), updates=1)
    for name in "loss", "train_load", "train_router_z", "train_router_entropy":
        assert log[0][name] == pytest.approx(plain[0][name], rel=2e-2)


def test_the_bias_chooses_and_does_not_weigh():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(32, E)), jnp.float32)
    bias = jnp.zeros(E).at[3].set(10.0)
    plain, moved = (route(logits, Choice(K, "sigmoid", False), b) for b in (None, bias))
    assert int(moved.sizes_E[3]) == 32 > int(plain.sizes_E[3])
    assert float(moved.gates_Tk.max()) < 1


def test_small_steps_add_up_in_16_bits():
    bias = jnp.zeros((1, 2, E), jnp.bfloat16)
    load = jnp.asarray([[0.0] * 4 + [2.0] * 4])
    step = jax.jit(balance.adjusted)
    for _ in range(500):
        bias = step(bias, load, 0.001)
    np.testing.assert_allclose(balance.bias(bias[0]), [0.5] * 4 + [-0.5] * 4, rtol=1e-3)


MORE = [
    case("data 2 pipe 2 tensor 2", model=BIAS, zero=2, microbatches=2),
    case("data 2 tensor 2", model=BIAS, zero=3, remat="full"),
    case("data 2", model=BIAS, zero=1, grad_reduce="per_layer", microbatches=2),
    case("pipe 2 context 2", model=BIAS, context_attention="gather", microbatches=2, schedule="zero_bubble"),
    case("pipe 2", model=BIAS | {"num_layers": 3}, microbatches=2),
]


@pytest.mark.parametrize("case", cover([], MORE, str))
def test_every_layout_moves_it_so(case):
    layers = case.model.get("num_layers", 2)
    plain = ONE._replace(model=case.model)
    state, log = run(of(plain), updates=4)
    expected = biases(built(of(plain)), state)
    found, found_log = run(of(case), updates=4)
    assert len(expected) == 2 <= layers
    np.testing.assert_allclose(biases(built(of(case)), found), expected, atol=1e-6)
    for a, b in zip(log, found_log, strict=True):
        np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-5)
        np.testing.assert_allclose(b["train_load"], a["train_load"], rtol=1e-6)


@pytest.mark.long
def test_loads_become_even():
    """Steps of the bias are small beside the differences of scores of a new router."""
    slow = {"experts": BIAS["experts"] | {"bias_rate": 0.0005}}
    step = built(of(ONE._replace(model=slow), optimizer={"lr": 1e-6}))
    state, loads = step.init(), []
    (tokens,) = random_tokens(step.plan.config)
    for _ in range(60):
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        loads.append(float(metrics["train_load"]))
    assert loads[-1] < 1.3 < loads[0]
