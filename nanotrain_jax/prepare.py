"""Tokenize text files into a folder of memory-mapped tokens for `data.source=tokens:DIR`.

    python -m nanotrain_jax.prepare TEXT_FILES... --out DIR [--tokenizer bytes|train-bpe:32000|PATH] [--skip-bad]

.txt: a document per file (a single file is split at line ends into about a hundred); .jsonl, .jsonl.gz: a document per
line; .parquet: a document per row. Exit codes: 0 done; 2 the request is wrong (one line on stderr); 1 anything else.
"""

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin(finishes=True)

import argparse
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from rich.progress import track

from nanotrain_jax.config.load import Parser, one_line, path_argument, refuse
from nanotrain_jax.data import corpus
from nanotrain_jax.data.tokenizer import END_OF_TEXT, TOKENIZER, Tokenizer, of_files
from nanotrain_jax.data.tokenizer import load as load_tokenizer
from nanotrain_jax.run import shell

KINDS = ".txt", ".jsonl", ".jsonl.gz", ".parquet"


def documents(paths: list[Path], field: str, skipped: Counter[str] | None) -> Iterator[bytes]:
    """Yield the texts of all files. Raises ValueError or OSError.

    skipped: counts bad lines of .jsonl, which are skipped, by kind; None: the first bad line raises ValueError.
    """
    if texts := [p for p in paths if p.suffix == ".txt"]:
        yield from corpus.text_documents(texts)
    for path in paths:
        if path.suffix == ".parquet":
            yield from parquet_documents(path, field)
        elif path.suffix != ".txt":
            yield from json_documents(path, field, skipped)


def json_documents(path: Path, field: str, skipped: Counter[str] | None) -> Iterator[bytes]:
    """Yield the text of each line that is not blank. Raises ValueError or OSError. skipped: as in `documents`."""

    def text_or_none(number: int, line: bytes) -> bytes | None:
        try:
            return text_of(line, field) if line.strip() else b""
        except BadLine as error:
            if skipped is None:
                raise ValueError(f"{path}:{number}: {error}, or skip such lines with --skip-bad") from None
            skipped[error.kind] += 1
            return None

    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            texts = (text_or_none(number, line) for number, line in enumerate(lines, 1))
            yield from (text for text in texts if text is not None)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged or truncated ({error}); download or write it again") from None


class BadLine(ValueError):
    """A line of .jsonl without text. kind: the category it is counted in."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def text_of(line: bytes, field: str) -> bytes:
    """Return the text of a line of JSON. Raises BadLine."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine("not valid JSON", f"not valid JSON ({getattr(error, 'msg', error)}); fix the line") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        content = f"an object with the keys {[*record][:20]}" if isinstance(record, dict) else "not an object"
        message = f"no text under {field!r} (the line is {content}); name the key of the text with --field"
        raise BadLine(f"no text under {field!r}", message)
    return text.encode("utf-8", "surrogatepass")  # a lone surrogate becomes invalid UTF-8, which is counted


def parquet_documents(path: Path, field: str) -> Iterator[bytes]:
    """Yield the texts in one column of a file. Raises ValueError or OSError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow; pip install 'nanotrain_jax[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise ValueError(f"{path}: no column {field!r} (it has {', '.join(file.schema_arrow.names)}); use --field")
        kind = file.schema_arrow.field(field).type
        if kind not in (pyarrow.string(), pyarrow.large_string()):
            raise ValueError(f"{path}: column {field!r} has type {kind}, not text; use --field")
        for batch in file.iter_batches(columns=[field]):
            yield from (text.encode() for text in batch.column(0).to_pylist() if text)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({error}); remove it from the list") from None


def train_bpe(texts: Iterator[bytes], size: str) -> Tokenizer:
    """Train a byte-level BPE (as GPT-2) of `size` ids on the texts. Raises ValueError."""
    end = END_OF_TEXT[0]
    if not re.fullmatch(r"\d{1,7}", size, re.ASCII) or int(size) < 257:
        raise ValueError(
            f"--tokenizer=train-bpe:{size}: the size must be at least 257 (256 bytes and {end}); "
            "use e.g. train-bpe:32000"
        )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[end],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((t.decode("utf-8", errors="replace") for t in texts), trainer)
    return of_files({TOKENIZER: model.to_str()}, "the BPE just trained")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 if it is wrong."""
    parser = Parser(
        prog="python -m nanotrain_jax.prepare", description="Turn text files into a folder of memory-mapped tokens."
    )
    path = path_argument
    parser.add_argument("files", nargs="+", type=path, help=", ".join(KINDS))
    parser.add_argument("--out", required=True, type=path, help="output folder; must not exist")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        type=path,
        help="bytes (default) | train-bpe:SIZE | path of a tokenizer.json or of its folder, as in a Hugging Face model "
        "repository",
    )
    parser.add_argument("--end-token", help="ends each document (default: as of data.end_token)")
    parser.add_argument("--field", default="text", help="key or column that holds the text (default: text)")
    parser.add_argument("--skip-bad", action="store_true", help="skip and count bad lines of .jsonl")
    return parser.parse_args(argv)


def check(files: list[Path]) -> None:
    """Raise ValueError or OSError if a file has an unknown extension, is a folder, or is missing."""
    for path in files:
        if not path.name.endswith(KINDS):
            raise ValueError(f"{path}: must be one of {', '.join(KINDS)}; rename or convert it")
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; give the files in it")
        path.stat()


def main(argv: list[str] | None = None) -> int:
    """Write the folder; 2 if the request is wrong."""
    asked = arguments(argv)
    files = [Path(file) for file in asked.files]
    out, name = Path(asked.out), asked.tokenizer
    skipped = Counter() if asked.skip_bad else None

    def texts(task):
        if skipped:
            skipped.clear()  # counts of the pass that trained the tokenizer
        return track(documents(files, asked.field, skipped), task, disable=not sys.stderr.isatty())

    try:
        check(files)
        if out.exists():
            raise ValueError(f"--out={out}: already exists; remove it or choose another")
        if name.startswith("train-bpe:"):
            tokenizer = train_bpe(texts("training the tokenizer"), name.removeprefix("train-bpe:"))
        else:
            tokenizer = load_tokenizer(name, asked.end_token, "--tokenizer", "bytes, train-bpe:SIZE")
        header = corpus.write(out, texts("tokenizing"), tokenizer)
    except (ValueError, OSError) as error:
        return refuse(error)
    lines = [f"{out}: {header['tokens']:,} tokens in {header['documents']:,} documents, {header['vocab_size']:,} ids "]
    lines[0] += f"({header['tokenizer']}); train with data.source=tokens:{out}"
    lines += [f"skipped {count:,} lines: {kind}" for kind, count in sorted((skipped or {}).items())]
    if header["end"] is None:
        lines.append("the tokenizer names no end token: documents run into each other; --end-token sets one")
    if header["replaced"]:
        lines.append(f"replaced {header['replaced']:,} invalid UTF-8 sequences by U+FFFD")
    print("\n".join(map(one_line, lines)))
    return 0


if __name__ == "__main__":
    sys.exit(shell.run(main))
