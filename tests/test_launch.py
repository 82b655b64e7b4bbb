"""The launcher: ranks, restarts after failures, root causes, elastic restarts, signals, exit codes.

The workers are small programs; test_several_processes.py launches training.
"""

import signal
import subprocess
import sys
import time

import pytest
from conftest import cover
from launching import CONFIG, HANG, Launched

from nanotrain_jax import launch
from nanotrain_jax.config import load

# Send signals to other workers, in this order.
SIGNAL_OTHERS = """
for rank, number in {signals}.items():
    os.kill(json.loads(open(log + rank).readline())["pid"], number)
"""


def is_dead(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_launcher_does_not_import_jax():
    code = "import sys; from nanotrain_jax import launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_workers_get_ranks_and_their_output_is_prefixed_with_the_rank(tmp_path):
    codes, out, err = (run := Launched(tmp_path, {}, "--processes", "4")).wait_for_exit()
    assert (codes, err) == ([0], "")
    assert sorted(out.splitlines()) == [f"[{i}] hello" for i in range(4)]
    for rank, (start,) in run.log().items():
        assert (start["RANK"], start["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (start["WORLD_SIZE"], start["LOCAL_WORLD_SIZE"]) == ("4", "4")


def test_a_failure_restarts_all_processes(tmp_path):
    # Process 3 aborts as JAX does after losing another process.
    kill = SIGNAL_OTHERS.format(signals={"1": int(signal.SIGKILL), "3": int(signal.SIGABRT)}) + HANG
    plan = {(0, 0): kill, (0, 1): HANG, (0, 2): HANG, (0, 3): HANG, (1, 2): "sys.exit(3)"}
    run = Launched(tmp_path, plan, "--processes", "4", overrides=["checkpoint.resume=never"])
    codes, _, err = run.wait_for_exit()
    assert codes == [0]
    first, second = err.splitlines()
    assert first.startswith("launcher: process 1 on host 0 (pid ")
    assert first.endswith(") killed by SIGKILL; restart 1 of 3")
    assert second.endswith(") exited with code 3; restart 2 of 3")
    assert {len(starts) for starts in run.log().values()} == {3}
    assert all(is_dead(start["pid"]) for starts in run.log().values() for start in starts)
    # A run with checkpoint.resume=never resumes from its own checkpoints after a restart.
    assert run.log()[0][0]["arguments"][2:] == ["checkpoint.resume=never"]
    assert run.log()[0][1]["arguments"][2:] == ["checkpoint.resume=never", "checkpoint.resume=auto"]


def test_a_run_that_exceeds_max_restarts_exits_with_1(tmp_path):
    run = Launched(
        tmp_path, dict.fromkeys([(i, 1) for i in range(9)], "sys.exit(1)"), "--max-restarts", "2", "--processes", "2"
    )
    codes, _, err = run.wait_for_exit()
    assert codes == [1]
    assert "giving up after 2 restarts (--max-restarts)" in err.splitlines()[-1]
    assert len(run.log()[1]) == 3


def test_a_wrong_request_is_not_restarted(tmp_path):
    plan = {(0, 0): "sys.exit(2)", (0, 1): "time.sleep(0.5); sys.exit(2)"}
    run = Launched(tmp_path, plan, "--processes", "2")
    assert run.wait_for_exit()[::2] == ([2], "")
    assert len(run.log()[1]) == 1


def test_a_stopped_process_is_the_root_cause(tmp_path):
    plan = {(0, 0): SIGNAL_OTHERS.format(signals={"1": int(signal.SIGSTOP)}) + "sys.exit(1)", (0, 1): HANG}
    codes, _, err = Launched(tmp_path, plan, "--processes", "2").wait_for_exit()
    assert codes == [0]
    assert "process 1 on host 0" in err
    assert "is stopped (SIGSTOP); restart 1 of 3" in err


@pytest.mark.parametrize("number", cover([signal.SIGTERM], [signal.SIGUSR1, signal.SIGHUP], str))
def test_a_signal_is_forwarded_to_all_processes_and_a_second_one_kills_them(number, tmp_path):
    plan = dict.fromkeys([(0, 0), (0, 1)], HANG)
    run = Launched(tmp_path, plan, "--processes", "2")
    run.wait_for_starts(2)
    run.launchers[0].send_signal(number)
    assert run.wait_for_exit()[::2] == ([75], "")
    (tmp_path / "second").mkdir()
    run = Launched(tmp_path / "second", plan | {"ignores_sigterm": True}, "--processes", "2")
    run.wait_for_starts(2)
    for _ in range(2):
        time.sleep(0.5)
        run.launchers[0].send_signal(number)
    assert run.wait_for_exit()[0] == [1]
    assert all(is_dead(start["pid"]) for starts in run.log().values() for start in starts)


def test_launchers_of_several_hosts_start_and_restart_together(tmp_path):
    plan = {(0, 0): HANG, (0, 1): HANG, (0, 2): "sys.exit(5)", (0, 3): HANG}
    run = Launched(tmp_path, plan, "--processes", "2", hosts=2)
    codes, _, err = run.wait_for_exit()
    assert codes == [0, 0]
    assert err.count("\n") == 1
    assert "process 2 on host 1" in err
    for rank, starts in run.log().items():
        assert [(s["WORLD_SIZE"], s["LOCAL_RANK"], s["LOCAL_WORLD_SIZE"]) for s in starts] == [
            ("4", str(rank % 2), "2")
        ] * 2


def test_an_elastic_run_continues_without_a_lost_host(tmp_path):
    plan = {(0, i): HANG for i in range(4)}
    run = Launched(tmp_path, plan, "--processes", "2", "--elastic", hosts=2)
    run.wait_for_starts(4)
    run.launchers[1].kill()
    codes, _, err = run.wait_for_exit()
    assert codes == [0, -signal.SIGKILL]
    assert "host 1 is lost; restart 1 of 3" in err
    assert "continuing with 2 of 4 processes: runtime.simulate=4 parallel.data=4 parallel.microbatches=2" in err
    assert {rank: len(starts) for rank, starts in run.log().items()} == {0: 2, 1: 2, 2: 1, 3: 1}
    assert run.log()[1][1]["WORLD_SIZE"] == "2"


def test_an_elastic_run_saves_and_grows_when_a_host_returns(tmp_path):
    plan = {(restart, rank): HANG for restart in range(2) for rank in range(4)}
    run = Launched(tmp_path, plan, "--processes", "2", "--elastic", hosts=2)
    run.wait_for_starts(4)
    run.launchers[1].kill()
    run.wait_for_starts(6)
    run.start(1)
    run.wait_for_starts(10)  # the two processes exited with 0: they saved
    run.launchers[2].send_signal(signal.SIGTERM)
    run.launchers[0].send_signal(signal.SIGTERM)
    codes, _, err = run.wait_for_exit()
    assert codes == [75, -signal.SIGKILL, 75]
    lost, fewer, joins = err.splitlines()
    assert "host 1 is lost; restart 1 of 3" in lost
    assert "continuing with 2 of 4 processes" in fewer
    assert joins == "launcher: host 1 joins: all processes save and start again"
    assert [start["WORLD_SIZE"] for start in run.log()[0]] == ["4", "2", "4"]
    assert run.log()[0][2]["arguments"][2:] == []


class FirstAlone(Launched):
    """Begins with the launcher of host 0."""

    at_first = 1


@pytest.mark.long
def test_a_run_starts_with_the_least_processes_grows_to_the_most_and_has_a_spare_host(tmp_path):
    numbers = "--min-processes", "1", "--max-processes", "2", "--join-timeout", "8"
    plan = {(0, 0): HANG, (1, 0): HANG, (0, 1): HANG}
    run = FirstAlone(tmp_path, plan, "--processes", "1", "--elastic", *numbers, hosts=3)
    run.wait_for_starts(1)
    run.start(2)
    run.wait_for_starts(3)
    run.start(1)  # a spare one
    time.sleep(3)
    assert sum(map(len, run.log().values())) == 3
    run.launchers[1].kill()
    run.wait_for_starts(5)
    run.launchers[0].send_signal(signal.SIGTERM)
    codes, _, err = run.wait_for_exit()
    assert codes == [75, -signal.SIGKILL, 75]
    started, joins, lost = err.splitlines()
    assert "starting with 1 of 2 processes: runtime.simulate=4 parallel.data=4 parallel.microbatches=2" in started
    assert "host 2 joins" in joins
    assert "host 2 is lost; restart 1 of 3" in lost
    assert [start["WORLD_SIZE"] for start in run.log()[0]] == ["1", "2", "2"]


@pytest.mark.long
def test_too_few_processes_end_an_elastic_run(tmp_path):
    plan = {(0, 0): "sys.exit(5)", (0, 1): HANG, (0, 2): HANG, (0, 3): HANG}
    run = Launched(tmp_path, plan, "--processes", "4", "--elastic", "--min-processes", "4")
    codes, _, err = run.wait_for_exit()
    assert codes == [1]
    assert "3 processes left, fewer than --min-processes=4" in err.splitlines()[-1]


@pytest.mark.long
def test_processes_that_cannot_save_yet_are_restarted_when_a_host_joins(tmp_path):
    early = "signal.signal(signal.SIGTERM, signal.SIG_DFL); " + HANG
    plan = {(0, i): HANG for i in range(4)} | {(1, 0): early, (1, 1): early}
    run = Launched(tmp_path, plan, "--processes", "2", "--elastic", "--max-restarts", "1", hosts=2)
    run.wait_for_starts(4)
    run.launchers[1].kill()
    run.wait_for_starts(6)
    time.sleep(1)
    run.start(1)
    run.wait_for_starts(10)  # which is not counted as a restart, and drops no process
    run.launchers[0].send_signal(signal.SIGTERM)
    codes, _, err = run.wait_for_exit()
    assert codes == [75, -signal.SIGKILL, 75]
    assert "killed by SIGTERM, asked to save" in err


def test_an_elastic_run_drops_only_the_root_cause(tmp_path):
    # Host 0 reports first, but its processes only waited for the root cause.
    signals = {"1": int(signal.SIGABRT), "2": int(signal.SIGKILL), "3": int(signal.SIGABRT)}
    plan = dict.fromkeys([(0, rank) for rank in range(1, 4)], HANG)
    plan[0, 0] = SIGNAL_OTHERS.format(signals=signals) + "sys.exit(3)"
    overrides = ["data.batch_size=24"]
    run = Launched(tmp_path, plan, "--processes", "2", "--elastic", hosts=2, overrides=overrides)
    codes, _, err = run.wait_for_exit()
    assert codes == [0, 0]
    assert "process 2 on host 1" in err
    assert "continuing with 3 of 4 processes: runtime.simulate=6 parallel.data=6 parallel.microbatches=2" in err


@pytest.mark.long
def test_a_root_cause_that_exits_after_the_processes_waiting_for_it_is_named(tmp_path):
    plan = dict.fromkeys([(0, 2), (0, 3)], HANG)
    plan[0, 0] = "os.abort()"
    plan[0, 1] = "time.sleep(1); os.kill(os.getpid(), 9)"
    run = Launched(tmp_path, plan, "--processes", "4", "--elastic")
    codes, _, err = run.wait_for_exit()
    assert codes == [0]
    assert "launcher: process 1 on host 0 (pid " in err.splitlines()[0]
    assert ") killed by SIGKILL; restart 1 of 3" in err.splitlines()[0]
    assert "continuing with 2 of 4 processes" in err


@pytest.mark.long
def test_an_elastic_run_drops_no_process_that_only_waited(tmp_path):
    plan = {(0, 0): "sys.exit(3)", (0, 1): "sys.exit(3)", (1, 0): "os.abort()", (1, 1): HANG}
    codes, _, err = (run := Launched(tmp_path, plan, "--processes", "2", "--elastic")).wait_for_exit()
    assert codes == [0]
    assert "restart 2 of 3" in err
    assert "continuing with" not in err
    assert {len(starts) for starts in run.log().values()} == {3}


@pytest.mark.long
def test_the_host_with_most_processes_gets_the_lowest_ranks(tmp_path):
    plan = dict.fromkeys([(0, rank) for rank in range(4)], HANG)
    plan[0, 3] = SIGNAL_OTHERS.format(signals={"0": int(signal.SIGKILL)}) + HANG
    overrides = ["data.batch_size=24"]
    run = Launched(tmp_path, plan, "--processes", "2", "--elastic", hosts=2, overrides=overrides)
    codes, _, err = run.wait_for_exit()
    assert codes == [0, 0]
    assert "continuing with 3 of 4 processes" in err
    assert [run.log()[rank][1]["LOCAL_WORLD_SIZE"] for rank in range(3)] == ["2", "2", "1"]


def test_a_signal_between_two_rounds_exits_with_75(tmp_path):
    run = Launched(tmp_path, {(0, i): HANG for i in range(2)}, "--join-timeout", "60", hosts=2)
    run.wait_for_starts(2)
    run.launchers[1].kill()  # host 0 waits for it
    assert "restart 1 of 3" in run.launchers[0].stderr.readline()
    run.launchers[0].send_signal(signal.SIGTERM)
    assert run.wait_for_exit()[0] == [75, -signal.SIGKILL]


def test_a_host_that_cannot_reach_the_coordinator_says_so(tmp_path):
    run = Launched(tmp_path, {}, "--join-timeout", "1", hosts=2)
    run.launchers[0].kill()
    codes, _, err = run.wait_for_exit()
    assert codes == [-signal.SIGKILL, 1]
    assert "cannot reach host 0 at 127.0.0.1:" in err


@pytest.mark.long
def test_a_host_without_processes_is_left_out(tmp_path):
    plan = {(0, 0): "os.kill(os.getpid(), 9)", (0, 1): HANG}
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    overrides = ["runtime.simulate=0", "parallel.zero=3"]
    run = Launched(tmp_path, plan, "--processes", "1", "--elastic", hosts=2, env=env, overrides=overrides)
    codes, _, err = run.wait_for_exit()
    assert codes == [0, 0]
    assert "continuing with 1 of 2 processes: parallel.data=8 parallel.microbatches=2" in err
    assert [s["CUDA_VISIBLE_DEVICES"] for s in run.log()[0]] == [env["CUDA_VISIBLE_DEVICES"]] * 2


@pytest.mark.long
def test_without_elastic_a_host_that_does_not_rejoin_in_time_ends_the_run(tmp_path):
    run = Launched(tmp_path, {(0, i): HANG for i in range(2)}, "--join-timeout", "3", hosts=2)
    run.wait_for_starts(2)
    run.launchers[1].kill()
    codes, _, err = run.wait_for_exit()
    assert codes == [1, -signal.SIGKILL]
    assert "hosts [1] did not join within 3 s" in err


def test_all_launchers_exit_when_host_0_is_lost(tmp_path):
    run = Launched(tmp_path, {(0, i): HANG for i in range(2)}, hosts=2)
    run.wait_for_starts(2)
    run.launchers[0].kill()
    codes, _, err = run.wait_for_exit()
    assert codes == [-signal.SIGKILL, 1]
    assert "lost the connection to the launcher of host 0" in err
    assert is_dead(run.log()[1][0]["pid"])


def test_gpus_are_divided_and_those_of_a_failed_process_are_left_out(tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    plan = {(0, 0): HANG, (0, 1): "os.kill(os.getpid(), 11)", (0, 2): HANG, (0, 3): HANG}
    overrides = ["runtime.simulate=0", "parallel.tensor=2", "data.batch_size=24"]
    run = Launched(tmp_path, plan, "--processes", "4", "--elastic", env=env, overrides=overrides)
    codes, _, err = run.wait_for_exit()
    assert codes == [0]
    assert "killed by SIGSEGV" in err
    assert run.log()[0][0]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert run.log()[0][1]["CUDA_VISIBLE_DEVICES"] == "0,1,4,5,6,7"
    assert run.log()[0][1]["arguments"][-2:] == ["parallel.data=3", "parallel.microbatches=2"]
    (tmp_path / "one").mkdir()
    run = Launched(tmp_path / "one", {}, env=env, overrides=overrides)  # one process per GPU
    assert run.wait_for_exit()[0] == [0]
    assert len(run.log()) == 8


@pytest.mark.parametrize(
    ("changes", "initial", "available", "devices", "expected"),
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
        ({"parallel.pipe": 8}, 4, 3, 2, "3 of 4 processes remain: no parallel.data on their devices divides"),
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
def test_fewer_processes_keep_the_batch_and_the_microbatch_size(
    changes, initial, available, devices, expected, tmp_path
):
    (tmp_path / "x.yaml").write_text(CONFIG)
    overrides = ["runtime.simulate=0", *(f"{key}={value}" for key, value in changes.items())]
    config = load.load(tmp_path / "x.yaml", overrides)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            launch.restarted(config, initial, available, devices)
    else:
        assert launch.restarted(config, initial, available, devices) == expected


RUN_OPTIONS = ["--", "--config", "x.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0", *RUN_OPTIONS], "argument --processes: '0' must be a number from 1"),
        (["--processes", "99999", *RUN_OPTIONS], "--processes=99999: must be at most 1024; use one per GPU"),
        ([*RUN_OPTIONS, "model.num_layer=3"], "did you mean model.num_layers"),
        (["--processes", "3", *RUN_OPTIONS], "runtime.simulate=8 is not divisible by 3 processes; use a multiple"),
        (["--hosts", "2", *RUN_OPTIONS], "--leader and --host not set; set all of --leader, --hosts, --host, or none"),
        (["--min-processes", "2", *RUN_OPTIONS], "--min-processes=2 without --elastic"),
        (["--elastic", "--min-processes", "2", "--max-processes", "1", *RUN_OPTIONS], "is above --max-processes=1"),
        (["--elastic", "--max-processes", "9", *RUN_OPTIONS], "1 hosts have 1 processes; use at most that many"),
        (
            ["--elastic", "--min-processes", "1", *RUN_OPTIONS, "checkpoint.resume=never"],
            "use checkpoint.resume=auto",
        ),
        (["--hosts", "2", "--host", "2", "--leader", "a:1", *RUN_OPTIONS], "process index=2: must be in [0, 2)"),
        (["--hosts", "2", "--host", "1", "--leader", "node", *RUN_OPTIONS], "must be host:port"),
        (
            ["--token-file", "none", *RUN_OPTIONS],
            "--token-file='none' cannot be read (No such file or directory); give",
        ),
        (["--processes", "2"], "the following arguments are required: --config"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys, monkeypatch):
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
