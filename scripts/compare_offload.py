"""Host memory side by side in one run: what each mode costs in time and saves on the device. For a machine with a GPU.

    python scripts/compare_offload.py --config configs/gpt2_124m.yaml [--steps 10] [--modes optimizer,params]
                                      [--nvme-dir FOLDER] [section.key=value ...]

One table and one JSON line: seconds of a step (median), over those of the plain run; bytes on the device and on the
host as compiled, and copied in a step; seconds that these copies take alone, at the speed measured here, both ways at a
time; and which share of them is hidden: 1 - (step - plain step) / copies alone (not of nvme, whose files take time as
well). ZeRO 3, full remat unless overridden.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from nanotrain_jax import mesh as meshes
from nanotrain_jax.audit import copies, hlo, memory
from nanotrain_jax.config import Config
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme import store as nvme
from nanotrain_jax.parallel.offload import HOST
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import request
from nanotrain_jax.step import build as steps

OPTIMIZER = {"offload_optimizer": "host"}
PARAMS = OPTIMIZER | {"offload_params": "host"}
MODES = {
    "none": {},
    "optimizer": OPTIMIZER,
    "params": PARAMS,
    "activations": {"offload_activations": "host"},
    "all": PARAMS | {"offload_activations": "host"},
    "nvme": {"offload_optimizer": "nvme"},
}


def copy_speed(size: int) -> float:
    """Bytes per second between the first device and its host, with as many going each way at a time."""
    device = jax.devices()[0]
    here, there = SingleDeviceSharding(device), SingleDeviceSharding(device, memory_kind=HOST)
    near, far = jax.device_put(jnp.ones(size // 4), here), jax.device_put(jnp.ones(size // 4), there)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        jax.block_until_ready((jax.device_put(near, there), jax.device_put(far, here)))
        times.append(time.perf_counter() - started)
    return size / min(times[1:])


def measure(config: Config, mesh: jax.sharding.Mesh, count: int) -> dict[str, float]:
    """Seconds of a step, median after two; bytes per device."""
    step = steps.build(config, mesh)
    state, (B, T) = step.init(), step.batch["inputs"].shape
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=(B, T + 1), dtype=np.int32)
    shardings = {name: x.sharding for name, x in step.batch.items()}
    batch = jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, shardings)
    train = step.train.lower(step.state, step.batch).compile()
    run, times = train, []
    with ExitStack() as stack:
        if config.memory.offload_optimizer == "nvme":
            files = stack.enter_context(nvme.opened(checkpointing.store(config, step)))
            checkpointing.fill(files, step, config, None, None)
            run = checkpointing.train(files, step, train)
        for _ in range(count + 2):
            started = time.perf_counter()
            state, metrics, _ = run(state, batch)
            metrics["loss"].block_until_ready()
            times.append(time.perf_counter() - started)
    found = {row["to"]: row["bytes_per_device"] for row in copies.summary(copies.copies(train.as_text()))}
    if mesh.devices.flat[0].platform == "cpu":  # whose programs show no copies
        found = {
            to: sum(r["bytes_per_device"] for r in memory.copied(config) if r["to"] == to) for to in ("device", "host")
        }
    sizes = hlo.memory(train)
    moved = {f"to_{to}_bytes": found.get(to, 0.0) for to in ("device", "host")}
    kept = {"device_bytes": sizes["peak_bytes"], "host_bytes": sizes["host_bytes"], "loss": float(metrics["loss"])}
    return {"step_seconds": statistics.median(times[2:])} | kept | moved


def compare(config: Config, modes: list[str], count: int, nvme_dir: str) -> list[dict[str, Any]]:
    """A row for each mode, the plain run first. nvme_dir: where the files of nvme may be, for a while."""
    meshes.configure(config.runtime.simulate)
    mesh = meshes.make(**config.parallel.axes)
    speed, rows = copy_speed(2**28), []
    for mode in ["none", *modes]:
        with tempfile.TemporaryDirectory(dir=nvme_dir) as folder:
            memory = MODES[mode] | {"nvme_dir": folder if mode == "nvme" else None}
            found = measure(resolve(config.replace("memory", **memory), mesh.shape), mesh, count)
        alone = max(found["to_device_bytes"], found["to_host_bytes"]) / speed
        more = found["step_seconds"] - (rows or [found])[0]["step_seconds"]
        hidden = 1 - more / alone if alone and mode != "nvme" else None
        found |= {"over_plain": found["step_seconds"] / (rows or [found])[0]["step_seconds"]}
        rows.append({"mode": mode} | found | {"copies_alone_seconds": alone, "hidden": hidden})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line; 2 if the request is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--modes", default=",".join(list(MODES)[1:]))
    parser.add_argument("--nvme-dir", default=".", help="folder for the files of --modes nvme (default: this one)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        modes = arguments.modes.split(",")
        for mode in set(modes) - MODES.keys():
            raise ValueError(f"--modes {mode!r} is unknown; use {', '.join(MODES)}")
        if arguments.steps < 1:
            raise ValueError(f"--steps {arguments.steps}: at least 1")
        overrides = ["parallel.zero=3", "memory.remat=full", *arguments.overrides]
        rows = compare(request.load(arguments.config, overrides), modes, arguments.steps, arguments.nvme_dir)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = jax.devices()[0].device_kind
    table = Table(title=f"{device}, jax {jax.__version__}: {arguments.config} {' '.join(arguments.overrides)}")
    for name in (
        "in host memory",
        "step s",
        "over plain",
        "GB on the device",
        "on the host",
        "copies alone s",
        "hidden",
    ):
        table.add_column(name, justify="left" if name == "in host memory" else "right")
    for row in rows:
        hidden = "-" if row["hidden"] is None else f"{row['hidden']:.0%}"
        sizes = (f"{row[key] / 1e9:.2f}" for key in ("device_bytes", "host_bytes"))
        seconds = f"{row['step_seconds']:.3f}", f"{row['over_plain']:.2f}", *sizes, f"{row['copies_alone_seconds']:.3f}"
        table.add_row(row["mode"], *seconds, hidden)
    Console().print(table)
    print(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
