"""Mixtures of sources: row i comes from the same source, and is the same row of it, on any mesh and after any resume.

Of the first n rows each of two sources has its share to within half a row, each of K to within (K - 1) / 2
(`Mixture.counts`): weights are no probabilities. The rows of a source come in the order in which a run on it alone
reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from nanotrain_jax.data.packed_documents import PackedDocuments
from nanotrain_jax.data.windows import Windows


class Mixture:
    """Rows of several sources, by name. weights: whole numbers, in proportion."""

    def __init__(self, rows: dict[str, Windows | PackedDocuments], weights: Sequence[float]):
        """weights: of the sources, as they were written: 0.1 is a tenth."""
        self.rows = rows
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        self.weights = [int(weight * scale) for weight in exact]

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source, by name."""
        return {name: weight / sum(self.weights) for name, weight in zip(self.rows, self.weights, strict=True)}

    def counts(self, count: int) -> list[int]:
        """Return how many of the first `count` rows are of each source.

        The first source has its share, rounded; the others share the rest in the same way. So a count never falls, and
        one more row adds one to one of them. O(sources), in whole numbers.
        """
        found, left, total = [], count, sum(self.weights)
        for weight in self.weights:
            rest = (2 * left * (total - weight) + total) // (2 * total)
            found.append(left - rest)
            left, total = rest, total - weight
        return found

    def place(self, i: int) -> tuple[int, int]:
        """Return the source of row i of the mixture, and which of its rows that is, counted over all epochs."""
        before, after = self.counts(i), self.counts(i + 1)
        source = next(k for k, count in enumerate(after) if count > before[k])
        return source, before[source]

    def epochs(self, count: int) -> dict[str, float]:
        """Return how often each source has been read after `count` rows of the mixture, by name."""
        of_sources = zip(self.rows.items(), self.counts(count), strict=True)
        return {name: rows / len(windows) for (name, windows), rows in of_sources}

    @property
    def rows_once(self) -> int:
        """The rows of the mixture before a source is read a second time."""
        low, high = 0, 1 + len(self) * sum(self.weights)  # each source has a row in the first sum(weights)
        while high - low > 1:
            middle = (low + high) // 2
            fits = all(count <= len(rows) for count, rows in zip(self.counts(middle), self.rows.values(), strict=True))
            low, high = (middle, high) if fits else (low, middle)
        return low


class Mixed:
    """Random access to the rows of a mixture, without end. orders: the rows of each source in the order of training."""

    def __init__(self, mixture: Mixture, orders: Sequence[Sequence[np.ndarray]]):
        self.mixture, self.orders = mixture, orders

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, i: int) -> np.ndarray:
        source, row = self.mixture.place(int(i))
        return self.orders[source][row]
