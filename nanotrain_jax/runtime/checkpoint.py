"""Checkpoints by orbax: asynchronous, sharded, atomic; the state, the position in the data and the resolved config.

A checkpoint is written under a temporary name and renamed when it is whole, so a run that is killed at any moment
leaves the previous one usable. State that is too large to be in memory at a time (nvme/store.py) is written first,
one array at a time, to a folder beside it; it counts once the checkpoint does, and goes with it. Checksums are made of
its files once it is whole, in the background, and compared before it is used: orbax does not see a flipped bit.

Every process writes and checks its part; folders are of all of them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nanotrain_jax.config import Checkpoint
from nanotrain_jax.processes import PASSING, everyone, together
from nanotrain_jax.runtime import checksums

Save = Callable[..., None]  # see `writing`
# Folders in a folder of checkpoints:
APART = "arrays"  # <step>/<path of an array>
SUMS = "checksums"  # <step>/, see checksums.py
DAMAGED = "damaged"  # <step>/<step>, as it was found

FINISHED = "_CHECKPOINT_METADATA"  # a file that is in each checkpoint
REMOVED = ".removed"
UNFINISHED = r"\d+\.(removed|orbax-checkpoint-tmp.*)"
LONGEST = 4 * 3600  # seconds to write one


@contextmanager
def alone(key: str, folder: str | Path) -> Iterator[None]:
    """Within, no other run writes to this folder, which exists. Raises OSError, naming the key, if one does now, or if
    it is not the same folder for all processes.
    """
    path, index = Path(folder) / f".{key}.lock", jax.process_index()
    mark = everyone(uuid.uuid4().hex)[0]
    with ExitStack() as held:

        def take() -> None:
            lock = held.enter_context(open(path, "a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however that ends
            except BlockingIOError:
                raise OSError(f"{folder} is in use by another run; stop it, or choose another {key}") from None
            except OSError as error:
                text = f"{folder} cannot be locked ({error.strerror}); mount its file system with locks (Lustre: flock)"
                raise OSError(f"{text}, or choose another {key}") from None
            path.write_text(mark)

        def see() -> None:
            until = time.monotonic() + checksums.LAG
            while not (path.exists() and path.read_text() == mark):
                if time.monotonic() > until:
                    text = f"{folder} of process {index} is not that of process 0"
                    raise OSError(f"{text}; choose a {key} on a disk that all hosts share")
                time.sleep(1)

        together(take if index == 0 else lambda: None)
        together(see)
        yield


@contextmanager
def writing(config: Checkpoint) -> Iterator[Save]:
    """Yields save(step, state, meta, apart, apart_bytes); meta: plain JSON data.

    It returns once the state is copied, so that it may be donated, and writes in the background; leaving waits for the
    last one. apart: trees like state, each of one array and None for the rest, which are made, written and dropped one
    after the other before it returns. Raises OSError, here or at the next save, if something cannot be written.
    """
    writer = _Writer(config)
    try:
        yield writer.save
        writer.wait()
    except BaseException:
        if jax.process_count() > 1:
            raise  # what follows would wait for processes that may never come
        writer.close()
        raise
    writer.close()


class _Writer:
    """Writes the checkpoints of a run, one at a time, in the background. See `writing`."""

    def __init__(self, config: Checkpoint):
        self.config = config
        self.root = Path(config.dir).absolute()
        # (orbax's manager, which keeps the newest by itself, waits for all processes before it tells that one failed.)
        options = ocp.options.AsyncOptions(timeout_secs=LONGEST)
        self.files = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        self.background = ThreadPoolExecutor(1)
        self.written: Future[None] = Future()
        self.written.set_result(None)

    def save(
        self, step: int, state: Any, meta: dict[str, Any], apart: Iterable[Any] = (), apart_bytes: int = 0
    ) -> None:
        """Copy the state and begin to write it. Raises OSError if the last one could not be written, or this cannot."""
        self.wait()
        need = (sum(x.nbytes for x in jax.tree.leaves(state)) + apart_bytes) * 11 // 10 + (1 << 20)
        together(lambda: self._make_room(need))
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        for tree in apart:
            with self._disk_errors(), ocp.StandardCheckpointer() as one:
                one.save(apart_folder(self.root, step) / next(iter(shapes(tree))).replace("/", "."), tree)
            del tree  # before the next one is made
        with self._disk_errors():
            self.files.save(self.root / str(step), args=items, force=True)
            if not self.config.asynchronous:
                self.files.wait_until_finished()
        self.written = self.background.submit(self._finish, step)

    def wait(self) -> None:
        """Wait until the last one is written. Raises OSError."""
        with self._disk_errors():
            self.written.result()

    def close(self) -> None:
        """Wait for the background, and remove what is unfinished."""
        self.background.shutdown()
        with suppress(Exception):
            self.files.close()
            if jax.process_index() == 0:
                _remove_leftovers(self.root)

    def _finish(self, step: int) -> None:
        """Once a checkpoint is written: make its checksums, and remove the oldest ones."""
        root = self.root
        self.files.wait_until_finished()
        checksums.record(root, parts(step), root / SUMS / str(step), jax.process_index(), jax.process_count())
        for old in finished(root)[self.config.keep :] if jax.process_index() == 0 else ():
            (root / str(old)).rename(root / f"{old}{REMOVED}")  # what is half removed is no checkpoint
            shutil.rmtree(root / f"{old}{REMOVED}", ignore_errors=True)

    def _make_room(self, need: int) -> None:
        if jax.process_index() == 0:
            _remove_leftovers(self.root)
            free = shutil.disk_usage(self.root).free
            if free < need:
                raise self._full(f"it needs {need:,} bytes and {free:,} are free")

    def _full(self, reason: str) -> OSError:
        newest = latest_step(self.root)
        start = "the beginning" if newest is None else f"step {newest}"
        return OSError(
            f"no checkpoint can be written to {self.config.dir}: {reason}; make room and start again: "
            f"the run goes on from {start}"
        )

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Say what to do about an error of the disk."""
        try:
            yield
        except Exception as error:
            code = os_error_code(error)
            if code is None or code in PASSING:
                raise
            raise self._full(os.strerror(code)) from None


def _remove_leftovers(root: Path) -> None:
    """Remove what is of checkpoints that were removed, or never finished."""
    keep = {str(number) for number in finished(root)}
    unfinished = (path for path in root.glob("*") if re.fullmatch(UNFINISHED, path.name))
    for folder in [*unfinished, *(root / APART).glob("*"), *(root / SUMS).glob("*")]:
        if folder.name not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: str | Path, steps: Iterable[int]) -> None:
    """Move damaged checkpoints out of the way, to <folder>/damaged. Raises OSError."""
    root = Path(folder).absolute()

    def move() -> None:
        for step in steps:
            damaged = root / DAMAGED / str(step)
            shutil.rmtree(damaged, ignore_errors=True)
            for part in [part for part in (*parts(step), f"{SUMS}/{step}") if (root / part).exists()]:
                (damaged / part).parent.mkdir(parents=True, exist_ok=True)
                (root / part).rename(damaged / part)

    together(move if jax.process_index() == 0 else lambda: None)


def os_error_code(error: Exception) -> int | None:
    """The errno of an error, which tensorstore has only in its text; None if it has none."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)


def latest_step(folder: str | Path) -> int | None:
    """The newest finished checkpoint in a folder, or None."""
    return next(iter(finished(folder)), None)


def finished(folder: str | Path) -> list[int]:
    """The finished checkpoints in a folder, newest first."""
    folder = Path(folder).absolute()
    steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
    return sorted((s for s in steps if (folder / str(s) / FINISHED).exists()), reverse=True)


def parts(step: int) -> tuple[str, str]:
    """The folders of a checkpoint's files, below that of all checkpoints."""
    return str(step), f"{APART}/{step}"


def apart_folder(folder: str | Path, step: int) -> Path:
    """Where the arrays of a checkpoint lie that were written one at a time."""
    return Path(folder).absolute() / APART / str(step)


def path_name(path: tuple) -> str:
    """The path of a leaf as text: params/ends/embedding_VD."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each array of a tree."""
    return {path_name(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
