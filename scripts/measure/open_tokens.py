"""Time and memory to open token folders of a million to a billion documents, and to the first batch.

    python scripts/measure/open_tokens.py [--documents 1000000 100000000] [--dir runs/open_tokens]

Documents have 1,000 tokens. Tokens and hashes of texts are holes in files, so the folders are small on disk (8 bytes
per document: a billion takes 8 GB); the last is removed at the end. Prints a table.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from nanotrain_jax.data import shards, token_folder
from nanotrain_jax.data.shards import BLOCK, DOCUMENTS, TOKENS, Counts, Finished, Place

TOKENS_PER_DOCUMENT = 1000
MOST = 1_000_000  # documents of a shard: about 4 GiB of text
ROW = 1024
ROWS = {"plain": {}, "documents apart": {"attend_across_documents": False}, "best fit": {"pack": "best_fit"}}


def per_shard(documents: int) -> int:
    """Return how many documents a shard has, about as prepare divides them."""
    return min(documents // 250, MOST)


def write_shard(place: Place, documents: int) -> Counts:
    """Write a shard of holes -> its counts. A thousandth is held out."""
    found = Counts(
        preparation=place.preparation,
        tokens=documents * TOKENS_PER_DOCUMENT,
        documents=documents,
        held_out_tokens=documents // 1000 * TOKENS_PER_DOCUMENT,
        held_out_documents=documents // 1000,
        replaced=0,
    )
    ends = np.arange(1, documents + 1, dtype="<i8") * TOKENS_PER_DOCUMENT
    blocks = {}
    for kind, content in (TOKENS, b""), (DOCUMENTS, ends.tobytes()):
        content, size = place.head(kind) + content, place.size(kind, found)
        with open(place.path(kind), "wb") as file:
            file.write(content)
            file.truncate(size)
        blocks[kind] = sums(content, size)
    told = Finished(counts=found, held_out_below=shards.KEYS // 1000, skipped={}, blocks=blocks).model_dump_json()
    place.path("json").write_text(told)
    return found.model_copy(update={"sums": shards.digest(told.encode())})


def sums(content: bytes, size: int) -> list[str]:
    """Return the checksums of a file that begins with content; the rest of its bytes is zero."""
    starts = range(0, size, BLOCK)
    hole = shards.digest(bytes(BLOCK))
    is_hole = [start >= len(content) and start + BLOCK <= size for start in starts]
    return [
        hole if zero else shards.digest(content[start : start + BLOCK].ljust(min(BLOCK, size - start), b"\0"))
        for start, zero in zip(starts, is_hole, strict=True)
    ]


def write(folder: Path, documents: int) -> None:
    """Write a folder of holes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    places = [Place(folder, number, "holes", "bytes", "<u2") for number in range(documents // per_shard(documents))]
    header = token_folder.Header(
        tokenizer="bytes",
        vocab_size=257,
        dtype="<u2",
        end=256,
        val_fraction=0.001,
        held_out_below=shards.KEYS // 1000,
        preparations=["holes"],
        shards=[write_shard(place, per_shard(documents)) for place in places],
    )
    token_folder.write_header(folder, header)


def memory(name: str) -> float:
    """Return the memory of this process in MB: VmRSS, now; VmHWM, at most so far."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1000


def measure(folder: str, rows: str) -> None:
    """Print what opening a folder takes, as JSON. rows: one of ROWS."""
    import jax

    from nanotrain_jax.config import load as request
    from nanotrain_jax.data import batches

    mesh = jax.sharding.Mesh(jax.devices()[:1], ["data"])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    names = ["inputs", "targets"] + ["starts"] * (rows != "plain")
    shapes = {name: jax.ShapeDtypeStruct((32, ROW), np.int32, sharding=sharding) for name in names}
    jax.block_until_ready(jax.device_put(np.zeros((32, ROW), np.int32), sharding))
    keys = {"source": f"tokens:{folder}", "seq_len": ROW} | ROWS[rows]
    config = request.parse({"data": keys}).data
    before, started = memory("VmRSS"), time.perf_counter()
    dataset = batches.load(config)
    opened, most = time.perf_counter() - started, memory("VmHWM") - before
    jax.block_until_ready(next(batches.batches(dataset.train, shapes, seed=0)))
    first = time.perf_counter() - started
    print(json.dumps({"open": opened, "memory": most, "first": first, "after": memory("VmHWM") - before}))


def main() -> None:
    """Write and measure folders one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[10**6, 10**8])
    parser.add_argument("--dir", type=Path, default=Path("runs/open_tokens"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(str(asked.dir), asked.measure)
        return
    print("| documents | shards | rows | s to open | MB beyond JAX | s to the first batch | MB then |")
    print("|---|---|---|---|---|---|---|")
    for documents in asked.documents:
        write(asked.dir, documents)
        for rows in ROWS:
            command = [sys.executable, __file__, "--dir", str(asked.dir), "--measure", rows]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            cells = [f"{documents:,}", f"{documents // per_shard(documents):,}", rows]
            cells += [f"{told['open']:.2f}", f"{told['memory']:.0f}", f"{told['first']:.2f}", f"{told['after']:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    shutil.rmtree(asked.dir)


if __name__ == "__main__":
    main()
