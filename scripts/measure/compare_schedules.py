"""Compare the wall-clock time of pipeline schedules in one run, as ratios to the first.

    python scripts/measure/compare_schedules.py --config configs/laptop_3d.yaml
                                        [--schedules gpipe,1f1b,1f1b_lean,interleaved:2,zero_bubble,zb_h1]
                                        [--rounds 5] [--idle skip,mask] [section.key=value ...]

Compiles the real step with each schedule (interleaved:CHUNKS; +vocab: with parallel.vocab_over_pipe=true) and idle mode
(default: the config's), on one mesh and one batch of random tokens. Runs the programs in turn, a few steps each, with a
rotated order in every round. The table also has the ratio modelled by `schedule_text.stats`, where F, dX and W of a
layer take the same time and all else takes none; with idle=mask every tick takes the time of all its slots. The first
losses must agree.

The model assumes devices that run in parallel. Simulated devices share the cores of one machine: with fewer cores than
stages, one device computes while another waits, so a bubble costs little and all work adds up. Wall-clock time then
shows overhead: of a tick, of an idle slot, of recomputed or masked work. Memory costs time as well: for temporaries
above 32 MiB per device, glibc maps new pages in every step. cpu ms is the time of all cores per step: if it is about
the median, only one core was free; if it differs between runs, the machine was busy.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from bench import on_mesh, random_batch
from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import hlo
from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.load import Parser, at_least, load, refuse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline import schedule_text
from nanotrain_jax.step import build as steps

SCHEDULES = "gpipe,1f1b,1f1b_lean,interleaved:2,zero_bubble,zb_h1"
STEPS = 3  # of each program, per round
TOLERANCE = 1e-5  # between first losses: sums in another order, nothing else
Row = dict[str, Any]


class Program(NamedTuple):
    """The compiled step, its batch, and its state after the first update."""

    train: jax.stages.Compiled
    batch: steps.Tree
    state: steps.State


def modelled(p: configs.Parallel) -> tuple[int, float]:
    """Return ticks, and the time of the schedule if F, dX and W of a stage take 1 each."""
    schedule = schedules.make(p.schedule, p.pipe, p.microbatches, p.chunks, bool(p.vocab_over_pipe))
    stats = schedule_text.stats(schedule)
    return stats.ticks, stats.masked * 3 * schedule.microbatches if p.idle == "mask" else float(stats.time)


def prepare(config: configs.Config, mesh: jax.sharding.Mesh) -> tuple[Program, Row]:
    """Compile the step of a resolved config and run it once; -> program, and the first figures of its row."""
    step, p = steps.build(config, mesh), config.parallel
    started = time.perf_counter()
    train = step.train.lower(step.state, step.batch).compile()
    seconds = time.perf_counter() - started
    batch = random_batch(config, step)
    state, metrics, _ = train(step.init(), batch)
    ticks, model_time = modelled(p)
    return Program(train, batch, state), {
        "schedule": p.schedule + "+vocab" * bool(p.vocab_over_pipe),
        "idle": p.idle,
        "ticks": ticks,
        "chunks": p.chunks,
        "microbatches": p.microbatches,
        "model_time": model_time,
        "temp_bytes": hlo.memory(train)["temp_bytes"],
        "compile_seconds": seconds,
        "first_loss": float(metrics["loss"]),
    }


def measure(programs: Sequence[Program], rounds: int) -> list[list[tuple[float, float]]]:
    """Return for each program and step: seconds of wall-clock time, and seconds of all cores."""
    states, times = [p.state for p in programs], [[] for _ in programs]
    for round_index in range(rounds):
        for i in (np.arange(len(programs)) + round_index) % len(programs):
            states[i], seconds = run_steps(programs[i], states[i])
            times[i] += seconds
    return times


def run_steps(program: Program, state: steps.State) -> tuple[steps.State, list[tuple[float, float]]]:
    """Take STEPS steps; -> the state after them, and seconds of each as in `measure`."""
    seconds = []
    for _ in range(STEPS):
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        state, _, _ = jax.block_until_ready(program.train(state, program.batch))
        seconds.append((time.perf_counter() - wall_start, time.process_time() - cpu_start))
    return state, seconds


def show(rows: Sequence[Row], title: str) -> Table:
    """Return a table with a row per schedule and idle mode."""
    table = Table("schedule", "idle", title=title)
    for column in ("ticks", "chunks", "median ms", "ratio", "modelled", "cpu ms", "temp MB", "compile s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["schedule"],
            row["idle"],
            str(row["ticks"]),
            str(row["chunks"]),
            f"{row['step_seconds'] * 1e3:,.1f}",
            f"{row['ratio_to_first']:.3f}",
            f"{row['ratio_modelled']:.3f}",
            f"{row['cpu_seconds'] * 1e3:,.1f}",
            f"{row['temp_bytes'] / 1e6:,.1f}",
            f"{row['compile_seconds']:.1f}",
        )
    return table


def variants(asked: argparse.Namespace, base: configs.Config, mesh: jax.sharding.Mesh) -> list[configs.Config]:
    """Return the resolved config of each schedule and idle mode. Raises ValueError or OSError."""
    resolved = []
    for idle, text in product((asked.idle or base.parallel.idle).split(","), asked.schedules.split(",")):
        layout, _, ends = text.partition("+")
        name, _, chunks = layout.partition(":")
        keys = {"schedule": name, "chunks": chunks or 1, "idle": idle}
        if ends not in ("", "vocab"):
            raise ValueError(f"--schedules={text}: +{ends} is unknown; use +vocab")
        keys |= {"vocab_over_pipe": "true"} if ends else {}
        overrides = [f"parallel.{key}={value}" for key, value in keys.items()]
        config = load(asked.config, [*asked.overrides, *overrides])
        resolved.append(resolve(config, mesh.shape, base.model.vocab_size))
    return resolved


def main(argv: list[str] | None = None) -> int:
    """Print a table and one JSON line; -> 2 if the request is wrong, 1 if the losses differ."""
    parser = Parser(description="Time pipeline schedules side by side.")
    parser.add_argument("--config", required=True)
    names = f"NAME, interleaved:CHUNKS, NAME+vocab (default: {SCHEDULES})"
    parser.add_argument("--schedules", default=SCHEDULES, help=names)
    parser.add_argument("--idle", help="skip, mask, or both as skip,mask (default: the config's)")
    parser.add_argument("--rounds", type=at_least(1), default=5, help=f"rounds of {STEPS} steps each (default: 5)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    try:
        base = load(asked.config, asked.overrides)
        meshes.configure(base.runtime.simulate, base.runtime.deterministic)
        base, mesh = on_mesh(base)
        if mesh.shape["pipe"] == 1:
            raise ValueError("parallel.pipe=1: has no schedule to compare; use 2 or more stages")
        all_configs = variants(asked, base, mesh)
    except (ValueError, OSError) as error:
        return refuse(error)

    programs, rows = zip(*(prepare(config, mesh) for config in all_configs), strict=True)
    losses = [row["first_loss"] for row in rows]
    if not np.allclose(losses, losses[0], rtol=TOLERANCE, atol=0):
        first_losses = ", ".join(f"{row['schedule']} ({row['idle']}) {row['first_loss']:.7g}" for row in rows)
        print(f"error: first losses must agree to {TOLERANCE}: {first_losses}", file=sys.stderr)
        return 1
    for row, times in zip(rows, measure(programs, asked.rounds), strict=True):
        seconds, cpu = zip(*times, strict=True)
        row |= {"step_seconds": statistics.median(seconds), "step_seconds_min": min(seconds), "steps": len(seconds)}
        row["cpu_seconds"] = statistics.median(cpu)
        row["ratio_to_first"] = row["step_seconds"] / rows[0]["step_seconds"]
        row["ratio_modelled"] = row["model_time"] / rows[0]["model_time"]
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    title = (
        f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({axes}), jax {jax.__version__}, "
        f"{rows[0]['microbatches']} microbatches, {rows[0]['steps']} steps each"
    )
    Console(width=110).print(show(rows, title))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
