"""Files that are read in parts: of this machine, or of an object store (gs://, s3://, az://) by fsspec.

A path of a store is an `etils.epath.Path`; the libraries are imported when there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain_jax.config.values import is_remote


def folder_at(where: str) -> Path:
    """Return a folder, e.g. s3://bucket/web. Raises ValueError if what reads it is not installed."""
    if not is_remote(where):
        return Path(where)
    try:
        import fsspec
        from etils import epath

        fsspec.get_filesystem_class(where.partition(":")[0])
    except ImportError as error:
        raise ValueError(
            f"{where} is in an object store, and what reads it is not installed ({error}); pip install "
            "'nanotrain_jax[remote]', or mount the folder and give its path"
        ) from None
    return epath.Path(where)


def in_one_line(read: Callable) -> Callable:
    """Make what a store raises an OSError that names the path; a missing file stays a FileNotFoundError."""

    @wraps(read)
    def reading(path: Path, *rest: int) -> Any:
        if isinstance(path, Path):
            return read(path, *rest)
        try:
            return read(path, *rest)
        except FileNotFoundError:
            raise
        except Exception as error:  # stores have exceptions of their own
            raise OSError(f"{path} cannot be read ({type(error).__name__}: {error})") from None

    return reading


@in_one_line
def size(path: Path) -> int:
    """Return the bytes of a file. Raises OSError."""
    if isinstance(path, Path):
        return path.stat().st_size
    system, name = _system_of(path)
    return system.size(name)


@in_one_line
def part(path: Path, first: int, count: int) -> bytes:
    """Return so many bytes of a file, fewer at its end. Raises OSError."""
    if not isinstance(path, Path):
        system, name = _system_of(path)
        return system.cat_file(name, start=first, end=first + count)
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), count, first)


@in_one_line
def content(path: Path) -> bytes:
    """Return a file. Raises OSError."""
    if isinstance(path, Path):
        return path.read_bytes()
    system, name = _system_of(path)
    return system.cat_file(name)


def exists(path: Path) -> bool:
    """True if a file is there. Raises OSError."""
    try:
        return size(path) >= 0
    except FileNotFoundError:
        return False


def _system_of(path: Path) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(str(path))


class Numbers:
    """One-dimensional numbers in a file of a store: a slice reads its bytes and no others."""

    def __init__(self, path: Path, dtype: str, first: int, count: int):
        """first: byte of the first."""
        self.path, self.dtype, self.first, self.count = path, np.dtype(dtype), first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, chosen: slice) -> np.ndarray:
        start, stop, _ = chosen.indices(self.count)
        width = self.dtype.itemsize
        found = part(self.path, self.first + start * width, max(stop - start, 0) * width) if stop > start else b""
        if len(found) != max(stop - start, 0) * width:
            raise OSError(f"{self.path} ends within its numbers: it was truncated; copy the file again")
        return np.frombuffer(found, self.dtype)


def numbers(path: Path, dtype: str, first: int, count: int) -> np.ndarray | Numbers:
    """Return the numbers from byte `first` of a file on: memory-mapped, or of a store read slice by slice."""
    if isinstance(path, Path):
        return np.memmap(path, dtype, "r", first, (count,)).view(np.ndarray)  # whose slices are made faster
    return Numbers(path, dtype, first, count)
