"""The protocol between launchers: one JSON object per line, over TCP, with a tag that takes the token to make.

coordinator -> agent    a nonce
agent -> coordinator    another nonce, and proof of the token
coordinator -> agent    proof of the token, or zeros
both, from then on      lines: tag, space, object

The key of a connection is the HMAC-SHA256 (RFC 2104) of both nonces with the token. A tag is the HMAC of direction,
number of the message and object with this key, so a line that is sent again, later, on another connection or back is
refused. Lines are not secret.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

Message = dict[str, Any]
POLL_INTERVAL = 0.05  # seconds
# When a connection is lost: seconds without data, seconds between probes, probes; milliseconds without the
# acknowledgement of data, during which there are no probes.
LOSS = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
GRACE = 2  # seconds to wait for processes or messages before acting without them
NONCE = PROOF = 32  # bytes
HANDSHAKE_TIMEOUT = 10  # seconds
MAX_LINE = 1 << 16  # bytes
COORDINATOR, AGENT = b"C", b"A"  # directions: who sends
VERSION = b"nanotrain_jax launcher 1"


class Refused(ValueError):
    """The other side has another token."""


class Connection:
    """An authenticated connection to another launcher: `admit` and `join` make it."""

    def __init__(self, sock: socket.socket, key: bytes, own: bytes):
        """key: of this connection. own: COORDINATOR or AGENT."""
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in LOSS.items():  # detects a host that lost power
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.lines = sock, sock.makefile("rb")
        self.key, self.own, self.sent = key, own, count()

    def send(self, **message: Any) -> None:
        """Send a message; do nothing if the connection is closed. Called by one thread."""
        body = json.dumps(message).encode()
        line = _tag(self.key, self.own, next(self.sent), body).hex().encode() + b" " + body + b"\n"
        with suppress(OSError):
            self.socket.sendall(line)

    def receive(self) -> Iterator[Message]:
        """Yield messages until the connection closes, or a line is too long or has a wrong tag; then close it."""
        theirs = AGENT if self.own == COORDINATOR else COORDINATOR
        with suppress(OSError, ValueError):
            for number in count():
                line = self.lines.readline(MAX_LINE)
                tag, _, body = line.removesuffix(b"\n").partition(b" ")
                if not hmac.compare_digest(tag, _tag(self.key, theirs, number, body).hex().encode()):
                    break
                yield json.loads(body)
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def admit(sock: socket.socket, token: bytes) -> Connection:
    """Return the coordinator's end of a connection. Raises Refused, or OSError if the agent says too little in time."""
    deadline, nonce = time.monotonic() + HANDSHAKE_TIMEOUT, secrets.token_bytes(NONCE)
    sock.settimeout(HANDSHAKE_TIMEOUT)
    sock.sendall(nonce)
    other = _read(sock, NONCE, deadline)
    key = hmac.digest(token, VERSION + nonce + other, "sha256")
    if not hmac.compare_digest(_read(sock, PROOF, deadline), _proof(key, AGENT)):
        sock.sendall(bytes(PROOF))
        raise Refused("another token")
    sock.sendall(_proof(key, COORDINATOR))
    return Connection(sock, key, COORDINATOR)


def join(sock: socket.socket, token: bytes) -> Connection:
    """Return the agent's end of a connection. Raises Refused, or OSError if the coordinator does not answer in time."""
    deadline, nonce = time.monotonic() + HANDSHAKE_TIMEOUT, secrets.token_bytes(NONCE)
    key = hmac.digest(token, VERSION + _read(sock, NONCE, deadline) + nonce, "sha256")
    sock.sendall(nonce + _proof(key, AGENT))
    if not hmac.compare_digest(_read(sock, PROOF, deadline), _proof(key, COORDINATOR)):
        raise Refused("the launcher of host 0 has another token; give all hosts the same")
    return Connection(sock, key, AGENT)


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Read exactly `size` bytes before the deadline, of time.monotonic(). Raises OSError."""
    data = b""
    while len(data) < size:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed by the other side")
        data += piece
    return data


def _proof(key: bytes, sender: bytes) -> bytes:
    return hmac.digest(key, VERSION + sender, "sha256")


def _tag(key: bytes, sender: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, sender + number.to_bytes(8, "big") + body, "sha256")


def log(text: str) -> None:
    """Print a line of the launcher to stderr."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)
