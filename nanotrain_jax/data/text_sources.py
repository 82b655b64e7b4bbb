"""Sources of text: stdlib, text:GLOB, tokens:DIR, mixtures of them, and further validation sets.

A text that one source holds out, or that is in data.validation, is in no training row of any of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanotrain_jax.config.mixture import Part
from nanotrain_jax.config.schema import Data
from nanotrain_jax.config.values import is_remote
from nanotrain_jax.data import corpus as corpora
from nanotrain_jax.data import stored, text_files, token_folder
from nanotrain_jax.data import tokenizer as tokenizers
from nanotrain_jax.data.corpus import Corpus
from nanotrain_jax.data.dataset import Dataset, ValidationSet
from nanotrain_jax.data.mixture import Mixture
from nanotrain_jax.data.opened import Opened
from nanotrain_jax.data.packed_documents import PackedDocuments
from nanotrain_jax.data.windows import Windows

PIECES = 8  # about, to hold out, of documents that are too long to be held out whole


def load(config: Data) -> Dataset:
    """Open a source of text, or a mixture of several. Raises ValueError or OSError."""
    is_packed = config.packing == "best_fit"
    parts = config.parts or (Part(name="data.source", source=config.source),)
    opened = [open_part(part.name, config.model_copy(update={"source": part.source})) for part in parts]
    further = [
        open_whole(one.name, config.model_copy(update={"source": one.source, "val_fraction": 0}))
        for one in config.validation
    ]
    check_tokenizers([*opened, *further])
    opened, told = without_held_out(opened, further)
    identity = fingerprint(opened, config, told)
    sides = [rows_of(one, config) for one in opened]
    train, val = sides[0]
    if config.parts:
        names, weights = [one.name for one in opened], [part.weight for part in parts]
        train, val = (Mixture(dict(zip(names, rows, strict=True)), weights) for rows in zip(*sides, strict=True))
    read = [*opened, *further]
    told += [note(one.name, rows) for one, (rows, _) in zip(opened, sides, strict=True) if is_packed]
    return Dataset(
        train,
        val,
        opened[0].facts.tokenizer,
        max(one.facts.vocab_size for one in opened),
        identity,
        replaced=sum(one.facts.replaced for one in read),
        pieces=sum(one.pieces for one in opened),
        has_ends=all(one.facts.has_ends for one in opened),
        notes=(*(line for one in read for line in one.notes), *told),
        further=tuple(further_set(one, config) for one in further),
        of_further=" ".join(one.facts.fingerprint for one in further),
    )


def open_part(name: str, config: Data) -> Opened:
    """Open one source of training. Raises ValueError or OSError."""
    if folder := sharded(config):
        return open_shards(name, config, folder)
    corpus, need = corpus_of(config), config.seq_len + 1
    if len(corpus.tokens) < need:
        raise ValueError(
            f"data.source={config.source!r} has {len(corpus.tokens)} tokens, but data.seq_len={config.seq_len} needs "
            f"at least {need}; use more text or a shorter data.seq_len"
        )
    documents = len(corpus.ends)
    corpus, (train, held_out) = divided(corpus, config)
    pieces = len(corpus.ends) if len(corpus.ends) > documents else 0
    sides = [Windows(corpus, side, config.seq_len) for side in (train, held_out)]
    for what, side in zip(("train on", "hold out"), sides, strict=True):
        if not len(side) and (what == "train on" or config.val_fraction):
            raise ValueError(
                f"data.val_fraction={config.val_fraction} leaves {side.total} tokens to {what}, but data.seq_len="
                f"{config.seq_len} needs at least {need}; change data.val_fraction (0: no validation), or use more text"
            )
    return Opened(name, corpus, *sides, pieces, left_out(corpus))


def left_out(corpus: Corpus) -> list[str]:
    """Return a line about files of a folder that are no text, if there are some."""
    found = corpus.left_out
    count = f"{len(found):,} files of the folder are no text and are left out"
    return [f"warning: {count}; the first is {found[0]}"] if found else []


def sharded(config: Data) -> Path | None:
    """Return the folder of a source that is a token folder of the second format."""
    kind, _, where = config.source.partition(":")
    if kind != "tokens" or not where:
        return None
    folder = stored.folder_at(where)
    if is_remote(where) and not token_folder.is_sharded(folder):
        raise ValueError(f"data.source={config.source!r} has no {token_folder.HEADER}; copy there what prepare wrote")
    return folder if token_folder.is_sharded(folder) else None


def open_shards(name: str, config: Data, folder: Path) -> Opened:
    """Open a token folder of the second format. Raises ValueError or OSError."""
    header, train, val = token_folder.sides(folder, config)
    check_tokenizer(config, header.tokenizer, folder)
    return Opened(name, header, train, val)


def open_whole(name: str, config: Data) -> Opened:
    """Open a source of data.validation: all of it is held out. config: with data.val_fraction=0. Raises ValueError or
    OSError."""
    if folder := sharded(config):
        found = open_shards(name, config, folder)
        return found._replace(train=found.held_out, held_out=found.train)
    corpus = corpus_of(config)
    sides = (Windows(corpus, np.arange(count), config.seq_len) for count in (0, len(corpus.ends)))
    return Opened(name, corpus, *sides, notes=left_out(corpus))


def without_held_out(opened: Sequence[Opened], further: Sequence[Opened]) -> tuple[list[Opened], list[str]]:
    """Return sources that do not train on what another one holds out, or on data.validation, and lines about them.
    Raises ValueError if nothing is left of one, or it is a folder of shards."""
    if len(opened) + len(further) == 1:  # a token folder opens without a look at its documents
        return [*opened], []
    held, found, told = [one.held_texts() for one in [*opened, *further]], [], []
    for number, one in enumerate(opened):
        others = [np.zeros(0, np.uint64), *held[:number], *held[number + 1 :]]
        found.append(one.without(np.unique(np.concatenate(others))))
        if count := one.train.count - found[-1].train.count:
            told.append(f"{one.name}: {count:,} of its documents are held out elsewhere, and not trained on")
    return found, told


def rows_of(one: Opened, config: Data) -> tuple[Windows | PackedDocuments, ...]:
    """Return the sequences to train on and those held out. Raises ValueError if there are none to train on."""
    train, val = one.train, one.held_out
    if not len(train):
        raise ValueError(
            f"data: of {one.name} {train.total} tokens are left to train on, as other sources or data.validation hold "
            f"out the rest, but data.seq_len={config.seq_len} needs at least {config.seq_len + 1}; use other texts"
        )
    return in_rows(train, config), in_rows(val, config)


def further_set(one: Opened, config: Data) -> ValidationSet:
    """Return a set of data.validation. Raises ValueError if it has no row."""
    rows = one.held_out
    if not len(rows):
        raise ValueError(
            f"data.validation: {one.name} has {rows.total} tokens, but data.seq_len={config.seq_len} needs at least "
            f"{config.seq_len + 1}; use more text or a shorter data.seq_len"
        )
    return ValidationSet(one.name, in_rows(rows, config), 0.0)


def in_rows(windows: Windows, config: Data) -> Windows | PackedDocuments:
    """Return the rows of data.pack. Raises ValueError."""
    return PackedDocuments(windows) if config.packing == "best_fit" else windows


def note(name: str, rows: PackedDocuments) -> str:
    """Return a line about the rows of a source. Raises ValueError if there is none."""
    if not len(rows):
        raise ValueError(f"data.pack=best_fit: no document of {name} has two tokens; use data.pack=concatenate")
    return (
        f"data.pack=best_fit: {name} has {rows.documents:,} documents to train on; {rows.cut:,} are longer than "
        f"data.seq_len and cut; rows are {rows.fill:.1%} full"
    )


def check_tokenizers(found: Sequence[Opened]) -> None:
    """Raise ValueError unless all sources have the same tokenizer."""
    first, *rest = ((one.name, one.facts.tokenizer) for one in found)
    for name, tokenizer in rest:
        if tokenizer != first[1]:
            raise ValueError(
                f"data: the tokenizer of {name} is {tokenizer}, that of {first[0]} is {first[1]}; "
                "prepare all with the same one, and set data.tokenizer to its file for text"
            )


def check_tokenizer(config: Data, name: str, folder: Path) -> None:
    """Raise ValueError unless the file in a token folder is the tokenizer that it was made with, and so are
    data.tokenizer, data.end_token and data.begin_token, if set. name: of that tokenizer."""
    own = tokenizers.load(str(folder)).name if stored.exists(folder / tokenizers.TOKENIZER) else name
    is_older = tokenizers.begin_apart(own, name) == tokenizers.NO_BEGIN
    if is_older and config.begin_token != tokenizers.NO_BEGIN:
        raise ValueError(
            f"data.source={config.source!r} was prepared without the begin token that its tokenizer adds ({own}); "
            f"prepare it again, or set data.begin_token={tokenizers.NO_BEGIN} to train without"
        )
    if own != name and not is_older:
        raise ValueError(
            f"{folder / tokenizers.TOKENIZER} or a file beside it is not of the tokenizer of {config.source!r} (which "
            f"is {name}): it was modified; copy the folder again, or create it with python -m nanotrain_jax.prepare"
        )
    keys = {key: getattr(config, key) for key in ("tokenizer", "end_token", "begin_token")}
    given = " with ".join(f"data.{key}={value!r}" for key, value in keys.items() if value)
    if given and tokenizer_of(config).name != name:
        raise ValueError(f"{given} is not the tokenizer of {config.source!r} (which is {name}); remove the keys")


def fingerprint(opened: Sequence[Opened], config: Data, told: Sequence[str]) -> str:
    """Identify the rows of training and their order. told: what is left out (`without_held_out`)."""
    keys = f"val_fraction {config.val_fraction} seq_len {config.seq_len} seed {config.seed}"
    keys += " pack best_fit" * (config.packing == "best_fit")
    if not config.parts and not told:
        return f"{opened[0].facts.fingerprint} {keys}"
    content = hashlib.sha256()
    for one in opened:
        content.update(f"{one.facts.fingerprint} {one.train.chosen}".encode())
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
    folders = [where for kind, _, where in (source.partition(":") for source in sources) if kind == "tokens"]
    found = next((where for where in folders if stored.exists(stored.folder_at(where) / tokenizers.TOKENIZER)), "bytes")
    return tokenizers.load(config.tokenizer or found, config.end_token, config.begin_token)


def corpus_of(config: Data) -> Corpus:
    """Read a source of text. Raises ValueError or OSError."""
    kind, _, where = config.source.partition(":")
    if kind == "tokens" and where:
        corpus = corpora.read(where, config.verify != "off")
        check_tokenizer(config, corpus.tokenizer, stored.folder_at(where))
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
    if not whole:
        return corpus
    of_texts = corpus.keys.copy()
    of_texts[: sum(1 for _ in text_files.pieces(whole))] = corpora.text_key(whole)
    return corpus._replace(of_texts=of_texts)
