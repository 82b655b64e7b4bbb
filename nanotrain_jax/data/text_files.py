"""Texts of files, for `data.source=text:GLOB` and `nanotrain_jax.prepare`. A document is UTF-8, as bytes.

    .jsonl      a document per line: the text under a key
    .parquet    a document per row: the text in a column (pyarrow)
    others      a document per file, without its byte order mark; a single file is cut at line ends

.gz and .zst (pyarrow) behind any of them but .parquet are decompressed. In a folder, files that begin with a dot or are
not text are left out: one with a zero byte near its start, as git has it.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nanotrain_jax.data import corpus

COMPRESSED = ".gz", ".zst"
RECORDS = ".jsonl", ".parquet"
START = 8192  # bytes of a file in which a zero byte tells that it is no text
NO_UTF_8 = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16", codecs.BOM_UTF32_BE: "UTF-32"}


class Field(NamedTuple):
    """name: the key of .jsonl and column of .parquet with the text. key, or_skip: what messages say of it."""

    name: str
    key: str
    or_skip: str = ""


class Files(NamedTuple):
    """paths: files to read, sorted. binary: those of a folder that are not text."""

    paths: list[Path]
    binary: list[Path]


def matching(pattern: str, key: str) -> Files:
    """Return the files of a folder and of those in it, or the files that match a pattern (`corpus.matching`). key:
    names it in messages. Raises ValueError if there is none, or OSError."""
    if not Path(pattern).is_dir():
        return Files([Path(path) for path in corpus.matching(pattern, key)], [])
    found = Files([], [])
    for folder, folders, names in os.walk(pattern):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        for path in filter(Path.is_file, paths):
            (found.paths if is_text(path) else found.binary).append(path)
    if not found.paths:
        raise ValueError(f"{key} is a folder without a file of text; give another, or a pattern")
    return Files(sorted(found.paths), sorted(found.binary))


def is_text(path: Path) -> bool:
    """True if a file has no zero byte near its start, or a name that says what is in it. Raises OSError."""
    if path.suffix in COMPRESSED or kind(path) in RECORDS:
        return True
    with open(path, "rb") as file:
        start = file.read(START)
    return b"\0" not in start or start.startswith(tuple(NO_UTF_8))  # UTF-16 is refused where it is read


def kind(path: Path) -> str:
    """Return the ending of a file's name that tells what is in it: .jsonl of a.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def documents(paths: Sequence[Path], field: Field, skipped: Counter[str] | None = None) -> Iterator[bytes]:
    """Yield the texts of files. Raises ValueError or OSError.

    skipped: counts bad lines of .jsonl, which are skipped, by kind; None: the first bad line raises ValueError.
    """
    plain = [path for path in paths if kind(path) not in RECORDS]
    yield from pieces(text(plain[0])) if len(plain) == 1 else map(text, plain)
    for path in paths:
        if kind(path) == ".parquet":
            yield from parquet_documents(path, field)
        elif kind(path) == ".jsonl":
            yield from json_documents(path, field, skipped)


def whole_of_pieces(paths: Sequence[Path]) -> bytes | None:
    """Return the text of which the first documents are `pieces`; None if all are whole. Raises ValueError or
    OSError."""
    plain = [path for path in paths if kind(path) not in RECORDS]
    return text(plain[0]) if len(plain) == 1 else None


def key_of(path: Path) -> int:
    """Return the hash of a file's text (`corpus.text_key`), reading a part at a time. Raises ValueError or OSError."""
    content = corpus.hash_of_text()
    with opened(path) as file:
        content.update(file.read(1 << 20).removeprefix(codecs.BOM_UTF8))
        while part := file.read(1 << 20):
            content.update(part)
    return corpus.as_key(content)


def pieces(whole: bytes) -> Iterator[bytes]:
    """Cut a text at line ends into about 100 documents (1 to 64 KiB each), so that some can be held out."""
    start, size = 0, min(max(len(whole) // 100, 1 << 10), 1 << 16)
    while start < len(whole):
        stop = start + size
        if stop < len(whole):
            stop = whole.rfind(b"\n", start, stop) + 1 or stop
        yield whole[start:stop]
        start = stop


def text(path: Path) -> bytes:
    """Return the text of a file, without its byte order mark. Raises ValueError or OSError."""
    with opened(path) as file:
        return file.read().removeprefix(codecs.BOM_UTF8)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed. Raises ValueError, also if it is damaged or not UTF-8, or OSError."""
    try:
        with _decompressed(path) as file:
            start = file.peek(4)
            encoding = next((name for mark, name in NO_UTF_8.items() if start.startswith(mark)), None)
            if encoding:
                raise ValueError(
                    f"{path} is {encoding} text; write it as UTF-8 (iconv -f {encoding} -t UTF-8, or the editor's "
                    "'save as')"
                )
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged or truncated ({error}); download or write it again") from None


def _decompressed(path: Path) -> io.BufferedReader | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix != ".zst":
        return open(path, "rb")
    try:
        import pyarrow
    except ImportError:
        remedy = "pip install 'nanotrain_jax[parquet]', or decompress it (zstd -d)"
        raise ValueError(f"{path}: reading .zst needs pyarrow; {remedy}") from None
    return io.BufferedReader(_Zstandard(pyarrow.input_stream(str(path), compression="zstd")))


class _Zstandard(io.RawIOBase):
    """A stream of pyarrow whose errors of damaged content are EOFError."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self.stream.readinto(buffer)
        except OSError as error:
            if error.errno is not None:  # of the disk
                raise
            raise EOFError(error) from None


def json_documents(path: Path, field: Field, skipped: Counter[str] | None = None) -> Iterator[bytes]:
    """Yield the text of each line that is not blank. Raises ValueError or OSError. skipped: as in `documents`."""

    def text_or_none(number: int, line: bytes) -> bytes | None:
        try:
            return text_of(line, field) if line.strip() else b""
        except BadLine as error:
            if skipped is None:
                raise ValueError(f"{path}:{number}: {error}{field.or_skip}") from None
            skipped[error.kind] += 1
            return None

    with opened(path) as lines:
        texts = (text_or_none(number, line) for number, line in enumerate(lines, 1))
        yield from (text for text in texts if text is not None)


class BadLine(ValueError):
    """A line of .jsonl without text. kind: the category it is counted in."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def text_of(line: bytes, field: Field) -> bytes:
    """Return the text of a line of JSON. Raises BadLine."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine("not valid JSON", f"not valid JSON ({getattr(error, 'msg', error)}); fix the line") from None
    found = record.get(field.name) if isinstance(record, dict) else None
    if not isinstance(found, str):
        content = f"an object with the keys {[*record][:20]}" if isinstance(record, dict) else "not an object"
        missing = f"no text under {field.name!r}"
        raise BadLine(missing, f"{missing} (the line is {content}); name the key of the text with {field.key}")
    return found.encode("utf-8", "surrogatepass")  # a lone surrogate becomes invalid UTF-8, which is counted


def parquet_documents(path: Path, field: Field) -> Iterator[bytes]:
    """Yield the texts in one column of a file. Raises ValueError or OSError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow; pip install 'nanotrain_jax[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        name, names = field.name, file.schema_arrow.names
        if name not in names:
            raise ValueError(f"{path}: no column {name!r} (it has {', '.join(names)}); use {field.key}")
        found = file.schema_arrow.field(name).type
        if found not in (pyarrow.string(), pyarrow.large_string()):
            raise ValueError(f"{path}: column {name!r} has type {found}, not text; use {field.key}")
        for batch in file.iter_batches(columns=[name]):
            yield from (text.encode() for text in batch.column(0).to_pylist() if text)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({error}); remove it from the list") from None
