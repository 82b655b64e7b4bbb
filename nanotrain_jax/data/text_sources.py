"""Sources of text: stdlib, text:GLOB, tokens:DIR, mixtures of them, and further validation sets.

A text that one source holds out, or that is in data.validation, is in no training row of any of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanotrain_jax.config.mixture import Part
from nanotrain_jax.config.schema import Data
from nanotrain_jax.data import corpus as corpora
from nanotrain_jax.data import mixture, text_files
from nanotrain_jax.data import tokenizer as tokenizers
from nanotrain_jax.data.corpus import Corpus
from nanotrain_jax.data.dataset import Dataset, ValidationSet
from nanotrain_jax.data.mixture import Mixture
from nanotrain_jax.data.windows import Windows

PIECES = 8  # about, to hold out, of documents that are too long to be held out whole


class Opened(NamedTuple):
    """A source of training: its documents, and which of them are trained on and held out. pieces: see Dataset."""

    name: str
    corpus: Corpus
    train: np.ndarray
    held_out: np.ndarray
    pieces: int


def load(config: Data) -> Dataset:
    """Open a source of text, or a mixture of several. Raises ValueError or OSError."""
    parts = config.parts or (Part(name="all", source=config.source),)
    opened = [opened_part(part.name, config.model_copy(update={"source": part.source})) for part in parts]
    further = {one.name: corpus_of(config.model_copy(update={"source": one.source})) for one in config.validation}
    check_tokenizers({one.name: one.corpus for one in opened} | further)
    opened, told = without_held_out(opened, list(further.values()))
    sides = [(windows(one, config), Windows(one.corpus, one.held_out, config.seq_len)) for one in opened]
    (train, val), first = sides[0], opened[0].corpus
    if config.parts:
        names, weights = [one.name for one in opened], [part.weight for part in parts]
        train, val = (Mixture(dict(zip(names, rows, strict=True)), weights) for rows in zip(*sides, strict=True))
    corpora_read = [*(one.corpus for one in opened), *further.values()]
    return Dataset(
        train,
        val,
        first.tokenizer,
        first.vocab_size,
        fingerprint(opened, config, told),
        replaced=sum(corpus.replaced for corpus in corpora_read),
        pieces=sum(one.pieces for one in opened),
        has_ends=first.has_ends,
        notes=tuple(line for corpus in corpora_read for line in notes(corpus)) + tuple(told),
        further=tuple(further_set(name, corpus, config) for name, corpus in further.items()),
        of_further=" ".join(corpus.fingerprint for corpus in further.values()),
    )


def opened_part(name: str, config: Data) -> Opened:
    """Open one source of training. Raises ValueError or OSError."""
    corpus, need = corpus_of(config), config.seq_len + 1
    if len(corpus.tokens) < need:
        raise ValueError(
            f"data.source={config.source!r} has {len(corpus.tokens)} tokens, but data.seq_len={config.seq_len} needs "
            f"at least {need}; use more text or a shorter data.seq_len"
        )
    documents = len(corpus.ends)
    corpus, (train, held_out) = divided(corpus, config)
    for what, side in ("train on", train), ("hold out", held_out):
        total = int(np.diff(corpus.ends, prepend=0)[side].sum())
        if total < need and (side is train or config.val_fraction):
            raise ValueError(
                f"data.val_fraction={config.val_fraction} leaves {total} tokens to {what}, but data.seq_len="
                f"{config.seq_len} needs at least {need}; change data.val_fraction (0: no validation), or use more text"
            )
    return Opened(name, corpus, train, held_out, len(corpus.ends) if len(corpus.ends) > documents else 0)


def without_held_out(opened: Sequence[Opened], validation: Sequence[Corpus]) -> tuple[list[Opened], list[str]]:
    """Return sources that do not train on what another one holds out, or on data.validation, and lines about them.
    Raises ValueError if nothing is left of one."""
    of_validation = [mixture.texts_of(np.arange(len(corpus.keys)), corpus) for corpus in validation]
    of_sources = [mixture.texts_of(one.held_out, one.corpus) for one in opened]
    found, told = [], []
    for number, one in enumerate(opened):
        others = of_sources[:number] + of_sources[number + 1 :]
        train = mixture.apart(one.train, one.corpus, [*of_validation, *others])
        count = len(one.train) - len(train)
        if count:
            told.append(f"{one.name}: {count:,} of its documents are held out elsewhere, and not trained on")
        found.append(one._replace(train=train))
    return found, told


def windows(one: Opened, config: Data) -> Windows:
    """Return the training rows of a source. Raises ValueError if there are none."""
    rows = Windows(one.corpus, one.train, config.seq_len)
    if not len(rows):
        raise ValueError(
            f"data.source: of {one.name} {rows.total} tokens are left to train on, as other sources or data.validation "
            f"hold out the rest, but data.seq_len={config.seq_len} needs at least {config.seq_len + 1}; use other texts"
        )
    return rows


def further_set(name: str, corpus: Corpus, config: Data) -> ValidationSet:
    """Return a set of data.validation. Raises ValueError if it has no row."""
    rows = Windows(corpus, np.arange(len(corpus.ends)), config.seq_len)
    if not len(rows):
        raise ValueError(
            f"data.validation: {name} has {rows.total} tokens, but data.seq_len={config.seq_len} needs at least "
            f"{config.seq_len + 1}; use more text or a shorter data.seq_len"
        )
    return ValidationSet(name, rows, 0.0)


def check_tokenizers(found: dict[str, Corpus]) -> None:
    """Raise ValueError unless all sources have the same tokenizer."""
    (first, of_first), *others = ((name, corpus.tokenizer) for name, corpus in found.items())
    for name, other in others:
        if other != of_first:
            raise ValueError(
                f"data: the tokenizer of {name} is {other}, that of {first} is {of_first}; prepare all with the same "
                "one, and set data.tokenizer to its file for text"
            )


def fingerprint(opened: Sequence[Opened], config: Data, told: Sequence[str]) -> str:
    """Identify the rows of training and their order. told: what is left out (`without_held_out`)."""
    keys = f"val_fraction {config.val_fraction} seq_len {config.seq_len} seed {config.seed}"
    if not config.parts and not told:
        return f"{opened[0].corpus.fingerprint} {keys}"
    content = hashlib.sha256()
    for one in opened:
        content.update(one.corpus.fingerprint.encode() + one.train.tobytes())
    weights = " ".join(str(part.weight) for part in config.parts)
    return f"{content.hexdigest()[:16]} weights {weights} {keys}"


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
    """Return the tokenizer of a data source of text; of a mixture that of the first token folder. Raises ValueError or
    OSError."""
    sources = [part.source for part in config.parts] or [config.source]
    split = (source.partition(":") for source in sources)
    folders = (where for kind, _, where in split if kind == "tokens" and (Path(where) / tokenizers.TOKENIZER).exists())
    return tokenizers.load(config.tokenizer or next(folders, "bytes"), config.end_token)


def corpus_of(config: Data) -> Corpus:
    """Read a source of text. Raises ValueError or OSError."""
    kind, _, where = config.source.partition(":")
    if kind == "tokens" and where:
        corpus = corpora.read(where, config.verify)
        if (config.tokenizer or config.end_token) and tokenizer_of(config).name != corpus.tokenizer:
            raise ValueError(
                f"data.tokenizer={config.tokenizer!r} with data.end_token={config.end_token!r} is not the tokenizer of "
                f"{config.source!r} (which is {corpus.tokenizer}); remove both keys"
            )
        return corpus
    if kind == "text" and where:
        return of_texts(config, where)
    if config.source == "stdlib":
        return corpora.build(corpora.stdlib_documents(), tokenizer_of(config))
    raise ValueError(
        f"data.source={config.source!r} must be stdlib, text:GLOB, tokens:DIR, arrays:DIR, chat:GLOB, pairs:GLOB or "
        "synthetic"
    )


def of_texts(config: Data, where: str) -> Corpus:
    """Read and tokenize text:GLOB. Raises ValueError or OSError."""
    files = text_files.matching(where, f"data.source={config.source!r}")
    texts = text_files.documents(files.paths, text_files.Field(config.field, "data.field"))
    corpus = corpora.build(texts, tokenizer_of(config))._replace(left_out=tuple(map(str, files.binary)))
    whole = text_files.whole_of_pieces(files.paths)
    return corpus if whole is None else corpus._replace(of_texts=np.full_like(corpus.keys, corpora.text_key(whole)))


def notes(corpus: corpora.Corpus) -> Iterator[str]:
    """Yield lines about a corpus."""
    if corpus.left_out:
        count = len(corpus.left_out)
        yield f"warning: {count:,} files of the folder are no text and are left out; the first is {corpus.left_out[0]}"
