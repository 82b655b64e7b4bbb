"""When a checkpoint is due: every so many steps (checkpoint.every), and after so many minutes (checkpoint.minutes).

And when a local copy is (checkpoint.local_every).
"""

from __future__ import annotations

import time

import jax

from nanotrain_jax.config.run_sections import Checkpoint
from nanotrain_jax.distributed.processes import all_gather_text

FIRST = 8  # steps until processes first ask for the time: how long a step takes is not known yet


class Saving:
    """Decides after which steps to save, the same on all processes.

    Process 0 has the clock. Several processes ask it at steps that they all know, the next one after half of the time
    that is left: some ten times per save, so steps between do not wait for each other. One process looks at each step.
    """

    def __init__(self, config: Checkpoint, number: int):
        """number: of the last step so far."""
        self.every, self.seconds = config.every, 60 * config.minutes
        self.local_every = config.local_every if config.local_dir else 0
        self.saved(number)

    def saved(self, number: int) -> None:
        """Begin to count again, after step `number` is saved."""
        self.began, self.first, self.asks_at = time.monotonic(), number, number + FIRST

    def is_due(self, number: int) -> bool:
        """Return whether to save after step `number`; ask after each step."""
        return self._is_step(number) or bool(self.seconds and number > self.first and self._is_time(number))

    def is_local_due(self, number: int) -> bool:
        """Return whether to save a local copy after step `number`, unless it is saved (checkpoint.local_every)."""
        return bool(self.local_every) and number % self.local_every == 0

    def _is_step(self, number: int) -> bool:
        return bool(self.every) and number % self.every == 0

    def _is_time(self, number: int) -> bool:
        passed = time.monotonic() - self.began
        if jax.process_count() == 1:
            return passed >= self.seconds
        if number < self.asks_at:
            return False
        left = max(self.seconds - passed, 0.0)
        each = passed / (number - self.first)
        steps = int(all_gather_text(str(int(left / 2 / max(each, 1e-6)) + 1 if left else 0))[0])
        self.asks_at = number + steps
        return steps == 0
