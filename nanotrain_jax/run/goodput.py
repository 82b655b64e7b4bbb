"""Goodput: the share of a run's wall time in useful steps, and what the rest went into, over all its starts.

`goodput.jsonl` in the folder of a run has a line per record of metrics.jsonl: seconds of this start by phase. What a
start did after its last line, until the next one begins, is time of a restart.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import groupby, pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nanotrain_jax.distributed.phase_clock import PhaseClock

FILE = "goodput.jsonl"
USEFUL = "useful steps"
CAUSES = {  # phase -> cause
    "join": "joining", "start": "start", "restore": "restore", "compile": "compile", "data": "data",
    "dispatch": USEFUL, "step": USEFUL, "evaluation": "evaluation", "tasks": "evaluation",
    "checkpoint": "save", "verify": "verification", "end": "end",
}  # fmt: skip


class Line(BaseModel):
    """The time of a start of a run, so far."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    began: float  # Unix time of this start
    time: float  # Unix time of this line
    first: int = Field(ge=0)  # step from which it started
    step: int = Field(ge=0)
    skipped: int = Field(ge=0)  # steps that it took and that changed nothing
    undone: int = Field(default=0, ge=0)  # steps that it took and then went back behind
    seconds: dict[str, float]  # by phase


def append(folder: Path, clock: PhaseClock, steps: Mapping[str, int]) -> None:
    """Append a line to the file of a run. steps: first, step, skipped, undone of `Line`. Raises OSError."""
    seconds = {phase: round(value, 4) for phase, value in clock.seconds().items()}
    line = {"began": clock.started, "time": clock.started + sum(seconds.values()), **steps, "seconds": seconds}
    with open(folder / FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


def read(folder: Path) -> list[Line]:
    """Return the lines of a run; those that cannot be read are left out, and so are all if there is no file."""
    try:
        texts = (folder / FILE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in map(_line, texts) if line]


def by_cause(lines: list[Line]) -> dict[str, float]:
    """Return the seconds of a run by cause; they sum to its wall time, from the first start to the last line.

    Steps that a later start took again, and those skipped or undone, are taken from useful steps at the mean time of a
    step.
    """
    starts = [list(group)[-1] for _, group in groupby(lines, lambda line: line.began)]
    seconds: Counter[str] = Counter()
    for start, after in pairwise([*starts, None]):
        again = max(start.step - max(after.first, start.first), 0) if after else 0
        own = Counter()
        for phase, value in start.seconds.items():
            own[CAUSES.get(phase, phase)] += value
        each = own[USEFUL] / max(start.step - start.first + start.undone, 1)
        own["repeated steps"] = again * each
        own["skipped steps"] = min((start.skipped + start.undone) * each, own[USEFUL] - own["repeated steps"])
        own[USEFUL] -= own["repeated steps"] + own["skipped steps"]
        own["restart"] = max(after.began - start.time, 0.0) if after else 0.0
        seconds += own
    return dict(seconds.most_common())


def summary(lines: list[Line]) -> str:
    """Return a line for people: "goodput 81.2% of 123 s in useful steps; compile 9.0%, ..."; "" without lines."""
    seconds = by_cause(lines)
    total = sum(seconds.values())
    if not total:
        return ""
    others = [f"{cause} {value / total:.1%}" for cause, value in seconds.items() if cause != USEFUL]
    share = seconds.get(USEFUL, 0.0) / total
    return f"  goodput           {share:.1%} of {total:,.0f} s in useful steps; {', '.join(others)}"


def _line(text: str) -> Line | None:
    try:
        return Line.model_validate_json(text)
    except ValidationError:
        return None
