"""When checkpoints are saved: by steps and by minutes, alike on all processes; which are kept."""

import time

import pytest
from command import config_file, main

from nanotrain_jax.checkpoint import directory
from nanotrain_jax.config.run_sections import Checkpoint
from nanotrain_jax.run import saving
from nanotrain_jax.run.saving import Saving

__all__ = ["config_file"]  # a fixture


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def saves(schedule, clock, steps, seconds):
    """Return the steps after which a loop saves, whose steps take as long."""
    found = []
    for number in range(1, steps + 1):
        clock[0] += seconds
        if schedule.is_due(number):
            found.append(number)
            schedule.saved(number)
    return found


def test_a_save_is_due_after_steps_or_after_minutes_without_one(clock):
    assert saves(Saving(Checkpoint(every=50), 0), clock, 200, 10.0) == [50, 100, 150, 200]
    assert saves(Saving(Checkpoint(every=0, minutes=5.0), 0), clock, 100, 10.0) == [30, 60, 90]
    assert saves(Saving(Checkpoint(every=50, minutes=5.0), 0), clock, 100, 10.0) == [30, 50, 80, 100]
    assert saves(Saving(Checkpoint(every=0), 0), clock, 100, 1e6) == []


def test_processes_ask_process_0_for_the_time_a_few_times_for_each_save(clock, monkeypatch):
    told = []

    def first(text):
        told.append(text)
        return [text, text]

    monkeypatch.setattr(saving.jax, "process_count", lambda: 2)
    monkeypatch.setattr(saving, "all_gather_text", first)
    leader = saves(Saving(Checkpoint(every=0, minutes=60.0), 0), clock, 10_000, 1.0)
    assert len(leader) == 2
    assert all(3600 <= number / (i + 1) <= 3610 for i, number in enumerate(leader))
    assert len(told) < 40
    answers = iter([*told])
    monkeypatch.setattr(saving, "all_gather_text", lambda text: [next(answers), text])
    other = Saving(Checkpoint(every=0, minutes=60.0), 0)  # a process with another clock
    assert saves(other, clock, 10_000, 3.7) == leader
    assert next(answers, None) is None


@pytest.mark.long
def test_a_run_saves_by_the_clock_alone_and_keeps_every_nth_for_good(config_file, tmp_path, capsys):
    keys = "train.steps=12", "train.eval_every=0"
    by_time = "checkpoint.every=0", "checkpoint.minutes=1.0e-6", "checkpoint.keep=4"
    assert main(config_file, *keys, f"logging.dir={tmp_path}/time", *by_time) == 0
    assert directory.finished(tmp_path / "time" / "checkpoints") == [12, 11, 10, 9]
    kept = "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4"
    assert main(config_file, *keys, f"logging.dir={tmp_path}/steps", *kept, "train.steps=10") == 0
    assert directory.finished(tmp_path / "steps" / "checkpoints") == [10, 8, 4]
    assert main(config_file, *keys, f"logging.dir={tmp_path}/steps", "checkpoint.keep_every=7") == 2
    assert "checkpoint.keep_every=7 is no multiple of checkpoint.every=5: such steps" in capsys.readouterr().err
