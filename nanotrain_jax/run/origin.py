"""What a run continues from: its newest checkpoint, or its first state. At its start, and after a rollback."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from jax.sharding import Mesh

from nanotrain_jax.checkpoint import compatibility, directory, local, starting_point
from nanotrain_jax.checkpoint.compatibility import Base
from nanotrain_jax.checkpoint.read import Saved
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span
from nanotrain_jax.data import batches as data
from nanotrain_jax.distributed.watchdog import Watchdog
from nanotrain_jax.evaluation.in_training import Tasks
from nanotrain_jax.run import adapters, model_config, reference, resume, rollback
from nanotrain_jax.run.phases import Phase
from nanotrain_jax.run.rollback import Losses
from nanotrain_jax.step import build as steps


class Plan(NamedTuple):
    """What a run is, whichever checkpoint it continues from."""

    requested: Config  # before `resolve`
    phases: list[Phase]  # of all stages of training
    mesh: Mesh
    tasks: Tasks | None  # with train.tasks


class Run(NamedTuple):
    """A validated run, ready to start or to continue."""

    plan: Plan
    phases: list[Phase]  # of stages of training: the current one, and later ones
    state: steps.State
    position: int  # sequences of the data consumed so far
    notes: list[str]  # lines for the banner: processes, warnings, what is resumed
    losses: Losses  # of the newest steps
    start: tuple[Path, int] | None = None  # folder and step of the checkpoint resumed from
    meta: compatibility.Meta | None = None  # metadata of that checkpoint
    damaged: Mapping[int, str] = MappingProxyType({})  # step of each newer, damaged checkpoint -> what is wrong with it
    tokens: int = 0  # consumed so far
    saved: int = 0  # step of the newest checkpoint: with a newer local copy the run continues from that
    read: Mapping[str, int] = MappingProxyType({})  # sequences consumed of data that stages read before, by fingerprint
    base: Base | None = None  # of adapters, with train.lora
    watch: Watchdog | None = None  # of this process, since it began

    @property
    def requested(self) -> Config:
        """The config before `resolve`."""
        return self.plan.requested

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.plan.mesh

    @property
    def span(self) -> Span:
        """The steps of the current phase."""
        return self.phases[0].span

    @property
    def config(self) -> Config:
        """The resolved config of the current stage."""
        return self.phases[0].config

    @property
    def dataset(self) -> data.Dataset:
        """The data of the current stage."""
        return self.phases[0].dataset

    @property
    def step(self) -> steps.Step:
        """The step of the current phase."""
        return self.phases[0].step

    @property
    def restored(self) -> Saved | None:
        """The checkpoint that it resumed from."""
        return Saved(*self.start, self.meta.weights_only) if self.start else None

    @property
    def is_unsaved(self) -> bool:
        """True if the run continues from a local copy, beyond its newest checkpoint."""
        return self.config.checkpoint.is_on and int(self.state.step) > self.saved

    @property
    def evaluation(self) -> steps.Step:
        """The step whose `evaluate` all phases of a stage use: the last one's, so that losses can be compared."""
        return next(phase.step for phase in reversed(self.phases) if phase.span.name == self.span.name)


def opened(plan: Plan) -> Run:
    """Restore the newest checkpoint that checkpoint.resume says, or initialize the state; past what a rollback skipped.

    Raises ValueError or OSError, on all processes.
    """
    run, keys = _restored(plan), plan.requested
    step = int(run.state.step)
    skipped = rollback.recall(keys.checkpoint.dir, step) if keys.checkpoint.is_on else None
    if not skipped:
        return run
    run.losses.count = skipped.count
    note = f"past the batches that rollback {skipped.count} skipped: on with sequence {skipped.position:,} of the data"
    return reading_from(run._replace(notes=[*run.notes, note]), skipped.fingerprint, skipped.position)


def _restored(plan: Plan) -> Run:
    """Restore the newest checkpoint that checkpoint.resume says, or initialize the state."""
    requested, phases = plan.requested, plan.phases
    checkpoints, keys = starting_point.agree(requested.checkpoint), requested.train.rollback
    resumed, warnings = resume.resume_local(checkpoints, requested, phases)
    base = None if resumed else adapters.new_base(requested, checkpoints)
    if not resumed and (checkpoints is None or base):
        state, notes = resume.adapt(base, phases) if base else first_state(requested, phases)
        phases, told = reference.attach(phases, state)
        return Run(plan, phases, state, 0, warnings + notes + told, Losses(keys), base=base)
    resumed = resumed or resume.resume(checkpoints, requested, phases)
    phases, told = reference.attach(resumed.phases, resumed.state, resumed)
    meta = resumed.meta
    return Run(
        plan,
        phases,
        resumed.state,
        resumed.position,
        warnings + resumed.notes + told,
        Losses(keys, meta.losses, meta.rollbacks),
        resumed.start,
        meta,
        resumed.damaged,
        resumed.tokens,
        resumed.saved,
        meta.data.read,
        meta.base,
    )


def first_state(requested: Config, phases: list[Phase]) -> tuple[steps.State, list[str]]:
    """Return the state before the first step, and lines for the banner. Raises ValueError or OSError."""
    folder = model_config.folder_of(requested.checkpoint.resume)
    if folder:
        return resume.start_from(folder, phases)
    keys = requested.checkpoint
    is_new = keys.is_on and keys.resume == "auto"
    return phases[0].step.init(), [f"starts at step 0: no checkpoint in {keys.dir}"] if is_new else []


def set_aside_damaged(run: Run) -> None:
    """Move the damaged checkpoints that a run was not resumed from away, if they are its own. Raises OSError."""
    if run.damaged and run.start[0] == Path(run.config.checkpoint.dir):
        directory.set_aside(run.config.checkpoint.dir, run.damaged)


def back_to_checkpoint(plan: Plan) -> Run:
    """Return the run as it was at its newest checkpoint, or its start; local copies, which may be of a step too late,
    are removed. Raises ValueError or OSError, on all processes."""
    local.forget(plan.requested.checkpoint)
    if plan.requested.checkpoint.resume == "never":
        plan = plan._replace(requested=plan.requested.replace("checkpoint", resume="auto"))  # its own checkpoints
    run = opened(plan)
    set_aside_damaged(run)
    return run


def reading_from(run: Run, fingerprint: str, position: int) -> Run:
    """Return the run, but that it reads the data of this fingerprint from `position` on."""
    if run.dataset.fingerprint == fingerprint:
        return run._replace(position=position)
    return run._replace(read={**run.read, fingerprint: position})  # the checkpoint is of the stage before
