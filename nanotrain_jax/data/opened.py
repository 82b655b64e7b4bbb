"""An opened source of text, in memory or a folder of shards: what it says of itself, and its two sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanotrain_jax.data.corpus import Corpus
from nanotrain_jax.data.token_folder import Header
from nanotrain_jax.data.windows import Windows


class Opened(NamedTuple):
    """A source: train, held_out: its sequences; pieces: see Dataset; notes: lines about it, for people."""

    name: str
    facts: Corpus | Header  # tokenizer, vocab_size, replaced, has_ends, fingerprint
    train: Windows
    held_out: Windows
    pieces: int = 0
    notes: Sequence[str] = ()

    def held_texts(self) -> np.ndarray:
        """Return the hashes of the texts that are held out, or of which pieces may be, 8 bytes for each."""
        of_pieces = self.wholes if len(self.held_out) else self.wholes[:0]
        return np.concatenate([of_pieces, *self.held_out.texts()])

    @property
    def wholes(self) -> np.ndarray:
        """The hashes of texts of which a folder of shards has pieces."""
        return np.array(self.facts.wholes if isinstance(self.facts, Header) else [], np.uint64)

    def without(self, held: np.ndarray) -> Opened:
        """Return the source without training documents that are held out elsewhere. held: hashes. Raises ValueError if
        it cannot be without them."""
        if count := int(np.isin(self.wholes, held).sum()):
            raise ValueError(
                f"data: the token folder {self.name} trains on pieces of {count:,} texts that another source or "
                "data.validation holds out; take them out of one of the two, or mix its text instead of the folder"
            )
        return self._replace(train=self.train.without(held, self.name))
