"""Wall time of a process by phase: at any moment it is in one phase, so phases sum to the wall time."""

from __future__ import annotations

import time
from collections import Counter

STEP = ("dispatch", "step")  # phases in which the devices train


class PhaseClock:
    """Seconds in each phase since the process began."""

    def __init__(self, began: float | None = None):
        """began: of time.monotonic(); None: now. The first phase is "start"."""
        self.began = self.changed = time.monotonic() if began is None else began
        self.started = time.time() - (time.monotonic() - self.began)  # as Unix time
        self.phase, self.past = "start", Counter()

    def at(self, phase: str) -> None:
        """End the current phase and begin another."""
        now = time.monotonic()
        self.past[self.phase] += now - self.changed
        self.phase, self.changed = phase, now

    def seconds(self) -> dict[str, float]:
        """Return the seconds in each phase until now."""
        self.at(self.phase)
        return dict(self.past)

    def share_of_steps(self) -> float:
        """Return the share of the wall time in training steps, from 0 to 1."""
        seconds = self.seconds()
        return sum(seconds.get(phase, 0.0) for phase in STEP) / max(sum(seconds.values()), 1e-9)
