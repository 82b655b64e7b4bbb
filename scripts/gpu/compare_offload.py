"""Compare offload modes in one run: step time, and memory on the device and the host. For a machine with a GPU.

    python scripts/gpu/compare_offload.py --config configs/gpt2_124m.yaml [--steps 10] [--modes optimizer,params]
                                      [--nvme-dir FOLDER] [section.key=value ...]

Prints a table and one JSON line: median seconds of a step, also as a ratio to the step without offload; bytes on the
device and on the host as compiled, and copied per step; seconds of these copies alone, at the link bandwidth measured
with both directions busy; and the hidden fraction of the copies: 1 - (step - step without offload) / copies alone (not
for nvme, whose files take time as well). ZeRO 3 and full remat unless overridden.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "measure"))
from bench import random_batch

from nanotrain_jax.audit import copies, hlo
from nanotrain_jax.config.load import Parser, at_least, load, refuse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import memory
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme import store as nvme
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.offload.host_offload import HOST
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


def link_bandwidth(size: int) -> float:
    """Return bytes per second between the first device and its host, per direction, both directions busy."""
    device = jax.devices()[0]
    on_device, on_host = SingleDeviceSharding(device), SingleDeviceSharding(device, memory_kind=HOST)
    device_array = jax.device_put(jnp.ones(size // 4), on_device)
    host_array = jax.device_put(jnp.ones(size // 4), on_host)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        jax.block_until_ready((jax.device_put(device_array, on_host), jax.device_put(host_array, on_device)))
        times.append(time.perf_counter() - started)
    return size / min(times[1:])


def runnable(stack: ExitStack, config: Config, step: steps.Step, train: Callable) -> Callable:
    """Return what runs a step: the compiled step, with NVMe offload also the update of new files until stack closes."""
    if config.memory.offload_optimizer != "nvme":
        return train
    files = stack.enter_context(nvme.opened(checkpointing.store(config, step)))
    checkpointing.restore(files, step, None, [])
    return checkpointing.train(files, step, train)


def measure(config: Config, mesh: jax.sharding.Mesh, count: int) -> dict[str, float]:
    """Return median seconds of a step after two warm-up steps, and bytes per device."""
    step = steps.build(config, mesh)
    state, batch = step.init(), random_batch(config, step)
    train = step.train.lower(step.state, step.batch).compile()
    times = []
    with ExitStack() as stack:
        run = runnable(stack, config, step, train)
        for _ in range(count + 2):
            started = time.perf_counter()
            state, metrics, _ = run(state, batch)
            metrics["loss"].block_until_ready()
            times.append(time.perf_counter() - started)
    copied = {row["to"]: row["bytes_per_device"] for row in copies.summary(copies.copies(train.as_text()))}
    if mesh.devices.flat[0].platform == "cpu":  # whose programs show no copies
        copied = {
            to: sum(r["bytes_per_device"] for r in memory.host_copies(config) if r["to"] == to)
            for to in ("device", "host")
        }
    sizes = hlo.memory(train)
    traffic = {f"to_{to}_bytes": copied.get(to, 0.0) for to in ("device", "host")}
    stored = {"device_bytes": sizes["peak_bytes"], "host_bytes": sizes["host_bytes"], "loss": float(metrics["loss"])}
    return {"step_seconds": statistics.median(times[2:])} | stored | traffic


def compare(config: Config, modes: list[str], count: int, nvme_dir: str) -> list[dict[str, Any]]:
    """Return a row per mode, the step without offload first. nvme_dir: for temporary files of mode nvme."""
    meshes.configure(config.runtime.simulate)
    mesh = meshes.make(**config.parallel.axes)
    bandwidth, rows = link_bandwidth(2**28), []
    for mode in ["none", *modes]:
        with tempfile.TemporaryDirectory(dir=nvme_dir) as folder:
            memory = MODES[mode] | {"nvme_dir": folder if mode == "nvme" else None}
            figures = measure(resolve(config.replace("memory", **memory), mesh.shape), mesh, count)
        copy_seconds = max(figures["to_device_bytes"], figures["to_host_bytes"]) / bandwidth
        plain_seconds = (rows or [figures])[0]["step_seconds"]
        exposed = figures["step_seconds"] - plain_seconds
        hidden = 1 - exposed / copy_seconds if copy_seconds and mode != "nvme" else None
        figures |= {"over_plain": figures["step_seconds"] / plain_seconds}
        rows.append({"mode": mode} | figures | {"copies_alone_seconds": copy_seconds, "hidden": hidden})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line; 2 if the request is wrong."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=at_least(1), default=10)
    parser.add_argument("--modes", default=",".join(list(MODES)[1:]))
    parser.add_argument("--nvme-dir", default=".", help="folder for the files of --modes nvme (default: .)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        modes = arguments.modes.split(",")
        for mode in set(modes) - MODES.keys():
            raise ValueError(f"--modes={mode}: unknown; use {', '.join(MODES)}")
        overrides = ["parallel.zero=3", "memory.remat=full", *arguments.overrides]
        rows = compare(load(arguments.config, overrides), modes, arguments.steps, arguments.nvme_dir)
    except (ValueError, OSError) as error:
        return refuse(error)
    device = jax.devices()[0].device_kind
    table = Table(title=f"{device}, jax {jax.__version__}: {arguments.config} {' '.join(arguments.overrides)}")
    for name in ("offloaded", "step s", "x no offload", "GB on the device", "on the host", "copies alone s", "hidden"):
        table.add_column(name, justify="left" if name == "offloaded" else "right")
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
