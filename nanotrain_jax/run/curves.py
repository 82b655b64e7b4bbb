"""Read metrics.jsonl; draw loss.png, and curves of several runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
AGAINST = {  # what curves may be drawn against -> metric that it takes, label
    "tokens": ("tokens", "tokens"),
    "steps": ("step", "step"),
    "seconds": ("step_seconds", "seconds of training steps"),
}


def read(jsonl: Path) -> tuple[list[dict[str, Any]], int]:
    """Read metrics.jsonl -> (records ordered by step, number of unreadable lines).

    A run that went back to an earlier step wrote the rest again: of the attempt before only what precedes that step
    counts. Lines damaged by a crash (NULs, a partial line, other JSON) are
    skipped. Raises OSError if the file exists and cannot be read.
    """
    parsed = [_record(line) for line in jsonl.read_bytes().splitlines()] if jsonl.exists() else []
    records: list[dict[str, Any]] = []
    for record in parsed:
        while record and records and records[-1]["step"] >= record["step"]:
            records.pop()
        records += [record] if record else []
    return records, parsed.count(None)


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; -> None if it is not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    losses = (record.get(key) for key in ("loss", "mean_loss", "val_loss"))
    return record if all(loss is None or type(loss) in (int, float) for loss in losses) else None


def last(jsonl: Path, until: int) -> dict[str, Any]:
    """Return the newest value of each metric up to a step. Raises OSError."""
    values = {}
    for record in read(jsonl)[0]:
        if record["step"] <= until:
            values |= {key: value for key, value in record.items() if value is not None}
    return values


def series(records: Sequence[dict[str, Any]], metric: str, against: str, first: int = 0) -> list[Point]:
    """Return the points of a metric of records, where it is a finite number. against: a key of AGAINST.

    loss is the mean since the previous record. Seconds are the sum of those of steps after step `first`: without
    compilation, evaluations and checkpoints.
    """
    needed, _ = AGAINST[against]
    records = [record for record in records if number(record, needed) is not None]
    places = [record[needed] for record in records]
    if against == "seconds":
        steps = (step - before for before, step in pairwise([first, *(record["step"] for record in records)]))
        places = accumulate(count * seconds for count, seconds in zip(steps, places, strict=True))
    if metric == "loss":
        records = [record | {"loss": record.get("mean_loss", record.get("loss"))} for record in records]
    points = ((x, number(record, metric)) for x, record in zip(places, records, strict=True))
    return [(x, y) for x, y in points if y is not None]


def number(record: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric of a record, None unless it is a finite number."""
    value = record.get(metric)
    return value if type(value) in (int, float) and math.isfinite(value) else None


def draw_lines(axes: Axes, lines: Mapping[str, Sequence[Point]]) -> None:
    """Draw named lines, up to 30 of them unlike each other, with a legend; a line of one point is a dot."""
    from matplotlib import cycler, rcParams

    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * rcParams["axes.prop_cycle"])
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1, marker="." if len(points) == 1 else "")
    axes.grid(alpha=0.3)
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)


def draw(jsonl: Path, png: Path, title: str, bigram: float | None, unit: str = "token") -> int:
    """Draw training and validation loss, the loss of a bigram model and the gradient noise scale, if known;
    -> number of unreadable lines.

    The training curve shows the mean loss since the previous point. Draws nothing if there are no losses. unit: of
    losses. Raises OSError.
    """
    from matplotlib.figure import Figure  # a fifth of what a run imports, and needed at its end

    records, bad = read(jsonl)
    train, val, noise = (series(records, metric, "steps") for metric in ("loss", "val_loss", "noise_scale"))
    if not train + val:
        return bad
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    is_mean = any("mean_loss" in r for r in records)
    name = "training (mean since the previous point)" if is_mean else "training"
    for points, style in (train, {"label": name, "linewidth": 1}), (val, {"label": "validation", "marker": "o"}):
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    if bigram is not None:
        axes.axhline(bigram, color="gray", linestyle="--", linewidth=1, label=f"bigram model ({bigram:.4f})")
    if noise:
        right = axes.twinx()
        right.plot(*zip(*noise, strict=True), color="tab:green", linewidth=1, linestyle=":")
        right.set(ylabel="gradient noise scale (tokens, dotted)", yscale="log")
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})")
    axes.set_title(title, fontsize="medium", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=120)
    return bad
