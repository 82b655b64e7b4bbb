"""The watchdog: who is named, when, and that it ends a run whose loop does not go on."""

import faulthandler
import re
import subprocess
import sys
import time

import pytest

from nanotrain_jax.runtime import watchdog
from nanotrain_jax.runtime.watchdog import Place, Status, Watch

HERE = dict(step_seconds=1.0, data_seconds=0.01)


def status(process, step, phase, since=30.0, silent=0.1, **changes):
    return Status(process, f"node{process}", 100 + process, step, phase, since, **HERE | changes, silent=silent)


def test_a_report_names_who_is_silent_and_who_is_behind_before_the_others():
    mine = status(0, 18, "step", since=31)
    others = [
        mine,
        status(1, 17, "step", silent=29),
        status(2, 18, "data"),
        status(3, 18, "step"),
        status(4, 18, "step"),
    ]
    lines = watchdog.report(mine, 30, others, 1).splitlines()
    assert lines == [
        "error: no progress for 31 s (the limit is 30: runtime.hang_timeout)",
        "  process 1 on node1 (pid 101) is silent for 29 s (stopped, or its host is gone): at step 17, phase step",
        "  process 2 on node2 (pid 102) is behind: at step 18, phase data, for 30 s",
        "  process 0 on node0 (pid 100), which tells this, is at step 18, phase step, for 31 s",
        "  2 other processes are no different (the first is at step 17)",
        "  where its threads are, of process 0:",
    ]


def test_a_report_of_a_thousand_processes_is_short():
    mine = status(0, 18, "step", since=31)
    text = watchdog.report(mine, 30, [mine, *(status(i, 17, "data") for i in range(1, 1000))], 1)
    assert len(text.splitlines()) == watchdog.LINES + 3
    assert "and 984 more" in text


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now
    faulthandler.cancel_dump_traceback_later()


def test_the_limit_follows_the_median_step_where_none_is_set(tmp_path, clock):
    watch = Watch(Place(tmp_path, 0, 1, None), None, print, sys.stderr)
    assert watch.limit("start") == watchdog.LEAST * watchdog.AROUND
    for step in range(1, 20):
        watch.at("data", step)
        clock[0] += 1
        watch.at("dispatch", step)
        clock[0] += 99
    assert watch.limit("dispatch") == 2000
    assert watch.status(watch.doing)[3:] == (19, "dispatch", 99.0, 100.0, 1.0, 0.0)
    watch.at("checkpoint", 19)
    assert watch.limit("checkpoint") == 2000 * watchdog.WRITING
    clock[0] += 1e6  # a checkpoint is no step
    watch.at("data", 20)
    assert watch.limit("data") == 2000
    watch.timeout = 5
    assert watch.limit("data") == watch.limit("checkpoint") == 5


def test_a_phase_that_ends_while_the_watchdog_looks_is_held_to_its_own_limit(tmp_path, clock, monkeypatch):
    watch = Watch(Place(tmp_path, 0, 1, None), 60, print, sys.stderr)
    monkeypatch.setattr(watch, "_end", lambda text: ended.append(text))
    ended, write = [], type(tmp_path).write_text

    def slowly(path, text):
        watch.at("data", 1)
        write(path, text)

    clock[0] = 90  # of compiling, which may take 600
    monkeypatch.setattr(type(tmp_path), "write_text", slowly)
    watch.look()
    monkeypatch.setattr(type(tmp_path), "write_text", write)
    clock[0] += 61
    watch.look()
    assert len(ended) == 1
    assert "at step 1, phase data, for 61 s" in ended[0]


def test_a_process_whose_data_are_slow_is_told_once(tmp_path, clock):
    said = []
    watches = [Watch(Place(tmp_path, i, 3, None), 60, said.append, sys.stderr) for i in range(3)]
    for step in range(2 * watchdog.WINDOW):
        for i, watch in enumerate(watches):
            watch.at("data", step)
            clock[0] += (0.001, 0.001, 0.5)[i]
            watch.at("dispatch", step)
            clock[0] += 0.1
    for watch in reversed(watches):
        watch.look()
    watches[0].look()
    (text,) = said
    assert text.startswith("warning: process 2 on ")
    assert "waits 500.0 ms for data in each step" in text


SCRIPT = """
import sys, time
from pathlib import Path
from nanotrain_jax.runtime.watchdog import Place, watching
with watching(Place(Path(sys.argv[1]), 0, 1, {launcher}), 2, print, sys.stderr) as watch:
    watch.at("data", 1)
    for _ in range(30):
        time.sleep(0.1)
        watch.at("evaluation", 1)
    print("went on", flush=True)
    watch.at("checkpoint", 7)
    {hang}
"""


@pytest.mark.parametrize("hang", ["time.sleep(60)", "import re; re.match('(a+)+b', 'a' * 40)"])
def test_a_hang_ends_the_process_with_stacks_even_if_it_never_lets_go_of_the_interpreter(hang, tmp_path):
    command = [sys.executable, "-c", SCRIPT.format(hang=hang, launcher=None), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (watchdog.HUNG if "sleep" in hang else 1)
    assert done.stdout == "went on\n"
    assert 'File "<string>", line 12 in <module>' in done.stderr
    if "sleep" in hang:  # else only the interpreter's own watchdog comes to speak
        told = re.search(r"no progress for (\d+) s \(the limit is 2: runtime.hang_timeout\)", done.stderr)
        assert int(told[1]) >= 2  # on a machine that is busy the watchdog may look late
        assert "phase checkpoint" in done.stderr


def test_a_process_ends_with_its_launcher(tmp_path):
    command = [sys.executable, "-c", SCRIPT.format(hang="", launcher=1), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == watchdog.HUNG
    assert "the launcher of process 0 (pid 1) is gone" in done.stderr
