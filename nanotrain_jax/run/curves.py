"""Read metrics.jsonl and draw loss.png."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.figure


def read(jsonl: Path) -> tuple[list[dict[str, Any]], int]:
    """Read metrics.jsonl -> (records ordered by step, number of unreadable lines).

    If a step ran twice, its last record counts. Lines damaged by a crash (NULs, a partial line, other JSON) are
    skipped. Raises OSError if the file exists and cannot be read.
    """
    parsed = [_record(line) for line in jsonl.read_bytes().splitlines()] if jsonl.exists() else []
    records = {record["step"]: record for record in parsed if record is not None}
    return [records[step] for step in sorted(records)], parsed.count(None)


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


def draw(jsonl: Path, png: Path, title: str, bigram: float | None) -> int:
    """Draw training and validation loss, the loss of a bigram model and the gradient noise scale, if known;
    -> number of unreadable lines.

    The training curve shows the mean loss since the previous point. Draws nothing if there are no losses.
    Raises OSError.
    """
    records, bad = read(jsonl)
    train = _finite((r["step"], r.get("mean_loss", r.get("loss"))) for r in records)
    val = _finite((r["step"], r.get("val_loss")) for r in records)
    if not train + val:
        return bad
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    is_mean = any("mean_loss" in r for r in records)
    name = "training (mean since the previous point)" if is_mean else "training"
    for points, style in (train, {"label": name, "linewidth": 1}), (val, {"label": "validation", "marker": "o"}):
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    if bigram is not None:
        axes.axhline(bigram, color="gray", linestyle="--", linewidth=1, label=f"bigram model ({bigram:.4f})")
    noise = _finite((r["step"], r.get("noise_scale")) for r in records)
    if noise:
        right = axes.twinx()
        right.plot(*zip(*noise, strict=True), color="tab:green", linewidth=1, linestyle=":")
        right.set(ylabel="gradient noise scale (tokens, dotted)", yscale="log")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, fontsize="medium", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=120)
    return bad


def _finite(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Keep the points (step, value) whose value is a finite number."""
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]
