"""Corpus -> sequences -> grain -> global `jax.Array` batches, shuffled, split over processes, exactly resumable.

The order of training sequences is a function of (seed, position) alone: to resume is to start reading at a position.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from nanotrain_jax.config import Data
from nanotrain_jax.runtime import corpus as corpora

TOKENIZER = "tokenizer.json"  # of a folder of tokens, and of a run


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
    """Training and held-out sequences (val may be empty), and what tells them from others. replaced: see Corpus."""

    train: Windows | Synthetic
    val: Windows | Synthetic
    tokenizer: str | None
    vocab_size: int | None
    fingerprint: str
    replaced: int = 0


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
    return Dataset(train, val, corpus.tokenizer, corpus.vocab_size, fingerprint, corpus.replaced)


def tokenizer_file(config: Data) -> Path | None:
    """Return the tokenizer.json that a source is read with; None: bytes."""
    if config.tokenizer not in (None, "bytes"):
        return Path(config.tokenizer)
    kind, _, where = config.source.partition(":")
    path = Path(where) / TOKENIZER
    return path if kind == "tokens" and path.exists() else None


def batches(source: Sequence[np.ndarray], shapes: Any, seed: int, position: int = 0) -> Iterator[dict[str, jax.Array]]:
    """Endless training batches, from the given position (sequences consumed before) on; each epoch in another order.

    shapes: {"inputs", "targets"} as ShapeDtypeStructs with sharding (`Step.batch`). A process reads the rows that its
    own devices take; which sequence is which row does not depend on how many processes there are.
    """
    order = grain.MapDataset.source(source).seed(seed).shuffle().repeat(None)
    rows = rows_here(shapes["inputs"])
    mine = share(order, position, shapes["inputs"].shape[0], rows)
    for tokens in mine.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)):
        yield _to_devices(tokens[:, :-1], tokens[:, 1:], rows, shapes)


class Rows:
    """Random access to some rows of each batch of `size` items of `source`, from a position on: batch by batch."""

    def __init__(self, source: Sequence[np.ndarray], position: int, size: int, rows: np.ndarray):
        self.source, self.position, self.size, self.rows = source, position, size, rows

    def __len__(self) -> int:
        whole = (len(self.source) - self.position) // self.size * len(self.rows)
        return min(whole, sys.maxsize // 2)  # an endless source has sys.maxsize items, and grain adds to the length

    def __getitem__(self, i: int) -> np.ndarray:
        batch, row = divmod(int(i), len(self.rows))
        return self.source[self.position + batch * self.size + int(self.rows[row])]


def share(source: Sequence[np.ndarray], position: int, size: int, rows: np.ndarray) -> grain.MapDataset:
    """What one process reads: item i are the given rows of the i-th batch, int32 [len(rows), T + 1]."""
    return grain.MapDataset.source(Rows(source, position, size, rows)).batch(len(rows))


def rows_here(batch: jax.ShapeDtypeStruct) -> np.ndarray:
    """Which rows of a batch [B T], laid out over all devices, those of this process take; several may take the same."""
    here = batch.sharding.addressable_devices_indices_map(batch.shape).values()
    return np.unique(np.concatenate([np.arange(batch.shape[0])[index[0]] for index in here]))


def evaluation(source: Sequence[np.ndarray], shapes: Any, most: int) -> Iterator[dict[str, jax.Array]]:
    """At most `most` batches of held-out sequences, the same ones in the same order at every call.

    Where there are fewer than a batch needs, rows are filled with targets of -1.
    """
    size, length = shapes["inputs"].shape
    picked, mine = held_out(source, most * size), rows_here(shapes["inputs"])
    for first in range(0, len(picked), size):
        inputs, targets = np.zeros((len(mine), length), np.int32), np.full((len(mine), length), -1, np.int32)
        for i, row in enumerate(mine[first + mine < len(picked)]):
            sequence = source[picked[first + row]]
            inputs[i], targets[i] = sequence[:-1], sequence[1:]
        yield _to_devices(inputs, targets, mine, shapes)


def held_out(source: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Indices of at most `most` sequences, spread evenly over the source."""
    count = min(len(source), most)
    return np.arange(count) * len(source) // max(count, 1)


def _to_devices(inputs: np.ndarray, targets: np.ndarray, rows: np.ndarray, shapes: Any) -> dict[str, jax.Array]:
    """inputs, targets: those rows of a batch that this process takes."""

    def place(mine: np.ndarray, whole: jax.ShapeDtypeStruct) -> jax.Array:
        def of_device(index: tuple[slice, ...]) -> np.ndarray:
            return mine[np.searchsorted(rows, np.arange(whole.shape[0])[index[0]]), index[1]]

        return jax.make_array_from_callback(whole.shape, whole.sharding, of_device)

    return {"inputs": place(inputs, shapes["inputs"]), "targets": place(targets, shapes["targets"])}


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
