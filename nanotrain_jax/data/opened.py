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
        """Return the hashes of the texts that are held out, 8 bytes for each."""
        return np.concatenate([np.zeros(0, np.uint64), *self.held_out.texts()])

    def without(self, held: np.ndarray) -> Opened:
        """Return the source without training documents that are held out elsewhere. held: hashes. Raises ValueError if
        it cannot be without them."""
        return self._replace(train=self.train.without(held, self.name))
