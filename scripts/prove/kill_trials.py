"""Disturb launched runs at random moments, and check that each ends with the losses of an undisturbed run.

python scripts/prove/kill_trials.py [--trials 200] [--seed 0] [--only WORD] [--out runs/kill_trials]

Each run has a random layout in 1, 2 or 4 processes, on one host or two, and suffers FAULTS one after another, each in a
trial: a process, all or a launcher is killed, a process is stopped, a disk is full, a clock jumps, the network is cut;
while it trains, saves, starts, restores, compiles or ends. After each the run must continue by itself, or with the same
command where its launcher has ended, lose at most the steps between two checkpoints (with asynchronous ones twice as
many) and in the end have the losses of a run without faults, bit for bit. `trials.jsonl` in --out has a line for each;
the same command continues. Exit code 1 if a trial fails. Linux; what needs root or a C compiler is left out without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import disturbed_run
import yaml
from disturbed_run import Run, Shape, inside, send, until
from rich.console import Console
from rich.table import Table

CONFIG = {
    "model": {"family": "llama", "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 64, "vocab_size": 61},
    "precision": {"compute": "float32"},
    "data": {"source": "synthetic", "batch_size": 16, "seq_len": 16},
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "train": {"steps": 100000},
    "checkpoint": {"every": 10, "keep": 2},
    "logging": {"tensorboard": False},
    "runtime": {"simulate": 4, "hang_timeout": 8},
}
EVERY = CONFIG["checkpoint"]["every"]
EXPERTS = "model.experts={num: 4, top_k: 2, d_ff: 32}"
LAYOUTS = [
    ("parallel.data=4",),
    ("parallel.data=4", "parallel.zero=2"),
    ("parallel.data=4", "parallel.zero=3", "parallel.persist_below=0"),
    ("parallel.data=2", "parallel.tensor=2", "parallel.zero=1"),
    ("parallel.data=2", "parallel.pipe=2", "parallel.microbatches=2", "parallel.schedule=1f1b"),
    ("parallel.data=2", "parallel.context=2", "parallel.zero=3", "parallel.persist_below=0"),
    ("parallel.replica=2", "parallel.data=2", "parallel.zero=2"),
    ("parallel.data=4", "parallel.expert=2", "parallel.zero=1", "model.d_ff=null", EXPERTS),
    ("parallel.data=4", "parallel.zero=1", "memory.offload_optimizer=nvme", "parallel.persist_below=64"),
]
PER_RUN = 8  # trials
CONTINUES = 240  # seconds, at most
PAUSE, CUT = 2, 25  # seconds


class Fault(NamedTuple):
    """What happens to a run. restarts: it must start again, or must not (None: may); hosts, processes: at least."""

    apply: Callable[[Run, random.Random], None]
    restarts: bool | None
    moments: tuple[str, ...]
    hosts: int = 1
    processes: int = 1


def kill_one(run: Run, rng: random.Random) -> None:
    """Kill a process."""
    kill(run, [rng.choice([*run.workers().values()] or [0])])


def kill_all(run: Run, rng: random.Random) -> None:
    """Kill all processes at once."""
    kill(run, [*run.workers().values()])


def kill_launcher(run: Run, rng: random.Random) -> None:
    """Kill the launcher of a host."""
    kill(run, [rng.choice(run.launchers).pid])


def lose_host(run: Run, rng: random.Random) -> None:
    """Kill the launcher of a host with its processes."""
    launcher = rng.choice(run.launchers)
    kill(run, [launcher.pid, *disturbed_run.children(launcher).values()])


def kill(run: Run, pids: Sequence[int]) -> None:
    """Kill processes."""
    for pid in filter(None, pids):
        send(pid, signal.SIGKILL)


def stop(run: Run, rng: random.Random) -> None:
    """Stop a process for good."""
    send(rng.choice([*run.workers().values()]), signal.SIGSTOP)


def pause(run: Run, rng: random.Random) -> None:
    """Stop a process for less than the hang timeout."""
    pid = rng.choice([*run.workers().values()])
    send(pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    send(pid, signal.SIGCONT)


def fill_disk(run: Run, rng: random.Random) -> None:
    """Fill the disk until the run has failed, then free it."""
    full, before = run.folder / "full", run.workers()
    with full.open("wb", buffering=0) as file:

        def has_failed() -> bool:
            with suppress(OSError):  # full again
                while file.write(bytes(1 << 16)):
                    pass
            return run.workers() != before

        until(has_failed, 60)
    full.unlink()


def jump(run: Run, rng: random.Random) -> None:
    """Set the clock an hour on, or back: JAX may take processes for lost, as it counts heartbeats by time of day."""
    run.set_clock(rng.choice([-3600, 3600]))
    time.sleep(PAUSE)


def cut(run: Run, rng: random.Random, seconds: float = CUT) -> None:
    """Cut the network between the hosts for longer than the hang timeout."""
    space = rng.choice(disturbed_run.NAMESPACES)
    inside(space, "link", "set", "cable", "down")
    time.sleep(seconds)
    inside(space, "link", "set", "cable", "up")


def cut_shortly(run: Run, rng: random.Random) -> None:
    """Cut the network between the hosts for less than the hang timeout."""
    cut(run, rng, PAUSE)


STEADY = "training", "save"
STARTS = "start", "restore", "compile"
FAULTS = {
    "process killed": Fault(kill_one, True, (*STEADY, *STARTS, "end")),
    "all processes killed": Fault(kill_all, True, (*STEADY, *STARTS, "end")),
    "launcher killed": Fault(kill_launcher, True, (*STEADY, *STARTS, "end")),
    "host lost": Fault(lose_host, True, (*STEADY, *STARTS, "end"), hosts=2, processes=2),
    "process stopped": Fault(stop, True, STEADY, processes=2),
    "process paused": Fault(pause, False, STEADY),
    "disk full": Fault(fill_disk, True, STEADY),
    "clock jumps": Fault(jump, None, STEADY),
    "network cut": Fault(cut, True, STEADY, hosts=2, processes=2),
    "network cut shortly": Fault(cut_shortly, False, STEADY, hosts=2, processes=2),
}


class Trial(NamedTuple):
    """What a fault did to a run."""

    run: int
    layout: str
    hosts: int
    processes: int
    fault: str
    moment: str
    step: int  # logged last before
    resumed: int | None  # None: the run did not start again
    lost: int  # steps that were computed again
    seconds: float  # from the fault until the next step after `step`
    problem: str  # "" if none


def possible(only: str) -> list[str]:
    """Return the faults that this machine can have, with a word in their name."""
    left_out = [] if disturbed_run.has_network() else [name for name in FAULTS if FAULTS[name].hosts > 1]
    left_out += [] if disturbed_run.has_clock() else ["clock jumps"]
    left_out += [] if os.geteuid() == 0 else ["disk full"]
    return [name for name in FAULTS if only in name and name not in left_out]


def reach(run: Run, moment: str, rng: random.Random) -> None:
    """Wait until a run is at a moment: on its way to it, it may be killed."""
    run.reaches(lambda: run.has_others_than({}), CONTINUES)
    before = run.workers()
    if moment in STARTS:
        kill_one(run, rng)
        run.reaches(lambda: run.has_others_than(before), 60)
    if moment == "start":
        time.sleep(rng.uniform(0, 4))
    elif moment in STARTS:
        rank = rng.randrange(run.shape.processes)
        until(lambda: run.phase(rank) == moment, 30)
        time.sleep(rng.uniform(0, 0.3))
    else:
        steps = run.step() + rng.randint(2, 15)
        run.reaches(lambda: run.step() >= steps, CONTINUES)
        if moment == "end":
            send(rng.choice(run.launchers).pid, signal.SIGTERM)
        if moment != "training":
            until(lambda: run.is_saving() or run.workers() != before, 30)
        time.sleep(rng.uniform(0, 0.05))


def trial(run: Run, number: int, name: str, moment: str, rng: random.Random) -> Trial:
    """Disturb a run and wait until it continues."""
    reach(run, moment, rng)
    began, before, resumed = time.monotonic(), run.workers(), len(run.resumed())
    must_start = True if moment == "end" else FAULTS[name].restarts
    FAULTS[name].apply(run, rng)
    at, continues = wait(run, must_start, before)
    seconds, started = time.monotonic() - began, run.workers() != before
    new = run.resumed()[resumed:] or [0]
    lost = max(at - new[-1], 0) if started else 0
    problem = "" if continues else f"does not continue within {CONTINUES} s"
    if continues and started and must_start is False:
        problem = "started again"
    if lost > EVERY * (1 + ("checkpoint.async=true" in run.command)):
        problem = f"lost {lost} steps"
    shape, layout = run.shape, " ".join(key.partition(".")[2] for key in run.shape.keys)
    found = (name, moment, at, new[-1] if started else None, lost, round(seconds, 1), problem)
    done = Trial(number, layout, shape.hosts, shape.processes, *found)
    print(*done, sep="  ", flush=True)
    return done


def wait(run: Run, must_start: bool | None, before: dict[int, int]) -> tuple[int, bool]:
    """Wait until a run has logged a step after the last one; -> the last one, and whether it has.

    must_start: other processes than before come first.
    """
    has_begun = not must_start or run.reaches(lambda: run.has_others_than(before), CONTINUES)
    at = run.step()
    return at, has_begun and run.reaches(lambda: run.step() > at, CONTINUES)


def shape_of(number: int, rng: random.Random) -> Shape:
    """Return the shape of a run."""
    hosts = 2 if number % 3 == 2 and disturbed_run.has_network() else 1
    processes = rng.choice([count for count in (1, 2, 4) if count >= hosts])
    keys = [*rng.choice(LAYOUTS), f"checkpoint.async={rng.choice(['true', 'false'])}"]
    return Shape(hosts, processes, tuple(keys))


def trials_of(number: int, most: int, counts: dict[str, int], folder: Path, rng: random.Random) -> list[Trial]:
    """Run a run with its faults, those that were least often until now, and compare its losses at the end."""
    shape, config, where = shape_of(number, rng), folder / "small.yaml", folder / str(number)
    overrides = [f"memory.nvme_dir={where}/disk"] if any("nvme" in key for key in shape.keys) else []
    if not overrides and rng.random() < 0.5:
        overrides = [f"checkpoint.local_dir={where}/local", "checkpoint.local_every=4"]
    fits = [name for name in counts if FAULTS[name].hosts <= shape.hosts and FAULTS[name].processes <= shape.processes]
    shuffled = sorted(rng.sample(fits, len(fits)), key=counts.get)
    chosen = (shuffled * PER_RUN)[: min(PER_RUN, most)]
    if not chosen:
        return []
    with disturbed_run.disk(where):
        run = Run(where, config, shape, overrides, clock="clock jumps" in chosen)
        try:
            until(lambda: run.step() or run.launchers[0].poll() is not None, CONTINUES)
            if not run.step():
                raise RuntimeError(f"the run does not begin: {run.output_of_all()}")
            found = [trial(run, number, name, rng.choice(FAULTS[name].moments), rng) for name in chosen]
            problem = ending(run, config)
        finally:
            run.stop()
    return [one._replace(problem=one.problem or problem) for one in found]


def ending(run: Run, config: Path) -> str:
    """End a run by a signal and return what is wrong with it, "" if nothing."""
    send(run.launchers[0].pid, signal.SIGTERM)
    if not until(lambda: all(launcher.poll() is not None for launcher in run.launchers), 60):
        return "does not end"
    losses = run.losses()
    expected = undisturbed(run, config, max(losses))
    wrong = [step for step in range(1, max(losses) + 1) if losses.get(step, 0.0) != expected.get(step)]
    return f"losses differ from step {wrong[0]}" if wrong else ""


def undisturbed(run: Run, config: Path, steps: int) -> dict[int, float]:
    """Return step -> loss of the same run without faults."""
    shape, where = run.shape._replace(hosts=1), run.folder / "undisturbed"
    where.mkdir()
    nvme = [f"memory.nvme_dir={where}/disk"] if any("nvme" in key for key in shape.keys) else []
    other = Run(where, config, shape, [f"train.steps={steps}", "checkpoint.every=0", *nvme])
    other.launchers[0].wait()
    return other.losses()


def table(trials: Sequence[Trial]) -> Table:
    """Return for each kind of fault: trials, failed ones, and percentiles of lost steps and of seconds."""
    columns = "fault", "trials", "failed", "steps lost: 50%", "90%", "most", "seconds: 50%", "90%", "most"
    shown = Table(*columns)
    for name in [*FAULTS, "all"]:
        of_kind = [trial for trial in trials if name in (trial.fault, "all")]
        if of_kind:
            figures = [percentiles([t.lost for t in of_kind], 0), percentiles([t.seconds for t in of_kind], 1)]
            failed = sum(bool(trial.problem) for trial in of_kind)
            shown.add_row(name, str(len(of_kind)), str(failed), *figures[0], *figures[1])
    return shown


def percentiles(values: Sequence[float], digits: int) -> list[str]:
    """Return the median, the 90th percentile and the largest."""
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return [f"{value:.{digits}f}" for value in (tenths[4], tenths[8], max(values))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials that are left and print a table; -> 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults with this word in their name")
    parser.add_argument("--out", type=Path, default=Path("runs/kill_trials"))
    options = parser.parse_args(argv)
    if not possible(options.only):
        parser.error(f"--only={options.only} is in no name of a fault that this machine can have: {', '.join(FAULTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file, console = options.out / "trials.jsonl", Console(highlight=False, soft_wrap=True)
    (options.out / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    done = [Trial(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    number = done[-1].run + 1 if done else 0
    with ExitStack() as stack:
        if disturbed_run.has_network():
            stack.enter_context(disturbed_run.network())
        while len(done) < options.trials:
            counts = {name: sum(one.fault == name for one in done) for name in possible(options.only)}
            rng, left = random.Random(f"{options.seed} {number}"), options.trials - len(done)
            found = trials_of(number, left, counts, options.out.absolute(), rng)
            done, number = done + found, number + 1
            with file.open("a") as lines:
                lines.writelines(json.dumps(one._asdict()) + "\n" for one in found)
    console.print(table(done), width=120)
    failed = sum(bool(one.problem) for one in done)
    console.print(
        f"{len(done) - failed} of {len(done)} faults: the run continues, and ends with the losses of one without"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
