"""Kill processes of launched runs with SIGKILL and check that each run ends with the losses of an undisturbed run.

python scripts/prove/kill_trials.py [--trials 50] [--processes 2] [--seed 0] [section.key=value ...]

In each trial a launcher trains a small model; a random process is killed at a random moment: during start-up, training
or the write of a checkpoint. The run must reach its last step with the losses of an undisturbed run and lose at most
the steps between two checkpoints; with asynchronous checkpoints (every other trial), at most twice as many. Exit code 1
if a trial fails.
"""

from __future__ import annotations

import argparse
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

from nanotrain_jax.run import curves

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
    """The result of a run."""

    killed: str  # rank and moment
    step: int  # last step with a logged loss when it was killed
    resumed: int | None  # the step it resumed from; None: not restarted
    problem: str  # "" if none


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials and print a table; -> 1 if one failed."""
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
        undisturbed = start(config, Path(folder) / "undisturbed", options)
        _, err = undisturbed.communicate()
        if undisturbed.returncode:
            console.print(f"the undisturbed run failed: {err}")
            return 1
        expected = losses(Path(folder) / "undisturbed")
        table = Table("trial", "killed", "at step", "resumed from", "lost", "")
        failed = 0
        for number in range(options.trials):
            run = Path(folder) / str(number)
            max_lost = (1 + number % 2) * CONFIG["checkpoint"]["every"]
            launcher = start(config, run, options, f"checkpoint.async={str(bool(number % 2)).lower()}")
            result = trial(launcher, run, MOMENTS[number % len(MOMENTS)], rng.randrange(options.processes), rng)
            result = result._replace(problem=result.problem or problem(result, losses(run), expected, max_lost))
            failed += bool(result.problem)
            lost = "-" if result.resumed is None else str(max(result.step - result.resumed, 0))
            outcome = result.problem or "same losses"
            row = (str(number), result.killed, str(result.step), str(result.resumed), lost, outcome)
            table.add_row(*row)
            console.print("  ".join(row))
    console.print(table)
    console.print(f"{options.trials - failed} of {options.trials} runs ended with the same losses")
    return int(failed > 0)


def start(config: Path, run: Path, options: argparse.Namespace, *overrides: str) -> subprocess.Popen:
    """Start a launcher."""
    command = ["-m", "nanotrain_jax.launch", "--processes", str(options.processes), "--", "--config", str(config)]
    return subprocess.Popen(
        [sys.executable, *command, f"logging.dir={run}", *overrides, *options.overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"XLA_FLAGS": "--xla_backend_optimization_level=0"} | os.environ,
    )


def trial(launcher: subprocess.Popen, run: Path, moment: str, rank: int, rng: random.Random) -> Trial:
    """Kill a process at the given moment and wait for the run to end."""
    if moment == "start":
        wait(launcher, lambda: rank in children(launcher))
        time.sleep(rng.uniform(0, 6))
    else:
        kill_step = rng.uniform(0.1, 0.8) * CONFIG["train"]["steps"]
        wait(launcher, lambda: max(losses(run), default=0) >= kill_step)
        if moment == "checkpoint":
            wait(launcher, lambda: any((run / "checkpoints").glob("*-tmp*")))
        time.sleep(rng.uniform(0, 0.05))
    with suppress(KeyError, ProcessLookupError):  # the run has already ended
        os.kill(children(launcher)[rank], signal.SIGKILL)
    step = max(losses(run), default=0)
    out, err = launcher.communicate(timeout=300)
    resumed = [int(number) for number in re.findall(r"resumed from step (\d+)", out)]
    resumed_from = (resumed or [0])[-1] if "killed by SIGKILL; restart 1" in err else None
    failed = f"exit code {launcher.returncode}: {err.splitlines()[-1:]}" if launcher.returncode else ""
    return Trial(f"{rank}, {moment}", step, resumed_from, failed)


def problem(result: Trial, losses: dict[int, float], expected: dict[int, float], max_lost: int) -> str:
    """Return what is wrong with a run that has ended; "" if nothing. max_lost: steps that it may lose."""
    if result.resumed is None:
        return "ended before it was killed"
    if losses != expected:
        return f"losses differ from step {min(i for i in expected if losses.get(i) != expected[i])}"
    lost = result.step - result.resumed
    return f"lost {lost} steps" if lost > max_lost else ""


def children(launcher: subprocess.Popen) -> dict[int, int]:
    """Return rank -> process id of a launcher's workers (Linux)."""
    pid_of_rank = {}
    try:
        pids = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    except OSError:
        return {}
    for pid in pids:
        try:
            env = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except OSError:
            continue
        pid_of_rank |= {int(value.removeprefix("RANK=")): int(pid) for value in env if value.startswith("RANK=")}
    return pid_of_rank


def losses(run: Path) -> dict[int, float]:
    """Return step -> loss, as last logged."""
    return {record["step"]: record["loss"] for record in curves.read(run / "metrics.jsonl")[0]}


def wait(launcher: subprocess.Popen, until: Callable[[], bool]) -> None:
    """Wait until a condition holds or the launcher has exited."""
    while launcher.poll() is None and not until():
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
