"""Checksums of the files in folders, made and compared by several processes, each for its share of the bytes.

They lie beside those folders, in one small file per process. A flipped bit is found wherever it is: in a file, in the
checksums (which then do not agree, or are no JSON), or in a name.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK = 1 << 24  # bytes
THREADS = 4


def record(root: Path, parts: Sequence[str], to: Path, index: int = 0, count: int = 1) -> None:
    """Write the checksums of this process's share of all files under root/part to the folder `to`. Raises OSError."""
    mine = _share(_files(root, parts), index, count)
    to.mkdir(parents=True, exist_ok=True)
    (to / f"{index}-of-{count}.json").write_text(json.dumps(_sums(root, mine), separators=(",", ":")))


def recorded(to: Path) -> bool:
    """Whether there are checksums of all processes."""
    names = {file.name for file in to.glob("*.json")}
    counts = {int(found[1]) for name in names if (found := re.fullmatch(r"\d+-of-(\d+)\.json", name))}
    return any({f"{i}-of-{count}.json" for i in range(count)} <= names for count in counts)


def damage(root: Path, parts: Sequence[str], to: Path, index: int = 0, count: int = 1) -> str:
    """What is wrong with this process's share of the files, in a few words; "" if nothing."""
    try:
        return _damage(root, parts, to, index, count)
    except OSError as error:  # a disk that does not give what is on it
        return f"{error.filename or root} cannot be read ({error.strerror or error})"


def _damage(root: Path, parts: Sequence[str], to: Path, index: int, count: int) -> str:
    expected: dict[str, list[int]] = {}
    for file in sorted(to.glob("*-of-*.json")):
        try:
            expected |= {name: [int(size), int(crc)] for name, (size, crc) in json.loads(file.read_bytes()).items()}
        except (ValueError, TypeError, AttributeError):
            return f"{file.relative_to(root)} is damaged"
    sizes = _files(root, parts)
    for name in sorted(sizes.keys() ^ expected.keys()):
        return f"{name} is missing" if name in expected else f"{name} has no checksum"
    found = _sums(root, _share(sizes, index, count))
    return next((f"{name} is damaged" for name, sum in found.items() if sum != expected[name]), "")


def _files(root: Path, parts: Sequence[str]) -> dict[str, int]:
    """Path below root -> bytes, of all files."""
    paths = (path for part in parts for path in (root / part).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.stat().st_size for path in paths}


def _share(sizes: dict[str, int], index: int, count: int) -> list[str]:
    """The files of one of count processes, so that all have about as many bytes."""
    taken, mine = [0] * count, []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = taken.index(min(taken))
        taken[least] += sizes[name]
        if least == index:
            mine.append(name)
    return mine


def _sums(root: Path, names: Sequence[str]) -> dict[str, list[int]]:
    """Path -> bytes, CRC-32."""

    def one(name: str) -> list[int]:
        size = crc = 0
        with open(root / name, "rb") as file:
            while chunk := file.read(CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return [size, crc]

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
