"""A run from its start to its end: its phases one after another, with its folder, its logs, and a summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path

from nanotrain_jax.checkpoint import local, lock
from nanotrain_jax.config.training_stages import of_run
from nanotrain_jax.costs import hardware
from nanotrain_jax.data import batches as data
from nanotrain_jax.distributed import watchdog
from nanotrain_jax.distributed.processes import on_all_processes
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.run import banner, curves, divergence, goodput, metrics
from nanotrain_jax.run.folders import MODEL, make_ready, save_model
from nanotrain_jax.run.loop import Loop
from nanotrain_jax.run.origin import Run, set_aside_damaged
from nanotrain_jax.run.phases import begin, is_over
from nanotrain_jax.run.rollback import Losses
from nanotrain_jax.run.verification import Corrupted, Verification


def train(run: Run, folder: Path, files: Store | None, stopped: Callable[[int], bool]) -> None:
    """Train until the last step or until stopped(step), save, and print a summary.

    A run that already took its last step only prints the summary. folder: config.logging.dir. files: the NVMe files,
    with memory.offload_optimizer=nvme. Raises OSError (e.g. a full disk), Diverged or Corrupted.
    """
    config = run.config
    on_all_processes(lambda: make_ready(run, folder))
    locked = lock.alone("checkpoint.dir", config.checkpoint.dir) if config.checkpoint.is_on else nullcontext()
    with (
        locked,
        local.ready(config.checkpoint, int(run.state.step)),
        closing(on_all_processes(lambda: new_writer(run))) as writer,
        watchdog.reporting(run.watch, writer.say, writer.log) as watch,
    ):
        watch.at("start", int(run.state.step))
        set_aside_damaged(run)
        notes = [*banner.of_later_data(run.phases), *run.notes]
        writer.say(banner.introduction(config, run.mesh, run.dataset, notes))
        if writer.active and int(run.state.step) == config.train.steps:
            writer.latest |= curves.last(folder / "metrics.jsonl", config.train.steps)
        first = int(run.state.step)
        verification = Verification(config.runtime, run.meta.mismatches if run.meta else 0)
        writer.mismatches = verification.count
        rooms = {"files": files, "writer": writer, "watch": watch, "verification": verification}
        try:
            run = run_phases(run, partial(Loop, **rooms), stopped)
        except (divergence.Diverged, Corrupted):
            writer.write(is_last=True)
            writer.finish(banner.title(config, run.mesh))
            raise
        number = int(run.state.step)
        watch.at("end", number)
        is_new = number > first or not (folder / MODEL).exists()
        if config.train.save_hf and number == config.train.steps and is_new:
            writer.say(on_all_processes(lambda: save_model(folder, config, number, run.base)))
        bigram = None
        if "val_loss" in writer.latest:  # computed on all processes, so that none waits for another at the end
            most = config.train.eval_steps * config.data.batch_size
            bigram = data.bigram_loss(run.dataset, most, config.data.attend_across_documents)
        writer.finish(banner.title(config, run.mesh), bigram)
        prompt = ""
        with suppress(ValueError, OSError):  # the files of the tokenizer may be gone; the run is complete
            prompt = data.first_words(run.dataset, run.config.data)
        writer.say(banner.summary(config, writer.latest, bigram, number, prompt))
        if writer.active and (text := goodput.summary(goodput.read(folder))):
            writer.say(text)


def run_phases(run: Run, make_loop: Callable[[Run], Loop], stopped: Callable[[int], bool]) -> Run:
    """Run the steps of each phase that is left, until stopped; -> the run as it ends."""
    while True:
        if not is_at_end(run) or run.is_unsaved:
            run = run_phase(run, make_loop, stopped)
        if (len(run.phases) == 1 and is_at_end(run)) or stopped(int(run.state.step)):
            return run
        if is_at_end(run):
            run = next_phase(run)


def run_phase(run: Run, make_loop: Callable[[Run], Loop], stopped: Callable[[int], bool]) -> Run:
    """Run the steps of the current phase, again when it goes back; -> the run after them, or in a phase before."""
    loop = make_loop(run)
    loop.run_steps(stopped)
    run = loop.after()
    while loop.goes_back and run.step is loop.run.step and not is_at_end(run):
        loop.again(run)
        loop.run_steps(stopped)
        run = loop.after()
    return run


def is_at_end(run: Run) -> bool:
    """Return whether the current phase of a run is over."""
    return is_over(run.phases[0], int(run.state.step), run.state)


def next_phase(run: Run) -> Run:
    """Return the run at the start of its next phase; a new stage reads on where its data were left."""
    last, phase, *later = run.phases
    phase = phase._replace(span=phase.span._replace(first=int(run.state.step)))
    run = run._replace(phases=[phase, *later], state=begin(phase, last, run.state))
    if phase.span.name == last.span.name:
        return run
    read = {**run.read, last.dataset.fingerprint: run.position}
    losses = Losses(phase.config.train.rollback, count=run.losses.count)  # those of other data say nothing
    return run._replace(position=read.get(phase.dataset.fingerprint, 0), read=read, start=None, losses=losses)


def new_writer(run: Run) -> metrics.Writer:
    """Return the metrics writer of a run. Raises OSError."""
    config, devices = run.config, run.mesh.devices
    peak = hardware.peak_flops(devices.flat[0].device_kind) if config.is_built_in else None
    peak = peak and peak * devices.size
    writer = metrics.Writer(of_run(config, run.requested), int(run.state.step), peak, run.tokens)
    writer.clock_of_phases = run.watch.clock
    return writer
