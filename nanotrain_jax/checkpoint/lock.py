"""Lock a folder, so that two runs never write to the same one: one that all processes share, or one of a process."""

from __future__ import annotations

import fcntl
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import jax

from nanotrain_jax.checkpoint import checksums
from nanotrain_jax.distributed import ranks
from nanotrain_jax.distributed.processes import all_gather_text, on_all_processes

OF_ORPHANS = 15  # seconds; their watchdog looks for the launcher every 10


@contextmanager
def alone(key: str, folder: str | Path) -> Iterator[None]:
    """Hold an exclusive lock on an existing folder.

    Raises OSError, naming the key, if another run holds it, or if the folder is not shared by all processes.
    """
    path, index = file_of(key, folder), jax.process_index()
    token = all_gather_text(uuid.uuid4().hex)[0]
    with ExitStack() as stack:

        def acquire() -> None:
            stack.enter_context(held(key, folder, patience()))
            path.write_text(token)

        def check_shared() -> None:
            deadline = time.monotonic() + checksums.LAG
            while not (path.exists() and path.read_text() == token):
                if time.monotonic() > deadline:
                    text = f"{folder} of process {index} is not the folder of process 0"
                    raise OSError(f"{text}; choose a {key} on a file system that all hosts share")
                time.sleep(1)

        on_all_processes(acquire if index == 0 else lambda: None)
        on_all_processes(check_shared)
        yield


@contextmanager
def held(key: str, folder: str | Path, patience: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock on a folder in this process. Raises OSError, naming the key, if another one holds it for
    `patience` seconds more."""
    with open(file_of(key, folder), "a") as lock:
        deadline = time.monotonic() + patience
        try:
            while not _locked(lock, is_last=time.monotonic() >= deadline):
                time.sleep(1)
        except BlockingIOError:
            raise OSError(f"{folder} is in use by another run; stop it, or choose another {key}") from None
        except OSError as error:
            text = f"{folder} cannot be locked ({error.strerror}); mount its file system with locking (Lustre: flock)"
            raise OSError(f"{text}, or choose another {key}") from None
        yield


def _locked(lock: IO, is_last: bool) -> bool:
    """Try to lock a file, until the process ends, however it ends. Raises BlockingIOError if the last try fails."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if is_last:
            raise
        return False
    return True


def patience() -> float:
    """Return for how many seconds processes that ended may seem to hold a lock of this run: a file server keeps that of
    a host that it has lost, and after a launcher that was killed its processes end by themselves."""
    if ranks.launcher_pid() is None:
        return 0.0
    return 2 * checksums.LAG if ranks.is_restart() else OF_ORPHANS


def file_of(key: str, folder: str | Path) -> Path:
    """Return the file that is locked."""
    return Path(folder) / f".{key}.lock"
