"""Hold the compiled training step to theory, on a machine without a GPU: a table, and one JSON line for programs.

    python scripts/audit.py --config configs/gpt2_124m.yaml [--gpu h100] [--gpus 8] [--zero 0,1,2,3]
                            [--remat none,full] [--schedule 1f1b,interleaved:2] [section.key=value ...]

Compiles the real step for GPUs that are not here (needs `pip install 'nanotrain_jax[cuda12]'`) and sets what the
program moves, computes and stores beside the closed forms of nanotrain_jax/audit/cost.py, and whether it fits. With
--gpus, parallel.data becomes what they allow, and the batch grows or shrinks with it. What fits is what JAX takes of a
GPU's memory: 75% of it, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
"""

import argparse
import json
import sys
import time
from itertools import product
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from nanotrain_jax import config as configs
from nanotrain_jax import mesh as meshes
from nanotrain_jax import step as steps
from nanotrain_jax.audit import cost, hardware, hlo, memory, topology
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import request

TAKEN = 0.75  # the share of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION)


def spread(config: configs.Config, gpus: int) -> configs.Config:
    """The config on another number of GPUs: parallel.data changes, a device's share of the batch does not."""
    replica, data = config.parallel.replica, config.parallel.data
    if data == -1:
        return config
    others = config.parallel.pipe * replica * config.parallel.tensor
    share, data = config.data.batch_size / (replica * data), max(gpus // others, 1)
    return config.replace("parallel", data=data).replace("data", batch_size=int(share * replica * data))


def audit(config: configs.Config, gpu: str, gpus: int) -> dict[str, Any]:
    """Compile the step of a config for GPUs -> theory, compiled, and their ratios. Bytes and FLOPs per device and step.

    Raises ValueError if the config does not fit the GPUs, RuntimeError without the CUDA compiler.
    """
    mesh = meshes.make(**config.parallel.axes, devices=topology.compile_only(gpu, gpus))
    config = resolve(config, mesh.shape)
    step = steps.build(config, mesh)
    started = time.perf_counter()
    compiled = step.train.lower(step.state, step.batch).compile()
    seconds = time.perf_counter() - started
    text = compiled.as_text()

    turns = cost.turns(config)
    moves, parts = hlo.summary(hlo.collectives(text, mesh.shape, turns)), memory.peak(config)[1]
    theory = {
        "collectives": cost.communication(config),
        "flops": cost.step_flops(config),
        **{f"{name}_bytes": value for name, value in parts.items()},
        "argument_bytes": parts["params"] + parts["optimizer"],
        "peak_bytes": sum(parts.values()),
    }
    found = {
        "collectives": moves,
        "flops": hlo.matmul_flops(text, turns),
        "compile_seconds": seconds,
        **hlo.memory(compiled),
    }
    for side in theory, found:
        side["wire_bytes"] = sum(row["bytes_per_device"] for row in side["collectives"])
    ratios = {
        name: found[name] / theory[name] if theory[name] else 1.0
        for name in ("wire_bytes", "flops", "argument_bytes", "peak_bytes")
    }
    share = found["peak_bytes"] / hardware.find(gpu).memory_bytes
    return {
        "gpu": gpu,
        "gpus": gpus,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "zero": config.parallel.zero,
        "schedule": f"{config.parallel.schedule}:{config.parallel.chunks}".removesuffix(":1")
        if mesh.shape["pipe"] > 1
        else "",
        "microbatches": config.parallel.microbatches,
        "remat": config.memory.remat,
        "theory": theory,
        "compiled": found,
        "ratios": ratios,
        "memory_share": share,
        "fits": share <= TAKEN,
        "behind_matmuls": sum(row["behind_matmuls_bytes"] for row in moves) / max(found["wire_bytes"], 1),
    }


def show(title: str, rows: list[dict[str, Any]]) -> Table:
    """The audits as a table for people: compiled, and in brackets its ratio to theory.

    fits: into what JAX takes of the GPU's memory, and the share of all of it that is needed.
    """
    table = Table(title=title)
    for name in (
        "zero",
        "schedule",
        "remat",
        "wire MB",
        "behind matmuls",
        "TFLOP",
        "arguments MB",
        "peak MB",
        "fits",
        "compile s",
    ):
        table.add_column(name, justify="left" if name in ("schedule", "remat") else "right")
    for row in rows:
        cell = lambda name, unit, row=row: f"{row['compiled'][name] / unit:,.1f} ({row['ratios'][name]:.3f})"
        table.add_row(
            str(row["zero"]),
            row["schedule"],
            row["remat"],
            cell("wire_bytes", 1e6),
            f"{row['behind_matmuls']:.0%}",
            cell("flops", 1e12),
            cell("argument_bytes", 1e6),
            cell("peak_bytes", 1e6),
            f"{'yes' if row['fits'] else 'no'}, {row['memory_share']:.0%}",
            f"{row['compiled']['compile_seconds']:.0f}",
        )
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold the compiled training step to theory.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpu", default="h100", help="a100, h100, h200, b200 (default: h100)")
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs (default: 8)")
    parser.add_argument("--zero", help="stages to compare, e.g. 0,1,2,3 (default: that of the config)")
    parser.add_argument("--remat", help="policies to compare, e.g. none,full (default: that of the config)")
    parser.add_argument(
        "--schedule", help="pipeline schedules to compare, e.g. 1f1b,interleaved:2 (default: the config's)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        jax.config.update("jax_platforms", "cpu")  # nothing runs; no GPU is asked for
        base = request.load(arguments.config, arguments.overrides)
        stages = (arguments.zero or str(base.parallel.zero)).split(",")
        policies = (arguments.remat or base.memory.remat).split(",")
        schedules = (arguments.schedule or f"{base.parallel.schedule}:{base.parallel.chunks}").split(",")
        if arguments.schedule and base.parallel.pipe == 1:
            raise ValueError(f"--schedule {arguments.schedule} with parallel.pipe=1: give parallel.pipe=2 or more")
        variants = []
        for stage, schedule, policy in product(stages, schedules, policies):
            name, _, chunks = schedule.partition(":")
            keys = {"parallel.zero": stage, "parallel.schedule": name, "parallel.chunks": chunks or 1}
            keys |= {"memory.remat": policy}
            overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in keys.items())]
            variants.append(request.load(arguments.config, overrides))
        rows = [audit(spread(c, arguments.gpus), arguments.gpu, arguments.gpus) for c in variants]
    except (ValueError, OSError, RuntimeError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    title = f"{arguments.config} compiled for {arguments.gpus} x {arguments.gpu}: per device and step (ratio to theory)"
    Console(width=128).print(show(title, rows))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
