"""The agent of one host: start its worker processes, forward their output, report how they exit."""

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

from nanotrain_jax.distributed.exit_codes import ENDED, HUNG, STOPPED, WRONG_REQUEST
from nanotrain_jax.distributed.protocol import GRACE, POLL_INTERVAL, Connection, Message, join, log
from nanotrain_jax.distributed.ranks import LAUNCHER, ROUND, STOPS

KILL_TIMEOUT = 30  # seconds for all processes to exit after SIGKILL


class Worker(NamedTuple):
    """A worker process."""

    rank: int
    process: subprocess.Popen
    gpus: list[str]


class Agent:
    """The workers of one host, controlled by the coordinator."""

    def __init__(self, host: int, slots: list[list[str]], command: list[str], env: Mapping[str, str], elastic: bool):
        """slots: the GPUs of each worker. command, env: of every worker, before what the coordinator adds."""
        self.host, self.slots, self.command, self.env, self.elastic = host, slots, command, env, elastic
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.workers: list[Worker] = []
        self.output_threads: list[threading.Thread] = []
        self.failed_slots: list[list[str]] = []
        self.round = self.total = 0  # total: workers of the round, on all hosts
        self.first_failure = 0.0  # time.monotonic() of the first failure in this round
        self.signals: list[int] = []
        self.stopping = False

    def run(self, coordinator: tuple[str, int], token: bytes, timeout: int) -> int:
        """Follow the coordinator until the run ends; -> exit code. Raises Refused if it has another token."""
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.signals.append(number))
        connection = self._join(coordinator, token, timeout)
        if connection is None:
            return STOPPED if self.signals else 1
        threading.Thread(target=self._listen, args=[connection], daemon=True).start()
        self._send_ready(connection)
        try:
            return self._follow(connection)
        finally:
            self._stop()

    def _follow(self, connection: Connection) -> int:
        """Handle messages, forward signals and poll the workers until the run ends; -> exit code."""
        while True:
            with suppress(queue.Empty):
                message = self.inbox.get(timeout=POLL_INTERVAL)
                if message["do"] == "end":
                    return message["code"]
                self._handle(connection, message)
            is_signalled = bool(self.signals)  # a signal may arrive at any time
            if is_signalled and self.stopping:  # the second signal
                return 1
            if is_signalled:
                self.signals.clear()
                self._terminate(connection)
            self._poll(connection)

    def _handle(self, connection: Connection, message: Message) -> None:
        """Start the workers of a round, have them save and exit, or stop them and report ready for the next round."""
        if message["do"] == "start":
            self.round = message["round"]
            if self.stopping:  # the signal arrived before this message
                self._send_failed(connection, f"host {self.host} was stopped before its workers started", True)
            else:
                self._start(message)
            return
        if message["do"] == "save":
            for worker in self.workers:
                worker.process.send_signal(signal.SIGTERM)
            return
        self._stop()
        if self.elastic and message["host"] == self.host:  # else the root cause is on another host
            self.slots = [slot for slot in self.slots if all(slot is not failed for failed in self.failed_slots)]
        self._send_ready(connection)

    def _terminate(self, connection: Connection) -> None:
        """Send SIGTERM to the workers, which save and exit."""
        self.stopping = True
        if not self.workers:  # between two rounds
            self._send_ready(connection)
        for worker in self.workers:
            worker.process.send_signal(signal.SIGTERM)

    def _join(self, coordinator: tuple[str, int], token: bytes, timeout: int) -> Connection | None:
        """Connect to the coordinator, with retries; None after the timeout or a signal. Raises Refused."""
        deadline = time.monotonic() + timeout
        while not self.signals:
            try:
                return join(socket.create_connection(coordinator, timeout=5), token)
            except OSError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                log(f"cannot reach host 0 at {coordinator[0]}:{coordinator[1]} ({reason}); is its launcher running?")
                return None
            time.sleep(1)
        return None

    def _listen(self, connection: Connection) -> None:
        for message in connection.receive():
            self.inbox.put(message)
            if message["do"] == "end":
                return
        log("lost the connection to the launcher of host 0")
        self.inbox.put({"do": "end", "code": 1})

    def _send_ready(self, connection: Connection) -> None:
        devices = max(1, min(map(len, self.slots), default=1))
        ready = {"is": "ready", "host": self.host, "processes": len(self.slots), "devices": devices}
        connection.send(**ready, place=connection.socket.getsockname()[0], stopping=self.stopping)

    def _start(self, message: Message) -> None:
        self.first_failure = 0.0
        master_addr, master_port = message["address"]
        self.total = message["total"]
        slots = self.slots[: message["count"]]
        gpus = [gpu for slot in slots for gpu in slot]
        env_of_all = {
            "WORLD_SIZE": message["total"],
            "LOCAL_WORLD_SIZE": len(slots),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": master_port,
            LAUNCHER: os.getpid(),
            ROUND: message["round"],
            "PYTHONUNBUFFERED": 1,
        } | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        command = [*self.command, *message["overrides"]]
        for local_rank, slot in enumerate(slots):
            rank = message["first"] + local_rank
            env = env_of_all | {"RANK": rank, "LOCAL_RANK": local_rank}
            process = subprocess.Popen(
                command,
                env={**self.env} | {key: str(value) for key, value in env.items()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # only the launcher receives Ctrl-C
            )
            self.workers.append(Worker(rank, process, slot))
            for source, to in (process.stdout, sys.stdout), (process.stderr, sys.stderr):
                self.output_threads.append(threading.Thread(target=forward, args=(source, to, rank), daemon=True))
                self.output_threads[-1].start()

    def _poll(self, connection: Connection) -> None:
        """Report to the coordinator when all workers are done or one failed."""
        if not self.workers:
            return
        exited = [worker for worker in self.workers if worker.process.poll() is not None]
        failed = [worker for worker in exited if worker.process.returncode]
        if failed:
            stopped = [w for w in self.workers if w not in exited and is_stopped(w.process.pid)]
            # A worker aborted by JAX, or ended by its watchdog, is not the root cause: it waited for another one.
            causes = [w for w in failed if w.process.returncode not in (-signal.SIGABRT, HUNG)]
            causes = stopped or [w for w in causes if w.process.returncode < 0] or causes
            self.first_failure = self.first_failure or time.monotonic()
            all_exited = len(exited) == len(self.workers)
            if not causes and not all_exited and time.monotonic() < self.first_failure + GRACE:
                return  # the root cause may not have exited yet
            what = " and ".join(f"process {w.rank} on host {self.host} {describe_exit(w)}" for w in causes or failed)
            is_all = len(causes) == self.total  # nothing would be left: try again with all
            self.failed_slots = [] if is_all else [w.gpus for w in causes]
            self._send_failed(connection, what, bool(causes), code_of(failed, causes))
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and any(w.process.poll() is None for w in self.workers):
                time.sleep(POLL_INTERVAL)
            self._stop()
        elif len(exited) == len(self.workers):
            self._stop()
            connection.send(**{"is": "done", "round": self.round}, stopping=self.stopping)

    def _send_failed(self, connection: Connection, what: str, is_root_cause: bool, code: int = 1) -> None:
        failed = {"is": "failed", "round": self.round, "host": self.host, "what": what, "blames": is_root_cause}
        connection.send(**failed, code=code, stopping=self.stopping)

    def _stop(self) -> None:
        """Kill all workers and wait for them and their output."""
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT
        for worker in self.workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:  # blocked in the kernel: a driver, a file system
                log(f"process {worker.rank} (pid {worker.process.pid}) did not exit {KILL_TIMEOUT} s after SIGKILL")
        deadline = time.monotonic() + GRACE
        for thread in self.output_threads:
            thread.join(max(deadline - time.monotonic(), 0))
        self.workers.clear()
        self.output_threads.clear()


def code_of(failed: list[Worker], causes: list[Worker]) -> int:
    """Return the exit code of a run whose workers failed, one of FINAL; 1: it may start again."""
    if any(w.process.returncode == ENDED for w in failed):  # all decide alike; others lost the first that ended
        return ENDED
    is_wrong_request = all(w.process.returncode == WRONG_REQUEST for w in causes or failed)
    return WRONG_REQUEST if is_wrong_request else 1


def describe_exit(worker: Worker) -> str:
    """Return how a worker exited, e.g. "(pid 7) killed by SIGKILL"."""
    code = worker.process.poll()
    if code is None:
        how = "is stopped (SIGSTOP)"
    elif code >= 0:
        how = f"exited with code {code}"
    else:
        how = f"killed by {signal.Signals(-code).name}"
    return f"(pid {worker.process.pid}) {how}"


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped the process (on Linux)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def forward(source: TextIO, to: TextIO, rank: int) -> None:
    """Copy lines from a worker's stream, prefixed with its rank."""
    for line in source:
        with suppress(OSError, ValueError):  # a closed output must not block the worker
            to.write(f"[{rank}] {line}")
            to.flush()
