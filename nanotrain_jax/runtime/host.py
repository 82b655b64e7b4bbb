"""One host's part of a launched run: it starts processes, shows what they print, and says how they end."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, TextIO

from nanotrain_jax.processes import LAUNCHER
from nanotrain_jax.runtime.link import GRACE, LOOK, STOPPED, Link, Message, tell
from nanotrain_jax.runtime.watchdog import HUNG

KILLED = 30  # seconds for a process to end once it is killed


class Child(NamedTuple):
    """A process of the run."""

    rank: int
    process: subprocess.Popen
    slot: list[str]


class Host:
    """One host's part: its processes."""

    def __init__(self, index: int, slots: list[list[str]], command: list[str], env: Mapping[str, str], elastic: bool):
        """slots: GPUs of each process, which runs command in env, and what the leader adds to both."""
        self.index, self.slots, self.command, self.env, self.elastic = index, slots, command, env, elastic
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.children: list[Child] = []
        self.shown: list[threading.Thread] = []
        self.lost: list[list[str]] = []  # slots of processes that have failed
        self.round = 0
        self.noticed = 0.0  # when the first of them failed in this round, by time.monotonic()
        self.signals: list[int] = []
        self.stopping = False

    def run(self, leader: tuple[str, int], timeout: int) -> int:
        """Do what the leader says until the end; -> exit code."""
        for number in signal.SIGTERM, signal.SIGINT:
            signal.signal(number, lambda number, frame: self.signals.append(number))
        link = self._join(leader, timeout)
        if link is None:
            return STOPPED if self.signals else 1
        threading.Thread(target=self._listen, args=[link], daemon=True).start()
        self._ready(link)
        try:
            return self._follow(link)
        finally:
            self._stop()

    def _follow(self, link: Link) -> int:
        """Do what the leader says, hand signals on, and look after the processes, until the end; -> exit code."""
        while True:
            with suppress(queue.Empty):
                message = self.inbox.get(timeout=LOOK)
                if message["do"] == "end":
                    return message["code"]
                self._obey(link, message)
            signalled = bool(self.signals)  # one may come at any moment
            if signalled and self.stopping:  # it is the second
                return 1
            if signalled:
                self.signals.clear()
                self._terminate(link)
            self._look(link)

    def _obey(self, link: Link, message: Message) -> None:
        """Start the processes of a round, or stop them and be ready for the next."""
        if message["do"] == "start":
            self.round = message["round"]
            if self.stopping:  # the signal came before this message
                self._tell_failed(link, f"host {self.index} had not begun", True)
            else:
                self._start(message)
            return
        self._stop()
        if self.elastic and message["host"] == self.index:  # else the root cause is on another host
            self.slots = [slot for slot in self.slots if all(slot is not lost for lost in self.lost)]
        self._ready(link)

    def _terminate(self, link: Link) -> None:
        """Have the processes save and end."""
        self.stopping = True
        if not self.children:  # between two rounds
            self._ready(link)
        for child in self.children:
            child.process.send_signal(signal.SIGTERM)

    def _join(self, leader: tuple[str, int], timeout: int) -> Link | None:
        until = time.monotonic() + timeout
        while not self.signals:
            try:
                return Link(socket.create_connection(leader, timeout=5))
            except OSError as error:
                reason = str(error)
            if time.monotonic() > until:
                tell(f"cannot reach host 0 at {leader[0]}:{leader[1]} ({reason}); is its launcher running?")
                return None
            time.sleep(1)
        return None

    def _listen(self, link: Link) -> None:
        for message in link.receive():
            self.inbox.put(message)
            if message["do"] == "end":
                return
        tell("the launcher of host 0 is gone")
        self.inbox.put({"do": "end", "code": 1})

    def _ready(self, link: Link) -> None:
        devices = max(1, min(map(len, self.slots), default=1))
        ready = {"is": "ready", "host": self.index, "processes": len(self.slots), "devices": devices}
        link.send(**ready, place=link.connection.getsockname()[0], stopping=self.stopping)

    def _start(self, message: Message) -> None:
        self.noticed = 0.0
        place, port = message["address"]
        used = self.slots[: message["count"]]
        gpus = [gpu for slot in used for gpu in slot]
        shared = {
            "WORLD_SIZE": message["total"],
            "LOCAL_WORLD_SIZE": len(used),
            "MASTER_ADDR": place,
            "MASTER_PORT": port,
            LAUNCHER: os.getpid(),
            "PYTHONUNBUFFERED": 1,
        } | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        command = [*self.command, *message["overrides"]]
        for i, slot in enumerate(used):
            rank = message["first"] + i
            mine = {"RANK": rank, "LOCAL_RANK": i}
            process = subprocess.Popen(
                command,
                env={**self.env} | {key: str(value) for key, value in (shared | mine).items()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C is for the launcher
            )
            self.children.append(Child(rank, process, slot))
            for source, to in (process.stdout, sys.stdout), (process.stderr, sys.stderr):
                self.shown.append(threading.Thread(target=show, args=(source, to, rank), daemon=True))
                self.shown[-1].start()

    def _look(self, link: Link) -> None:
        """Tell the leader if all processes are done, or one failed."""
        if not self.children:
            return
        ended = [child for child in self.children if child.process.poll() is not None]
        bad = [child for child in ended if child.process.returncode]
        if bad:
            halted = [c for c in self.children if c not in ended and is_halted(c.process.pid)]
            # One that JAX aborts, or that ends itself because another is gone, has but waited.
            first = [c for c in bad if c.process.returncode not in (-signal.SIGABRT, HUNG)]
            first = halted or [c for c in first if c.process.returncode < 0] or first
            self.noticed = self.noticed or time.monotonic()
            if not first and len(ended) < len(self.children) and time.monotonic() < self.noticed + GRACE:
                return  # the one that they have waited for may not have ended yet
            what = " and ".join(f"process {c.rank} on host {self.index} {how_ended(c)}" for c in first or bad)
            self.lost = [c.slot for c in first]
            wrong = all(c.process.returncode == 2 for c in first or bad)  # the request
            self._tell_failed(link, what, bool(first), 2 if wrong else 1)
            until = time.monotonic() + GRACE
            while time.monotonic() < until and any(c.process.poll() is None for c in self.children):
                time.sleep(LOOK)
            self._stop()
        elif len(ended) == len(self.children):
            self._stop()
            link.send(**{"is": "done", "round": self.round}, stopping=self.stopping)

    def _tell_failed(self, link: Link, what: str, blames: bool, code: int = 1) -> None:
        failed = {"is": "failed", "round": self.round, "host": self.index, "what": what, "blames": blames}
        link.send(**failed, code=code, stopping=self.stopping)

    def _stop(self) -> None:
        for child in self.children:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        for child in self.children:
            try:
                child.process.wait(KILLED)
            except subprocess.TimeoutExpired:  # in the kernel: a driver, a file system
                tell(f"process {child.rank} (pid {child.process.pid}) does not end, though it was killed")
        for thread in self.shown:
            thread.join(GRACE)  # all of what they have printed
        self.children.clear()
        self.shown.clear()


def how_ended(child: Child) -> str:
    """What became of a process, in a few words."""
    code = child.process.poll()
    if code is None:
        return f"(pid {child.process.pid}) is halted (SIGSTOP)"
    return f"(pid {child.process.pid}) ended " + (
        f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    )


def is_halted(pid: int) -> bool:
    """Whether a process was stopped by a signal (on Linux)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def show(source: TextIO, to: TextIO, rank: int) -> None:
    """Print the lines of a process as they come."""
    for line in source:
        with suppress(OSError, ValueError):  # nobody reads it any more; the process is not to wait for that
            to.write(f"[{rank}] {line}")
            to.flush()
