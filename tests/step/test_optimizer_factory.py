"""optimizer.factory: any element-wise optax optimizer, equal to itself on one device in every layout."""

from functools import partial

import jax
import numpy as np
import optax
import oracle
import pytest
from cases import case
from command import config_file, main
from conftest import LOSS, STATE, cover, on_devices, padded, random_tokens, records, resolved

from nanotrain_jax import plan
from nanotrain_jax.models import decoder
from nanotrain_jax.step import build as steps

__all__ = ["config_file"]  # a fixture


def adan(config, schedule, is_decayed):
    """Four arrays of state per weight."""
    return optax.adan(schedule, eps=1e-4, weight_decay=config.optimizer.weight_decay, mask=is_decayed)


def lion(config, schedule, is_decayed):
    return optax.lion(schedule, *config.optimizer.betas, weight_decay=config.optimizer.weight_decay, mask=is_decayed)


def plain_sgd(config, schedule, is_decayed):
    """State without a count."""
    return optax.sgd(config.optimizer.lr, momentum=0.9)


def factored(config, schedule, is_decayed):
    return optax.adafactor(schedule, min_dim_size_to_factor=8)


def nothing(config, schedule, is_decayed):
    return None


@pytest.fixture(scope="module")
def by_adan():
    """The weights and losses of 3 updates of optax.adan in plain JAX on one device."""
    config, _ = resolved(case("data 1").tree())
    params = decoder.init(config.model, config.train.seed)
    mask = partial(jax.tree_util.tree_map_with_path, lambda path, _: oracle.decayed(path))
    optimizer, losses = adan(config, lambda _: 1e-2, mask), []
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, tokens):
        loss, grads = jax.value_and_grad(oracle.loss)(params, tokens)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for tokens in random_tokens(config, count=3):
        params, state, loss = update(params, state, tokens)
        losses.append(loss)
    return params, losses


HOST = {"memory": {"offload_optimizer": "host", "remat": "full"}}
CASES = [(case("data 2 tensor 2", zero=1), {}), (case("data 2", zero=3), HOST)]
MORE = [(case("data 1"), {}), (case("pipe 2 data 2", zero=3, microbatches=2), {}), (case("data 4", zero=2), {})]


@pytest.mark.parametrize(
    "layout_and_memory", cover([], CASES + MORE, lambda case: f"{case[0]} {' '.join(case[1])}".strip())
)
def test_an_optax_optimizer_is_the_same_in_every_layout(layout_and_memory, by_adan):
    layout, memory = layout_and_memory
    tree = layout.tree(parallel={"persist_below": 64}) | memory
    config, mesh = resolved(tree | {"optimizer": tree["optimizer"] | {"factory": "test_optimizer_factory:adan"}})
    step = steps.build(config, mesh)
    expected, losses = by_adan
    state = step.init()
    for tokens, loss in zip(random_tokens(config, count=3), losses, strict=True):
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        np.testing.assert_allclose(metrics["loss"], loss, **LOSS)
    found = step.in_layer_order(state).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), found, padded(expected, found))


@pytest.mark.long
@pytest.mark.parametrize("factory", cover(["plain_sgd"], ["lion"]))
def test_a_run_resumes_and_its_learning_rate_follows_the_schedule(factory, config_file, tmp_path):
    name, logs = f"optimizer.factory=test_optimizer_factory:{factory}", f"logging.dir={tmp_path}/run"
    for last in 2, 4:
        assert main(config_file, name, logs, "parallel.zero=1", "train.eval_every=0", f"train.steps={last}") == 0
    rates = [record["lr"] for record in records(tmp_path / "run")]
    np.testing.assert_allclose(rates[:3], [1e-3 / 3, 2e-3 / 3, 1e-3], rtol=1e-6)  # warm-up
    assert rates[3] < rates[2]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("factored", "is not element-wise: its state has an array (32,) beside a parameter of (257, 32)"),
        ("nothing", "returned NoneType; return an optax.GradientTransformation"),
        ("absent", "test_optimizer_factory has no absent; use one of its functions"),
    ],
)
def test_an_invalid_factory_raises_in_one_line(factory, message, config_file, capsys):
    assert main(config_file, f"optimizer.factory=test_optimizer_factory:{factory}") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_planner_does_not_know_its_state(config_file, capsys):
    assert plan.main(["--config", str(config_file), "optimizer.factory=test_optimizer_factory:lion"]) == 2
    assert "plan with optimizer.factory=null" in capsys.readouterr().err
