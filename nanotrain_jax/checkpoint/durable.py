"""Durable file writes, by fsync: they survive a crash of the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, and durably once this returns. Raises OSError."""
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file is on disk, whichever process wrote it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the entries of a folder are on disk, if its file system supports that."""
    with suppress(OSError):
        sync(path)
