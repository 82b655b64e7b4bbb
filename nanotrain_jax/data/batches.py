"""Data loading: corpus -> sequences -> global `jax.Array` batches, shuffled, sharded, made ahead, exactly resumable.

The order of training sequences depends on (seed, position) only, so a resume just starts reading at a position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from nanotrain_jax.config.schema import Data
from nanotrain_jax.data import arrays, chat, text_sources
from nanotrain_jax.data import tokenizer as tokenizers
from nanotrain_jax.data.dataset import Dataset, Source
from nanotrain_jax.data.mixture import Mixed, Mixture
from nanotrain_jax.data.packed_documents import PackedDocuments
from nanotrain_jax.data.packing import Packed
from nanotrain_jax.data.pairs import REFERENCE, Pairs
from nanotrain_jax.data.text_sources import tokenizer_of
from nanotrain_jax.data.windows import Synthetic, Windows, WithDocuments

AHEAD = 2  # batches


def load(config: Data, vocab_size: int | None = None) -> Dataset:
    """Open data.source. vocab_size is required for `synthetic` only.

    Raises ValueError (one line: value, rule, remedy), or OSError if a file cannot be read.
    """
    kind, _, where = ("", "", "") if config.parts else config.source.partition(":")
    if config.pack and kind in ("synthetic", "arrays"):
        raise ValueError(
            f"data.pack={config.pack} with data.source={config.source!r}, whose rows are given; leave it out"
        )
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
    return text_sources.load(config)


def of_chat(config: Data) -> Dataset:
    """Open data.source=chat:GLOB or pairs:GLOB. Raises ValueError or OSError."""
    tokenizer = tokenizer_of(config)
    found = chat.load(config, tokenizer)
    return Dataset(found.train, found.val, tokenizer.name, tokenizer.vocab_size, found.fingerprint, notes=found.notes)


def files_of(config: Data) -> dict[str, str]:
    """Return name -> text of the files of a tokenizer that a run keeps: of conversations also the template that wrote
    them. Raises ValueError or OSError."""
    tokenizer = tokenizer_of(config)
    template = chat.template_of(config, tokenizer) if config.is_chat else None
    return {**tokenizer.files, **({tokenizers.CHAT_TEMPLATE: template.source} if template else {})}


def first_words(dataset: Dataset, config: Data, count: int = 3) -> str:
    """Return the first words of a held-out document, or of a training document without one; "" if they are no text."""
    side = dataset.validation[0].rows if dataset.validation else dataset.train
    if isinstance(side, PackedDocuments):
        side = side.windows
    if not isinstance(side, Windows):
        return ""
    tokenizer = tokenizer_of(config)
    tokens = side[0][side.document_starts(0) == 0][:256].tolist()
    text = tokenizers.text_decoder(tokenizer)([i for i in tokens if i not in (tokenizer.end, *tokenizer.begin)])
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

    A thread makes batches, AHEAD of them before they are asked for (of a folder in a store several threads, a batch
    each: `readers_of`). What it raises is raised here. It communicates nothing, and ends when this generator is closed.
    """
    rows = local_rows(shapes["inputs"])
    share = Share(in_order(source, shapes, seed), position, shapes["inputs"].shape[0], rows)

    def batch(i: int) -> dict[str, jax.Array]:
        return _to_devices(rows_of(share[i], token_order), rows, shapes)

    yield from _ahead(batch, readers_of(source))


def _ahead(make: Callable[[int], Any], threads: int) -> Iterator[Any]:
    """Yield make(0), make(1), ... without end; threads make AHEAD more meanwhile, one each at least."""
    most = max(AHEAD, threads)
    pool = ThreadPoolExecutor(threads, "batches")
    try:
        made = deque(pool.submit(make, i) for i in range(most))
        for i in count(most):
            made.append(pool.submit(make, i))
            yield made.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def readers_of(source: Source) -> int:
    """Return how many threads make batches: one, but of folders in a store."""
    if isinstance(source, Mixture):
        return max(map(readers_of, source.rows.values()))
    windows = source.windows if isinstance(source, PackedDocuments) else source
    return windows.readers if isinstance(windows, Windows) else 1


def in_order(source: Source, shapes: Any, seed: int) -> Sequence[np.ndarray]:
    """Return the rows in the order of training, without end."""
    if isinstance(source, Mixture):
        return Mixed(source, [in_order(rows, shapes, seed) for rows in source.rows.values()])
    return Shuffled(_examples(source, shapes), seed)


class Shuffled:
    """Random access to the rows of a source without end, in another order in each epoch; no order is in memory."""

    def __init__(self, rows: Sequence[np.ndarray], seed: int):
        self.rows, self.order = rows, grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat(None)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.rows[self.order[int(i)]]


class Share:
    """Random access to the batches of one process: item i is some rows, stacked, of batch i of `size` items of
    `source`, starting at position."""

    def __init__(self, source: Sequence[np.ndarray], position: int, size: int, rows: np.ndarray):
        self.source, self.position, self.size, self.rows = source, position, size, rows.tolist()

    def __getitem__(self, i: int) -> np.ndarray:
        first = self.position + i * self.size
        return stacked([self.source[first + row] for row in self.rows])


def stacked(rows: Sequence[np.ndarray | arrays.Row]) -> np.ndarray | arrays.Row:
    """Return rows as one array, or of rows by name as one each."""
    return jax.tree.map(_stack, *rows)


def _stack(*rows: np.ndarray) -> np.ndarray:
    return np.stack(rows)


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
        sequences = stacked([examples[present[min(row, len(present) - 1)]] for row in rows])
        batch = rows_of(sequences, token_order)
        batch["targets"] = np.where((rows < len(present))[:, None], batch["targets"], -1)
        yield _to_devices(batch, rows, shapes)


def _examples(source: Source, shapes: Any) -> Source | WithDocuments:
    if isinstance(source, arrays.Rows):
        return source.only(list(shapes))
    if isinstance(source, Packed | PackedDocuments):
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


def _alone(array: np.ndarray) -> np.ndarray:
    return array[None]


def bigram_loss(
    dataset: Dataset, max_sequences: int, across_documents: bool = True, alpha: float = 0.1
) -> float | None:
    """Return the loss (nats per token) of a bigram model of all training text on the targets of `evaluation`.

    P(b | a) = (count(a, b) + alpha) / (count(a) + alpha V). A model that beats it uses context beyond the previous
    token. None without validation text, for arrays, or with more than 1024 ids (a large table) or 2^28 tokens.
    """
    V, train = dataset.vocab_size, dataset.train
    train = train.windows if isinstance(train, PackedDocuments) else train
    is_text = isinstance(train, Windows) and train.total <= 1 << 28
    if not V or V > 1024 or not len(dataset.val) or not is_text:
        return None
    counts, chunk = np.zeros(V * V, np.int64), 1 << 24
    for start in range(0, train.total - 1, chunk):
        tokens = train.slice(start, chunk + 1)
        counts += np.bincount(tokens[:-1] * V + tokens[1:], minlength=V * V)
    smooth = counts.reshape(V, V) + alpha
    losses = -np.log(smooth / smooth.sum(1, keepdims=True))
    total, count = 0.0, 0
    rows = _examples(dataset.val, () if across_documents else ("starts",))
    for i in held_out(dataset.val, max_sequences):
        row = rows_of(jax.tree.map(_alone, rows[i]), None)
        is_target = row["targets"] >= 0
        total += losses[row["inputs"], row["targets"]][is_target].sum()
        count += is_target.sum()
    return total / count if count else None
