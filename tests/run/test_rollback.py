"""Loss spikes: which step is one, and a run that goes back from it equals one that never saw these batches."""

import math
import random

import jax.numpy as jnp
import pytest
from command import config_file, main, same, saved_state
from conftest import cover, records, without_times
from launching import finished, launched

from nanotrain_jax.config.run_sections import Rollback
from nanotrain_jax.data import batches as data
from nanotrain_jax.distributed.exit_codes import ENDED
from nanotrain_jax.run import goodput
from nanotrain_jax.run.loop import Loop
from nanotrain_jax.run.rollback import Losses

__all__ = ["config_file"]  # a fixture
KEYS = (
    "train.rollback={window: 8, deviations: 3}",
    "train.eval_every=0",
    "checkpoint.every=5",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.lr=1.0e-2",
)
TWO = "parallel.data=2", "parallel.microbatches=2"
# Keys, the step with the poisoned batch, the checkpoint before it, sequences of a batch.
CASES = {
    "data": ([], 13, 10, 8),
    "zero 3": (["parallel.zero=3", "parallel.persist_below=0"], 13, 10, 8),
    "pipe": (["parallel.pipe=2", "parallel.data=2", "model.num_layers=4", "parallel.microbatches=2"], 13, 10, 8),
    "nvme": (["memory.offload_optimizer=nvme", "memory.nvme_dir={run}_nvme", "parallel.persist_below=64"], 13, 10, 8),
    "phases": (["train.batch_schedule=[{steps: 10, batch_size: 4}, {steps: 5, batch_size: 4}]", *TWO], 13, 10, 4),
    "stages": (["train.stages=[{name: a, steps: 8}, {name: b, steps: 12}]", "checkpoint.every=50"], 18, 8, 8),
}


def losses_of(*seen, **keys):
    losses = Losses(Rollback(**{"window": 8, "not_finite": 2} | keys))
    for number, loss in enumerate(seen, 1):
        losses.see(number, loss)
    return losses


def test_a_spike_is_above_the_deviations_of_a_full_window():
    rng = random.Random(0)
    steady = [3.0 + rng.gauss(0, 0.1) for _ in range(200)]
    assert losses_of(*steady).spike is None
    mean, deviation = sum(steady[-8:]) / 8, (sum((x - sum(steady[-8:]) / 8) ** 2 for x in steady[-8:]) / 8) ** 0.5
    assert losses_of(*steady, mean + 5.9 * deviation).spike is None
    assert losses_of(*steady, mean + 6.1 * deviation).spike.step == 201
    assert losses_of(*steady[:7], 1e9).spike is None  # too few before it
    assert losses_of(*steady, 0.0).spike is None
    found = losses_of(*steady, 4.5, 5.0).spike
    assert found.step == 201
    assert found.text.startswith("loss 4.5 is above ")


def test_losses_that_are_not_finite_are_a_spike_only_in_a_row():
    assert losses_of(math.nan, 3.0, math.inf, 3.0).spike is None
    assert losses_of(3.0, math.nan, math.inf).spike.step == 3
    assert losses_of(*[3.0] * 8, math.nan).newest.count(3.0) == 8
    assert Losses(None).see(1, math.nan) is None


def run(config_file, folder, *overrides, code=0):
    assert main(config_file, f"logging.dir={folder}", *KEYS, *overrides) == code


def poisoned(monkeypatch, *sequences):
    """Poison the batches that begin with some sequences: their targets are one token."""
    plain = data.batches

    def batches(source, shapes, seed, position, order):
        for batch in plain(source, shapes, seed, position, order):
            is_bad, position = position in sequences, position + shapes["inputs"].shape[0]
            yield batch | {"targets": jnp.full_like(batch["targets"], 1)} if is_bad else batch

    monkeypatch.setattr(data, "batches", batches)


def without(monkeypatch, first, count):
    """Leave some sequences of the data out."""
    plain = data.batches

    def batches(source, shapes, seed, position, order):
        return plain(source, shapes, seed, position + count * (position >= first), order)

    monkeypatch.setattr(data, "batches", batches)


@pytest.mark.parametrize("case", cover(["data"], [name for name in CASES if name != "data"]))
def test_after_a_poisoned_batch_a_run_equals_one_that_never_saw_it(case, config_file, tmp_path, monkeypatch, capsys):
    layout, step, back, size = CASES[case]
    run_keys, other_keys = ([key.replace("{run}", f"{tmp_path / name}") for key in layout] for name in ("run", "other"))
    with monkeypatch.context() as patch:
        poisoned(patch, (step - 1) * size)
        run(config_file, tmp_path / "run", *run_keys)
    out = capsys.readouterr().out
    assert f"rollback 1 of at most 3: at step {step} the loss " in out
    assert f"back to step {back}, and past the batches of steps {back + 1} to {step}: on with sequence " in out
    assert f" on with sequence {step * size} of the data" in out
    assert "  rollbacks         1 (loss spikes)" in out
    run(config_file, tmp_path / "other", *other_keys, f"train.steps={back}", "optimizer.decay_steps=20")
    with monkeypatch.context() as patch:
        without(patch, back * size, (step - back) * size)
        run(config_file, tmp_path / "other", *other_keys)
    ours, theirs = saved_state(tmp_path / "run"), saved_state(tmp_path / "other")
    assert ours[0] == 20
    same(ours, theirs)
    logged, expected = (without_times(records(tmp_path / name)[back - 20 :]) for name in ("run", "other"))
    assert [record.pop("rollbacks") for record in logged] == [1] * (20 - back)
    assert logged == expected
    line = goodput.read(tmp_path / "run")[-1]
    assert (line.undone, line.skipped) == (step - back + (case != "nvme"), 0)  # the next step was on its way
    assert 0 < goodput.by_cause([line])["skipped steps"] < sum(goodput.by_cause([line]).values())
    assert out.count("compiling the step") == {"phases": 4, "stages": 3}.get(case, 1)


@pytest.mark.long
def test_a_resumed_run_finds_the_same_spike_and_goes_back_behind_a_damaged_checkpoint(
    config_file, tmp_path, monkeypatch, capsys
):
    poisoned(monkeypatch, 12 * 8)
    run(config_file, tmp_path / "run")
    run(config_file, tmp_path / "again", "train.steps=9")
    run(config_file, tmp_path / "again", "train.steps=12")  # also saves here
    (tmp_path / "again" / "checkpoints" / "12" / "meta" / "metadata").write_text("{")
    run(config_file, tmp_path / "again")
    assert saved_state(tmp_path / "run")[0] == 20
    assert "back to step 10, " in capsys.readouterr().out
    same(saved_state(tmp_path / "run"), saved_state(tmp_path / "again"))


def test_a_run_that_is_killed_after_a_rollback_does_not_read_the_batches_either(
    config_file, tmp_path, monkeypatch, capsys
):
    poisoned(monkeypatch, 12 * 8)
    plain = Loop.again

    def killed(self, run):
        if hasattr(self, "run"):
            raise KeyboardInterrupt
        plain(self, run)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Loop, "again", killed)
        main(config_file, f"logging.dir={tmp_path}/run", *KEYS)
    assert "rollback 1 of at most 3" in capsys.readouterr().out
    run(config_file, tmp_path / "run")
    out = capsys.readouterr().out
    assert "past the batches that rollback 1 skipped: on with sequence 104 of the data" in out
    assert "rollback 1 of" not in out and "  rollbacks         1 (loss spikes)" in out
    run(config_file, tmp_path / "whole")
    same(saved_state(tmp_path / "run"), saved_state(tmp_path / "whole"))
    kept = tmp_path / "run" / "checkpoints" / "rollback.txt"
    kept.write_bytes(kept.read_bytes().replace(b"104", b"105"))
    run(config_file, tmp_path / "run", code=2)
    assert "rollback.txt is damaged: it says which batches" in capsys.readouterr().err


def test_a_run_with_more_spikes_than_rollbacks_stops(config_file, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, 12 * 8, 14 * 8)
    keys = "train.rollback={window: 8, deviations: 3, most: 1}", "checkpoint.resume=never"
    run(config_file, tmp_path / "run", *keys, code=ENDED)
    out, err = capsys.readouterr()
    assert "rollback 1 of at most 1: at step 13 the loss " in out
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: diverged: at step 12 the loss ")
    assert "after 1 rollbacks; the newest checkpoint is of step 10; lower optimizer.lr=0.01, or raise" in line
    assert records(tmp_path / "run")[-1]["rollbacks"] == 1


@pytest.mark.long
def test_processes_go_back_together(config_file, tmp_path, monkeypatch):
    """Losses that hardly fall, and almost no deviation allowed: each process decides alone, and all alike."""
    keys = (
        *KEYS,
        "parallel.data=8",
        "train.rollback={window: 8, deviations: 0.8, most: 30}",
        "optimizer.lr=1.0e-6",
        "optimizer.min_lr=1.0e-6",
    )
    out, _ = finished(launched(2, config_file, *keys, f"logging.dir={tmp_path}/two"))
    assert main(config_file, *keys, f"logging.dir={tmp_path}/one") == 0
    assert "rollback 1 of at most 30" in out
    one, two = (records(tmp_path / name)[-1] for name in ("one", "two"))
    assert one["rollbacks"] == two["rollbacks"] > 0
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
