"""What a command owes the shell, in real processes: Ctrl-C, closed outputs, signals that stop a run."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from nanotrain_jax.distributed import ranks, stop_signals

# Ctrl-C acts whatever started the tests.
SHELL = "import signal, sys, time; from nanotrain_jax.run import shell\n"
SHELL += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def started(code):
    command = [sys.executable, "-c", SHELL + textwrap.dedent(code)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("phase", ["shell.begin(); print('ready', flush=True); time.sleep(60)", "shell.begin(); MAIN"])
def test_ctrl_c_is_one_line_and_130_while_importing_and_later(phase):
    main = "sys.exit(shell.run(lambda: [print('ready', flush=True), time.sleep(60)]))"
    process = started(phase.replace("MAIN", main))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")


LINES = """
    shell.begin(FINISHES)
    def main():
        for number in range(100_000):
            print("line", number)
        print("finished", file=sys.stderr)
        return 7
    sys.exit(shell.run(main))
"""


@pytest.mark.parametrize(("finishes", "code", "err"), [("finishes=True", 7, "finished\n"), ("", 0, "")])
def test_a_pipe_without_a_reader_is_no_error(finishes, code, err):
    process = started(LINES.replace("FINISHES", finishes))
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.stderr.read() == err
    assert process.wait(30) == code


def test_closed_standard_streams_are_the_null_device(tmp_path):
    code = "shell.begin(finishes=True); print('a', flush=True); print('b', file=sys.stderr); open('file', 'w').close()"
    (tmp_path / "script.py").write_text(SHELL + code)
    done = subprocess.run(f'exec "{sys.executable}" script.py <&- >&- 2>&-', shell=True, cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("number", ranks.STOPS)
def test_each_stop_signal_is_heard_before_the_next_step(number):
    with stop_signals.until_stopped() as stopped:
        assert not stopped(0)
        os.kill(os.getpid(), number)
        assert stopped(1)


def test_a_hangup_that_is_ignored_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals.until_stopped() as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopped(0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_address_of_process_0_is_not_reached_through_a_proxy():
    env = {"no_proxy": "a.b,10.0.0.1"}
    with ranks.without_proxy("10.0.0.1:29500", env):
        pass
    assert env == {"no_proxy": "a.b,10.0.0.1", "NO_PROXY": "10.0.0.1"}
    with ranks.without_proxy("[fe80::1]:29500", env):
        pass
    assert env["NO_PROXY"] == "10.0.0.1,fe80::1"
    with ranks.without_proxy(None, env):
        pass
    assert env["no_proxy"] == "a.b,10.0.0.1,fe80::1"
