"""Compare the compiled training step with the estimates, on a machine without a GPU: a table and one JSON line.

    python scripts/audit.py --config configs/gpt2_124m.yaml [--gpu h100] [--gpus 8] [--zero 0,1,2,3]
                            [--remat none,full] [--schedule 1f1b,interleaved:2] [--xla FLAG=VALUE]
                            [section.key=value ...]

Compiles the real step without GPUs (needs `pip install 'nanotrain_jax[cuda12]'`) and compares the program's
communication, FLOPs and memory with the estimates of nanotrain_jax.plan; also reports if it fits. With --gpus,
parallel.data takes the GPUs that the other axes leave, and the batch scales with it. The memory limit is what JAX
allocates of a GPU: 75%, or XLA_PYTHON_CLIENT_MEM_FRACTION. --xla sets an XLA flag besides ours, in all programs.
"""

import json
import sys
from itertools import product
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.load import Parser, load, nested, refuse
from nanotrain_jax.costs import hardware
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner.compiled import compile_step, ratios
from nanotrain_jax.planner.estimate import estimate, on_gpus


def audit(config: configs.Config, gpu: str, gpus: int, flags: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compile the step of a config for GPUs; -> estimate, compiled, ratios. Bytes and FLOPs per device and step.

    flags: of XLA, besides ours. Raises ValueError if the config does not fit the GPUs, RuntimeError without the CUDA
    compiler.
    """
    config = on_gpus(config, gpus, gpu)
    e, compiled = estimate(config, gpu), compile_step(config, gpu, flags)
    p, rows = config.parallel, compiled["collectives"]
    compiled["wire_bytes"] = sum(row["bytes_per_device"] for row in rows)
    return {
        "gpu": gpu,
        "gpus": gpus,
        "mesh": {axis: size for axis, size in p.axes.items() if size > 1},
        "zero": p.zero,
        "schedule": f"{p.schedule}:{p.chunks}".removesuffix(":1") if p.pipe > 1 else "",
        "microbatches": p.microbatches,
        "remat": config.memory.remat,
        "estimate": {
            "moments": e.moments,
            "collectives": [
                {"axis": t.axis, "op": t.op, "bytes_per_device": t.bytes, "why": t.why} for t in e.transfers
            ],
        },
        "compiled": compiled,
        "ratios": ratios(e, compiled),
        "memory_share": compiled["peak_bytes"] / hardware.find(gpu).memory_bytes,
        "fits": compiled["peak_bytes"] <= e.limit_bytes,
        "behind_matmuls": sum(row["behind_matmuls_bytes"] for row in rows) / max(compiled["wire_bytes"], 1),
    }


def cell(row: dict, name: str, unit: float) -> str:
    """Format a compiled figure in a unit, and its ratio to the estimate."""
    return f"{row['compiled'][name] / unit:,.1f} ({row['ratios'][name]:.3f})"


def hbm_cell(hbm: dict) -> str:
    """Format the bytes of a step, and the ratio of a layer to its least bytes where that is known."""
    layer = hbm.get("layer")
    return f"{hbm['bytes'] / 1e9:,.1f}" + (f" ({layer['bytes'] / layer['minimum_bytes']:.2f})" if layer else "")


def show(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return the audits as a table: compiled figures, and in brackets their ratio to the estimate.

    lockstep: of a step that waits in every tick for the busiest stage. HBM: bytes that kernels read and write; the
    ratio is of a layer, without collectives, to the least possible (costs/hbm.py). fits: within what JAX allocates of
    the GPU's memory; the percentage is of all its memory.
    """
    table = Table(title=title)
    figures = "wire MB", "behind matmuls", "TFLOP", "lockstep TFLOP", "HBM GB (ratio)", "arguments MB", "peak MB"
    for name in ("zero", "schedule", "remat", *figures, "fits", "compile s"):
        table.add_column(name, justify="left" if name in ("schedule", "remat") else "right")
    for row in rows:
        table.add_row(
            str(row["zero"]),
            row["schedule"],
            row["remat"],
            cell(row, "wire_bytes", 1e6),
            f"{row['behind_matmuls']:.0%}",
            cell(row, "flops", 1e12),
            f"{row['compiled']['stages']['lockstep_flops'] / 1e12:,.1f}" if "stages" in row["compiled"] else "",
            hbm_cell(row["compiled"]["hbm"]),
            cell(row, "argument_bytes", 1e6),
            cell(row, "peak_bytes", 1e6),
            f"{'yes' if row['fits'] else 'no'}, {row['memory_share']:.0%}",
            f"{row['compiled']['compile_seconds']:.0f}",
        )
    return table


def main(argv: list[str] | None = None) -> int:
    """Print a table and one JSON line; -> 2 if the request is wrong."""
    parser = Parser(description="Compare the compiled training step with the estimates.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(hardware.GPUS)} (default: h100)")
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs (default: 8)")
    parser.add_argument("--zero", help="ZeRO stages, e.g. 0,1,2,3 (default: the config's)")
    parser.add_argument("--remat", help="remat policies, e.g. none,full (default: the config's)")
    parser.add_argument("--schedule", help="pipeline schedules, e.g. 1f1b,interleaved:2 (default: the config's)")
    parser.add_argument("--xla", action="append", default=[], metavar="FLAG=VALUE", help="xla_gpu_...; again: several")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        jax.config.update("jax_platforms", "cpu")  # nothing runs; no GPU is asked for
        meshes.pin()
        base = load(arguments.config, arguments.overrides)
        stages = (arguments.zero or str(base.parallel.zero)).split(",")
        policies = (arguments.remat or base.memory.remat).split(",")
        schedules = (arguments.schedule or f"{base.parallel.schedule}:{base.parallel.chunks}").split(",")
        if arguments.schedule and base.parallel.pipe == 1:
            raise ValueError(f"--schedule={arguments.schedule}: needs a pipeline; set parallel.pipe=2 or more")
        variants = []
        for stage, schedule, policy in product(stages, schedules, policies):
            name, _, chunks = schedule.partition(":")
            keys = {"parallel.zero": stage, "parallel.schedule": name, "parallel.chunks": chunks or 1}
            keys |= {"memory.remat": policy}
            overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in keys.items())]
            variants.append(load(arguments.config, overrides))
        flags = nested([f"xla.{text}" for text in arguments.xla]).get("xla")
        rows = [audit(c, arguments.gpu, arguments.gpus, flags) for c in variants]
    except (ValueError, OSError, RuntimeError) as error:
        return refuse(error)
    title = f"{arguments.config} compiled for {arguments.gpus} x {arguments.gpu}: per GPU and step (ratio to estimate)"
    Console(width=144).print(show(title, rows))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
