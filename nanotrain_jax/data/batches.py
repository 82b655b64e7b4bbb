"""Data loading: corpus -> sequences -> grain -> global `jax.Array` batches, shuffled, sharded, exactly resumable.

The order of training sequences depends on (seed, position) only, so a resume just starts reading at a position.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from nanotrain_jax.config.schema import Data
from nanotrain_jax.data import arrays, chat, text_files, token_folder
from nanotrain_jax.data import corpus as corpora
from nanotrain_jax.data import tokenizer as tokenizers
from nanotrain_jax.data.packing import Packed
from nanotrain_jax.data.pairs import REFERENCE, Pairs
from nanotrain_jax.data.windows import Windows

PIECES = 8  # about, to hold out, of documents that are too long to be held out whole


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


Source = Windows | Synthetic | arrays.Rows | Packed


class Dataset(NamedTuple):
    """Training and validation sequences (val may be empty). fingerprint identifies them; replaced: see Corpus;
    picture_places: see data/arrays.py; pieces: into which documents were cut to hold some out (0: they are whole);
    has_ends: see Corpus; notes: lines about them for people."""

    train: Source
    val: Source
    tokenizer: str | None
    vocab_size: int | None
    fingerprint: str
    replaced: int = 0
    picture_places: int | None = None
    pieces: int = 0
    has_ends: bool = True
    notes: tuple[str, ...] = ()


def load(config: Data, vocab_size: int | None = None) -> Dataset:
    """Open data.source. vocab_size is required for `synthetic` only.

    Raises ValueError (one line: value, rule, remedy), or OSError if a file cannot be read.
    """
    kind, _, where = config.source.partition(":")
    if kind == "synthetic":
        if vocab_size is None:
            raise ValueError(
                "model.vocab_size is needed with data.source='synthetic', which has no tokenizer; set model.vocab_size"
            )
        train = Synthetic(vocab_size, config.seq_len, config.seed)
        val = Synthetic(
            vocab_size, config.seq_len, config.seed + (1 << 32), length=1 << 16 if config.val_fraction else 0
        )
        return Dataset(train, val, None, None, f"synthetic {vocab_size} {config.seed}")
    if kind == "arrays" and where:
        folder = arrays.read(Path(where), config.seq_len, config.verify != "off")
        fingerprint = f"{folder.fingerprint} seed {config.seed}"
        return Dataset(
            folder.train, folder.val, None, folder.vocab_size, fingerprint, picture_places=folder.picture_places
        )
    if config.is_chat and where:
        return of_chat(config)
    if kind == "tokens" and where and token_folder.is_sharded(Path(where)):
        return of_shards(config, Path(where))
    if kind == "tokens" and where:
        corpus = corpora.read(where, config.verify != "off")
        check_tokenizer(config, corpus.tokenizer)
    elif kind == "text" and where:
        corpus = of_texts(config, where)
    elif config.source == "stdlib":
        corpus = corpora.build(corpora.stdlib_documents(), tokenizer_of(config))
    else:
        raise ValueError(
            f"data.source={config.source!r} must be stdlib, text:GLOB, tokens:DIR, arrays:DIR, chat:GLOB, pairs:GLOB "
            "or synthetic"
        )

    need = config.seq_len + 1
    if len(corpus.tokens) < need:
        raise ValueError(
            f"data.source={config.source!r} has {len(corpus.tokens)} tokens, but data.seq_len={config.seq_len} needs "
            f"at least {need}; use more text or a shorter data.seq_len"
        )
    documents = len(corpus.ends)
    corpus, sides = divided(corpus, config)
    train, val = (Windows(corpus, side, config.seq_len) for side in sides)
    for name, side in ("train on", train), ("hold out", val):
        if not len(side) and (side is train or config.val_fraction):
            raise ValueError(
                f"data.val_fraction={config.val_fraction} leaves {side.total} tokens to {name}, but data.seq_len="
                f"{config.seq_len} needs at least {need}; change data.val_fraction (0: no validation), or use more text"
            )
    fingerprint = f"{corpus.fingerprint} val_fraction {config.val_fraction} seq_len {config.seq_len} seed {config.seed}"
    pieces = len(corpus.ends) if len(corpus.ends) > documents else 0
    found = Dataset(train, val, corpus.tokenizer, corpus.vocab_size, fingerprint, corpus.replaced, pieces=pieces)
    return found._replace(has_ends=corpus.has_ends, notes=tuple(notes(corpus)))


def notes(corpus: corpora.Corpus) -> Iterator[str]:
    """Yield lines about a corpus."""
    if corpus.left_out:
        count = len(corpus.left_out)
        yield f"warning: {count:,} files of the folder are no text and are left out; the first is {corpus.left_out[0]}"


def of_texts(config: Data, where: str) -> corpora.Corpus:
    """Read and tokenize data.source=text:GLOB. Raises ValueError or OSError."""
    files = text_files.matching(where, f"data.source={config.source!r}")
    texts = text_files.documents(files.paths, text_files.Field(config.field, "data.field"))
    return corpora.build(texts, tokenizer_of(config))._replace(left_out=tuple(map(str, files.binary)))


def of_shards(config: Data, folder: Path) -> Dataset:
    """Open data.source=tokens:DIR of the second format. Raises ValueError or OSError."""
    header, train, val = token_folder.sides(folder, config)
    check_tokenizer(config, header.tokenizer)
    fingerprint = f"{header.fingerprint} val_fraction {config.val_fraction} seq_len {config.seq_len} seed {config.seed}"
    found = Dataset(train, val, header.tokenizer, header.vocab_size, fingerprint, header.total("replaced"))
    return found._replace(has_ends=header.end is not None)


def check_tokenizer(config: Data, name: str) -> None:
    """Raise ValueError unless data.tokenizer and data.end_token, if set, are the tokenizer of a token folder."""
    if (config.tokenizer or config.end_token) and tokenizer_of(config).name != name:
        raise ValueError(
            f"data.tokenizer={config.tokenizer!r} with data.end_token={config.end_token!r} is not the tokenizer of "
            f"{config.source!r} (which is {name}); remove both keys"
        )


def of_chat(config: Data) -> Dataset:
    """Open data.source=chat:GLOB or pairs:GLOB. Raises ValueError or OSError."""
    tokenizer = tokenizer_of(config)
    found = chat.load(config, tokenizer)
    return Dataset(found.train, found.val, tokenizer.name, tokenizer.vocab_size, found.fingerprint, notes=found.notes)


def divided(corpus: corpora.Corpus, config: Data) -> tuple[corpora.Corpus, tuple[np.ndarray, np.ndarray]]:
    """Return a corpus, and which of its documents to train on and to hold out: data.val_fraction, a row at least.

    If every document is longer than that, as of a handful of files, they are cut into pieces. Raises ValueError.
    """
    least = config.seq_len + 1
    try:
        return corpus, corpus.split(config.val_fraction, least)
    except corpora.NothingToHoldOut:
        budget = max(config.val_fraction * len(corpus.tokens), least)
        corpus = corpus.cut(max(int(budget) // PIECES, 1), tokenizers.line_ends(tokenizer_of(config)))
        return corpus, corpus.split(config.val_fraction, least)


def tokenizer_of(config: Data) -> tokenizers.Tokenizer:
    """Return the tokenizer of a data source of text. Raises ValueError or OSError."""
    kind, _, where = config.source.partition(":")
    folder = where if kind == "tokens" and (Path(where) / tokenizers.TOKENIZER).exists() else None
    return tokenizers.load(config.tokenizer or folder or "bytes", config.end_token)


def files_of(config: Data) -> dict[str, str]:
    """Return name -> text of the files of a tokenizer that a run keeps: of conversations also the template that wrote
    them. Raises ValueError or OSError."""
    tokenizer = tokenizer_of(config)
    template = chat.template_of(config, tokenizer) if config.is_chat else None
    return {**tokenizer.files, **({tokenizers.CHAT_TEMPLATE: template.source} if template else {})}


def first_words(dataset: Dataset, config: Data, count: int = 3) -> str:
    """Return the first words of a held-out document, or of a training document without one; "" if they are no text."""
    side = dataset.val if len(dataset.val) else dataset.train
    if not isinstance(side, Windows):
        return ""
    tokenizer = tokenizer_of(config)
    tokens = side[0][side.document_starts(0) == 0][:256].tolist()
    text = tokenizers.text_decoder(tokenizer)([token for token in tokens if token != tokenizer.end])
    lines = [line.split() for line in text.splitlines()]
    return next((" ".join(words[:count]) for words in lines if words), "")


def check(dataset: Dataset, shapes: Any, source: str) -> None:
    """Raise ValueError unless data.source has all arrays of a batch. shapes: `Step.batch`."""
    if isinstance(dataset.train, arrays.Rows):
        for side in (dataset.train, dataset.val):
            arrays.check(side, shapes, source)
        return
    missing = sorted(shapes.keys() - {"inputs", "targets", "starts"})
    if missing and not (isinstance(dataset.train, Pairs) and missing == [REFERENCE]):
        raise ValueError(f"the model reads {', '.join(missing)}, but data.source={source!r} is text; use arrays:DIR")


def check_places(dataset: Dataset, max_tokens: int, source: str) -> None:
    """Raise ValueError unless the rows of data.source have as many places for a picture as vision.max_tokens, if it
    says how many."""
    if dataset.picture_places not in (None, max_tokens):
        raise ValueError(
            f"vision.max_tokens={max_tokens}, but rows of data.source={source!r} have {dataset.picture_places} places "
            f"for a picture; use vision.max_tokens={dataset.picture_places}"
        )


def batches(
    source: Source, shapes: Any, seed: int, position: int = 0, token_order: np.ndarray | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yield training batches without end, starting at position (sequences consumed); each epoch has another order.

    shapes: of "inputs", "targets", if documents are kept apart "starts", and what else the model reads, as
    ShapeDtypeStructs with sharding (`Step.batch`). token_order: positions of the tokens in a row of the batch
    (`Step.token_order`). A process reads only the rows of its own devices; the assignment of sequences to rows does not
    depend on the number of processes.
    """
    rows = local_rows(shapes["inputs"])
    local = share(in_order(source, shapes, seed), position, shapes["inputs"].shape[0], rows)
    for sequences in local.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)):
        yield _to_devices(rows_of(sequences, token_order), rows, shapes)


def in_order(source: Source, shapes: Any, seed: int) -> grain.MapDataset:
    """Return the rows in the order of training, without end."""
    return grain.MapDataset.source(_examples(source, shapes)).seed(seed).shuffle().repeat(None)


class Rows:
    """Random access to some rows of each batch of `size` items of `source`, starting at position: batch by batch."""

    def __init__(self, source: Sequence[np.ndarray], position: int, size: int, rows: np.ndarray):
        self.source, self.position, self.size, self.rows = source, position, size, rows

    def __len__(self) -> int:
        num_rows = (len(self.source) - self.position) // self.size * len(self.rows)
        return min(num_rows, sys.maxsize // 2)  # an endless source has sys.maxsize items, and grain adds to the length

    def __getitem__(self, i: int) -> np.ndarray:
        batch, row = divmod(int(i), len(self.rows))
        return self.source[self.position + batch * self.size + int(self.rows[row])]


def share(source: Sequence[np.ndarray], position: int, size: int, rows: np.ndarray) -> grain.MapDataset:
    """Return the dataset of one process: item i is the given rows of batch i, stacked."""
    return grain.MapDataset.source(Rows(source, position, size, rows)).batch(len(rows))


def local_rows(batch: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the rows of a sharded batch [B T] that the devices of this process hold, each once."""
    local = batch.sharding.addressable_devices_indices_map(batch.shape).values()
    return np.unique(np.concatenate([np.arange(batch.shape[0])[index[0]] for index in local]))


def evaluation(
    source: Source, shapes: Any, max_batches: int, token_order: np.ndarray | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yield at most max_batches batches of validation sequences, the same ones in the same order at every call.

    An incomplete last batch is padded with rows whose targets are -1. Arguments: as of `batches`.
    """
    size = shapes["inputs"].shape[0]
    indices, rows = held_out(source, max_batches * size), local_rows(shapes["inputs"])
    examples = _examples(source, shapes)
    for first in range(0, len(indices), size):
        present = indices[first : first + size]
        of_rows = [examples[present[min(row, len(present) - 1)]] for row in rows]
        sequences = jax.tree.map(lambda *xs: np.stack(xs), *of_rows)
        batch = rows_of(sequences, token_order)
        batch["targets"] = np.where((rows < len(present))[:, None], batch["targets"], -1)
        yield _to_devices(batch, rows, shapes)


def _examples(source: Source, shapes: Any) -> Source | WithDocuments:
    if isinstance(source, arrays.Rows):
        return source.only(list(shapes))
    if isinstance(source, Packed):
        return source
    return WithDocuments(source) if "starts" in shapes else source


def rows_of(sequences: np.ndarray | arrays.Row, order: np.ndarray | None) -> dict[str, np.ndarray]:
    """sequences[R T+1], of `WithDocuments` [R 2 T+1], or arrays by name -> the rows of a batch, their tokens in this
    order.

    A document does not predict the first token of the next one. Starts stay in the order of the row.
    """
    if isinstance(sequences, dict):
        ordered = {} if order is None else {name: sequences[name][:, order] for name in arrays.TOKENS}
        return sequences | ordered
    if sequences.ndim == 2:
        batch = {"inputs": sequences[:, :-1], "targets": sequences[:, 1:]}
        return batch if order is None else {name: tokens[:, order] for name, tokens in batch.items()}
    tokens, starts = sequences.swapaxes(0, 1)
    batch = rows_of(tokens, None)
    batch["targets"] = np.where(starts[:, 1:] == starts[:, :-1], batch["targets"], -1)
    if order is not None:
        batch = {name: tokens[:, order] for name, tokens in batch.items()}
    return batch | {"starts": starts[:, :-1]}


def held_out(source: Sequence[np.ndarray], max_sequences: int) -> np.ndarray:
    """Return the indices of at most max_sequences sequences, evenly spaced over the source."""
    count = min(len(source), max_sequences)
    return np.arange(count) * len(source) // max(count, 1)


def _to_devices(local_batch: dict[str, np.ndarray], rows: np.ndarray, shapes: Any) -> dict[str, jax.Array]:
    """Assemble a global batch from the rows that this process holds."""

    def place(local: np.ndarray, batch: jax.ShapeDtypeStruct) -> jax.Array:
        def of_device(index: tuple[slice, ...]) -> np.ndarray:
            return local[(np.searchsorted(rows, np.arange(batch.shape[0])[index[0]]), *index[1:])]

        return jax.make_array_from_callback(batch.shape, batch.sharding, of_device)

    return {name: place(local, shapes[name]) for name, local in local_batch.items()}


def bigram_loss(
    dataset: Dataset, max_sequences: int, across_documents: bool = True, alpha: float = 0.1
) -> float | None:
    """Return the loss (nats per token) of a bigram model of all training text on the targets of `evaluation`.

    P(b | a) = (count(a, b) + alpha) / (count(a) + alpha V). A model that beats it uses context beyond the previous
    token. None without validation text, for arrays, or with more than 1024 ids (a large table) or 2^28 tokens.
    """
    V = dataset.vocab_size
    is_text = isinstance(dataset.train, Windows) and dataset.train.total <= 1 << 28
    if not V or V > 1024 or not len(dataset.val) or not is_text:
        return None
    counts, chunk = np.zeros(V * V, np.int64), 1 << 24
    for start in range(0, dataset.train.total - 1, chunk):
        tokens = dataset.train.slice(start, chunk + 1)
        counts += np.bincount(tokens[:-1] * V + tokens[1:], minlength=V * V)
    smooth = counts.reshape(V, V) + alpha
    losses = -np.log(smooth / smooth.sum(1, keepdims=True))
    total, count = 0.0, 0
    for i in held_out(dataset.val, max_sequences):
        tokens, starts = dataset.val[i], dataset.val.document_starts(i)
        is_target = across_documents | (starts[1:] == starts[:-1])
        total += (losses[tokens[:-1], tokens[1:]] * is_target).sum()
        count += is_target.sum()
    return total / count if count else None
