"""The command in several processes, with a launcher or one by one."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def launched(count, config_file, *overrides, options=()):
    """A launcher with so many processes, of `train`."""
    command = ["-m", "nanotrain_jax.launch", "--processes", str(count), *options, "--", "--config", str(config_file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command, *overrides], cwd=ROOT, **pipes)


def finished(process, code=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out, err


def status_of(run, process, launcher, least=1):
    """What a process says of itself, once it has come so far."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert launcher.poll() is None, launcher.communicate()
        try:
            status = json.loads((run / "processes" / f"{process}.json").read_text())
            if status["step"] >= least:
                return status
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError("no progress")


FOREVER = ["train.steps=100000", "train.eval_every=0", "checkpoint.every=100000"]


def one(config_file, env, *overrides, begin=("-m", "nanotrain_jax.train")):
    """One process by itself, without a launcher."""
    return subprocess.Popen(
        [sys.executable, *begin, "--config", str(config_file), *overrides],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
