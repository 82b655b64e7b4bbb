"""Loss spikes (train.rollback): which step is one, and what was skipped behind it.

A spike is a loss far above those of a window of steps before it, or several losses in a row that are not finite. The
run then goes back to the newest checkpoint, and on with the batch after the spike: it never sees the batches between
again (PaLM, arXiv 2204.02311, section 5.1). The host reads the loss of a step while the next one runs, as it does
without, so a spike costs that step too. Until the next checkpoint <checkpoint.dir>/rollback.txt says what is skipped:
a run that is killed before does not read these batches either.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import jax
from pydantic import BaseModel, ConfigDict, Field

from nanotrain_jax.checkpoint import durable
from nanotrain_jax.config.run_sections import Rollback
from nanotrain_jax.distributed.processes import of_first, on_all_processes

FILE = "rollback.txt"  # in checkpoint.dir: CRC-32 and JSON of Skipped


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


class Skipped(BaseModel):
    """What a rollback skipped: after step `step` the run reads the data of this fingerprint from `position` on."""

    model_config = ConfigDict(strict=True)
    step: int = Field(ge=0)
    position: int = Field(ge=0)  # in sequences
    fingerprint: str
    count: int = Field(ge=1)  # rollbacks so far


def remember(folder: str | Path, skipped: Skipped) -> None:
    """Keep what a rollback skipped, durably. folder: checkpoint.dir. Raises OSError, on all processes."""
    text = skipped.model_dump_json().encode()
    content = b"%08x %s" % (zlib.crc32(text), text)
    on_all_processes(lambda: durable.write(Path(folder) / FILE, content) if jax.process_index() == 0 else None)


def recall(folder: str | Path, step: int) -> Skipped | None:
    """Return what the last rollback skipped, if the run is at the step to which it went back: a later checkpoint knows
    its own position. Raises ValueError or OSError, on all processes."""
    text = of_first(on_all_processes(lambda: _kept(Path(folder) / FILE) if jax.process_index() == 0 else ""))
    skipped = Skipped.model_validate_json(text) if text else None
    return skipped if skipped and skipped.step == step else None


def _kept(path: Path) -> str:
    """Return the JSON in a file of `remember`; "": there is none. Raises ValueError if it is damaged."""
    if not path.is_file():
        return ""
    checksum, _, text = path.read_bytes().partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError(f"{path} is damaged: it says which batches a rollback skipped; remove it to read them again")
    return text.decode()
