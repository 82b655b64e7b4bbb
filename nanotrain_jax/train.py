"""`python -m nanotrain_jax.train --config FILE [section.key=value ...]`: the training command.

Exit codes: 0 done, or stopped by SIGTERM or Ctrl-C after a clean save; 2 the request is wrong (one line on stderr);
3 where it has waited in vain, for itself or another process; 1 anything else.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax import loading

    loading.announce(sys.argv[1:])

import argparse
import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from nanotrain_jax import capacity, processes, resume
from nanotrain_jax import mesh as meshes
from nanotrain_jax.config import Config
from nanotrain_jax.loop import Run, new_folder, train
from nanotrain_jax.nvme import checkpointing
from nanotrain_jax.nvme import store as stores
from nanotrain_jax.processes import together
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import checkpoint, data, request, restore, watchdog
from nanotrain_jax.step import build as steps


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments, train, and turn what is wrong with the request into one line and exit code 2."""
    parser = request.Parser(
        prog="python -m nanotrain_jax.train",
        description="Train a transformer.",
        epilog="keys (override as section.key=value):\n\n" + request.describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override keys of the file")
    arguments = parser.parse_intermixed_args(argv)
    with stop_signals() as stopped:
        try:
            run = prepare(request.load(arguments.config, arguments.overrides))
        except (ValueError, OSError) as error:
            return refuse(error)
        try:
            folder = together(lambda: new_folder("logging.dir", run.config.logging.dir))
            with checkpoint.alone("logging.dir", folder), files_of(run) as files:
                train(run, folder, files, stopped)
        except OSError as error:  # a full disk, say; the newest finished checkpoint stays usable
            return refuse(error)
    return 0


def refuse(error: Exception) -> int:
    """Tell what is wrong in one line on stderr; -> exit code 2. Raises it again if it may be gone at the next try."""
    if processes.may_pass(error):
        raise error
    return request.refuse(error)


@contextmanager
def stop_signals() -> Iterator[Callable[[int], bool]]:
    """Within, the first SIGTERM or Ctrl-C only makes the yielded function return True; the second acts as usual, unless
    there is a launcher, which sees to it.

    It is asked before each step, which it is given; where there are several processes it returns True on all of them
    before the same step, whichever got the signal.
    """
    received = []

    def handle(number, frame):
        received.append(number)
        if processes.launcher() is None:
            signal.signal(number, before[number])

    def stopped(step: int) -> bool:
        if jax.process_count() == 1:
            return bool(received)
        if received:  # JAX, which takes SIGTERM over once processes have met, tells all of them
            received.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        return multihost_utils.reached_preemption_sync_point(step)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(config: Config) -> Run:
    """Check everything that can be wrong with the request before a byte is written, and restore or make the state.

    Raises ValueError or OSError.
    """
    runtime = config.runtime
    here = processes.here({f"runtime.{k}": getattr(runtime, k) for k in ("coordinator", "processes", "process")})
    gpus = [] if runtime.simulate else processes.my_gpus(here)
    processes.initialize(here, gpus, runtime.join_timeout)
    asked = config
    config, mesh, dataset, step = together(lambda: build(asked, here.count))
    folder = restore.agree(config.checkpoint)
    notes = []
    if here.count > 1:
        hosts = processes.everyone(socket.gethostname())
        notes.append(f"{here.count} processes on {len(set(hosts))} hosts (as {here.source} says)")
        notes += [f"warning: {text}" for text in [meshes.straddles(mesh, hosts)] if text]
    if folder is None:
        return Run(config, mesh, dataset, step, step.init(), 0, notes, None, None, {}, 0)
    found = resume.resume(folder, asked, config, dataset, step)
    notes += found.notes
    origin = found.start, found.meta, found.damaged
    return Run(config, mesh, dataset, step, found.state, found.position, notes, *origin, found.tokens)


def build(config: Config, count: int) -> tuple[Config, Mesh, data.Dataset, steps.Step]:
    """-> resolved config, mesh, data, step. count: processes."""
    runtime = config.runtime
    if runtime.simulate % count:
        raise ValueError(
            f"runtime.simulate={runtime.simulate} devices cannot be divided among {count} processes; use a multiple"
        )
    # XLA:CPU, of a program with loops that it read from a cache, runs collectives side by side, and aborts.
    keeps = runtime.compile_cache and not runtime.simulate
    cache = str(Path.home() / ".cache" / "nanotrain_jax") if keeps else None
    meshes.configure(runtime.simulate // count, runtime.deterministic, cache)
    mesh = meshes.make(**config.parallel.axes)
    if jax.process_index() == 0:
        print(f"reading data from {config.data.source} ...", flush=True)
    dataset = data.load(config.data, config.model.vocab_size)
    config = resolve(config, mesh.shape, dataset.vocab_size)
    capacity.check(config, mesh)
    step = steps.build(config, mesh)
    if config.memory.offload_optimizer == "nvme":
        checkpointing.store(config, step)  # which says what is wrong with its folder
    return config, mesh, dataset, step


@contextmanager
def files_of(run: Run) -> Iterator[stores.Store | None]:
    """The files of its optimizer state, of this run alone, where it rests in files. Raises OSError."""
    if run.config.memory.offload_optimizer != "nvme":
        yield None
        return
    folder = new_folder("memory.nvme_dir", run.config.memory.nvme_dir)
    with checkpoint.alone("memory.nvme_dir", folder), stores.opened(checkpointing.store(run.config, run.step)) as files:
        yield files


if __name__ == "__main__":
    for library in "absl", "asyncio":  # orbax logs pages of what it raises as well
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        code = main()
    except Exception as error:
        traceback.print_exc()
        code = watchdog.HUNG if processes.is_gone(error) else 1
    processes.leave(code)
