"""Sweep learning rates, or any keys: train with each value, and compare final validation losses. Resumable.

    python scripts/sweep.py --config configs/quickstart.yaml --over optimizer.lr=1e-3,3e-3,1e-2 [--seeds 3]
                            [--over optimizer.weight_decay=0,0.1] [--out runs/sweep] [section.key=value ...]

Each combination of values trains once per seed by `nanotrain_jax.train`, in a folder of --out. The same command
continues where it stopped: complete runs are read, others resume. With optimizer.lr, optimizer.min_lr keeps its ratio
to it unless it is given too. Prints a table, best first, and the command that draws the runs.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from nanotrain_jax.config.load import Parser, folder_argument, load, nested, path_argument, path_override, refuse
from nanotrain_jax.config.training_stages import spans
from nanotrain_jax.run import curves
from nanotrain_jax.run.length import is_by_data

LR, MIN_LR = "optimizer.lr", "optimizer.min_lr"
OWN = {"train.seed", "data.seed", "logging.dir", "checkpoint.dir"}  # set for each run
MAX_NAME = 240  # bytes of the name of a folder
Grid = dict[str, list[str]]


class Result(NamedTuple):
    """The runs of one combination of values."""

    values: dict[str, str]  # key -> value
    folders: list[Path]  # of the seeds
    losses: list[float | None]  # final validation losses; nan: diverged, None: the run did not end

    @property
    def mean(self) -> float:
        """The mean over seeds; infinite if one of them diverged or did not end."""
        mean = math.nan if None in self.losses else statistics.mean(self.losses)
        return mean if math.isfinite(mean) else math.inf


def grid_of(texts: list[str]) -> Grid:
    """Return key -> values of `key=v1,v2` (commas in brackets do not separate). Raises ValueError."""
    grid: Grid = {}
    for text in texts:
        key, _, values = text.partition("=")
        split = split_values(values)
        if not re.fullmatch(r"\w+\.\w+", key) or "" in split or key in grid or len(set(split)) < len(split):
            raise ValueError(
                f"--over {text}: must be section.key=value,value,... with each key and value once; write e.g. --over "
                "optimizer.lr=1e-3,3e-3"
            )
        grid[key] = split
    return grid


def split_values(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            values.append("")
        else:
            values[-1] += character
    return values


def overrides_of(values: dict[str, str], asked: argparse.Namespace) -> list[str]:
    """Return the overrides of a combination; min_lr in proportion to lr, unless given."""
    overrides = [*asked.overrides, *(f"{key}={value}" for key, value in values.items())]
    is_given = any(text.startswith(f"{MIN_LR}=") for text in overrides)
    if LR in values and not is_given:
        plain, swept = (load(asked.config, texts).optimizer for texts in (asked.overrides, [*overrides, f"{MIN_LR}=0"]))
        overrides.append(f"{MIN_LR}={plain.min_lr * swept.lr / plain.lr:.6g}")
    return overrides


def final_loss(folder: Path, steps: int | None) -> float | None:
    """Return the validation loss of the last step, nan if it is not finite; None if the run is not complete.

    steps: of the run; None: those that it took.
    """
    records, _ = curves.read(folder / "metrics.jsonl")
    last = steps or (records[-1]["step"] if records else 0)
    for record in records:
        if record["step"] == last and "val_loss" in record:
            return math.nan if record["val_loss"] is None else record["val_loss"]
    return None


def folder_of(asked: argparse.Namespace, values: dict[str, str], seed: int) -> Path:
    """Return the folder of the runs of a combination with a seed: characters with a meaning in paths are replaced."""
    name = "_".join([*(f"{key}={value}" for key, value in values.items()), f"seed={seed}"])
    return asked.out / re.sub(r"[^\w.=+-]", "-", name)


def train(asked: argparse.Namespace, values: dict[str, str], seed: int) -> tuple[Path, float | None]:
    """Train unless the run is complete -> its folder, and the final validation loss."""
    folder = folder_of(asked, values, seed)
    overrides = [*overrides_of(values, asked), f"train.seed={seed}", f"data.seed={seed}"]
    config = load(asked.config, overrides)
    steps = None if is_by_data(config) else spans(config)[-1].last  # the run knows: one that is complete takes no step
    loss, code = steps and final_loss(folder, steps), 0
    if loss is None:
        overrides += [path_override("logging.dir", folder), path_override("checkpoint.dir", folder / "checkpoints")]
        command = [sys.executable, "-m", "nanotrain_jax.train", "--config", str(asked.config), *overrides]
        code = finished(command)
        loss = final_loss(folder, steps) if steps or code == 0 else None
    result = f"no final validation loss (exit code {code})" if loss is None else f"{loss:.4f}"
    print(f"{folder}: {result}", flush=True)
    return folder, loss


def train_all(asked: argparse.Namespace, grid: Grid) -> list[Result]:
    """Train every combination with every seed."""
    results = []
    for values in combinations(grid):
        runs = [train(asked, values, seed) for seed in range(asked.seeds)]
        results.append(Result(values, *map(list, zip(*runs, strict=True))))
    return results


def finished(command: list[str]) -> int:
    """Run a command to its end -> exit code. After Ctrl-C, which also stops the command, wait until it has saved."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise


def check(asked: argparse.Namespace, grid: Grid) -> None:
    """Check all configs before the first run, and that --out holds no runs of other settings. Raises ValueError or
    OSError."""
    if asked.seeds < 1:
        raise ValueError(f"--seeds={asked.seeds}: must be at least 1")
    given = {text.partition("=")[0] for text in asked.overrides}
    if given & grid.keys():
        raise ValueError(f"{min(given & grid.keys())} is swept and given; leave one of them out")
    if OWN & (given | grid.keys()):
        raise ValueError(f"{min(OWN & (given | grid.keys()))} is set for each run; use --seeds and --out")
    folders = [folder_of(asked, values, 0) for values in combinations(grid)]
    longest = max(folders, key=lambda folder: len(folder.name))
    if len(longest.name.encode()) > MAX_NAME:
        raise ValueError(f"--over: a run would have a folder named {longest.name}, which is too long; sweep fewer keys")
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise ValueError(f"--over: two combinations would share {twice}; sweep them apart, each with its own --out")
    for values in combinations(grid):
        config = load(asked.config, overrides_of(values, asked))
        is_by_data(config)  # raises ValueError
        if not config.train.eval_every or not config.data.val_fraction:
            raise ValueError("train.eval_every=0 or data.val_fraction=0: a sweep compares validation losses; set both")
    settings = json.dumps(load(asked.config, [*asked.overrides, "logging.dir=."]).to_dict(), indent=1)
    kept = asked.out / "settings.json"
    if kept.exists() and kept.read_text() != settings:
        raise ValueError(f"--out={asked.out}: its runs have other settings ({kept}); give another folder")
    asked.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(settings)


def combinations(grid: Grid) -> list[dict[str, str]]:
    """Return every combination of values."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def at_edges(best: Result, grid: Grid) -> list[str]:
    """Say for which keys the best value is the smallest or the largest of several."""
    lines = []
    for key, texts in grid.items():
        numbers = [nested([f"x.y={text}"])["x"]["y"] for text in texts]
        if len(texts) < 2 or not {type(number) for number in numbers} <= {int, float}:
            continue
        value = numbers[texts.index(best.values[key])]
        edge = {min(numbers): "smallest", max(numbers): "largest"}.get(value)
        if edge:
            lines.append(f"{key}={best.values[key]} is the {edge} tried: the best may lie beyond; add values there")
    return lines


def table(ranked: list[Result], grid: Grid) -> Table:
    """Return the final validation losses, best first."""
    shown = Table("", *grid, "validation loss", "single seeds")
    for rank, result in enumerate(ranked):
        losses = " ".join("-" if loss is None else f"{loss:.4f}" for loss in result.losses)
        is_known = math.isfinite(result.mean)
        mean = f"{result.mean:.4f}" if is_known else "-"
        shown.add_row("best" if is_known and rank == 0 else "", *result.values.values(), mean, losses)
    return shown


def main(argv: list[str] | None = None) -> int:
    """Train, and print the table; -> 2 if the request is wrong, 1 if a run did not end."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=path_argument, required=True)
    parser.add_argument("--over", action="append", required=True, metavar="section.key=v1,v2", help="again: a grid")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--out", type=folder_argument, default=Path("runs/sweep"), help="folder of the runs (default: runs/sweep)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    try:
        grid = grid_of(asked.over)
        check(asked, grid)
    except (ValueError, OSError) as error:
        return refuse(error)
    try:
        ranked = sorted(train_all(asked, grid), key=lambda result: result.mean)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    console = Console(width=120, soft_wrap=True, markup=False, highlight=False)
    console.print(table(ranked, grid))
    if math.isfinite(ranked[0].mean):
        for line in at_edges(ranked[0], grid):
            console.print(line)
    folders = [str(folder) for result in ranked for folder in result.folders]
    console.print("draw them: " + shlex.join(["python", "-m", "nanotrain_jax.compare", *folders]))
    return int(any(None in result.losses for result in ranked))


if __name__ == "__main__":
    sys.exit(main())
