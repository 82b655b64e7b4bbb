"""Gantt charts of pipeline schedules, with matplotlib. Needs no device."""

import itertools

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from nanotrain_jax.parallel.pipeline.schedule import Schedule
from nanotrain_jax.parallel.pipeline.schedule_text import Time

COLORS = {"F": "#2f6db3", "B": "#f0a030", "W": "#2f9078"}  # distinguishable with color blindness, and in grayscale
BUBBLE, LINES, INK, PALE = "#ececec", "#ffffff", "#222222", "#777777"
Costs = tuple[Time, Time, Time]  # of F, dX and W of a microbatch, through all chunks of a stage


def bars(schedule: Schedule, costs: Costs) -> tuple[list[tuple[str, int, int, float, float]], list[float]]:
    """-> (kind, unit, stage, begin, length) of all work; the times at which ticks begin and end."""
    F, dX, W = (cost / schedule.chunks for cost in costs)
    price = {"F": F, "B": dX if schedule.weight.size else dX + W, "W": W}
    work_bars = []
    borders = [0 * F]
    for t in range(schedule.ticks):
        ends = []
        for s in range(schedule.stages):
            work = schedule.work(t, s)
            *begins, end = itertools.accumulate((price[kind] for kind, _ in work), initial=borders[-1])
            timed = zip(work, begins, strict=True)
            work_bars += [(kind, unit, s, float(begin), float(price[kind])) for (kind, unit), begin in timed]
            ends.append(end)
        borders.append(max(ends))
    return work_bars, [float(border) for border in borders]


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the color of a kind of work; later chunks are paler."""
    pale = 0.6 * chunk / max(chunks - 1, 1)
    r, g, b = (c + (1 - c) * pale for c in to_rgb(COLORS[kind]))
    return r, g, b


def picture(schedule: Schedule, costs: Costs, title: str = "", widest: float = 24) -> Figure:
    """Draw a row for each stage over time, a tick as wide as its busiest stage. widest: maximum width in inches."""
    work, borders = bars(schedule, costs)
    P, M, C, end = schedule.stages, schedule.microbatches, schedule.chunks, borders[-1]
    time = "time, where F, dX and W take {:.4g}, {:.4g} and {:.4g}".format(*map(float, costs))
    width = min(max(0.24 * end * C / float(min(costs)), 7), widest)
    figure = Figure(figsize=(width + 0.9, 0.44 * P + 1.6), layout="constrained")
    ax = figure.add_subplot()
    ax.set(xlim=(0, end), ylim=(P - 0.5, -0.5), xlabel=time)
    ax.set_yticks(range(P), [f"stage {s}" for s in range(P)])

    for s in range(P):
        ax.add_patch(Rectangle((0, s - 0.42), end, 0.84, color=BUBBLE, linewidth=0, zorder=0))
    inch = width / end
    edge = min(0.8, 4 * inch * min(length for *_, length in work))
    for kind, unit, s, begin, length in work:
        chunk, microbatch = divmod(unit, M)
        color = shade(kind, chunk, C)
        style = {"facecolor": color, "edgecolor": LINES, "linewidth": edge, "zorder": 2}
        ax.add_patch(Rectangle((begin, s - 0.42), length, 0.84, **style))
        size = min(9.5, 72 * 0.85 * length * inch / (0.64 * len(str(M - 1))))
        if size >= 3:
            dark = sum(c * w for c, w in zip(color, (0.3, 0.59, 0.11), strict=True)) < 0.53
            place = {"ha": "center", "va": "center_baseline", "fontsize": size, "zorder": 4}
            ax.text(begin + length / 2, s, str(microbatch), color="white" if dark else INK, **place)

    ax.vlines(borders[1:-1], -0.5, P - 0.5, color="#bbbbbb", linewidth=0.6 * edge, zorder=3)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(borders)]
    room = (0.08 * len(str(schedule.ticks)) + 0.04) / inch  # for a number
    narrowest = min(b - a for a, b in itertools.pairwise(borders) if b > a)
    step = next((n for n in (1, 2, 5, 10, 20, 50, 100) if n * narrowest > room), schedule.ticks)
    top = ax.secondary_xaxis("top")
    top.set_ticks(middles[::step], [str(t) for t in range(0, schedule.ticks, step)])
    top.set_xlabel("tick", loc="left", fontsize=8, color=PALE)
    top.tick_params(length=0, labelsize=8, labelcolor=PALE)
    ax.tick_params(axis="x", labelsize=8, length=3, color=PALE)
    ax.tick_params(axis="y", labelsize=9, length=0)
    for spine in (*ax.spines.values(), *top.spines.values()):
        spine.set_visible(False)

    if schedule.weight.size:
        names = {"F": "F, forward", "B": "B, gradient of the input", "W": "W, gradients of the weights"}
    else:
        names = {"F": "F, forward", "B": "B, backward"}
    if C > 1:
        letters = f"a {'and' if C == 2 else 'to'} {chr(ord('a') + C - 1)}"
        names = {kind: f"{name}, chunks {letters}" for kind, name in names.items()}
    keys = [tuple(Patch(color=shade(kind, c, C)) for c in range(C)) for kind in names]
    figure.legend(
        [*keys, (Patch(color=BUBBLE),)],
        [*names.values(), "bubble"],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure
