"""Draw a pipeline schedule as text and as a Gantt chart (PNG and SVG), with its statistics. Needs no device.

    python scripts/draw/draw_schedule.py --schedule zero_bubble --stages 4 --microbatches 8
                                    [--chunks 1] [--costs 1,1.3,0.9] [--out DIR]
    python scripts/draw/draw_schedule.py --text mine.txt [--costs 1,1.3,0.9] [--out DIR]

Writes DIR/<schedule>_p4_m8.png and .svg. --text reads a schedule of your own in the printed form: a row per stage, a
column per tick, e.g. F2B0, B3W3, or . for idle; dependencies must be in order. --costs: times of F (forward), dX
(gradient of the input) and W (gradients of the weights) of a microbatch, through all chunks of a stage.
"""

import sys
from fractions import Fraction
from pathlib import Path

import matplotlib

from nanotrain_jax.config.load import Parser
from nanotrain_jax.parallel.pipeline import gantt, schedule_text
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline.schedule import Schedule
from nanotrain_jax.parallel.pipeline.schedule_text import Stats

Costs = tuple[Fraction, Fraction, Fraction]


def read_costs(text: str) -> Costs:
    """Parse '1,1.3,0.9' into exact F, dX, W. Raises ValueError unless they are three positive numbers."""
    try:
        F, dX, W = map(Fraction, text.split(","))
        if min(F, dX, W) > 0:
            return F, dX, W
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(f"--costs={text}: must be three positive numbers F,dX,W; use e.g. 1,1.3,0.9")


def describe(stats: Stats, schedule: Schedule, costs: Costs) -> str:
    """Return the statistics of a schedule, a line each."""
    work = float(schedule.microbatches * sum(costs))
    of_chunk = " of one chunk" if schedule.chunks > 1 else ""
    slots = ", ".join(f"{name} {count}" for name, count in stats.slots.items() if count)
    lines = {
        "ticks": f"{stats.ticks}",
        "time": f"{float(stats.time):.6g}, of which each stage computes {work:.6g}",
        "bubble": f"{float(stats.bubble):.6g} at most between the first and last work of a stage; "
        f"{stats.bubble_fraction:.1%} of the time of all stages",
        "in flight": f"{' '.join(map(str, stats.in_flight))} microbatches{of_chunk} on stage 0, 1, ...",
        "slots": slots,
        "masked": f"{stats.masked:.3g} times the work, if idle slots are masked",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def main(argv: list[str] | None = None) -> int:
    """Print and save a schedule; -> 2 if the request is wrong."""
    parser = Parser(description="Draw a pipeline schedule.")
    parser.add_argument("--schedule", help=", ".join(schedules.SCHEDULES))
    parser.add_argument("--stages", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--chunks", type=int, default=1, help="chunks of layers per stage (default: 1)")
    parser.add_argument("--text", help="file with a schedule as text, instead of --schedule")
    parser.add_argument("--costs", default="1,1,1", help="times of F, dX and W (default: 1,1,1)")
    parser.add_argument("--out", default=".", help="output folder (default: .)")
    arguments = parser.parse_args(argv)
    try:
        if bool(arguments.schedule) == bool(arguments.text):
            raise ValueError("give --schedule or --text" + (", not both" if arguments.text else ""))
        costs = read_costs(arguments.costs)
        if arguments.text:
            name, schedule = Path(arguments.text).stem, schedule_text.parse(Path(arguments.text).read_text())
        elif arguments.stages is None or arguments.microbatches is None:
            raise ValueError("--schedule needs --stages and --microbatches")
        else:
            name = arguments.schedule
            schedule = schedules.make(name, arguments.stages, arguments.microbatches, arguments.chunks)
        schedule_text.validate(schedule)
        stats = schedule_text.stats(schedule, *costs)

        P, M, C = schedule.stages, schedule.microbatches, schedule.chunks
        title = f"{name}, {P} stages, {M} microbatches" + (f", {C} chunks" if C > 1 else "")
        figure = gantt.picture(schedule, costs, f"{title}: {stats.bubble_fraction:.1%} of the time is bubble")
        stem = Path(arguments.out, f"{name}_p{P}_m{M}" + (f"_c{C}" if C > 1 else ""))
        stem.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # text as text; reproducible
            figure.savefig(f"{stem}.png", dpi=160)
            figure.savefig(f"{stem}.svg", metadata={"Date": None})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # of a text with the place marked in a second line
        return 2
    print(schedule_text.draw(schedule))
    print(f"\n{describe(stats, schedule, costs)}\n\n{stem}.png and .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
