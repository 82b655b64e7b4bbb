"""Train one model under many layouts, and compare validation losses with those of one device: a table, a picture, JSON.

    python scripts/prove/converge.py [--layouts data,zero3,...] [--seeds 3] [--steps 300] [--control one] [--jobs 1]
                               [--config FILE] [--out runs/converge] [section.key=value ...]

Each layout trains once per seed (train.seed and data.seed) by `nanotrain_jax.train`: the same tokens per step, the same
rows in the same order, the same first weights. A layout replaces the section `parallel` and sets some other keys; all
else is the config's, by default a small model on simulated devices. Keys given on the command line win over those of
layouts. Runs that are complete are read, others continue from their newest checkpoint, if they save any. On CPU devices
offload copies to and from the same memory, and float8 has the values of float8 but no float8 kernels.

A layout is within the spread if |mean - mean of the control| <= largest - smallest final loss of the control, over
seeds: it is no further from the control than the control is from itself, with another seed. The last column is
stricter: a layout and the control with the same seed differ by rounding alone, unless the layout rounds on purpose (16
or 8 bits) or keeps back a part of the gradient (topk).
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan, prod
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure
from rich.console import Console
from rich.table import Table

from nanotrain_jax.config.load import Parser, at_least, folder_argument, load, path_argument, path_override, refuse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import spans
from nanotrain_jax.planner import choice
from nanotrain_jax.run import curves

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "one": ["parallel={data: 1}"],
    "data": ["parallel={data: 4}"],
    "zero1": ["parallel={data: 4, zero: 1}"],
    "zero2": ["parallel={data: 4, zero: 2}"],
    "zero3": ["parallel={data: 4, zero: 3}"],
    "tensor": ["parallel={data: 1, tensor: 2, sequence_parallel: false}"],
    "sequence": ["parallel={data: 1, tensor: 2, sequence_parallel: true}"],
    "context": ["parallel={data: 1, context: 2}"],
    "1f1b": ["parallel={data: 1, pipe: 2, microbatches: 4, schedule: 1f1b}"],
    "interleaved": ["parallel={data: 1, pipe: 2, microbatches: 4, schedule: interleaved, chunks: 2}"],
    "zero_bubble": ["parallel={data: 1, pipe: 2, microbatches: 4, schedule: zero_bubble}"],
    "3d": ["parallel={data: 2, tensor: 2, pipe: 2, zero: 1, microbatches: 4}"],
    "offload": [
        "parallel={data: 2, zero: 3}",
        "memory={remat: full, offload_optimizer: host, offload_params: host, offload_activations: host}",
    ],
    "bfloat16": ["parallel={data: 4}", "precision.compute=bfloat16"],
    "float8": ["parallel={data: 4, zero: 3}", "precision={compute: bfloat16, matmul: float8, gather: float8}"],
    "int8": ["parallel={data: 4}", "precision.grad_reduce=int8"],
    "topk": ["parallel={replica: 4, data: 1, compress: 'topk:0.25'}"],
}
HEAD = ["layout", "validation loss, mean", "spread", "mean - control's", "within the spread", "largest, same seed"]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = (  # overrides of QUICKSTART: a fifth of its parameters
    "model={num_layers: 4, d_model: 64, num_heads: 4, num_kv_heads: 2, d_ff: 192}",
    "parallel.persist_below=0",
    "data.seq_len=64",
    "optimizer.warmup_steps=60",
    "train.steps=300",
    "checkpoint.every=0",
    "logging.tensorboard=false",
)


class Job(NamedTuple):
    """A run of a layout with a seed."""

    layout: str  # a name
    seed: int
    config: Config
    folder: Path
    file: Path  # the config, before overrides
    overrides: list[str]

    @property
    def command(self) -> list[str]:
        """What trains it."""
        folders = {"logging.dir": self.folder, "checkpoint.dir": self.folder / "checkpoints"}
        overrides = [*self.overrides, *(path_override(key, folder) for key, folder in folders.items())]
        return [sys.executable, "-m", "nanotrain_jax.train", "--config", str(self.file), *overrides]

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return spans(self.config)[-1].last

    @property
    def request(self) -> Path:
        """File with the config as asked for, so that no run of another config is taken for this one."""
        return self.folder / "request.json"

    @property
    def text(self) -> str:
        """What that file has to hold."""
        return json.dumps(self.config.to_dict(), indent=1)

    def curve(self) -> list[curves.Point]:
        """Return (step, validation loss) of what has run so far; without losses that are not finite."""
        return curves.series(curves.read(self.folder / "metrics.jsonl")[0], "val_loss", "steps")

    @property
    def is_complete(self) -> bool:
        """True if the last step was evaluated."""
        records, _ = curves.read(self.folder / "metrics.jsonl")
        return bool(records) and records[-1]["step"] == self.steps and "val_loss" in records[-1]

    @property
    def loss(self) -> float:
        """The validation loss after the last step; nan if there is none, or it is not finite."""
        step, loss = (self.curve() or [(0, nan)])[-1]
        return loss if step == self.steps else nan


def job(asked: argparse.Namespace, layout: str, seed: int) -> Job:
    """Return the run of a layout with a seed, checked. Raises ValueError or OSError."""
    file, small = (asked.config, ()) if asked.config else (QUICKSTART, SMALL)
    steps = [f"train.steps={asked.steps}"] if asked.steps else []
    overrides = [*LAYOUTS[layout], *small, *steps, *asked.overrides, f"train.seed={seed}", f"data.seed={seed}"]
    config = load(file, overrides)
    axes = {axis: max(size, 1) for axis, size in config.parallel.axes.items()}
    if config.runtime.simulate:
        overrides.append(f"runtime.simulate={prod(axes.values())}")
        config = load(file, overrides)
    resolve(config, axes, choice.vocabulary(config))
    if not config.train.eval_every or not config.data.val_fraction:
        raise ValueError("train.eval_every=0 or data.val_fraction=0: there would be no validation losses; set both")
    found = Job(layout, seed, config, asked.out / f"{layout}_{seed}", file, overrides)
    check(found)
    return found


def check(job: Job) -> None:
    """Raise ValueError if the folder of a job has a run of another config."""
    if job.request.exists() and job.request.read_text() != job.text:
        raise ValueError(f"{job.folder} has a run of another config; remove it, or give another --out")


def run(job: Job) -> bool:
    """Train unless the run is complete, and print a line; -> True if it is complete now."""
    if not job.is_complete:
        job.folder.mkdir(parents=True, exist_ok=True)
        job.request.write_text(job.text)
        with open(job.folder / "output.txt", "a") as output:
            subprocess.run(job.command, stdout=output, stderr=subprocess.STDOUT)
    done = job.is_complete
    result = f"validation loss {job.loss:.4f}" if done else f"failed; see {job.folder}/output.txt"
    print(f"{job.layout}, seed {job.seed}: {result}\n", end="", flush=True)  # one write: other threads print too
    return done


class Result(NamedTuple):
    """Final validation losses of a layout, one per seed, beside those of the control with the same seeds."""

    layout: str
    losses: list[float]  # nan: the run failed or diverged
    control: list[float]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.losses)

    @property
    def difference(self) -> float:
        """Mean less the mean of the control."""
        return self.mean - statistics.fmean(self.control)

    @property
    def paired(self) -> list[float]:
        """Differences from the control with the same seed."""
        return [loss - other for loss, other in zip(self.losses, self.control, strict=True)]

    @property
    def is_within(self) -> bool:
        """True if the difference is at most the spread of the control over seeds. False with nan."""
        return abs(self.difference) <= spread(self.control)

    def row(self) -> list[str]:
        """Return the cells of a table, see HEAD."""
        verdict = "control" if self.losses is self.control else "yes" if self.is_within else "no"
        largest = f"{max(self.paired, key=abs):+.4f}"
        means = f"{self.mean:.4f}", f"{spread(self.losses):.4f}", f"{self.difference:+.4f}"
        return [self.layout, *means, verdict, largest]


def spread(losses: Sequence[float]) -> float:
    """Return the largest less the smallest loss."""
    return max(losses) - min(losses)


def markdown(results: Sequence[Result]) -> str:
    """Return the table for a guide."""
    rows = [HEAD, ["---"] * len(HEAD), *(result.row() for result in results)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(jobs: Sequence[Job], results: Sequence[Result], path: Path) -> None:
    """Draw the mean validation loss of each layout over steps, and how far each run ends from the control's."""
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    over_steps, at_the_end = figure.subplots(1, 2)
    of_layouts = {result.layout: [job.curve() for job in jobs if job.layout == result.layout] for result in results}
    curves.draw_lines(over_steps, {layout: mean_curve(of_seeds) for layout, of_seeds in of_layouts.items()})
    over_steps.set(xlabel="step", ylabel="validation loss (nats per token), mean over seeds")
    allowed = spread(results[0].control)
    at_the_end.axvspan(-allowed, allowed, alpha=0.2, label="spread of the control over seeds")
    for row, result in enumerate(results):
        at_the_end.plot(result.paired, [row] * len(result.paired), "k.", label="_" if row else "one seed")
        at_the_end.plot(result.difference, row, "r|", label="_" if row else "mean over seeds", markersize=12)
    at_the_end.set_yticks(range(len(results)), [result.layout for result in results])
    at_the_end.invert_yaxis()
    at_the_end.set(xlabel="final validation loss, less the control's with the same seed")
    at_the_end.grid(alpha=0.3)
    at_the_end.legend(fontsize="small")
    figure.savefig(path, dpi=80)


def mean_curve(of_seeds: Sequence[Sequence[curves.Point]]) -> list[curves.Point]:
    """Return the mean over seeds of curves with the same steps."""
    return [(points[0][0], statistics.fmean(y for _, y in points)) for points in zip(*of_seeds, strict=False)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error; raises ValueError."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="default: %(default)s")
    parser.add_argument("--control", default="one", help="layout to compare with (default: %(default)s, one device)")
    parser.add_argument("--seeds", type=at_least(2), default=3, help="runs of each layout (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="train.steps (default: the config's; of the small model 300)")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--config", type=path_argument, help="default: quickstart.yaml with a smaller model")
    parser.add_argument(
        "--out", type=folder_argument, default=Path("runs/converge"), help="folder of runs, table and picture"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    asked.layouts = list(dict.fromkeys([asked.control, *asked.layouts.split(",")]))
    unknown = [layout for layout in asked.layouts if layout not in LAYOUTS]
    if unknown:
        raise ValueError(f"layout {unknown[0]!r} is unknown; use {', '.join(LAYOUTS)}")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is left, print and write the table and the picture; 2 if the request is wrong, 1 if a run fails."""
    try:
        asked = parse(argv)
        jobs = [job(asked, layout, seed) for layout in asked.layouts for seed in range(asked.seeds)]
    except (ValueError, OSError) as error:
        return refuse(error)
    with ThreadPoolExecutor(asked.jobs) as pool:
        done = list(pool.map(run, jobs))
    losses = {layout: [job.loss for job in jobs if job.layout == layout] for layout in asked.layouts}
    results = [Result(layout, losses[layout], losses[asked.control]) for layout in asked.layouts]
    draw(jobs, results, asked.out / "losses.png")
    (asked.out / "table.txt").write_text(markdown(results))
    (asked.out / "losses.json").write_text(json.dumps(losses, indent=1))
    shown = Table(*HEAD)
    for result in results:
        shown.add_row(*result.row())
    Console(width=128).print(shown)
    print(f"wrote table.txt, losses.json and losses.png to {asked.out}")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
