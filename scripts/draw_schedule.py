"""Draw a pipeline schedule: as text, in a few numbers, and as a picture (PNG and SVG). No device is needed.

    python scripts/draw_schedule.py --schedule zero_bubble --stages 4 --microbatches 8
                                    [--chunks 1] [--costs 1,1.3,0.9] [--out DIR]
    python scripts/draw_schedule.py --text mine.txt [--costs 1,1.3,0.9] [--out DIR]

Writes DIR/<schedule>_p4_m8.png and .svg. With --text, the table is one's own, in the form that is printed: a row for
each stage, a column for each tick, e.g. F2B0, B3W3 or . for none; it must be in order. Costs are those of F (forward),
dX (gradient of the input) and W (gradients of the weights) of a microbatch, through all chunks of a stage.
"""

import argparse
import itertools
import sys
from fractions import Fraction
from pathlib import Path

import matplotlib
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from nanotrain_jax.parallel import chart
from nanotrain_jax.parallel import schedule as schedules
from nanotrain_jax.parallel.chart import Stats
from nanotrain_jax.parallel.schedule import IDLE, Schedule

COLORS = {"F": "#2f6db3", "B": "#f0a030", "W": "#2f9078"}  # told apart by the colour-blind, and in grey
WAITS, LINES, INK, PALE = "#ececec", "#ffffff", "#222222", "#777777"
Costs = tuple[Fraction, Fraction, Fraction]


def read_costs(text: str) -> Costs:
    """'1,1.3,0.9' -> exact F, dX, W. Raises ValueError unless they are three positive numbers."""
    try:
        F, dX, W = map(Fraction, text.split(","))
        if min(F, dX, W) > 0:
            return F, dX, W
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(f"costs={text!r} are not three positive numbers F,dX,W; write e.g. 1,1.3,0.9")


def bars(schedule: Schedule, costs: Costs) -> tuple[list[tuple[str, int, int, float, float]], list[float]]:
    """-> (kind, unit, stage, begin, length) of all work, and the borders of ticks."""
    split, C = schedule.weight.size > 0, schedule.chunks
    F, dX, W = (cost / C for cost in costs)
    price = {"F": F, "B": dX if split else dX + W, "W": W}
    found, borders = [], [Fraction(0)]
    for t in range(schedule.ticks):
        ends = [borders[-1]]
        for s in range(schedule.stages):
            now = borders[-1]
            work = [("F", schedule.forward[t, s]), ("B", schedule.backward[t, s])]
            work += [("W", unit) for unit in schedule.weight[t, s]]
            for kind, unit in work:
                if unit != IDLE:
                    found.append((kind, int(unit), s, float(now), float(price[kind])))
                    now += price[kind]
            ends.append(now)
        borders.append(max(ends))
    return found, [float(b) for b in borders]


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a kind of work; later chunks are paler."""
    pale = 0.6 * chunk / max(chunks - 1, 1)
    r, g, b = (c + (1 - c) * pale for c in to_rgb(COLORS[kind]))
    return r, g, b


def picture(schedule: Schedule, costs: Costs, title: str, stats: Stats) -> Figure:
    """A row for each stage; time to the right, a tick as wide as its busiest stage."""
    work, borders = bars(schedule, costs)
    P, M, C, end = schedule.stages, schedule.microbatches, schedule.chunks, borders[-1]
    time = "time, where F, dX and W take {:.4g}, {:.4g} and {:.4g}".format(*map(float, costs))
    width = min(max(0.24 * end * C / float(min(costs)), 7), 24)  # inches
    figure = Figure(figsize=(width + 0.9, 0.44 * P + 1.6), layout="constrained")
    ax = figure.add_subplot()
    ax.set(xlim=(0, end), ylim=(P - 0.5, -0.5), xlabel=time)
    ax.set_yticks(range(P), [f"stage {s}" for s in range(P)])

    for s in range(P):
        ax.add_patch(Rectangle((0, s - 0.42), end, 0.84, color=WAITS, linewidth=0, zorder=0))
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
        [*keys, (Patch(color=WAITS),)],
        [*names.values(), "bubble"],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
    figure.suptitle(f"{title}: {stats.bubble_fraction:.1%} of the time is bubble", fontsize=12, fontweight="bold")
    return figure


def words(stats: Stats, schedule: Schedule, costs: Costs) -> str:
    """What the schedule costs, a line each."""
    work, number = schedule.microbatches * sum(costs), lambda x: f"{float(x):.6g}"
    of_chunk = " of one chunk" if schedule.chunks > 1 else ""
    slots = ", ".join(f"{name} {count}" for name, count in stats.slots.items() if count)
    lines = {
        "ticks": f"{stats.ticks}",
        "time": f"{number(stats.time)}, of which a stage works {number(work)}",
        "bubble": f"{number(stats.bubble)} at most between the first and the last work of a stage; "
        f"{stats.bubble_fraction:.1%} of the time of all stages",
        "in flight": f"{' '.join(map(str, stats.in_flight))} microbatches{of_chunk} on stage 0, 1, ...",
        "slots": slots,
        "masked": f"{stats.masked:.3g} times the work, if stages compute in idle slots too",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a pipeline schedule.")
    parser.add_argument("--schedule", help=", ".join(schedules.SCHEDULES))
    parser.add_argument("--stages", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--chunks", type=int, default=1, help="chunks of layers per stage (default: 1)")
    parser.add_argument("--text", help="a file with a drawn table, instead of a schedule")
    parser.add_argument("--costs", default="1,1,1", help="times of F, dX and W (default: 1,1,1)")
    parser.add_argument("--out", default=".", help="folder of the pictures (default: .)")
    arguments = parser.parse_args(argv)
    try:
        if bool(arguments.schedule) == bool(arguments.text):
            raise ValueError("give --schedule, or a table with --text" + (", not both" if arguments.text else ""))
        costs = read_costs(arguments.costs)
        if arguments.text:
            name, schedule = Path(arguments.text).stem, chart.parse(Path(arguments.text).read_text())
        elif arguments.stages is None or arguments.microbatches is None:
            raise ValueError("--schedule needs --stages and --microbatches")
        else:
            name = arguments.schedule
            schedule = schedules.make(name, arguments.stages, arguments.microbatches, arguments.chunks)
        chart.validate(schedule)
        stats = chart.stats(schedule, *costs)

        P, M, C = schedule.stages, schedule.microbatches, schedule.chunks
        title = f"{name}, {P} stages, {M} microbatches" + (f", {C} chunks" if C > 1 else "")
        figure = picture(schedule, costs, title, stats)
        stem = Path(arguments.out, f"{name}_p{P}_m{M}" + (f"_c{C}" if C > 1 else ""))
        stem.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # text stays text; same file again
            figure.savefig(f"{stem}.png", dpi=160)
            figure.savefig(f"{stem}.svg", metadata={"Date": None})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(chart.draw(schedule))
    print(f"\n{words(stats, schedule, costs)}\n\n{stem}.png and .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
