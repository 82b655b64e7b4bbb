"""Opened sources of text, in memory or a folder of shards: their rows, and the hashes of the texts they hold out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nanotrain_jax.data.corpus import Corpus
from nanotrain_jax.data.token_folder import Header, ShardWindows
from nanotrain_jax.data.windows import Windows


class InMemory(NamedTuple):
    """Documents of a corpus; which of them are trained on and held out. pieces: see Dataset."""

    name: str
    corpus: Corpus
    train: np.ndarray
    held_out: np.ndarray
    pieces: int = 0

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer."""
        return self.corpus.tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""
        return self.corpus.vocab_size

    @property
    def replaced(self) -> int:
        """See Corpus."""
        return self.corpus.replaced

    @property
    def has_ends(self) -> bool:
        """See Corpus."""
        return self.corpus.has_ends

    @property
    def notes(self) -> list[str]:
        """Lines about the source, for people."""
        found = self.corpus.left_out
        count = f"{len(found):,} files of the folder are no text and are left out"
        return [f"warning: {count}; the first is {found[0]}"] if found else []

    @property
    def count(self) -> int:
        """Documents to train on."""
        return len(self.train)

    @property
    def trained(self) -> str:
        """Identify which documents are trained on."""
        return hashlib.sha256(self.train.tobytes()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Identify the documents."""
        return self.corpus.fingerprint

    def held_texts(self) -> np.ndarray:
        """Return the hashes of the documents that are held out, and of the texts of which they are pieces."""
        return np.concatenate([self.corpus.keys[self.held_out], self.corpus.wholes[self.held_out]])

    def without(self, held: np.ndarray) -> InMemory:
        """Return the source without training documents that are held out elsewhere, or are pieces of such a text.

        held: hashes.
        """
        keys, wholes = self.corpus.keys[self.train], self.corpus.wholes[self.train]
        return self._replace(train=self.train[~(np.isin(keys, held) | np.isin(wholes, held))])

    def rows(self, seq_len: int) -> tuple[Windows, Windows]:
        """Return the sequences to train on, and those held out."""
        return Windows(self.corpus, self.train, seq_len), Windows(self.corpus, self.held_out, seq_len)


class Sharded(NamedTuple):
    """A folder of shards, whose split was decided when it was prepared. train, held_out: its sequences."""

    name: str
    header: Header
    train: ShardWindows
    held_out: ShardWindows
    pieces: int = 0
    notes: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer."""
        return self.header.tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""
        return self.header.vocab_size

    @property
    def replaced(self) -> int:
        """See Corpus."""
        return self.header.total("replaced")

    @property
    def has_ends(self) -> bool:
        """See Corpus."""
        return self.header.end is not None

    @property
    def count(self) -> int:
        """Documents to train on, whatever other sources hold out."""
        return self.header.total("documents") - self.header.total("held_out_documents")

    @property
    def trained(self) -> str:
        """Identify which documents are trained on."""
        return f"{self.train.total} tokens"

    @property
    def fingerprint(self) -> str:
        """Identify the documents."""
        return self.header.fingerprint

    def held_texts(self) -> np.ndarray:
        """Return the hashes of the documents that are held out: 8 bytes for each."""
        return np.concatenate([np.zeros(0, np.uint64), *keys(self.held_out)])

    def without(self, held: np.ndarray) -> Sharded:
        """Return the source. Reads the hashes of all training documents, 8 bytes each. Raises ValueError if one of them
        is held out elsewhere: the rows of a folder are fixed."""
        count = sum(int(np.isin(found, held).sum()) for found in keys(self.train)) if len(held) else 0
        if count:
            raise ValueError(
                f"data: the token folder {self.name} trains on {count:,} documents that another source or "
                "data.validation holds out; take them out of one of the two, or mix its text instead of the folder"
            )
        return self

    def rows(self, seq_len: int) -> tuple[Windows, Windows]:
        """Return the sequences to train on, and those held out."""
        return self.train, self.held_out


Opened = InMemory | Sharded


def keys(side: ShardWindows) -> Iterator[np.ndarray]:
    """Yield the hashes of the documents of one side of a folder, shard by shard."""
    for number, shard in enumerate(side.mapped):
        yield shard.keys[side.documents(number)]
