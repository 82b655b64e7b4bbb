"""Checksums of the files of a checkpoint: several processes record and verify them, each for its share of the bytes.

They are stored beside the folders, with a list of all files as process 0 sees them: another host may not see all of
them yet. A flipped bit is detected anywhere: in a file, a checksum, a name or the list. Checksums are written only
after the files they cover are on disk.
"""

from __future__ import annotations

import errno
import json
import re
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanotrain_jax.checkpoint import durable
from nanotrain_jax.distributed.processes import TRANSIENT_ERRNOS

CHUNK = 1 << 24  # bytes
THREADS = 4
ALL = "files.json"
OF_FOLDER = "nanotrain_checksums.json"  # in a model folder that we wrote: path -> [bytes, CRC-32] of its other files
# Errors of this process, and of a network; not of a disk (EIO).
OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
NOT_DAMAGE = {*OURS, *TRANSIENT_ERRNOS} - {errno.EIO}
LAG = 90  # seconds until a shared file system shows another host's writes, at most


def record(root: Path, parts: Sequence[str], to: Path, index: int = 0, count: int = 1) -> None:
    """Write the checksums of this process's share of all files under root/part to the folder `to`. Raises OSError.

    All processes call it, once the files are complete. `to` must not contain earlier checksums.
    """
    if index == 0:
        to.mkdir(parents=True, exist_ok=True)
        _write(to / ALL, files(root, parts))
        for folder in [*_folders(root, parts), to.parent, root]:
            durable.sync_folder(folder)
    _wait(to / ALL)
    names = json.loads((to / ALL).read_bytes())[index::count]
    for name in names:
        durable.sync(root / name)
    _write(to / f"{index}-of-{count}.json", sums(root, names))


def wait_for_all(to: Path, count: int, seconds: float) -> None:
    """Wait until all processes have written the checksums of their shares. Raises TimeoutError."""
    for index in range(count):
        _wait(to / f"{index}-of-{count}.json", f"process {index}", seconds)


def recorded(to: Path) -> bool:
    """True if the checksums of all processes exist."""
    names = {file.name for file in to.glob("*.json")}
    counts = {int(match[1]) for name in names if (match := re.fullmatch(r"\d+-of-(\d+)\.json", name))}
    return any({ALL, *(f"{i}-of-{count}.json" for i in range(count))} <= names for count in counts)


def damage(root: Path, to: Path, index: int = 0, count: int = 1) -> str:
    """Verify this process's share of the files -> what is damaged, in a few words; "" if nothing.

    A file that is missing, or that its disk cannot read, is damaged. Raises other OSErrors: of a network, a limit of
    this process.
    """
    expected: dict[str, list[int]] = {}
    try:
        for file in sorted(to.glob("*-of-*.json")):
            expected |= {name: [int(size), int(crc)] for name, (size, crc) in json.loads(file.read_bytes()).items()}
        names = json.loads((to / ALL).read_bytes())
        if expected.keys() != set(names):
            return f"{to.relative_to(root)} is damaged"
        actual = sums(root, names[index::count])
    except OSError as error:
        if error.errno in NOT_DAMAGE:
            raise
        return f"{error.filename} cannot be read ({error.strerror})"
    except (ValueError, TypeError, AttributeError):
        return f"{to.relative_to(root)} is damaged"
    return next((f"{name} is damaged" for name, sum in actual.items() if sum != expected[name]), "")


def seal(folder: Path) -> None:
    """Write the checksums of all files of a model folder into it. Raises OSError."""
    _write(folder / OF_FOLDER, sums(folder, [name for name in files(folder, [""]) if name != OF_FOLDER]))


def check(folder: Path, index: int = 0, count: int = 1) -> None:
    """Verify this process's share of the files of a model folder, if it has checksums (`seal`).

    Raises ValueError or OSError in one line.
    """
    path = folder / OF_FOLDER
    if not path.exists():
        return
    remedy = f"copy the folder again, or remove {OF_FOLDER} if you changed it yourself"
    try:
        expected = {name: [int(size), int(crc)] for name, (size, crc) in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged; {remedy}") from None
    missing = sorted(expected.keys() - {*files(folder, [""])})  # also of a name that leads out of the folder
    if missing:
        raise ValueError(f"{folder} has no file {missing[0]}, which its {OF_FOLDER} names; {remedy}")
    actual = sums(folder, [*expected][index::count])
    wrong = next((name for name, sum in actual.items() if sum != expected[name]), None)
    if wrong:
        raise ValueError(f"{folder / wrong} is not as it was written, by its checksum in {OF_FOLDER}; {remedy}")


def _wait(path: Path, writer: str = "process 0", seconds: float = LAG) -> None:
    """Wait until another process has written a file. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}, which {writer} writes, did not appear within {seconds:g} s")
        time.sleep(0.1)


def _write(path: Path, content: dict | list) -> None:
    durable.write(path, json.dumps(content, separators=(",", ":")).encode())


def _folders(root: Path, parts: Sequence[str]) -> list[Path]:
    """Return all folders at and below root/part, and their parents."""
    tops = [root / part for part in parts]
    return [path for top in tops for path in [top.parent, top, *top.rglob("*")] if path.is_dir()]


def files(root: Path, parts: Sequence[str]) -> list[str]:
    """Return the paths below root of all files, largest first: names[i::n] have about the same number of bytes."""
    paths = [path for part in parts for path in (root / part).rglob("*") if path.is_file()]
    return [str(path.relative_to(root)) for path in sorted(paths, key=lambda path: (-path.stat().st_size, path))]


def sums(root: Path, names: Sequence[str]) -> dict[str, list[int]]:
    """Return path -> [bytes, CRC-32]. Raises OSError."""

    def one(name: str) -> list[int]:
        size = crc = 0
        with open(root / name, "rb") as file:
            while chunk := file.read(CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return [size, crc]

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
