"""Rate and memory from files of text to token shards, beside the tokenizer library alone and datasets.map: a table.

    python scripts/measure/tokenize_text.py [--megabytes 100] [--tokenizer PATH] [--rounds 3] [--dir runs/tokenize]

The text is Python's standard library, over and over, each time another part of each file first, a document to a line of
.jsonl. Without --tokenizer a BPE of 32,000 ids is trained on it. Ways take turns, in processes of their own, and have
all cores; a rate is the median of the rounds. The library alone has its texts in memory, as lists of 1,000, and writes
nothing. Core seconds do not depend on what else the machine does; memory is the largest sum of anonymous pages of all
processes.
"""

import argparse
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import NamedTuple

from nanotrain_jax import prepare
from nanotrain_jax.config.load import Parser, at_least, folder_argument
from nanotrain_jax.data import bpe, corpus
from nanotrain_jax.data.tokenizer import TOKENIZER

AT_ONCE = 1000  # texts, as datasets.map has them
FILES = 8
IDS = 32_000


class Used(NamedTuple):
    """What a way took: wall seconds of its work; core seconds and megabytes of its processes."""

    seconds: float
    cores: float
    memory: float


def documents() -> Iterator[str]:
    """Yield texts without end, no two alike."""
    texts = [text.decode(errors="replace") for text in corpus.stdlib_documents()]
    for number, text in enumerate(cycle(text for text in texts if text)):
        start = number // len(texts) * 997 % len(text)
        yield text[start:] + text[:start]


def write_text(folder: Path, size: int) -> list[Path]:
    """Write files of .jsonl of about `size` bytes in all -> their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, texts = [folder / f"{number}.jsonl" for number in range(FILES)], documents()
    for path in paths:
        with open(path, "w") as file:
            while file.tell() < size // FILES:
                file.write(json.dumps({"text": next(texts)}) + "\n")
    return paths


def alone(method: str, tokenizer: Path, paths: Sequence[Path]) -> Callable[[], None]:
    """Return the work of the library alone; its texts are read now."""
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(tokenizer))
    texts = [json.loads(line)["text"] for path in paths for line in path.read_text().splitlines()]
    batches = [texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE)]

    def work() -> None:
        for batch in batches:
            getattr(model, method)(batch, add_special_tokens=False)

    return work


def mapped(tokenizer: Path, paths: Sequence[Path], out: Path) -> Callable[[], None]:
    """Return the work of datasets.map: from files to a file of Arrow."""
    import datasets
    import tokenizers

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        model = tokenizers.Tokenizer.from_file(str(tokenizer))
        return {"ids": [found.ids for found in model.encode_batch_fast(rows["text"], add_special_tokens=False)]}

    def work() -> None:
        found = datasets.load_dataset("json", data_files=list(map(str, paths)), split="train", cache_dir=str(out))
        found.map(encode, batched=True, batch_size=AT_ONCE, num_proc=os.cpu_count(), remove_columns=["text"])

    return work


def prepared(tokenizer: Path, paths: Sequence[Path], out: Path) -> Callable[[], None]:
    """Return the work of `prepare`: from files to shards with checksums."""
    request = [*map(str, paths), "--tokenizer", str(tokenizer), "--out", str(out)]

    def work() -> None:
        if prepare.main(request):
            raise SystemExit("prepare failed")

    return work


def work_of(way: str, folder: Path, tokenizer: Path) -> Callable[[], None]:
    """Return the work of a way."""
    paths, out = sorted((folder / "text").glob("*.jsonl")), folder / "out"
    if way == "prepare":
        return prepared(tokenizer, paths, out)
    if way == "datasets.map":
        return mapped(tokenizer, paths, out)
    return alone(way, tokenizer, paths)


def processes(root: int) -> Iterator[int]:
    """Yield a process and those that it started."""
    yield root
    for found in Path(f"/proc/{root}/task").glob("*/children"):
        for child in found.read_text().split():
            yield from processes(int(child))


def anonymous(root: int) -> float:
    """Return the anonymous pages of a process and those that it started, in MB."""
    total = 0
    for process in processes(root):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total / 1000


def sampled(root: int) -> float:
    """As `anonymous`; 0 if a process ends meanwhile."""
    try:
        return anonymous(root)
    except OSError:
        return 0.0


def core_seconds() -> float:
    """Return the time that processes which ended have spent on cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(way: str, folder: Path, tokenizer: Path) -> Used:
    """Run a way in a process of its own."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    command = [sys.executable, __file__, "--way", way, "--dir", str(folder), "--tokenizer", str(tokenizer)]
    before, most = core_seconds(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while process.poll() is None:
        most = max(most, sampled(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{way} failed")
    return Used(float(process.stdout.read().split()[-1]), core_seconds() - before, most)


def trained(folder: Path) -> Path:
    """Return a tokenizer of IDS ids, trained once."""
    if not (folder / TOKENIZER).exists():
        texts = documents()
        size = len(list(corpus.stdlib_documents()))
        found = bpe.trained((next(texts).encode() for _ in range(size)), str(IDS))
        (folder / TOKENIZER).write_text(found.files[TOKENIZER])
    return folder / TOKENIZER


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each way, and print a table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=at_least(1), default=100, help="of text (default: 100)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--dir", type=folder_argument, default=Path("runs/tokenize"), help="folder to write to")
    parser.add_argument("--only", nargs="+", help="ways to measure")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.way:
        work = work_of(options.way, options.dir, options.tokenizer)
        started = time.perf_counter()
        work()
        print(time.perf_counter() - started)
        return
    paths = write_text(options.dir / "text", int(options.megabytes * 1e6))
    size, tokenizer = sum(path.stat().st_size for path in paths) / 1e6, options.tokenizer or trained(options.dir)
    ways = ["encode_batch", "encode_batch_fast", "prepare"] + ["datasets.map"] * bool(
        importlib.util.find_spec("datasets")
    )
    ways = [way for way in ways if way in (options.only or ways)]
    rounds = [{way: measured(way, options.dir, tokenizer) for way in ways} for _ in range(int(options.rounds))]
    print(f"{size:.0f} MB of .jsonl, {os.cpu_count()} cores, {len(rounds)} rounds")
    print("| way | MB/s | beside the first | core seconds | MB of memory |\n|---|---|---|---|---|")
    for way in ways:
        took = [found[way] for found in rounds]
        ratio = median(found[ways[0]].seconds / found[way].seconds for found in rounds)
        rate, cores = size / median(one.seconds for one in took), median(one.cores for one in took)
        print(f"| {way} | {rate:.1f} | {ratio:.2f} | {cores:.0f} | {max(one.memory for one in took):.0f} |")


if __name__ == "__main__":
    main()
