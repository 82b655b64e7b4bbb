"""Checkpoints of replicas that step apart: resumed bitwise, and with another number of replicas, or none."""

import jax
import numpy as np
import pytest
from command import config_file, losses, main, same, saved_state
from conftest import LOSS, STATE, cover, on_devices, random_tokens, records, resolved, small
from jax.sharding import PartitionSpec

import nanotrain_jax
from nanotrain_jax.checkpoint import conversions, read, write
from nanotrain_jax.config import schema as configs
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step import build as steps

__all__ = ["config_file"]  # a fixture
APART = "parallel.data=2", "parallel.replica=2", "parallel.sync_every=4", "parallel.persist_below=64"
close = np.testing.assert_allclose


@pytest.mark.long
def test_a_resume_between_two_synchronizations_is_bitwise(config_file, tmp_path, capsys):
    apart = config_file, *APART, "parallel.zero=1", "train.eval_every=6"
    assert main(*apart, f"logging.dir={tmp_path}/whole", "train.steps=12") == 0
    assert main(*apart, f"logging.dir={tmp_path}/parts", "train.steps=6") == 0
    assert main(*apart, f"logging.dir={tmp_path}/parts", "train.steps=12") == 0
    assert "resumed from step 6" in capsys.readouterr().out
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    same(saved_state(tmp_path / "whole"), saved_state(tmp_path / "parts"))

    # Step 12 is a synchronization, step 10 is not: `load_params` averages.
    (_, (state, _)), (params, _) = saved_state(tmp_path / "whole"), nanotrain_jax.load_params(tmp_path / "whole")
    jax.tree.map(lambda w, theta: close(w, theta, **STATE), params, state["outer"]["theta"])
    params, _ = nanotrain_jax.load_params(tmp_path / "whole", 10)
    assert all(np.ndim(w) for w in jax.tree.leaves(params))
    again = f"checkpoint.resume={tmp_path}/whole/checkpoints", f"logging.dir={tmp_path}/together"
    together = "parallel.data=4", "parallel.zero=3", "parallel.persist_below=64", "train.steps=13"
    assert main(config_file, *again, *together) == 0
    assert [r["step"] for r in records(tmp_path / "together")] == [13]


def built(parallel, **sections):
    return steps.build(*resolved(small(parallel={"persist_below": 64} | parallel, **sections)))


def trained(step, count=3):
    state = step.init()
    for tokens in random_tokens(step.plan.config, count=count):
        state, *_ = step.train(state, on_devices(tokens, step))
    return step.in_layer_order(state)


def saved(folder, state):
    with write.writing(configs.Checkpoint(dir=str(folder))) as save:
        save(1, state, {})


def restored(folder, step):
    """The state that a run resumes from, in layer order; it can take a step."""
    state = step.in_stage_order(read.read_state(folder, 1, step.saved, step.plan.is_padded))
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), state) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), step.state
    )
    ordered = jax.device_get(step.in_layer_order(state))
    (tokens,) = random_tokens(step.plan.config)
    step.train(state, on_devices(tokens, step))
    return ordered


def weights(state):
    """The float32 weights of a state, moments and counts."""
    return state.params if state.opt.master is None else state.opt.master, state.opt.moments, state.skipped


def own(tree, replica):
    """The arrays of one replica."""
    return jax.tree.map(lambda x: x[..., replica], tree)


APART_2 = {"replica": 2, "data": 2, "zero": 2, "sync_every": 5}


@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize("compute", cover([], ["bfloat16", "float32"]))
def test_other_replicas_start_from_the_mean_of_the_saved_ones(compute, tmp_path):
    state = trained(built(APART_2, precision={"compute": compute}))
    saved(tmp_path, state)
    state = jax.device_get(state)
    four = restored(tmp_path, built(APART_2 | {"replica": 4, "zero": 3}, precision={"compute": compute}))
    one = restored(tmp_path, built({"data": 4, "zero": 1}, precision={"compute": compute}))

    def is_mean(old, *new):  # of step counts and skipped steps the smallest
        mean = old.mean(-1) if old.dtype == np.float32 else old.min(-1)
        for x in new:
            close(x, mean, **STATE)

    for i in range(4):
        jax.tree.map(is_mean, weights(state), own(weights(four), i), weights(one))
    for found in (four, one):  # 16-bit weights are those of the master weights
        jax.tree.map(lambda w, m: np.testing.assert_array_equal(w, m.astype(w.dtype)), found.params, weights(found)[0])
    same(four.outer, state.outer)
    assert one.outer is None
    assert int(four.step) == int(one.step) == 3


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("stored", cover([], [("bfloat16", 3), ("float32", 1), ("bfloat16", 1)]))
def test_replicas_start_apart_from_a_checkpoint_without(stored, tmp_path):
    compute, zero = stored
    state = trained(built({"data": 2, "replica": 2, "zero": 2}, precision={"compute": compute}))
    saved(tmp_path, state)
    state = jax.device_get(state)
    found = restored(tmp_path, built(APART_2 | {"zero": zero}, precision={"compute": compute}))
    for i in range(2):
        same(own((found.params, found.opt), i), (state.params, state.opt))
    same(found.outer.theta, weights(state)[0])
    assert not any(x.any() for x in jax.tree.leaves(found.outer.moments))


def replicated(R):
    """The wanted array of a state of R replicas, and the mesh of it."""
    mesh = meshes.make(replica=R)
    return jax.ShapeDtypeStruct((3, R), np.float32, sharding=jax.NamedSharding(mesh, PartitionSpec(None, "replica")))


def test_weights_that_were_frozen_are_read_without_replicas():
    source = conversions.source("opt/master/layers/w", replicated(2), {"params/layers/w": (3,)})
    assert (source.path, source.array.shape) == ("params/layers/w", (3,))
    assert conversions.source("opt/moments/0/mu/layers/w", replicated(2), {"params/layers/w": (3,)}) is None


@pytest.mark.parametrize("was_apart", [True, False])
def test_residuals_of_other_replicas_keep_their_mean_or_their_sum(was_apart):
    path, wanted = "feedback/residual/layers/w", replicated(4)
    have = {path: (3, 2)} | ({"outer/theta/layers/w": (3,)} if was_apart else {})
    source = conversions.source(path, wanted, have)
    assert (source.path, source.array.shape) == (path, (3, 2))
    old = np.arange(6, dtype=np.float32).reshape(3, 2)
    new = conversions.convert(path, old, wanted, source.was_apart)
    close(new, np.broadcast_to(old.sum(-1, keepdims=True) / (2 if was_apart else 4), (3, 4)))


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")
def test_replicas_start_apart_from_weights_that_were_frozen(tmp_path):
    bfloat16 = {"compute": "bfloat16"}
    state = trained(built({"data": 2}, precision=bfloat16, train={"freeze": ["/mlp/"]}))
    saved(tmp_path, state)
    frozen = jax.device_get(state).params["layers"]["mlp"]
    found = restored(tmp_path, built(APART_2, precision=bfloat16))
    same(found.outer.theta["layers"]["mlp"], jax.tree.map(lambda w: w.astype(np.float32), frozen))
    for i in range(2):
        same(own(found.opt.master, i), found.outer.theta)


@pytest.mark.long
def test_residuals_of_differences_keep_their_mean(tmp_path):
    apart = {"replica": 2, "data": 2, "zero": 1, "sync_every": 1, "compress": "topk:0.1"}
    step = built(apart)
    (tokens,) = random_tokens(step.plan.config)
    state, *_ = step.train(step.init(), on_devices(tokens, step))
    state = jax.device_get(step.synchronize(state))
    saved(tmp_path, state)
    found = restored(tmp_path, built(apart | {"replica": 4, "zero": 3}))

    def is_mean(old, new):
        assert np.abs(old).max() > 0
        close(new, np.broadcast_to(old.mean(-1, keepdims=True), new.shape), rtol=1e-5, atol=1e-8)

    jax.tree.map(is_mean, state.feedback.residual, found.feedback.residual)


@pytest.mark.long
def test_the_same_layout_and_stages_restore_bitwise(tmp_path):
    parallel = {"replica": 2, "pipe": 2, "data": 2, "sync_every": 5, "microbatches": 2, "zero": 3}
    step = built(parallel | {"schedule": "interleaved", "chunks": 2}, model={"num_layers": 4})
    state = trained(step)
    saved(tmp_path, state)
    same(restored(tmp_path, step), jax.device_get(state))


@pytest.mark.long
def test_losses_are_the_mean_over_replicas(config_file, tmp_path):
    one_step = "train.steps=1", "train.eval_every=0"
    assert main(config_file, *APART, *one_step, f"logging.dir={tmp_path}/apart") == 0
    assert main(config_file, "parallel.replica=2", "parallel.data=2", *one_step, f"logging.dir={tmp_path}/joint") == 0
    (apart,), (joint,) = records(tmp_path / "apart"), records(tmp_path / "joint")
    close(apart["loss"], joint["loss"], **LOSS)
    assert apart["lr"] == joint["lr"]
