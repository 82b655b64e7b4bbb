"""Rows of whole documents by best fit, for pre-training: `data.pack=best_fit` (Ding et al. 2024, arXiv 2404.10830).

A document of n tokens has n - 1 places, each with the next token as its target. Of one with more than seq_len places
every seq_len are a row, and what is left, its rest, shares a row with others. So each token but the first of a document
is a target once in an epoch, and no place but those of padding lacks one.

Which sizes share a row follows from how many rests there are of each. So the rows are known when the lengths of all
documents have been read, 8 bytes each. Which document is in a row, 4 bytes each, is found shard by shard when a row
needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from nanotrain_jax.data.packing import best_fit, filled
from nanotrain_jax.data.windows import Windows

READERS = 16  # threads
MOST_COUNTS = 1 << 29  # of rests, by stretch and size


class Counted(NamedTuple):
    """The documents of a stretch. rows: that have one document only; cut: documents longer than a row; rests: of
    each size, uint32 [seq_len]."""

    documents: int
    rows: int
    cut: int
    rests: np.ndarray


class Order(NamedTuple):
    """The documents of a stretch. by_rest: the smallest rest first; begins: where in it those of a size begin, uint32
    [seq_len]; long: documents that have rows to themselves; ends: of these rows, one after another."""

    by_rest: np.ndarray
    begins: np.ndarray
    long: np.ndarray
    ends: np.ndarray


class PackedDocuments:
    """Random access to rows of documents: item i is {"inputs", "targets", "starts"}, each int32 [seq_len] (`filled`).

    The first rows have one document each. Memory: 4 bytes for each document, of those stretches (shards) that rows were
    read from, and 8 seq_len bytes for each stretch.
    """

    def __init__(self, windows: Windows):
        """Count the documents by length. Raises ValueError."""
        self.windows, self.seq_len, self.orders = windows, windows.seq_len, {}
        if self.seq_len * windows.stretches > MOST_COUNTS:
            raise ValueError(
                f"data.pack=best_fit with data.seq_len={self.seq_len} counts the documents of {windows.stretches} "
                f"shards by length, which takes {self.seq_len * windows.stretches >> 28} GB in each process; use "
                "data.pack=concatenate"
            )
        with ThreadPoolExecutor(READERS) as pool:
            counted = list(pool.map(self.count, range(windows.stretches)))
        self.documents = sum(one.documents for one in counted)
        self.cut = sum(one.cut for one in counted)
        self.own = np.cumsum([one.rows for one in counted], dtype=np.int64)  # up to a stretch
        self.rests = np.array([one.rests for one in counted], np.uint32)  # of each size, up to a stretch
        np.cumsum(self.rests, 0, out=self.rests)
        self.alike = best_fit(self.rests[-1], self.seq_len)
        self.ends = np.cumsum([self.own[-1], *(alike.rows for alike in self.alike)])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def fill(self) -> float:
        """The share of the places of all rows that is no padding."""
        rests = np.arange(self.seq_len) @ self.rests[-1].astype(np.int64)
        return (int(self.own[-1]) * self.seq_len + int(rests)) / max(len(self) * self.seq_len, 1)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return filled((self.places(*span) for span in self.spans(int(i))), self.seq_len)

    def places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of places of the stream."""
        tokens = self.windows.slice(start, stop - start + 1)
        return tokens[:-1], tokens[1:]

    def spans(self, i: int) -> Iterator[tuple[int, int]]:
        """Yield from where to where in the stream the places of each document in row i are."""
        kind = int(np.searchsorted(self.ends, i, side="right"))
        if not kind:
            yield self.of_long(i)
            return
        row = i - int(self.ends[kind - 1])
        for size, count, first in self.alike[kind - 1].shares:
            yield from (self.of_rest(size, first + row * count + k) for k in range(count))

    def of_long(self, i: int) -> tuple[int, int]:
        """Return the places of row i, which has one document."""
        stretch = int(np.searchsorted(self.own, i, side="right"))
        order, row = self.order(stretch), i - (int(self.own[stretch - 1]) if stretch else 0)
        found = int(np.searchsorted(order.ends, row, side="right"))
        row -= int(order.ends[found - 1]) if found else 0
        start = self.windows.span(stretch, int(order.long[found]))[0] + row * self.seq_len
        return start, start + self.seq_len

    def of_rest(self, size: int, number: int) -> tuple[int, int]:
        """Return the places of a rest, the number-th of those of its size."""
        upto = self.rests[:, size]
        stretch = int(np.searchsorted(upto, number, side="right"))
        order, number = self.order(stretch), number - (int(upto[stretch - 1]) if stretch else 0)
        document = order.by_rest[int(order.begins[size]) + number]
        stop = self.windows.span(stretch, int(document))[1] - 1
        return stop - size, stop

    def divided(self, stretch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each document of a stretch the rows it has to itself, and the size of its rest."""
        return np.divmod(np.maximum(self.windows.sizes(stretch) - 1, 0), self.seq_len)

    def count(self, stretch: int) -> Counted:
        """Count the documents of a stretch."""
        rows, rests = self.divided(stretch)
        counts = np.bincount(rests, minlength=self.seq_len).astype(np.uint32)
        counts[0] = 0  # nothing is left of them
        return Counted(len(rows), int(rows.sum()), int((rows + (rests > 0) > 1).sum()), counts)

    def order(self, stretch: int) -> Order:
        """Return the order of the documents of a stretch, and keep it."""
        if stretch not in self.orders:
            rows, rests = self.divided(stretch)
            small = rests.astype(np.uint16 if self.seq_len <= 1 << 16 else np.uint32)  # are sorted faster
            counts, long = np.bincount(small, minlength=self.seq_len), np.flatnonzero(rows).astype(np.uint32)
            self.orders[stretch] = Order(
                np.argsort(small, kind="stable").astype(np.uint32),
                (np.cumsum(counts) - counts).astype(np.uint32),
                long,
                np.cumsum(rows[long]),
            )
        return self.orders[stretch]
