"""A thread that sees whether the loop goes on; where it does not, a report ends the run, and names the process.

Each process leaves a line on how far it is in `<logging.dir>/processes/<i>.json`, every few seconds. So each can tell
who is silent (stopped, or on a host that is gone) and who is behind, while the others wait for it in a collective, of
which XLA itself only ever says that it does not end.
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

HUNG = 3  # exit code of a process that has waited in vain, for itself or for another one
LEAST = 600  # seconds, of a limit that nobody has set
MEDIANS = 20  # steps
WRITING = 6  # such limits, for a checkpoint
AROUND = 10  # limits, for what comes before the first step (compiling) and after the last (the last checkpoint)
LINES = 16  # of a report, about other processes
WINDOW = 50  # steps whose times are looked at


class Status(NamedTuple):
    """How far a process is, as it says itself."""

    process: int
    host: str
    pid: int
    step: int
    phase: str  # "start", "data", "dispatch", "step" (waits for its devices), "evaluation", "checkpoint", "end"
    since: float  # seconds in this phase
    step_seconds: float  # median
    data_seconds: float  # median, of waiting for data: what a step takes of this process alone
    silent: float = 0.0  # seconds since it said so


class Place(NamedTuple):
    """Where a process stands."""

    folder: Path  # for a file of each process
    process: int
    processes: int
    launcher: int | None  # process id of what has started it, and is to outlive it


class Doing(NamedTuple):
    """What the loop is doing."""

    phase: str
    step: int
    began: float  # by time.monotonic()


class Watch:
    """What the loop tells (`at`), and what others may ask."""

    def __init__(self, here: Place, timeout: float | None, say: Callable[[str], None], log: TextIO):
        """timeout: seconds (None: see LEAST, MEDIANS). say: prints lines for people. log: this process's own file."""
        self.here, self.timeout, self.say, self.log = here, timeout, say, log
        self.doing, self.started = Doing("start", 0, time.monotonic()), None
        self.steps: deque[float] = deque(maxlen=WINDOW)
        self.data: deque[float] = deque(maxlen=WINDOW)
        self.told: set[int] = set()
        self.stop = threading.Event()

    def at(self, phase: str, number: int) -> None:
        """The loop is now in this phase of step `number`; the same phase again means that it goes on."""
        now = time.monotonic()
        if phase == "data":
            if self.started is not None:
                self.steps.append(now - self.started)
            self.started = now
        elif self.doing.phase == "data":
            self.data.append(now - self.doing.began)
        elif phase in ("evaluation", "checkpoint"):
            self.started = None
        self.doing = Doing(phase, number, now)

    def limit(self, phase: str) -> float:
        """Seconds that a phase may take now."""
        limit = self.timeout or max(LEAST, MEDIANS * _median(self.steps))
        if phase in ("start", "end"):
            return limit * AROUND
        return limit * WRITING if phase == "checkpoint" and not self.timeout else limit

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(max((self.timeout or LEAST) / 20, 0.2), 10)

    def status(self, doing: Doing) -> Status:
        """How far this process is."""
        since = time.monotonic() - doing.began
        me = self.here.process, socket.gethostname(), os.getpid(), doing.step, doing.phase
        return Status(*me, since, _median(self.steps), _median(self.data))

    def look(self) -> None:
        """Leave word, and see whether all is well; called by the thread."""
        doing = self.doing
        mine, limit = self.status(doing), self.limit(doing.phase)
        with suppress(OSError):
            _path(self.here).write_text(json.dumps(mine._asdict()))
        # Where the loop never gives the interpreter back this thread does not come here again: then this fires.
        faulthandler.dump_traceback_later(limit + 3 * self.interval, exit=True, file=self.log)
        if mine.since > limit and self.doing is doing:  # else it has gone on meanwhile
            self._end(report(mine, limit, statuses(self.here), self.interval))
        if self.here.launcher not in (None, os.getppid()):
            self._end(f"error: the launcher of process {mine.process} (pid {self.here.launcher}) is gone")
        for text in self._stragglers():
            self.say(text)

    def _stragglers(self) -> Iterator[str]:
        if self.here.process != 0 or len(self.data) < WINDOW:
            return
        found = statuses(self.here)
        usual = _median([s.data_seconds for s in found])
        for s in found:
            if s.process not in self.told and s.data_seconds > max(3 * usual, 0.1 * s.step_seconds):
                self.told.add(s.process)
                yield (
                    f"warning: process {s.process} on {s.host} waits {s.data_seconds * 1e3:.1f} ms for data in each "
                    f"step, of {s.step_seconds * 1e3:.1f} ms, the others {usual * 1e3:.1f}; all wait for it"
                )

    def _end(self, text: str) -> None:
        for stream in self.log, sys.stderr:
            with suppress(OSError, ValueError):
                stream.write(text + "\n")
                stream.flush()
                faulthandler.dump_traceback(file=stream)
        os._exit(HUNG)


def report(mine: Status, limit: float, others: list[Status], interval: float) -> str:
    """What a process whose loop does not go on knows about all of them, those that stand out first."""
    first = min((s.step for s in others), default=mine.step)
    silent = [s for s in others if s.silent > max(0.5 * limit, 5 * interval)]
    behind = [s for s in others if s not in silent and (s.step, s.phase == "step") < (mine.step, mine.phase == "step")]
    lines = [f"error: no progress for {mine.since:.0f} s (the limit is {limit:.0f}: runtime.hang_timeout)"]

    def who(s: Status) -> str:
        return f"process {s.process} on {s.host} (pid {s.pid})"

    lines += [
        f"  {who(s)} is silent for {s.silent:.0f} s (stopped, or its host is gone): at step {s.step}, phase {s.phase}"
        for s in silent
    ]
    lines += [f"  {who(s)} is behind: at step {s.step}, phase {s.phase}, for {s.since:.0f} s" for s in behind]
    if len(lines) > LINES + 1:
        lines[LINES:] = [f"  and {len(lines) - LINES} more"]
    lines.append(f"  {who(mine)}, which tells this, is at step {mine.step}, phase {mine.phase}, for {mine.since:.0f} s")
    alike = len(others) - len(silent) - len(behind) - 1
    if alike > 0:
        lines.append(f"  {alike} other processes are no different (the first is at step {first})")
    return "\n".join([*lines, f"  where its threads are, of process {mine.process}:"])


def statuses(here: Place) -> list[Status]:
    """What all processes have said last."""
    found = {}
    for process in range(here.processes):
        path = _path(here._replace(process=process))
        with suppress(OSError, ValueError, TypeError):  # not there, or being written
            found[process] = json.loads(path.read_text()), path.stat().st_mtime
    now = max((said for _, said in found.values()), default=0)  # by the clock that all of them are told
    return [Status(**status | {"silent": now - said}) for status, said in found.values()]


@contextmanager
def watching(here: Place, timeout: float | None, say: Callable[[str], None], log: TextIO) -> Iterator[Watch]:
    """Yields a Watch whose thread looks on until the end. See `Watch`."""
    watch = Watch(here, timeout, say, log)

    def run() -> None:
        while not watch.stop.wait(watch.interval):
            try:
                watch.look()
            except Exception as error:  # a full disk, say; the run is not to end for that
                print(f"warning: the watchdog cannot look: {error!r}", file=sys.stderr)

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):
            _path(here).unlink()


def _path(here: Place) -> Path:
    return here.folder / f"{here.process}.json"


def _median(values: Any) -> float:
    return statistics.median(values) if values else 0.0
