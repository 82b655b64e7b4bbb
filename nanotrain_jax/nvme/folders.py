"""The folder of each process for its NVMe files, and what earlier processes left in theirs.

One process has memory.nvme_dir itself, each of several a folder below it with its number: they may be on one host, and
of a disk per host the files are only there. After a restart with other processes some folders are no longer used: what
is in them can be made again of a checkpoint, so they are emptied to make room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import jax

from nanotrain_jax.checkpoint import lock
from nanotrain_jax.distributed.processes import on_all_processes
from nanotrain_jax.nvme import store

KEY = "memory.nvme_dir"


def of_process(nvme_dir: str | Path) -> Path:
    """Return the folder of this process."""
    return Path(nvme_dir) / (str(jax.process_index()) if jax.process_count() > 1 else "")


@contextmanager
def locked(nvme_dir: str | Path, model: dict) -> Iterator[None]:
    """Hold the lock of this process's folder, which exists; remove the files of this model from folders that no process
    uses. model: as `Store` takes it. Raises OSError, on all processes, if another run uses a folder."""
    with ExitStack() as stack:
        # After this all processes of the run have theirs.
        on_all_processes(lambda: stack.enter_context(lock.held(KEY, of_process(nvme_dir))))
        on_all_processes(partial(_empty_unused, Path(nvme_dir), model))
        yield


def others(nvme_dir: str | Path) -> list[Path]:
    """Return the folders with files of other processes, earlier ones or of this host."""
    manifests = [*Path(nvme_dir).glob(store.MANIFEST), *Path(nvme_dir).glob(f"[0-9]*/{store.MANIFEST}")]
    return [path.parent for path in manifests if path.parent != of_process(nvme_dir)]


def _empty_unused(nvme_dir: Path, model: dict) -> None:
    for folder in others(nvme_dir):
        with suppress(OSError), lock.held(KEY, folder):  # in use, or removed by another process at this moment
            manifest = store.read_manifest(folder)
            names = manifest.files if manifest and manifest.model == model else []
            for name in [*names, store.MANIFEST] if names else []:
                (folder / name).unlink(missing_ok=True)
