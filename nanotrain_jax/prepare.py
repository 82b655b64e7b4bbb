"""Tokenize text files into a folder of memory-mapped shards for `data.source=tokens:DIR`.

    python -m nanotrain_jax.prepare TEXT_FILES... --out DIR [--tokenizer bytes|train-bpe:32000|PATH] [--workers N]
    python -m nanotrain_jax.prepare --verify DIR             read all of it against its checksums: a line per bad shard

.txt: a document per file (fewer than a hundred are cut at line ends into about a hundred); .jsonl, .jsonl.gz: a
document per line; .parquet: a document per row. The same command continues after a kill. Exit codes: 0 done; 2 the
request is wrong (one line on stderr); 1 anything else, as a damaged shard with --verify.
"""

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin(finishes=True)

import argparse
import errno
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
    track,
)

from nanotrain_jax.config.load import Parser, one_line, path_argument, refuse
from nanotrain_jax.config.values import is_remote, naming, with_message
from nanotrain_jax.data import bpe, corpus, preparation, shard_checks, spans, stored, token_folder
from nanotrain_jax.data.preparation import Asked, Plan, Task
from nanotrain_jax.data.shards import DOCUMENTS, TOKENS, Finished
from nanotrain_jax.data.text_files import Field
from nanotrain_jax.data.token_folder import Header
from nanotrain_jax.data.tokenizer import NO_BEGIN, TOKENIZER, Tokenizer, begin_apart
from nanotrain_jax.data.tokenizer import load as load_tokenizer
from nanotrain_jax.run import shell

KINDS = ".txt", ".jsonl", ".jsonl.gz", ".parquet"
TRAIN = "train-bpe:"
VAL_FRACTION = 0.05


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 if it is wrong."""
    parser = Parser(
        prog="python -m nanotrain_jax.prepare", description="Turn text files into a folder of memory-mapped tokens."
    )
    path = path_argument
    parser.add_argument("files", nargs="*", type=path, help=", ".join(KINDS))
    parser.add_argument("--out", type=path, help="output folder")
    parser.add_argument(
        "--verify", type=folder_argument, metavar="DIR", help="read all of a folder against its checksums instead"
    )
    parser.add_argument(
        "--tokenizer",
        type=path,
        help="bytes (default) | train-bpe:SIZE | path of a tokenizer.json or of its folder, as in a Hugging Face model "
        "repository",
    )
    parser.add_argument("--end-token", help="ends each document (default: as of data.end_token)")
    parser.add_argument("--begin-token", help="begins each document; none: no token (default: as of data.begin_token)")
    parser.add_argument("--field", default="text", help="key or column that holds the text (default: text)")
    parser.add_argument("--skip-bad", action="store_true", help="skip and count bad lines of .jsonl")
    parser.add_argument(
        "--val-fraction",
        type=_fraction,
        help=f"about so many of the tokens are held out, in whole documents (default: {VAL_FRACTION})",
    )
    parser.add_argument("--append", action="store_true", help="add the files to a folder that is finished")
    parser.add_argument("--workers", type=_count, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="write every N-th shard, beginning with the I-th (from 0): one host of N that share the folder",
    )
    asked = parser.parse_args(argv)
    if asked.verify is None and not (asked.files and asked.out):
        parser.error("the following arguments are required: files, --out (or --verify DIR)")
    if asked.verify is not None and (asked.files or asked.out):
        parser.error("--verify only reads a folder; leave files and --out out")
    return asked


def folder_argument(text: str) -> str:
    """Expand `~` in a folder of this machine; one in a store stays as it is. Raises ArgumentTypeError."""
    return text if is_remote(text) else path_argument(text)


def _fraction(text: str) -> float:
    try:
        if 0 <= float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to below 1; use e.g. {VAL_FRACTION}")


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 1 to 9999")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text, re.ASCII)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N with I from 0 to N-1; use e.g. 0/4 to 3/4 on 4 hosts")
    return int(found[1]), int(found[2])


def check(files: list[Path]) -> None:
    """Raise ValueError or OSError if a file has an unknown extension, is a folder, or is missing."""
    for path in files:
        if not path.name.endswith(KINDS):
            raise ValueError(f"{path}: must be one of {', '.join(KINDS)}; rename or convert it")
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; give the files in it")
        with naming(f"{path} cannot be read", "give files that are there"):
            path.stat()


def open_folder(asked: argparse.Namespace, out: Path) -> Header | None:
    """Return the header of a folder that is there, None for a new or unfinished one. Raises ValueError or OSError."""
    if not out.exists() and asked.append:
        raise ValueError(f"--append: --out={out} does not exist; leave --append out to create it")
    is_empty = not out.exists() or (out.is_dir() and all(path.suffix == ".partial" for path in out.iterdir()))
    if is_empty or ((out / token_folder.PLAN).exists() and not (out / token_folder.HEADER).exists()):
        return None
    if not token_folder.is_sharded(out):
        remedy = "prepare its text again to another folder" if asked.append else "remove it or choose another"
        raise ValueError(f"--out={out}: already exists, and is no folder of shards; {remedy}")
    return token_folder.read_header(out, f"--out={out}")


def tokenizer_for(asked: argparse.Namespace, out: Path, before: Header | None) -> Tokenizer:
    """Return the tokenizer that is asked for, or that of a folder to append to. Raises ValueError or OSError."""
    name, is_trained = asked.tokenizer or "bytes", (out / TOKENIZER).exists()  # when the folder was begun
    if asked.append and (asked.tokenizer, asked.end_token, asked.begin_token) == (None, None, None):
        return tokenizer_of_shards(out, before)
    if name.startswith(TRAIN) and is_trained and not asked.append:
        return tokenizer_in(out)
    if not name.startswith(TRAIN):
        found = load_tokenizer(name, asked.end_token, asked.begin_token, "--tokenizer", "bytes, train-bpe:SIZE")
    elif asked.part != (0, 1) or asked.append:
        raise ValueError(
            f"--tokenizer={name} with --{'append' if asked.append else 'part'}: every shard needs the same tokenizer; "
            "give the path of one that is trained"
        )
    else:
        everything = [*chain.from_iterable(spans.shards_of([Path(file) for file in asked.files]))]
        texts = spans.documents(everything, field_of(asked), Counter() if asked.skip_bad else None)
        shown = track(texts, "training the tokenizer", disable=not sys.stderr.isatty())
        found = bpe.trained(shown, name.removeprefix(TRAIN))
    if asked.append and before and found.name != before.tokenizer:
        raise ValueError(
            f"--tokenizer={name}: --out={out} has another tokenizer ({before.tokenizer}); leave --tokenizer, "
            "--end-token and --begin-token out"
        )
    return found


def tokenizer_of_shards(out: Path, before: Header | None) -> Tokenizer:
    """Return the tokenizer of a folder to append to. Raises ValueError, also if its begin token is new, or OSError."""
    found = tokenizer_in(out)
    if before and begin_apart(found.name, before.tokenizer):
        raise ValueError(
            f"--append: --out={out} was prepared without the begin token that its tokenizer adds ({found.name}); "
            f"prepare its text again, or add --tokenizer {out} --begin-token {NO_BEGIN} to continue without"
        )
    return found


def field_of(asked: argparse.Namespace) -> Field:
    """Return where the text is in a record."""
    return Field(asked.field, "--field", "" if asked.skip_bad else ", or skip such lines with --skip-bad")


def prepare(asked: argparse.Namespace) -> list[str]:
    """Write the folder, or this part of it -> lines that tell what it has. Raises ValueError or OSError."""
    out, files = Path(asked.out), [Path(file) for file in asked.files]
    check(files)
    before = open_folder(asked, out)
    fraction = VAL_FRACTION if asked.val_fraction is None else asked.val_fraction
    if before and asked.append and asked.val_fraction not in (None, before.val_fraction):
        raise ValueError(
            f"--val-fraction={fraction}: --out={out} holds out {before.val_fraction}; leave --val-fraction out"
        )
    tokenizer = tokenizer_for(asked, out, before)
    fraction = before.val_fraction if before and asked.append else fraction
    trained = asked.tokenizer if (asked.tokenizer or "").startswith(TRAIN) else ""
    request = Asked(files, asked.field, fraction, tokenizer, trained, before)
    plan = preparation.plan_of(request)
    if before and plan.preparation in before.preparations:
        (out / token_folder.PLAN).unlink(missing_ok=True)
        return [f"{out} has these files already: nothing to do", *lines_of(out, before, [])]
    if before and not asked.append:
        raise ValueError(f"--out={out}: already exists; remove it, choose another, or add these files with --append")
    return carry_out(asked, out, plan, request)


def carry_out(asked: argparse.Namespace, out: Path, plan: Plan, request: Asked) -> list[str]:
    """Write the shards of this part, and the header if they are the last -> lines that tell what the folder has."""
    with naming(f"--out={out} cannot be written", "make room, or choose another folder"):
        preparation.begin(out, plan, request.tokenizer)
    with preparation.alone(out, asked.part):
        tasks = preparation.tasks(out, plan, request.tokenizer, field_of(asked), asked.skip_bad)
        try:
            kept = write(tasks[asked.part[0] :: asked.part[1]], asked.workers)
            header, found = preparation.finish(out, plan, request.tokenizer, request.before)
        except (ValueError, OSError) as error:
            if asked.part == (0, 1):
                preparation.give_up(out, plan)
            raise explained(error, out) from None
    again = [f"kept {kept:,} shards that were finished before"] * bool(kept)
    if not header:
        return [f"{out}: {len(found):,} of {len(tasks):,} shards are finished; the other parts write the rest", *again]
    return [*lines_of(out, header, found), *again]


def explained(error: ValueError | OSError, out: Path) -> ValueError | OSError:
    """Return an error; that of a full disk with the folder and what to do."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    remedy = "make room and give the same command again, which keeps finished shards"
    return with_message(error, f"--out={out} cannot be written ({error.strerror}); {remedy}")


def write(tasks: Sequence[Task], workers: int) -> int:
    """Write shards -> how many were finished before. Raises ValueError or OSError."""
    kept, tokens, started = 0, 0, time.monotonic()
    with shown("tokenizing", sum(task.size for task in tasks)) as bar:
        for task, found in preparation.written(tasks, workers):
            kept += found.was_there
            tokens += 0 if found.was_there else found.tokens
            rate = f"{tokens / (time.monotonic() - started):,.0f} tokens/s"
            bar.update(bar.task_ids[0], advance=task.size, more=rate)
    return kept


def shown(what: str, size: int) -> Progress:
    """Return a bar of the bytes that are done, shard by shard, on a terminal. Its field `more` is shown."""
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("{task.fields[more]}")
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    bar = Progress(TextColumn(what), *columns, TimeRemainingColumn(), console=console, disable=hidden)
    bar.add_task(what, total=size, more="")
    return bar


def lines_of(out: Path, header: Header, found: list[Finished]) -> list[str]:
    """Return lines about a folder; found: shards that were just written."""
    tokens, held_out = header.total("tokens"), header.total("held_out_tokens")
    lines = [
        f"{out}: {tokens:,} tokens in {header.total('documents'):,} documents, {header.vocab_size:,} ids "
        f"({header.tokenizer}); train with data.source=tokens:{out}",
        f"held out for validation: {held_out:,} tokens in {header.total('held_out_documents'):,} documents "
        f"({held_out / tokens:.1%}), those with the smallest hashes",
    ]
    if not header.val_fraction / 2 <= held_out / tokens <= 2 * header.val_fraction:
        lines.append(
            f"warning: that is far from --val-fraction={header.val_fraction:g}: the first files, which decide it, have "
            "few documents, or long ones; prepare all files in a new folder, with more or shorter documents"
        )
    skipped = sum((Counter(one.skipped) for one in found), Counter())
    lines += [f"skipped {count:,} lines: {kind}" for kind, count in sorted(skipped.items())]
    if header.end is None:
        lines.append("the tokenizer names no end token: documents run into each other; --end-token sets one")
    if replaced := header.total("replaced"):
        lines.append(f"replaced {replaced:,} invalid UTF-8 sequences by U+FFFD")
    return lines


def verify(folder: Path, readers: int) -> int:
    """Read all of a folder; print a line for each shard that is not what was written -> exit code. Raises ValueError or
    OSError."""
    if not token_folder.is_sharded(folder) and not stored.exists(folder / token_folder.HEADER):
        raise ValueError(f"--verify={folder} has no {token_folder.HEADER}; give a folder that this command wrote")
    if not token_folder.is_sharded(folder):
        corpus.read(folder)
        print(f"{folder}: all of it is as it was written (the first format)")
        return 0
    header = token_folder.read_header(folder, f"--verify={folder}")
    found = header.places(folder)
    sizes = [place.size(TOKENS, counts) + place.size(DOCUMENTS, counts) for place, counts in found]
    own = tokenizer_in(folder).name
    bad, has_tokenizer = 0, own == header.tokenizer or begin_apart(own, header.tokenizer) == NO_BEGIN  # of older ones
    if not has_tokenizer:
        told = f"{folder / TOKENIZER} is not the tokenizer of the shards ({header.tokenizer}): it was modified"
        print(f"error: {told}; copy it again", file=sys.stderr)
    with shown("verifying", sum(sizes)) as bar:
        for size, fault in zip(sizes, shard_checks.faults(found, readers), strict=True):
            bad += fault is not None
            bar.advance(bar.task_ids[0], size)
            if fault:
                print(f"error: {one_line(fault)}", file=sys.stderr)
    if bad:
        print(f"{folder}: {bad:,} of {len(found):,} shards are not as they were written")
    elif has_tokenizer:
        print(f"{folder}: all {len(found):,} shards are as they were written; {sum(sizes):,} bytes read")
    return 1 if bad or not has_tokenizer else 0


def tokenizer_in(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder. Raises ValueError or OSError."""
    return load_tokenizer(str(folder) if stored.exists(folder / TOKENIZER) else "bytes")


def main(argv: list[str] | None = None) -> int:
    """Write or verify the folder; 2 if the request is wrong."""
    try:
        asked = arguments(argv)
        if asked.verify:
            return verify(stored.folder_at(asked.verify), asked.workers)
        lines = prepare(asked)
    except (ValueError, OSError) as error:
        return refuse(error)
    print("\n".join(map(one_line, lines)))
    return 0


if __name__ == "__main__":
    sys.exit(shell.run(main))
