"""The protocol between launchers: one JSON object per line, over TCP."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
POLL_INTERVAL = 0.05  # seconds
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
STOPPED = 75  # exit code: stopped by a signal before the last step (EX_TEMPFAIL of sysexits.h)
GRACE = 2  # seconds to wait for processes or messages before acting without them


class Connection:
    """A connection to another launcher."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():  # detects a host that lost power
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.lines = sock, sock.makefile("r")

    def send(self, **message: Any) -> None:
        """Send a message; do nothing if the connection is closed."""
        with suppress(OSError):
            self.socket.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> Iterator[Message]:
        """Yield messages until the connection closes."""
        with suppress(OSError, ValueError):
            for line in self.lines:
                yield json.loads(line)


def log(text: str) -> None:
    """Print a line of the launcher to stderr."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)
