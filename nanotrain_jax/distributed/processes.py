"""Process bootstrap and agreement: rendezvous, and errors that all processes raise together (ranks: ranks.py)."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from nanotrain_jax.distributed.exit_codes import ENDED, HUNG
from nanotrain_jax.distributed.ranks import Process, without_proxy

# Texts in errors of JAX, gloo and NCCL, of several types, after the failure of another process.
PEER_FAILURES = ("Gloo ", "remote process exited", "UNAVAILABLE:", "DEADLINE_EXCEEDED:")
PEER_FAILURES += ("Connection reset", "Connection closed")
# Errors of disks and networks that a retry may resolve.
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET)
TRANSIENT_ERRNOS += (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)

T = TypeVar("T")
PIECE = 1024  # bytes of a text that processes exchange at once
LARGE_PIECE = 1 << 28  # bytes of an array that one process sends to all at once


class SharedError(OSError):
    """An error that all processes raise together, whichever met it (`on_all_processes`)."""


def initialize(
    process: Process, gpus: Sequence[int] = (), timeout: int = 300, absent: Callable[[], str] | None = None
) -> None:
    """Join the other processes, if any; call before the first use of a device.

    gpus: see `local_gpus`. CPU devices use gloo for collectives. timeout: seconds for the rendezvous; after it this
    process exits with HUNG: it waited. absent: says which processes give no sign, for that message; "": not known.
    """
    if process.count == 1:
        return
    this_process = f"error: process {process.index} of {process.count} (from {process.source})"
    address = process.coordinator or "process 0"

    def give_up(why: str) -> None:
        print(f"{this_process}: {why}", file=sys.stderr, flush=True)
        os._exit(HUNG)

    if process.coordinator and process.index == 0:
        try:  # gRPC would share the port with another run, or abort
            socket.create_server(("", int(address.rpartition(":")[2]))).close()
        except OSError as error:
            give_up(f"cannot listen at {address} ({os.strerror(error.errno)}); choose another port")
    message = f"rendezvous timeout: not all processes reached {address} within {timeout} s; "
    message += "check that all were started and can connect to this address"

    def end() -> None:
        missing = absent() if absent else ""
        give_up(f"{message}; {missing}" if missing else message)

    timer = threading.Timer(timeout, end)  # JAX itself would abort
    timer.daemon = True
    timer.start()
    with without_proxy(process.coordinator):
        jax.distributed.initialize(
            process.coordinator,
            process.count,
            process.index,
            local_device_ids=list(gpus),
            cluster_detection_method="deactivate" if process.coordinator else process.source,
            initialization_timeout=timeout + 60,
        )
    timer.cancel()


def all_gather_text(text: str) -> list[str]:
    """Return the text of each process, by rank; a barrier for all processes. Texts are cut at 1024 bytes."""
    if jax.process_count() == 1:
        return [text]
    row = np.zeros(PIECE, np.uint8)
    data = text.encode()[: row.size]
    row[: len(data)] = np.frombuffer(data, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in all_gather_rows(row)]


def all_gather_rows(row: np.ndarray) -> np.ndarray:
    """Return the array of each process, by rank, stacked; they have one shape. 64-bit numbers are cut to 32."""
    try:
        return multihost_utils.process_allgather(row)
    except ValueError as error:  # from gloo
        raise RuntimeError(f"another process failed: {error}") from None


def bytes_of(index: int, data: np.ndarray | None, size: int) -> np.ndarray:
    """Return the bytes that process `index` gives, uint8 [size], on all processes. data: ignored on the others."""
    if jax.process_count() == 1:
        return data
    found, is_source = np.zeros(size, np.uint8), jax.process_index() == index
    for first in range(0, size, LARGE_PIECE):
        part = data[first : first + LARGE_PIECE] if is_source else found[first : first + LARGE_PIECE]
        try:
            found[first : first + LARGE_PIECE] = multihost_utils.broadcast_one_to_all(part, is_source)
        except ValueError as error:  # from gloo
            raise RuntimeError(f"another process failed: {error}") from None
    return found


def of_first(text: str) -> str:
    """Return the text that process 0 gives, of any length, on all processes."""
    if jax.process_count() == 1:
        return text
    escaped = text.encode("unicode_escape").decode("ascii")  # cut anywhere, a character stays one
    count = int(all_gather_text(str(-(-len(escaped) // PIECE)))[0])
    pieces = [all_gather_text(escaped[PIECE * i : PIECE * (i + 1)])[0] for i in range(count)]
    return "".join(pieces).encode("ascii").decode("unicode_escape")


def is_peer_failure(error: Exception) -> bool:
    """True if the failure of another process caused this error."""
    return any(text in f"{error} {error.__cause__}" for text in PEER_FAILURES)


def is_transient(error: Exception) -> bool:
    """True if a retry may succeed: another process, a disk or a network failed."""
    lost = isinstance(error, (TimeoutError, ConnectionError)) or getattr(error, "errno", None) in TRANSIENT_ERRNOS
    return lost or is_peer_failure(error)


def exit_code(error: Exception) -> int:
    """Return the exit code after an error that a launcher may retry: HUNG unless it is of this process alone."""
    return HUNG if isinstance(error, SharedError) or is_peer_failure(error) else 1


def on_all_processes(work: Callable[[], T]) -> T:
    """Return work(), called by every process. If one raises ValueError or OSError, all disconnect and raise that text.

    Raises SharedError; with one process what work raises.
    """
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as raised:
        error = raised
    number = getattr(error, "errno", None) or 0
    text = "" if error is None else f"{number} {str(error) or repr(error)}"
    failures = [failure for failure in all_gather_text(text) if failure]
    if failures and jax.process_count() > 1:
        jax.distributed.shutdown()
        number, text = failures[0].split(" ", 1)
        error = SharedError(text)
        error.errno = int(number) or None
    if error is not None:
        raise error
    return result


def raise_on_all(text: str) -> NoReturn:
    """Raise ValueError (one process) or SharedError (several); every process must call this."""

    def fail() -> None:
        raise ValueError(text)

    on_all_processes(fail)


def exit_process(code: int) -> None:
    """Exit with this code. On failure do not wait for other processes, which may be lost; all end with 0 or ENDED."""
    for stream in sys.stdout, sys.stderr:
        stream.flush()
    if code not in (0, ENDED) and jax.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)
