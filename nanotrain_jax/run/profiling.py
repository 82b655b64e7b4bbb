"""Profile some steps, for TensorBoard or Perfetto; the profile is written however the loop ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class Profile:
    """Profiler of steps first .. last, for a loop that calls `before` and `after` around each step."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, say: Callable[[str], None]):
        """steps: (first, last); None: no profile. say: prints lines."""
        self.steps, self.folder, self.say = steps, folder, say
        self.open = False

    def before(self, number: int) -> None:
        """Start the profiler if step `number` is the first to profile."""
        if self.steps and not self.open and self.steps[0] <= number <= self.steps[1]:
            jax.profiler.start_trace(self.folder)
            self.open = True

    def ends(self, number: int) -> bool:
        """True if step `number` is the last profiled one: it must be finished before `after` is called."""
        return self.open and number == self.steps[1]

    def after(self, number: int) -> None:
        """Write the profile after the last profiled step."""
        if self.ends(number):
            self.close()

    def close(self) -> None:
        """Stop the profiler if it runs, write the profile and print how to view it."""
        if not self.open:
            return
        self.open = False
        jax.profiler.stop_trace()
        self.say(
            f"profile written to {self.folder}\n"
            f"  in TensorBoard    pip install tensorboard xprof; tensorboard --logdir {self.folder}; tab Profile\n"
            f"  in Perfetto's UI  open {self.folder}/plugins/profile/*/*.trace.json.gz"
        )


@contextmanager
def profiling(steps: tuple[int, int] | None, folder: Path, say: Callable[[str], None]) -> Iterator[Profile]:
    """Yield a Profile and close it at the end, also after an exception."""
    profile = Profile(steps, folder, say)
    try:
        yield profile
    finally:
        profile.close()
