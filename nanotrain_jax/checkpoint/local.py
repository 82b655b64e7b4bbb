"""Write local copies of checkpoints (checkpoint.local_dir): each process its part of the state, to a disk of its host.

Between shared checkpoints they cost no shared file system, and a run whose processes fail resumes from them
(local_read.py). <local_dir>/<process>/<run>/<step>/ holds each distinct shard on the devices of a process once, as the
bytes of a tensor of a safetensors file; its name says what it is. Checksums beside it are written last: a copy is
complete with them. The copy before stays until all processes have completed the next.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nanotrain_jax.checkpoint import checksums, directory, durable, lock, safetensors
from nanotrain_jax.config.run_sections import Checkpoint
from nanotrain_jax.distributed.processes import all_gather_text, of_first, on_all_processes

KEY = "checkpoint.local_dir"
RUN = ".run"  # in checkpoint.dir: which local copies are of this run; in a new folder a new one
META = "meta.json"
Save = Callable[[int, Any, dict[str, Any]], None]  # see `writing`


def of_process(local_dir: str | Path) -> Path:
    """Return the folder of this process: several may be on one host."""
    return Path(local_dir) / str(jax.process_index())


def others(local_dir: str | Path) -> list[Path]:
    """Return the folders of other processes, of this host or of an earlier start."""
    return sorted(path for path in Path(local_dir).glob("[0-9]*") if path != of_process(local_dir))


def run_of(config: Checkpoint) -> str:
    """Return what names the local copies of the run in checkpoint.dir, on all processes; "": it has none yet."""
    path = Path(config.dir) / RUN
    is_there = jax.process_index() == 0 and path.is_file()
    return of_first(on_all_processes(lambda: path.read_text() if is_there else ""))


def complete(folder: Path, run: str) -> list[int]:
    """Return the steps of the complete copies of a run in the folder of a process."""
    steps = (int(path.name) for path in (folder / run).glob("[0-9]*") if path.name.isdecimal())
    return sorted(step for step in steps if checksums.recorded(folder / run / directory.SUMS / str(step)))


def piece(path: str, x: Any, index: tuple[slice, ...]) -> str:
    """Return the name of a shard. x: the whole array, or its shape and dtype; index: as of its sharding."""
    ranges = (part.indices(size) for part, size in zip(index, x.shape, strict=True))
    return f"{path} {x.dtype} {list(x.shape)} {','.join(f'{start}:{stop}' for start, stop, _ in ranges)}"


@contextmanager
def ready(config: Checkpoint, number: int) -> Iterator[None]:
    """Hold the folder of this process, which exists, for a run that starts at step `number`; name the run.

    Removes all other copies from it, and from those that no process uses any more: of other runs, and of other steps.
    All processes call it, with checkpoint.dir locked; without checkpoint.local_dir it does nothing. Raises OSError, on
    all processes, if another run uses the folder.
    """
    if config.local_dir is None:
        yield
        return
    if not run_of(config) and jax.process_index() == 0:
        durable.write(Path(config.dir) / RUN, uuid.uuid4().hex.encode())
    run, own = run_of(config), of_process(config.local_dir)
    with ExitStack() as stack:
        on_all_processes(lambda: stack.enter_context(lock.held(KEY, own, lock.patience())))
        _remove(own, run, number)
        _remove_unused(config.local_dir, run, number)
        yield


def forget(config: Checkpoint) -> None:
    """Remove the copies of all processes: the run goes back to before them."""
    if config.local_dir is not None:
        on_all_processes(lambda: _remove(of_process(config.local_dir), "", None))
        _remove_unused(config.local_dir, "", None)


def _remove_unused(local_dir: str, run: str, keep: int | None) -> None:
    """Remove copies, as `_remove` does, from the folders that no process uses any more."""
    for folder in others(local_dir):
        with suppress(OSError), lock.held(KEY, folder):  # else in use
            _remove(folder, run, keep)


def _remove(folder: Path, run: str, keep: int | None) -> None:
    """Remove the copies in the folder of a process, except that of a step of a run."""
    for other in folder.glob("*"):
        if re.fullmatch(r"[0-9a-f]{32}", other.name) and other.name != run:
            shutil.rmtree(other, ignore_errors=True)
    root = folder / run
    for path in [*(root / directory.SUMS).glob("*"), *root.glob("[0-9]*")] if run else []:
        if path.name != str(keep):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(config: Checkpoint, number: int, warn: Callable[[str], None]) -> Iterator[Save | None]:
    """Yield save(step, state, meta), which all processes call; None without checkpoint.local_dir.

    number: the last step so far, whose copy stays until the next is complete. save returns once the state is copied, so
    that it may be donated, and writes in the background; leaving the context waits for the last write. A copy that a
    process cannot write is left out, with warn(text) on all processes, and the run continues.
    """
    if config.local_dir is None:
        yield None
        return
    with ThreadPoolExecutor(1) as background:
        writer = _Writer(config, number, background, warn)
        yield writer.save
        writer.wait()


class _Writer:
    """Writes the copies of this process in the background, one at a time. See `writing`."""

    def __init__(self, config: Checkpoint, number: int, background: ThreadPoolExecutor, warn: Callable[[str], None]):
        self.config, self.background, self.warn = config, background, warn
        self.step = self.last = number  # the newest copy; the newest that is complete
        self.folder, self.run = of_process(config.local_dir), run_of(config)
        # A host that was lost may come back with a copy of the same step of another start.
        self.start = of_first(uuid.uuid4().hex)
        self.written: Future[None] | None = None

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Copy this process's part of the state and start writing it."""
        self.wait()
        self.step, shards = step, distinct_shards(state)
        description = {"start": self.start, "arrays": directory.shapes(state), "meta": meta}
        content = json.dumps(description).encode()
        if not self._succeeds(lambda: self._make_room(sum(x.nbytes for x in shards.values()))):
            return
        for x in shards.values():
            x.copy_to_host_async()
        copied = {name: as_bytes(np.array(shards.pop(name))) for name in [*shards]}
        self.written = self.background.submit(self._write, step, copied, content)
        if not self.config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until all processes have written their newest copy."""
        written, self.written = self.written, None
        if written and self._succeeds(written.result):
            self.last = self.step

    def _succeeds(self, work: Callable[[], None]) -> bool:
        """Call work() on all processes; if it fails on one warn and return False on all."""
        problem = ""
        try:
            work()
        except OSError as error:
            problem = str(error.strerror or error) or repr(error)
        problem = next(filter(None, all_gather_text(problem)), "")
        if problem:
            where = f"{KEY}={self.config.local_dir}"
            self.warn(f"warning: no local copy of step {self.step} ({where}): {problem}; the run continues without it")
        return not problem

    def _make_room(self, need: int) -> None:
        """Remove all copies but the last complete one and check the free disk space. Raises OSError."""
        _remove(self.folder, self.run, self.last)
        need, free = need + (1 << 20), shutil.disk_usage(self.folder).free
        if free < need:
            raise OSError(errno.ENOSPC, f"it needs {need:,} bytes and {free:,} are free")

    def _write(self, step: int, shards: dict[str, np.ndarray], content: bytes) -> None:
        root = self.folder / self.run
        (root / str(step)).mkdir(parents=True)
        shapes = {name: x.shape for name, x in shards.items()}
        safetensors.write(root / str(step), shapes, np.dtype(np.uint8), shards.pop)
        durable.write(root / str(step) / META, content)
        checksums.record(root, [str(step)], root / directory.SUMS / str(step))


def distinct_shards(state: Any) -> dict[str, jax.Array]:
    """Return the shards of a state on the devices of this process, each once, by name."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        for shard in x.addressable_shards:
            found.setdefault(piece(directory.path_name(path), x, shard.index), shard.data)
    return found


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, uint8 [n]."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
