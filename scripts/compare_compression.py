"""Train with gradients that travel small, and compare validation losses: a table, a picture, one JSON line. Resumable.

    python scripts/compare_compression.py [--config configs/quickstart.yaml] [--ways float8,topk:0.05] [--seeds 3]
                                          [--out runs/compression] [section.key=value ...]

Each way trains the config with 4 replicas once per seed, by `nanotrain_jax.train` in folders of --out; runs that are
there already are read. Ways are values of parallel.compress, sync:H for parallel.sync_every=H, or both as in
sync:20+topk:0.1; none, the control, is always one. Bytes are those of closed forms, per device and step.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure
from rich.console import Console
from rich.table import Table

from nanotrain_jax import plan
from nanotrain_jax.config.load import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs.communication import communication, synchronization
from nanotrain_jax.run import curves

ROOT = Path(__file__).parents[1]
CONTROL = "none"
WAYS = "float8,int8,topk:0.05,topk:0.01,randomk:0.1,powersgd:4,sync:20"
LAYOUT = "parallel.replica=4", "parallel.data=1"
# A learning rate at which a run does not depend on rounding: at that of the config, the loss jumps in the first steps.
TRAINING = "optimizer.lr=1e-3", "optimizer.min_lr=1e-4", "optimizer.warmup_steps=100"


class Result(NamedTuple):
    """The runs of one way."""

    way: str
    megabytes: float  # between replicas, per device and step
    curves: list[list[tuple[int, float]]]  # (step, validation loss) of each seed

    @property
    def losses(self) -> list[float]:
        """Last validation loss of each seed."""
        return [points[-1][1] for points in self.curves]


def overrides_of(way: str) -> list[str]:
    """Return the overrides of a way."""
    overrides = []
    for part in way.split("+"):
        key = "sync_every" if part.startswith("sync:") else "compress"
        overrides.append(f"parallel.{key}={part.removeprefix('sync:')}")
    return overrides


def megabytes(config: Config) -> float:
    """Return the bytes per device and step between replicas, of a config as written."""
    axes = config.parallel.axes
    config = resolve(config, {axis: max(size, 1) for axis, size in axes.items()}, plan.vocabulary(config))
    rows = [row for row in communication(config) if "replica" in row["axis"]]
    once_in = [(rows, 1), (synchronization(config), max(config.parallel.sync_every, 1))]
    return sum(row["bytes_per_device"] / steps for rows, steps in once_in for row in rows) / 1e6


def run(config: Path, overrides: list[str], folder: Path, steps: int) -> list[tuple[int, float]]:
    """Train unless the folder has all steps -> (step, validation loss)."""
    metrics = folder / "metrics.jsonl"
    if not any(record["step"] == steps for record in curves.read(metrics)[0]):
        command = [sys.executable, "-m", "nanotrain_jax.train", "--config", str(config), *overrides]
        subprocess.run([*command, f"logging.dir={folder}"], check=True, stdout=subprocess.DEVNULL)
    return [(record["step"], record["val_loss"]) for record in curves.read(metrics)[0] if record.get("val_loss")]


def measure(asked: argparse.Namespace, way: str) -> Result:
    """Train one way with all seeds."""
    overrides = [*LAYOUT, *TRAINING, *asked.overrides, *overrides_of(way)]
    config = load(asked.config, overrides)
    found = []
    for seed in range(asked.seeds):
        folder = asked.out / f"{way.replace(':', '_')}_{seed}"
        found.append(
            run(asked.config, [*overrides, f"train.seed={seed}", f"data.seed={seed}"], folder, config.train.steps)
        )
        print(f"{way}, seed {seed}: {found[-1][-1][1]:.4f}", flush=True)
    return Result(way, megabytes(config), found)


def table(results: list[Result]) -> Table:
    """Return bytes and losses of each way, beside the control."""
    control = results[0]
    shown = Table("travels", "MB per step", "validation loss, mean", "beside none", "single seeds")
    for result in results:
        mean, base = statistics.mean(result.losses), statistics.mean(control.losses)
        ratios = (f"{loss / other - 1:+.2%}" for loss, other in zip(result.losses, control.losses, strict=True))
        shown.add_row(result.way, f"{result.megabytes:.3f}", f"{mean:.4f}", f"{mean / base - 1:+.2%}", " ".join(ratios))
    return shown


def draw(results: list[Result], path: Path) -> None:
    """Draw the mean validation loss of each way over steps, and the final losses beside their bytes."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.5), layout="constrained")
    over_steps, over_bytes = figure.subplots(1, 2)
    for result in results:
        steps = [step for step, _ in result.curves[0]]
        means = [statistics.mean(losses) for losses in zip(*([y for _, y in c] for c in result.curves), strict=True)]
        over_steps.plot(steps, means, label=result.way, linewidth=1)
        over_bytes.plot([result.megabytes] * len(result.losses), result.losses, "o", label=result.way)
    over_steps.set(xlabel="step", ylabel="validation loss (nats per token)", yscale="log")
    over_bytes.set(xlabel="MB between replicas, per device and step", ylabel="at the end, each seed", xscale="log")
    for axes in over_steps, over_bytes:
        axes.grid(alpha=0.3)
    over_steps.legend()
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> int:
    """Train, and print the table; 2 if the request is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--ways", default=WAYS, help=f"default: {WAYS}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/compression"), help="folder of runs and picture")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    try:
        if asked.seeds < 1:
            raise ValueError(f"--seeds={asked.seeds}: must be at least 1")
        ways = [CONTROL, *(way for way in asked.ways.split(",") if way != CONTROL)]
        for way in ways:  # before the first of them trains
            megabytes(load(asked.config, [*LAYOUT, *TRAINING, *asked.overrides, *overrides_of(way)]))
        results = [measure(asked, way) for way in ways]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    draw(results, asked.out / "losses.png")
    Console().print(table(results))
    print(json.dumps([{"way": r.way, "megabytes": r.megabytes, "losses": r.losses} for r in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
