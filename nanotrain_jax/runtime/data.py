"""Corpus -> sequences -> grain -> global `jax.Array` batches, shuffled, split over processes, exactly resumable.

The order of training sequences is a function of (seed, position) alone: to resume is to start reading at a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from nanotrain_jax.config import Data
from nanotrain_jax.runtime import corpus as corpora


class Windows:
    """Random access to the sequences of some documents, read one after the other: item i is int32 [seq_len + 1].

    Neighbouring sequences share one token: the last target of one is the first input of the next.
    """

    def __init__(self, corpus: corpora.Corpus, documents: np.ndarray, seq_len: int):
        self.tokens, self.seq_len = corpus.tokens, seq_len
        self.starts = np.concatenate([[0], corpus.ends[:-1]])[documents]
        self.ends = np.cumsum(corpus.ends[documents] - self.starts)  # in the stream of these documents
        self.total = int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return max(self.total - 1, 0) // self.seq_len

    def __getitem__(self, i: int) -> np.ndarray:
        return self.slice(int(i) * self.seq_len, self.seq_len + 1)

    def slice(self, start: int, length: int) -> np.ndarray:
        """-> int32 tokens start .. start + length of the stream (fewer at its end)."""
        pieces, length = [], min(length, self.total - start)
        document = int(np.searchsorted(self.ends, start, side="right"))
        while length > 0:
            take = min(length, int(self.ends[document]) - start)
            behind = int(self.ends[document - 1]) if document else 0
            first = int(self.starts[document]) + start - behind
            pieces.append(self.tokens[first : first + take])
            start, length, document = start + take, length - take, document + 1
        return np.concatenate(pieces).astype(np.int32)


class Synthetic:
    """Random access to uniformly random tokens: item i is int32 [seq_len + 1]. For timing, not for learning."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int, length: int = 1 << 24):
        self.shape, self.vocab_size, self.seed, self.length = (seq_len + 1,), vocab_size, seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> np.ndarray:
        return np.random.default_rng((self.seed, int(i))).integers(self.vocab_size, size=self.shape, dtype=np.int32)


class Dataset(NamedTuple):
    """Training and held-out sequences (val may be empty), and what tells them from others."""

    train: Windows | Synthetic
    val: Windows | Synthetic
    tokenizer: str | None
    vocab_size: int | None
    fingerprint: str


def load(config: Data, vocab_size: int | None = None) -> Dataset:
    """Open the source of a config; vocab_size is needed for `synthetic` only.

    Raises ValueError (one line: value, rule, remedy), or OSError if a file cannot be read.
    """
    kind, _, where = config.source.partition(":")
    if kind == "synthetic":
        if vocab_size is None:
            raise ValueError("model.vocab_size is needed with data.source='synthetic', which has no tokenizer; set it")
        train = Synthetic(vocab_size, config.seq_len, config.seed)
        val = Synthetic(
            vocab_size, config.seq_len, config.seed + (1 << 32), length=1 << 16 if config.val_fraction else 0
        )
        return Dataset(train, val, None, None, f"synthetic {vocab_size} {config.seed}")
    if kind == "tokens" and where:
        corpus = corpora.read(where, config.verify)
        if config.tokenizer and corpora.tokenizer(config.tokenizer).name != corpus.tokenizer:
            raise ValueError(
                f"data.tokenizer={config.tokenizer!r} did not make {config.source!r} (its tokenizer is "
                f"{corpus.tokenizer}); leave it out"
            )
    elif kind == "text" and where:
        corpus = corpora.build(corpora.glob_documents(where), corpora.tokenizer(config.tokenizer or "bytes"))
    elif config.source == "stdlib":
        corpus = corpora.build(corpora.stdlib_documents(), corpora.tokenizer(config.tokenizer or "bytes"))
    else:
        raise ValueError(f"data.source={config.source!r} is unknown; use stdlib, text:GLOB, tokens:DIR or synthetic")

    need = config.seq_len + 1
    if len(corpus.tokens) < need:
        raise ValueError(
            f"data.source={config.source!r} holds {len(corpus.tokens)} tokens, but data.seq_len={config.seq_len} needs "
            f"at least {need}; use more text or a shorter seq_len"
        )
    train, val = (Windows(corpus, documents, config.seq_len) for documents in corpus.split(config.val_fraction))
    for name, side in ("train on", train), ("hold out", val):
        if not len(side) and (side is train or config.val_fraction):
            raise ValueError(
                f"data.val_fraction={config.val_fraction} leaves {side.total} tokens to {name}, but data.seq_len="
                f"{config.seq_len} needs at least {need}; change val_fraction (0: hold out nothing), or use more text"
            )
    fingerprint = f"{corpus.fingerprint} val_fraction {config.val_fraction} seq_len {config.seq_len} seed {config.seed}"
    return Dataset(train, val, corpus.tokenizer, corpus.vocab_size, fingerprint)


def batches(source: Sequence[np.ndarray], shapes: Any, seed: int, position: int = 0) -> Iterator[dict[str, jax.Array]]:
    """Endless training batches, from the given position (sequences consumed before) on; each epoch in another order.

    shapes: {"inputs", "targets"} as ShapeDtypeStructs with sharding (`Step.batch`). Process p of n reads every n-th
    sequence; which sequences make up a batch does not depend on n.
    """
    size = shapes["inputs"].shape[0]
    mine = share(source, seed, position, size, jax.process_index(), jax.process_count())
    for rows in mine.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)):
        yield _to_devices(rows[:, :-1], rows[:, 1:], shapes)


def share(
    source: Sequence[np.ndarray], seed: int, position: int, size: int, process: int, processes: int
) -> grain.MapDataset:
    """The rows that one process reads of each batch of `size` sequences: item i is int32 [size / processes, T + 1]."""
    order = grain.MapDataset.source(source).seed(seed).shuffle().repeat(None)
    return order[position + process :: processes].batch(size // processes)


def evaluation(source: Sequence[np.ndarray], shapes: Any, most: int) -> Iterator[dict[str, jax.Array]]:
    """At most `most` batches of held-out sequences, the same ones in the same order at every call.

    Where there are fewer than a batch needs, rows are filled with targets of -1.
    """
    size, length = shapes["inputs"].shape
    picked = held_out(source, most * size)
    for first in range(0, len(picked), size):
        rows = np.stack([source[i] for i in picked[first : first + size]])
        inputs, targets = np.zeros((size, length), np.int32), np.full((size, length), -1, np.int32)
        inputs[: len(rows)], targets[: len(rows)] = rows[:, :-1], rows[:, 1:]
        mine = slice(jax.process_index(), None, jax.process_count())
        yield _to_devices(inputs[mine], targets[mine], shapes)


def held_out(source: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Indices of at most `most` sequences, spread evenly over the source."""
    count = min(len(source), most)
    return np.arange(count) * len(source) // max(count, 1)


def _to_devices(inputs: np.ndarray, targets: np.ndarray, shapes: Any) -> dict[str, jax.Array]:
    place = jax.make_array_from_process_local_data
    return {
        "inputs": place(shapes["inputs"].sharding, inputs, shapes["inputs"].shape),
        "targets": place(shapes["targets"].sharding, targets, shapes["targets"].shape),
    }


def bigram_loss(dataset: Dataset, most_sequences: int, alpha: float = 0.1) -> float | None:
    """Nats per token of a bigram model, counted on all training text, on the held-out sequences that `evaluation` uses.

    P(b | a) = (count(a, b) + alpha) / (count(a) + alpha V). A model that beats it has learned context beyond the
    previous token. None where there is no held-out text, or the table would be large (more than 1024 ids).
    """
    V = dataset.vocab_size
    if not V or V > 1024 or not len(dataset.val):
        return None
    counts, chunk = np.zeros(V * V, np.int64), 1 << 24
    for start in range(0, dataset.train.total - 1, chunk):
        tokens = dataset.train.slice(start, chunk + 1)
        counts += np.bincount(tokens[:-1] * V + tokens[1:], minlength=V * V)
    smooth = counts.reshape(V, V) + alpha
    losses = -np.log(smooth / smooth.sum(1, keepdims=True))
    sequences = (dataset.val[i] for i in held_out(dataset.val, most_sequences))
    return float(np.mean([losses[w[:-1], w[1:]].mean() for w in sequences]))
