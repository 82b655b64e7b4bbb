"""Checkpoints by orbax: asynchronous, sharded, atomic; the state, the position in the data and the resolved config.

A checkpoint is written under a temporary name and renamed when it is whole, so a run that is killed at any moment
leaves the previous one usable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from nanotrain_jax.config import Checkpoint, Config


def open(config: Checkpoint, folder: str | Path | None = None) -> ocp.CheckpointManager:
    """The checkpoints in config.dir, or in another folder (to read from). Creates the folder. Close it, or it may lose the last save."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=config.keep,
        enable_async_checkpointing=config.asynchronous,
        cleanup_tmp_directories=folder is None,
        create=folder is None,
    )
    return ocp.CheckpointManager(Path(folder or config.dir).absolute(), options=options)


def save(manager: ocp.CheckpointManager, step: int, state: Any, meta: dict[str, Any]) -> None:
    """Start writing state and meta (plain JSON data); returns once the state is copied, so that it may be donated."""
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
    manager.save(step, args=items, force=True)


def find(config: Checkpoint) -> tuple[Path, int] | None:
    """The folder and step that `resume` asks for; None: begin anew.

    Raises ValueError if there is nothing to resume from where a path was given, or if this run would mix with another's.
    """
    own = latest_step(config.dir)
    if config.resume == "auto":
        return None if own is None else (Path(config.dir), own)
    if own is not None:
        raise ValueError(
            f"checkpoint.dir={config.dir!r} already holds step {own}, which checkpoint.resume={config.resume!r} would "
            "mix with another run; use checkpoint.resume=auto to go on, or another checkpoint.dir (or logging.dir)"
        )
    if config.resume == "never":
        return None
    step = latest_step(config.resume)
    if step is None:
        raise ValueError(f"checkpoint.resume={config.resume!r} holds no finished checkpoint; give a folder that does, auto or never")
    return Path(config.resume), step


def latest_step(folder: str | Path) -> int | None:
    """The newest finished checkpoint in a folder, or None."""
    folder = Path(folder).absolute()
    steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
    return max(steps, default=None)


def read_meta(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """What was saved beside the state."""
    return manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta


def restore(manager: ocp.CheckpointManager, step: int, abstract: Any) -> Any:
    """Read a state into the shapes, dtypes and shardings of abstract (ShapeDtypeStructs; the mesh may be another one)."""
    return manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state


def check(meta: dict[str, Any], config: Config, tokenizer: str | None) -> None:
    """Raise ValueError unless the checkpoint is of this model and tokenizer; both configs resolved."""
    now, then = config.to_dict()["model"], meta["config"]["model"]
    for key in now:
        if key != "attention" and now[key] != then.get(key):
            raise ValueError(
                f"model.{key}={now[key]} but the checkpoint was trained with {then.get(key)}; "
                "resume with the same model, or begin anew in another logging.dir"
            )
    if tokenizer != meta["tokenizer"]:
        raise ValueError(
            f"the data's tokenizer is {tokenizer} but the checkpoint was trained with {meta['tokenizer']}; "
            "resume with the same tokenizer, or begin anew in another logging.dir"
        )
