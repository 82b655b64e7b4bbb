"""Wall time by cause: what a phase counts as, over several starts, and in a run."""

import json
import time
from itertools import pairwise

import pytest
from command import config_file, main
from conftest import records

from nanotrain_jax.distributed.phase_clock import PhaseClock
from nanotrain_jax.run import goodput
from nanotrain_jax.run.goodput import Line

__all__ = ["config_file"]  # a fixture


def line(began, after, first, last, skipped=0, /, **seconds):
    return Line(began=began, time=began + after, first=first, step=last, skipped=skipped, seconds=seconds)


def test_phases_sum_to_the_time_since_the_process_began():
    began = time.monotonic() - 5
    clock = PhaseClock(began)
    for phase in "join", "compile", "data", "step", "data", "step":
        clock.at(phase)
        time.sleep(0.01)
    earliest = time.monotonic() - began
    seconds = clock.seconds()
    assert earliest <= sum(seconds.values()) + 1e-6 <= time.monotonic() - began + 2e-6
    assert seconds["start"] >= 5
    assert seconds["data"] >= 0.02
    share = clock.share_of_steps()  # a later moment, of the same last phase
    assert seconds["step"] / sum(clock.seconds().values()) <= share < 1


def test_steps_taken_again_skipped_and_the_time_until_the_next_start_are_not_useful():
    lines = [
        line(0.0, 30.0, 0, 10, compile=20.0, dispatch=4.0, step=6.0),
        line(0.0, 40.0, 0, 20, compile=20.0, dispatch=8.0, step=12.0),  # lost after this line; step 15 was saved
        line(50.0, 35.0, 15, 30, 3, join=5.0, compile=10.0, step=15.0, evaluation=2.0, tasks=1.0, checkpoint=2.0),
    ]
    seconds = goodput.by_cause(lines)
    assert seconds == {
        "compile": 30.0,
        "useful steps": 20.0 - 5.0 + 15.0 - 3.0,
        "restart": 10.0,
        "repeated steps": 5.0,
        "joining": 5.0,
        "skipped steps": 3.0,
        "evaluation": 3.0,
        "save": 2.0,
    }
    assert sum(seconds.values()) == 85.0  # from the first start to the last line
    assert goodput.summary(lines).strip().startswith("goodput           31.8% of 85 s in useful steps; compile 35.3%")


def test_steps_that_a_rollback_undid_are_not_useful():
    undone = line(0.0, 30.0, 0, 10, 1, compile=10.0, step=15.0, restore=5.0).model_copy(update={"undone": 5})
    assert goodput.by_cause([undone]) == {"compile": 10.0, "restore": 5.0, "useful steps": 9.0, "skipped steps": 6.0}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"began": 1}', '{"began": NaN}', "\x00\xff"])
def test_lines_that_cannot_be_read_are_left_out(text, tmp_path):
    good = line(0.0, 1.0, 0, 2, step=1.0)
    (tmp_path / goodput.FILE).write_text(f"{text}\n{good.model_dump_json()}\n{text}")
    assert goodput.read(tmp_path) == [good]
    assert goodput.summary(goodput.read(tmp_path / "none")) == ""


def test_a_run_accounts_for_its_wall_time_over_its_starts(config_file, tmp_path, capsys):
    keys = config_file, f"logging.dir={tmp_path}/run", "train.eval_every=4", "checkpoint.every=4", "train.log_every=2"
    began = time.time()
    assert main(*keys, "train.steps=6") == 0
    assert main(*keys, "train.steps=10") == 0
    wall = time.time() - began
    printed = capsys.readouterr().out
    lines = goodput.read(tmp_path / "run")
    seconds = goodput.by_cause(lines)
    assert sum(seconds.values()) == pytest.approx(lines[-1].time - lines[0].began, rel=0.01)
    assert lines[0].began >= began - 0.1  # the clock of seconds may be set
    assert sum(seconds.values()) <= wall + 0.1  # what follows the last line is not in it
    assert {"useful steps", "compile", "data", "evaluation", "save", "restart", "restore"} <= seconds.keys()
    assert "repeated steps" not in seconds
    assert goodput.summary(lines) in printed
    starts = sorted({one.began for one in lines})
    assert len(starts) == 2
    assert all(before.time <= after.time for before, after in pairwise(lines))
    logged = records(tmp_path / "run")
    assert all(0 < record["goodput"] < 1 for record in logged)
    assert [record["step"] for record in logged if "save_seconds" in record] == [6, 10]
    before = (tmp_path / "run" / goodput.FILE).read_bytes()
    assert main(*keys, "train.steps=10") == 0  # nothing is left to do
    assert (tmp_path / "run" / goodput.FILE).read_bytes() == before
    assert json.loads(before.splitlines()[-1])["step"] == 10
