"""Lock a folder, so that two runs never write to the same one: one that all processes share, or one of a process."""

from __future__ import annotations

import fcntl
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from nanotrain_jax.checkpoint import checksums
from nanotrain_jax.distributed.processes import all_gather_text, on_all_processes


@contextmanager
def alone(key: str, folder: str | Path) -> Iterator[None]:
    """Hold an exclusive lock on an existing folder.

    Raises OSError, naming the key, if another run holds it, or if the folder is not shared by all processes.
    """
    path, index = file_of(key, folder), jax.process_index()
    token = all_gather_text(uuid.uuid4().hex)[0]
    with ExitStack() as stack:

        def acquire() -> None:
            stack.enter_context(held(key, folder))
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
def held(key: str, folder: str | Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder in this process. Raises OSError, naming the key, if another one holds it."""
    with open(file_of(key, folder), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        except BlockingIOError:
            raise OSError(f"{folder} is in use by another run; stop it, or choose another {key}") from None
        except OSError as error:
            text = f"{folder} cannot be locked ({error.strerror}); mount its file system with locking (Lustre: flock)"
            raise OSError(f"{text}, or choose another {key}") from None
        yield


def file_of(key: str, folder: str | Path) -> Path:
    """Return the file that is locked."""
    return Path(folder) / f".{key}.lock"
