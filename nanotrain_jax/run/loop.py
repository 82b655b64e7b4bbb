"""The training loop: compile the step, then repeat data -> step -> metrics, with evaluations and checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import yaml
from jax.sharding import Mesh

from nanotrain_jax.audit import hlo
from nanotrain_jax.checkpoint import compatibility, directory, durable, lock
from nanotrain_jax.checkpoint import write as checkpoint
from nanotrain_jax.checkpoint.compatibility import Base
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span, of_run
from nanotrain_jax.costs import flops, hardware
from nanotrain_jax.data import batches as data
from nanotrain_jax.data.mixture import Mixture
from nanotrain_jax.distributed import ranks, watchdog
from nanotrain_jax.distributed.processes import on_all_processes
from nanotrain_jax.evaluation.in_training import Tasks
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.run import banner, conversion, curves, divergence, metrics, model_config, profile_summary, reference
from nanotrain_jax.run.adapter_export import Adapters
from nanotrain_jax.run.phases import Phase, begin, describe, is_over
from nanotrain_jax.run.profiling import Profile
from nanotrain_jax.step import build as steps
from nanotrain_jax.step.state import adapters_alone

MODEL = "hf"  # in the folder of a run: its weights as a model folder


class Run(NamedTuple):
    """A validated run, ready to start or to go on."""

    requested: Config  # before `resolve`
    phases: list[Phase]  # of stages of training: the current one, and later ones
    mesh: Mesh
    state: steps.State
    position: int  # sequences of the data consumed so far
    notes: list[str]  # lines for the banner: processes, warnings, what is resumed
    start: tuple[Path, int] | None  # folder and step of the checkpoint resumed from
    meta: compatibility.Meta | None  # metadata of that checkpoint
    damaged: dict[int, str]  # step of each newer, damaged checkpoint -> what is wrong with it
    tokens: int  # consumed so far
    read: Mapping[str, int] = MappingProxyType({})  # sequences consumed of data that stages read before, by fingerprint
    tasks: Tasks | None = None  # with train.tasks
    base: Base | None = None  # of adapters, with train.lora

    @property
    def span(self) -> Span:
        """The steps of the current phase."""
        return self.phases[0].span

    @property
    def config(self) -> Config:
        """The resolved config of the current stage."""
        return self.phases[0].config

    @property
    def dataset(self) -> data.Dataset:
        """The data of the current stage."""
        return self.phases[0].dataset

    @property
    def step(self) -> steps.Step:
        """The step of the current phase."""
        return self.phases[0].step

    @property
    def evaluation(self) -> steps.Step:
        """The step whose `evaluate` all phases of a stage use: the last one's, so that losses can be compared."""
        return next(phase.step for phase in reversed(self.phases) if phase.span.name == self.span.name)


def train(run: Run, folder: Path, files: Store | None, stopped: Callable[[int], bool]) -> None:
    """Train until the last step or until stopped(step), save, and print a summary.

    A run that already took its last step only prints the summary. folder: config.logging.dir. files: the NVMe files,
    with memory.offload_optimizer=nvme. Raises OSError (e.g. a full disk), or Diverged.
    """
    config = run.config
    on_all_processes(lambda: make_ready(run, folder))
    locked = lock.alone("checkpoint.dir", config.checkpoint.dir) if config.checkpoint.every else nullcontext()
    with locked, closing(on_all_processes(lambda: new_writer(run))) as writer, watching(run, writer) as watch:
        if run.damaged and run.start[0] == Path(config.checkpoint.dir):
            directory.set_aside(config.checkpoint.dir, run.damaged)
        writer.say(banner.introduction(config, run.mesh, run.dataset, run.notes))
        if writer.active and int(run.state.step) == config.train.steps:
            writer.latest |= curves.last(folder / "metrics.jsonl", config.train.steps)
        first = int(run.state.step)
        try:
            run = run_phases(run, partial(Loop, folder=folder, files=files, writer=writer, watch=watch), stopped)
        except divergence.Diverged:
            writer.write(is_last=True)
            writer.finish(banner.title(config, run.mesh))
            raise
        number = int(run.state.step)
        watch.at("end", number)
        is_new = number > first or not (folder / MODEL).exists()
        if config.train.save_hf and number == config.train.steps and is_new:
            writer.say(on_all_processes(lambda: save_model(folder, config, number)))
        bigram = None
        if "val_loss" in writer.latest:  # computed on all processes, so that none waits for another at the end
            most = config.train.eval_steps * config.data.batch_size
            bigram = data.bigram_loss(run.dataset, most, config.data.attend_across_documents)
        writer.finish(banner.title(config, run.mesh), bigram)
        prompt = ""
        with suppress(ValueError, OSError):  # the files of the tokenizer may be gone; the run is complete
            prompt = data.first_words(run.dataset, run.config.data)
        writer.say(banner.summary(config, writer.latest, bigram, number, prompt))


def run_phases(run: Run, make_loop: Callable[[Run], Loop], stopped: Callable[[int], bool]) -> Run:
    """Run the steps of each phase that is left, until stopped; -> the run as it ends."""
    while True:
        if not is_over(run.phases[0], int(run.state.step), run.state):
            loop = make_loop(run)
            loop.run_steps(stopped)
            run = loop.after()
        number = int(run.state.step)
        if len(run.phases) == 1 or not is_over(run.phases[0], number, run.state) or stopped(number):
            return run
        run = next_phase(run)


def next_phase(run: Run) -> Run:
    """Return the run at the start of its next phase; a new stage reads on where its data were left."""
    last, phase, *later = run.phases
    phase = phase._replace(span=phase.span._replace(first=int(run.state.step)))
    run = run._replace(phases=[phase, *later], state=begin(phase, last, run.state))
    if phase.span.name == last.span.name:
        return run
    read = {**run.read, last.dataset.fingerprint: run.position}
    return run._replace(position=read.get(phase.dataset.fingerprint, 0), read=read, start=None)


class Loop:
    """The training steps of a phase, with evaluations and checkpoints between them."""

    def __init__(self, run: Run, folder: Path, files: Store | None, writer: metrics.Writer, watch: watchdog.Watchdog):
        self.run, self.folder, self.files, self.writer, self.watch = run, folder, files, writer, watch
        self.phase, self.config, self.state = run.phases[0], run.config, run.state
        self.first = self.number = self.saved = int(run.state.step)
        self.program: Callable[[], str] | None = None  # returns the text of the compiled step
        self.synchronize: Callable[[steps.State], steps.State] | None = None  # compiled; with parallel.sync_every

    def run_steps(self, stopped: Callable[[int], bool]) -> None:
        """Run steps until the phase is over or until stopped(step), and save."""
        self.writer.tokens_per_step = self.phase.batch_size * self.config.data.seq_len
        self.writer.skipped = int(metrics.on_host({"skipped_steps": self.state.skipped})["skipped_steps"])
        self.writer.flops_per_token = flops.flops_per_token(self.config)["full"] if self.config.is_built_in else 0.0
        self.writer.mixed = self.epochs
        for line in [*describe(self.phase, self.number), *self.sources()]:
            self.writer.say(line)
        every, train_step = self.config.checkpoint.every, self.compile()
        with checkpoint.writing(self.config.checkpoint) if every else nullcontext() as write:
            self.take_steps(train_step, stopped, write)
            self.writer.write(is_last=not is_over(self.phase, self.number, self.state))
            if every and self.number > self.saved:
                self.save(write)
            self.watch.at("end", self.number)  # leaving `writing` waits for the last checkpoint

    def after(self) -> Run:
        """Return the run after the last step so far."""
        return self.run._replace(state=self.state, position=self.position, tokens=self.tokens)

    @property
    def sequences(self) -> int:
        """Sequences consumed by this loop so far."""
        return (self.number - self.first) * self.phase.batch_size

    @property
    def position(self) -> int:
        """Sequences of the data consumed so far."""
        return self.position_after(self.number)

    def position_after(self, number: int) -> int:
        """Sequences of the data consumed after step `number` of this phase."""
        return self.run.position + (number - self.first) * self.phase.batch_size

    @property
    def tokens(self) -> int:
        """Tokens consumed so far."""
        return self.run.tokens + self.sequences * self.config.data.seq_len

    def epochs(self, number: int) -> dict[str, float]:
        """Return how often each source of a mixture has been read after step `number`, by name."""
        train = self.run.dataset.train
        return train.epochs(self.position_after(number)) if isinstance(train, Mixture) else {}

    def sources(self) -> list[str]:
        """Return a line for each source of a mixture."""
        train, last, times = self.run.dataset.train, self.run.span.last, self.epochs(self.run.span.last)
        return [
            f"  {name:<15} {train.shares[name]:.3%} of tokens; {len(train.rows[name]):,} sequences, read "
            f"{times[name]:.2f} times by step {last}"
            for name in times
        ]

    def take_steps(self, train_step: Callable, stopped: Callable[[int], bool], write: checkpoint.Save | None) -> None:
        """Run steps, evaluate and save until the phase is over or until stopped(step)."""
        run, num_steps, profiled = self.run, self.run.span.last, self.config.runtime.profile_steps
        profiled = profiled and (profiled[0], min(profiled[1], num_steps))
        batches = data.batches(
            run.dataset.train, run.step.batch, self.config.data.seed, run.position, run.step.token_order
        )
        own = str(jax.process_index()) if jax.process_count() > 1 else ""  # processes of a host name theirs alike
        with closing(Profile(profiled, self.folder / "profile" / own, self.writer.say, self.program)) as profile:
            self.writer.start_clock()
            while not is_over(self.phase, self.number, self.state) and not stopped(self.number):
                self.take_step(train_step, batches, profile)
                divergence.check(self.writer, self.config, self.number, self.saved)
                self.between_steps(write)
            self.writer.settle()

    def compile(self) -> Callable:
        """Compile the train step; with NVMe offload also initialize the files of the optimizer state."""
        run, step, files = self.run, self.run.step, self.files
        self.writer.say("compiling the step ...")
        started = time.perf_counter()
        train_step = step.train.lower(step.state, step.batch).compile()
        if step.synchronize:
            self.synchronize = step.synchronize.lower(step.state).compile()
        self.writer.say(f"compiled in {time.perf_counter() - started:.1f} s")
        self.program = train_step.as_text
        check_offload(run, hlo.memory(train_step)["host_bytes"])
        if files:
            train_step = checkpointing.train(files, step, train_step)
            origin = checkpointing.restore(files, step, run.config, run.start, run.meta and run.meta.nvme)
            self.writer.say(f"master weights and moments: {files.nbytes / 1e9:.3g} GB in {files.folder}, {origin}")
        return train_step

    def take_step(self, train_step: Callable, batches: Iterator[Any], profile: Profile) -> None:
        """Dispatch the next step; on return the metrics of the previous step are written (see metrics.py)."""
        self.number += 1
        if profile.begins(self.number):
            self.writer.settle()
        profile.before(self.number)
        with jax.profiler.StepTraceAnnotation(profile_summary.STEP, step_num=self.number):
            self.watch.at("data", self.number)
            with jax.profiler.TraceAnnotation(profile_summary.INPUT):
                batch = next(batches)
            self.watch.at("dispatch", self.number)
            self.state, values, _ = train_step(self.state, batch)
            if self.synchronize and self.number % self.config.parallel.sync_every == 0:
                self.state = self.synchronize(self.state)
            self.watch.at("step", self.number)
            self.writer.step(self.number, values)
            if self.files or profile.ends(self.number):
                self.writer.settle()  # the NVMe update has synchronized with the device already
        profile.after(self.number)

    def between_steps(self, write: checkpoint.Save | None) -> None:
        """Evaluate and save if due; weights of a run that may be diverging do not push out those of before."""
        train, every = self.config.train, self.config.checkpoint.every
        is_due = train.eval_every and (self.number % train.eval_every == 0 or self.number == self.run.span.last)
        if is_due and (self.run.dataset.validation or self.run.tasks):
            self.writer.settle()
            self.writer.write(**self.evaluate(), tasks=self.score_tasks())
            self.writer.start_clock()
        if every and self.number % every == 0:
            self.writer.settle()
            if divergence.skipped_in_a_row(self.writer, self.config) < divergence.SUSPECT:
                self.save(write)
            self.writer.start_clock()

    def evaluate(self) -> dict[str, float]:
        """Return val_loss, the mean per held-out target in nats; of a model that has some also further means, by name.

        Of a named set as val_loss/NAME; val_loss of a mixture is the mean of its sources by their share. {} without
        held-out text.
        """
        params, found = self.run.step.average(self.state.params), {}
        for name, rows, share in self.run.dataset.validation:
            for mean, value in self.means(params, rows).items():
                found |= {f"{mean}/{name}" if name else mean: value}
                found |= {mean: found.get(mean, 0.0) + share * value} if name and share else {}
        return found

    def means(self, params: Any, rows: data.Source) -> dict[str, float]:
        """Return val_loss and further means over some validation rows. params: as `Step.evaluate` takes them."""
        run, step, sums = self.run, self.run.evaluation, []
        for batch in data.evaluation(rows, step.batch, run.config.train.eval_steps, step.token_order):
            self.watch.at("evaluation", self.number)
            sums.append(step.evaluate(params, batch))
            jax.block_until_ready(sums[-2:-1])  # XLA:CPU aborts with too many executions in flight
        loss, targets, *further = jax.tree.map(lambda *of_batches: sum(map(float, of_batches)), *sums)
        named = {"accuracy": further[0]} if further and not isinstance(further[0], dict) else dict(*further)
        return {"val_loss": loss / targets} | {name: total / targets for name, total in named.items()}

    def score_tasks(self) -> dict[str, float]:
        """Return the scores of train.tasks, by name."""
        if self.run.tasks is None:
            return {}
        self.watch.at("tasks", self.number)
        step = self.run.step
        return self.run.tasks.scores(step.average(step.in_layer_order(self.state).params))

    def save(self, write: checkpoint.Save) -> None:
        """Save a checkpoint of the last step. Its metrics are written first: a resume does not repeat the step."""
        run, files, number = self.run, self.files, self.number
        self.writer.write()
        self.watch.at("checkpoint", number)
        meta = {
            "config": run.config.to_dict(),
            "tokenizer": run.dataset.tokenizer,
            "data": {"position": self.position, "fingerprint": run.dataset.fingerprint, "read": dict(run.read)},
            "tokens": self.tokens,
            "batch_size": self.phase.batch_size,
            "nvme": files and files.seal(),
            "base": run.base and run.base.model_dump(),
        }
        apart = (checkpointing.arrays(files, run.step, run.config), files.nbytes) if files else ()
        write(number, adapters_alone(run.step.plan, run.step.in_layer_order(self.state)), meta, *apart)
        self.saved = number


def make_ready(run: Run, folder: Path) -> None:
    """Create the folders of a run; write config.yaml and a copy of the tokenizer. Raises OSError."""
    if run.config.checkpoint.every:
        new_folder("checkpoint.dir", run.config.checkpoint.dir)
    if jax.process_index() == 0:
        config = of_run(run.config, run.requested)
        durable.write(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
        for source in model_folders(run):
            conversion.copy_files(source, folder)
        if config.train.objective:
            reference.keep(run.dataset, folder)
        # The tokenizer makes the folder self-contained.
        for name, text in (data.files_of(run.config.data) if run.dataset.tokenizer else {}).items():
            durable.write(folder / name, text.encode())


def model_folders(run: Run) -> list[Path]:
    """Return the folder whose weights a run starts from, if it has the files of a model folder, which the run keeps."""
    if run.start is None:
        source = model_config.folder_of(run.requested.checkpoint.resume)
    else:
        source = run.start[0].parent if run.meta.weights_only else None
    is_other = source is not None and source.resolve() != Path(run.config.logging.dir).resolve()
    return [source] if is_other else []


def save_model(folder: Path, config: Config, number: int) -> str:
    """Write <folder>/hf from the checkpoint of step `number`, in process 0; -> a line about it. Raises OSError."""
    if jax.process_index() == 0:
        kind = Adapters if config.train.lora else conversion.Export
        conversion.replace(kind(Path(config.checkpoint.dir), number, folder), folder / MODEL)
    what = "adapters, as PEFT reads them" if config.train.lora else "a model folder of Hugging Face"
    return f"wrote {folder / MODEL}: {what}"


def new_folder(key: str, path: str) -> Path:
    """Create a folder if it does not exist and check that it is writable. Raises OSError that names the key."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise OSError(f"{key}={path!r} cannot be written to ({error.strerror}); choose another folder") from None


def new_writer(run: Run) -> metrics.Writer:
    """Return the metrics writer of a run. Raises OSError."""
    config, devices = run.config, run.mesh.devices
    peak = hardware.peak_flops(devices.flat[0].device_kind) if config.is_built_in else None
    return metrics.Writer(of_run(config, run.requested), int(run.state.step), peak and peak * devices.size, run.tokens)


def watching(run: Run, writer: metrics.Writer) -> AbstractContextManager[watchdog.Watchdog]:
    """Return the watchdog of this process, as a context manager."""
    folder = Path(run.config.logging.dir) / metrics.PROCESSES
    place = watchdog.Member(folder, jax.process_index(), jax.process_count(), ranks.launcher_pid())
    return watchdog.watching(place, run.config.runtime.hang_timeout, writer.say, writer.log)


def check_offload(run: Run, host_bytes: int) -> None:
    """Raise RuntimeError if offload is configured but the compiled step uses no host memory (except on CPU devices)."""
    requested = run.config.memory.offload_activations == "host" or any(jax.tree.leaves(run.step.plan.host_memory))
    if requested and not host_bytes and run.mesh.devices.flat[0].platform != "cpu":
        raise RuntimeError(
            "memory.offload_*=host, but the compiled step uses no host memory: XLA left everything on the device; "
            f"please report this, with jax {jax.__version__} and the config"
        )
