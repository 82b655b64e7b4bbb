"""Muon: equal to optax's on one device, in every layout; bytes, FLOPs and state are those of the closed forms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from cases import case
from conftest import LOSS, STATE, cover, on_devices, padded, random_tokens, resolved
from optax.contrib import MuonDimensionNumbers, muon

from nanotrain_jax.step import build as steps

MOMENTUM, LR = 0.9, 1e-2  # no defaults
MUON = {"name": "muon", "momentum": MOMENTUM}
AS_MATRIX = {  # stacked array -> its dims of rows, of columns
    "q_DNH": MuonDimensionNumbers((1,), (2, 3)),
    "k_DKH": MuonDimensionNumbers((1,), (2, 3)),
    "v_DKH": MuonDimensionNumbers((1,), (2, 3)),
    "out_NHD": MuonDimensionNumbers((1, 2), (3,)),
    "up_DF": MuonDimensionNumbers((1,), (2,)),
    "gate_DF": MuonDimensionNumbers((1,), (2,)),
    "down_FD": MuonDimensionNumbers((1,), (2,)),
}


def tree_of(layout, **sections):
    """A small float32 run with this layout; every parameter of some size is sharded by ZeRO."""
    tree = layout.tree(parallel={"persist_below": 64}, **sections)
    return tree | {"optimizer": tree["optimizer"] | MUON}


def as_matrices(params, frozen=()):
    """Return a tree of dimension numbers: of matrices of layers; None for other weights."""

    def of_path(path, _):
        return AS_MATRIX.get(path[-1].key)

    return jax.tree_util.tree_map_with_path(of_path, params)


def trained_by_optax(params, batches, frozen=()):
    """Return weights and losses of optax's Muon for matrices and its AdamW for the rest, in plain JAX on one device.

    `optax.contrib.muon` alone would use Adam with Nesterov momentum for the rest.
    """
    matrices = as_matrices(params)
    mask = partial(jax.tree_util.tree_map_with_path, lambda path, _: oracle.decayed(path))
    decay = {"weight_decay": oracle.DECAY}
    of_matrices = muon(
        LR, beta=MOMENTUM, weight_decay_mask=mask, consistent_rms=0.2, muon_weight_dimension_numbers=matrices, **decay
    )
    of_rest = optax.adamw(LR, oracle.B1, oracle.B2, oracle.EPS, mask=mask, **decay)

    @jax.jit
    def update(params, states, tokens):
        loss, grads = jax.value_and_grad(oracle.loss)(params, tokens)
        grads = jax.tree_util.tree_map_with_path(lambda p, g: 0 * g if oracle.is_frozen(p, frozen) else g, grads)
        with jax.numpy_dtype_promotion("standard"):
            (a, first), (b, second) = (
                optimizer.update(grads, state, params)
                for optimizer, state in zip((of_matrices, of_rest), states, strict=True)
            )

        def chosen(path, a, b):
            update = a if path[-1].key in AS_MATRIX else b
            return 0 * update if oracle.is_frozen(path, frozen) else update

        return optax.apply_updates(params, jax.tree_util.tree_map_with_path(chosen, a, b)), (first, second), loss

    states, losses = (of_matrices.init(params), of_rest.init(params)), []
    for tokens in batches:
        params, states, loss = update(params, states, tokens)
        losses.append(loss)
    return params, losses


class Expected(dict):
    """(family, layers) -> the initial weights, and those of optax after 3 updates, with losses."""

    def __missing__(self, key):
        family, layers = key
        config, mesh = resolved(tree_of(case("data 1", family, model={"num_layers": layers})))
        params = jax.device_get(steps.build(config, mesh).init().params)
        self[key] = params, trained_by_optax(params, random_tokens(config, count=3))
        return self[key]


@pytest.fixture(scope="module")
def optax_muon():
    return Expected()


def equals_optax(tree, optax_muon):
    """Compare weights and losses of 3 updates of a config with those of optax on one device."""
    config, mesh = resolved(tree)
    step = steps.build(config, mesh)
    params, (expected, losses) = optax_muon[config.model.family, config.model.num_layers]
    state = step.init()
    for tokens, loss in zip(random_tokens(config, count=3), losses, strict=True):
        state, metrics, _ = step.train(state, on_devices(tokens, step))
        np.testing.assert_allclose(metrics["loss"], loss, **LOSS)
    found = step.in_layer_order(state).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), found, padded(expected, found))


CASES = [
    case("data 1", "gpt2"),
    case("data 4", zero=3, microbatches=2),
    case("data 2 tensor 2", "gpt2", zero=1),
    case("pipe 2 data 2 replica 2", zero=2, microbatches=2),
]
MORE = [
    case("data 2", zero=0),
    case("tensor 4", "gpt2"),
]


@pytest.mark.parametrize("layout", cover(CASES, MORE, str))
def test_updates_equal_those_of_optax(layout, optax_muon):
    equals_optax(tree_of(layout), optax_muon)
