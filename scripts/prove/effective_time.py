"""Train for an hour with failures as often as Llama 3 had them, in steps, and say how much of the time was useful.

python scripts/prove/effective_time.py [--minutes 60] [--every 1900] [--seed 0] [--out runs/effective_time]

The 405B of Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4). A step
of 16 million tokens takes 5.9 s at the 400 TFLOP/s per GPU of its table 4, so that is one in 1,900 steps. Here a small
model trains in 4 processes. After a number of steps, exponentially distributed with that mean, a process is killed or
stopped, or the launcher is killed. Prints wall time by cause (nanotrain_jax/run/goodput.py). Exit code 1 unless more
than 90% was in useful steps and the causes sum to the wall time within 1%.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from disturbed_run import Run, Shape, send, until
from kill_trials import kill_launcher, kill_one, stop
from rich.console import Console
from rich.table import Table

from nanotrain_jax.config.load import at_least
from nanotrain_jax.run import goodput

CONFIG = {
    "model": {"family": "llama", "num_layers": 4, "d_model": 128, "num_heads": 4, "d_ff": 384, "vocab_size": 512},
    "parallel": {"data": 4, "zero": 2},
    "precision": {"compute": "float32"},
    "data": {"source": "synthetic", "batch_size": 16, "seq_len": 128},
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "train": {"steps": 10**7, "log_every": 5},
    "checkpoint": {"every": 50, "keep": 2, "async": True},
    "logging": {"tensorboard": False},
    "runtime": {"simulate": 4, "hang_timeout": 15},
}
FAILURES = [kill_one] * 8 + [stop, kill_launcher]
ENOUGH, WITHIN = 0.9, 0.01


def train(run: Run, options: argparse.Namespace, console: Console) -> int:
    """Train with failures until the time is over, and end the run; -> number of failures."""
    rng, end, failures = random.Random(options.seed), time.monotonic() + 60 * options.minutes, 0
    while True:
        steps = run.step() + rng.expovariate(1 / options.every)

        def is_due(steps: float = steps) -> bool:
            run.revive()
            return run.step() >= steps

        if not until(is_due, end - time.monotonic()):
            break
        failure = rng.choice(FAILURES)
        console.print(f"step {run.step():,}: {failure.__name__}")
        before = run.workers()
        failure(run, rng)
        failures += 1
        until(lambda before=before: run.has_others_than(before) or run.launchers[0].poll() is not None, 120)
    send(run.launchers[0].pid, 15)
    run.launchers[0].wait()
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print wall time by cause; -> 1 unless enough of it was useful."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=at_least(1), default=60)
    parser.add_argument("--every", type=at_least(1), default=1900, help="steps from one failure to the next, the mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/effective_time"), help="an empty folder")
    options = parser.parse_args(argv)
    folder, console = options.out.absolute() / "run", Console(highlight=False, soft_wrap=True)
    folder.mkdir(parents=True)
    config = options.out.absolute() / "small.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    began = time.time()
    run = Run(folder, config, Shape(1, 4, ()), [])
    try:
        failures = train(run, options, console)
    finally:
        run.stop()
    lines = goodput.read(folder / "run")
    seconds, wall = goodput.by_cause(lines), lines[-1].time - began
    table = Table("cause", "seconds", "share")
    for cause, value in seconds.items():
        table.add_row(cause, f"{value:.1f}", f"{value / wall:.2%}")
    console.print(table)
    share, total = seconds[goodput.USEFUL] / wall, sum(seconds.values())
    console.print(f"{failures} failures in {lines[-1].step:,} steps; {share:.1%} of {wall:.0f} s in useful steps")
    console.print(f"the causes sum to {total:.1f} s, {total / wall - 1:+.2%} beside the wall time")
    return int(share <= ENOUGH or abs(total / wall - 1) > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
