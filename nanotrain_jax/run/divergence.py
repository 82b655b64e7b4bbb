"""Runs that diverge: a step whose gradients are not finite is skipped, and too many in a row end the run."""

from nanotrain_jax.config.schema import Config
from nanotrain_jax.distributed.processes import all_gather_text
from nanotrain_jax.run.metrics import Writer

SUSPECT = 2  # skipped steps in a row after which no checkpoint pushes out an older one; one is usual with loss scaling


class Diverged(Exception):
    """train.max_skipped steps in a row were skipped."""


def skipped_in_a_row(writer: Writer, config: Config) -> int:
    """Return how many of the newest steps in a row were skipped, the same on all processes.

    The step whose metrics are still being computed does not count yet. With parallel.sync_every replicas skip steps
    apart: the most of any. Then it waits for all processes.
    """
    own = writer.in_a_row
    return max(map(int, all_gather_text(str(own)))) if config.parallel.sync_every else own


def found(writer: Writer, config: Config, number: int, saved: int) -> str:
    """Return what to say after too many skipped steps in a row; "" before. number: of the newest step; saved: of that
    with the newest checkpoint, 0 without one."""
    most, every = config.train.max_skipped, config.parallel.sync_every
    if not most or (every and number % every) or skipped_in_a_row(writer, config) < most:
        return ""
    good = "no step was taken"
    if writer.taken:
        good = f"the last that was not skipped is step {writer.taken[0]}, with loss {writer.taken[1]:.4g}"
    good += f"; the last checkpoint is of step {saved}" if saved else "; there is no checkpoint"
    return (
        f"diverged: the gradients of {most} steps in a row until step {number - 1} are not finite; {good}; lower "
        f"optimizer.lr={config.optimizer.lr:g}, or raise train.max_skipped={most} (0: never stop)"
    )
