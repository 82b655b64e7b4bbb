"""Wall-clock of pipeline schedules, side by side in one run, as ratios to the first.

    python scripts/compare_schedules.py --config configs/laptop_3d.yaml
                                        [--schedules gpipe,1f1b,1f1b_lean,interleaved:2,zero_bubble,zb_h1]
                                        [--rounds 5] [--idle skip,mask] [section.key=value ...]

Compiles the real step with each schedule (interleaved:CHUNKS) and each way to idle (default: that of the config), on
one mesh and one batch of random tokens, and runs them in turn, a few steps each, another one first in every round.
Beside the measured ratio stands that of `chart.stats`, where F, dX and W of a layer take the same time and all else
takes none; if stages mask, every tick there is as long as all of its slots. The first losses have to agree.

That model is of devices that work at the same time. Simulated devices share the cores of one machine: where there are
fewer cores than stages, another device works while one waits, so all work adds up and a bubble costs little. What
wall-clock can show there is overhead: of a tick, of an idle slot, and of work that is done more than once or thrown
away. Memory costs time there too: temporaries above 32 MiB per device are, by glibc, taken from Linux anew in every
step, page by page. cpu ms is what all cores spent on a step; where it is hardly more than the median, only one of them
was free, and where it differs between runs, somebody else was busy.
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
from rich.console import Console
from rich.table import Table

from nanotrain_jax import config as configs
from nanotrain_jax import mesh as meshes
from nanotrain_jax.audit import hlo
from nanotrain_jax.parallel import chart
from nanotrain_jax.parallel import schedule as schedules
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import data, request
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
    """-> ticks, and the time that the schedule takes where a stage takes 1 for each of F, dX and W."""
    schedule = schedules.make(p.schedule, p.pipe, p.microbatches, p.chunks)
    stats = chart.stats(schedule)
    return stats.ticks, stats.masked * 3 * schedule.microbatches if p.idle == "mask" else float(stats.time)


def prepare(config: configs.Config, mesh: jax.sharding.Mesh) -> tuple[Program, Row]:
    """Compile the step of a resolved config and run it once -> program, and what is known of it by then."""
    step, p = steps.build(config, mesh), config.parallel
    started = time.perf_counter()
    train = step.train.lower(step.state, step.batch).compile()
    seconds = time.perf_counter() - started
    shape = config.data.batch_size, config.data.seq_len + 1
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = jax.device_put(batch, jax.tree.map(lambda x: x.sharding, step.batch))
    state, metrics, _ = train(step.init(), batch)
    ticks, model_time = modelled(p)
    return Program(train, batch, state), {
        "schedule": p.schedule,
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
    """-> seconds of each step of each program: by the clock, and of all cores together."""
    states, times = [p.state for p in programs], [[] for _ in programs]
    for turn in range(rounds):
        for i in (np.arange(len(programs)) + turn) % len(programs):
            states[i], seconds = run_steps(programs[i], states[i])
            times[i] += seconds
    return times


def run_steps(program: Program, state: steps.State) -> tuple[steps.State, list[tuple[float, float]]]:
    """Take STEPS steps -> the state after them, and seconds of each as in `measure`."""
    seconds = []
    for _ in range(STEPS):
        by_clock = time.perf_counter()
        of_cores = time.process_time()
        state, _, _ = jax.block_until_ready(program.train(state, program.batch))
        seconds.append((time.perf_counter() - by_clock, time.process_time() - of_cores))
    return state, seconds


def show(rows: Sequence[Row], title: str) -> Table:
    """A row per schedule and way to idle."""
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
    """The config of each schedule and way to idle, resolved. Raises ValueError or OSError."""
    vocab = None if base.model.vocab_size else data.load(base.data).vocab_size
    found = []
    for idle, text in product((asked.idle or base.parallel.idle).split(","), asked.schedules.split(",")):
        name, _, chunks = text.partition(":")
        keys = {"schedule": name, "chunks": chunks or 1, "idle": idle}
        overrides = [f"parallel.{key}={value}" for key, value in keys.items()]
        config = request.load(asked.config, [*asked.overrides, *overrides])
        found.append(resolve(config, mesh.shape, vocab))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time pipeline schedules side by side.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--schedules", default=SCHEDULES, help=f"NAME or interleaved:CHUNKS (default: {SCHEDULES})")
    parser.add_argument("--idle", help="skip, mask or both (default: that of the config)")
    parser.add_argument("--rounds", type=int, default=5, help=f"rounds of {STEPS} steps each (default: 5)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    try:
        if asked.rounds < 1:
            raise ValueError(f"--rounds={asked.rounds}: use 1 or more")
        base = request.load(asked.config, asked.overrides)
        if base.memory.offload_optimizer == "nvme":
            raise ValueError("memory.offload_optimizer=nvme is timed by scripts/compare_offload.py --modes nvme")
        meshes.configure(base.runtime.simulate, base.runtime.deterministic)
        mesh = meshes.make(**base.parallel.axes)
        if mesh.shape["pipe"] == 1:
            raise ValueError("parallel.pipe=1 has no schedule to compare; use 2 or more stages")
        configs_of_all = variants(asked, base, mesh)
    except (ValueError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2

    programs, rows = zip(*(prepare(config, mesh) for config in configs_of_all), strict=True)
    losses = [row["first_loss"] for row in rows]
    if not np.allclose(losses, losses[0], rtol=TOLERANCE, atol=0):
        found = ", ".join(f"{row['schedule']} ({row['idle']}) {row['first_loss']:.7g}" for row in rows)
        print(f"error: the first losses have to agree to {TOLERANCE}, but are {found}", file=sys.stderr)
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
