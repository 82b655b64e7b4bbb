"""Errors of several processes and the agent of a host, without training: which exit code, who is left out, the end."""

import errno
import os
import subprocess
from types import SimpleNamespace

import jax
import pytest
from launching import HANG, Launched

from nanotrain_jax.distributed import agent, processes
from nanotrain_jax.distributed.exit_codes import ENDED, HUNG


@pytest.mark.parametrize(
    ("failures", "number"),
    [(["", f"{errno.ESTALE} stale"], errno.ESTALE), ([f"{errno.EIO} bad disk", ""], errno.EIO)],
)
def test_a_disk_that_fails_for_all_processes_blames_none(failures, number, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    monkeypatch.setattr(processes, "all_gather_text", lambda text: failures)
    with pytest.raises(OSError) as raised:
        processes.on_all_processes(lambda: None)
    assert raised.value.errno == number
    assert processes.is_transient(raised.value)  # `train` raises it again, so a launcher restarts
    assert processes.exit_code(raised.value) == HUNG
    assert processes.exit_code(OSError(number, "of one process")) == 1
    assert processes.exit_code(RuntimeError("UNAVAILABLE: a peer")) == HUNG


def test_an_elastic_run_never_leaves_out_all_its_processes(tmp_path):
    run = Launched(tmp_path, {(0, 0): "sys.exit(1)"}, "--processes", "1", "--elastic")
    codes, _, err = run.wait_for_exit()
    assert codes == [0]
    assert ") exited with code 1; restart 1 of 3" in err
    assert [start["WORLD_SIZE"] for start in run.log()[0]] == ["1", "1"]


def test_a_run_that_stopped_on_purpose_is_not_restarted(tmp_path):
    # Process 0 ends last, and process 3 aborts because it loses another one.
    plan = {(0, 0): "time.sleep(0.5); sys.exit(4)", (0, 1): "sys.exit(4)", (0, 2): HANG, (0, 3): "os.abort()"}
    run = Launched(tmp_path, plan, "--processes", "2", "--elastic", hosts=2)
    assert run.wait_for_exit()[::2] == ([ENDED, ENDED], "")
    assert {len(starts) for starts in run.log().values()} == {1}


def test_processes_that_stop_on_purpose_wait_for_each_other(monkeypatch):
    def end(code):
        raise ProcessLookupError(code)

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", end)
    for code in 0, ENDED:
        with pytest.raises(SystemExit) as ended:
            processes.exit_process(code)
        assert ended.value.code == code
    with pytest.raises(ProcessLookupError):  # the others may be lost
        processes.exit_process(1)


def test_all_processes_that_do_not_end_take_the_time_of_one(monkeypatch, capsys):
    class Stuck:
        """A process in the kernel, and a thread that reads its output; both wait by `clock`."""

        pid, clock = 1, 0.0

        def wait(self, timeout):
            Stuck.clock += timeout
            raise subprocess.TimeoutExpired("stuck", timeout)

        def join(self, timeout):
            Stuck.clock += timeout

    monkeypatch.setattr(agent.os, "killpg", lambda *_: None)
    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: Stuck.clock))
    host = agent.Agent(0, [[]] * 8, [], {}, False)
    host.workers = [agent.Worker(rank, Stuck(), []) for rank in range(8)]
    host.output_threads = [Stuck() for _ in range(16)]
    host._stop()
    assert Stuck.clock == agent.KILL_TIMEOUT + agent.GRACE
    assert capsys.readouterr().err.count("did not exit 30 s after SIGKILL") == 8
