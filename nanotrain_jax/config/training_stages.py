"""Stages of training (train.stages): the steps of each, and its config.

Each stage is as a run of its own that begins with the weights of the stage before it: a new optimizer, learning rate
schedule and warm-up. Steps are counted through all stages.
"""

from __future__ import annotations

from typing import NamedTuple

from nanotrain_jax.config.schema import Config


class Span(NamedTuple):
    """A stage of training takes the steps first + 1 to last. Without train.stages: the whole run, name ""."""

    name: str
    first: int
    last: int


def spans(config: Config) -> list[Span]:
    """Return the stages that train.steps, if given, leaves."""
    train = config.train
    if not train.stages:
        return [Span("", 0, train.steps)]
    most = train.steps if "steps" in train.model_fields_set else float("inf")
    found, first = [], 0
    for stage in train.stages:
        last = min(first + stage.steps, most)
        if last > first:
            found.append(Span(stage.name, first, last))
        first = last
    return found


def of_span(config: Config, span: Span) -> Config:
    """Return the config with which a stage trains, before or after `resolve`; train.steps: of all stages."""
    stage = next((stage for stage in config.train.stages if stage.name == span.name), None)
    if stage is None:
        return config
    optimizer = config.optimizer
    lr = stage.lr or optimizer.lr
    config = config.replace("train", steps=spans(config)[-1].last, freeze=stage.freeze)
    config = config.replace(
        "optimizer",
        lr=lr,
        min_lr=optimizer.min_lr * lr / optimizer.lr,
        decay_steps=optimizer.decay_steps or stage.steps,
    )
    return config.replace("data", source=stage.data or config.data.source)
