"""Numbers of a report as text, to three digits."""

from __future__ import annotations

from math import floor, log10

GB = 1e9


def number(x: float) -> str:
    """Format whole numbers in full, others to three digits."""
    if float(x).is_integer():
        return f"{x:,.0f}"
    return f"{x:,.{max(0, 2 - floor(log10(abs(x))))}f}" if abs(x) >= 1e-4 else f"{x:.3g}"


def gigabytes(size: float) -> str:
    """Format bytes as a number of GB of 1e9."""
    return number(size / GB)


def gb(size: float) -> str:
    """Format bytes, with their unit."""
    return f"{gigabytes(size)} GB"


def seconds(s: float) -> str:
    """Format seconds in s, ms or µs."""
    unit, size = ("s", 1.0) if s >= 1 or s == 0 else ("ms", 1e-3) if s >= 1e-3 else ("µs", 1e-6)
    return f"{number(s / size)} {unit}"


def short(count: int) -> str:
    """Format a count in K, M, B or T."""
    unit, size = next((u for u in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if count >= u[1]), ("K", 1e3))
    return f"{number(count / size)}{unit}"
