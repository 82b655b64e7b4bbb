"""The training loop: compile, then data -> step -> metrics, with evaluations and checkpoints, until the last step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import yaml
from jax.sharding import Mesh

from nanotrain_jax import processes, words
from nanotrain_jax.audit import cost, hardware, hlo
from nanotrain_jax.config import Config
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.processes import together
from nanotrain_jax.runtime import checkpoint, compatibility, curves, data, metrics, watchdog
from nanotrain_jax.runtime.profiling import Profile, profiling
from nanotrain_jax.step import build as steps


class Run(NamedTuple):
    """A request that was found to be in order, ready to go on from `position` (sequences consumed so far)."""

    config: Config
    mesh: Mesh
    dataset: data.Dataset
    step: steps.Step
    state: steps.State
    position: int
    notes: list[str]  # of how it begins, for people
    start: tuple[Path, int] | None  # folder and step of the checkpoint
    meta: compatibility.Meta | None  # its own
    damaged: dict[int, str]  # newer checkpoints that are not used, and why
    tokens: int  # seen so far


def train(run: Run, folder: Path, files: Store | None, stopped: Callable[[int], bool]) -> None:
    """Train until the last step or until stopped(step); then save, and say what there is in config.logging.dir, folder.

    Of a run that has taken its last step already, only print the summary. files: those of memory.nvme_dir, if it is
    used. Raises OSError (a full disk).
    """
    config, number = run.config, int(run.state.step)
    together(lambda: make_ready(run, folder))
    own = checkpoint.alone("checkpoint.dir", config.checkpoint.dir) if config.checkpoint.every else nullcontext()
    with own, closing(new_writer(run)) as writer, watching(run, writer) as watch:
        if run.damaged and run.start[0] == Path(config.checkpoint.dir):
            checkpoint.set_aside(config.checkpoint.dir, run.damaged)
        writer.say(words.introduction(config, run.mesh, run.dataset, run.notes))
        if number < config.train.steps:
            number = Loop(run, folder, files, writer, watch).run_steps(stopped)
        elif writer.active:
            writer.last |= curves.last(folder / "metrics.jsonl", number)
        watch.at("end", number)
        bigram = None
        if "val_loss" in writer.last:  # on all processes: none is to wait for another at the end
            bigram = data.bigram_loss(run.dataset, config.train.eval_steps * config.data.batch_size)
        writer.finish(words.title(config, run.mesh), bigram)
        writer.say(words.summary(config, writer.last, bigram, number))


class Loop:
    """The steps of a run, and what comes between them."""

    def __init__(self, run: Run, folder: Path, files: Store | None, writer: metrics.Writer, watch: watchdog.Watch):
        self.run, self.folder, self.files, self.writer, self.watch = run, folder, files, writer, watch
        self.config, self.state = run.config, run.state
        self.first = self.number = self.saved = int(run.state.step)

    def run_steps(self, stopped: Callable[[int], bool]) -> int:
        """Take steps until the last one or until stopped(step), and save; -> the number of the last step taken."""
        every, train_step = self.config.checkpoint.every, self.compile()
        with checkpoint.writing(self.config.checkpoint) if every else nullcontext() as write:
            self.take_steps(train_step, stopped, write)
            if every and self.number > self.saved:
                self.save(write)
            self.watch.at("end", self.number)  # leaving waits for the last checkpoint
        return self.number

    def take_steps(self, train_step: Callable, stopped: Callable[[int], bool], write: checkpoint.Save | None) -> None:
        """Take steps, evaluate and save until the last step or until stopped(step)."""
        run, last, asked = self.run, self.config.train.steps, self.config.runtime.profile_steps
        profiled = asked and (asked[0], min(asked[1], last))
        batches = data.batches(run.dataset.train, run.step.batch, self.config.data.seed, run.position)
        with profiling(profiled, self.folder / "profile", self.writer.say) as profile:
            self.writer.start_clock()
            while self.number < last and not stopped(self.number):
                self.take_step(train_step, batches, profile)
                self.between_steps(write)
            self.writer.settle()

    def compile(self) -> Callable:
        """Compile the train step, and fill the files of the optimizer state, if there are any."""
        run, step, files = self.run, self.run.step, self.files
        self.writer.say("compiling the step ...")
        started = time.perf_counter()
        train_step = step.train.lower(step.state, step.batch).compile()
        self.writer.say(f"compiled in {time.perf_counter() - started:.1f} s")
        check_offload(run, hlo.memory(train_step)["host_bytes"])
        if files:
            train_step = checkpointing.train(files, step, train_step)
            how = checkpointing.fill(files, step, run.config, run.start, run.meta and run.meta.nvme)
            self.writer.say(f"master weights and moments: {files.nbytes / 1e9:.3g} GB in {files.folder}, {how}")
        return train_step

    def take_step(self, train_step: Callable, batches: Iterator[Any], profile: Profile) -> None:
        """Dispatch the next step; the metrics of the one before are there when this returns (see metrics.py)."""
        self.number += 1
        profile.before(self.number)
        self.watch.at("data", self.number)
        batch = next(batches)
        self.watch.at("dispatch", self.number)
        self.state, values, _ = train_step(self.state, batch)
        self.watch.at("step", self.number)
        self.writer.step(self.number, values)
        if self.files or profile.ends(self.number):
            self.writer.settle()  # with files the updates have waited for the device anyway
        profile.after(self.number)

    def between_steps(self, write: checkpoint.Save | None) -> None:
        """Evaluate and save, if it is time to."""
        train, every = self.config.train, self.config.checkpoint.every
        is_due = train.eval_every and (self.number % train.eval_every == 0 or self.number == train.steps)
        if is_due and len(self.run.dataset.val):
            self.writer.settle()
            self.writer.write(self.evaluate())
            self.writer.start_clock()
        if every and self.number % every == 0:
            self.save(write)
            self.writer.start_clock()

    def evaluate(self) -> float:
        """Return the mean loss per held-out token, in nats."""
        run, sums = self.run, []
        for batch in data.evaluation(run.dataset.val, run.step.batch, run.config.train.eval_steps):
            self.watch.at("evaluation", self.number)
            sums.append(run.step.evaluate(self.state.params, batch))
            jax.block_until_ready(sums[-2:-1])  # XLA:CPU aborts where too many are in flight
        return sum(float(loss) for loss, _ in sums) / sum(int(count) for _, count in sums)

    def save(self, write: checkpoint.Save) -> None:
        """Save a checkpoint of the step taken last, whose metrics are written first: a resume does not repeat it."""
        run, files, number = self.run, self.files, self.number
        self.writer.write()
        self.watch.at("checkpoint", number)
        position = run.position + (number - self.first) * run.config.data.batch_size
        meta = {
            "config": run.config.to_dict(),
            "tokenizer": run.dataset.tokenizer,
            "data": {"position": position, "fingerprint": run.dataset.fingerprint},
            "tokens": run.tokens + (number - self.first) * run.config.data.batch_size * run.config.data.seq_len,
            "nvme": files and files.seal(),
        }
        apart = (checkpointing.arrays(files, run.step, run.config), files.nbytes) if files else ()
        write(number, run.step.in_layer_order(self.state), meta, *apart)
        self.saved = number


def make_ready(run: Run, folder: Path) -> None:
    """Make the folders of a run. Raises OSError."""
    if run.config.checkpoint.every:
        new_folder("checkpoint.dir", run.config.checkpoint.dir)
    if jax.process_index() == 0:
        (folder / "config.yaml").write_text(yaml.safe_dump(run.config.to_dict(), sort_keys=False))
        tokenizer = data.tokenizer_file(run.config.data)
        if tokenizer:  # with it the folder is all that `generate` needs
            (folder / data.TOKENIZER).write_bytes(tokenizer.read_bytes())


def new_folder(key: str, path: str) -> Path:
    """Make a folder if it is not there, and see that it can be written to. Raises OSError that names the key."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise OSError(f"{key}={path!r} cannot be written to ({error.strerror}); choose another folder") from None


def new_writer(run: Run) -> metrics.Writer:
    """Make the writer of a run. Raises OSError."""
    config, devices = run.config, run.mesh.devices
    peak = hardware.peak_flops(devices.flat[0].device_kind)
    flops = 0.0
    if config.model.factory:  # whose FLOPs are not known
        peak = None
    else:
        flops = cost.flops_per_token(config.model, config.data.seq_len)["full"]
    flops *= config.data.batch_size * config.data.seq_len
    return metrics.Writer(config, int(run.state.step), flops, peak and peak * devices.size, run.tokens)


def watching(run: Run, writer: metrics.Writer) -> AbstractContextManager[watchdog.Watch]:
    """The watchdog of this process."""
    folder = Path(run.config.logging.dir) / metrics.PROCESSES
    place = watchdog.Place(folder, jax.process_index(), jax.process_count(), processes.launcher())
    return watchdog.watching(place, run.config.runtime.hang_timeout, writer.say, writer.log)


def check_offload(run: Run, host_bytes: int) -> None:
    """Raise RuntimeError if the compiled step keeps nothing on the host, though it was asked to and could."""
    wanted = run.config.memory
    asked = wanted.offload_activations == "host" or any(jax.tree.leaves(run.step.plan.host_memory))
    if asked and not host_bytes and run.mesh.devices.flat[0].platform != "cpu":
        raise RuntimeError(
            "memory.offload_*=host, but the compiled step needs no host memory: XLA left everything on the device; "
            f"please report it, with jax {jax.__version__} and the config"
        )
