"""Items in rows by best fit: which share a row, and rows of examples. Plain numpy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nanotrain_jax.data.examples import Examples


class Packed:
    """Random access to rows of examples: item i is {"inputs", "targets", "starts"}, each int32 [seq_len] (`filled`).

    An example has a place for each of its tokens. targets: the next token of the example where it is learned.
    """

    together = 1  # examples that share a row, one after another

    def __init__(self, examples: Examples, chosen: np.ndarray, seq_len: int, packs: bool):
        """chosen: indices of examples."""
        self.examples, self.seq_len = examples, seq_len
        chosen = chosen.reshape(-1, self.together)
        sizes = examples.sizes[chosen].sum(1)
        order, ends = in_rows(sizes, seq_len) if packs else (np.arange(len(sizes)), np.arange(1, len(sizes) + 1))
        self.members, self.ends = chosen[order].reshape(-1), ends * self.together  # row by row

    def __len__(self) -> int:
        return len(self.ends)

    def of_row(self, i: int) -> np.ndarray:
        """Return the examples of a row."""
        return self.members[self.ends[int(i) - 1] if i else 0 : self.ends[int(i)]]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return filled(map(self.places, self.of_row(i)), self.seq_len)

    def places(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of an example."""
        tokens, learned = self.examples[example]
        return tokens, np.append(np.where(learned[1:], tokens[1:].astype(np.int32), -1), -1)


def filled(parts: Iterable[tuple[np.ndarray, np.ndarray]], seq_len: int) -> dict[str, np.ndarray]:
    """Return a row of parts, each to itself: their inputs, their targets (-1: none), and of each place where its part
    begins, int32 [seq_len]. What is left is padding: token 0, no targets, apart from the parts."""
    row = {name: np.full(seq_len, empty, np.int32) for name, empty in ROW.items()}
    at = 0
    for inputs, targets in parts:
        stop = at + len(inputs)
        row["inputs"][at:stop] = inputs
        row["targets"][at:stop] = targets
        row["starts"][at:stop] = at
        at = stop
    row["starts"][at:] = at
    return row


ROW = {"inputs": 0, "targets": -1, "starts": 0}


class Share(NamedTuple):
    """Items of one size in rows that are alike: how many a row has, and how many of that size are in rows before."""

    size: int
    count: int
    first: int = 0


class Alike(NamedTuple):
    """Rows of items of the same sizes, the largest first."""

    rows: int
    shares: tuple[Share, ...] = ()


def best_fit(counts: np.ndarray, capacity: int) -> list[Alike]:
    """Put items in rows, the largest first, each in the row that it leaves least room in (best fit decreasing, Johnson
    et al. 1974: at most 11/9 of the fewest rows, and one; of documents of pre-training: Ding et al. 2024, arXiv
    2404.10830).

    counts: items of each size, [at most capacity + 1]. The same counts give the same rows. Which of the items of a size
    is where does not matter, so they are put all at once (as Krell et al. 2021, arXiv 2107.02027, pack histograms): the
    time depends on the sizes that there are, not on the items.
    """
    found = OpenRows(capacity)
    for size in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[size])
        while count:
            count = found.fill(size, count)
    return numbered([alike for room in found.rooms for alike in found.by_room[room]])


def numbered(rows: Iterable[Alike]) -> list[Alike]:
    """Return the rows with `first` of each share."""
    found, used = [], Counter()
    for alike in rows:
        found.append(alike._replace(shares=tuple(share._replace(first=used[share.size]) for share in alike.shares)))
        used.update({share.size: share.count * alike.rows for share in alike.shares})
    return found


class OpenRows:
    """Rows by the room that is left in them. rooms: that some row has, sorted; by_room: room -> rows."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.rooms: list[int] = []
        self.by_room: dict[int, list[Alike]] = {}

    def fill(self, size: int, count: int) -> int:
        """Put items of a size in the rows that have the least room for one, or in new ones -> how many are left."""
        room, alike = self.take(size) or (self.capacity, Alike(count))
        most = room // size  # of a row
        full = min(alike.rows, count // most)
        self.put(room - most * size, alike, full, Share(size, most))
        count -= full * most
        if full == alike.rows:
            return count
        if count:  # fewer than one of these rows takes
            self.put(room - count * size, alike, 1, Share(size, count))
        self.put(room, alike, alike.rows - full - (count > 0))
        return 0

    def put(self, room: int, alike: Alike, rows: int, *more: Share) -> None:
        """Put in so many of some rows, with further items; empty ones are no rows."""
        shares = (*alike.shares, *more)
        if not rows or not shares:
            return
        if room not in self.by_room:
            insort(self.rooms, room)
        self.by_room.setdefault(room, []).append(Alike(rows, shares))

    def take(self, size: int) -> tuple[int, Alike] | None:
        """Take out rows with the least room for an item -> room, rows; None if no row has so much."""
        at = bisect_left(self.rooms, size)
        if at == len(self.rooms):
            return None
        room = self.rooms[at]
        alike = self.by_room[room].pop()
        if not self.by_room[room]:
            del self.by_room[room], self.rooms[at]
        return room, alike


def in_rows(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items in rows by best fit. sizes: 1 to capacity each -> indices of the items row by row, and where in them
    each row ends."""
    counts, order = np.bincount(sizes, minlength=1), np.argsort(sizes, kind="stable")
    begins = np.cumsum(counts) - counts  # of each size in order
    members, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for rows, shares in best_fit(counts, capacity):
        firsts = (begins[share.size] + share.first for share in shares)
        found = [
            order[first : first + rows * share.count].reshape(rows, -1)
            for first, share in zip(firsts, shares, strict=True)
        ]
        found = np.concatenate(found, 1)
        members.append(found.reshape(-1))
        lengths.append(np.full(rows, found.shape[1]))
    return np.concatenate(members), np.cumsum(np.concatenate(lengths))
