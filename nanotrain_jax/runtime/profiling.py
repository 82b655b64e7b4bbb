"""A profile of some steps, for TensorBoard or Perfetto, written however the loop ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class Profile:
    """Profiles the steps first .. last of a loop that calls `before` and `after` around each."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, say: Callable[[str], None]):
        """steps: None for no profile. say: prints lines for people."""
        self.steps, self.folder, self.say = steps, folder, say
        self.open = False

    def before(self, number: int) -> None:
        """Begin, if step `number` is to be profiled and none before it was."""
        if self.steps and not self.open and self.steps[0] <= number <= self.steps[1]:
            jax.profiler.start_trace(self.folder)
            self.open = True

    def ends(self, number: int) -> bool:
        """Whether step `number` is the last that is profiled: it must have ended before `after` is called."""
        return self.open and number == self.steps[1]

    def after(self, number: int) -> None:
        """Write the profile, if step `number` was its last."""
        if self.ends(number):
            self.close()

    def close(self) -> None:
        """Write the profile, if there is one that is not written, and say how to look at it."""
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
    """Yield a Profile that is closed at the end, also by an exception. See `Profile`."""
    profile = Profile(steps, folder, say)
    try:
        yield profile
    finally:
        profile.close()
