"""Metrics of steps: records for sinks.py, progress bar or lines, loss.png (drawn by curves.py).

`Writer.step` stores the metrics of a dispatched step and writes those of the previous one, which are ready by then: the
device never waits for the host, and the host is at most one step ahead.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nanotrain_jax.config.schema import Config
from nanotrain_jax.distributed.phase_clock import PhaseClock
from nanotrain_jax.run import curves, goodput, sinks
from nanotrain_jax.step.measures import TRAIN

TASK = "task/"  # before the names of tasks
VAL_OF = "val_loss/"  # before the names of validation sets
EPOCHS = "epochs/"  # before the names of the sources of a mixture
PROCESSES = "processes"  # subfolder of the run's folder: <process>.log


class Writer:
    """Writes metrics to config.logging.dir and the terminal (process 0 only), and to one log per process.

    peak_flops: of all devices, None if unknown (mfu is null); tokens: consumed before first_step. Set tokens_per_step,
    flops_per_token and mixed before the first step of each phase. Raises OSError if the folder cannot be written.
    """

    def __init__(self, config: Config, first_step: int, peak_flops: float | None, tokens: int = 0):
        self.config, self.peak, self.flops_per_token = config, peak_flops, 0.0
        self.tokens_per_step = config.data.batch_size * config.data.seq_len
        self.tokens = self.tokens_written = tokens  # consumed so far; until the last record
        self.pending: tuple[int, dict[str, Any]] | None = None
        self.latest: dict[str, Any] = {}  # newest value of each metric
        self.seconds, self.steps = 0.0, 0
        self.losses: list[float] = []  # of the steps since the last record
        self.skipped = self.in_a_row = 0  # skipped steps: since the start, and until now
        self.taken: tuple[int, float] | None = None  # the last step that was not skipped, and its loss
        self.clock_of_phases, self.first, self.skipped_here = PhaseClock(), first_step, 0  # of this start
        self.rollbacks = self.mismatches = self.undone = 0  # so far; steps of this start that they undid
        self.seen: Callable[[int, float], None] = _unseen  # called with each step and its loss
        self.save_seconds: float | None = None  # for which training waited for the last save, not yet written
        self.verify_seconds = 0.0  # of checks of the hardware since the last record
        self.slow: dict[str, float] = {}  # the slowest device, if a timing since the last record found it slow
        self.mixed: Callable[[int], dict[str, float]] = _nothing  # after step N: how often each source has been read
        self.active = jax.process_index() == 0
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        progress = config.logging.progress
        self.progress = ("bar" if self.console.is_terminal else "lines") if progress == "auto" else progress
        self.bar, self.sinks = None, []
        self.folder = Path(config.logging.dir)
        (self.folder / PROCESSES).mkdir(exist_ok=True)
        log = self.folder / PROCESSES / f"{jax.process_index()}.log"
        self.log = open(log, "a", buffering=1)  # noqa: SIM115 (closed by close)
        if not self.active:
            return
        self.sinks = sinks.opened(config, self.folder, self.say)
        if self.progress == "bar":
            text = TextColumn("{task.fields[text]}")
            columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), text, TimeRemainingColumn()
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("", total=config.train.steps, completed=first_step, text="")
            self.bar.start()

    def say(self, text: str) -> None:
        """Print lines to the terminal and to the log of this process."""
        self._note(text)
        if self.active:
            self.console.print(text)

    def _note(self, text: str) -> None:
        """Append lines with a timestamp to the log of this process."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self.log.write("".join(f"{now} {line}\n" for line in text.splitlines()))

    def start_clock(self) -> None:
        """Start timing the next step here, so that e.g. an evaluation does not count."""
        self.clock = time.perf_counter()

    def step(self, number: int, metrics: dict[str, jax.Array]) -> None:
        """Store the metrics of step `number`, still being computed, and write those of the previous step."""
        self.write()
        self.pending = number, metrics

    def settle(self) -> None:
        """Wait for the pending step, so that later work does not count as its time."""
        if self.pending and isinstance(self.pending[1]["loss"], jax.Array):
            number, metrics = self.pending[0], on_host(self.pending[1])
            self.pending = number, metrics
            self.losses.append(float(metrics["loss"]))
            self.seen(number, self.losses[-1])
            skipped = int(metrics["skipped_steps"])
            self.in_a_row = self.in_a_row + 1 if skipped > self.skipped else 0
            if not self.in_a_row:
                self.taken = number, self.losses[-1]
            self.skipped_here += max(skipped - self.skipped, 0)
            self.skipped = skipped
            now = time.perf_counter()
            self.seconds, self.steps, self.clock = self.seconds + now - self.clock, self.steps + 1, now
            self.tokens += self.tokens_per_step

    def verified(self, seconds: float) -> None:
        """Add the time of a check of the hardware to the next record."""
        self.verify_seconds += seconds

    def undo(self, newest: int, number: int, tokens: int) -> None:
        """Forget the steps after step `number`, up to the newest one. tokens: consumed until step `number`."""
        if self.pending:
            jax.block_until_ready(self.pending[1])
        self.pending, self.losses, self.in_a_row = None, [], 0
        self.seconds, self.steps = 0.0, 0
        self.tokens = self.tokens_written = tokens
        self.undone += newest - number

    def write(
        self, is_last: bool = False, tasks: Mapping[str, float] = MappingProxyType({}), **evaluated: float
    ) -> None:
        """Write the metrics of the pending step, if any, with those of an evaluation: val_loss, accuracy, margin.

        is_last: of a run that stops here, so the step is written whatever train.log_every says. tasks: their scores, by
        name (`task/NAME`).
        """
        if not self.pending:
            return
        self.settle()
        (number, metrics), self.pending = self.pending, None
        every = self.config.train.log_every
        if self.bar:
            self.bar.update(self.task, completed=number)
        is_due = is_last or number == self.config.train.steps or (every and number % every == 0)
        if not evaluated and not tasks and not is_due:
            return
        seconds, losses = self.seconds / self.steps, self.losses
        tokens_per_second = (self.tokens - self.tokens_written) / self.seconds
        self.seconds, self.steps, self.losses, self.tokens_written = 0.0, 0, [], self.tokens
        record = {
            "step": number,
            # the shortest text that parses to the same float32
            **{k: float(str(np.float32(metrics[k]))) for k in ("loss", "grad_norm", "lr")},
            "tokens": self.tokens,
            "tokens_per_second": tokens_per_second,
            "mfu": self.flops_per_token * tokens_per_second / self.peak if self.peak else None,
            "step_seconds": seconds,
            "goodput": self.clock_of_phases.share_of_steps(),
        }
        if self.save_seconds is not None:
            record["save_seconds"], self.save_seconds = self.save_seconds, None
        if self.verify_seconds:
            record["verify_seconds"], self.verify_seconds = self.verify_seconds, 0.0
        record, self.slow = record | self.slow, {}
        if len(losses) > 1:
            record["mean_loss"] = mean(losses)
        if metrics["skipped_steps"]:
            record["skipped_steps"] = int(metrics["skipped_steps"])
        if self.rollbacks:
            record["rollbacks"] = self.rollbacks
        if self.mismatches:
            record["mismatches"] = self.mismatches
        further = [name for name in metrics if name in ("loss_scale", "noise_scale") or name.startswith(TRAIN)]
        record |= {name: float(metrics[name]) for name in further}
        record |= {EPOCHS + name: epochs for name, epochs in self.mixed(number).items()}
        record |= {**evaluated, **tasks}
        self.latest |= record
        self._note("  ".join(f"{key} {value}" for key, value in record.items() if value is not None))
        if self.active:
            self._show(record)

    def _show(self, record: dict[str, Any]) -> None:
        """Write a record to all sinks and the terminal."""
        for sink in self.sinks:
            sink.write(record)
        self.account()
        steps = self.config.train.steps
        text = self._text(record)
        if self.bar:
            self.bar.update(self.task, text=text)
        is_evaluated = any(name == "val_loss" or name.startswith((TASK, VAL_OF)) for name in record)
        if self.progress == "lines" or (self.bar and is_evaluated):
            remaining = clock((steps - record["step"]) * record["step_seconds"])
            self.console.print(
                f"step {record['step']:>{len(str(steps))}}/{steps}  {text}  lr {record['lr']:.2e}  ETA {remaining}"
            )

    def account(self) -> None:
        """Write the time of this start so far, by phase. Raises OSError."""
        steps = {"first": self.first, "step": self.latest["step"]}
        steps |= {"skipped": self.skipped_here, "undone": self.undone}
        goodput.append(self.folder, self.clock_of_phases, steps)

    def _text(self, record: dict[str, Any]) -> str:
        """Format a record for a progress line."""
        text = f"loss {record['loss']:.4f}{_measures(record, TRAIN)}"
        evaluated = self.latest if self.bar else record
        if "val_loss" in evaluated:
            text += f"  val {evaluated['val_loss']:.4f}"
        of_sets = {name.removeprefix(VAL_OF): x for name, x in evaluated.items() if name.startswith(VAL_OF)}
        text += "".join(f"  {name} {x:.4f}" for name, x in of_sets.items())
        text += _measures(evaluated)
        tasks = [name for name in evaluated if name.startswith(TASK) and f"{name}_norm" in evaluated]
        text += "".join(f"  {name.removeprefix(TASK)} {evaluated[name]:.1%}" for name in tasks)
        text += f"  {record['tokens_per_second']:,.0f} tokens/s"
        if record["mfu"]:
            text += f"  mfu {record['mfu']:.1%}"
        if "skipped_steps" in record:
            text += f"  skipped {record['skipped_steps']}"
        return text

    def finish(self, title: str = "", bigram: float | None = None) -> None:
        """Write the pending step and loss.png (see `curves.draw`). A failure to draw is only a warning."""
        self.write()
        if not self.active:
            return
        if self.latest.get("step", self.first) > self.first:  # else this start took no step
            self.account()
        jsonl = self.folder / sinks.JSONL
        try:
            unit = "pair" if self.config.train.objective else "token"
            bad = curves.draw(jsonl, self.folder / "loss.png", title, bigram, unit)
        except Exception as error:  # a library, or a full disk: the run itself is complete
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.say(f"warning: cannot draw loss.png ({text[:200]})")
        else:
            if bad:
                self.say(f"warning: {bad} lines of {jsonl} cannot be read; loss.png omits them")

    def close(self) -> None:
        """Stop the progress bar and close sinks and files; an exception on its way says that the run failed."""
        if self.bar:
            self.bar.stop()
        for sink in self.sinks:
            sink.close(failed=sys.exc_info()[0] is not None)
        with suppress(OSError):
            self.log.close()


def _nothing(number: int) -> dict[str, float]:
    return {}


def _unseen(number: int, loss: float) -> None:
    return None


def _measures(record: Mapping[str, Any], prefix: str = "") -> str:
    """Format what a model measures beside its loss."""
    names = "accuracy", "margin", "load", *["dropped"] * bool(record.get(f"{prefix}dropped"))
    known = {name: record[prefix + name] for name in names if prefix + name in record}
    shares = "accuracy", "dropped"
    return "".join(f"  {name} {x:.1%}" if name in shares else f"  {name} {x:.3f}" for name, x in known.items())


def on_host(metrics: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return metrics as NumPy scalars.

    Of those with one value per replica, [R/replica], over the replicas that this process addresses: the mean, or the
    largest count.
    """
    of_replicas = {name: x for name, x in metrics.items() if x.ndim}
    own = {name: {s.index[0].start: s.data for s in x.addressable_shards} for name, x in of_replicas.items()}
    values = jax.device_get({name: own.get(name, x) for name, x in metrics.items()})
    for name, x in of_replicas.items():
        values[name] = (np.mean if x.dtype == np.float32 else np.max)(list(values[name].values()))
    return values


def mean(losses: list[float]) -> float:
    """Return the mean of the finite losses (a skipped step may have none), or nan if there are none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else math.nan


def clock(seconds: float) -> str:
    """Format a duration as hours:minutes:seconds; hours may exceed 24."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}"
