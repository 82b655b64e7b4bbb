"""Shards of a token folder, second format: names, checksums, writing one. Plain numpy.

Shard 00000 is three files. The first two begin with HEAD bytes of text that name them: kind, number, preparation,
tokenizer.
    00000.tokens      token ids, little-endian, of the training documents, then of those that are held out
    00000.documents   where each document ends in the tokens of its shard, int64; then the hash of its text, uint64
    00000.json        counts, SHA-256 of each BLOCK bytes of both. It is written last: a shard with it is finished
"""

from __future__ import annotations

import hashlib
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from nanotrain_jax.data import stored
from nanotrain_jax.data.stored import Numbers

HEAD = 192  # bytes
BLOCK = 1 << 20  # bytes
KINDS = TOKENS, DOCUMENTS = "tokens", "documents"
DTYPES = "<u2", "<u4"
KEYS = 1 << 64  # hashes of texts are below


class Counts(BaseModel):
    """Of a shard. held_out_*: of the last documents, which are for validation; replaced: see Corpus. sums: SHA-256 of
    00000.json in the folder's header."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    preparation: str
    tokens: NonNegativeInt
    documents: NonNegativeInt
    held_out_tokens: NonNegativeInt
    held_out_documents: NonNegativeInt
    replaced: NonNegativeInt
    sums: str = ""


class Finished(BaseModel):
    """00000.json. skipped: bad lines, by kind. blocks: kind -> SHA-256 of each block of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    counts: Counts
    held_out_below: NonNegativeInt
    skipped: dict[str, NonNegativeInt]
    blocks: dict[Literal["tokens", "documents"], list[str]]


class Place(NamedTuple):
    """Where a shard is, and what its files say of themselves."""

    folder: Path
    number: int
    preparation: str
    tokenizer: str
    dtype: str

    def path(self, kind: str) -> Path:
        """Return the path of a file of the shard."""
        return self.folder / f"{self.number:05}.{kind}"

    def head(self, kind: str) -> bytes:
        """Return the first bytes of a file of the shard."""
        text = f"nanotrain_jax tokens 2: {kind} of shard {self.number:05} of {self.preparation}, {self.tokenizer}"
        return text.encode()[: HEAD - 1].ljust(HEAD - 1) + b"\n"

    def size(self, kind: str, counts: Counts) -> int:
        """Return the bytes of a file of the shard."""
        return HEAD + (counts.tokens * int(self.dtype[-1]) if kind == TOKENS else counts.documents * 16)


class Mapped:
    """The arrays of a shard, memory-mapped when they are first read (of a store see stored.py). tokens [tokens], ends
    and keys [documents]."""

    def __init__(self, place: Place, counts: Counts):
        self.place, self.counts = place, counts

    @cached_property
    def tokens(self) -> np.ndarray | Numbers:
        """Token ids."""
        return stored.numbers(self.place.path(TOKENS), self.place.dtype, HEAD, self.counts.tokens)

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each document ends."""
        return self._whole("<i8", HEAD)

    @cached_property
    def keys(self) -> np.ndarray:
        """Hash of the text of each document."""
        return self._whole("<u8", HEAD + 8 * self.counts.documents)

    def _whole(self, dtype: str, first: int) -> np.ndarray:
        """Of a store all are read at once: bisections look at some here and there."""
        found = stored.numbers(self.place.path(DOCUMENTS), dtype, first, self.counts.documents)
        return found if isinstance(found, np.ndarray) else found[:]


Document = tuple[np.ndarray, int, int]  # token ids, hash of the text, replacements: as corpus.encoded yields


def threshold(documents: list[Document], fraction: float) -> int:
    """Return the hash below which texts are held out: those with the smallest, until they have the fraction of tokens.

    One text at least is held out, and one is not, where there are two.
    """
    keys, group = np.unique(np.array([key for _, key, _ in documents], np.uint64), return_inverse=True)
    sizes = np.bincount(group, [len(ids) for ids, _, _ in documents])
    if not fraction or len(keys) < 2:
        return 0
    count = int(np.searchsorted(np.cumsum(sizes), fraction * sizes.sum())) + 1
    return int(keys[min(count, len(keys) - 1)])


def write(place: Place, documents: Iterable[Document], held_out_below: int, skipped: dict[str, int]) -> Finished:
    """Write a shard, file by file, each atomically. Memory: 16 bytes per document. Raises OSError.

    skipped: read after the documents.
    """
    sides = [Side(), Side()]
    replaced = 0
    partial = [place.path(kind + ".partial") for kind in (TOKENS, "held_out", DOCUMENTS)]
    try:
        with open(partial[0], "wb") as train, open(partial[1], "wb+") as held_out:
            train.write(place.head(TOKENS))
            for ids, key, count in documents:
                is_held_out = key < held_out_below
                (held_out if is_held_out else train).write(ids.tobytes())
                sides[is_held_out].add(len(ids), key)
                replaced += count
            held_out.seek(0)
            shutil.copyfileobj(held_out, train)
        with open(partial[2], "wb") as index:
            index.write(place.head(DOCUMENTS))
            write_index(index, sides)
        partial[0].rename(place.path(TOKENS))
        partial[2].rename(place.path(DOCUMENTS))
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    counts = Counts(
        preparation=place.preparation,
        tokens=sum(side.tokens for side in sides),
        documents=sum(len(side.keys) for side in sides),
        held_out_tokens=sides[1].tokens,
        held_out_documents=len(sides[1].keys),
        replaced=replaced,
    )
    blocks = {kind: [digest(block) for block in blocks_of(place.path(kind))] for kind in KINDS}
    found = Finished(counts=counts, held_out_below=held_out_below, skipped=skipped, blocks=blocks)
    write_text(place.path("json"), found.model_dump_json() + "\n")
    return found


class Side:
    """Documents of one side of the split: where each ends, and its hash."""

    def __init__(self) -> None:
        self.tokens, self.ends, self.keys = 0, array("q"), array("Q")

    def add(self, size: int, key: int) -> None:
        """Add a document."""
        self.tokens += size
        self.ends.append(self.tokens)
        self.keys.append(key)


def write_index(file: BinaryIO, sides: list[Side]) -> None:
    """Write where the documents of both sides end, one side behind the other, and their hashes."""
    train, held_out = (np.frombuffer(side.ends, np.int64) for side in sides)
    file.write(train.astype("<i8").tobytes() + (held_out + sides[0].tokens).astype("<i8").tobytes())
    file.write(b"".join(np.frombuffer(side.keys, np.uint64).astype("<u8").tobytes() for side in sides))


def finished(place: Place) -> Finished | None:
    """Return what 00000.json says if the shard is finished and its files are whole, by size and checksum; else None."""
    try:
        found = Finished.model_validate_json(place.path("json").read_bytes())
        sizes = all(place.path(kind).stat().st_size == place.size(kind, found.counts) for kind in KINDS)
    except (FileNotFoundError, ValidationError):
        return None
    is_whole = sizes and found.counts.preparation == place.preparation and not damaged(place, found)
    return found if is_whole else None


def damaged(place: Place, found: Finished, sample: np.random.Generator | None = None) -> str | None:
    """Return the name of a file with a block that is not the one that was written; None if there is none.

    sample: look at one block of each file only, which it chooses. Reads a block at a time.
    """
    for kind in KINDS:
        sums = found.blocks[kind]
        chosen = range(len(sums)) if sample is None else [int(sample.integers(len(sums)))]
        blocks = map(digest, blocks_of(place.path(kind), chosen))
        if any(block != sums[number] for number, block in zip(chosen, blocks, strict=True)):
            return place.path(kind).name
    return None


def blocks_of(path: Path, chosen: Iterable[int] | None = None) -> Iterator[bytes]:
    """Yield blocks of a file: all, or the chosen ones."""
    numbers = range(-(-stored.size(path) // BLOCK)) if chosen is None else chosen
    yield from (stored.part(path, number * BLOCK, BLOCK) for number in numbers)


def digest(content: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, readable as UTF-8. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
