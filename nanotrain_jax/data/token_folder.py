"""A token folder, second format: shards, and a header that is all one needs to open them. Plain numpy.

    header.json      format, tokenizer, vocabulary, dtype, counts of each shard, its own SHA-256
    00000.tokens ... of each shard: see shards.py
    tokenizer.json   the tokenizer, unless it is `bytes`, and the files beside it that name its end tokens

Opening it takes time and memory for each shard, none for documents or tokens. A header tells what is held out: the
texts whose hash is below a number, decided when they were prepared, so those that are appended later do not change it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from nanotrain_jax.config.schema import Data
from nanotrain_jax.config.values import Verify
from nanotrain_jax.data import shards, stored
from nanotrain_jax.data.shard_checks import check_content, check_heads
from nanotrain_jax.data.shards import Counts, Mapped, Place
from nanotrain_jax.data.windows import Windows

FORMAT = "nanotrain_jax tokens 2"
HEADER = "header.json"
PLAN = "plan.json"  # what a preparation that is not finished writes
MOST_ROWS = 1 << 32  # indices that grain shuffles
READERS = 16  # threads
SAMPLED = 32  # shards whose checksums are sampled, a block of each file


class Header(BaseModel):
    """header.json. end: id of the end token; held_out_below: texts with a smaller hash are held out, about
    val_fraction of the tokens; preparations: that wrote shards, in order; wholes: hashes of texts of which documents
    are pieces (not in older folders)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["nanotrain_jax tokens 2"] = FORMAT
    tokenizer: str
    vocab_size: PositiveInt
    dtype: Literal["<u2", "<u4"]
    end: int | None
    val_fraction: float = Field(ge=0, lt=1)
    held_out_below: int = Field(ge=0, le=shards.KEYS)
    preparations: list[str]
    shards: list[Counts]
    wholes: list[int] = []

    def total(self, name: str) -> int:
        """Return a count over all shards."""
        return sum(getattr(shard, name) for shard in self.shards)

    @property
    def replaced(self) -> int:
        """See Corpus."""
        return self.total("replaced")

    @property
    def has_ends(self) -> bool:
        """See Corpus."""
        return self.end is not None

    @property
    def fingerprint(self) -> str:
        """Identify the shards, their order and the tokenizer."""
        return _sum(self.model_dump(exclude={"wholes"}))[:16]

    def places(self, folder: Path) -> list[tuple[Place, Counts]]:
        """Return where each shard is, and its counts."""
        numbered = enumerate(self.shards)
        return [(Place(folder, n, one.preparation, self.tokenizer, self.dtype), one) for n, one in numbered]


class ShardWindows(Windows):
    """Sequences of one side of the documents of a folder, in the order of its shards: see Windows.

    A token is found by two bisections: the shard that has it, in an array of one number per shard; its document, in
    the memory-mapped index of that shard.
    """

    def __init__(self, mapped: Sequence[Mapped], sides: Sequence[str], seq_len: int):
        """sides: "train", "held out", or both: of each shard, the documents that the stream has."""
        self.mapped, self.sides, self.seq_len = mapped, sides, seq_len
        held_out = np.array([shard.counts.held_out_tokens for shard in mapped], np.int64)
        tokens = np.array([shard.counts.tokens for shard in mapped], np.int64)
        self.firsts = np.zeros_like(tokens) if "train" in sides else tokens - held_out  # in each shard
        stops = tokens if "held out" in sides else tokens - held_out
        self.ends = np.cumsum(stops - self.firsts)  # of the shards in this stream
        self.total = int(self.ends[-1]) if len(self.ends) else 0

    def parts(self, start: int, stop: int) -> Iterator[tuple[Mapped, int, int, int]]:
        """Yield for each shard in start .. stop of the stream: the shard, from where to where in it, where in the
        stream the first is."""
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            take = min(stop, int(self.ends[shard])) - start
            before = int(self.ends[shard - 1]) if shard else 0
            first = int(self.firsts[shard]) + start - before
            if take:
                yield self.mapped[shard], first, first + take, start
            start, shard = start + take, shard + 1

    @property
    def count(self) -> int:
        """As of Windows."""
        found = (self.documents(shard) for shard in range(self.stretches))
        return sum(mine.stop - mine.start for mine in found)

    @property
    def chosen(self) -> str:
        """As of Windows."""
        return f"{self.total} tokens"

    def texts(self) -> Iterator[np.ndarray]:
        """As of Windows, shard by shard."""
        yield from (shard.keys[self.documents(number)] for number, shard in enumerate(self.mapped))

    def without(self, held: np.ndarray, name: str) -> ShardWindows:
        """As of Windows: the documents of a folder are fixed. Reads 8 bytes for each."""
        count = sum(int(np.isin(found, held).sum()) for found in self.texts()) if len(held) else 0
        if count:
            raise ValueError(
                f"data: the token folder {name} trains on {count:,} documents that another source or data.validation "
                "holds out; take them out of one of the two, or mix its text instead of the folder"
            )
        return self

    @property
    def readers(self) -> int:
        """As of Windows: a store answers many at once."""
        return 1 if isinstance(self.mapped[0].place.folder, Path) else READERS

    @property
    def stretches(self) -> int:
        """As of Windows: the shards."""
        return len(self.mapped)

    def documents(self, shard: int) -> slice:
        """Return which documents of a shard are in the stream."""
        counts = self.mapped[shard].counts
        first = counts.documents - counts.held_out_documents
        return slice(0 if "train" in self.sides else first, counts.documents if "held out" in self.sides else first)

    def sizes(self, stretch: int) -> np.ndarray:
        """As of Windows. Reads 8 bytes per document."""
        ends = self.mapped[stretch].ends[self.documents(stretch)]
        return np.diff(ends, prepend=self.firsts[stretch])

    def span(self, stretch: int, document: int) -> tuple[int, int]:
        """As of Windows."""
        shard, at = self.mapped[stretch], self.documents(stretch).start + document
        moved = (int(self.ends[stretch - 1]) if stretch else 0) - int(self.firsts[stretch])
        first = int(shard.ends[at - 1]) if document else int(self.firsts[stretch])
        return first + moved, int(shard.ends[at]) + moved

    def document_starts(self, i: int) -> np.ndarray:
        """As of Windows."""
        first = int(i) * self.seq_len
        starts = np.zeros(self.seq_len + 1, np.int32)
        for shard, begin, stop, place in self.parts(first, first + self.seq_len):
            found = np.searchsorted(shard.ends, (begin, stop), side="right")
            positions = shard.ends[slice(*found)] - begin + place - first
            starts[positions] = positions
        return np.maximum.accumulate(starts)

    def slice(self, start: int, length: int) -> np.ndarray:
        """As of Windows."""
        parts = self.parts(start, min(start + length, self.total))
        found = [shard.tokens[begin:stop] for shard, begin, stop, _ in parts]
        return np.concatenate(found).astype(np.int32)


def is_sharded(folder: Path) -> bool:
    """True for a folder of the second format, also one that is not finished; no other is judged."""
    try:
        return FORMAT.encode() in stored.part(folder / HEADER, 0, 200)
    except FileNotFoundError:
        return stored.exists(folder / PLAN)


def write_header(folder: Path, header: Header) -> None:
    """Write header.json atomically. Raises OSError."""
    content = header.model_dump()
    shards.write_text(folder / HEADER, json.dumps({"format": FORMAT, "sha256": _sum(content)} | content) + "\n")


def _sum(content: dict) -> str:
    return shards.digest(json.dumps(content, sort_keys=True).encode())


def read_header(folder: Path, name: str) -> Header:
    """Read and verify header.json. name: of the folder in messages. Raises ValueError or OSError."""
    command = "python -m nanotrain_jax.prepare"
    if not stored.exists(folder / HEADER) and stored.exists(folder / PLAN):
        raise ValueError(f"{name} is not finished; give the same {command} command again to continue it")
    try:
        content = json.loads(stored.content(folder / HEADER))
        expected = content.pop("sha256")
        header = Header.model_validate(content)
        intact = expected == _sum(content)
    except (ValueError, KeyError, AttributeError) as error:
        wrong = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        raise ValueError(f"{name} is damaged: {HEADER}: {wrong}; create it again with {command}") from None
    if not intact:
        raise ValueError(
            f"{name} is damaged: {HEADER} does not match its SHA-256: it was modified; create it again with {command}"
        )
    return header


def read(folder: Path, verify: Verify = "sample") -> tuple[Header, list[Mapped]]:
    """Open a folder: read its header, and of each shard the sizes and first bytes of its files.

    verify: the rest by checksums, all of it, or a block of each file of at most SAMPLED shards, other ones at every
    call. Raises ValueError in one line if anything is not what was written, or OSError.
    """
    name = f"data.source='tokens:{folder}'"
    header = read_header(folder, name)
    found = header.places(folder)
    sample = np.random.default_rng() if verify == "sample" else None
    chosen = found if verify != "off" else []
    if sample is not None and len(found) > SAMPLED:
        chosen = [found[number] for number in sample.choice(len(found), SAMPLED, replace=False)]
    with ThreadPoolExecutor(READERS) as pool:  # they wait for the disk, or compute checksums
        list(pool.map(check_heads, (found[i::READERS] for i in range(READERS))))
        list(pool.map(partial(check_content, sample=sample), *zip(*chosen, strict=True)))
    return header, [Mapped(place, counts) for place, counts in found]


def sides(folder: Path, config: Data) -> tuple[Header, ShardWindows, ShardWindows]:
    """Open a folder -> its header, the sequences to train on, and those held out; with data.val_fraction=0 all are
    trained on. Raises ValueError or OSError."""
    header, mapped = read(folder, config.verify)
    if config.val_fraction not in (0, header.val_fraction, Data.model_fields["val_fraction"].default):
        raise ValueError(
            f"data.val_fraction={config.val_fraction} with data.source={config.source!r}: what is held out was decided "
            f"by prepare, --val-fraction={header.val_fraction}; leave the key out, or use 0 to train on everything"
        )
    chosen = (["train"], ["held out"]) if config.val_fraction else (["train", "held out"], [])
    train, val = (ShardWindows(mapped, side, config.seq_len) for side in chosen)
    need = config.seq_len + 1
    for name, side in ("train on", train), ("hold out", val):
        if not len(side) and (side is train or config.val_fraction):
            raise ValueError(
                f"data.source={config.source!r} has {side.total} tokens to {name}, but data.seq_len={config.seq_len} "
                f"needs at least {need}; prepare more text or with a larger --val-fraction, or use data.val_fraction=0"
            )
    if len(train) > MOST_ROWS:
        raise ValueError(
            f"data.source={config.source!r} has {len(train):,} rows of data.seq_len={config.seq_len}; at most "
            f"{MOST_ROWS:,} are shuffled; use a longer data.seq_len"
        )
    return header, train, val
