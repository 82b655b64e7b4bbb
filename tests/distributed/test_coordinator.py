"""The coordinator of the launchers, with agents that are a few lines here: rounds, and which restarts count."""

import socket
import threading

from nanotrain_jax import launch
from nanotrain_jax.distributed.coordinator import Coordinator, RestartPolicy
from nanotrain_jax.distributed.exit_codes import ENDED
from nanotrain_jax.distributed.protocol import join

TOKEN = b"0123456789abcdef"


def led(*policy):
    """Start a coordinator; -> the address where it listens."""
    listener = launch.listen("127.0.0.1", 0)
    leader = Coordinator(listener, "127.0.0.1", TOKEN, RestartPolicy(*policy), lambda before, left, devices: (left, []))
    threading.Thread(target=leader.run, daemon=True).start()
    return listener.getsockname()


class Host:
    """The agent of a host, without workers."""

    def __init__(self, address, host, processes):
        self.host, self.connection = host, join(socket.create_connection(address), TOKEN)
        self.connection.socket.settimeout(60)
        self.messages = self.connection.receive()
        self.ready(processes)

    def ready(self, processes):
        self.say("ready", processes=processes, devices=1, place="127.0.0.1")

    def say(self, kind, **more):
        self.connection.send(**{"is": kind, "host": self.host, "stopping": False}, **more)

    def fails(self, number, **more):
        self.say("failed", round=number, what="a process failed", **{"blames": True, "code": 1} | more)

    def hears(self, what):
        message = next(self.messages)
        assert message["do"] == what
        return message


def test_a_host_that_joined_begins_with_what_it_has_after_it_was_stopped():
    address = led(2, 3, True, 4, 1, 2)  # elastic, at most 2 processes
    first = Host(address, 0, 1)
    assert first.hears("start")["total"] == 1
    second = Host(address, 1, 2)
    first.hears("save")
    first.fails(0)
    for host in first, second:
        host.hears("stop")
    first.ready(1)
    threading.Timer(0.3, second.ready, [1]).start()  # one of its processes cannot start again
    assert [(host.hears("start")["count"], host.host) for host in (first, second)] == [(1, 0), (1, 1)]


def test_a_run_that_stops_on_purpose_ends_also_as_a_host_joins():
    address = led(2, 3, True, 4, 1, 2)
    first = Host(address, 0, 1)
    first.hears("start")
    second = Host(address, 1, 1)
    first.hears("save")
    first.fails(0, code=ENDED)
    for host in first, second:
        host.hears("stop")
        assert host.hears("end")["code"] == ENDED


def test_restarts_before_a_long_start_do_not_count():
    for forget_after, codes in (3600, [1, 1]), (0, [1, 1, 1, 1, 2]):
        host = Host(led(1, 1, False, 5, None, None, forget_after), 0, 1)
        for number, code in enumerate(codes):
            host.hears("start")
            host.fails(number, code=code)
            host.hears("stop")
            host.ready(1)
        assert host.hears("end")["code"] == codes[-1]
