"""Profile some steps: a summary, and a trace for TensorBoard or Perfetto; written however the loop ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from nanotrain_jax.audit import hlo
from nanotrain_jax.run import profile_summary


class Profile:
    """Profiler of steps first .. last, for a loop that calls `before` and `after` around each step, then `close`."""

    def __init__(
        self, steps: tuple[int, int] | None, folder: Path, say: Callable[[str], None], text: Callable[[], str]
    ):
        """steps: (first, last); None: no profile. say: prints lines. text: returns that of the compiled step."""
        self.steps, self.folder, self.say, self.text = steps, folder, say, text
        self.open = False

    def begins(self, number: int) -> bool:
        """True if `before` starts the profiler: earlier steps must be finished, so that they are not profiled."""
        return bool(self.steps) and not self.open and self.steps[0] <= number <= self.steps[1]

    def before(self, number: int) -> None:
        """Start the profiler if step `number` is the first to profile."""
        if self.begins(number):
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
        self.say(self.summarize())

    def summarize(self) -> str:
        """Summarize the newest trace, and save the summary beside it. A failure is only a warning."""
        try:
            trace = max(self.folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
            text = profile_summary.summary(trace, hlo.sources(self.text()))
            trace.with_name(trace.name.replace(".xplane.pb", ".summary.txt")).write_text(text + "\n")
        except Exception as error:  # a trace of another form, or a full disk: the run continues
            return "warning: cannot summarize the profile: " + " ".join(f"{type(error).__name__}: {error}".split())
        return text
