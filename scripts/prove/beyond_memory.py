"""Train with optimizer state on disk that is five times as large as the memory available for it.

    python scripts/prove/beyond_memory.py [--steps 20] [--layers 48] [--d-model 320]

Three processes train the same model on one CPU device: all state in memory; the same under a memory limit (RLIMIT_DATA,
enforced by the kernel); and memory.offload_optimizer=nvme under that limit. The limit is what the programs need on the
device (device memory on a GPU; process memory here) plus a fifth of the optimizer state. Prints a table and a line of
JSON.
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

from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme import store as nvme
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step import build as steps


def status(key: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class PeakMemory:
    """Peaks of fields of /proc/self/status above their initial values, sampled every 3 ms."""

    def __init__(self, *keys: str):
        self.before = {key: status(key) for key in keys}
        self.peak = dict.fromkeys(keys, 0)
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.peak = {key: max(peak, status(key) - self.before[key]) for key, peak in self.peak.items()}
            time.sleep(0.003)


def train(layers: int, d_model: int, count: int, folder: str | None, limit: int | None) -> dict:
    """Train; -> figures. folder: for NVMe files, or None. limit: bytes the process may allocate for arrays, or None.

    The limit is set after compilation, so that threads and compiled programs do not count.
    """
    meshes.configure(simulate=1)
    memory = {"offload_optimizer": "nvme", "nvme_dir": folder} if folder else {}
    config = load.parse(
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
    compiled = train_step = step.train.lower(step.state, step.batch).compile()
    m = compiled.memory_analysis()
    on_device = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    state_bytes = 8 * sum(x.size for x in jax.tree.leaves(step.state.params))
    files = checkpointing.store(config, step) if folder else None
    if files:
        train_step = checkpointing.train(files, step, compiled)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit,) * 2)
    memory_used, seconds = PeakMemory("VmData", "RssAnon"), []
    tokens = np.random.default_rng(0).integers(256, size=(count, 1, 65), dtype=np.int32)
    with nvme.opened(files) if files else nullcontext():
        if files:
            checkpointing.restore(files, step, None, [])
        state = step.init()
        for t in tokens:
            batch = {"inputs": t[:, :-1], "targets": t[:, 1:]}
            batch = {name: jax.device_put(x, step.batch[name].sharding) for name, x in batch.items()}
            started = time.perf_counter()
            state, metrics, _ = train_step(state, batch)
            loss = float(metrics["loss"])
            seconds.append(time.perf_counter() - started)
    return {
        "state": state_bytes,
        "on_device": on_device,
        "limit": limit,
        "memory": memory_used.peak["VmData"],
        "resident": memory_used.peak["RssAnon"],
        "steps": count,
        "step_seconds": statistics.median(seconds),
        "loss": loss,
        "ended": "done",
    }


def compare(layers: int, d_model: int, count: int) -> list[dict]:
    """Return the figures of the three runs, each in its own process."""

    def run(folder: str | None, limit: int | None, count: int = count) -> dict:
        call = f"beyond_memory.train({layers}, {d_model}, {count}, {folder!r}, {limit!r})"
        code = f"import json, beyond_memory; print(json.dumps({call}))"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}
        # Leave the limit to arrays: return freed memory to the kernel, and use small thread stacks.
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
        command = ["sh", "-c", 'ulimit -s 512 && exec "$0" "$@"', sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        if re.search("RESOURCE_EXHAUSTED|Out of memory|MemoryError|bad_alloc", done.stderr):
            return {"limit": limit, "ended": "out of memory"}
        raise RuntimeError(done.stderr)

    with tempfile.TemporaryDirectory(prefix="optimizer_", dir=".") as folder:
        unlimited = run(folder, None, 1)
        limit = unlimited["on_device"] + unlimited["state"] // 5
        return [run(None, None), run(None, limit), run(folder, limit)]


def megabytes(size: int | None) -> str:
    """Format bytes in MB; "" if unknown."""
    return f"{size / 1e6:,.0f}" if size else ""


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line; -> 1 if the run on NVMe failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--d-model", type=int, default=320, help="a multiple of 64")
    arguments = parser.parse_args(argv)
    rows = compare(arguments.layers, arguments.d_model, arguments.steps)
    table = Table(title=f"{arguments.steps} steps; process memory above that before the first array")
    names = {"limit": "limit MB", "memory": "allocated MB", "resident": "resident MB"}
    for name in ("", "state MB", *names.values(), "s per step", ""):
        table.add_column(name, justify="right" if name else "left")
    for what, row in zip(("all in memory", "all in memory", "state on disk"), rows, strict=True):
        sizes = [megabytes(row.get(key)) for key in names]
        seconds = f"{row['step_seconds']:.3f}" if "step_seconds" in row else ""
        table.add_row(what, megabytes(row.get("state")), *sizes, seconds, row["ended"])
    Console().print(table)
    if rows[2]["ended"] != "done":
        return 1
    print(f"{rows[0]['step_seconds'] / rows[2]['step_seconds']:.0%} of the speed with all state in memory")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
