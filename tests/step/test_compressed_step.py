"""parallel.compress in the step: equal to the oracle where everything travels, the same in every layout, resumable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case
from command import config_file, main, same, saved_state
from conftest import STATE, built, cover, equals_the_oracle, on_devices, random_tokens, resolved
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax import train
from nanotrain_jax.config import load
from nanotrain_jax.step import build as steps

__all__ = ["config_file"]  # a fixture
close = np.testing.assert_allclose


def small(layout, family="llama", persist_below=100, **parallel):
    return case(layout, family, persist_below=persist_below, **parallel)


WHOLE = [  # every gradient travels whole, in another way
    small("replica 4 data 2", "gpt2", zero=1, compress="randomk:1", persist_below=30),  # biases too
    small("replica 2 data 2 tensor 2", zero=3, microbatches=2, compress="topk:1"),
    small("replica 2 data 2 pipe 2", "gpt2", zero=2, microbatches=2, compress="topk:1"),
    small("replica 2 data 2 pipe 2", zero=1, vocab_over_pipe=True, microbatches=2, compress="randomk:1"),
]
MORE = [
    small("replica 2", compress="topk:1"),
    small("replica 2 context 2 tensor 2", zero=1, compress="randomk:1"),
]


@pytest.mark.parametrize("layout", cover(WHOLE[2:3], [*WHOLE[:2], *WHOLE[3:], *MORE], str))
def test_a_ratio_of_1_equals_the_oracle(layout, expected):
    equals_the_oracle(layout.tree(), expected)
    moves_the_bytes_of_the_papers(layout.tree())


LOW_RANK = [
    small("replica 2 data 4", zero=1, compress="powersgd:2"),
    small("replica 2 data 2 tensor 2", zero=3, microbatches=2, compress="powersgd:2"),
    small("replica 2 data 2 pipe 2", zero=2, microbatches=2, compress="powersgd:2"),
]


@pytest.fixture(scope="module")
def low_rank_updates():
    """Two updates on two devices of low rank: the state to which other layouts are compared."""
    return updated(small("replica 2", compress="powersgd:2"))


def updated(layout, steps_taken=2):
    """Train the small config in a layout -> its state in layer order."""
    step = built(layout.tree())
    state = step.init()
    for tokens in random_tokens(step.plan.config, count=steps_taken):
        state, _, _ = step.train(state, on_devices(tokens, step))
    return step.in_layer_order(state)


@pytest.mark.parametrize("layout", cover([], LOW_RANK, str))
def test_low_rank_sums_are_the_same_in_every_layout(layout, low_rank_updates):
    moves_the_bytes_of_the_papers(layout.tree())
    found = updated(layout)
    residual, expected = (state.feedback.residual for state in (found, low_rank_updates))
    sums = [jax.tree.map(lambda x: x.sum(-1), tree) for tree in (residual, expected)]  # replicas have other rows
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(sums)) > 1e-3
    jax.tree.map(lambda a, b: close(a[: len(b)], b, rtol=1e-3, atol=1e-5), *sums)  # tensor pads the vocabulary
    jax.tree.map(lambda a, b: close(a[: len(b)], b, **STATE), found.params, low_rank_updates.params)


@pytest.mark.long
def test_low_rank_sums_start_from_the_same_bases_whatever_the_order_of_layers():
    bases = []
    for layout in (
        small("replica 2 data 2", model={"num_layers": 4}, compress="powersgd:2"),
        small(
            "replica 2 pipe 2",
            model={"num_layers": 4},
            microbatches=2,
            schedule="interleaved",
            chunks=2,
            compress="powersgd:2",
        ),
    ):
        step = steps.build(*resolved(layout.tree()))
        bases.append(jax.device_get(step.in_layer_order(step.init())).feedback.basis)
    same(*bases)


FEW = [
    small("replica 2 data 2 tensor 2", zero=3, microbatches=2, compress="topk:0.05"),
    small("replica 4 data 2", "gpt2", zero=1, compress="int8"),
    small("replica 2 data 2 pipe 2", zero=0, microbatches=2, compress="float8"),
]


@pytest.mark.parametrize("layout", cover([], FEW[1:], str))
def test_a_step_moves_the_bytes_of_the_closed_form(layout):
    moves_the_bytes_of_the_papers(layout.tree())


@pytest.mark.parametrize("layout", cover([], [FEW[0], small("replica 2 data 2", zero=1, compress="powersgd:1")], str))
def test_a_step_moves_its_bytes_and_one_not_finite_on_one_replica_keeps_weights_and_feedback(layout):
    moves_the_bytes_of_the_papers(layout.tree())
    step = built(layout.tree())
    config = step.plan.config
    # One embedding row is not finite; only one row of the batch, on one device of the first replica, uses it.
    good, bad = (np.where(tokens == 60, 0, tokens) for tokens in random_tokens(config, count=2))
    bad[5, 3] = 60
    state = step.init()
    embedding = state.params["ends"]["embedding_VD"]
    state.params["ends"]["embedding_VD"] = jax.device_put(embedding.at[60].set(jnp.nan), embedding.sharding)
    state, metrics, _ = step.train(state, on_devices(good, step))
    assert np.isfinite(metrics["grad_norm"])
    before = jax.device_get(state)
    after, metrics, _ = step.train(state, on_devices(bad, step))
    assert not np.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before.feedback, jax.device_get(after.feedback))
    jax.tree.map(np.testing.assert_array_equal, before.params, jax.device_get(after.params))


COMPRESSED = "parallel.data=2", "parallel.replica=2", "parallel.persist_below=64", "train.eval_every=0"


@pytest.mark.parametrize("compress", cover([], ["powersgd:2", "topk:0.05", "randomk:0.1"]))
def test_a_run_resumes_with_its_residuals_bitwise(compress, config_file, tmp_path):
    run = config_file, *COMPRESSED, f"parallel.compress={compress}", "parallel.zero=1"
    assert main(*run, f"logging.dir={tmp_path}/whole", "train.steps=5") == 0
    for last in (3, 5):
        assert main(*run, f"logging.dir={tmp_path}/resumed", f"train.steps={last}") == 0
    states = [saved_state(tmp_path / name)[1] for name in ("whole", "resumed")]
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(states[0][0]["feedback"]["residual"]))
    same(*states)


@pytest.mark.long
def test_residuals_move_to_another_mesh(config_file, tmp_path, capsys):
    """Their sum stays; without compression they are dropped, and later begin with zeros."""
    run = config_file, *COMPRESSED, f"logging.dir={tmp_path}/run"
    assert main(*run, "parallel.compress=powersgd:2", "train.steps=3") == 0
    (before, _) = saved_state(tmp_path / "run")[1]
    moved = "parallel.replica=4", "parallel.tensor=2", "parallel.data=1", "parallel.compress=topk:0.1"
    after = train.prepare(load.load(run[0], [*run[1:], *moved])).state.feedback
    pairs = zip(*map(jax.tree.leaves, (before["feedback"]["residual"], after.residual)), strict=True)
    for old, new in pairs:
        total = np.zeros(new.shape[:-1], np.float32)
        total[: len(old)] = old.sum(-1)  # tensor pads the vocabulary
        close(new, np.broadcast_to(total[..., None] / 4, new.shape), rtol=1e-5, atol=1e-8)
        assert np.abs(total).max() > 0
    apart = "parallel.compress=powersgd:2", "parallel.sync_every=2"  # differences of weights, not gradients
    feedback = train.prepare(load.load(run[0], [*run[1:], *apart])).state.feedback
    assert not any(x.any() for x in jax.tree.leaves(feedback.residual))
    assert any(x.any() for x in jax.tree.leaves(feedback.basis))
    capsys.readouterr()
    assert main(*run, "parallel.compress=none", "train.steps=4") == 0
    assert "parallel.compress powersgd:2 -> none" in capsys.readouterr().out
    assert saved_state(tmp_path / "run")[1][0]["feedback"] is None
