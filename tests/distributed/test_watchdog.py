"""The watchdog: the report of a hang, the hang timeout, stragglers, and the exit of a process that hangs."""

import faulthandler
import re
import subprocess
import sys
import time

import pytest
from command import config_file
from conftest import cover

from nanotrain_jax.distributed import watchdog
from nanotrain_jax.distributed.watchdog import Heartbeat, Member, Watchdog

__all__ = ["config_file"]  # a fixture

MEDIANS = dict(step_seconds=1.0, data_seconds=0.01)


def heartbeat(process, step, phase, since=30.0, silent=0.1, **changes):
    return Heartbeat(process, f"node{process}", 100 + process, step, phase, since, **MEDIANS | changes, silent=silent)


def test_a_report_names_processes_without_heartbeat_then_those_behind():
    own = heartbeat(0, 18, "step", since=31)
    heartbeats = [
        own,
        heartbeat(1, 17, "step", silent=29),
        heartbeat(2, 18, "data"),
        heartbeat(3, 18, "step"),
        heartbeat(4, 18, "step"),
    ]
    lines = watchdog.report(own, 30, heartbeats, 1).splitlines()
    assert lines == [
        "error: hang timeout: no progress for 31 s (limit 30 s: runtime.hang_timeout)",
        "  process 1 on node1 (pid 101): no heartbeat for 29 s (stopped, or its host is lost), step 17, phase step",
        "  process 2 on node2 (pid 102): behind, step 18, phase data for 30 s",
        "  process 0 on node0 (pid 100): reports this, step 18, phase step for 31 s",
        "  2 other processes are not behind (lowest step of all: 17)",
        "  threads of process 0:",
    ]


def test_before_the_first_step_the_process_in_the_earliest_phase_is_behind():
    own = heartbeat(0, 10, "step")
    others = [heartbeat(1, 0, "restore"), heartbeat(2, 9, "compile"), heartbeat(3, 10, "dispatch")]
    lines = watchdog.report(own, 30, [own, *others], 1).splitlines()
    assert [line.split(",")[0].strip() for line in lines[1:4]] == [
        f"process {i} on node{i} (pid {100 + i}): behind" for i in (1, 2, 3)
    ]
    own = heartbeat(0, 9, "compile")
    lines = watchdog.report(own, 30, [own, heartbeat(1, 9, "restore"), heartbeat(2, 9, "compile")], 1).splitlines()
    assert "process 1 on node1 (pid 101): behind, step 9, phase restore for 30 s" in lines[1]
    assert "process 0 on node0 (pid 100): reports this, step 9, phase compile" in lines[2]


def test_processes_that_did_not_join_are_named_if_others_left_heartbeats(tmp_path):
    members = [Member(tmp_path / "none" / "processes", i, 4, None) for i in range(4)]
    assert watchdog.absent(members[0], 1) == ""
    members = [Member(tmp_path, i, 4, None) for i in range(4)]
    for member in members[:2]:
        Watchdog(member, 60, print, sys.stderr).check()
    faulthandler.cancel_dump_traceback_later()
    assert watchdog.absent(members[0], 1) == "no heartbeat of process 2, 3"


def test_a_report_on_a_thousand_processes_is_short():
    own = heartbeat(0, 18, "step", since=31)
    text = watchdog.report(own, 30, [own, *(heartbeat(i, 17, "data") for i in range(1, 1000))], 1)
    assert len(text.splitlines()) == watchdog.MAX_LINES + 3
    assert "and 984 more" in text


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now
    faulthandler.cancel_dump_traceback_later()


def test_the_default_hang_timeout_follows_the_median_step(tmp_path, clock):
    watch = Watchdog(Member(tmp_path, 0, 1, None), None, print, sys.stderr)
    watch.join_timeout = 1000
    assert watch.limit("join") == 1000 + watchdog.JOINED
    assert watch.limit("start") == watchdog.MIN_TIMEOUT * watchdog.START_END_FACTOR
    for step in range(1, 20):
        watch.at("data", step)
        clock[0] += 1
        watch.at("dispatch", step)
        clock[0] += 99
    assert watch.limit("dispatch") == 2000
    assert watch.heartbeat(watch.progress)[3:] == (19, "dispatch", 99.0, 100.0, 1.0, 0.0)
    watch.at("checkpoint", 19)
    assert watch.limit("checkpoint") == 2000 * watchdog.CHECKPOINT_FACTOR
    clock[0] += 1e6  # a checkpoint does not count as a step
    watch.at("data", 20)
    assert watch.limit("data") == 2000
    watch.timeout = 5
    assert watch.limit("data") == watch.limit("checkpoint") == 5


def test_a_phase_that_begins_during_a_check_has_its_own_timeout(tmp_path, clock, monkeypatch):
    watch = Watchdog(Member(tmp_path, 0, 1, None), 60, print, sys.stderr)
    monkeypatch.setattr(watch, "_end", lambda text: ended.append(text))
    ended, write = [], type(tmp_path).write_text

    def slowly(path, text):
        watch.at("data", 1)
        write(path, text)

    clock[0] = 90  # seconds of compilation, which may take 600
    monkeypatch.setattr(type(tmp_path), "write_text", slowly)
    watch.check()
    monkeypatch.setattr(type(tmp_path), "write_text", write)
    clock[0] += 61
    watch.check()
    assert len(ended) == 1
    assert "step 1, phase data for 61 s" in ended[0]


def test_a_straggler_with_slow_data_is_reported_once(tmp_path, clock):
    messages = []
    watches = [Watchdog(Member(tmp_path, i, 3, None), 60, messages.append, sys.stderr) for i in range(3)]
    for step in range(2 * watchdog.WINDOW):
        for i, watch in enumerate(watches):
            watch.at("data", step)
            clock[0] += (0.001, 0.001, 0.5)[i]
            watch.at("dispatch", step)
            clock[0] += 0.1
    for watch in reversed(watches):
        watch.check()
    watches[0].check()
    (text,) = messages
    assert text.startswith("warning: straggler: process 2 on ")
    assert "waits 500.0 ms for data in each step" in text


SCRIPT = """
import sys, time
from pathlib import Path
from nanotrain_jax.distributed.watchdog import Member, watching
with watching(Member(Path(sys.argv[1]), 0, 1, {launcher}), 2, print, sys.stderr) as watch:
    watch.at("data", 1)
    for _ in range(30):
        time.sleep(0.1)
        watch.at("evaluation", 1)
    print("no hang", flush=True)
    watch.at("checkpoint", 7)
    {hang}
"""


@pytest.mark.parametrize("hang", cover(["import re; re.match('(a+)+b', 'a' * 40)"], ["time.sleep(60)"]))
def test_a_hang_ends_the_process_with_stacks_even_if_the_gil_is_never_released(hang, tmp_path):
    command = [sys.executable, "-c", SCRIPT.format(hang=hang, launcher=None), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (watchdog.HUNG if "sleep" in hang else 1)
    assert done.stdout == "no hang\n"
    assert 'File "<string>", line 12 in <module>' in done.stderr
    if "sleep" in hang:  # else only the timer of faulthandler can act
        match = re.search(r"no progress for (\d+) s \(limit 2 s: runtime.hang_timeout\)", done.stderr)
        assert int(match[1]) >= 2  # on a busy machine the watchdog may check late
        assert "phase checkpoint" in done.stderr


def test_a_process_ends_with_its_launcher(tmp_path):
    command = [sys.executable, "-c", SCRIPT.format(hang="", launcher=1), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == watchdog.HUNG
    assert "process 0: its launcher (pid 1) exited" in done.stderr


@pytest.mark.long
def test_a_hang_while_a_checkpoint_is_read_ends_the_run_with_a_report(config_file, tmp_path):
    """The command itself, with a read that never returns."""
    keys = str(config_file), f"logging.dir={tmp_path}/run", "train.eval_every=0", "runtime.hang_timeout=1"
    script = (
        "import sys, time; from nanotrain_jax import train; from nanotrain_jax.checkpoint import starting_point; "
        "from nanotrain_jax.distributed import watchdog; watchdog.START_END_FACTOR = 30; "
        "from nanotrain_jax.run import shell; shell.begin(finishes=True); "
        "starting_point.agree = lambda config: time.sleep(600); sys.exit(train.main(['--config', *sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *keys], capture_output=True, text=True, timeout=240)
    assert done.returncode == watchdog.HUNG
    assert re.search(r"error: hang timeout: no progress for \d+ s \(limit 30 s: runtime.hang_timeout\)", done.stderr)
    assert re.search(r"process 0 on \S+ \(pid \d+\): reports this, step 0, phase restore for", done.stderr)
    assert done.stderr.count("threads of process 0:") == 1
    assert "failed to check" not in done.stderr
    assert not (tmp_path / "run").exists()
