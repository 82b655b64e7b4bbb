"""`python -m nanotrain_jax.train --config FILE [section.key=value ...]`: the training loop.

Exit codes: 0 done, or stopped by SIGTERM or Ctrl-C after a clean save; 2 the request is wrong (one line on stderr);
3 where it has waited in vain, for itself or another process; 1 anything else.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import jax
import yaml
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from nanotrain_jax import capacity, model, processes, stored, words
from nanotrain_jax import mesh as meshes
from nanotrain_jax import step as steps
from nanotrain_jax.audit import cost, hardware, hlo, memory
from nanotrain_jax.config import Config
from nanotrain_jax.processes import together
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import checkpoint, data, metrics, nvme, request, watchdog


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
    meta: dict | None  # its own
    damaged: dict[int, str]  # newer checkpoints that are not used, and why


def prepare(config: Config) -> Run:
    """Check everything that can be wrong with the request before a byte is written, and restore or make the state.

    Raises ValueError or OSError.
    """
    runtime = config.runtime
    here = processes.here({f"runtime.{k}": getattr(runtime, k) for k in ("coordinator", "processes", "process")})
    gpus = [] if runtime.simulate else processes.my_gpus(here)
    processes.initialize(here, gpus, runtime.join_timeout)
    config, mesh, dataset, step = together(lambda: build(config, here.count))
    folder = checkpoint.agree(config.checkpoint)
    notes = []
    if here.count > 1:
        hosts = processes.everyone(socket.gethostname())
        notes.append(f"{here.count} processes on {len(set(hosts))} hosts (as {here.source} says)")
        notes += [f"warning: {text}" for text in [meshes.straddles(mesh, hosts)] if text]
    if folder is None:
        return Run(config, mesh, dataset, step, step.init(), 0, notes, None, None, {})
    number, damaged = checkpoint.choose(folder, config.checkpoint.verify)
    notes += [f"warning: checkpoint {n} in {folder} is not used: {what}" for n, what in damaged.items()]
    accept = lambda meta: checkpoint.check(meta, config, dataset.tokenizer)
    state, meta = checkpoint.read(folder, number, step.state, accept, model.is_padded)
    resumed = f"resumed from step {number} in {folder}"
    if meta["data"]["fingerprint"] != dataset.fingerprint:
        resumed += "; the training data are not those of the checkpoint: sequences may repeat"
    state, position = step.in_stage_order(state), meta["data"]["position"]
    return Run(config, mesh, dataset, step, state, position, [*notes, resumed], (folder, number), meta, damaged)


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
    dataset = data.load(config.data, config.model.vocab_size)
    config = resolve(config, mesh.shape, dataset.vocab_size)
    capacity.check(config, mesh)
    step = steps.build(config, mesh)
    if step.pieces:
        stored.store(config, step)  # which says what is wrong with its folder
    return config, mesh, dataset, step


def new_folder(key: str, path: str) -> Path:
    """Make a folder if it is not there, and see that it can be written to. Raises OSError that names the key."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise OSError(f"{key}={path!r} cannot be written to ({error.strerror}); choose another folder") from None


@contextmanager
def files_of(run: Run) -> Iterator[nvme.Store | None]:
    """The files of its optimizer state, of this run alone, where it rests in files. Raises OSError."""
    if not run.step.pieces:
        yield None
        return
    folder = new_folder("memory.nvme_dir", run.config.memory.nvme_dir)
    with checkpoint.alone("memory.nvme_dir", folder), nvme.opened(stored.store(run.config, run.step)) as files:
        yield files


def train(run: Run, folder: Path, files: nvme.Store | None, stopped: Callable[[int], bool]) -> None:
    """Train until the last step or until stopped(step); then save, and say what there is in config.logging.dir, folder.

    files: those of memory.nvme_dir, if it is used. Raises OSError (a full disk).
    """
    config, step, state = run.config, run.step, run.state
    first, last, every = int(state.step), config.train.steps, config.checkpoint.every
    together(lambda: make_ready(run, folder))
    evaluating = config.train.eval_every and len(run.dataset.val)

    def evaluate() -> float:
        sums = []
        for batch in data.evaluation(run.dataset.val, step.batch, config.train.eval_steps):
            watch.at("evaluation", number)
            sums.append(step.evaluate(state.params, batch))
        return sum(float(loss) for loss, _ in sums) / sum(int(count) for _, count in sums)

    def save(number: int) -> None:
        watch.at("checkpoint", number)
        position = run.position + (number - first) * config.data.batch_size
        meta = {
            "config": config.to_dict(),
            "tokenizer": run.dataset.tokenizer,
            "data": {"position": position, "fingerprint": run.dataset.fingerprint},
            "nvme": files and files.seal(),
        }
        apart = (stored.arrays(files, step, config), files.nbytes) if files else ()
        write(number, step.in_layer_order(state), meta, *apart)

    def new_writer() -> metrics.Writer:
        devices = run.mesh.devices
        peak = hardware.peak_flops(devices.flat[0].device_kind)
        flops = cost.flops_per_token(config.model, config.data.seq_len)["full"]
        flops *= config.data.batch_size * config.data.seq_len
        return metrics.Writer(config, first, flops, peak and peak * devices.size)

    number = saved = first
    begin_profile, end_profile = config.runtime.profile_steps or (0, -1)
    profiling = False
    own = checkpoint.alone("checkpoint.dir", config.checkpoint.dir) if every else nullcontext()
    with own, closing(new_writer()) as writer, watching(run, writer) as watch:
        if run.damaged and run.start[0] == Path(config.checkpoint.dir):
            checkpoint.set_aside(config.checkpoint.dir, run.damaged)
        writer.say(words.introduction(config, run.mesh, run.dataset, run.notes))
        started = time.perf_counter()
        train_step = step.train.lower(step.state, step.batch).compile()
        writer.say(f"compiled in {time.perf_counter() - started:.1f} s")
        check_offload(run, hlo.memory(train_step)["host_bytes"])
        if files:
            train_step = stored.train(files, step, train_step)
            how = stored.fill(files, step, config, run.start, run.meta and run.meta.get("nvme"))
            writer.say(f"master weights and moments: {files.nbytes / 1e9:.3g} GB in {files.folder}, {how}")
        batches = data.batches(run.dataset.train, step.batch, config.data.seed, run.position)
        with checkpoint.writing(config.checkpoint) if every else nullcontext() as write:
            writer.start_clock()
            while number < last and not stopped(number):
                number += 1
                if begin_profile <= number <= end_profile and not profiling:
                    jax.profiler.start_trace(folder / "profile")
                    profiling = True
                watch.at("data", number)
                batch = next(batches)
                watch.at("dispatch", number)
                state, values = train_step(state, batch)
                watch.at("step", number)
                writer.step(number, values)
                if files:
                    writer.settle()  # the updates have waited for the device anyway
                if profiling and number in (end_profile, last):
                    writer.settle()
                    jax.profiler.stop_trace()
                    profiling = False
                if evaluating and (number % config.train.eval_every == 0 or number == last):
                    writer.settle()
                    writer.write(evaluate())
                    writer.start_clock()
                if every and number % every == 0:
                    writer.settle()
                    save(number)
                    saved = number
                    writer.start_clock()
            if every and number > saved:
                writer.settle()
                save(number)
            watch.at("end", number)
        writer.finish()
        writer.say(words.summary(config, run.dataset, writer.last, number))


def make_ready(run: Run, folder: Path) -> None:
    """Make the folders of a run. Raises OSError."""
    if run.config.checkpoint.every:
        new_folder("checkpoint.dir", run.config.checkpoint.dir)
    if jax.process_index() == 0:
        (folder / "config.yaml").write_text(yaml.safe_dump(run.config.to_dict(), sort_keys=False))


def watching(run: Run, writer: metrics.Writer) -> AbstractContextManager[watchdog.Watch]:
    """The watchdog of this process."""
    folder = Path(run.config.logging.dir) / metrics.PROCESSES
    place = watchdog.Place(folder, jax.process_index(), jax.process_count(), processes.launcher())
    return watchdog.watching(place, run.config.runtime.hang_timeout, writer.say, writer.log)


def check_offload(run: Run, host_bytes: int) -> None:
    """Raise RuntimeError if the compiled step keeps nothing on the host, though it was asked to and could."""
    if memory.on_host(run.config) and not host_bytes and run.mesh.devices.flat[0].platform != "cpu":
        raise RuntimeError(
            "memory.offload_*=host, but the compiled step needs no host memory: XLA left everything on the device; "
            f"please report it, with jax {jax.__version__} and the config"
        )


if __name__ == "__main__":
    for library in "absl", "asyncio":  # orbax logs pages of what it raises as well
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        code = main()
    except Exception as error:
        traceback.print_exc()
        code = watchdog.HUNG if processes.is_gone(error) else 1
    processes.leave(code)
