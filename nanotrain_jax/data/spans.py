"""Which part of the input each shard has, and reading it: spans of files, so that one large file is shared out.

The spans follow from the names and sizes of the files alone: any number of processes writes the same shards.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nanotrain_jax.data import text_files
from nanotrain_jax.data.text_files import Field

MANY = 100  # files of text: with fewer, they are cut into about so many documents
LEAST, MOST = 1 << 24, 1 << 32  # bytes of input of a shard; between them, about a 256th of all


class Span(NamedTuple):
    """Bytes start .. stop of a file: the lines that begin there; or a whole file. piece: cut the text at line ends into
    documents of at most so many bytes; 0: a file is a document, or what it says are."""

    path: str
    start: int
    stop: int
    piece: int = 0


def shards_of(paths: Sequence[Path]) -> list[list[Span]]:
    """Return the spans of each shard. Raises OSError."""
    sizes = {path: path.stat().st_size for path in paths}
    total = sum(sizes.values())
    most = min(max(total // 256, LEAST), MOST)
    texts = [path for path in paths if text_files.kind(path) not in text_files.RECORDS]
    piece = min(max(sum(sizes[path] for path in texts) // MANY, 1 << 10), 1 << 16) if len(texts) < MANY else 0
    pieces = {path: piece for path in texts}
    shards, room = [], 0
    for span in chain.from_iterable(_spans(path, sizes[path], pieces.get(path, 0), most) for path in paths):
        size = span.stop - span.start
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(span)
        room -= size
    return shards


def _spans(path: Path, size: int, piece: int, most: int) -> Iterator[Span]:
    """Yield a file in spans of at most `most` bytes, or whole: one that is compressed, parquet, or one document."""
    if path.suffix in text_files.COMPRESSED or not (piece or path.suffix == ".jsonl"):
        yield Span(str(path), 0, size, piece)
        return
    for start in range(0, size, most):
        yield Span(str(path), start, min(start + most, size), piece)


def documents(spans: Sequence[Span], field: Field, skipped: Counter[str] | None) -> Iterator[bytes]:
    """Yield the documents of spans. Raises ValueError or OSError. skipped: as of text_files.documents."""
    for span in spans:
        path = Path(span.path)
        if text_files.kind(path) == ".parquet":
            yield from text_files.parquet_documents(path, field)
        elif text_files.kind(path) == ".jsonl":
            yield from _records(span, field, skipped)
        elif span.piece:
            yield from _pieces(span)
        else:
            yield text_files.text(path)


def _lines(file: BinaryIO, span: Span, size: int = -1) -> Iterator[bytes]:
    """Yield the lines that begin in a span, in parts of at most `size` bytes."""
    if span.start:
        file.seek(span.start - 1)
        while (rest := file.readline(1 << 16)) and not rest.endswith(b"\n"):
            pass
    is_compressed = Path(span.path).suffix in text_files.COMPRESSED
    begins = True
    while is_compressed or not begins or file.tell() < span.stop:
        line = file.readline(size)
        if not line:
            return
        yield line
        begins = line.endswith(b"\n")


def _records(span: Span, field: Field, skipped: Counter[str] | None) -> Iterator[bytes]:
    """Yield the texts of the lines of a span of .jsonl."""
    path = Path(span.path)

    def text_or_none(count: int, line: bytes) -> bytes | None:
        try:
            return text_files.text_of(line, field) if line.strip() else b""
        except text_files.BadLine as error:
            if skipped is None:
                number = _lines_before(path, span.start) + count
                raise ValueError(f"{path}:{number}: {error}{field.or_skip}") from None
            skipped[error.kind] += 1
            return None

    with text_files.opened(path) as file:
        texts = (text_or_none(count, line) for count, line in enumerate(_lines(file, span), 1))
        yield from (text for text in texts if text is not None)


def _lines_before(path: Path, start: int) -> int:
    """Return how many lines of a file begin before a span at `start`."""
    if not start:
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in _lines(file, Span(str(path), 0, start)))


def _pieces(span: Span) -> Iterator[bytes]:
    """Yield the text of a span, cut after a line end where one is, else after `piece` bytes."""
    with text_files.opened(Path(span.path)) as file:
        kept = b"" if span.start else file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        for line in _lines(file, span, span.piece):
            kept += line
            while len(kept) > span.piece:
                cut = kept.rfind(b"\n", 0, span.piece) + 1 or span.piece
                yield kept[:cut]
                kept = kept[cut:]
    yield kept
