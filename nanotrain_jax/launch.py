"""`python -m nanotrain_jax.launch --processes N [options] -- --config FILE [section.key=value ...]`

Starts the processes of a run on this host, shows what they print, ends all when one fails, and starts all again from
the newest good checkpoint. On several hosts there is one launcher each, with the same arguments; that of host 0 leads:

    host i -> leader    join, and again after each round: how many processes it can run
    leader -> all       start: who is which process of how many, and where process 0 listens
    host i -> leader    failed (which, why), or done
    leader -> all       stop, and so on; or end, with the exit code

Exit codes: that of the run; 1 if it failed more often than --max-restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TextIO

from nanotrain_jax import processes
from nanotrain_jax.config import Config
from nanotrain_jax.runtime import request

GRACE = 2  # seconds that processes have to end by themselves once one has failed
LOOK = 0.05  # seconds between two looks at processes
LOOPBACK = "127.0.0.1"
Message = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, and -> the run's exit code."""
    options, run = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        here = processes.here(options.leader, options.hosts, options.host)
        if here.count > 1 and here.coordinator is None:
            raise ValueError(f"{here.source} does not say where host 0 is; give --leader HOST:PORT")
        config = request.load(run.config, run.overrides)
        slots = divide(options.processes, config.runtime.simulate, here.count)
        listener = None
        if here.index == 0:
            place = ("", int(here.coordinator.rpartition(":")[2])) if here.count > 1 else (LOOPBACK, 0)
            listener = socket.create_server(place)
    except (ValueError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    place = here.coordinator.rpartition(":")[0] if here.count > 1 else LOOPBACK
    if listener:
        leader = Leader(listener, place, here.count, options, config)
        threading.Thread(target=leader.run, daemon=True).start()
    port = listener.getsockname()[1] if listener else int(here.coordinator.rpartition(":")[2])
    host = Host(here.index, slots, ["--config", run.config, *run.overrides], options.elastic)
    return host.run((place, port), options.join_timeout)


def parse(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """-> the launcher's own options, and the run's: config, overrides. Exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m nanotrain_jax.launch",
        usage="%(prog)s [options] -- --config FILE [section.key=value ...]",
        description="Start, watch and restart the processes of a run.",
    )
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help tells more\n")
    number = lambda least: lambda text: _number(text, least)
    parser.add_argument("--processes", type=number(1), help="on this host; default: one per GPU, or 1")
    parser.add_argument("--max-restarts", type=number(0), default=3, help="default: %(default)s")
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on without what was lost: on fewer processes, a smaller data axis, the same batch",
    )
    parser.add_argument("--hosts", type=number(1), help="number of hosts; default: as Slurm, ... say, or 1")
    parser.add_argument("--host", type=number(0), help="which of them this is, from 0")
    parser.add_argument("--leader", help="host:port of host 0, where the launchers meet")
    parser.add_argument("--join-timeout", type=number(1), default=300, help="seconds to wait for hosts; %(default)s")
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parser.parse_args(own)
    of_run = argparse.ArgumentParser(prog="... --", add_help=False)
    of_run.error = parser.error
    of_run.add_argument("--config", required=True)
    of_run.add_argument("overrides", nargs="*")
    return options, of_run.parse_intermixed_args(rest)


def _number(text: str, least: int) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
    return int(text)


def divide(count: int | None, simulate: int, hosts: int) -> list[list[str]]:
    """The GPUs (as CUDA_VISIBLE_DEVICES names them; none on a CPU) of each process of this host.

    count: processes on each of some hosts (None: one per GPU, or one). Raises ValueError if it does not come out even.
    """
    gpus = [] if simulate else processes.gpus_here()
    count = count or len(gpus) or 1
    if len(gpus) % count:
        raise ValueError(f"--processes {count} does not divide the {len(gpus)} GPUs of this host")
    if simulate % (count * hosts):
        raise ValueError(
            f"runtime.simulate={simulate} devices cannot be divided among {count * hosts} processes; use a multiple"
        )
    each = len(gpus) // count
    return [gpus[i * each : (i + 1) * each] for i in range(count)]


def fitting(config: Config, before: int, left: int, devices: int) -> tuple[int, list[str]]:
    """-> how many of the processes that are left to use, and overrides for them: a smaller data axis, the same batch.

    A device's microbatch stays as large, or becomes smaller. before: processes at first; devices: of each. Raises
    ValueError if no data axis fits.
    """
    p, batch = config.parallel, config.data.batch_size
    others = p.pipe * p.context * p.tensor * p.replica
    whole = before * devices // others
    for now in range(left, 0, -1):
        data, rest = divmod(now * devices, others)
        if rest or not data or batch % (p.replica * data):
            continue
        least, shares = -(-p.microbatches * whole // data), batch // (p.replica * data)
        fit = [m for m in range(least, shares + 1) if shares % m == 0 and m % p.pipe == 0]
        if fit:
            simulate = [f"runtime.simulate={now * devices}"] if config.runtime.simulate else []
            return now, [f"parallel.data={data}", f"parallel.microbatches={fit[0]}", *simulate]
    raise ValueError(
        f"{left} of {before} processes are left: no data axis over their devices divides data.batch_size={batch} evenly"
    )


class Link:
    """Messages to and from another launcher: one line of JSON each."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection, self.lines = connection, connection.makefile("r")

    def send(self, **message: Any) -> None:
        """Send, if there is anybody left."""
        with suppress(OSError):
            self.connection.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> Iterator[Message]:
        """What comes, until the other end is gone."""
        with suppress(OSError, ValueError):
            for line in self.lines:
                yield json.loads(line)


class Over(Exception):
    """The run is over: exit code, and why."""


class Leader:
    """Host 0's part for all: who takes part in which round, and when it is over."""

    def __init__(self, listener: socket.socket, place: str, hosts: int, options: argparse.Namespace, config: Config):
        """place: name of this host, by which all hosts find it."""
        self.listener, self.place, self.hosts, self.options, self.config = listener, place, hosts, options, config
        self.events: queue.Queue[tuple[int, Message]] = queue.Queue()
        self.links: dict[int, Link] = {}  # of hosts that are there
        self.ready: dict[int, Message] = {}  # hosts that wait for a round
        self.restarts = 0

    def run(self) -> None:
        """Round after round, until the run is over."""
        threading.Thread(target=self._accept, daemon=True).start()
        try:
            self._gather()
            first = now = sum(message["processes"] for message in self.ready.values())
            overrides: list[str] = []
            while True:
                failed = self._round(now, overrides)
                if failed["code"] == 2 or failed["stopping"]:  # wrong, and will be so again; or not wanted any more
                    raise Over(failed["code"], "")
                if self.restarts == self.options.max_restarts:
                    raise Over(1, f"{failed['what']}; restarted {self.restarts} times, as often as --max-restarts says")
                self.restarts += 1
                tell(f"{failed['what']}; restart {self.restarts} of {self.options.max_restarts}")
                self._gather()
                now, overrides = sum(message["processes"] for message in self.ready.values()), again(self.config)
                if now != first:
                    devices = min(message["devices"] for message in self.ready.values())
                    devices = self.config.runtime.simulate // first or devices
                    now, more = fitting(self.config, first, now, devices)
                    tell(f"{now} processes instead of {first}: {' '.join(more)}")
                    overrides += more
        except (Over, ValueError) as over:
            code, why = over.args if isinstance(over, Over) else (1, str(over))
            if why:
                tell(why)
            for link in list(self.links.values()):
                link.send(do="end", code=code)

    def _accept(self) -> None:
        while True:
            link = Link(self.listener.accept()[0])
            threading.Thread(target=self._listen, args=[link], daemon=True).start()

    def _listen(self, link: Link) -> None:
        host = None
        for message in link.receive():
            if host is None:
                host = message["host"]
                self.links[host] = link
            self.events.put((host, message))
        if self.links.get(host) is link:
            del self.links[host]
            self.events.put((host, {"is": "gone"}))

    def _gather(self) -> None:
        """Wait until all hosts are ready; an elastic run goes on without those that are gone."""
        until = time.monotonic() + self.options.join_timeout
        self.ready.clear()
        while len(self.ready) < self.hosts:
            left = until - time.monotonic()
            if self.options.elastic and self.restarts and self.ready.keys() >= self.links.keys():
                left = min(left, GRACE)
            try:
                host, message = self.events.get(timeout=max(left, 0))
            except queue.Empty:
                if self.options.elastic and self.restarts and self.ready:
                    return
                missing = sorted(set(range(self.hosts)) - self.ready.keys())
                raise Over(1, f"hosts {missing} did not join within {self.options.join_timeout} s") from None
            if message["is"] == "ready":
                self.ready[host] = message
            elif message["is"] == "gone":
                self.ready.pop(host, None)

    def _round(self, total: int, overrides: list[str]) -> Message:
        """Start so many processes; -> what failed first, once all hosts were told to stop. Raises Over if none did."""
        with socket.create_server(("" if self.hosts > 1 else LOOPBACK, 0)) as free:
            address = self.place, free.getsockname()[1]
        first, running = 0, set()
        for host, message in sorted(self.ready.items()):
            count = min(message["processes"], total - first)
            start = {"round": self.restarts, "first": first, "count": count, "total": total}
            self.links[host].send(do="start", address=address, overrides=overrides, **start)
            first += count
            running.add(host)
        while running:
            host, message = self.events.get()
            if message["is"] == "gone" and host in self.ready:
                message = {"is": "failed", "what": f"host {host} is gone", "code": 1, "stopping": False}
            elif message.get("round") != self.restarts:
                continue
            if message["is"] == "failed":
                for link in list(self.links.values()):
                    link.send(do="stop")
                return message
            running.discard(host)
        raise Over(0, "")


class Child(NamedTuple):
    """A process of the run."""

    rank: int
    process: subprocess.Popen
    slot: list[str]


class Host:
    """One host's part: its processes."""

    def __init__(self, index: int, slots: list[list[str]], arguments: list[str], elastic: bool):
        """slots: GPUs of each process. arguments: of nanotrain_jax.train."""
        self.index, self.slots, self.arguments, self.elastic = index, slots, arguments, elastic
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.children: list[Child] = []
        self.round = 0
        self.signals: list[int] = []
        self.stopping = False

    def run(self, leader: tuple[str, int], timeout: int) -> int:
        """Do what the leader says until the end; -> exit code."""
        for number in signal.SIGTERM, signal.SIGINT:
            signal.signal(number, lambda number, frame: self.signals.append(number))
        link = self._join(leader, timeout)
        if link is None:
            return 2
        threading.Thread(target=self._listen, args=[link], daemon=True).start()
        self._ready(link)
        try:
            while True:
                with suppress(queue.Empty):
                    message = self.inbox.get(timeout=LOOK)
                    if message["do"] == "start":
                        self.round = message["round"]
                        self._start(message)
                    else:
                        self._stop()
                        if message["do"] == "end":
                            return message["code"]
                        self._ready(link)
                if self.signals:
                    self.signals.clear()
                    if self.stopping or not self.children:
                        return 1
                    self.stopping = True
                    for child in self.children:
                        child.process.send_signal(signal.SIGTERM)
                self._look(link)
        finally:
            self._stop()

    def _join(self, leader: tuple[str, int], timeout: int) -> Link | None:
        until = time.monotonic() + timeout
        while not self.signals:
            try:
                return Link(socket.create_connection(leader, timeout=5))
            except OSError as error:
                if time.monotonic() > until:
                    tell(f"cannot reach host 0 at {leader[0]}:{leader[1]} ({error}); is its launcher running?")
                    return None
                time.sleep(1)
        return None

    def _listen(self, link: Link) -> None:
        for message in link.receive():
            self.inbox.put(message)
        tell("the launcher of host 0 is gone")
        self.inbox.put({"do": "end", "code": 1})

    def _ready(self, link: Link) -> None:
        devices = max(1, min(map(len, self.slots), default=1))
        link.send(**{"is": "ready", "host": self.index, "processes": len(self.slots), "devices": devices})

    def _start(self, message: Message) -> None:
        place, port = message["address"]
        used = self.slots[: message["count"]]
        gpus = [gpu for slot in used for gpu in slot]
        shared = {
            "WORLD_SIZE": message["total"],
            "LOCAL_WORLD_SIZE": len(used),
            "MASTER_ADDR": place,
            "MASTER_PORT": port,
            processes.LAUNCHER: os.getpid(),
            "PYTHONUNBUFFERED": 1,
        } | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        command = [sys.executable, "-m", "nanotrain_jax.train", *self.arguments, *message["overrides"]]
        for i, slot in enumerate(used):
            rank = message["first"] + i
            mine = {"RANK": rank, "LOCAL_RANK": i}
            process = subprocess.Popen(
                command,
                env=os.environ | {key: str(value) for key, value in (shared | mine).items()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C is for the launcher
            )
            self.children.append(Child(rank, process, slot))
            for source, to in (process.stdout, sys.stdout), (process.stderr, sys.stderr):
                threading.Thread(target=show, args=(source, to, rank), daemon=True).start()

    def _look(self, link: Link) -> None:
        """Tell the leader if all processes are done, or one failed."""
        if not self.children:
            return
        ended = [child for child in self.children if child.process.poll() is not None]
        bad = [child for child in ended if child.process.returncode]
        if bad:
            # A process that JAX aborts has but lost another one.
            first = [c for c in bad if c.process.returncode != -signal.SIGABRT] or bad
            halted = [c for c in self.children if c not in ended and is_halted(c.process.pid)]
            lost = halted or first
            what = " and ".join(f"process {c.rank} on host {self.index} {how_ended(c)}" for c in lost)
            code = max(c.process.returncode for c in first)
            until = time.monotonic() + GRACE
            while time.monotonic() < until and any(c.process.poll() is None for c in self.children):
                time.sleep(LOOK)
            self._stop()
            if self.elastic:
                self.slots = [slot for slot in self.slots if all(slot is not c.slot for c in lost)]
            code = code if code > 0 else 1
            link.send(**{"is": "failed", "round": self.round, "what": what, "code": code, "stopping": self.stopping})
        elif len(ended) == len(self.children):
            self.children.clear()
            link.send(**{"is": "done", "round": self.round})

    def _stop(self) -> None:
        for child in self.children:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        for child in self.children:
            child.process.wait()
        self.children.clear()


def again(config: Config) -> list[str]:
    """Overrides with which a run goes on from its own newest checkpoint."""
    return ["checkpoint.resume=auto"] if config.checkpoint.resume == "never" else []


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
        to.write(f"[{rank}] {line}")
        to.flush()


def tell(text: str) -> None:
    """Say something that is not of the run."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
