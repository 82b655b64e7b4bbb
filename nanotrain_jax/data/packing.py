"""Examples in rows: several to a row by best fit, each to itself. Plain numpy."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from nanotrain_jax.data.examples import Examples


class Packed:
    """Random access to rows of examples: item i is {"inputs", "targets", "starts"}, each int32 [seq_len].

    An example has a place for each of its tokens. targets: the next token of the example where it is learned, else -1;
    starts: where in the row the token's example begins. What is left of a row is padding: token 0, no targets, apart
    from the examples.
    """

    together = 1  # examples that share a row, one after another

    def __init__(self, examples: Examples, chosen: np.ndarray, seq_len: int, packs: bool):
        """chosen: indices of examples."""
        self.examples, self.seq_len = examples, seq_len
        chosen = chosen.reshape(-1, self.together)
        sizes = examples.sizes[chosen].sum(1)
        order, ends = best_fit(sizes, seq_len) if packs else (np.arange(len(sizes)), np.arange(1, len(sizes) + 1))
        self.members, self.ends = chosen[order].reshape(-1), ends * self.together  # row by row

    def __len__(self) -> int:
        return len(self.ends)

    def of_row(self, i: int) -> np.ndarray:
        """Return the examples of a row."""
        return self.members[self.ends[int(i) - 1] if i else 0 : self.ends[int(i)]]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        row = {name: np.full(self.seq_len, empty, np.int32) for name, empty in ROW.items()}
        at = 0
        for example in self.of_row(i):
            tokens, learned = self.examples[example]
            stop = at + len(tokens)
            row["inputs"][at:stop] = tokens
            row["targets"][at : stop - 1] = np.where(learned[1:], tokens[1:].astype(np.int32), -1)
            row["starts"][at:stop] = at
            at = stop
        row["starts"][at:] = at
        return row


ROW = {"inputs": 0, "targets": -1, "starts": 0}


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items in rows, the largest first, each in the row that it leaves least room in (best fit decreasing, Johnson
    et al. 1974: at most 11/9 of the fewest rows, and one).

    sizes: at most capacity each. -> indices of the items row by row, and where in them each row ends. The same sizes
    give the same rows. O(n log n), and a shift of at most `capacity` numbers for each item.
    """
    row_of, rows = np.zeros(len(sizes), np.int64), Rows(capacity)
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        row_of[item] = rows.put(size)
    return np.argsort(row_of, kind="stable"), np.cumsum(np.bincount(row_of, minlength=rows.count))


class Rows:
    """Rows by the room that is left in them. rooms: that some row has, sorted; by_room: room -> rows."""

    def __init__(self, capacity: int):
        self.capacity, self.count = capacity, 0
        self.rooms: list[int] = []
        self.by_room: dict[int, list[int]] = {}

    def put(self, size: int) -> int:
        """Put an item in the row where it leaves least room, or in a new one -> the row."""
        room, row = self.take(size)
        left = room - size
        if left not in self.by_room:
            insort(self.rooms, left)
        self.by_room.setdefault(left, []).append(row)
        return row

    def take(self, size: int) -> tuple[int, int]:
        """Take out the row with the least room for an item -> room, row."""
        at = bisect_left(self.rooms, size)
        if at == len(self.rooms):
            self.count += 1
            return self.capacity, self.count - 1
        room = self.rooms[at]
        row = self.by_room[room].pop()
        if not self.by_room[room]:
            del self.by_room[room], self.rooms[at]
        return room, row
