"""The training command: `python -m nanotrain_jax.train --config FILE [section.key=value ...]`

Exit codes: 0 done, or stopped by SIGTERM, SIGUSR1, SIGHUP or Ctrl-C after saving a checkpoint; 2 invalid request (one
line on stderr); 3 no failure of this process alone: a hang timeout, another process is lost, processes do not meet, or
a disk or network fails for all; 4 stopped on purpose (one line on stderr): the run diverged, or hardware computes
wrong; 130 Ctrl-C before the run began; 1 any other failure.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import time

    from nanotrain_jax.run import shell

    BEGAN = time.monotonic()  # imports count as time of the run
    shell.begin(finishes=True)
    shell.announce(sys.argv[1:])

import argparse
import errno
import hashlib
import logging
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from nanotrain_jax.checkpoint import compatibility, lock
from nanotrain_jax.config import training_stages
from nanotrain_jax.config.load import Parser, at_least, describe, refuse
from nanotrain_jax.config.mixture import Part
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span, of_phase, spans
from nanotrain_jax.data import batches
from nanotrain_jax.distributed import processes, ranks, stop_signals, watchdog
from nanotrain_jax.distributed.exit_codes import ENDED
from nanotrain_jax.distributed.phase_clock import PhaseClock
from nanotrain_jax.distributed.processes import on_all_processes, raise_on_all
from nanotrain_jax.evaluation.in_training import Tasks
from nanotrain_jax.models import hugging_face
from nanotrain_jax.nvme import checkpointing, folders
from nanotrain_jax.nvme import store as stores
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner import auto
from nanotrain_jax.run import capacity, length, model_config, shell, show_data, sinks
from nanotrain_jax.run.divergence import Diverged
from nanotrain_jax.run.folders import new_folder
from nanotrain_jax.run.metrics import PROCESSES
from nanotrain_jax.run.origin import Plan, Run, opened
from nanotrain_jax.run.phases import Phase
from nanotrain_jax.run.training import train
from nanotrain_jax.run.verification import Corrupted
from nanotrain_jax.step import build as steps

Datasets = dict[str | tuple[Part, ...], batches.Dataset]  # those loaded so far, by data.source


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """Parse arguments and train; an invalid request gives one line on stderr and exit code 2.

    began: of the process, by time.monotonic(); None: now.
    """
    clock = PhaseClock(began)
    parser = Parser(
        prog="python -m nanotrain_jax.train",
        description="Train a transformer with data, tensor, context and pipeline parallelism, ZeRO and offloading.",
        epilog="config keys, with defaults (override as section.key=value):\n\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML config file, or the name of an example: quickstart"
    )
    parser.add_argument(
        "--show-data", type=at_least(1), metavar="N", help="print the first N training rows and what of them is learned"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a key of the config")
    arguments = parser.parse_intermixed_args(argv)
    with stop_signals.until_stopped() as stopped, ExitStack() as stack:
        try:
            config = model_config.load(arguments.config, arguments.overrides)
            if arguments.show_data:
                return show_data.show(config, arguments.show_data, Console(highlight=False, soft_wrap=True))
            run = prepare(config, stack.enter_context(watched(config, clock)))
        except (ValueError, OSError) as error:
            return refuse_unless_transient(error)
        try:
            folder = on_all_processes(lambda: new_folder("logging.dir", run.config.logging.dir))
            with lock.alone("logging.dir", folder), files_of(run) as files:
                train(run, folder, files, stopped)
        except OSError as error:  # e.g. a full disk; the newest finished checkpoint stays usable
            return refuse_unless_transient(with_remedy(error, config.logging.dir))
        except (Diverged, Corrupted) as error:
            refuse(error)
            return ENDED
    return 0


def with_remedy(error: OSError, folder: str) -> OSError:
    """Return an error with the remedy if a disk is full: that of a write names neither file nor folder."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    reason = f"a disk that the run writes to is full, that of logging.dir={folder} or another"
    return OSError(f"{reason} ({os.strerror(error.errno)}); free space and start again: the run resumes")


def refuse_unless_transient(error: Exception) -> int:
    """Print an error in one line on stderr; -> exit code 2. Re-raises a transient error, so that a launcher retries."""
    if processes.is_transient(error):
        raise error
    return refuse(error)


def process_of(config: Config) -> ranks.Process:
    """Return the rank of this process. Raises ValueError."""
    return ranks.detect({f"runtime.{k}": getattr(config.runtime, k) for k in ("coordinator", "processes", "process")})


def watched(config: Config, clock: PhaseClock) -> AbstractContextManager[watchdog.Watchdog]:
    """Return the watchdog of this process, as a context manager: until a run has logs it reports on stderr."""
    process, folder = process_of(config), Path(config.logging.dir) / PROCESSES
    member = watchdog.Member(folder, process.index or 0, process.count, ranks.launcher_pid())
    return watchdog.watching(member, config.runtime.hang_timeout, print, shell.stderr(), clock)


def prepare(config: Config, watch: watchdog.Watchdog | None = None) -> Run:
    """Check the request before anything is written, then restore or initialize the state.

    watch: of this process, which learns the phase. Raises ValueError or OSError.
    """
    runtime, process = config.runtime, process_of(config)
    gpus = [] if runtime.simulate else ranks.local_gpus(process)
    at = watch.at if watch else unwatched
    at("join", 0)
    absent = None
    if watch:
        watch.join_timeout = runtime.join_timeout
        absent = partial(watchdog.absent, watch.member, watch.interval)
    processes.initialize(process, gpus, runtime.join_timeout, absent)
    at("start", 0)
    notes = on_all_processes(lambda: configure(config, process.count))
    requested, of_layout = auto.with_layout(config)
    notes += of_layout
    done = length.progress(requested)
    mesh, phases = on_all_processes(lambda: build(requested, done))
    tasks = on_all_processes(lambda: tasks_of(phases[0], mesh))
    check_same_data(phases)
    at("restore", 0)
    if process.count > 1:
        hosts = processes.all_gather_text(socket.gethostname())
        notes.append(f"{process.count} processes on {len(set(hosts))} hosts (from {process.source})")
        notes += [f"warning: {text}" for text in [meshes.cross_host_warning(mesh, hosts)] if text]
    run = opened(Plan(requested, phases, mesh, tasks))
    return run._replace(notes=notes + run.notes, watch=watch)


def unwatched(phase: str, number: int) -> None:
    """Stand in for `Watchdog.at`."""


def tasks_of(phase: Phase, mesh: Mesh) -> Tasks | None:
    """Return the tasks that a run scores; None without train.tasks. Raises ValueError or OSError."""
    config = phase.config
    if not config.train.tasks:
        return None
    return Tasks(config, mesh, batches.tokenizer_of(config.data) if phase.dataset.tokenizer else None)


def configure(config: Config, count: int) -> list[str]:
    """Configure JAX; -> notes. count: number of processes, which must divide runtime.simulate. Raises ValueError."""
    runtime = config.runtime
    if runtime.simulate % count:
        raise ValueError(f"runtime.simulate={runtime.simulate} is not divisible by {count} processes; use a multiple")
    # XLA:CPU aborts on cached programs with loops: it runs their collectives concurrently.
    use_cache = runtime.compile_cache and not runtime.simulate
    cache = str(Path.home() / ".cache" / "nanotrain_jax") if use_cache else None
    return meshes.configure(runtime.simulate // count, runtime.deterministic, cache)


def build(config: Config, done: length.Progress) -> tuple[Mesh, list[Phase]]:
    """Build the mesh, and the step of each phase of each stage of training. done: so far, of a run that resumes."""
    mesh = meshes.make(**config.parallel.axes)
    if jax.process_index() == 0:
        sinks.check(config)
    datasets: Datasets = {}
    if length.is_by_data(config):
        config = config.replace("train", steps=length.steps(config, dataset_of(config, datasets), done))
    phases = []
    for span in spans(config):
        phases += build_stage(training_stages.of_span(config, span), span, mesh, datasets)
    check_data(phases)
    return mesh, phases


def check_same_data(phases: list[Phase]) -> None:
    """Raise OSError on all processes unless all of them read the same data."""
    own = hashlib.sha256(
        repr([(phase.dataset.fingerprint, phase.dataset.of_further) for phase in phases]).encode()
    ).hexdigest()
    first, *others = processes.all_gather_text(own)
    rank = next((rank for rank, other in enumerate(others, 1) if other != first), None)
    if rank:
        source = phases[0].config.data.origin
        raise_on_all(f"process {rank} reads other data than process 0 from {source}; give all hosts the same files")


def check_data(phases: list[Phase]) -> None:
    """Raise ValueError unless the data of all stages have the same tokenizer, and vocabularies of the same size."""
    first = phases[0]
    for phase in phases:
        if phase.dataset.tokenizer != first.dataset.tokenizer:
            raise ValueError(
                f"train.stages: the tokenizer of {phase.config.data.origin} is {phase.dataset.tokenizer}, that of "
                f"{first.config.data.origin} is {first.dataset.tokenizer}; use data with the same tokenizer"
            )
        sizes = phase.config.model.vocab_size, first.config.model.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"train.stages: the vocabulary of {phase.config.data.origin} has {sizes[0]} ids, that of "
                f"{first.config.data.origin} has {sizes[1]}; set model.vocab_size={max(sizes)}"
            )


def dataset_of(config: Config, datasets: Datasets) -> batches.Dataset:
    """Return the data of a stage. datasets: those loaded so far, by source. Raises ValueError or OSError."""
    source = config.data.source
    if source not in datasets:
        if jax.process_index() == 0:
            print(f"reading data from {config.data.origin} ...", flush=True)
        datasets[source] = batches.load(config.data, config.model.vocab_size)
    return datasets[source]


def build_stage(config: Config, span: Span, mesh: Mesh, datasets: Datasets) -> list[Phase]:
    """Build the step of each phase of a stage, and load its data. datasets: those loaded so far, by source."""
    source, dataset = config.data.origin, dataset_of(config, datasets)
    config = resolve(config, mesh.shape, dataset.vocab_size)
    capacity.check(config, mesh)
    if config.train.save_hf:
        hugging_face.kind_of(config.model)  # refuses what no folder can hold
    parts = training_stages.phases(config, span)
    phases = [Phase(part, config, dataset, steps.build(of_phase(config, part), mesh)) for part in parts]
    step = phases[-1].step
    batches.check(dataset, step.batch, source)
    if config.vision:
        batches.check_places(dataset, config.vision.max_tokens, source)
    if config.memory.offload_optimizer == "nvme":
        checkpointing.store(config, step)  # validates memory.nvme_dir
    return phases


@contextmanager
def files_of(run: Run) -> Iterator[stores.Store | None]:
    """Yield the NVMe files of the optimizer state, locked by this run; None without NVMe offload. Raises OSError."""
    if run.config.memory.offload_optimizer != "nvme":
        yield None
        return
    nvme_dir, model = run.config.memory.nvme_dir, compatibility.of_weights(run.config)
    on_all_processes(lambda: new_folder(folders.KEY, folders.of_process(nvme_dir)))
    with folders.locked(nvme_dir, model):
        store = on_all_processes(lambda: checkpointing.store(run.config, run.step))
        with stores.opened(store) as files:
            yield files


if __name__ == "__main__":
    for library in "absl", "asyncio":  # orbax also logs every exception it raises
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        code = shell.run(partial(main, began=BEGAN))
    except Exception as error:
        traceback.print_exc()
        code = processes.exit_code(error)
    processes.exit_process(code)
