"""Runs whose first steps sum gradients whole over replicas (parallel.full_sync_steps): equal to two runs, one of which
resumes from the other."""

import jax
import numpy as np
import pytest
from command import config_file, main, same, saved_state
from conftest import cover, records, without_times
from launching import finished, launched

import nanotrain_jax
from nanotrain_jax.config import load
from nanotrain_jax.config.training_stages import Span, of_phase, phases
from nanotrain_jax.run import banner

__all__ = ["config_file"]  # a fixture
KEYS = (
    "parallel.replica=2",
    "parallel.data=2",
    "optimizer.decay_steps=9",
    "train.eval_every=2",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "checkpoint.async=false",
)
FIRST = 3  # steps with whole sums
WAYS = {
    "apart, 16 bit": ["parallel.sync_every=2", "precision.compute=float16", "precision.loss_scale=dynamic"],
    "apart, compressed": ["parallel.sync_every=2", "parallel.compress=topk:0.1"],
    "apart, compressed, muon": ["parallel.sync_every=2", "parallel.compress=topk:0.1", "optimizer.name=muon"],
    "sparse, zero 3": ["parallel.compress=randomk:0.1", "parallel.zero=3", "parallel.persist_below=64"],
    "low rank": [
        "parallel.compress=powersgd:2",
        "parallel.data=1",
        "parallel.pipe=2",
        "parallel.schedule=interleaved",
        "parallel.chunks=2",
        "parallel.microbatches=2",
        "model.num_layers=4",
    ],
    "8 bits": ["parallel.compress=int8", "memory.offload_optimizer=host"],
}


def run(config_file, folder, *overrides):
    assert main(config_file, f"logging.dir={folder}", *KEYS, *overrides) == 0


def measured(folder):
    return without_times(records(folder))


def is_synchronization(override):
    return override.startswith(("parallel.sync_every", "parallel.compress"))


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("way", cover([], WAYS))
def test_a_run_equals_one_without_that_resumes_with_the_keys(config_file, tmp_path, capsys, way):
    keys, two, one = WAYS[way], tmp_path / "two", tmp_path / "one"
    run(config_file, two, *(key for key in keys if not is_synchronization(key)), f"train.steps={FIRST}")
    run(config_file, two, *keys, "train.steps=7")
    capsys.readouterr()
    run(config_file, one, *keys, "train.steps=7", f"parallel.full_sync_steps={FIRST}")
    printed = capsys.readouterr().out
    assert "after step 0: gradients are summed whole over replica" in printed
    assert f"after step {FIRST}: parallel.sync_every=" in printed
    assert measured(one) == measured(two)
    same(saved_state(one), saved_state(two))
    for number in FIRST, 7:  # with replicas apart only the second has several of each weight
        weights, _ = nanotrain_jax.load_params(one, step=number)
        same(weights, nanotrain_jax.load_params(two, step=number)[0])
        assert weights["ends"]["embedding_VD"].shape == (257, 32)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("way", cover([], ["apart, 16 bit", "apart, compressed", "low rank"]))
def test_a_run_resumes_bitwise_before_at_and_after_the_change(config_file, tmp_path, way):
    keys = [*WAYS[way], f"parallel.full_sync_steps={FIRST}"]
    run(config_file, tmp_path / "whole", *keys, "train.steps=6")
    for steps in 2, FIRST, 4, 6:
        run(config_file, tmp_path / "parts", *keys, f"train.steps={steps}")
    same(saved_state(tmp_path / "parts"), saved_state(tmp_path / "whole"))


@pytest.mark.long
def test_several_processes_change_as_one(config_file, tmp_path):
    keys = [*WAYS["apart, compressed"], f"parallel.full_sync_steps={FIRST}", "train.steps=7"]
    run(config_file, tmp_path / "one", *keys)
    finished(launched(2, config_file, f"logging.dir={tmp_path}/two", *KEYS, *keys, "runtime.simulate=4"))
    one, two = ([r["val_loss"] for r in records(tmp_path / name) if "val_loss" in r] for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-6)  # losses of steps are those of the replicas of process 0
    assert len(one) == 5


@pytest.mark.long
def test_the_steps_may_change_on_resume(config_file, tmp_path, capsys):
    keys = ["parallel.sync_every=2", "parallel.compress=topk:0.1"]
    run(config_file, tmp_path, *keys, "train.steps=4", "parallel.full_sync_steps=4")
    capsys.readouterr()
    run(config_file, tmp_path, *keys, "train.steps=5", "parallel.full_sync_steps=2")  # saved with whole sums
    assert "parallel.full_sync_steps 4 -> 2" in capsys.readouterr().out
    run(config_file, tmp_path, *keys, "train.steps=6", "parallel.full_sync_steps=8")  # saved by replicas apart
    assert "the run ends before parallel.compress or sync_every begins: parallel.full_sync" in capsys.readouterr().out
    found = records(tmp_path)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    assert np.isfinite([record["loss"] for record in found]).all()
    _, (state, _) = saved_state(tmp_path)
    assert state["params"]["ends"]["embedding_VD"].shape == (257, 32)


def config_of(*overrides):
    return load.parse(load.nested(overrides))


def test_phases_are_split_after_the_steps():
    parallel = "parallel={replica: 2, microbatches: 8, compress: int8, sync_every: 5, full_sync_steps: 40}"
    config, whole = config_of(parallel), Span("", 0, 100)
    first, second = Span("", 0, 40, full_sync=True), Span("", 40, 100)
    assert phases(config, whole) == [first, second]
    assert phases(config, Span("", 0, 30)) == [Span("", 0, 30, full_sync=True)]
    assert phases(config, Span("a", 10, 100)) == [Span("a", 10, 50, full_sync=True), Span("a", 50, 100)]
    plain, later = (of_phase(config, span).parallel for span in (first, second))
    assert (plain.compress, plain.sync_every, plain.full_sync_steps) == ("none", 0, 0)
    assert (later.compress, later.sync_every, later.full_sync_steps) == ("int8", 5, 0)
    growing = config_of(parallel, "train.batch_schedule=[{steps: 30, batch_size: 4}, {steps: 40, batch_size: 16}]")
    assert phases(growing, whole) == [
        Span("", 0, 30, 4, full_sync=True),
        Span("", 30, 40, 16, full_sync=True),
        Span("", 40, 70, 16),
        Span("", 70, 100),
    ]


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ([], ""),
        (["train.steps=120"], ""),
        (["train.steps=119"], "are joined: parallel.sync_every=20, full_sync_steps=100, train.steps=119"),
        (["train.steps=100"], "sync_every begins: parallel.full_sync_steps=100, steps=100"),
        (["parallel.full_sync_steps=0", "train.steps=19"], "are joined: parallel.sync_every=20, full_sync_steps=0"),
        (
            ["parallel={compress: int8, full_sync_steps: 100}", "train.stages=[{name: a, steps: 90}]"],
            "begins: parallel.full_sync_steps=100, steps=90",
        ),
    ],
)
def test_what_never_acts_is_a_warning(overrides, warning):
    config = config_of("parallel={replica: 2, sync_every: 20, full_sync_steps: 100}", "train.steps=200", *overrides)
    lines = banner.without_effect(config)
    assert len(lines) == bool(warning)
    assert warning in "".join(lines)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "parallel.full_sync_steps=3 has no effect without parallel.compress or sync_every; remove it"),
        (
            ["parallel.compress=int8", "memory.offload_optimizer=nvme", "memory.nvme_dir=x"],
            "parallel.full_sync_steps with memory.offload_optimizer=nvme: each phase would begin with new files",
        ),
    ],
)
def test_an_invalid_request_is_refused_in_one_line(config_file, capsys, overrides, message):
    assert main(config_file, *KEYS, f"parallel.full_sync_steps={FIRST}", *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
