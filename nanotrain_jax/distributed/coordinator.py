"""The coordinator, on host 0: rendezvous of all agents, ranks of each round, restarts, and the end of the run.

agent -> coordinator    ready, before each round: how many workers it can start, with how many devices each
coordinator -> agents   start: ranks, world size, and the address of process 0
agent -> coordinator    failed (what; blames: True if it is the root cause), or done
coordinator -> agents   stop, and the next round; or end, with the exit code

An elastic run grows when a host is ready during a round, and more processes can then run:

coordinator -> agents   save: workers save a checkpoint and exit, as at a signal; agents are done, and the next round
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from nanotrain_jax.distributed.exit_codes import FINAL, STOPPED
from nanotrain_jax.distributed.protocol import GRACE, POLL_INTERVAL, Connection, Message, Refused, admit, log

LOOPBACK = "127.0.0.1"
MAX_STRANGERS = 128  # connections at once that have not proved the token; more are closed, and agents retry
MAX_REFUSALS = 10  # printed
NONE_LEFT = "no processes left"
GROWN: Message = {"is": "grown", "host": None}
# (initial number of processes, available ones, devices of each) -> number to start, overrides; may raise ValueError
RestartPlan = Callable[[int, int, int], tuple[int, list[str]]]


class RunEnded(Exception):
    """The run is over; args: exit code, reason ("": print nothing)."""


class RestartPolicy(NamedTuple):
    """When to restart."""

    hosts: int
    max_restarts: int
    elastic: bool  # restart without lost hosts and processes, and with those that return
    join_timeout: int  # seconds to wait for hosts
    least: int | None = None  # processes with which a run starts, also at first; None: at first with those of all hosts
    most: int | None = None  # processes that the config is for; None: those of the first start
    forget_after: float = math.inf  # seconds of a start, after which the restarts before it do not count


class Coordinator:
    """The coordinator of all agents; `run` is the target of a thread."""

    def __init__(self, listener: socket.socket, address: str, token: bytes, policy: RestartPolicy, plan: RestartPlan):
        """address: of this host, as other hosts reach it. token: agents have the same. plan: after a failure."""
        self.listener, self.address, self.policy, self.plan = listener, address, policy, plan
        self.token, self.strangers, self.refusals = token, threading.Semaphore(MAX_STRANGERS), 0
        self.events: queue.Queue[tuple[Connection | None, int, Message]] = queue.Queue()
        self.connections: dict[int, Connection] = {}  # by host
        self.ready: dict[int, Message] = {}  # "ready" messages of hosts whose workers are not started
        self.joining = threading.Lock()  # of both
        self.round = self.restarts = 0  # restarts: rounds that begin after a failure, those that count
        self.full = policy.most or 0  # processes that the config is for

    def run(self) -> None:
        """Run rounds until the run is over, then send the exit code to all agents."""
        threading.Thread(target=self._accept, daemon=True).start()
        try:
            self._run_rounds()
        except Exception as ended:  # also of bugs here: no agent may wait forever
            code, why = ended.args if isinstance(ended, RunEnded) else (1, str(ended) or repr(ended))
            if why:
                log(why)
            for _, connection in sorted(self.connections.items(), reverse=True):  # this host last: it exits then
                connection.send(do="end", code=code)

    def _run_rounds(self) -> NoReturn:
        """Start all workers, and restart them after each failure, and when a host joins. Raises RunEnded."""
        while True:
            ready = self._rendezvous()
            self.full = self.full or available(ready)
            total, overrides = self._planned(ready)
            if total != self.full:
                begins = "continuing" if self.round else "starting"
                log(f"{begins} with {total} of {self.full} processes: {' '.join(overrides)}")
            began = time.monotonic()
            ended = self._run_round(ready, total, overrides)
            self.round += 1
            if ended["is"] == "failed":
                self._count(ended, time.monotonic() - began)

    def _planned(self, ready: dict[int, Message]) -> tuple[int, list[str]]:
        """Return how many processes of these hosts to start, and config overrides for them. May raise ValueError."""
        count = min(available(ready), self.full)
        if not self.round and count == self.full:
            return count, []
        return self.plan(self.full, count, min(message["devices"] for message in ready.values()))

    def _count(self, failed: Message, seconds: float) -> None:
        """Count a failure, so many seconds after the start. Raises RunEnded unless the run restarts."""
        if failed["code"] in FINAL:  # the processes have said why
            raise RunEnded(failed["code"], "")
        if failed["stopping"]:
            raise RunEnded(STOPPED, f"{failed['what']} while stopping")
        if seconds > self.policy.forget_after:
            self.restarts = 0
        if self.restarts == self.policy.max_restarts:
            raise RunEnded(1, f"{failed['what']}; giving up after {self.restarts} restarts (--max-restarts)")
        self.restarts += 1
        log(f"{failed['what']}; restart {self.restarts} of {self.policy.max_restarts}")

    def _accept(self) -> None:
        while True:
            with suppress(OSError):  # the connection closed immediately
                sock, (address, *_) = self.listener.accept()
                if self.strangers.acquire(blocking=False):
                    threading.Thread(target=self._admit, args=[sock, address], daemon=True).start()
                else:
                    sock.close()

    def _admit(self, sock: socket.socket, address: str) -> None:
        """Listen to an agent that has the token."""
        try:
            connection = admit(sock, self.token)
        except (Refused, OSError) as error:
            sock.close()
            self.refusals += isinstance(error, Refused)
            if isinstance(error, Refused) and self.refusals <= MAX_REFUSALS:
                log(f"refused a connection from {address}: it has another token")
            return
        finally:
            self.strangers.release()
        self._listen(connection)

    def _listen(self, connection: Connection) -> None:
        host = None
        for message in connection.receive():
            if message["is"] == "ready":
                host = message["host"]
                with self.joining:
                    self.connections[host], self.ready[host] = connection, message
            self.events.put((connection, host, message))
        with self.joining:
            if self.connections.get(host) is connection:  # else the agent has reconnected
                del self.connections[host]
                self.ready.pop(host, None)
        self.events.put((connection, host, {"is": "gone"}))

    def _rendezvous(self) -> dict[int, Message]:
        """Wait until all hosts are ready; an elastic run continues without lost hosts. -> their "ready" messages."""
        began = time.monotonic()
        while len(self.ready) < self.policy.hosts and not self._is_stopping():
            if self._start_without_missing(time.monotonic() - began):
                break
            time.sleep(POLL_INTERVAL)
        if self._is_stopping():
            raise RunEnded(STOPPED, "")
        ready = {host: message for host, message in dict(self.ready).items() if message["processes"]}
        least = self.policy.least or 1
        if available(ready) < least:
            left = available(ready)
            raise RunEnded(1, f"{left} processes left, fewer than --min-processes={least}" if left else NONE_LEFT)
        return ready

    def _is_stopping(self) -> bool:
        """True if a host that is ready has received a signal."""
        return any(message["stopping"] for message in dict(self.ready).values())

    def _start_without_missing(self, seconds: float) -> bool:
        """True if the run starts without the hosts that are not ready after this time.

        Raises RunEnded after join_timeout if the run needs all hosts.
        """
        timeout, least = self.policy.join_timeout, self.policy.least
        may_miss = self.policy.elastic and (self.round or least)
        if may_miss and self.ready and available(dict(self.ready)) >= (least or 0):
            is_settled = self.round and seconds > GRACE and set(self.ready) >= set(self.connections)
            is_full = bool(self.full) and available(dict(self.ready)) >= self.full
            return bool(is_settled or is_full or seconds > timeout)
        if seconds > timeout:
            missing = sorted(set(range(self.policy.hosts)) - self.ready.keys())
            raise RunEnded(1, f"rendezvous timeout: hosts {missing} did not join within {timeout} s")
        return False

    def _run_round(self, ready: dict[int, Message], total: int, overrides: list[str]) -> Message:
        """Start total processes; after a failure, or when they have saved to grow, stop all hosts. -> the failure, or
        a message "grown". Raises RunEnded if all are done."""
        running = self._start(ready, total, overrides)
        ended = self._wait_for_end(running, ready, total)
        with self.joining:  # who is here answers "ready" again, and must not begin before that answer
            self.ready.clear()
            connections = list(self.connections.values())
        for connection in connections:
            connection.send(do="stop", host=ended["host"])
        return ended

    def _grows(self, ready: dict[int, Message], total: int) -> bool:
        """True if more than total processes can run with the hosts that are ready now. ready: those that have begun."""
        if not self.policy.elastic:
            return False
        try:
            return self._planned(ready | dict(self.ready))[0] > total
        except ValueError:
            return False

    def _start(self, ready: dict[int, Message], total: int, overrides: list[str]) -> dict[int, Connection | None]:
        """Send "start" for total processes; -> the connection of each started host (None: lost).

        Hosts with more processes get the lower ranks: tensor groups stay within them where others have lost some.
        """
        with socket.create_server(("" if self.policy.hosts > 1 else LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        order = sorted(ready, key=lambda host: (-ready[host]["processes"], host))
        address = ready[order[0]]["place"] if order[0] else self.address, port
        first_rank = 0
        running: dict[int, Connection | None] = {}
        for host in order:
            count = min(ready[host]["processes"], total - first_rank)
            if not count:
                continue
            self.ready.pop(host, None)
            ranks = {"round": self.round, "first": first_rank, "count": count, "total": total}
            first_rank += count
            running[host] = self.connections.get(host)
            if running[host]:
                running[host].send(do="start", address=address, overrides=overrides, **ranks)
            else:
                self.events.put((None, host, {"is": "gone"}))
        return running

    def _wait_for_end(self, running: dict[int, Connection | None], ready: dict[int, Message], total: int) -> Message:
        """Wait for the root cause of a failure; -> its "failed" message. Raises RunEnded if all hosts are done.

        After a failure that is not the root cause, wait for the root cause for at most 2 GRACE. When a host joins with
        which more processes can run, ask all to save; when they are done, or fail instead: -> a message "grown".
        """
        failed: Message | None = None
        deadline = 0.0
        stopping = grows = False
        while running:
            try:
                connection, host, message = self.events.get(timeout=failed and max(deadline - time.monotonic(), 0))
            except queue.Empty:  # no root cause was reported
                return failed
            joins = message["is"] == "ready" and not message["stopping"]
            if joins and not grows and self._grows(ready, total):
                grows = True
                ask_to_save(running, host)
            if message["is"] == "ready" or host not in running or running[host] is not connection:  # of another round
                continue
            if message["is"] == "gone":
                message = {"is": "failed", "what": f"host {host} is lost", "code": 1, "stopping": False}
                message |= {"host": host, "blames": True}
            elif message["round"] != self.round:
                continue
            is_final = message["is"] == "failed" and message["code"] in FINAL
            if grows and message["is"] == "failed" and not (message["stopping"] or is_final):  # e.g. could not save yet
                log(f"{message['what']}, asked to save")
                return GROWN
            if message["is"] == "done":
                del running[host]
                stopping |= message["stopping"]
            elif message["blames"] or is_final:
                return message
            elif not failed:
                failed = message
                deadline = time.monotonic() + 2 * GRACE
        if grows and not stopping:
            return GROWN
        raise RunEnded(STOPPED if stopping else 0, "")


def ask_to_save(running: dict[int, Connection | None], host: int) -> None:
    """Ask the agents of a round to have their workers save and exit, as a host joins."""
    log(f"host {host} joins: all processes save and start again")
    for connection in running.values():
        if connection:
            connection.send(do="save")


def available(ready: dict[int, Message]) -> int:
    """Return the number of processes that these hosts can start."""
    return sum(message["processes"] for message in ready.values())
