"""Hang detection: a thread ends a process whose training loop makes no progress, with a report of all processes.

Each process writes a heartbeat to `<logging.dir>/processes/<i>.json` every few seconds. From these files every process
can name those without a heartbeat (stopped, or on a lost host) and those behind, while the others wait for them in a
collective. XLA itself reports only that the collective does not end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pydantic import TypeAdapter

from nanotrain_jax.distributed.exit_codes import HUNG
from nanotrain_jax.distributed.phase_clock import PhaseClock

MIN_TIMEOUT = 600  # seconds, where runtime.hang_timeout is not set
TIMEOUT_STEPS = 20  # the timeout is at least this many median steps
CHECKPOINT_FACTOR = 6  # timeouts, for a checkpoint
START_END_FACTOR = 10  # timeouts, before the first step (compilation) and after the last (the last checkpoint)
JOINED = 60  # seconds until processes that have all met continue, at most
BEFORE_STEPS = ("join", "start", "restore", "compile")  # phases in their order; of step 0, or of the one resumed from
MAX_LINES = 16  # of a report, about other processes
WINDOW = 50  # steps in medians


class Heartbeat(NamedTuple):
    """The progress of a process, as it reports it."""

    process: int
    host: str
    pid: int
    step: int
    phase: str  # of BEFORE_STEPS, "data", "dispatch", "step" (waits), "evaluation", "tasks", "checkpoint", "end"
    since: float  # seconds in this phase
    step_seconds: float  # median
    data_seconds: float  # median time of waiting for data: the part of a step that is this process's alone
    silent: float = 0.0  # seconds since this heartbeat


HEARTBEAT = TypeAdapter(Heartbeat)


class Member(NamedTuple):
    """A process of a run and its heartbeat file."""

    folder: Path
    process: int
    processes: int
    launcher: int | None  # process id of the launcher; the process ends when the launcher does

    @property
    def heartbeat_file(self) -> Path:
        return self.folder / f"{self.process}.json"


class Progress(NamedTuple):
    """The current phase of the training loop."""

    phase: str
    step: int
    began: float  # time.monotonic()


class Watchdog:
    """Progress of the training loop (`at`), checked by a thread (`check`)."""

    def __init__(
        self,
        member: Member,
        timeout: float | None,
        say: Callable[[str], None],
        log: TextIO,
        clock: PhaseClock | None = None,
    ):
        """timeout: seconds (None: see MIN_TIMEOUT, TIMEOUT_STEPS). say: prints for people. log, clock: its own."""
        self.clock = clock or PhaseClock()
        self.member, self.timeout, self.say, self.log = member, timeout, say, log
        self.progress, self.step_began = Progress("start", 0, time.monotonic()), None
        self.step_seconds: deque[float] = deque(maxlen=WINDOW)
        self.data_seconds: deque[float] = deque(maxlen=WINDOW)
        self.reported_stragglers: set[int] = set()
        self.stop = threading.Event()
        self.join_timeout = 0.0  # seconds; `initialize` ends the process after it

    def at(self, phase: str, number: int) -> None:
        """Record that the loop is in this phase of step `number`; a repeated phase counts as progress."""
        self.clock.at(phase)
        now = time.monotonic()
        if phase == "data":
            if self.step_began is not None:
                self.step_seconds.append(now - self.step_began)
            self.step_began = now
        elif self.progress.phase == "data":
            self.data_seconds.append(now - self.progress.began)
        elif phase in ("evaluation", "checkpoint", "verify"):
            self.step_began = None
        self.progress = Progress(phase, number, now)

    def limit(self, phase: str) -> float:
        """Return the hang timeout of a phase, in seconds."""
        limit = self.timeout or max(MIN_TIMEOUT, TIMEOUT_STEPS * _median(self.step_seconds))
        if phase == "join":
            return max(limit, self.join_timeout) + JOINED
        if phase in ("start", "restore", "compile", "end"):
            return limit * START_END_FACTOR
        return limit * CHECKPOINT_FACTOR if phase == "checkpoint" and not self.timeout else limit

    @property
    def interval(self) -> float:
        """Seconds between two checks."""
        return min(max((self.timeout or MIN_TIMEOUT) / 20, 0.2), 10)

    def heartbeat(self, progress: Progress) -> Heartbeat:
        """Return the heartbeat of this process."""
        since = time.monotonic() - progress.began
        identity = self.member.process, socket.gethostname(), os.getpid(), progress.step, progress.phase
        return Heartbeat(*identity, since, _median(self.step_seconds), _median(self.data_seconds))

    def check(self) -> None:
        """Write the heartbeat; end the process after a hang timeout; warn of stragglers. Called by the thread."""
        progress = self.progress
        own, limit = self.heartbeat(progress), self.limit(progress.phase)
        with suppress(OSError):
            self.member.heartbeat_file.write_text(json.dumps(own._asdict()))
        # If the loop never releases the GIL, this thread does not run again: then this timer ends the process.
        faulthandler.dump_traceback_later(limit + 3 * self.interval, exit=True, file=self.log)
        if own.since > limit and self.progress is progress:  # else it progressed meanwhile
            self._end(report(own, limit, read_heartbeats(self.member), self.interval))
        if self.member.launcher not in (None, os.getppid()):
            self._end(f"error: process {own.process}: its launcher (pid {self.member.launcher}) exited")
        for text in self._straggler_warnings():
            self.say(text)

    def _straggler_warnings(self) -> Iterator[str]:
        if self.member.process != 0 or len(self.data_seconds) < WINDOW:
            return
        heartbeats = read_heartbeats(self.member)
        median = _median([h.data_seconds for h in heartbeats])
        for h in heartbeats:
            is_slow = h.data_seconds > max(3 * median, 0.1 * h.step_seconds)
            if is_slow and h.process not in self.reported_stragglers:
                self.reported_stragglers.add(h.process)
                yield (
                    f"warning: straggler: process {h.process} on {h.host} waits {h.data_seconds * 1e3:.1f} ms for data "
                    f"in each step of {h.step_seconds * 1e3:.1f} ms (median of all processes: {median * 1e3:.1f} ms)"
                )

    def _end(self, text: str) -> None:
        for stream in dict.fromkeys((self.log, sys.stderr)):  # before the run has a log they are the same
            with suppress(OSError, ValueError):
                stream.write(text + "\n")
                stream.flush()
                faulthandler.dump_traceback(file=stream)
        os._exit(HUNG)


def report(own: Heartbeat, limit: float, heartbeats: list[Heartbeat], interval: float) -> str:
    """Return the report of a hang timeout: processes without a heartbeat, then those behind, then this one."""
    silent = [h for h in heartbeats if h.silent > max(0.5 * limit, 5 * interval)]
    behind = [h for h in heartbeats if h not in silent and _progress(h) < _progress(own)]
    lines = [f"error: hang timeout: no progress for {own.since:.0f} s (limit {limit:.0f} s: runtime.hang_timeout)"]

    def name(h: Heartbeat) -> str:
        return f"process {h.process} on {h.host} (pid {h.pid})"

    lines += [
        f"  {name(h)}: no heartbeat for {h.silent:.0f} s (stopped, or its host is lost), step {h.step}, phase {h.phase}"
        for h in silent
    ]
    lines += [f"  {name(h)}: behind, step {h.step}, phase {h.phase} for {h.since:.0f} s" for h in behind]
    if len(lines) > MAX_LINES + 1:
        lines[MAX_LINES:] = [f"  and {len(lines) - MAX_LINES} more"]
    lines.append(f"  {name(own)}: reports this, step {own.step}, phase {own.phase} for {own.since:.0f} s")
    others = len(heartbeats) - len(silent) - len(behind) - 1
    if others > 0:
        lowest = min((h.step for h in heartbeats), default=own.step)
        lines.append(f"  {others} other processes are not behind (lowest step of all: {lowest})")
    return "\n".join([*lines, f"  threads of process {own.process}:"])


def _progress(h: Heartbeat) -> tuple[int, int]:
    """Return how far a process is, to compare: before a step, in it, or waiting for the others at its end."""
    before = BEFORE_STEPS.index(h.phase) - len(BEFORE_STEPS) if h.phase in BEFORE_STEPS else 0
    return h.step, before or int(h.phase == "step")


def absent(member: Member, interval: float) -> str:
    """Return which other processes give no sign, in words; "" if the folder of heartbeats does not tell."""
    heartbeats = read_heartbeats(member)
    alive = {h.process for h in heartbeats if h.silent <= 5 * interval}
    missing = [str(process) for process in range(member.processes) if process not in alive | {member.process}]
    if not alive or not missing:
        return ""
    return f"no heartbeat of process {', '.join(missing[:MAX_LINES])}" + ", ..." * (len(missing) > MAX_LINES)


def read_heartbeats(member: Member) -> list[Heartbeat]:
    """Return the last heartbeat of each process."""
    found = {}
    for process in range(member.processes):
        path = member._replace(process=process).heartbeat_file
        with suppress(OSError, ValueError):  # missing, or being written
            found[process] = HEARTBEAT.validate_json(path.read_bytes()), path.stat().st_mtime
    now = max((written for _, written in found.values()), default=0)  # by the clock of the file system, for all alike
    return [heartbeat._replace(silent=now - written) for heartbeat, written in found.values()]


@contextmanager
def reporting(watchdog: Watchdog, say: Callable[[str], None], log: TextIO) -> Iterator[Watchdog]:
    """Let a watchdog print and log elsewhere, until the context exits."""
    before = watchdog.say, watchdog.log
    watchdog.say, watchdog.log = say, log
    try:
        yield watchdog
    finally:
        watchdog.say, watchdog.log = before
        faulthandler.cancel_dump_traceback_later()  # its file is closed next; the next check sets it again


@contextmanager
def watching(
    member: Member,
    timeout: float | None,
    say: Callable[[str], None],
    log: TextIO,
    clock: PhaseClock | None = None,
) -> Iterator[Watchdog]:
    """Yield a Watchdog whose thread checks until the context exits. Arguments: as of `Watchdog`."""
    watchdog = Watchdog(member, timeout, say, log, clock)

    def run() -> None:
        while not watchdog.stop.wait(watchdog.interval):
            try:
                watchdog.check()
            except Exception as error:  # e.g. a full disk, which must not end the run
                print(f"warning: the watchdog failed to check: {error!r}", file=sys.stderr)

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield watchdog
    finally:
        watchdog.stop.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):
            member.heartbeat_file.unlink()


def _median(values: Any) -> float:
    return statistics.median(values) if values else 0.0
