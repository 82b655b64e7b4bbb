"""What launchers say to each other: one line of JSON each, over TCP."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
LOOK = 0.05  # seconds between two looks at what may have changed
SILENCE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, times
STOPPED = 75  # exit code: not done, but told to stop (EX_TEMPFAIL of sysexits.h)
GRACE = 2  # seconds for what is about to happen by itself


class Link:
    """Messages to and from another launcher."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in SILENCE.items():  # a host without power says nothing
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
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


def tell(text: str) -> None:
    """Say something that is not of the run."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)
