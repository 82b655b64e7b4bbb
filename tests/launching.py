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


# A worker: ignore SIGTERM if "ignores_sigterm", or else exit on it; append a line to a log; wait for the other workers
# to do so; then run the test's code for (restart, rank), or else sleep for a second.
FAKE = """
import json, os, signal, sys, time
log, plan = {log!r}, {plan!r}
signal.signal(signal.SIGTERM, signal.SIG_IGN if plan.get("ignores_sigterm") else lambda *_: sys.exit(0))
keys = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"]
me = {{key: os.environ.get(key) for key in keys}} | {{"pid": os.getpid(), "arguments": sys.argv[1:]}}
with open(log + me["RANK"], "a") as file:
    file.write(json.dumps(me) + chr(10))
def starts(rank):
    try:
        with open(log + str(rank)) as file:
            return file.read().count(chr(10))
    except FileNotFoundError:
        return 0
restart = starts(me["RANK"]) - 1
print("hello", flush=True)
while not all(starts(rank) > restart for rank in range(int(me["WORLD_SIZE"]))):
    time.sleep(0.05)
exec(plan.get((restart, int(me["RANK"])), "time.sleep(1)"))
"""
HANG = "time.sleep(60)"
CONFIG = """
model: {vocab_size: 61}
data: {source: synthetic, batch_size: 16, seq_len: 16}
parallel: {data: -1}
runtime: {simulate: 8}
"""


class Launched:
    """One launcher per host, all on this machine; the workers are small programs."""

    at_first = 99  # hosts whose launchers start with the run

    def __init__(self, folder, plan, *options, hosts=1, overrides=(), env=None):
        self.folder = folder
        (folder / "fake.py").write_text(FAKE.format(log=f"{folder}/log", plan=plan))
        (folder / "x.yaml").write_text(CONFIG)
        code = f"import sys; from nanotrain_jax import launch; launch.RUN = [{str(folder / 'fake.py')!r}]; "
        self.port = free_port()
        place = f"127.0.0.1:{self.port}"
        self.env = os.environ | {"NANOTRAIN_TOKEN": "0123456789abcdef"} | (env or {})
        self.commands = [
            [sys.executable, "-c", code + "sys.exit(launch.main())", *options]
            + (["--hosts", str(hosts), "--host", str(host), "--leader", place] if hosts > 1 else [])
            + ["--", "--config", str(folder / "x.yaml"), *overrides]
            for host in range(hosts)
        ]
        self.launchers = []
        for host in range(min(hosts, self.at_first)):
            self.start(host)

    def start(self, host):
        """Start the launcher of a host, the first time or again."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.launchers.append(subprocess.Popen(self.commands[host], env=self.env, **pipes))

    def wait_for_exit(self):
        """-> exit codes, stdout and stderr of all launchers."""
        printed = [launcher.communicate(timeout=60) for launcher in self.launchers]
        out, err = ("".join(parts) for parts in zip(*printed, strict=True))
        return [launcher.returncode for launcher in self.launchers], out, err

    def log(self):
        """-> by rank, the environment and arguments of each start."""
        return {int(f.name[3:]): [json.loads(line) for line in f.read_text().splitlines()] for f in self.logs()}

    def logs(self):
        return sorted(self.folder.glob("log*"))

    def wait_for_starts(self, count):
        """Wait until `count` workers have started."""
        until = time.monotonic() + 30
        while sum(len(starts) for starts in self.log().values()) < count:
            assert time.monotonic() < until
            time.sleep(0.05)
