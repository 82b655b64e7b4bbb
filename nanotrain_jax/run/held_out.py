"""Evaluations of a run between steps: mean losses on held-out text, and scores of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from nanotrain_jax.data import batches as data
from nanotrain_jax.run.origin import Run
from nanotrain_jax.step import build as steps
from nanotrain_jax.step.measures import of_evaluation

Seen = Callable[[str], None]  # called with what the run does, as progress (distributed/watchdog.py)


def means(run: Run, state: steps.State, at: Seen) -> dict[str, float]:
    """Return val_loss, the mean per held-out target in nats; of a model that has some also further means, by name.

    Of a named set as val_loss/NAME; val_loss of a mixture is the mean of its sources by their share. {} without
    held-out text.
    """
    params, found = run.step.average(state.params), {}
    for name, rows, share in run.dataset.validation:
        for mean, value in _of_rows(run, params, rows, at).items():
            found |= {f"{mean}/{name}" if name else mean: value}
            found |= {mean: found.get(mean, 0.0) + share * value} if name and share else {}
    return found


def _of_rows(run: Run, params: Any, rows: data.Source, at: Seen) -> dict[str, float]:
    """Return val_loss and further means over some held-out rows. params: as `Step.evaluate` takes them."""
    step, sums = run.evaluation, []
    for batch in data.evaluation(rows, step.batch, run.config.train.eval_steps, step.token_order):
        at("evaluation")
        sums.append(step.evaluate(params, batch))
        jax.block_until_ready(sums[-2:-1])  # XLA:CPU aborts with too many executions in flight
    loss, targets, *further = jax.tree.map(lambda *of_batches: sum(map(np.float64, of_batches)), *sums)
    named = {"accuracy": further[0]} if further and not isinstance(further[0], dict) else dict(*further)
    found = of_evaluation(step.plan, {name: total / targets for name, total in named.items()})
    return {"val_loss": float(loss / targets)} | {name: float(value) for name, value in found.items()}


def scores(run: Run, state: steps.State, at: Seen) -> dict[str, float]:
    """Return the scores of train.tasks, by name; {} without them."""
    if run.plan.tasks is None:
        return {}
    at("tasks")
    return run.plan.tasks.scores(run.step.average(run.step.in_layer_order(state).params))
