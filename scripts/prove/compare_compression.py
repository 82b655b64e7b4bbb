"""Train with gradients that travel small, and compare validation losses: a table, a picture, one JSON line. Resumable.

    python scripts/prove/compare_compression.py [--config configs/quickstart.yaml] [--ways float8,topk:0.05] [--seeds 3]
                                          [--jobs 1] [--out runs/compression] [section.key=value ...]

Each way trains the config with 4 replicas once per seed, by `nanotrain_jax.train` in folders of --out; runs that are
complete are read, others continue from their newest checkpoint. Ways are values of parallel.compress, sync:H for
parallel.sync_every=H, or both as in sync:20+topk:0.1; after:N beside them is parallel.full_sync_steps=N. none, the
control, is always one. Bytes are those of closed forms, per device and step, on average over the run.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure
from converge import Job, check, mean_curve, run
from rich.console import Console
from rich.table import Column, Table

from nanotrain_jax.config.load import Parser, at_least, folder_argument, load, path_argument, refuse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span, of_phase, phases
from nanotrain_jax.costs.communication import communication, synchronization
from nanotrain_jax.planner import choice
from nanotrain_jax.run import curves

ROOT = Path(__file__).parents[2]
CONTROL = "none"
WAYS = "float8,int8,topk:0.05,topk:0.01,randomk:0.1,powersgd:4,sync:20"
LAYOUT = "parallel.replica=4", "parallel.data=1"
KEYS = {"sync": "sync_every", "after": "full_sync_steps"}  # other parts of a way are values of compress
# A learning rate at which a run does not depend on rounding: at that of the config, the loss jumps in the first steps.
TRAINING = "optimizer.lr=1e-3", "optimizer.min_lr=1e-4", "optimizer.warmup_steps=100"


class Result(NamedTuple):
    """The runs of one way."""

    way: str
    megabytes: float  # between replicas, per device and step, on average
    curve: list[curves.Point]  # (step, validation loss), mean over seeds
    losses: list[float]  # after the last step, one per seed; nan: the run failed


def overrides_of(way: str) -> list[str]:
    """Return the overrides of a way."""
    if way == CONTROL:
        return ["parallel.compress=none", "parallel.sync_every=0", "parallel.full_sync_steps=0"]
    overrides = []
    for part in way.split("+"):
        name, _, value = part.partition(":")
        overrides.append(f"parallel.{KEYS[name]}={value}" if name in KEYS else f"parallel.compress={part}")
    return overrides


def megabytes(config: Config) -> float:
    """Return the bytes per device and step between replicas, on average over a run, of a config as written."""
    whole_run = Span("", 0, config.train.steps)
    spans = phases(config, whole_run)
    sizes = [(span.last - span.first) * megabytes_of_step(of_phase(config, span)) for span in spans]
    return sum(sizes) / config.train.steps


def megabytes_of_step(config: Config) -> float:
    """Return the bytes per device and step between replicas, of a config without phases."""
    axes = config.parallel.axes
    config = resolve(config, {axis: max(size, 1) for axis, size in axes.items()}, choice.vocabulary(config))
    rows = [row for row in communication(config) if "replica" in row["axis"]]
    once_in = [(rows, 1), (synchronization(config), max(config.parallel.sync_every, 1))]
    return sum(row["bytes_per_device"] / steps for rows, steps in once_in for row in rows) / 1e6


def job(asked: argparse.Namespace, way: str, seed: int) -> Job:
    """Return the run of a way with a seed, checked. Raises ValueError or OSError."""
    of_seed = f"train.seed={seed}", f"data.seed={seed}"
    overrides = [*LAYOUT, *TRAINING, *asked.overrides, *overrides_of(way), *of_seed]
    config = load(asked.config, overrides)
    folder = asked.out / f"{way.replace(':', '_')}_{seed}"
    found = Job(way, seed, config, folder, asked.config, overrides)
    check(found)
    return found


def table(results: list[Result]) -> Table:
    """Return bytes and losses of each way, beside the control."""
    control = results[0]
    shown = Table(
        Column("travels", overflow="fold"), "MB per step", "validation loss, mean", "beside none", "single seeds"
    )
    for result in results:
        mean, base = statistics.mean(result.losses), statistics.mean(control.losses)
        ratios = (f"{loss / other - 1:+.2%}" for loss, other in zip(result.losses, control.losses, strict=True))
        shown.add_row(result.way, f"{result.megabytes:.3f}", f"{mean:.4f}", f"{mean / base - 1:+.2%}", " ".join(ratios))
    return shown


def draw(results: list[Result], path: Path) -> None:
    """Draw the mean validation loss of each way over steps, and the final losses beside their bytes."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.5), layout="constrained")
    over_steps, over_bytes = figure.subplots(1, 2)
    curves.draw_lines(over_steps, {result.way: result.curve for result in results})
    over_steps.set(xlabel="step", ylabel="validation loss (nats per token), mean over seeds")
    for result in results:
        over_bytes.plot([result.megabytes] * len(result.losses), result.losses, "o", label=result.way)
    over_bytes.set(xlabel="MB between replicas, per device and step", ylabel="at the end, each seed")
    over_bytes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=path_argument, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--ways", default=WAYS, help="default: %(default)s")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="runs of each way (default: %(default)s)")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="runs at the same time (default: %(default)s)")
    parser.add_argument(
        "--out", type=folder_argument, default=Path("runs/compression"), help="folder of runs and picture"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    asked.ways = list(dict.fromkeys([CONTROL, *asked.ways.split(",")]))
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is left, and print the table; 2 if the request is wrong, 1 if a run fails."""
    asked = parse(argv)
    try:
        jobs = {way: [job(asked, way, seed) for seed in range(asked.seeds)] for way in asked.ways}
        moved = {way: megabytes(of_seeds[0].config) for way, of_seeds in jobs.items()}
    except (ValueError, OSError) as error:
        return refuse(error)
    with ThreadPoolExecutor(asked.jobs) as pool:
        done = list(pool.map(run, chain.from_iterable(jobs.values())))
    results = [
        Result(way, moved[way], mean_curve([job.curve() for job in of_seeds]), [job.loss for job in of_seeds])
        for way, of_seeds in jobs.items()
    ]
    draw(results, asked.out / "losses.png")
    Console().print(table(results))
    print(json.dumps([{"way": r.way, "megabytes": r.megabytes, "losses": r.losses} for r in results]))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
