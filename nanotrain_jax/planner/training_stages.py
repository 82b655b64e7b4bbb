"""Stages of training (train.stages) in a plan: which one is planned, and all of them side by side."""

from __future__ import annotations

from typing import NamedTuple

from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span, of_phase, of_span, spans
from nanotrain_jax.config.update_checks import check_files_of_phases
from nanotrain_jax.planner.estimate import Estimate, estimate


class Staged(NamedTuple):
    """A stage of training, estimated in the layout of a plan."""

    span: Span
    estimate: Estimate


def config_of(config: Config, name: str | None) -> Config:
    """Return the config of a stage of training, after its other phases; None: of the last one. Raises ValueError."""
    found = spans(config)
    if name is None:
        return _after_phases(config, found[-1])
    names = [span.name for span in found if span.name]
    if name not in names:
        remedy = f"use {' or '.join(names)}" if names else "the config has no train.stages; leave --stage out"
        raise ValueError(f"--stage={name} is no stage of training; {remedy}")
    return _after_phases(config, found[names.index(name)])


def _after_phases(config: Config, span: Span) -> Config:
    """Return the config of a stage after its other phases; it keeps their batches, which a layout must suit too."""
    check_files_of_phases(config)
    batches = {key: getattr(config.train, key) for key in ("batch_schedule", "batch_growth")}
    return of_phase(of_span(config, span), span).replace("train", **batches)


def all_stages(config: Config, planned: Estimate) -> list[Staged]:
    """Return the estimates of all stages of training in the layout of a plan; [] without train.stages.

    config: as given. planned: of any stage.
    """
    if not config.train.stages:
        return []

    def in_layout(span: Span) -> Config:
        of_stage = _after_phases(config, span)
        return planned.config.model_copy(update={"train": of_stage.train, "optimizer": of_stage.optimizer})

    return [Staged(span, estimate(in_layout(span), planned.gpu)) for span in spans(config)]
