"""Text files -> a folder of memory-mapped tokens for `data.source=tokens:DIR`.

    python scripts/prepare_data.py TEXT_FILES... --out DIR [--tokenizer bytes|train-bpe:32000|FILE]

.txt: a document per file (one file alone is cut at line ends into about a hundred); .jsonl, .jsonl.gz: a document per
line; .parquet: a document per row. Exit codes: 0 done; 2 the request is wrong, told in one line on stderr; 1 anything
else.
"""

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from rich.progress import track

from nanotrain_jax.runtime import corpus

KINDS = ".txt", ".jsonl", ".jsonl.gz", ".parquet"


def documents(paths: list[Path], field: str) -> Iterator[bytes]:
    """The texts of all files. Raises ValueError or OSError."""
    if texts := [p for p in paths if p.suffix == ".txt"]:
        yield from corpus.text_documents(texts)
    for path in paths:
        if path.suffix == ".parquet":
            yield from parquet_documents(path, field)
        elif path.suffix != ".txt":
            with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    try:
                        yield json.loads(line)[field].encode()
                    except (ValueError, KeyError, TypeError, AttributeError):
                        raise ValueError(
                            f"{path}:{number} is not a JSON object with a text under {field!r}; use --field"
                        ) from None


def parquet_documents(path: Path, field: str) -> Iterator[bytes]:
    """The texts in one column of a file. Raises ValueError or OSError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow; pip install 'nanotrain_jax[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise ValueError(
                f"{path} has no column {field!r} (it has {', '.join(file.schema_arrow.names)}); use --field"
            )
        kind = file.schema_arrow.field(field).type
        if kind not in (pyarrow.string(), pyarrow.large_string()):
            raise ValueError(f"{path}: column {field!r} holds {kind}, not text; use --field")
        for batch in file.iter_batches(columns=[field]):
            yield from (text.encode() for text in batch.column(0).to_pylist() if text)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file ({error}); remove it from the list") from None


def train_bpe(texts: Iterator[bytes], size: str) -> corpus.Tokenizer:
    """A byte-level BPE (as GPT-2) of `size` ids, trained on the texts. Raises ValueError."""
    end = corpus.END_OF_TEXT[0]
    if not re.fullmatch(r"\d{1,7}", size, re.ASCII) or int(size) < 257:
        raise ValueError(
            f"--tokenizer train-bpe:{size}: the size is a number of at least 257 (256 bytes and {end}); "
            "try train-bpe:32000"
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
    return corpus.json_tokenizer(model.to_str(), "the BPE just trained")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Turn text files into a folder of memory-mapped tokens.")
    parser.add_argument("files", nargs="+", type=Path, help=", ".join(KINDS))
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes | train-bpe:SIZE | path of a tokenizer.json (default: bytes)"
    )
    parser.add_argument("--field", default="text", help="key or column that holds the text (default: text)")
    arguments = parser.parse_args(argv)
    try:
        for path in arguments.files:
            if not path.name.endswith(KINDS):
                raise ValueError(f"{path}: not one of {', '.join(KINDS)}; rename or convert it")
            path.stat()
        if arguments.out.exists():
            raise ValueError(f"--out {arguments.out} exists already; remove it or choose another")

        def texts(task):
            return track(documents(arguments.files, arguments.field), task, disable=not sys.stderr.isatty())

        name = arguments.tokenizer
        if name.startswith("train-bpe:"):
            tokenizer = train_bpe(texts("training the tokenizer"), name.removeprefix("train-bpe:"))
        else:
            tokenizer = corpus.tokenizer(name)
        header = corpus.write(arguments.out, texts("tokenizing"), tokenizer)
    except (ValueError, OSError, EOFError) as error:  # EOFError: a .gz that was cut short
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(
        f"{arguments.out}: {header['tokens']:,} tokens in {header['documents']:,} documents, "
        f"{header['vocab_size']:,} ids ({header['tokenizer']}); train with data.source=tokens:{arguments.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
