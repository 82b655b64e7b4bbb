"""Layout of a checkpoint folder: names, finished checkpoints, damaged ones."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nanotrain_jax.distributed.processes import on_all_processes

# Inside a checkpoint folder, beside <step>/:
APART = "arrays"  # <step>/<path of an array>: arrays written one at a time
SUMS = "checksums"  # <step>/, see checksums.py
DAMAGED = "damaged"  # <step>/<step>, moved here unchanged
CHECKPOINTS = "checkpoints"  # in the folder of a run
FINISHED = "_CHECKPOINT_METADATA"  # a file in each finished checkpoint


def set_aside(folder: str | Path, steps: Iterable[int]) -> None:
    """Move damaged checkpoints to <folder>/damaged. Raises OSError."""
    root = Path(folder).absolute()

    def move() -> None:
        for step in steps:
            damaged = root / DAMAGED / str(step)
            shutil.rmtree(damaged, ignore_errors=True)
            for part in [part for part in (*parts(step), f"{SUMS}/{step}") if (root / part).exists()]:
                (damaged / part).parent.mkdir(parents=True, exist_ok=True)
                (root / part).rename(damaged / part)

    on_all_processes(move if jax.process_index() == 0 else lambda: None)


def os_error_code(error: Exception) -> int | None:
    """Return the errno of an error, or None. tensorstore gives it in the message only."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    return int(match[1]) if match else getattr(error, "errno", None)


def latest_step(folder: str | Path) -> int | None:
    """Return the step of the newest finished checkpoint in a folder, or None."""
    return next(iter(finished(folder)), None)


def finished(folder: str | Path) -> list[int]:
    """Return the steps of the finished checkpoints in a folder, newest first."""
    folder = Path(folder).absolute()
    steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
    return sorted((s for s in steps if (folder / str(s) / FINISHED).exists()), reverse=True)


def of_run(folder: str | Path) -> Path:
    """Return the folder of the checkpoints of a run, which may be given itself."""
    return Path(folder) if latest_step(folder) is not None else Path(folder) / CHECKPOINTS


def parts(step: int) -> tuple[str, str]:
    """Return the subfolders that hold the files of a checkpoint."""
    return str(step), f"{APART}/{step}"


def apart_folder(folder: str | Path, step: int) -> Path:
    """Return the folder of the arrays of a checkpoint that are written one at a time."""
    return Path(folder).absolute() / APART / str(step)


def path_name(path: tuple) -> str:
    """Return the path of a leaf as text, e.g. params/ends/embedding_VD."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return path -> shape of each array of a tree."""
    return {path_name(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
