"""Compare runs: `python -m nanotrain_jax.compare RUN [RUN ...] [--metric val_loss] [--against steps] [--out FILE]`

Draws a metric of several runs in one picture, and prints a table: how far they are, losses, speed, and the keys in
which their configs differ. Uses no device. Exit codes: 0 done; 2 invalid request (one line on stderr).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin(finishes=True)

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
from rich.console import Console
from rich.table import Table

from nanotrain_jax.config.load import Parser, flat, path_argument, refuse
from nanotrain_jax.config.load import read as read_config
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import naming
from nanotrain_jax.run import curves, goodput, shell

PLACES = ("logging.dir", "checkpoint.dir", "checkpoint.local_dir")  # keys that differ between any two runs
NATS = {"loss": "training loss (nats per token)", "val_loss": "validation loss (nats per token)"}


class Run(NamedTuple):
    """What a run has written."""

    name: str
    records: list[dict[str, Any]]  # ordered by step
    config: dict[str, Any]  # section.key -> value
    first: int = 0  # step from which it started: of another run's checkpoint

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric that are finite."""
        return [y for _, y in curves.series(self.records, metric, "steps")]

    def final(self, metric: str) -> str:
        """Return the last value of a metric as text: - if there is none, nan if it is not finite."""
        logged = [curves.number(record, metric) for record in self.records if metric in record]
        return "-" if not logged else "nan" if logged[-1] is None else f"{logged[-1]:.4f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the picture and print the table; an invalid request gives one line on stderr and exit code 2."""
    options = parse(argv)
    try:
        runs = [read(Path(folder)) for folder in options.runs]
        draw(runs, options.metric, options.against, Path(options.out))
    except (ValueError, OSError) as error:
        return refuse(error)
    Console(width=128, highlight=False, markup=False).print(table(runs))
    print(f"wrote {options.out}")
    for run in runs:
        if text := goodput.summary(goodput.read(Path(run.name))):
            print(f"{run.name}: {text.strip()}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error."""
    parser = Parser(
        prog="python -m nanotrain_jax.compare",
        description="Draw a metric of several runs in one picture, and print a table of them.",
    )
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="folder of a run (logging.dir)")
    parser.add_argument(
        "--metric", default="loss", help="loss, val_loss, or another of metrics.jsonl (default: %(default)s)"
    )
    parser.add_argument(
        "--against",
        choices=curves.AGAINST,
        default="tokens",
        help="horizontal axis; seconds: of training steps only (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=path_argument, default="compare.png", metavar="FILE", help="picture (default: %(default)s)"
    )
    return parser.parse_args(argv)


def read(folder: Path) -> Run:
    """Read a run; lines of metrics.jsonl that cannot be read give a warning. Raises ValueError or OSError."""
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"RUN={str(folder)!r} has no {name}; give the folder of a run (logging.dir)")
    metrics = folder / "metrics.jsonl"
    records, unreadable = curves.read(metrics)
    if not records:
        raise ValueError(f"{metrics} has no records ({unreadable} lines cannot be read); give a run with some")
    if unreadable:
        print(f"warning: {unreadable} lines of {metrics} cannot be read; they are left out", file=sys.stderr)
    config = flat(Config().to_dict())  # of keys that a run from before them does not have
    config |= flat(read_config(folder / "config.yaml", option="RUN"))
    if config["train.epochs"] is not None:
        del config["train.steps"]
    first = min((line.first for line in goodput.read(folder)), default=0)
    return Run(str(folder), records, config, first)


def draw(runs: Sequence[Run], metric: str, against: str, picture: Path) -> None:
    """Draw a metric of all runs. Raises ValueError if a run has no value of it, or OSError."""
    lines = {run.name: curves.series(run.records, metric, against, run.first) for run in runs}
    for run in runs:
        if not lines[run.name]:
            known = sorted({key for record in run.records for key in record if curves.number(record, key) is not None})
            raise ValueError(
                f"--metric={metric} --against={against}: {run.name} has no such values; it has {', '.join(known)}"
            )
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    curves.draw_lines(axes, lines)
    axes.set(xlabel=curves.AGAINST[against][1])
    axes.set_ylabel(NATS.get(metric, metric), parse_math=False)
    with naming(f"--out={str(picture)!r} cannot be written", "give another file"):
        figure.savefig(picture, dpi=120)


def table(runs: Sequence[Run]) -> Table:
    """Return a table with a row per run."""
    shown = Table("run")
    for column in ("steps", "tokens", "final loss", "best val", "final val", "tokens/s"):
        shown.add_column(column, justify="right")
    shown.add_column("config, where runs differ", overflow="fold")
    for run in runs:
        tokens, val, speed = map(run.values, ("tokens", "val_loss", "tokens_per_second"))
        shown.add_row(
            run.name,
            f"{run.records[-1]['step']:,}",
            f"{tokens[-1]:,}" if tokens else "-",
            run.final("loss"),
            f"{min(val):.4f}" if val else "-",
            run.final("val_loss"),
            f"{statistics.median(speed):,.0f}" if speed else "-",
            "\n".join(differences(run, runs)),
        )
    return shown


def differences(run: Run, runs: Sequence[Run]) -> list[str]:
    """Return the keys in which configs of runs differ, with their values in one: of the first run all of them, of
    another those that are unlike the first."""
    keys = dict.fromkeys(key for each in runs for key in each.config if key not in PLACES)
    differ = [key for key in keys if any(each.config.get(key) != runs[0].config.get(key) for each in runs)]
    own = [key for key in differ if run is runs[0] or run.config.get(key) != runs[0].config.get(key)]
    return [f"{key}={shown(run.config.get(key))}" for key in own]


def shown(value: Any) -> str:
    """Return a value as it is given to a key on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


if __name__ == "__main__":
    sys.exit(shell.run(main))
