"""Local steps (DiLoCo): equal to independent runs joined by an outer optimizer, nothing on replica between joins."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import case
from conftest import (
    LOSS,
    STATE,
    built,
    compiled_text,
    cover,
    on_devices,
    padded,
    random_tokens,
    resolved,
)
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.audit import wire
from nanotrain_jax.costs import communication, memory
from nanotrain_jax.models import decoder
from nanotrain_jax.step import build as steps

OUTER_LR, MOMENTUM = 0.6, 0.8  # no defaults


EXPERTS = {"num": 8, "top_k": 3, "d_ff": 64, "shared": 1, "router": "sigmoid", "capacity": 8.0}
BALANCED = {"experts": EXPERTS | {"balance_weight": oracle.BALANCE, "z_loss": oracle.Z}}


def split(layout, every=2, family="llama", model=None, **parallel):
    return case(layout, family, model=model, sync_every=every, **parallel)


def tree(case, **sections):
    """A float32 run with this layout, of R replicas; every parameter of some size is sharded by ZeRO."""
    outer = {"outer_lr": OUTER_LR, "outer_momentum": MOMENTUM}
    plain = case.tree(parallel={"persist_below": 64})
    sections.setdefault("optimizer", {})
    sections["optimizer"] = plain["optimizer"] | outer | sections["optimizer"]
    return plain | {name: plain.get(name, {}) | values for name, values in sections.items()}


def diloco(params, rounds, outer_lr, momentum, documents):
    """DiLoCo, algorithm 1, in plain JAX: -> theta, the state (params, m, v) of each replica, the losses of each step.

    rounds: of steps, of one batch [R B T+1] each: rows of every replica.
    """
    replicas = len(rounds[0][0])
    zeros = jax.tree.map(jnp.zeros_like, params)
    theta, velocity = params, zeros
    states, losses, t = [(params, zeros, zeros)] * replicas, [], 0
    for batches in rounds:
        for batch in batches:
            t += 1
            hyper = jnp.float32(t), oracle.rates(params, 1e-2), documents
            step = [oracle.update(state, rows, *hyper) for state, rows in zip(states, batch, strict=True)]
            states = [state for state, _ in step]
            losses.append([float(values[0]) for _, values in step])
        mean = jax.tree.map(lambda *ws: sum(ws) / replicas, *[state[0] for state in states])
        delta = jax.tree.map(lambda a, b: a - b, theta, mean)
        velocity = jax.tree.map(lambda v, d: momentum * v + d, velocity, delta)
        nesterov = jax.tree.map(lambda v, d: momentum * v + d, velocity, delta)
        theta = jax.tree.map(lambda a, d: a - outer_lr * d, theta, nesterov)
        states = [(theta, m, v) for _, m, v in states]
    return theta, states, losses


def train(step, state, rounds):
    """Train whole rounds -> state, losses [R] of each step. rounds: lists of batches."""
    losses = []
    for batches in rounds:
        for tokens in batches:
            state, metrics, _ = step.train(state, on_devices(tokens, step))
            losses.append(np.asarray(metrics["loss"]))
        state = step.synchronize(state)
    return state, losses


COVER = [
    split("replica 2 data 2", family="gpt2", zero=1, microbatches=2),
    split("replica 2 data 2 context 2", every=3, zero=3),
    split("replica 2 data 2 tensor 2", zero=3),
    split("replica 2 pipe 2 data 2", zero=2, microbatches=2),
    split("replica 2 data 2 tensor 2", zero=1, compress="topk:1"),  # all entries of the differences travel
]
MORE = [
    split("replica 2 data 2", zero=0),
    split("replica 4 data 2", zero=2, microbatches=2),
    split("replica 8", family="gpt2", zero=0),
    split("replica 4 tensor 2", family="gpt2", zero=1),
    split("replica 4 data 2", zero=3, compress="randomk:1"),
    split("replica 2 data 4", zero=3, prefetch=True, microbatches=2),
    split("replica 2 pipe 2 tensor 2", zero=0, microbatches=4, schedule="zero_bubble", vocab_over_pipe=True),
    split("replica 2 pipe 2 data 2", family="gpt2", zero=3, microbatches=4, schedule="gpipe"),
    split("replica 2 data 2 expert 2", model=BALANCED, zero=1),
    split("replica 2 tensor 2", model=BALANCED, zero=0),
]


def own(tree, replica):
    """The arrays of one replica."""
    return jax.tree.map(lambda x: x[..., replica], tree)


def equals_independent_runs(tree):
    """Compare three rounds of a config (plain data) with `diloco`: losses, theta, each replica."""
    config, mesh = resolved(tree)
    R, every = config.parallel.replica, config.parallel.sync_every
    step = steps.build(config, mesh)
    tokens = random_tokens(config, count=3 * every)
    rounds = [tokens[i : i + every] for i in range(0, len(tokens), every)]
    apart = [[t.reshape(R, -1, t.shape[1]) for t in batches] for batches in rounds]
    params = decoder.init(config.model, config.train.seed)
    theta, replicas, losses = diloco(params, apart, OUTER_LR, MOMENTUM, not config.data.attend_across_documents)

    state, found = train(step, step.init(), rounds)
    np.testing.assert_allclose(found, losses, **LOSS)
    state = step.in_layer_order(state)
    chex.assert_trees_all_close(state.outer.theta, padded(theta, state.outer.theta), **STATE)
    adam = state.opt.moments[0]
    for i, expected in enumerate(replicas):
        weights_and_moments = own((state.params, adam.mu, adam.nu), i)
        chex.assert_trees_all_close(weights_and_moments, padded(expected, weights_and_moments), **STATE)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, step.state)


@pytest.mark.parametrize("case", cover([], [*COVER, *MORE], str))
def test_rounds_equal_independent_runs_and_an_outer_step(case):
    equals_independent_runs(tree(case))


@pytest.mark.long
def test_each_replica_counts_its_own_targets():
    equals_independent_runs(tree(split("replica 2 data 2", zero=1), data={"attend_across_documents": False}))


LITTLE = [split("replica 2 data 2 tensor 2", zero=1, compress=way) for way in ("int8", "powersgd:2")]


@pytest.mark.parametrize("case", cover([LITTLE[1]], [*COVER, *MORE, LITTLE[0]], str))
def test_a_step_moves_nothing_over_replica_and_a_synchronization_its_closed_form(case):
    plain = tree(case)
    step = built(plain)
    config, mesh = step.plan.config, step.plan.mesh
    for moved in wire.collectives(compiled_text(step), mesh.shape, communication.conditional_rates(config)):
        assert "replica" not in moved.axes
    moves_the_bytes_of_the_papers(plain)

    expected = {(row["axis"], row["op"]): row["bytes_per_device"] for row in communication.synchronization(config)}
    text = step.synchronize.lower(step.state).compile().as_text()
    summary = wire.summary(wire.collectives(text, mesh.shape, {}))
    found = {(row["axis"], row["op"]): row["bytes_per_device"] for row in summary}
    scalar = {key: size for key, size in found.items() if key not in expected}  # is everything finite?
    assert sum(scalar.values()) < 8
    assert {key: size for key, size in found.items() if key in expected} == pytest.approx(expected)


def test_the_state_has_the_bytes_of_the_closed_form():
    for zero, compress in ((0, "none"), (1, "topk:0.1"), (3, "powersgd:2")):
        config, mesh = resolved(tree(split("replica 2 data 4", zero=zero, compress=compress)))
        step = steps.build(config, mesh)
        sizes = [x.dtype.itemsize * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(step.state)]
        assert sum(sizes) == pytest.approx(sum(memory.state(config).values()), abs=20)  # and counters


@pytest.mark.long  # of its parts, the outer step and `average` have tests in the default run
def test_one_step_with_outer_lr_1_and_no_momentum_averages_the_weights():
    config, mesh = resolved(
        tree(split("replica 4 data 2", every=1, zero=1), optimizer={"outer_lr": 1.0, "outer_momentum": 0.0})
    )
    step = steps.build(config, mesh)
    state, _, _ = step.train(step.init(), on_devices(random_tokens(config)[0], step))
    weights = jax.device_get(state.params)
    averaged = jax.device_get(step.average(state.params))
    state = step.synchronize(state)
    for i in range(4):
        chex.assert_trees_all_close(own(state.params, i), averaged, **STATE)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x.mean(-1), weights), averaged, **STATE)


@pytest.mark.long
def test_gradients_that_are_not_finite_on_one_replica_skip_its_step_only():
    config, mesh = resolved(tree(split("replica 2 data 2", every=5, zero=2)))
    step = steps.build(config, mesh)
    good, bad = (np.where(t == 60, 0, t) for t in random_tokens(config, count=2))
    bad[5, 3] = 60  # of the first replica: its embedding is not finite

    def broken(state):
        ends = state.params["ends"]
        embedding = ends["embedding_VD"].at[60].set(jnp.nan)
        return state._replace(params=state.params | {"ends": ends | {"embedding_VD": embedding}})

    state, _, _ = step.train(broken(step.init()), on_devices(good, step))
    before = jax.device_get(state)
    state, metrics, _ = step.train(state, on_devices(bad, step))
    after, averaged = jax.device_get(state), jax.device_get(step.average(state.params))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x.mean(-1), after.params), averaged, **STATE)
    assert np.isfinite(metrics["grad_norm"]).tolist() == [False, True]
    assert (after.skipped.tolist(), int(after.step)) == ([1, 0], 2)
    first, second = ([own((state.params, state.opt), i) for state in (before, after)] for i in range(2))
    chex.assert_trees_all_equal(*first)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), second[0][0], second[1][0])
    assert all(jax.tree.leaves(moved))
