"""Which checkpoints a run may start from, by checkpoint.resume and checkpoint.step: the same on all processes."""

from __future__ import annotations

import time
from pathlib import Path

from nanotrain_jax.checkpoint import checksums, directory
from nanotrain_jax.config.run_sections import Checkpoint
from nanotrain_jax.config.values import HUGGING_FACE, WEIGHTS
from nanotrain_jax.distributed.processes import all_gather_text, on_all_processes, raise_on_all

CANDIDATES = 50  # newest checkpoints to try


def agree(config: Checkpoint) -> Path | None:
    """Return the result of `find`, once all processes see the same newest checkpoint.

    Raises ValueError if they do not within `checksums.LAG` seconds.
    """
    for second in range(checksums.LAG + 1):
        folder = on_all_processes(lambda: find(config))
        newest_seen = all_gather_text(f"step {directory.latest_step(folder)} in {folder}" if folder else "none")
        if len(set(newest_seen)) == 1:
            return folder
        time.sleep(second < checksums.LAG)
    other = next(i for i, text in enumerate(newest_seen) if text != newest_seen[0])
    raise_on_all(
        f"the newest checkpoint that process 0 sees is {newest_seen[0]}, and process {other} {newest_seen[other]}; "
        "choose a logging.dir on a file system that all hosts share"
    )


def find(config: Checkpoint) -> Path | None:
    """Return the checkpoint folder to resume from (checkpoint.resume); None: start at step 0, perhaps from hf:FOLDER.

    The run's own checkpoints take precedence, so that a run started from a path restarts with the same command.
    Raises ValueError if a given path has no checkpoints, or none of checkpoint.step, or if this run would mix with
    another.
    """
    own = directory.latest_step(config.dir)
    if own is not None:
        if config.resume == "never":
            raise ValueError(
                f"checkpoint.dir={config.dir!r} already holds step {own}, which checkpoint.resume=never would mix with "
                "another run; use checkpoint.resume=auto to resume, or another checkpoint.dir (or logging.dir)"
            )
        return Path(config.dir)
    if config.resume in ("auto", "never") or config.resume.startswith(HUGGING_FACE):
        return None
    folder = directory.of_run(config.resume.removeprefix(WEIGHTS))
    steps = directory.finished(folder)
    if not steps:
        raise ValueError(
            f"checkpoint.resume={config.resume!r} holds no finished checkpoint; give another folder, auto or never"
        )
    if config.step not in (None, *steps):
        raise ValueError(
            f"checkpoint.step={config.step} is not in checkpoint.resume={config.resume!r}; it holds "
            f"{', '.join(map(str, steps))}"
        )
    return folder


def takes_weights_alone(config: Checkpoint, folder: Path) -> bool:
    """True if the run starts at step 0 with the weights of the checkpoints in a folder that `find` returned."""
    return config.resume.startswith(WEIGHTS) and folder != Path(config.dir)


def candidates(folder: Path, config: Checkpoint) -> list[int]:
    """Return the steps that a run may start from, of the folder that `find` returned, newest first."""
    is_given = config.step is not None and folder != Path(config.dir)
    return [config.step] if is_given else directory.finished(folder)[:CANDIDATES]
