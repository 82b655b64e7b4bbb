"""Write checkpoints with orbax: asynchronous, sharded, atomic. They hold the state, data position and resolved config.

A checkpoint is written under a temporary name and renamed when complete, so killing a run at any moment leaves the
previous one valid. State too large for memory (nvme/store.py) is written first, one array at a time, to a folder beside
the checkpoint; it is valid only with the checkpoint, and removed with it. Once a checkpoint is complete, checksums of
its files are recorded in the background and verified before loading: orbax does not detect a flipped bit.

Every process writes and checks its share; all processes share the folders.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nanotrain_jax.checkpoint import checksums, directory
from nanotrain_jax.config.schema import Checkpoint
from nanotrain_jax.distributed.processes import TRANSIENT_ERRNOS, on_all_processes

Save = Callable[..., None]  # see `writing`
REMOVED = ".removed"  # suffix of a checkpoint that is being deleted
UNFINISHED = r"\d+\.(removed|orbax-checkpoint-tmp.*)"
WRITE_TIMEOUT = 4 * 3600  # seconds per checkpoint
SLICE = 1 << 20  # bytes, at least, of the slices in which devices that hold the same array share it: each is compiled


@contextmanager
def writing(config: Checkpoint) -> Iterator[Save]:
    """Yield save(step, state, meta, apart, apart_bytes); meta: plain JSON data.

    save returns once the state is copied, so that it may be donated, and writes in the background; leaving the context
    waits for the last write. apart: iterable of trees like state with one array each, the rest None; they are created,
    written and dropped one by one before save returns. Raises OSError, here or at the next save, if a write fails.
    """
    writer = _Writer(config)
    try:
        yield writer.save
        writer.wait()
    except BaseException:
        if jax.process_count() > 1:
            raise  # closing would wait for processes that may be lost
        writer.close()
        raise
    writer.close()


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Return what writes a tree of arrays."""
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SLICE)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _Writer:
    """Writes checkpoints in the background, one at a time. See `writing`."""

    def __init__(self, config: Checkpoint):
        self.config = config
        self.root = Path(config.dir).absolute()
        # Not orbax's CheckpointManager: it waits for all processes before it reports that one failed.
        options = ocp.options.AsyncOptions(timeout_secs=WRITE_TIMEOUT)
        handlers = ocp.CompositeCheckpointHandler(state=_handler(), meta=ocp.JsonCheckpointHandler())
        self.files = ocp.AsyncCheckpointer(handlers, async_options=options)
        self.background = ThreadPoolExecutor(1)
        self.written: Future[None] = Future()
        self.written.set_result(None)

    def save(
        self, step: int, state: Any, meta: dict[str, Any], apart: Iterable[Any] = (), apart_bytes: int = 0
    ) -> None:
        """Copy the state and start writing it. Raises OSError if the previous or this write fails."""
        self.wait()
        need = (sum(x.nbytes for x in jax.tree.leaves(state)) + apart_bytes) * 11 // 10 + (1 << 20)
        on_all_processes(lambda: self._make_room(need))
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta))
        for tree in apart:
            with self._disk_errors(), ocp.Checkpointer(_handler()) as one:
                name = next(iter(directory.shapes(tree))).replace("/", ".")
                one.save(directory.apart_folder(self.root, step) / name, args=ocp.args.PyTreeSave(tree))
            del tree  # free it before the next one is created
        with self._disk_errors():
            self.files.save(self.root / str(step), args=items, force=True)
            if not self.config.asynchronous:
                self.files.wait_until_finished()
        self.written = self.background.submit(self._finish, step)

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises OSError."""
        with self._disk_errors():
            self.written.result()

    def close(self) -> None:
        """Wait for the background thread and remove unfinished checkpoints."""
        self.background.shutdown()
        with suppress(Exception):
            self.files.close()
            if jax.process_index() == 0:
                _remove_leftovers(self.root)

    def _finish(self, step: int) -> None:
        """Wait for a checkpoint, record its checksums and, when all processes have, remove those beyond config.keep."""
        root, sums = self.root, self.root / directory.SUMS / str(step)
        self.files.wait_until_finished()
        checksums.record(root, directory.parts(step), sums, jax.process_index(), jax.process_count())
        checksums.wait_for_all(sums, jax.process_count(), WRITE_TIMEOUT)
        for old in self._superfluous() if jax.process_index() == 0 else ():
            (root / str(old)).rename(root / f"{old}{REMOVED}")  # a partly removed checkpoint must not look valid
            shutil.rmtree(root / f"{old}{REMOVED}", ignore_errors=True)

    def _superfluous(self) -> list[int]:
        """Return the steps of the checkpoints that are not to be kept."""
        for_good = self.config.keep_every
        return [step for step in directory.finished(self.root)[self.config.keep :] if not for_good or step % for_good]

    def _make_room(self, need: int) -> None:
        """Remove leftovers and check the free disk space. Raises OSError."""
        if jax.process_index() == 0:
            _remove_leftovers(self.root)
            free = shutil.disk_usage(self.root).free
            if free < need:
                raise self._full(f"it needs {need:,} bytes and {free:,} are free")

    def _full(self, reason: str) -> OSError:
        """Return the error of a failed write, with the remedy."""
        newest = directory.latest_step(self.root)
        start = "the beginning" if newest is None else f"step {newest}"
        return OSError(
            f"no checkpoint can be written to {self.config.dir}: {reason}; free disk space and start again: "
            f"the run resumes from {start}"
        )

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn disk errors into an OSError with the remedy."""
        try:
            yield
        except Exception as error:
            code = directory.os_error_code(error)
            if code is None or code in TRANSIENT_ERRNOS:
                raise
            raise self._full(os.strerror(code)) from None


def _remove_leftovers(root: Path) -> None:
    """Remove remains of checkpoints that were deleted or never finished."""
    keep = {str(number) for number in directory.finished(root)}
    unfinished = (path for path in root.glob("*") if re.fullmatch(UNFINISHED, path.name))
    for folder in [*unfinished, *(root / directory.APART).glob("*"), *(root / directory.SUMS).glob("*")]:
        if folder.name not in keep:
            shutil.rmtree(folder, ignore_errors=True)
