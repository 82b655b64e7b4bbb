"""Host 0's part for the launchers of all hosts: who takes part in which round, and when the run is over.

host i -> leader    ready, after each round again: how many processes it can run, of how many devices
leader -> all       start: who is which process of how many, and where process 0 listens
host i -> leader    failed (what; blames: a process that has not but waited for another), or done
leader -> all       stop, and so on; or end, with the exit code
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from nanotrain_jax.runtime.link import GRACE, LOOK, STOPPED, Link, Message, tell

LOOPBACK = "127.0.0.1"
# (processes at first, that are left, devices of each) -> how many to use, overrides of the run; may raise ValueError
Plan = Callable[[int, int, int], tuple[int, list[str]]]


class Over(Exception):
    """The run is over: exit code, and why."""


class Rules(NamedTuple):
    """When to go on."""

    hosts: int
    max_restarts: int
    elastic: bool  # go on without what is lost
    join_timeout: int  # seconds to wait for hosts


class Leader:
    """To be run in a thread."""

    def __init__(self, listener: socket.socket, place: str, rules: Rules, plan: Plan):
        """place: name of this host, by which all hosts find it. plan: what to start after something failed."""
        self.listener, self.place, self.rules, self.plan = listener, place, rules, plan
        self.events: queue.Queue[tuple[Link | None, int, Message]] = queue.Queue()
        self.links: dict[int, Link] = {}  # of hosts that are there
        self.waiting: dict[int, Message] = {}  # what they said when they were ready; until they start
        self.restarts = 0

    def run(self) -> None:
        """Round after round, until the run is over."""
        threading.Thread(target=self._accept, daemon=True).start()
        try:
            self._rounds()
        except Exception as over:  # also of what is wrong here: nobody is to wait for ever
            code, why = over.args if isinstance(over, Over) else (1, str(over) or repr(over))
            if why:
                tell(why)
            for _, link in sorted(self.links.items(), reverse=True):  # this host, which then ends, last
                link.send(do="end", code=code)

    def _rounds(self) -> NoReturn:
        """Start, and start again after each failure. Raises Over."""
        ready = self._gather()
        first = now = sum(message["processes"] for message in ready.values())
        overrides: list[str] = []
        while True:
            failed = self._round(ready, now, overrides)
            if failed["code"] == 2:  # wrong, and will be so again
                raise Over(2, "")
            if failed["stopping"]:
                raise Over(STOPPED, f"{failed['what']}, when it was told to stop")
            if self.restarts == self.rules.max_restarts:
                raise Over(1, f"{failed['what']}; restarted {self.restarts} times, as often as --max-restarts says")
            self.restarts += 1
            tell(f"{failed['what']}; restart {self.restarts} of {self.rules.max_restarts}")
            ready = self._gather()
            left = sum(message["processes"] for message in ready.values())
            now, overrides = self.plan(first, left, min(message["devices"] for message in ready.values()))
            if now != first:
                tell(f"{now} processes instead of {first}: {' '.join(overrides)}")

    def _accept(self) -> None:
        while True:
            with suppress(OSError):  # of one that is gone again
                link = Link(self.listener.accept()[0])
                threading.Thread(target=self._listen, args=[link], daemon=True).start()

    def _listen(self, link: Link) -> None:
        host = None
        for message in link.receive():
            if message["is"] == "ready":
                host = message["host"]
                self.links[host], self.waiting[host] = link, message
            else:
                self.events.put((link, host, message))
        if self.links.get(host) is link:  # else it has begun anew
            del self.links[host]
            self.waiting.pop(host, None)
        self.events.put((link, host, {"is": "gone"}))

    def _gather(self) -> dict[int, Message]:
        """Wait until all hosts are ready; an elastic run goes on without those that are gone. -> what they said."""
        began = time.monotonic()
        while len(self.waiting) < self.rules.hosts and not self._stopping():
            if self._go_on_without(time.monotonic() - began):
                break
            time.sleep(LOOK)
        if self._stopping():
            raise Over(STOPPED, "")
        ready = {host: message for host, message in dict(self.waiting).items() if message["processes"]}
        if not ready:
            raise Over(1, "no process is left")
        return ready

    def _stopping(self) -> bool:
        """Whether a host that is ready has got a signal."""
        return any(message["stopping"] for message in dict(self.waiting).values())

    def _go_on_without(self, waited: float) -> bool:
        """Whether to start without the hosts that are not ready after so many seconds.

        Raises Over if it is too late for them, and the run needs all.
        """
        timeout = self.rules.join_timeout
        if self.rules.elastic and self.restarts and self.waiting:
            return waited > timeout or (waited > GRACE and set(self.waiting) >= set(self.links))
        if waited > timeout:
            missing = sorted(set(range(self.rules.hosts)) - self.waiting.keys())
            raise Over(1, f"hosts {missing} did not join within {timeout} s")
        return False

    def _round(self, ready: dict[int, Message], total: int, overrides: list[str]) -> Message:
        """Start total processes; -> what failed, once all hosts were told to stop. Raises Over if none did."""
        failed = self._first_failure(self._start(ready, total, overrides))
        for link in list(self.links.values()):
            link.send(do="stop", host=failed["host"])
        return failed

    def _start(self, ready: dict[int, Message], total: int, overrides: list[str]) -> dict[int, Link | None]:
        """Tell hosts to start total processes; -> these hosts, and the link to each (None: it is gone).

        Hosts with more processes come first: tensor groups stay within them where others have lost some.
        """
        with socket.create_server(("" if self.rules.hosts > 1 else LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        order = sorted(ready, key=lambda host: (-ready[host]["processes"], host))
        address = ready[order[0]]["place"] if order[0] else self.place, port
        first = 0
        running: dict[int, Link | None] = {}
        for host in order:
            count = min(ready[host]["processes"], total - first)
            if not count:
                continue
            self.waiting.pop(host, None)
            numbers = {"round": self.restarts, "first": first, "count": count, "total": total}
            first += count
            running[host] = self.links.get(host)
            if running[host]:
                running[host].send(do="start", address=address, overrides=overrides, **numbers)
            else:
                self.events.put((None, host, {"is": "gone"}))
        return running

    def _first_failure(self, running: dict[int, Link | None]) -> Message:
        """Wait for the root cause of a round's failure; -> what the host said. Raises Over if all hosts are done.

        A failure that is not the root cause waits for the one that is, for 2 GRACE at most.
        """
        failed: Message | None = None
        until = 0.0
        stopping = False
        while running:
            try:
                link, host, message = self.events.get(timeout=failed and max(until - time.monotonic(), 0))
            except queue.Empty:  # processes that are not the root cause ended by themselves
                return failed
            if host not in running or running[host] is not link:  # of another round
                continue
            if message["is"] == "gone":
                message = {"is": "failed", "what": f"host {host} is gone", "code": 1, "stopping": False}
                message |= {"host": host, "blames": True}
            elif message["round"] != self.restarts:
                continue
            if message["is"] == "done":
                del running[host]
                stopping |= message["stopping"]
            elif message["blames"] or message["code"] == 2:
                return message
            elif not failed:
                failed = message
                until = time.monotonic() + 2 * GRACE
        raise Over(STOPPED if stopping else 0, "")
