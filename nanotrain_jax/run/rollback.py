"""Loss spikes (train.rollback): which step is one.

A spike is a loss far above those of a window of steps before it, or several losses in a row that are not finite. The
run then goes back to the newest checkpoint, and on with the batch after the spike: it never sees the batches between
again (PaLM, arXiv 2204.02311, section 5.1). The host reads the loss of a step while the next one runs, as it does
without, so a spike costs that step too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from nanotrain_jax.config.run_sections import Rollback


class Spike(NamedTuple):
    """A step whose loss is a spike. text: what is wrong with it, for people."""

    step: int
    text: str


class Losses:
    """The finite losses of the newest steps, and the first spike after them; the same on all processes."""

    def __init__(self, keys: Rollback | None, newest: Sequence[float] = (), count: int = 0):
        """keys: None: nothing is a spike. newest: losses of the steps before, oldest first. count: of rollbacks."""
        self.keys, self.count = keys, count
        self.newest = deque(newest, maxlen=keys.window if keys else 0)
        self.not_finite = 0  # in a row, until now
        self.spike: Spike | None = None

    def see(self, number: int, loss: float) -> None:
        """Look at the loss of step `number`, the next one."""
        if self.keys is None or self.spike:
            return
        text = self._text(loss)
        if text:
            self.spike = Spike(number, text)
        elif math.isfinite(loss):
            self.newest.append(loss)

    def _text(self, loss: float) -> str:
        """Return why a loss is a spike; "" if it is none."""
        keys = self.keys
        if not math.isfinite(loss):
            self.not_finite += 1
            return f"losses of {keys.not_finite} steps in a row are not finite" * (self.not_finite == keys.not_finite)
        self.not_finite = 0
        if len(self.newest) < keys.window:
            return ""
        mean = fmean(self.newest)  # exact sums: hosts with other processors must not disagree
        deviation = math.sqrt(fmean((x - mean) ** 2 for x in self.newest))
        if loss <= mean + keys.deviations * deviation:
            return ""
        return f"loss {loss:.4g} is above {mean:.4g} + {keys.deviations:g} x {deviation:.2g} of {keys.window} steps"
