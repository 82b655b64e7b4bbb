"""Formulas with numbers put in: lines and sections of an explanation."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One formula: `what = formula = numbers = value unit`."""

    what: str
    formula: str
    numbers: str  # the formula with numbers substituted: digits with commas, + - x / ^ ( )
    value: float
    unit: str


class Section(NamedTuple):
    """Formulas of one topic, with their source."""

    title: str
    source: str
    lines: list[Line]


def number(x: float) -> str:
    """Format a number: whole ones with commas, others with 5 significant digits."""
    return f"{round(x):,}" if x == round(x) and abs(x) < 1e15 else f"{x:.5g}"
