"""Train a mixture of experts beside the dense model of equal active parameters: losses, and loads of experts.

    python scripts/prove/compare_mixture.py [--config configs/moe_laptop.yaml] [--seeds 3] [--jobs 1]
                                            [--bias-rate 0.005] [--out runs/mixture] [section.key=value ...]

Each of three models trains once per seed by `nanotrain_jax.train`, on the same tokens: `dense` has in place of experts
an MLP as wide as those that a token goes to, and `loss` and `bias` are the mixture with these values of
model.experts.balance, `bias` without a loss that balances. Runs that are complete are read, others continue from their
newest checkpoint. Load: tokens of the busiest expert of any layer over the mean, after optimizer.warmup_steps: of all
held-out tokens of an evaluation, the largest of these, and of the few tokens of a step, the mean.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import nan
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib.figure
from converge import Job, check, mean_curve, run
from rich.console import Console
from rich.table import Table

from nanotrain_jax.config.load import Parser, at_least, folder_argument, load, path_argument, refuse
from nanotrain_jax.config.schema import Config
from nanotrain_jax.run import curves

ROOT = Path(__file__).parents[2]
DENSE = "dense"
NAMES = DENSE, "loss", "bias"


class Result(NamedTuple):
    """The runs of one model."""

    name: str
    curve: list[curves.Point]  # (step, validation loss), mean over seeds
    losses: list[float]  # after the last step, one per seed; nan: the run failed
    loads: list[float]  # the largest of evaluations, one per seed; empty: it has no experts
    of_steps: list[float]  # mean of the logged steps


def overrides_of(name: str, config: Config, bias_rate: float) -> list[str]:
    """Return the overrides of a model. Raises ValueError unless the config has a mixture in every layer."""
    experts = config.model.experts
    if experts is None or experts.first_dense:
        raise ValueError("a mixture in every layer is compared; set model.experts, without first_dense")
    if name == "loss":
        return ["model.experts.balance=loss"]
    if name == "bias":
        keys = {"balance": "bias", "balance_weight": "null", "bias_rate": bias_rate}
        return [f"model.experts.{key}={value}" for key, value in keys.items()]
    return ["model.experts=null", f"model.d_ff={experts.d_ff * (experts.top_k + experts.shared)}", "parallel.expert=1"]


def job(asked: argparse.Namespace, name: str, seed: int) -> Job:
    """Return the run of a model with a seed, checked. Raises ValueError or OSError."""
    of_model = overrides_of(name, load(asked.config, asked.overrides), asked.bias_rate)
    overrides = [*asked.overrides, *of_model, f"train.seed={seed}", f"data.seed={seed}"]
    found = Job(name, seed, load(asked.config, overrides), asked.out / f"{name}_{seed}", asked.config, overrides)
    check(found)
    return found


def loads_of(job: Job, name: str) -> list[float]:
    """Return loads of the busiest expert after the warm-up. name: `load`, of evaluations; `train_load`, of steps."""
    records, _ = curves.read(job.folder / "metrics.jsonl")
    return [record[name] for record in records if record["step"] > job.config.optimizer.warmup_steps and name in record]


def result_of(jobs: Sequence[Job]) -> Result:
    """Return the result of the runs of one model."""
    mixtures = [] if jobs[0].layout == DENSE else jobs
    loads = [max(loads_of(job, "load"), default=nan) for job in mixtures]
    of_steps = [fmean(loads_of(job, "train_load") or [nan]) for job in mixtures]
    curve = mean_curve([job.curve() for job in jobs])
    return Result(jobs[0].layout, curve, [job.loss for job in jobs], loads, of_steps)


def table(results: Sequence[Result]) -> Table:
    """Return the losses of each model beside those of the dense one with the same seeds, and loads."""
    dense, *_ = results
    shown = Table(
        "model", "validation loss, mean", "less the dense model's, each seed", "largest load", "mean of steps"
    )
    for result in results:
        less = " ".join(f"{loss - other:+.4f}" for loss, other in zip(result.losses, dense.losses, strict=True))
        loads = [" ".join(f"{load:.2f}" for load in of_seeds) for of_seeds in (result.loads, result.of_steps)]
        shown.add_row(result.name, f"{fmean(result.losses):.4f}", less, *loads)
    return shown


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the mean validation loss of each model over steps."""
    figure = matplotlib.figure.Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    curves.draw_lines(axes, {result.name: result.curve for result in results})
    axes.set(xlabel="step", ylabel="validation loss (nats per token), mean over seeds")
    figure.savefig(path, dpi=80)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=path_argument, default=ROOT / "configs" / "moe_laptop.yaml")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="runs of each model (default: %(default)s)")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="runs at the same time (default: %(default)s)")
    parser.add_argument(
        "--bias-rate", type=float, default=0.005, help="model.experts.bias_rate of `bias` (default: %(default)s)"
    )
    parser.add_argument("--out", type=folder_argument, default=Path("runs/mixture"), help="folder of runs and picture")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is left, and print the table; 2 if the request is wrong, 1 if a run fails."""
    asked = parse(argv)
    try:
        jobs = [[job(asked, name, seed) for seed in range(asked.seeds)] for name in NAMES]
    except (ValueError, OSError) as error:
        return refuse(error)
    with ThreadPoolExecutor(asked.jobs) as pool:
        done = list(pool.map(run, chain.from_iterable(jobs)))
    results = [result_of(of_seeds) for of_seeds in jobs]
    draw(results, asked.out / "losses.png")
    Console(width=128).print(table(results))
    print(
        json.dumps([{"model": r.name, "losses": r.losses, "loads": r.loads, "of_steps": r.of_steps} for r in results])
    )
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
