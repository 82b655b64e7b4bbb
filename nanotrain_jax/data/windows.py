"""Sequences of text, by index. Plain numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from nanotrain_jax.data.corpus import Corpus


class Windows:
    """Random access to the sequences of concatenated documents: item i is int32 [seq_len + 1].

    Consecutive sequences share one token: the last target of one is the first input of the next.
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, seq_len: int):
        self.corpus, self.documents, self.tokens, self.seq_len = corpus, documents, corpus.tokens, seq_len
        self.starts = np.concatenate([[0], corpus.ends[:-1]])[documents]
        self.ends = np.cumsum(corpus.ends[documents] - self.starts)  # in the concatenation of these documents
        self.total = int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return max(self.total - 1, 0) // self.seq_len

    def __getitem__(self, i: int) -> np.ndarray:
        return self.slice(int(i) * self.seq_len, self.seq_len + 1)

    @property
    def count(self) -> int:
        """Documents."""
        return len(self.documents)

    @property
    def chosen(self) -> str:
        """Identify which documents of the source these are."""
        return hashlib.sha256(self.documents.tobytes()).hexdigest()

    def texts(self) -> Iterator[np.ndarray]:
        """Yield the hashes of the documents, and of the texts of which they are pieces."""
        yield self.corpus.keys[self.documents]
        yield self.corpus.wholes[self.documents]

    def without(self, held: np.ndarray, name: str) -> Windows:
        """Return the sequences without documents whose hash, or that of the text of which they are pieces, is in held.
        Raises ValueError, with the name of the source, if they are fixed."""
        keys, wholes = self.texts()
        return Windows(self.corpus, self.documents[~(np.isin(keys, held) | np.isin(wholes, held))], self.seq_len)

    @property
    def readers(self) -> int:
        """Threads to make batches with."""
        return 1

    @property
    def stretches(self) -> int:
        """Into how many stretches the documents are divided."""
        return 1

    def sizes(self, stretch: int) -> np.ndarray:
        """Return the tokens of each document of a stretch."""
        return np.diff(self.ends, prepend=0)

    def span(self, stretch: int, document: int) -> tuple[int, int]:
        """Return from where to where in the concatenation a document of a stretch is."""
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])

    def document_starts(self, i: int) -> np.ndarray:
        """Return for each token of sequence i the position in it of its document's first token, int32 [seq_len + 1].

        0 for a document that began in an earlier sequence.
        """
        first = int(i) * self.seq_len
        begins = np.searchsorted(self.ends, (first, first + self.seq_len), side="right")
        starts = np.zeros(self.seq_len + 1, np.int32)
        positions = self.ends[slice(*begins)] - first  # where a document ends, the next one starts
        starts[positions] = positions
        return np.maximum.accumulate(starts)

    def slice(self, start: int, length: int) -> np.ndarray:
        """Return int32 tokens start .. start + length of the concatenated documents (fewer at the end)."""
        arrays, length = [], min(length, self.total - start)
        document = int(np.searchsorted(self.ends, start, side="right"))
        while length > 0:
            take = min(length, int(self.ends[document]) - start)
            document_start = int(self.ends[document - 1]) if document else 0
            first = int(self.starts[document]) + start - document_start
            arrays.append(self.tokens[first : first + take])
            start, length, document = start + take, length - take, document + 1
        return np.concatenate(arrays).astype(np.int32)


class Synthetic:
    """Random access to uniformly random tokens: item i is int32 [seq_len + 1]. For benchmarks."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int, length: int = 1 << 24):
        self.shape, self.vocab_size, self.seed, self.length = (seq_len + 1,), vocab_size, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> np.ndarray:
        return np.random.default_rng((self.seed, int(i))).integers(self.vocab_size, size=self.shape, dtype=np.int32)

    def document_starts(self, i: int) -> np.ndarray:
        """As of `Windows`: each sequence is one document."""
        return np.zeros(self.shape, np.int32)


class WithDocuments:
    """Random access to sequences with their documents: item i is int32 [2 seq_len + 1], tokens and document_starts."""

    def __init__(self, source: Windows | Synthetic):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.stack([self.source[i], self.source.document_starts(i)])
