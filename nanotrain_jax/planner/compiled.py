"""Compile the real step for a cluster that this machine does not have, and compare it with its estimate."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import jax

from nanotrain_jax.audit import copies, hlo, live_ranges, matmuls, topology, wire
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import communication, counts, hardware
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.nvme import update as nvme
from nanotrain_jax.nvme.store import MAX_PENDING_WRITES
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner import hbm, stages, timeline
from nanotrain_jax.planner.estimate import Estimate
from nanotrain_jax.planner.step_time import Transfer
from nanotrain_jax.step import build as steps

STATE = "params", "optimizer", "outer", "residuals"  # parts of the estimate
COPIES = {"to_device_bytes": "to device", "to_host_bytes": "to host"}


def compile_step(
    config: Config, gpu: str, options: dict[str, Any] | None = None, memory_timeline: bool = False
) -> dict[str, Any]:
    """Compile the training step and return its memory, FLOPs and traffic per device, in the form of `plan --json`.

    config: resolved. options: XLA options besides ours. memory_timeline: also return "timeline"
    (`planner/timeline.py`), of GPUs only. gpu="cpu" compiles for this machine's simulated devices. The update outside
    the step (memory.offload_optimizer=nvme) counts in peak memory, but not its all-gather of updated weights at ZeRO 1
    and 2. Raises ValueError for an unknown GPU or an invalid number of them, RuntimeError without the CUDA compiler.
    """
    axes = config.parallel.axes
    devices = None if gpu == hardware.SIMULATED else topology.compile_only(gpu, counts.devices(config))
    mesh = meshes.make(**axes, devices=devices)
    step = steps.build(config, mesh)
    started = time.perf_counter()
    lowered, dump = step.train.lower(step.state, step.batch), None
    if memory_timeline:
        compiled, dump = live_ranges.compile_and_dump(lowered)
    else:
        compiled = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - started
    text, rates, memory = compiled.as_text(), communication.conditional_rates(config), hlo.memory(compiled)
    if gpu == hardware.SIMULATED:  # XLA:CPU reports no peak
        memory["peak_bytes"] = memory["argument_bytes"] + memory["temp_bytes"]
    if nvme.groups(step.plan):
        memory["peak_bytes"] = max(memory["peak_bytes"], update_bytes(step, compiled))
    of_timeline = {"timeline": timeline.summary(live_ranges.timeline(text, dump), config)} if dump else {}
    of_stages = {}
    if config.parallel.pipe > 1 and config.parallel.idle == "skip":
        of_stages = {"stages": stages.per_stage(text, config, mesh.shape)}
    return {
        **memory,
        "flops": matmuls.flops(text, rates),
        "compile_seconds": seconds,
        "hbm": hbm.summary(text, config),
        "collectives": wire.summary(wire.collectives(text, mesh.shape, rates)),
        "host_copies": copies.summary(copies.copies(text, rates)),
        "jax": jax.__version__,
        **of_stages,
        **of_timeline,
    }


def update_bytes(step: steps.Step, compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes per device of the NVMe update: all outputs of the step, and chunks of the largest group:
    the current one, its results, the next one, and those waiting to be written."""

    def chunk_bytes(group: nvme.Group) -> int:
        arrays = jax.tree.leaves(nvme.subgroup_shapes(group.state, group.num_subgroups))
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)

    largest = max(nvme.groups(step.plan).values(), key=chunk_bytes)
    size = chunk_bytes(largest)
    temp = hlo.memory(nvme.lower(largest, step.state.params, compiled.out_info[2]).compile())["temp_bytes"]
    return compiled.memory_analysis().output_size_in_bytes + temp + (3 + MAX_PENDING_WRITES) * size


def estimated(e: Estimate) -> dict[str, float]:
    """Return the estimate's peak_bytes, argument_bytes, flops and wire_bytes; with offload host_bytes and the bytes
    copied each way."""
    parts = e.moments[e.peak]
    values = {
        "peak_bytes": e.peak_bytes,
        "argument_bytes": sum(parts.get(part, 0.0) for part in STATE) + counts.batch_bytes(e.config),
        "flops": e.flops,
        "wire_bytes": sum(t.bytes for t in transfers(e)),
    }
    if e.on_host:
        values["host_bytes"] = sum(e.on_host.values())
        values |= {name: sum(t.bytes for t in e.copies if t.op == op) for name, op in COPIES.items()}
    return values


def ratios(e: Estimate, compiled: dict[str, Any]) -> dict[str, float]:
    """Return compiled / estimated for each value of `estimated`."""
    values = compiled | {"wire_bytes": sum(row["bytes_per_device"] for row in compiled["collectives"])}
    values |= dict.fromkeys(COPIES, 0.0) | {
        f"to_{row['to']}_bytes": row["bytes_per_device"] for row in compiled["host_copies"]
    }
    return {name: values[name] / value if value else 1.0 for name, value in estimated(e).items()}


def transfers(e: Estimate) -> list[Transfer]:
    """Return the estimated transfers of the training step: synchronizations are another program."""
    return [t for t in e.transfers if t.what is not Traffic.SYNCHRONIZATION]


def wire_bytes(e: Estimate) -> Counter[tuple[str, str]]:
    """Return the estimated wire bytes per device and step of each (axis, operation), as in compiled["collectives"]."""
    total: Counter[tuple[str, str]] = Counter()
    for t in transfers(e):
        total[t.axis, t.op] += t.bytes
    return total
