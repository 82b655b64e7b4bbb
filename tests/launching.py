"""Start training in several processes, with or without the launcher."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def launched(count, config_file, *overrides, options=()):
    """Start a launcher of `count` training processes."""
    command = ["-m", "nanotrain_jax.launch", "--processes", str(count), *options, "--", "--config", str(config_file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command, *overrides], cwd=ROOT, **pipes)


def finished(process, code=0):
    """Wait for a process and check its exit code; -> stdout, stderr."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out, err


def status_of(run, process, launcher, least=1):
    """Return the heartbeat of a process once it has reached step `least`."""
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
    """Start a single process without the launcher."""
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
