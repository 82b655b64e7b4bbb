"""How many steps a run takes that its data decide: train.epochs, data.exhausted=end.

Steps are counted from where a resumed run is: another batch size since its start changes how many are left.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import jax

from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint import starting_point
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span, phases
from nanotrain_jax.config.update_checks import check_length
from nanotrain_jax.config.values import INT32
from nanotrain_jax.data.batches import Dataset
from nanotrain_jax.distributed.processes import of_first, on_all_processes
from nanotrain_jax.run import resume


class Progress(NamedTuple):
    """How far a run is."""

    step: int = 0
    position: int = 0  # sequences consumed, counted in the current data.seq_len


def is_by_data(config: Config) -> bool:
    """True if the data decide how many steps a run takes. Raises ValueError if they cannot."""
    check_length(config)
    return config.train.epochs is not None or config.data.exhausted == "end"


def progress(config: Config) -> Progress:
    """Return how far the newest checkpoint is that a run resumes from, the same on all processes, if the data decide
    its length. config: before `resolve`. Raises ValueError or OSError, on all processes."""
    folder = starting_point.agree(config.checkpoint) if is_by_data(config) else None
    if folder is None or starting_point.takes_weights_alone(config.checkpoint, folder):
        return Progress()
    found = on_all_processes(lambda: _of_newest(folder, config) if jax.process_index() == 0 else Progress())
    return Progress(*json.loads(of_first(json.dumps(found))))


def _of_newest(folder: Path, config: Config) -> Progress:
    """Return how far the newest checkpoint of a folder is that has readable metadata."""
    for step in starting_point.candidates(folder, config.checkpoint):
        try:
            meta = restore.read_meta(folder, step)
        except restore.Unreadable:
            continue
        if resume.takes_weights_alone(meta, config, folder) or (config.train.lora and not meta.base):
            break
        return Progress(step, meta.data.position * meta.seq_len // config.data.seq_len)
    return Progress()


def steps(config: Config, dataset: Dataset, done: Progress) -> int:
    """Return train.steps of a run whose data decide it, at least those done. config: before `resolve`.

    train.epochs: the fewest steps that take so many rows, as batches continue into the next epoch. data.exhausted=end:
    at most train.steps, and those in which no source is read twice. Raises ValueError.
    """
    train, epochs = dataset.train, config.train.epochs
    if epochs is not None:
        left = round(epochs * len(train), 6) - done.position
        return max(done.step + math.ceil(left / config.data.batch_size), done.step, 1)
    rows = train.rows_once if config.data.parts else len(train)
    step, position = done
    for span in phases(config, Span("", 0, INT32)):
        size = span.batch_size or config.data.batch_size
        taken = max(min(span.last - step, (rows - position) // size), 0)
        step, position = step + taken, position + taken * size
    if step == 0:
        raise ValueError(
            f"data.exhausted=end with data.batch_size={config.data.batch_size}: a source ends after {rows} sequences; "
            "use a smaller batch, more text, or data.exhausted=repeat"
        )
    return min(config.train.steps, step)
