"""Launched runs that are disturbed: processes killed or stopped, a disk filled, a clock set, a network cut.

A run has one launcher on this machine, or two as on two hosts, each in a network namespace of its own. Namespaces and a
small disk of its own need root; a clock that jumps needs a C compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from nanotrain_jax.run import curves

NAMESPACES = ("nanotrain0", "nanotrain1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500
DISK_MB = 256
CLOCK = Path(__file__).with_name("jumping_clock.c")
POLL = 0.01  # seconds


class Shape(NamedTuple):
    """What a run is: hosts, processes of all of them, keys of its layout."""

    hosts: int
    processes: int
    keys: tuple[str, ...]


def has_network() -> bool:
    """True if network namespaces can be made."""
    return not subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode if on_linux() else False


def has_clock() -> bool:
    """True if the clock of a process can be set."""
    return on_linux() and shutil.which("cc") is not None


def on_linux() -> bool:
    """True on Linux."""
    return sys.platform == "linux"


@contextmanager
def network() -> Iterator[None]:
    """Have two network namespaces, joined by a cable, in which the name of this machine is the address of each."""
    name, folders = os.uname().nodename, [Path("/etc/netns") / space for space in NAMESPACES]
    for space in NAMESPACES:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True)
    try:
        for space, address, folder in zip(NAMESPACES, ADDRESSES, folders, strict=True):
            subprocess.run(["ip", "netns", "add", space], check=True)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        cable = ["ip", "link", "add", "cable", "netns", NAMESPACES[0], "type", "veth"]
        subprocess.run([*cable, "peer", "name", "cable", "netns", NAMESPACES[1]], check=True)
        for space, address in zip(NAMESPACES, ADDRESSES, strict=True):
            inside(space, "address", "add", f"{address}/24", "dev", "cable")
            inside(space, "link", "set", "cable", "up")
            inside(space, "link", "set", "lo", "up")
        yield
    finally:
        for space, folder in zip(NAMESPACES, folders, strict=True):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def inside(space: str, *words: str) -> None:
    """Run `ip` in a network namespace."""
    subprocess.run(["ip", "-n", space, *words], check=True)


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Have an empty small disk at a folder, if this process is root; else the folder."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    is_mounted = not subprocess.run(mount, capture_output=True).returncode
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Run:
    """A run in a folder: its launchers, which are started again when they have ended (`revive`)."""

    def __init__(self, folder: Path, config: Path, shape: Shape, overrides: Sequence[str], clock: bool = False):
        """folder: of the run, also its small disk. clock: its processes have one that `set_clock` sets."""
        self.folder, self.shape = folder, shape
        self.command = ["--config", str(config), f"logging.dir={folder}/run", *shape.keys, *overrides]
        self.env = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "NANOTRAIN_TOKEN": "of the trials, not a secret"}
        self.offset = folder / "clock"
        self.offset.write_bytes(bytes(8))
        if clock:
            library = folder / "clock.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK), "-ldl"], check=True)
            self.env |= {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(self.offset)}
        self.launchers: list[subprocess.Popen] = []
        for host in range(shape.hosts):
            self.launchers.append(self._started(host))

    def _started(self, host: int) -> subprocess.Popen:
        """Start the launcher of a host."""
        options, prefix = ["--processes", str(self.shape.processes // self.shape.hosts), "--max-restarts", "1000"], []
        if self.shape.hosts > 1:
            prefix = ["ip", "netns", "exec", NAMESPACES[host]]
            options += ["--hosts", str(self.shape.hosts), "--host", str(host), "--bind", ADDRESSES[0]]
            options += ["--leader", f"{ADDRESSES[0]}:{PORT}", "--join-timeout", "90"]
        command = [*prefix, sys.executable, "-m", "nanotrain_jax.launch", *options, "--", *self.command]
        with self.output(host).open("a") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | self.env)

    def output(self, host: int) -> Path:
        """Return the file of what a launcher prints, which is not on the small disk."""
        return self.folder.with_name(f"{self.folder.name}_host{host}.txt")

    def revive(self) -> None:
        """Start launchers that have ended again."""
        for host, launcher in enumerate(self.launchers):
            if launcher.poll() is not None:
                self.launchers[host] = self._started(host)

    def workers(self) -> dict[int, int]:
        """Return rank -> process id."""
        return {rank: pid for launcher in self.launchers for rank, pid in children(launcher).items()}

    def has_others_than(self, before: Mapping[int, int]) -> bool:
        """True if all processes have started, and none is one of `before` (rank -> process id)."""
        now = self.workers()
        return len(now) == self.shape.processes and not {*now.values()} & {*before.values()}

    def phase(self, rank: int) -> str:
        """Return the phase that a process says it is in; "" if it has not said so."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # missing, or being written
            text = (self.folder / "run" / "processes" / f"{rank}.json").read_text()
            pid, phase = re.search(r'"pid": (\d+)', text)[1], re.search(r'"phase": "(\w+)"', text)[1]
            return phase if int(pid) == self.workers()[rank] else ""
        return ""

    def losses(self) -> dict[int, float]:
        """Return step -> loss, as last logged."""
        return {record["step"]: record["loss"] for record in curves.read(self.folder / "run" / "metrics.jsonl")[0]}

    def step(self) -> int:
        """Return the step that was logged last; 0: none."""
        with suppress(OSError):
            steps = re.findall(rb'"step": (\d+)', tail(self.folder / "run" / "metrics.jsonl"))
            return int(steps[-1]) if steps else 0
        return 0

    def resumed(self) -> list[int]:
        """Return the steps that the run has resumed from."""
        return [int(found) for found in re.findall(r"resumed from step (\d+)", self.output_of_all())]

    def output_of_all(self) -> str:
        """Return what all launchers have printed."""
        return "".join(self.output(host).read_text(errors="replace") for host in range(self.shape.hosts))

    def is_saving(self) -> bool:
        """True while a checkpoint, or a local copy, is being written."""
        return any((self.folder / "run" / "checkpoints").glob("*-tmp*"))

    def reaches(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, starting launchers that end again; -> False if it does not within this time."""

        def has() -> bool:
            self.revive()
            return holds()

        return until(has, seconds)

    def set_clock(self, seconds: int) -> None:
        """Set the clock of all processes, beside the right time."""
        with self.offset.open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def stop(self) -> None:
        """End all launchers, which end their workers."""
        workers = self.workers().values()
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        for pid in workers:
            send(pid, signal.SIGKILL)


def children(launcher: subprocess.Popen) -> dict[int, int]:
    """Return rank -> process id of a launcher's workers (Linux)."""
    pid_of_rank = {}
    try:
        pids = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    except OSError:
        return {}
    for pid in pids:
        try:
            env = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except OSError:
            continue
        pid_of_rank |= {int(value.removeprefix("RANK=")): int(pid) for value in env if value.startswith("RANK=")}
    return pid_of_rank


def tail(path: Path, size: int = 4096) -> bytes:
    """Return the end of a file. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - size, 0))
        return file.read()


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; -> False if it does not within this time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
