"""Resume from a checkpoint: choose it, hold it against the request, restore the state, and report what changed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
from pydantic import ValidationError

from nanotrain_jax.config import Config, Optimizer
from nanotrain_jax.runtime import compatibility, data, optim, restore
from nanotrain_jax.runtime.compatibility import Meta
from nanotrain_jax.step.build import State, Step


class Resumed(NamedTuple):
    """What a run takes over from a checkpoint."""

    state: State
    position: int  # sequences of this run's length that were consumed
    tokens: int  # that were seen
    notes: list[str]  # for people
    start: tuple[Path, int]  # folder and step of the checkpoint
    meta: Meta
    damaged: dict[int, str]  # newer checkpoints that are not used, and why


def resume(folder: Path, asked: Config, config: Config, dataset: data.Dataset, step: Step) -> Resumed:
    """Restore the newest usable checkpoint of a folder. asked: the config as the user wrote it; config: resolved.

    Where data.seq_len changed, the position is kept in tokens. Raises ValueError if no checkpoint can be read, or if
    the newest one is of another model.
    """

    def read(number: int) -> tuple[Meta, State]:
        meta = restore.read_meta(folder, number)
        compatibility.check(meta, asked, config, dataset.tokenizer)
        return meta, _read_state(folder, number, meta, config, step)

    number, (meta, state), damaged = restore.newest(folder, config.checkpoint.verify, read)
    notes = [f"warning: checkpoint {bad} in {folder} is not used: {problem}" for bad, problem in damaged.items()]
    resumed = f"resumed from step {number} in {folder}"
    if meta.data.fingerprint != dataset.fingerprint or meta.seq_len != config.data.seq_len:
        resumed += "; the training data are not those of the checkpoint: sequences may repeat"
    notes.append(resumed)
    changed = ", ".join(compatibility.changes(meta, config))
    if changed:
        notes.append(f"changed since the checkpoint: {changed}")
    notes += _learning_rate_jump(meta, config, number, number - int(state.skipped))
    position = meta.data.position * meta.seq_len // config.data.seq_len
    return Resumed(step.in_stage_order(state), position, meta.tokens_seen, notes, (folder, number), meta, damaged)


def _read_state(folder: Path, number: int, meta: Meta, config: Config, step: Step) -> State:
    """The state of a checkpoint, with the loss scale that precision.loss_scale asks for.

    A dynamic scale keeps its value; any other begins as in a new run.
    """
    scales = config.precision.loss_scale, meta.config["precision"].get("loss_scale")
    if scales == ("dynamic", "dynamic"):
        return restore.read_state(folder, number, step.state, step.plan.model.is_padded)
    state = restore.read_state(folder, number, step.state._replace(scale=None), step.plan.model.is_padded)
    shardings = jax.tree.map(lambda x: x.sharding, step.state.scale)
    return state._replace(scale=jax.jit(lambda: optim.loss_scale(config.precision), out_shardings=shardings)())


def _learning_rate_jump(meta: Meta, config: Config, number: int, update: int) -> list[str]:
    """A line if the next step's learning rate is not what the checkpoint's schedule would give.

    update: steps that changed the weights so far, which is what the schedule counts.
    """
    before = _optimizer_of(meta)
    if before is None:
        return []
    old, new = (float(optim.schedule(optimizer)(update)) for optimizer in (before, config.optimizer))
    if math.isclose(old, new, rel_tol=1e-5):
        return []
    why = ""
    if before.decay_steps != config.optimizer.decay_steps:
        why = f" (its decay ends at step {config.optimizer.decay_steps}, not {before.decay_steps})"
    return [f"the learning rate of step {number + 1} jumps from {old:.3g} to {new:.3g}{why}"]


def _optimizer_of(meta: Meta) -> Optimizer | None:
    """The optimizer section of a checkpoint's config; None if this version does not know its values."""
    known: dict[str, Any] = {
        key: value for key, value in meta.config["optimizer"].items() if key in Optimizer.model_fields
    }
    try:
        return Optimizer.model_validate(known)
    except ValidationError:
        return None
