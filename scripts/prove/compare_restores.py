"""Resume with another layout and number of processes: bitwise the same state, and the same losses.

python scripts/prove/compare_restores.py [--model dense|experts] [--first N] [section.key=value ...]

A chain for each model: a layout restores the previous layout's checkpoint, takes 3 steps, saves, and takes 3 more,
whose losses the next layout must repeat. Exit code 1 if a state differs, or a loss by more than 1e-6 relative.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils
from rich.console import Console
from rich.table import Table

from nanotrain_jax import train
from nanotrain_jax.checkpoint import write
from nanotrain_jax.config.load import load
from nanotrain_jax.data import batches as data
from nanotrain_jax.models import decoder
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.step.state import State

STEPS = 3
TOLERANCE = 1e-6
TIMEOUT = 900  # seconds of a layout's processes
MODEL = {"family": "llama", "num_layers": 5, "d_model": 32, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 61}
MODELS = {  # layers: no multiple of the stages; a capacity of all experts: where a token is computed changes nothing
    "dense": MODEL | {"d_ff": 64},
    "experts": MODEL | {"experts": {"num": 8, "top_k": 2, "d_ff": 32, "balance": "bias", "capacity": 8}},
}
CONFIG = {
    "precision": {"compute": "float32"},
    "data": {"source": "synthetic", "batch_size": 16, "seq_len": 16},
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "runtime": {"simulate": 8},
}
LAYOUTS = [  # processes, keys of parallel and memory
    (1, "data=8"),
    (2, "data=8 zero=3"),
    (2, "replica=2 data=4 zero=3 offload_optimizer=nvme"),
    (4, "data=4 tensor=2 zero=1"),
    (4, "pipe=2 data=4 schedule=interleaved chunks=2 microbatches=2 zero=3 offload_optimizer=nvme"),
    (1, "data=8 zero=1 offload_optimizer=nvme"),
    (2, "data=2 context=4 zero=2"),
    (1, "data=1"),
    (4, "pipe=4 data=2 schedule=1f1b microbatches=4 zero=1"),
    (1, "replica=2 data=4 zero=3"),
    (2, "pipe=2 data=4 schedule=interleaved chunks=2 microbatches=2 zero=2"),
    (4, "pipe=4 tensor=2 data=1 schedule=zero_bubble microbatches=4 vocab_over_pipe=true"),
    (4, "data=8 zero=1"),
    (2, "tensor=8 data=1"),
    (4, "data=4 tensor=2 zero=3"),
    (2, "context=8 data=1 context_attention=ulysses zero=3"),
    (2, "pipe=2 data=4 schedule=gpipe microbatches=2"),
    (1, "pipe=2 tensor=2 data=2 schedule=interleaved chunks=2 microbatches=4"),
    (8, "data=8 zero=2"),
    (4, "data=2 tensor=4 zero=2 offload_optimizer=nvme"),
    (2, "pipe=4 data=2 schedule=1f1b microbatches=4 zero=0 offload_optimizer=nvme"),
    (2, "replica=2 tensor=4 data=1"),
    (4, "pipe=2 data=4 schedule=zb_h1 microbatches=2 zero=3"),
    (2, "data=4 tensor=2 zero=2"),
    (1, "pipe=4 data=2 schedule=zb_h2 microbatches=8"),
    (4, "replica=2 data=4 zero=3 offload_optimizer=host offload_params=host"),
    (2, "pipe=2 tensor=4 data=1 schedule=1f1b microbatches=2 vocab_over_pipe=true"),
    (4, "data=2 tensor=4 zero=1 sequence_parallel=false"),
    (1, "data=8 zero=3 grad_reduce=per_layer"),
    (8, "pipe=2 replica=2 data=2 schedule=gpipe microbatches=2 zero=3"),
    (2, "data=8 zero=3 prefetch=true"),
]
EXPERT_LAYOUTS = [
    (1, "data=8"),
    (2, "data=8 expert=8 zero=1"),
    (4, "data=8 expert=4 zero=3"),
    (2, "data=4 tensor=2 expert=2 zero=2"),
    (1, "data=1"),
    (4, "pipe=2 data=4 expert=4 schedule=1f1b microbatches=2 zero=1"),
    (2, "replica=2 data=4 expert=2 zero=3"),
    (2, "data=4 context=2 expert=4 zero=2"),
    (4, "pipe=2 data=4 expert=2 schedule=interleaved chunks=2 microbatches=2 zero=3"),
    (1, "data=8 expert=8 zero=3 grad_reduce=per_layer"),
    (4, "pipe=2 tensor=2 data=2 expert=2 schedule=zero_bubble microbatches=4 vocab_over_pipe=true"),
    (2, "data=8 expert=4 zero=1"),
    (2, "data=2 tensor=4 expert=2 zero=3"),
    (8, "data=8 expert=2 zero=3"),
    (1, "pipe=4 data=2 expert=2 schedule=zb_h1 microbatches=4"),
    (4, "data=4 tensor=2 expert=4 zero=0"),
    (2, "pipe=2 data=4 expert=4 schedule=gpipe microbatches=2 zero=2"),
    (4, "replica=4 data=2 expert=2 zero=1"),
    (2, "data=2 context=4 expert=2 context_attention=ulysses zero=3"),
    (1, "data=8 expert=4 zero=3 prefetch=true"),
    (2, "pipe=4 data=2 expert=1 schedule=1f1b microbatches=4 zero=3"),
    (4, "pipe=2 context=2 data=2 expert=2 context_attention=gather schedule=1f1b microbatches=2 zero=1"),
    (2, "tensor=8 data=1"),
    (8, "pipe=2 data=4 expert=4 schedule=zb_h2 microbatches=4 zero=2"),
    (1, "data=8 expert=2 zero=3 persist_below=1000"),
    (2, "pipe=2 replica=2 data=2 expert=2 schedule=interleaved chunks=2 microbatches=4 vocab_over_pipe=true"),
    (4, "data=8 expert=8 zero=2"),
    (2, "data=4 tensor=2 expert=4 zero=3 sequence_parallel=false"),
    (1, "replica=2 data=4 expert=4 zero=2"),
    (2, "pipe=2 tensor=2 data=2 schedule=1f1b microbatches=2 zero=2"),
    (1, "data=8 expert=8 zero=1"),
]
CHAINS = {"dense": LAYOUTS, "experts": EXPERT_LAYOUTS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chains and print a table; -> 1 if a state or loss differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CHAINS, help="one chain (default: both)")
    parser.add_argument("--first", type=int, help="number of layouts of a chain (default: all)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(argv)
    console, table = Console(highlight=False, soft_wrap=True), Table("saved by", "restored by", "state", "next losses")
    pairs = failures = 0
    for model in [options.model] if options.model else CHAINS:
        for is_same, row in chain(model, CHAINS[model][: options.first], options.overrides):
            pairs, failures = pairs + 1, failures + (not is_same)
            table.add_row(*row)
            console.print("  |  ".join(row))
    console.print(table)
    console.print(f"{pairs - failures} of {pairs} pairs: state bitwise equal, losses within {TOLERANCE}")
    return int(failures > 0)


def chain(
    model: str, layouts: Sequence[tuple[int, str]], overridden: Sequence[str]
) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """Restore the checkpoint of each layout with the next; yield whether all is the same, and a row of the table."""
    previous = None
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "small.yaml"
        config.write_text(yaml.safe_dump(CONFIG | {"model": MODELS[model]}))
        for number, (count, layout) in enumerate(layouts):
            resume = f"{folder}/{number - 1}/checkpoints" if number else "auto"
            keys = [f"logging.dir={folder}/{number}", f"checkpoint.resume={resume}", *overrides(layout)]
            keys += [f"memory.nvme_dir={folder}/{number}/disk"] if "nvme" in layout else []
            result = processes(count, [str(config), *keys, *overridden]) | {"name": f"{count} x {layout}"}
            if previous:
                yield compared(previous, result)
            previous = result


def compared(saved: dict, restored: dict) -> tuple[bool, tuple[str, ...]]:
    """Return whether a layout has the state and the next losses of the layout before, and a row of the table."""
    same = restored["restored"] == saved["saved"]
    losses, expected = np.array(restored["losses"][:STEPS]), np.array(saved["losses"][STEPS:])
    difference = float(np.max(np.abs(losses / expected - 1)))
    row = saved["name"], restored["name"], "bitwise equal" if same else "DIFFERS", f"within {difference:.1e}"
    return same and difference <= TOLERANCE, row


def overrides(layout: str) -> list[str]:
    """Return a layout as overrides of a config."""
    sections = ["memory" if word.startswith("offload") else "parallel" for word in layout.split()]
    keys = [f"{section}.{word}" for section, word in zip(sections, layout.split(), strict=True)]
    return [*keys, "parallel.persist_below=0"]


def processes(count: int, arguments: list[str]) -> dict:
    """Run `worker` in `count` processes; -> the JSON printed by process 0. Raises RuntimeError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    shared["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")
    started = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, "--worker", *arguments],
            env=os.environ | {key: str(value) for key, value in (shared | {"RANK": rank}).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        printed = list(pool.map(output_of, started))
    if any(process.returncode for process in started):
        raise RuntimeError("".join(err for _, err in printed))
    return json.loads(printed[0][0].splitlines()[-1])


def output_of(process: subprocess.Popen) -> tuple[str, str]:
    """Return what a process prints, and its errors; after TIMEOUT end it, with a report where its threads are."""
    try:
        return process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        return process.communicate()


def worker(path: str, *keys: str) -> None:
    """One of the processes of a layout: restore, 3 steps, save, 3 steps; print checksums of states, and losses."""
    run = train.prepare(load(path, keys))
    with train.files_of(run) as files:
        found = worked(run, files, step_of(run, files))
    print(json.dumps(found))


def step_of(run: train.Run, files: Store | None) -> Callable:
    """Return the function that takes a step; with NVMe files restore them."""
    if files is None:
        return run.step.train
    checkpointing.restore(files, run.step, run.restored, [])
    return checkpointing.train(files, run.step, run.step.train.lower(run.step.state, run.step.batch).compile())


def worked(run: train.Run, files: Store | None, step: Callable) -> dict:
    """Take 3 steps, save, take 3 more; -> checksums of states, and losses."""
    state, losses, first = run.state, [], int(run.state.step)
    restored = checksums(run, state, files)
    batches = data.batches(run.dataset.train, run.step.batch, run.config.data.seed, run.position, run.step.token_order)
    for batch in islice(batches, STEPS):
        state, metrics, _ = step(state, batch)
        losses.append(float(metrics["loss"]))
    saved, checkpoint = checksums(run, state, files), run.config.checkpoint
    position = run.position + STEPS * run.config.data.batch_size
    meta = {"config": run.config.to_dict(), "tokenizer": run.dataset.tokenizer, "nvme": None}
    meta["data"] = {"position": position, "fingerprint": run.dataset.fingerprint}
    Path(checkpoint.dir).mkdir(parents=True, exist_ok=True)
    with write.writing(checkpoint) as save:
        apart = [checkpointing.arrays(files, run.step)] if files else []
        save(first + STEPS, run.step.in_layer_order(state), meta, *apart)
    for batch in islice(batches, STEPS):
        state, metrics, _ = step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"restored": restored, "saved": saved, "losses": losses}


def checksums(run: train.Run, state: State, files: Store | None) -> dict[str, int]:
    """Return path -> CRC-32 of each array, in layer order, without padding."""

    def checksum(path: tuple, x: jax.Array) -> tuple[str, int]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        full = gathered(x)
        rows = run.config.model.vocab_size if decoder.is_padded(name) else None
        rows = run.config.model.num_layers if LAYERS in name.split("/") else rows
        return name, zlib.crc32(np.ascontiguousarray(full[:rows] if full.ndim else full))

    states = run.step.in_layer_order(state), *(checkpointing.arrays(files, run.step) if files else ())
    return dict(checksum(path, x) for tree in states for path, x in jax.tree_util.tree_leaves_with_path(tree))


def gathered(x: jax.Array) -> np.ndarray:
    """Return the whole of an array, of which not every process needs to have a shard."""
    own = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        own[shard.index] = shard.data
    of_all = np.ascontiguousarray(multihost_utils.process_allgather(own)).reshape(jax.process_count(), -1)
    return np.bitwise_or.reduce(of_all.view(np.uint8)).view(x.dtype).reshape(x.shape)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
