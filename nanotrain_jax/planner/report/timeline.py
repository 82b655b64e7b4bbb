"""Picture of a memory timeline (planner/timeline.py): bytes of each kind over the instructions of a step, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

GB = 1e9
COLORS = {  # of the kinds, from the bottom up
    "params": "#4477aa",
    "optimizer": "#66ccee",
    "batch": "#5b6573",
    "outputs": "#a9b4c2",
    "gradients": "#228833",
    "activations": "#ccbb44",
    "loss": "#ee6677",
    "layer": "#aa3377",
    "buffers": "#bbbbbb",
    "update": "#bb7744",
}
PHASES = {"forward": "#dfe7f0", "backward": "#f3e6d6", "update": "#e6e0ee"}
WIDTH, HEIGHT = 960, 300  # of the curves
LEFT, TOP, BAND = 56, 22, 22  # left and upper margins; height of the band of phases
LABEL = 64  # width that a phase needs for its name


def picture(found: Mapping[str, Any], limit: float) -> str:
    """Return the SVG of a timeline. limit: bytes that the device has, drawn where it is in sight."""
    kinds = [kind for kind in COLORS if max(found["curve"].get(kind, [0])) > 0.002 * found["peak_bytes"]]
    stacked = np.cumsum([found["curve"][kind] for kind in kinds], axis=0)
    top = 1.08 * found["peak_bytes"]
    areas = (_area(kind, sizes, top) for kind, sizes in zip(kinds[::-1], stacked[::-1], strict=True))
    body = [*_grid(top), *areas, *_phases(found["phase"]), _peak(found, top), *_legend(kinds)]
    if limit < top:
        body.append(f'<path d="M{LEFT} {_y(limit, top):.0f}h{WIDTH}" stroke="#c0281f" stroke-dasharray="6 4"/>')
    size = f"0 0 {LEFT + WIDTH + 8} {TOP + HEIGHT + BAND + 34}"
    label = f"memory over the instructions of a step; peak {found['peak_bytes'] / GB:.1f} GB"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{label}" '
        f'font-family="sans-serif" font-size="12">{"".join(body)}</svg>'
    )


def _y(size: float, top: float) -> float:
    return TOP + HEIGHT * (1 - size / top)


def _area(kind: str, sizes: np.ndarray, top: float) -> str:
    """Draw the steps of a curve, filled down to zero; curves below it are drawn over it."""
    step = WIDTH / len(sizes)
    runs = ((_y(size, top), sum(1 for _ in run)) for size, run in groupby(sizes))
    path = "".join(f"V{y:.1f}h{count * step:.1f}" for y, count in runs)
    largest = f"{kind}, with what is below it: at most {sizes.max() / GB:.2f} GB"
    return (
        f'<path d="M{LEFT} {TOP + HEIGHT}{path}V{TOP + HEIGHT}z" fill="{COLORS[kind]}"><title>{largest}</title></path>'
    )


def _grid(top: float) -> list[str]:
    step = 10 ** np.floor(np.log10(top / GB))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if top / GB / s <= 6)
    lines = []
    for size in np.arange(0, top / GB, step):
        y = _y(size * GB, top)
        lines.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#888" stroke-opacity=".35"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{size:g}</text>')
    return [*lines, f'<text x="{LEFT - 6}" y="12" text-anchor="end">GB</text>']


def _phases(phases: Sequence[str]) -> list[str]:
    """Draw a band of the phases below the curves."""
    step, x, band = WIDTH / len(phases), float(LEFT), []
    for phase, run in groupby(phases):
        width = step * sum(1 for _ in run)
        place = f'x="{x:.1f}" y="{TOP + HEIGHT + 2}" width="{width:.1f}" height="{BAND}"'
        band.append(f'<rect {place} fill="{PHASES[phase]}"><title>{phase}</title></rect>')
        if width > LABEL:
            middle = f'x="{x + width / 2:.1f}" y="{TOP + HEIGHT + 17}" text-anchor="middle"'
            band.append(f'<text {middle} style="fill:#111">{phase}</text>')
        x += width
    return band


def _peak(found: Mapping[str, Any], top: float) -> str:
    x = LEFT + WIDTH * (found["at"] + 0.5) / len(found["phase"])
    side, dx = ("end", -6) if x > LEFT + WIDTH / 2 else ("start", 6)
    text = f"peak {found['peak_bytes'] / GB:.2f} GB"
    line = f'<path d="M{x:.1f} {TOP - 12}V{TOP + HEIGHT}" stroke="#111" stroke-dasharray="2 3"/>'
    return f'{line}<text x="{x + dx:.1f}" y="{TOP - 4}" text-anchor="{side}">{text}</text>'


def _legend(kinds: Sequence[str]) -> list[str]:
    y, parts = TOP + HEIGHT + BAND + 14, []
    for number, kind in enumerate(kinds):
        x = LEFT + number * 92
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{escape(kind)}</text>')
    return parts
