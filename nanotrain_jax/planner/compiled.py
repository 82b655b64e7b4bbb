"""The real step, compiled for a cluster that is not here, beside its estimate."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import jax

from nanotrain_jax import mesh as meshes
from nanotrain_jax.audit import copies, cost, hardware, hlo, topology
from nanotrain_jax.config import Config
from nanotrain_jax.nvme import update as nvme
from nanotrain_jax.nvme.store import AT_A_TIME
from nanotrain_jax.planner.estimate import Estimate
from nanotrain_jax.step import build as steps

COPIES = {"to_device_bytes": "to device", "to_host_bytes": "to host"}


def compile_step(config: Config, gpu: str) -> dict[str, Any]:
    """Compile the step that training would run -> what it needs per device and step, as `plan --json` has it.

    config: resolved. Raises ValueError for GPUs or a number of them that are not known, RuntimeError without the CUDA
    compiler. gpu="cpu" compiles for this machine's simulated devices. Of updates outside the step
    (memory.offload_optimizer=nvme) it has the memory; not what they gather at ZeRO 1 and 2: the updated weights, once.
    """
    axes = config.parallel.axes
    devices = None if gpu == hardware.SIMULATED else topology.compile_only(gpu, cost.devices(config))
    mesh = meshes.make(**axes, devices=devices)
    step = steps.build(config, mesh)
    started = time.perf_counter()
    compiled = step.train.lower(step.state, step.batch).compile()
    seconds = time.perf_counter() - started
    text, turns, memory = compiled.as_text(), cost.turns(config), hlo.memory(compiled)
    if gpu == hardware.SIMULATED:  # whose compiler tells no peak
        memory["peak_bytes"] = memory["argument_bytes"] + memory["temp_bytes"]
    if nvme.groups(step.plan):
        memory["peak_bytes"] = max(memory["peak_bytes"], update_bytes(step, compiled))
    return {
        **memory,
        "flops": hlo.matmul_flops(text, turns),
        "compile_seconds": seconds,
        "collectives": hlo.summary(hlo.collectives(text, mesh.shape, turns)),
        "host_copies": copies.summary(copies.copies(text, turns)),
        "jax": jax.__version__,
    }


def update_bytes(step: steps.Step, compiled: jax.stages.Compiled) -> int:
    """Of a device, while the largest piece of what the step has left is updated: all that the step returned, and
    pieces: one to compute with, its results, the next one, and those that wait to be written."""

    def of_piece(group: nvme.Group) -> int:
        arrays = jax.tree.leaves(nvme.of_one(group.state, group.count))
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)

    largest = max(nvme.groups(step.plan).values(), key=of_piece)
    size = of_piece(largest)
    temp = hlo.memory(nvme.lower(largest, step.state.params, compiled.out_info[2]).compile())["temp_bytes"]
    return compiled.memory_analysis().output_size_in_bytes + temp + (3 + AT_A_TIME) * size


def estimated(e: Estimate) -> dict[str, float]:
    """What an estimate says of peak_bytes, argument_bytes, flops and wire_bytes; of host_bytes, and of what is copied
    to and from the host, if anything rests there."""
    parts = e.moments[e.peak]
    found = {
        "peak_bytes": e.peak_bytes,
        "argument_bytes": parts["params"] + parts["optimizer"] + 8 * cost.tokens_per_device(e.config),  # and the batch
        "flops": e.flops,
        "wire_bytes": sum(t.bytes for t in e.transfers),
    }
    if e.on_host:
        found["host_bytes"] = sum(e.on_host.values())
        found |= {name: sum(t.bytes for t in e.copies if t.op == op) for name, op in COPIES.items()}
    return found


def ratios(e: Estimate, compiled: dict[str, Any]) -> dict[str, float]:
    """Compiled over estimated, of the same."""
    found = compiled | {"wire_bytes": sum(row["bytes_per_device"] for row in compiled["collectives"])}
    found |= dict.fromkeys(COPIES, 0.0) | {
        f"to_{row['to']}_bytes": row["bytes_per_device"] for row in compiled["host_copies"]
    }
    return {name: found[name] / value if value else 1.0 for name, value in estimated(e).items()}


def moved(e: Estimate) -> Counter[tuple[str, str]]:
    """Estimated wire bytes per device and step of each (axis, operation), as compiled["collectives"] has them."""
    found: Counter[tuple[str, str]] = Counter()
    for t in e.transfers:
        found[t.axis, t.op] += t.bytes
    return found
