"""Resume from a checkpoint: choose it, check that it matches the config, restore the state, report what changed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError

from nanotrain_jax.checkpoint import base as bases
from nanotrain_jax.checkpoint import compatibility, conversions, directory, local_read, starting_point
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint.compatibility import Base, Meta
from nanotrain_jax.config.schema import Config, Optimizer
from nanotrain_jax.config.training_stages import rate_of_batch
from nanotrain_jax.config.values import HUGGING_FACE
from nanotrain_jax.costs import counts
from nanotrain_jax.data.batches import Dataset
from nanotrain_jax.data.tokenizer import begin_apart
from nanotrain_jax.data.tokenizer import load as load_tokenizer
from nanotrain_jax.distributed.processes import on_all_processes
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.zero.optimizer_step import merge
from nanotrain_jax.run import adapters, hugging_face, sources
from nanotrain_jax.run.model_config import TOKENIZER, check_model, folder_of
from nanotrain_jax.run.phases import Phase, index_at
from nanotrain_jax.run.sources import Source
from nanotrain_jax.step import compressed
from nanotrain_jax.step import optimizer as optim
from nanotrain_jax.step import state as states
from nanotrain_jax.step.build import State, Step, shardings


class Resumed(NamedTuple):
    """State and position restored from a checkpoint."""

    phases: list[Phase]  # the one that saved it, and later ones
    state: State
    position: int  # sequences consumed, counted in the current data.seq_len
    tokens: int  # consumed so far
    notes: list[str]  # lines for the banner
    start: tuple[Path, int]  # folder and step of the checkpoint
    meta: Meta
    damaged: dict[int, str]  # step of each newer, damaged checkpoint -> what is wrong with it
    saved: int  # step of the newest intact checkpoint, which a local copy is ahead of


def resume(folder: Path, requested: Config, phases: list[Phase]) -> Resumed:
    """Restore the newest valid checkpoint of a folder, or that of checkpoint.step. requested: before `resolve`.

    If data.seq_len changed, the position in tokens is preserved. Raises ValueError if no checkpoint can be read, or if
    the newest one does not match the model.
    """

    def read(number: int) -> tuple[Meta, State]:
        meta = restore.read_meta(folder, number)
        if takes_weights_alone(meta, requested, folder):
            meta = meta.of_weights()
        state = _checked_state(meta, requested, phases, restore.Saved(folder, number, meta.weights_only))
        return _with_base(meta, requested), state

    steps = starting_point.candidates(folder, requested.checkpoint)
    number, (meta, state), damaged = restore.newest(folder, requested.checkpoint.verify, read, steps)
    notes = [f"warning: skipped checkpoint {bad} in {folder}: {problem}" for bad, problem in damaged.items()]
    if meta.weights_only:
        notes.append(f"starts from the weights of step {number} in {folder}")
        return Resumed(phases, state, 0, 0, notes, (folder, number), meta, damaged, 0)
    _check_is_left(phases, number, requested, folder)
    phases = phases[index_at(phases, number, meta.batch_size) :]
    resumed = Resumed(phases, state, 0, meta.tokens_seen, notes, (folder, number), meta, damaged, number)
    return _continued(resumed, f"step {number} in {folder}")


def _check_is_left(phases: list[Phase], number: int, requested: Config, folder: Path) -> None:
    """Raise ValueError if a run would continue another one that is beyond its last step already."""
    last, keys = phases[-1].span.last, requested.checkpoint
    if folder != Path(keys.dir) and number >= last:
        raise ValueError(
            f"checkpoint.resume={keys.resume!r} continues after step {number}, and this run ends at step {last}; use "
            f"checkpoint.resume=weights:{keys.resume} to start at step 0 with its weights, or more steps"
        )


def takes_weights_alone(meta: Meta, requested: Config, folder: Path) -> bool:
    """True if a run starts at step 0 with the weights of a checkpoint: those of weights:PATH, those that have no more,
    and those of a run without train.objective before one with it."""
    keys = requested.checkpoint
    is_first = requested.train.objective and not meta.config["train"].get("objective") and folder != Path(keys.dir)
    return meta.weights_only or bool(is_first) or starting_point.takes_weights_alone(keys, folder)


def resume_local(checkpoints: Path | None, requested: Config, phases: list[Phase]) -> tuple[Resumed | None, list[str]]:
    """Restore the newest local copies (checkpoint.local_dir), and return warnings about others; None: there are none
    that are newer than all checkpoints. requested, phases: as for `resume`.

    checkpoints: the folder of those (`starting_point.agree`). Raises ValueError if they do not match the model.
    """
    keys = requested.checkpoint
    is_own = checkpoints is not None and checkpoints == Path(keys.dir)
    saved = directory.latest_step(checkpoints) if is_own else 0

    def read(copies: local_read.Copies) -> Resumed:
        meta, start = copies.meta(), (Path(keys.dir), copies.step)
        state = _checked_state(meta, requested, phases, copies)
        mine = phases[index_at(phases, copies.step, meta.batch_size) :]
        return Resumed(mine, state, 0, meta.tokens_seen, [], start, _with_base(meta, requested), {}, saved)

    resumed, warnings = local_read.newest(keys, saved, read)
    if resumed is None:
        return None, warnings
    return _continued(resumed, f"step {resumed.start[1]} of local copies in {keys.local_dir}"), warnings


def _checked_state(
    meta: Meta, requested: Config, phases: list[Phase], saved: restore.Saved | local_read.Copies
) -> State:
    """Restore the state of a checkpoint that matches the model. Raises ValueError if it does not."""
    saved_by = phases[0 if meta.weights_only else index_at(phases, saved.step, meta.batch_size)]
    compatibility.check(meta, requested, saved_by.config, saved_by.dataset.tokenizer)
    read_it = _read_weights if meta.weights_only else partial(_read_state, meta, saved_by.config)
    state = read_it(saved, saved_by.step)
    return adapters.with_base(saved_by.step, state, base_of(meta.base, requested)) if meta.base else state


def _continued(resumed: Resumed, where: str) -> Resumed:
    """Return what is restored with its position in the data, and lines that say from where, and what changed."""
    meta, (_, number) = resumed.meta, resumed.start
    _, config, dataset, step = resumed.phases[0]
    summary = f"resumed from {where}"
    if meta.data.fingerprint != dataset.fingerprint or meta.seq_len != config.data.seq_len:
        summary += "; the training data differ from the checkpoint's: sequences may repeat or be left out"
    notes = [*resumed.notes, summary]
    changed = ", ".join(compatibility.changes(meta, config))
    if changed:
        notes.append(f"changed since the checkpoint: {changed}")
    updates = min(int(np.min(shard.data)) for shard in optim.num_updates(resumed.state).addressable_shards)
    notes += _learning_rate_jump(meta, step.plan.config, number, updates)
    return resumed._replace(position=meta.data.position * meta.seq_len // config.data.seq_len, notes=notes)


def base_of(base: Base, requested: Config) -> Source:
    """Open the base of adapters, where checkpoint.resume=hf:FOLDER says or else where it was. Raises ValueError or
    OSError, on all processes."""
    folder = folder_of(requested.checkpoint.resume)
    return on_all_processes(lambda: sources.of_base(base, folder))


def _with_base(meta: Meta, requested: Config) -> Meta:
    """Return what of a checkpoint holds from now on: the base of adapters is where `base_of` opened it."""
    folder = folder_of(requested.checkpoint.resume)
    is_moved = folder and meta.base and meta.base.step is None
    return meta.model_copy(update={"base": bases.moved(meta.base, folder)}) if is_moved else meta


def start_from(path: Path, phases: list[Phase]) -> tuple[State, list[str]]:
    """Return the state before the first step with the weights of a model folder, and lines for the banner.

    Raises ValueError or OSError, on all processes.
    """
    _, config, dataset, step = phases[0]
    source = on_all_processes(lambda: _matching(path, config, dataset))
    weights = sources.on_mesh(source, states.weights_like(step.plan), step.plan.layer_order)
    state = _started(step, weights)
    return state, [f"starts from the weights of {path}: {source.kind}, {source.dtype}"]


def adapt(base: Base, phases: list[Phase]) -> tuple[State, list[str]]:
    """Return the state before the first step of new adapters, and lines for the banner.

    Raises ValueError or OSError, on all processes.
    """
    _, config, dataset, step = phases[0]
    source = on_all_processes(lambda: _base_for(base, config, dataset))
    trained = counts.all_parameters(config) - counts.frozen_parameters(config)
    lora, dtype = config.train.lora, source.dtype
    note = f"trains {trained:,} parameters of adapters (rank {lora.rank}) on the frozen weights of {base.name}, {dtype}"
    return adapters.started(step, source), [note]


def _base_for(base: Base, config: Config, dataset: Dataset) -> Source:
    """Open a base that a run can adapt. Raises ValueError or OSError."""
    folder = Path(base.folder)
    if base.step is None:
        return _matching(folder, config, dataset)
    source = sources.Checkpoint(folder, base.step)
    check_model(config.model.model_dump(), source.model, folder)
    theirs = source.meta.tokenizer
    if None not in (dataset.tokenizer, theirs) and dataset.tokenizer != theirs:
        begin = begin_apart(dataset.tokenizer, theirs)
        raise ValueError(
            f"the data's tokenizer is {dataset.tokenizer}, but {base.name} was trained with {theirs}; use that one"
            + (f" (data.begin_token: {begin})" if begin else "")
        )
    return source


def _matching(path: Path, config: Config, dataset: Dataset) -> hugging_face.Folder:
    """Open a model folder that a run can start from. Raises ValueError or OSError."""
    if config.vision:
        raise ValueError(
            f"vision with checkpoint.resume={HUGGING_FACE}{path}: such a folder has no encoder; leave one of them out"
        )
    source = hugging_face.opened(path)
    check_model(config.model.model_dump(), source.model, path)
    file = path / TOKENIZER
    keys, is_known = config.data, dataset.tokenizer and file.is_file()
    theirs = load_tokenizer(str(file), keys.end_token, keys.begin_token).name if is_known else None
    if is_known and theirs != dataset.tokenizer:
        begin = begin_apart(theirs, dataset.tokenizer)
        remedy = f"set data.begin_token: {begin}, or prepare the data again" if begin else f"use data.tokenizer={file}"
        raise ValueError(f"the data's tokenizer is {dataset.tokenizer}, but the model's is {file} ({theirs}); {remedy}")
    if config.memory.offload_optimizer == "nvme":
        raise ValueError(
            f"memory.offload_optimizer=nvme with checkpoint.resume={HUGGING_FACE}{path}: the files are made of a "
            f"checkpoint; convert the folder first (python -m nanotrain_jax.convert --from {path} --out RUN)"
        )
    return source


def _read_weights(saved: restore.Saved, step: Step) -> State:
    """Return the state before the first step with the weights of a checkpoint; of adapters without their base."""
    like = states.adapters_alone(step.plan, step.state._replace(params=states.weights_like(step.plan)))
    wanted = State(*[None] * len(State._fields))._replace(params=like.params)
    _, in_stage_order = states.orders(step.plan, wanted)
    weights = in_stage_order(saved.state(wanted, step.plan.is_padded))
    return _started(step, weights.params)


def _started(step: Step, weights: Tree) -> State:
    """Return the state before the first step with given weights, which it donates; of adapters without their base."""
    plan = step.plan

    def start(weights: Tree) -> State:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), states.weights_like(plan))
        state = states.from_weights(plan, merge(weights, zeros))
        return states.adapters_alone(plan, states.without_nvme_state(plan, state))

    places = shardings(states.adapters_alone(plan, step.state))
    return jax.jit(start, out_shardings=places, donate_argnums=0)(weights)


def _read_state(meta: Meta, config: Config, source: restore.Saved | local_read.Copies, step: Step) -> State:
    """Restore the state, with the loss scale of precision.loss_scale and the feedback of parallel.compress.

    A dynamic scale keeps its value; otherwise the scale is initialized as in a new run.
    """
    saved = step.saved
    if saved.feedback:
        stored = source.shapes()
        is_same = conversions.were_apart(stored) == bool(saved.outer)  # else residuals are of gradients, not of weights
        saved = saved._replace(feedback=compressed.to_read(saved.feedback, stored if is_same else {}))
    scales = config.precision.loss_scale, meta.config["precision"].get("loss_scale")
    if scales != ("dynamic", "dynamic"):
        saved = saved._replace(scale=None)
    state = source.state(saved, step.plan.is_padded)
    if step.saved.feedback:
        adopt = partial(compressed.adopted, step.plan)
        adopt = jax.jit(adopt, out_shardings=shardings(step.saved.feedback), donate_argnums=0)
        state = state._replace(feedback=adopt(state.feedback))
    if saved.scale is None:
        first_scale = partial(_first_scale, config, step.state.scale)
        state = state._replace(scale=jax.jit(first_scale, out_shardings=shardings(step.state.scale))())
    return step.in_stage_order(state)


def _first_scale(config: Config, like: optim.LossScale | None) -> optim.LossScale | None:
    """Return the loss scale of a new run, in the shapes of `like`: of each replica, if they step apart."""
    return jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), optim.loss_scale(config.precision), like)


def _learning_rate_jump(meta: Meta, config: Config, number: int, update: int) -> list[str]:
    """Return a line if the learning rate of the next step differs from the checkpoint's schedule.

    update: number of updates applied so far (`optimizer.num_updates`).
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
    """Return the optimizer section with which a checkpoint's last step ran; None if this version does not support its
    values."""
    known: dict[str, Any] = {
        key: value for key, value in meta.config["optimizer"].items() if key in Optimizer.model_fields
    }
    try:
        optimizer = Optimizer.model_validate(known)
    except ValidationError:
        return None
    whole = meta.config["data"]["batch_size"]
    rate = rate_of_batch(optimizer, (meta.batch_size or whole) / whole)
    return optimizer.model_copy(update={"lr": optimizer.lr * rate, "min_lr": optimizer.min_lr * rate})
