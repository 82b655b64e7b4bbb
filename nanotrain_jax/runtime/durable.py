"""Files that survive a crash of the machine: what was written reaches the disk before it is relied on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, and on disk when this returns. Raises OSError."""
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file, whoever wrote it, is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk, where its file system can do that."""
    with suppress(OSError):
        sync(path)
