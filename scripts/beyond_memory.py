"""Train with master weights and moments on disk that are five times as large as the memory there is for them.

    python scripts/beyond_memory.py [--steps 20] [--layers 48] [--d-model 320]

Three processes train the same model on one CPU device: with all in memory; the same within a limit (RLIMIT_DATA, which
the kernel enforces); and with memory.offload_optimizer=nvme within that limit. The limit is what the programs need on
the device (on a GPU that would be its own memory, here it is the process's) and a fifth of the optimizer state. Prints
a table, and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from nanotrain_jax import mesh as meshes
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme import store as nvme
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import request
from nanotrain_jax.step import build as steps


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class Most:
    """The most of some of the process's memory, looked at every few milliseconds, beyond what it is now."""

    def __init__(self, *keys: str):
        self.before = {key: status(key) for key in keys}
        self.found = dict.fromkeys(keys, 0)
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.found = {key: max(most, status(key) - self.before[key]) for key, most in self.found.items()}
            time.sleep(0.003)


def train(layers: int, d_model: int, count: int, folder: str | None, limit: int | None) -> dict:
    """Train, with files in folder if there is one, and in at most limit bytes more than before the first array is made.

    Threads and compiled programs are there before; what is left of the limit is for arrays.
    """
    meshes.configure(simulate=1)
    memory = {"offload_optimizer": "nvme", "nvme_dir": folder} if folder else {}
    config = request.parse(
        {
            "model": {"num_layers": layers, "d_model": d_model, "num_heads": d_model // 64, "vocab_size": 256},
            "precision": {"compute": "float32"},
            "data": {"source": "synthetic", "batch_size": 1, "seq_len": 64},
            "memory": memory | {"remat": "full"},
            "train": {"steps": count},
        }
    )
    mesh = meshes.make(**config.parallel.axes)
    config = resolve(config, mesh.shape)
    step = steps.build(config, mesh)
    first = update = step.train.lower(step.state, step.batch).compile()
    m = first.memory_analysis()
    on_device = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    of_state = 8 * sum(x.size for x in jax.tree.leaves(step.state.params))
    files = checkpointing.store(config, step) if folder else None
    if files:
        update = checkpointing.train(files, step, first)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit,) * 2)
    most, seconds = Most("VmData", "RssAnon"), []
    tokens = np.random.default_rng(0).integers(256, size=(count, 1, 65), dtype=np.int32)
    with nvme.opened(files) if files else nullcontext():
        if files:
            checkpointing.fill(files, step, config, None, None)
        state = step.init()
        for t in tokens:
            batch = {"inputs": t[:, :-1], "targets": t[:, 1:]}
            batch = {name: jax.device_put(x, step.batch[name].sharding) for name, x in batch.items()}
            started = time.perf_counter()
            state, metrics, _ = update(state, batch)
            loss = float(metrics["loss"])
            seconds.append(time.perf_counter() - started)
    return {
        "state": of_state,
        "on_device": on_device,
        "limit": limit,
        "memory": most.found["VmData"],
        "resident": most.found["RssAnon"],
        "steps": count,
        "step_seconds": statistics.median(seconds),
        "loss": loss,
        "ended": "done",
    }


def compare(layers: int, d_model: int, count: int) -> list[dict]:
    """The three runs, each in a process of its own."""

    def run(folder: str | None, limit: int | None, count: int = count) -> dict:
        call = f"beyond_memory.train({layers}, {d_model}, {count}, {folder!r}, {limit!r})"
        code = f"import json, beyond_memory; print(json.dumps({call}))"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}
        # So that the limit is about arrays: what is freed goes back to the kernel, and threads have small stacks.
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
        command = ["sh", "-c", 'ulimit -s 512 && exec "$0" "$@"', sys.executable, "-c", code]
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        if found.returncode == 0:
            return json.loads(found.stdout.splitlines()[-1])
        if re.search("RESOURCE_EXHAUSTED|Out of memory|MemoryError|bad_alloc", found.stderr):
            return {"limit": limit, "ended": "out of memory"}
        raise RuntimeError(found.stderr)

    with tempfile.TemporaryDirectory(prefix="optimizer_", dir=".") as folder:
        free = run(folder, None, 1)
        limit = free["on_device"] + free["state"] // 5
        return [run(None, None), run(None, limit), run(folder, limit)]


def megabytes(size: int | None) -> str:
    """10^6 bytes, or nothing where the size is unknown."""
    return f"{size / 1e6:,.0f}" if size else ""


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--d-model", type=int, default=320, help="a multiple of 64")
    arguments = parser.parse_args(argv)
    rows = compare(arguments.layers, arguments.d_model, arguments.steps)
    table = Table(title=f"{arguments.steps} steps; process memory beyond what there is before the first array")
    names = {"limit": "limit MB", "memory": "taken MB", "resident": "resident MB"}
    for name in ("", "state MB", *names.values(), "s per step", ""):
        table.add_column(name, justify="right" if name else "left")
    for what, row in zip(("all in memory", "all in memory", "state on disk"), rows, strict=True):
        sizes = [megabytes(row.get(key)) for key in names]
        seconds = f"{row['step_seconds']:.3f}" if "step_seconds" in row else ""
        table.add_row(what, megabytes(row.get("state")), *sizes, seconds, row["ended"])
    Console().print(table)
    if rows[2]["ended"] != "done":
        return 1
    print(f"{rows[0]['step_seconds'] / rows[2]['step_seconds']:.0%} of the speed of all in memory")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
