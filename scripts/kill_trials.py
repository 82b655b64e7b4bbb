"""Kill processes of a launched run with SIGKILL, again and again, and see whether it ends as if nothing had happened.

python scripts/kill_trials.py [--trials 50] [--processes 2] [--seed 0] [section.key=value ...]

In each trial a launcher runs a small model; one of its processes, drawn by chance, is killed at a moment drawn by
chance: while it starts, while it trains, or while a checkpoint is written. The run must reach its last step, with the
losses of a run that was left alone, and not lose more steps than lie between two checkpoints; where they are written in
the background (every other trial), not more than twice as many. Exit code 1 if one did not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

MOMENTS = ("training", "checkpoint", "training", "checkpoint", "start")
CONFIG = {
    "model": {"family": "llama", "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 64, "vocab_size": 61},
    "parallel": {"data": 4, "zero": 2},
    "precision": {"compute": "float32"},
    "data": {"source": "synthetic", "batch_size": 16, "seq_len": 16},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 120},
    "checkpoint": {"every": 10, "keep": 2},
    "logging": {"tensorboard": False},
    "runtime": {"simulate": 4},
}


class Trial(NamedTuple):
    """What became of a run."""

    killed: str  # which process, when
    step: int  # at which it was, by the losses written so far
    resumed: int | None  # the step that it went on from; None: not restarted
    problem: str  # "" if there is none


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials, print a table; -> 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(argv)
    rng, console = random.Random(options.seed), Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "small.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        alone = start(config, Path(folder) / "alone", options)
        _, err = alone.communicate()
        if alone.returncode:
            console.print(f"the run that was left alone failed: {err}")
            return 1
        expected = losses(Path(folder) / "alone")
        table = Table("trial", "killed", "at step", "went on from", "lost", "")
        failed = 0
        for number in range(options.trials):
            run = Path(folder) / str(number)
            most = (1 + number % 2) * CONFIG["checkpoint"]["every"]
            launcher = start(config, run, options, f"checkpoint.async={str(bool(number % 2)).lower()}")
            found = trial(launcher, run, MOMENTS[number % len(MOMENTS)], rng.randrange(options.processes), rng)
            found = found._replace(problem=found.problem or problem(found, losses(run), expected, most))
            failed += bool(found.problem)
            lost = "-" if found.resumed is None else str(max(found.step - found.resumed, 0))
            row = (str(number), found.killed, str(found.step), str(found.resumed), lost, found.problem or "same losses")
            table.add_row(*row)
            console.print("  ".join(row))
    console.print(table)
    console.print(f"{options.trials - failed} of {options.trials} runs ended as if nothing had happened")
    return int(failed > 0)


def start(config: Path, run: Path, options: argparse.Namespace, *more: str) -> subprocess.Popen:
    """A launcher."""
    command = ["-m", "nanotrain_jax.launch", "--processes", str(options.processes), "--", "--config", str(config)]
    return subprocess.Popen(
        [sys.executable, *command, f"logging.dir={run}", *more, *options.overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"XLA_FLAGS": "--xla_backend_optimization_level=0"} | os.environ,
    )


def trial(launcher: subprocess.Popen, run: Path, moment: str, rank: int, rng: random.Random) -> Trial:
    """Kill a process at such a moment, and see what becomes of the run."""
    if moment == "start":
        wait(launcher, lambda: rank in children(launcher))
        time.sleep(rng.uniform(0, 6))
    else:
        seen = rng.uniform(0.1, 0.8) * CONFIG["train"]["steps"]
        wait(launcher, lambda: max(losses(run), default=0) >= seen)
        if moment == "checkpoint":
            wait(launcher, lambda: any((run / "checkpoints").glob("*-tmp*")))
        time.sleep(rng.uniform(0, 0.05))
    with suppress(KeyError, ProcessLookupError):  # of a run that has ended already
        os.kill(children(launcher)[rank], signal.SIGKILL)
    step = max(losses(run), default=0)
    out, err = launcher.communicate(timeout=300)
    resumed = [int(number) for number in re.findall(r"resumed from step (\d+)", out)]
    went_on = (resumed or [0])[-1] if "ended by SIGKILL; restart 1" in err else None
    failed = f"exit code {launcher.returncode}: {err.splitlines()[-1:]}" if launcher.returncode else ""
    return Trial(f"{rank}, {moment}", step, went_on, failed)


def problem(found: Trial, losses: dict[int, float], expected: dict[int, float], most: int) -> str:
    """What is wrong with a run that has ended, in a few words; most: steps that it may lose."""
    if found.resumed is None:
        return "ended before it was killed"
    if losses != expected:
        return f"losses differ from step {min(i for i in expected if losses.get(i) != expected[i])} on"
    lost = found.step - found.resumed
    return f"{lost} steps were lost" if lost > most else ""


def children(launcher: subprocess.Popen) -> dict[int, int]:
    """Rank -> process id, of the processes that a launcher has started (Linux)."""
    found = {}
    try:
        pids = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    except OSError:
        return {}
    for pid in pids:
        try:
            env = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except OSError:
            continue
        found |= {int(value.removeprefix("RANK=")): int(pid) for value in env if value.startswith("RANK=")}
    return found


def losses(run: Path) -> dict[int, float]:
    """Step -> loss, as last written."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {
        record["step"]: record["loss"] for record in map(json.loads, (line for line in lines if line.endswith("}")))
    }


def wait(launcher: subprocess.Popen, until: Callable[[], bool]) -> None:
    """Until something is so, or the launcher has ended."""
    while launcher.poll() is None and not until():
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
