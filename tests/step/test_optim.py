"""Learning rate schedules, weight decay and loss scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import resolved, small

from nanotrain_jax.config import load
from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.models import decoder
from nanotrain_jax.step import optimizer as optim

AXES = {"pipe": 1, "replica": 1, "data": 1, "context": 1, "tensor": 1}


def rates(count=100, **keys):
    tree = {"optimizer": {"lr": 1.0, "min_lr": 0.1} | keys, "train": {"steps": 100}}
    schedule = optim.schedule(resolve(load.parse(tree), AXES, 257).optimizer)
    return np.array([schedule(jnp.int32(i)) for i in range(count + 1)])


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_starts_above_zero_and_reaches_the_peak(shape):
    found = rates(schedule=shape, warmup_steps=9)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert found.max() == 1.0


@pytest.mark.parametrize("warmup", [0, 20])
def test_each_learning_rate_schedule_ends_at_its_final_value(warmup):
    part = (np.arange(warmup, 101) - warmup) / (100 - warmup)

    def close(shape, expected):
        np.testing.assert_allclose(rates(schedule=shape, warmup_steps=warmup)[warmup:], expected, rtol=1e-5)

    close("cosine", 0.1 + 0.9 * (1 + np.cos(np.pi * part)) / 2)
    close("linear", 1 - 0.9 * part)
    close("constant", np.ones_like(part))
    close("wsd", np.where(np.arange(warmup, 101) <= 90, 1.0, 1 - 0.9 * (np.arange(warmup, 101) - 90) / 10))


def test_wsd_decays_over_decay_fraction():
    number = np.arange(101)
    expected = np.where(number <= 70, 1.0, 1 - 0.9 * (number - 70) / 30)
    np.testing.assert_allclose(rates(schedule="wsd", decay_fraction=0.3), expected, rtol=1e-5)


def test_decay_steps_may_differ_from_train_steps():
    found = rates(schedule="linear", decay_steps=50)
    assert found[49] > 0.1
    np.testing.assert_allclose(found[50:], 0.1, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weight_decay_spares_norms_biases_and_positions(family):
    config, _ = resolved(small(family, optimizer={"weight_decay": 0.5, "lr": 1.0}))
    params = jax.tree.map(jnp.ones_like, decoder.init(config.model, 0))
    optimizer = optim.build(config, decoder.is_decayed)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    spared = set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        if not np.any(update):
            spared.add(path[-1].key)
        else:
            np.testing.assert_allclose(update, -0.5)
    biases = {
        "bias_D",
        "bias_q_NH",
        "bias_k_KH",
        "bias_v_KH",
        "bias_out_D",
        "bias_up_F",
        "bias_down_D",
        "positions_TD",
    }
    assert spared == ({"gain_D"} if family == "llama" else {"gain_D"} | biases)


def test_a_dynamic_loss_scale_halves_on_overflow_and_doubles_after_many_clean_steps(monkeypatch):
    monkeypatch.setattr(optim, "GROW_AFTER", 3)
    config = configs.Precision(loss_scale="dynamic")
    scale, seen = optim.loss_scale(config), []
    for finite in (True, False, True, True, True, True, True, False):
        scale = optim.adjust(scale, jnp.asarray(finite), config)
        seen.append(float(scale.value) / optim.FIRST_SCALE)
    assert seen == [1, 1 / 2, 1 / 2, 1 / 2, 1, 1, 1, 1 / 2]
    fixed = configs.Precision(loss_scale=128.0)
    assert float(optim.adjust(optim.loss_scale(fixed), jnp.asarray(False), fixed).value) == 128
    assert optim.loss_scale(configs.Precision()) is None
