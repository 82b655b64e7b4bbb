"""Text -> tokens: documents concatenated in one array. Needs no JAX.

A token folder of the first format (`read`; the second is token_folder.py) contains
    header.json      format, tokenizer, vocabulary, dtype, counts, SHA-256 of the other two files
    tokens.bin       the token ids of all documents, little-endian, memory-mapped when read
    documents.npy    one row per document: its end in tokens.bin, and a hash of its text
    tokenizer.json   the tokenizer, unless it is `bytes`, and the files beside it that name its end tokens
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanotrain_jax.data.stored import mapped_array
from nanotrain_jax.data.tokenizer import Tokenizer

FORMAT = "nanotrain_jax tokens 1"
AT_ONCE = 1 << 20  # bytes of text: what the tokenizer says of them takes about 50 times as much memory
DOCUMENT = np.dtype([("end", "<i8"), ("key", "<u8")])


class Corpus(NamedTuple):
    """Concatenated documents: document i is tokens[ends[i-1]:ends[i]]; keys are 64-bit hashes of their texts.

    replaced: number of invalid UTF-8 sequences that were replaced by U+FFFD. has_ends: an end token follows each
    document. left_out: files of a folder that are no text. of_texts: for each document the hash of the text of which it
    is a piece; None: documents are whole.
    """

    tokens: np.ndarray
    ends: np.ndarray
    keys: np.ndarray
    tokenizer: str
    vocab_size: int
    replaced: int = 0
    has_ends: bool = True
    left_out: tuple[str, ...] = ()
    of_texts: np.ndarray | None = None

    @property
    def wholes(self) -> np.ndarray:
        """The hash of the text of which each document is a piece, or that it is."""
        return self.keys if self.of_texts is None else self.of_texts

    @property
    def fingerprint(self) -> str:
        """Identify the documents, their order and the tokenizer."""
        return hashlib.sha256(self.tokenizer.encode() + self.ends.tobytes() + self.keys.tobytes()).hexdigest()[:16]

    def split(self, fraction: float, least: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of (training, validation) documents, the latter with about this fraction of the tokens.

        Documents with the smallest hashes are held out, so the choice does not depend on seed or order, and documents
        with the same text are always on the same side. A document longer than the fraction is never held out. least: of
        tokens to hold out, if the fraction is smaller. Raises NothingToHoldOut (a ValueError) if no documents are short
        enough for that.
        """
        if fraction == 0:
            return np.arange(len(self.keys)), np.arange(0)
        _, group = np.unique(self.keys, return_inverse=True)  # ordered by hash
        sizes = np.bincount(group, np.diff(self.ends, prepend=0))
        budget = max(fraction * sizes.sum(), least)
        fits = sizes <= budget
        held_out = fits & (np.cumsum(np.where(fits, sizes, 0)) - sizes < budget)
        if not held_out.any() or sizes[held_out].sum() < least:
            raise NothingToHoldOut(
                f"data.val_fraction={fraction} is {budget:.0f} tokens, but the documents that are not longer have "
                f"{sizes[fits].sum():.0f}; use more or shorter documents, a larger fraction, or 0 for no validation"
            )
        return np.flatnonzero(~held_out[group]), np.flatnonzero(held_out[group])

    def cut(self, size: int, line_ends: Sequence[int]) -> Corpus:
        """Return the corpus with its documents in pieces of at most size tokens, cut after a line end where one is.

        line_ends: ids of tokens that end a line. Pieces with the same tokens have the same key.
        """
        ends, start = [], 0
        for document_end in self.ends:
            while document_end - start > size:
                found = np.flatnonzero(np.isin(self.tokens[start : start + size], line_ends))
                start += int(found[-1]) + 1 if len(found) else size
                ends.append(start)
            start = int(document_end)
            ends.append(start)
        starts = [0, *ends[:-1]]
        keys = [text_key(self.tokens[a:b].tobytes()) for a, b in zip(starts, ends, strict=True)]
        of_texts = self.wholes[np.searchsorted(self.ends, ends)]
        return self._replace(ends=np.array(ends), keys=np.array(keys, np.uint64), of_texts=of_texts)


class NothingToHoldOut(ValueError):
    """No document is short enough to be held out."""


def text_key(text: bytes) -> int:
    """Return the 64-bit hash of a text."""
    return as_key(hash_of_text(text))


def hash_of_text(text: bytes = b"") -> hashlib.blake2b:
    """Return the hash of a text, of which more may follow."""
    return hashlib.blake2b(text, digest_size=8)


def as_key(content: hashlib.blake2b) -> int:
    """Return a hash as an integer."""
    return int.from_bytes(content.digest(), "little")


def stdlib_documents() -> Iterator[bytes]:
    """Yield the source files of Python's standard library, without tests: real text available on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    for path in sorted(root.rglob("*.py")):
        if not excluded & set(path.relative_to(root).parts):
            yield path.read_bytes()


def matching(pattern: str, key: str) -> list[str]:
    """Return the files that match a pattern, sorted. key: names it in messages. Raises ValueError if none does.

    A name of a file or of its folder is taken literally where it exists: brackets there are no pattern.
    """
    hint = "; brackets are a pattern: [[] stands for [" * ("[" in pattern)
    folder, name = os.path.split(pattern)
    if Path(pattern).is_file():
        pattern = glob.escape(pattern)
    elif Path(folder).is_dir():
        pattern = os.path.join(glob.escape(folder), name)
    paths = sorted(p for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
    if not paths:
        raise ValueError(f"{key} matches no file; check the pattern (relative to {Path.cwd()}){hint}")
    return paths


def encoded(documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield (token ids between begin and end token, hash of the text, number of U+FFFD replacements) of each non-empty
    document."""
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.uint32)
    for texts in at_once(d for d in documents if d):
        for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
            ids = np.append(tokenizer.begun(ids), end).astype(tokenizer.dtype)
            yield ids, text_key(text), 0 if tokenizer.is_bytes else replaced(text)


def at_once(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield documents to encode together: up to AT_ONCE bytes, and one more document."""
    texts, size = [], 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= AT_ONCE:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def replaced(text: bytes) -> int:
    """Return the number of U+FFFD that decoding with errors="replace" inserts for invalid UTF-8."""
    try:
        text.decode()
        return 0
    except UnicodeDecodeError:
        return text.decode(errors="replace").count("\ufffd") - text.count("\ufffd".encode())


def build(documents: Iterable[bytes], tokenizer: Tokenizer) -> Corpus:
    """Tokenize documents in memory."""
    arrays, keys, num_replaced = [], [], 0
    for ids, key, count in encoded(documents, tokenizer):
        arrays.append(ids)
        keys.append(key)
        num_replaced += count
    ends = np.cumsum([len(ids) for ids in arrays], dtype=np.int64)
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, tokenizer.dtype)
    keys = np.asarray(keys, np.uint64)
    return Corpus(tokens, ends, keys, tokenizer.name, tokenizer.vocab_size, num_replaced, tokenizer.end is not None)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder`, or is removed after an exception. Raises ValueError."""
    if folder.exists():
        raise ValueError(f"{folder} already exists; remove it or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + "."))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read(folder: str | Path, verify: bool = True) -> Corpus:
    """Memory-map a token folder. Raises ValueError if it is incomplete or (with verify) was modified, or OSError."""
    folder = Path(folder)
    command = "python -m nanotrain_jax.prepare"
    remedy = f"create it again with {command}"
    if not (folder / "header.json").is_file():
        raise ValueError(f"data.source='tokens:{folder}' has no header.json; create it with {command}")
    try:
        header = json.loads((folder / "header.json").read_text())
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}, not {FORMAT!r}")
        dtype, count = np.dtype(header["dtype"]), int(header["tokens"])
        sums = {name: str(header["sha256"][name]) for name in ("tokens.bin", "documents.npy")}
        name, vocab = str(header["tokenizer"]), int(header["vocab_size"])
        replaced = int(header.get("replaced", 0))  # missing in older versions
        has_ends = header.get("end", "missing in older versions") is not None
        if dtype not in (np.dtype("<u2"), np.dtype("<u4")):
            raise ValueError(f"dtype {dtype}")
        size = (folder / "tokens.bin").stat().st_size
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise ValueError(f"data.source='tokens:{folder}' is damaged ({error!r}); {remedy}") from None
    if size != count * dtype.itemsize:
        raise ValueError(
            f"{folder}/tokens.bin has {size} bytes, but its header says {count * dtype.itemsize}: it is truncated; "
            f"{remedy}"
        )
    for file, expected in sums.items() if verify else ():
        if digest(folder / file) != expected:
            raise ValueError(f"{folder}/{file} does not match the SHA-256 in its header: it was modified; {remedy}")
    try:
        documents = mapped_array(folder / "documents.npy")
    except ValueError as error:
        raise ValueError(f"{folder}/documents.npy is damaged ({error}); {remedy}") from None
    if documents.dtype != DOCUMENT or documents.ndim != 1:
        raise ValueError(f"{folder}/documents.npy is damaged (it holds {documents.dtype}); {remedy}")
    tokens = np.memmap(folder / "tokens.bin", dtype, "r", shape=(count,))
    if verify and tokens.max(initial=0) >= vocab:
        raise ValueError(f"{folder}/tokens.bin has id {tokens.max()}, but its header says vocab_size={vocab}; {remedy}")
    return Corpus(tokens, documents["end"].copy(), documents["key"].copy(), name, vocab, replaced, has_ends)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
