"""The launcher: who is started, what happens when a process ends, and what is left where one is lost.

Processes are small programs here, except in test_several_processes.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from nanotrain_jax import launch
from nanotrain_jax.runtime import request

# What a process does: ignore SIGTERM if it is deaf, or else end by it; append a line to a log; then what the test says
# of (restart, rank), or else wait a second.
FAKE = """
import json, os, signal, sys, time
log, plan = {log!r}, {plan!r}
signal.signal(signal.SIGTERM, signal.SIG_IGN if plan.get("deaf") else lambda *_: sys.exit(0))
keys = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"]
me = {{key: os.environ.get(key) for key in keys}} | {{"pid": os.getpid(), "arguments": sys.argv[1:]}}
with open(log + me["RANK"], "a") as file:
    file.write(json.dumps(me) + chr(10))
with open(log + me["RANK"]) as file:
    restart = len(file.readlines()) - 1
print("hello", flush=True)
exec(plan.get((restart, int(me["RANK"])), "time.sleep(1)"))
"""
STUCK = "time.sleep(60)"
# Wait until processes have started, and send signals to them, in this order.
END_THE_OTHERS = """
for rank in {ends}:
    while not (os.path.exists(log + rank) and open(log + rank).read().endswith(chr(10))):
        time.sleep(0.05)
for rank, number in {ends}.items():
    os.kill(json.loads(open(log + rank).readline())["pid"], number)
"""
CONFIG = """
model: {vocab_size: 61}
data: {source: synthetic, batch_size: 16, seq_len: 16}
parallel: {data: -1}
runtime: {simulate: 8}
"""


class Started:
    """One launcher for each host, all on this machine."""

    def __init__(self, folder, plan, *options, hosts=1, overrides=(), env=None):
        self.folder = folder
        (folder / "fake.py").write_text(FAKE.format(log=f"{folder}/log", plan=plan))
        (folder / "x.yaml").write_text(CONFIG)
        code = f"import sys; from nanotrain_jax import launch; launch.RUN = [{str(folder / 'fake.py')!r}]; "
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = f"127.0.0.1:{free.getsockname()[1]}"
        self.launchers = [
            subprocess.Popen(
                [sys.executable, "-c", code + "sys.exit(launch.main())", *options]
                + (["--hosts", str(hosts), "--host", str(host), "--leader", place] if hosts > 1 else [])
                + ["--", "--config", str(folder / "x.yaml"), *overrides],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | (env or {}),
            )
            for host in range(hosts)
        ]

    def ended(self):
        """-> exit codes, what all have printed on stdout and stderr."""
        printed = [launcher.communicate(timeout=60) for launcher in self.launchers]
        out, err = ("".join(parts) for parts in zip(*printed, strict=True))
        return [launcher.returncode for launcher in self.launchers], out, err

    def log(self):
        """What each rank was started with, time after time."""
        return {int(f.name[3:]): [json.loads(line) for line in f.read_text().splitlines()] for f in self.logs()}

    def logs(self):
        return sorted(self.folder.glob("log*"))

    def wait(self, count):
        """Until so many processes have started."""
        until = time.monotonic() + 30
        while sum(len(starts) for starts in self.log().values()) < count:
            assert time.monotonic() < until
            time.sleep(0.05)


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_processes_are_numbered_and_what_they_print_says_who_did(tmp_path):
    codes, out, err = (run := Started(tmp_path, {}, "--processes", "4")).ended()
    assert (codes, err) == ([0], "")
    assert sorted(out.splitlines()) == [f"[{i}] hello" for i in range(4)]
    for rank, (start,) in run.log().items():
        assert (start["RANK"], start["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (start["WORLD_SIZE"], start["LOCAL_WORLD_SIZE"]) == ("4", "4")


def test_when_one_fails_all_are_ended_and_started_again(tmp_path):
    # Process 3 ends as one of JAX's does when it has lost another one.
    end = END_THE_OTHERS.format(ends={"1": int(signal.SIGKILL), "3": int(signal.SIGABRT)}) + STUCK
    plan = {(0, 0): end, (0, 1): STUCK, (0, 2): STUCK, (0, 3): STUCK, (1, 2): "sys.exit(3)"}
    run = Started(tmp_path, plan, "--processes", "4", overrides=["checkpoint.resume=never"])
    codes, _, err = run.ended()
    assert codes == [0]
    first, second = err.splitlines()
    assert first.startswith("launcher: process 1 on host 0 (pid ")
    assert first.endswith(") ended by SIGKILL; restart 1 of 3")
    assert second.endswith(") ended with exit code 3; restart 2 of 3")
    assert {len(starts) for starts in run.log().values()} == {3}
    assert all(is_gone(start["pid"]) for starts in run.log().values() for start in starts)
    # A run that was told not to go on from anything goes on from itself.
    assert run.log()[0][0]["arguments"][2:] == ["checkpoint.resume=never"]
    assert run.log()[0][1]["arguments"][2:] == ["checkpoint.resume=never", "checkpoint.resume=auto"]


def test_a_run_that_fails_too_often_ends_with_1(tmp_path):
    run = Started(
        tmp_path, dict.fromkeys([(i, 1) for i in range(9)], "sys.exit(1)"), "--max-restarts", "2", "--processes", "2"
    )
    codes, _, err = run.ended()
    assert codes == [1]
    assert "restarted 2 times, as often as --max-restarts says" in err.splitlines()[-1]
    assert len(run.log()[1]) == 3


def test_a_wrong_request_is_not_tried_again(tmp_path):
    plan = {(0, 0): END_THE_OTHERS.format(ends={"1": 0}) + "sys.exit(2)", (0, 1): "time.sleep(0.5); sys.exit(2)"}
    run = Started(tmp_path, plan, "--processes", "2")
    assert run.ended()[::2] == ([2], "")
    assert len(run.log()[1]) == 1


def test_a_halted_process_is_named_and_ended(tmp_path):
    plan = {(0, 0): END_THE_OTHERS.format(ends={"1": int(signal.SIGSTOP)}) + "sys.exit(1)", (0, 1): STUCK}
    codes, _, err = Started(tmp_path, plan, "--processes", "2").ended()
    assert codes == [0]
    assert "process 1 on host 0" in err
    assert "is halted (SIGSTOP); restart 1 of 3" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_all_processes_and_a_second_one_ends_them(number, tmp_path):
    plan = dict.fromkeys([(0, 0), (0, 1)], STUCK)
    run = Started(tmp_path, plan, "--processes", "2")
    run.wait(2)
    run.launchers[0].send_signal(number)
    assert run.ended()[::2] == ([75], "")
    (tmp_path / "deaf").mkdir()
    run = Started(tmp_path / "deaf", plan | {"deaf": True}, "--processes", "2")
    run.wait(2)
    for _ in range(2):
        time.sleep(0.5)
        run.launchers[0].send_signal(number)
    assert run.ended()[0] == [1]
    assert all(is_gone(start["pid"]) for starts in run.log().values() for start in starts)


def test_launchers_of_several_hosts_start_and_restart_together(tmp_path):
    plan = {(0, 0): STUCK, (0, 1): STUCK, (0, 2): "sys.exit(5)", (0, 3): STUCK}
    run = Started(tmp_path, plan, "--processes", "2", hosts=2)
    codes, _, err = run.ended()
    assert codes == [0, 0]
    assert err.count("\n") == 1
    assert "process 2 on host 1" in err
    for rank, starts in run.log().items():
        assert [(s["WORLD_SIZE"], s["LOCAL_RANK"], s["LOCAL_WORLD_SIZE"]) for s in starts] == [
            ("4", str(rank % 2), "2")
        ] * 2


def test_an_elastic_run_goes_on_without_the_host_that_is_gone(tmp_path):
    plan = {(0, i): STUCK for i in range(4)}
    run = Started(tmp_path, plan, "--processes", "2", "--elastic", hosts=2)
    run.wait(4)
    run.launchers[1].kill()
    codes, _, err = run.ended()
    assert codes == [0, -signal.SIGKILL]
    assert "host 1 is gone; restart 1 of 3" in err
    assert "2 processes instead of 4: runtime.simulate=4 parallel.data=4 parallel.microbatches=2" in err
    assert {rank: len(starts) for rank, starts in run.log().items()} == {0: 2, 1: 2, 2: 1, 3: 1}
    assert run.log()[1][1]["WORLD_SIZE"] == "2"


def test_an_elastic_run_loses_what_failed_first_not_what_that_took_along(tmp_path):
    # Host 0 tells of its own first, which but waited for another one.
    ends = {"1": int(signal.SIGABRT), "2": int(signal.SIGKILL), "3": int(signal.SIGABRT)}
    plan = dict.fromkeys([(0, rank) for rank in range(1, 4)], STUCK)
    plan[0, 0] = END_THE_OTHERS.format(ends=ends) + "sys.exit(3)"
    overrides = ["data.batch_size=24"]
    run = Started(tmp_path, plan, "--processes", "2", "--elastic", hosts=2, overrides=overrides)
    codes, _, err = run.ended()
    assert codes == [0, 0]
    assert "process 2 on host 1" in err
    assert "3 processes instead of 4: runtime.simulate=6 parallel.data=6 parallel.microbatches=2" in err


def test_who_ends_after_those_who_wait_for_it_is_named_all_the_same(tmp_path):
    plan = dict.fromkeys([(0, 2), (0, 3)], STUCK)
    plan[0, 0] = END_THE_OTHERS.format(ends={"1": 0}) + "os.abort()"
    plan[0, 1] = "time.sleep(1); os.kill(os.getpid(), 9)"
    run = Started(tmp_path, plan, "--processes", "4", "--elastic")
    codes, _, err = run.ended()
    assert codes == [0]
    assert "launcher: process 1 on host 0 (pid " in err.splitlines()[0]
    assert ") ended by SIGKILL; restart 1 of 3" in err.splitlines()[0]
    assert "2 processes instead of 4" in err


def test_an_elastic_run_that_hangs_or_aborts_loses_nobody_who_has_but_waited(tmp_path):
    plan = {(0, 0): "sys.exit(3)", (0, 1): "sys.exit(3)", (1, 0): "os.abort()", (1, 1): STUCK}
    codes, _, err = (run := Started(tmp_path, plan, "--processes", "2", "--elastic")).ended()
    assert codes == [0]
    assert "restart 2 of 3" in err
    assert "instead of" not in err
    assert {len(starts) for starts in run.log().values()} == {3}


def test_the_host_with_most_processes_comes_first(tmp_path):
    plan = dict.fromkeys([(0, rank) for rank in range(4)], STUCK)
    plan[0, 3] = END_THE_OTHERS.format(ends={"1": 0, "2": 0, "0": int(signal.SIGKILL)}) + STUCK
    overrides = ["data.batch_size=24"]
    run = Started(tmp_path, plan, "--processes", "2", "--elastic", hosts=2, overrides=overrides)
    codes, _, err = run.ended()
    assert codes == [0, 0]
    assert "3 processes instead of 4" in err
    assert [run.log()[rank][1]["LOCAL_WORLD_SIZE"] for rank in range(3)] == ["2", "2", "1"]


def test_a_signal_between_two_rounds_ends_the_run_with_75(tmp_path):
    run = Started(tmp_path, {(0, i): STUCK for i in range(2)}, "--join-timeout", "60", hosts=2)
    run.wait(2)
    run.launchers[1].kill()  # and host 0 waits for it
    assert "restart 1 of 3" in run.launchers[0].stderr.readline()
    run.launchers[0].send_signal(signal.SIGTERM)
    assert run.ended()[0] == [75, -signal.SIGKILL]


def test_a_host_that_cannot_reach_the_leader_says_so(tmp_path):
    run = Started(tmp_path, {}, "--join-timeout", "1", hosts=2)
    run.launchers[0].kill()
    codes, _, err = run.ended()
    assert codes == [-signal.SIGKILL, 1]
    assert "cannot reach host 0 at 127.0.0.1:" in err


def test_a_host_that_has_lost_all_its_processes_does_not_count(tmp_path):
    plan = {(0, 0): "os.kill(os.getpid(), 9)", (0, 1): STUCK}
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    overrides = ["runtime.simulate=0", "parallel.zero=3"]
    run = Started(tmp_path, plan, "--processes", "1", "--elastic", hosts=2, env=env, overrides=overrides)
    codes, _, err = run.ended()
    assert codes == [0, 0]
    assert "1 processes instead of 2: parallel.data=8 parallel.microbatches=2" in err
    assert [s["CUDA_VISIBLE_DEVICES"] for s in run.log()[0]] == [env["CUDA_VISIBLE_DEVICES"]] * 2


def test_without_elastic_a_host_that_does_not_come_back_in_time_ends_the_run(tmp_path):
    run = Started(tmp_path, {(0, i): STUCK for i in range(2)}, "--join-timeout", "3", hosts=2)
    run.wait(2)
    run.launchers[1].kill()
    codes, _, err = run.ended()
    assert codes == [1, -signal.SIGKILL]
    assert "hosts [1] did not join within 3 s" in err


def test_the_launchers_end_when_host_0_is_gone(tmp_path):
    run = Started(tmp_path, {(0, i): STUCK for i in range(2)}, hosts=2)
    run.wait(2)
    run.launchers[0].kill()
    codes, _, err = run.ended()
    assert codes == [-signal.SIGKILL, 1]
    assert "the launcher of host 0 is gone" in err
    assert is_gone(run.log()[1][0]["pid"])


def test_gpus_are_divided_and_a_lost_process_takes_its_own_along(tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    plan = {(0, 0): STUCK, (0, 1): "os.kill(os.getpid(), 11)", (0, 2): STUCK, (0, 3): STUCK}
    overrides = ["runtime.simulate=0", "parallel.tensor=2", "data.batch_size=24"]
    run = Started(tmp_path, plan, "--processes", "4", "--elastic", env=env, overrides=overrides)
    codes, _, err = run.ended()
    assert codes == [0]
    assert "ended by SIGSEGV" in err
    assert run.log()[0][0]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert run.log()[0][1]["CUDA_VISIBLE_DEVICES"] == "0,1,4,5,6,7"
    assert run.log()[0][1]["arguments"][-2:] == ["parallel.data=3", "parallel.microbatches=2"]
    (tmp_path / "one").mkdir()
    run = Started(tmp_path / "one", {}, env=env, overrides=overrides)  # one for each GPU
    assert run.ended()[0] == [0]
    assert len(run.log()) == 8


@pytest.mark.parametrize(
    ("changes", "before", "left", "devices", "expected"),
    [
        ({}, 4, 4, 1, (4, [])),
        ({}, 4, 3, 1, (2, ["parallel.data=2", "parallel.microbatches=2"])),  # 16 sequences: 3 does not divide them
        ({"data.batch_size": 24}, 4, 3, 1, (3, ["parallel.data=3", "parallel.microbatches=2"])),
        ({"parallel.microbatches": 2}, 4, 2, 2, (2, ["parallel.data=4", "parallel.microbatches=4"])),
        (
            {"parallel.pipe": 2, "parallel.microbatches": 2},
            4,
            2,
            2,
            (2, ["parallel.data=2", "parallel.microbatches=4"]),
        ),
        ({"parallel.pipe": 8}, 4, 3, 2, "3 of 4 processes are left: no data axis over their devices divides"),
        ({"parallel.tensor": 4}, 4, 3, 2, (2, ["parallel.data=1", "parallel.microbatches=2"])),
        (
            {"parallel.tensor": -1, "parallel.data": 2},
            4,
            3,
            2,
            (2, ["parallel.data=1", "parallel.microbatches=2"]),
        ),
    ],
)
def test_fewer_processes_train_the_same_batch_in_microbatches_of_the_same_size(
    changes, before, left, devices, expected, tmp_path
):
    (tmp_path / "x.yaml").write_text(CONFIG)
    overrides = ["runtime.simulate=0", *(f"{key}={value}" for key, value in changes.items())]
    config = request.load(tmp_path / "x.yaml", overrides)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            launch.restarted(config, before, left, devices)
    else:
        assert launch.restarted(config, before, left, devices) == expected


OF_RUN = ["--", "--config", "x.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0", *OF_RUN], "argument --processes: '0' is not a number of at least 1"),
        (["--processes", "99999", *OF_RUN], "--processes 99999: a host starts at most 1024; use one per GPU, or fewer"),
        ([*OF_RUN, "model.num_layer=3"], "did you mean model.num_layers"),
        (["--processes", "3", *OF_RUN], "runtime.simulate=8 devices cannot be divided among 3 processes"),
        (["--hosts", "2", *OF_RUN], "--leader and --host not set; set all of --leader, --hosts, --host, or none"),
        (["--hosts", "2", "--host", "2", "--leader", "a:1", *OF_RUN], "process 2 of 2; processes count from 0"),
        (["--hosts", "2", "--host", "1", "--leader", "node", *OF_RUN], "it is a host:port"),
        (["--processes", "2"], "the following arguments are required: --config"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "x.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    try:
        code = launch.main(arguments)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
