"""Stages of training and their phases: the steps of each, and its config.

Each stage is as a run of its own that begins with the weights of the stage before it: a new optimizer, learning rate
schedule and warm-up. Steps are counted through all stages. A stage has phases, which share its optimizer and its
schedule: of smaller batches first (train.batch_schedule, train.batch_growth), and first with gradients summed whole
(parallel.full_sync_steps).
"""

from typing import NamedTuple

from nanotrain_jax.config.schema import Config, Optimizer

# Learning rate of a batch, as a power of it. Goyal et al. 2017 (arXiv 1706.02677) for SGD, Malladi et al. 2022
# (arXiv 2205.10287) for Adam, of whose rule this is the part about the learning rate.
POWER = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


class Span(NamedTuple):
    """A stage of training, or a phase of it, takes the steps first + 1 to last. Without train.stages: name ""."""

    name: str
    first: int
    last: int
    batch_size: int | None = None  # sequences per step; None: data.batch_size
    full_sync: bool = False  # without parallel.compress and sync_every


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
    freeze = tuple(dict.fromkeys((*config.train.freeze, *stage.freeze)))
    config = config.replace("train", steps=spans(config)[-1].last, freeze=freeze)
    config = config.replace(
        "optimizer",
        lr=lr,
        min_lr=optimizer.min_lr * lr / optimizer.lr,
        decay_steps=optimizer.decay_steps or stage.steps,
    )
    return config.model_copy(update={"data": config.data.reading(stage.data or config.data.source)})


def of_run(config: Config, requested: Config) -> Config:
    """Return the resolved config of a stage with the keys of all stages again: one that runs all of them.

    requested: the config of the run before `resolve`.
    """
    if not config.train.stages:
        return config
    config = config.replace("train", freeze=requested.train.freeze)
    return config.model_copy(update={"optimizer": requested.optimizer, "data": requested.data})


def phases(config: Config, span: Span) -> list[Span]:
    """Return the phases of a stage. The last has data.batch_size, even if no step is left for it.

    With train.batch_growth each may last until the end of the stage (`run/phases.py` ends it). That needs the noise
    scale, which goes with neither parallel.compress nor sync_every.
    """
    growth = config.train.batch_growth
    if growth:
        sizes = [growth.batch_size]
        while 2 * sizes[-1] < config.data.batch_size:
            sizes.append(2 * sizes[-1])
        return [*(span._replace(batch_size=size) for size in sizes), span]
    found, first = [], span.first
    for phase in config.train.batch_schedule:
        last = min(first + phase.steps, span.last)
        if last > first:
            found.append(Span(span.name, first, last, phase.batch_size))
        first = last
    found.append(span._replace(first=first))
    return [part for whole in found for part in _split(whole, span.first + config.parallel.full_sync_steps)]


def _split(span: Span, step: int) -> list[Span]:
    """Return a phase in two parts, the first of them without compression and local steps, up to this step."""
    if step <= span.first:
        return [span]
    before, after = span._replace(last=min(step, span.last), full_sync=True), span._replace(first=step)
    return [before, after] if step < span.last else [before]


def rate_of_batch(optimizer: Optimizer, share: float) -> float:
    """Return the factor of the learning rate of a batch of this share of data.batch_size (optimizer.lr_by_batch)."""
    return share ** POWER[optimizer.lr_by_batch]


def of_phase(config: Config, span: Span) -> Config:
    """Return the config of a run that is as a phase throughout. A smaller batch has fewer microbatches, as large."""
    p, o, whole = config.parallel, config.optimizer, config.data.batch_size
    size = span.batch_size or whole
    rate = rate_of_batch(o, size / whole)
    without = {"compress": "none", "sync_every": 0} if span.full_sync else {}
    layout = {"microbatches": p.microbatches * size // whole, "full_sync_steps": 0, **without}
    config = config.replace("data", batch_size=size).replace("parallel", **layout)
    config = config.replace("optimizer", lr=o.lr * rate, min_lr=o.min_lr * rate)
    return config.replace("train", batch_schedule=(), batch_growth=None)
