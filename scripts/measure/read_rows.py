"""Rows per second that one process reads of memory-mapped shards, beside what GPUs take: a table.

    python scripts/measure/read_rows.py [--seq-len 1024 8192] [--megatokens 200] [--rounds 5] [--dir runs/read_rows]

Rows come in batches of 128 as training reads them: shuffled, by grain, on one device. Documents are random tokens with
lengths as of web text: log-normal, 500 tokens in the median, 1,300 in the mean. Input wait is the share of time that
a loop waits for batches when it takes them at the pace of GPUs: 64 rows of 1,024 tokens a second (Llama-3-8B on the 8
H100s of a host) and 1,500 (GPT-2 124M). A process of one GPU reads an eighth of that.
"""

import argparse
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median

import jax
import numpy as np

from nanotrain_jax.config import load as request
from nanotrain_jax.config.load import Parser, at_least, folder_argument
from nanotrain_jax.data import batches, shards, token_folder
from nanotrain_jax.data.shards import Document, Place

VOCAB = 50_257
BATCH = 128
PER_SHARD = 10_000_000  # tokens
PACES = {"Llama-3-8B": 64 * 1024, "GPT-2 124M": 1500 * 1024}  # tokens per second of 8 H100s
LAYOUTS = {
    "plain": {},
    "documents apart": {"attend_across_documents": False},
    "mixture of two": {},
    "best fit": {"pack": "best_fit"},
}


def documents(seed: int, tokens: int) -> Iterator[Document]:
    """Yield random documents of about so many tokens in all."""
    rng = np.random.default_rng(seed)
    while tokens > 0:
        size = int(rng.lognormal(np.log(500), 1.4)) + 2
        yield rng.integers(VOCAB, size=size).astype("<u2"), int(rng.integers(shards.KEYS, dtype=np.uint64)), 0
        tokens -= size


def write(folder: Path, tokens: int) -> None:
    """Write a folder of random documents."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    counts, below = [], shards.KEYS // 100
    for number in range(-(-tokens // PER_SHARD)):
        place = Place(folder, number, "random", "bytes", "<u2")
        found = shards.write(place, documents(number, min(tokens, PER_SHARD)), below, {})
        counts.append(found.counts.model_copy(update={"sums": shards.digest(place.path("json").read_bytes())}))
    header = token_folder.Header(
        tokenizer="bytes",
        vocab_size=VOCAB,
        dtype="<u2",
        end=VOCAB - 1,
        val_fraction=0.01,
        held_out_below=below,
        preparations=["random"],
        shards=counts,
    )
    token_folder.write_header(folder, header)


def opened(folder: Path, layout: str, seq_len: int) -> Iterator[dict[str, jax.Array]]:
    """Open a folder and return its batches."""
    source = f"tokens:{folder}"
    if layout == "mixture of two":
        source = [{"name": name, "source": source, "weight": weight} for name, weight in (("a", 0.7), ("b", 0.3))]
    keys = {"source": source, "seq_len": seq_len, "batch_size": BATCH} | LAYOUTS[layout]
    config = request.parse({"data": keys}).data
    mesh = jax.sharding.Mesh(jax.devices()[:1], ["data"])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    names = ["inputs", "targets"] + ["starts"] * (not config.attend_across_documents)
    shapes = {name: jax.ShapeDtypeStruct((BATCH, seq_len), np.int32, sharding=sharding) for name in names}
    return batches.batches(batches.load(config).train, shapes, seed=0)


def rate(reader: Iterator, count: int) -> float:
    """Return the rows per second of so many batches."""
    started = time.perf_counter()
    for batch in islice(reader, count):
        jax.block_until_ready(batch)
    return count * BATCH / (time.perf_counter() - started)


def input_wait(reader: Iterator, rows_per_second: float, seconds: float) -> float:
    """Return the share of some seconds that a loop waits for batches, which it takes at a pace."""
    waited, period = 0.0, BATCH / rows_per_second
    count = max(round(seconds / period), 3)
    for _ in range(count):
        started = time.perf_counter()
        batch = next(reader)
        waited += time.perf_counter() - started
        jax.block_until_ready(batch)
        del batch  # as the loop does, whose step is dispatched
        time.sleep(max(started + period - time.perf_counter(), 0))
    return waited / (count * period)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each way of reading, and print a table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=at_least(1), nargs="+", default=[1024, 8192])
    parser.add_argument("--megatokens", type=at_least(1), default=200, help="in the folder (default: 200)")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument(
        "--rows", type=at_least(BATCH), default=4096, help="of 1,024 tokens in a round (default: 4,096)"
    )
    parser.add_argument("--seconds", type=at_least(0.1, float), default=10.0, help="at a pace (default: 10)")
    parser.add_argument("--dir", type=folder_argument, default=Path("runs/read_rows"), help="folder to write to")
    options = parser.parse_args(argv)
    write(options.dir, int(options.megatokens * 1e6))
    print(f"| rows | tokens | s to the first batch | rows/s | {' | '.join(f'input wait, {name}' for name in PACES)} |")
    print("|---" * (4 + len(PACES)) + "|")
    for seq_len in map(int, options.seq_len):
        for layout in LAYOUTS:
            started = time.perf_counter()
            reader = opened(options.dir, layout, seq_len)
            next(reader)
            first, count = time.perf_counter() - started, max(int(options.rows) * 1024 // seq_len // BATCH, 1)
            rows = median(rate(reader, count) for _ in range(int(options.rounds)))
            waits = (f"{input_wait(reader, pace / seq_len, options.seconds):.2%}" for pace in PACES.values())
            print(f"| {layout} | {seq_len:,} | {first:.2f} | {rows:,.0f} | {' | '.join(waits)} |", flush=True)
    shutil.rmtree(options.dir)


if __name__ == "__main__":
    main()
