"""Time the training step of a config, on CPU or GPU: a table and one JSON line.

    python scripts/measure/bench.py --config configs/quickstart.yaml [--steps 20] [--warmup 3] [section.key=value ...]

Batches are random tokens already on the devices: this times the step alone, without data loading or checkpoints.
Steps are dispatched one ahead, as in training; a step ends when its loss is ready.
"""

import json
import statistics
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import hlo
from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.load import Parser, at_least, load, refuse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.costs import counts, flops, hardware
from nanotrain_jax.data import batches
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step import build as steps


def on_mesh(config: configs.Config, devices: list[jax.Device] | None = None) -> tuple[configs.Config, Mesh]:
    """Return the resolved config and its mesh. devices: default those that are here. Raises ValueError or OSError."""
    if config.memory.offload_optimizer == "nvme":
        raise ValueError("memory.offload_optimizer=nvme: use scripts/gpu/compare_offload.py --modes nvme")
    mesh = meshes.make(**config.parallel.axes, devices=devices)
    vocab = None if config.model.vocab_size else batches.load(config.data).vocab_size
    return resolve(config, mesh.shape, vocab), mesh


def random_batch(config: configs.Config, step: steps.Step, order: np.ndarray | None = None) -> steps.Tree:
    """Return random tokens on the mesh, a document in each row. order: of tokens in a row, as `Step.token_order`."""
    shape = config.data.batch_size, config.data.seq_len + 1
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    return placed(step, tokens, order)


def placed(step: steps.Step, tokens: np.ndarray, order: np.ndarray | None = None) -> steps.Tree:
    """tokens[B T+1] -> a batch of them, as `random_batch`."""
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "starts": np.zeros_like(tokens[:, 1:])}
    if order is not None:
        batch = {name: rows[:, order] for name, rows in batch.items()}
    return {name: jax.device_put(batch[name], x.sharding) for name, x in step.batch.items()}


def measure(config: configs.Config, count: int, warmup: int) -> dict:
    """Compile and run the step; -> figures: times in seconds, memory in bytes per device."""
    meshes.configure(config.runtime.simulate, config.runtime.deterministic)
    config, mesh = on_mesh(config)
    step = steps.build(config, mesh)
    state, batch, tokens = step.init(), random_batch(config, step), config.data.batch_size * config.data.seq_len
    started = time.perf_counter()
    train = step.train.lower(step.state, step.batch).compile()
    compile_seconds = time.perf_counter() - started

    ready, pending = [], None
    for _ in range(warmup + count + 1):
        state, metrics, _ = train(state, batch)
        if pending is not None:
            pending.block_until_ready()
            ready.append(time.perf_counter())
        pending = metrics["loss"]
    times = np.diff(ready)[-count:].tolist()

    device = mesh.devices.flat[0]
    seconds = statistics.median(times)
    rate = tokens / seconds
    peak = hardware.peak_flops(device.device_kind)
    per_token = flops.flops_per_token(config)
    memory, allocated = hlo.memory(train), device.memory_stats()
    return {
        "device": device.device_kind,
        "devices": mesh.size,
        "jax": jax.__version__,
        "parameters": counts.parameters(config.model),
        "tokens_per_step": tokens,
        "step_seconds": seconds,
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "steps": len(times),
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / mesh.size,
        "tflops_per_device_full": rate * per_token["full"] / mesh.size / 1e12,
        "tflops_per_device_causal": rate * per_token["causal"] / mesh.size / 1e12,
        "mfu_full": rate * per_token["full"] / mesh.size / peak if peak else None,
        "mfu_causal": rate * per_token["causal"] / mesh.size / peak if peak else None,
        "peak_bytes_compiled": memory["peak_bytes"],
        "host_bytes_compiled": memory["host_bytes"],
        "peak_bytes_measured": allocated["peak_bytes_in_use"] if allocated else None,
        "compile_seconds": compile_seconds,
        "loss": float(pending),
    }


def percent_of_peak(utilization: float | None) -> str:
    """Format an MFU."""
    return f"{utilization:.1%}" if utilization is not None else "peak FLOP/s of this device unknown"


def show(f: dict) -> Table:
    """Return the figures as a table."""
    title = f"{f['devices']} x {f['device']}, jax {f['jax']}, {f['parameters']:,} parameters"
    table = Table(title=title, show_header=False)
    rows = {
        "step time, median (min - max)": f"{f['step_seconds'] * 1e3:,.1f} ms ({f['step_seconds_min'] * 1e3:,.1f} - "
        f"{f['step_seconds_max'] * 1e3:,.1f}), {f['steps']} steps of {f['tokens_per_step']:,} tokens",
        "tokens/s (per device)": f"{f['tokens_per_second']:,.0f} ({f['tokens_per_second_per_device']:,.0f})",
        "MFU, 6 N + 12 L d T (full attention)": percent_of_peak(f["mfu_full"]),
        "MFU, 6 N + 6 L d T (causal half)": percent_of_peak(f["mfu_causal"]),
        "TFLOP/s per device, full (causal)": f"{f['tflops_per_device_full']:.3g} ({f['tflops_per_device_causal']:.3g})",
        "peak memory per device, compiled": f"{f['peak_bytes_compiled'] / 2**20:,.1f} MiB",
        "peak memory per device, measured": f"{f['peak_bytes_measured'] / 2**20:,.1f} MiB"
        if f["peak_bytes_measured"]
        else "not reported by this device",
        "compile time": f"{f['compile_seconds']:.1f} s",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def main(argv: list[str] | None = None) -> int:
    """Print a table and one JSON line; -> 2 if the request is wrong."""
    parser = Parser(description="Time the training step of a config.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=at_least(1), default=20, help="timed steps (default: 20)")
    parser.add_argument("--warmup", type=at_least(1), default=3, help="warm-up steps (default: 3)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load(arguments.config, arguments.overrides)
        figures = measure(config, arguments.steps, arguments.warmup)
    except (ValueError, OSError) as error:
        return refuse(error)
    Console(width=110).print(show(figures))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
