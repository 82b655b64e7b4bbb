"""Scaling efficiency, weak and strong: measured on the devices of this machine, or modelled for thousands of GPUs.

    python scripts/measure/scaling.py --config quickstart runtime.simulate=8     measured on simulated devices
    python scripts/measure/scaling.py --config gpt2_124m runtime.simulate=0      measured on this machine's GPUs
    python scripts/measure/scaling.py --config llama3_8b --gpu h100              modelled for 8 to 4,096 H100s
        [--devices 8,64,512] [--per-device SEQUENCES] [--batch SEQUENCES] [--rounds 5] [--out runs/scaling]
        [section.key=value ...]

Weak scaling: --per-device sequences on each device. Strong scaling: --batch sequences on all. Prints a table of each,
and writes scaling.json and scaling.png to --out.

Measured: axis data grows, the other axes and keys stay as in the config. Simulated devices share the cores of one
machine, so their steps tell nothing about speed: compared is the total work, CPU seconds per sequence. Modelled: the
planner's best layout for each number of GPUs; the assumptions are printed with it (planner/scaling.py).
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import matplotlib.figure
from compare_schedules import measure, prepare
from rich.console import Console
from rich.table import Table

from nanotrain_jax.config.load import Parser, at_least, load, refuse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.data import batches
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner import choice, scaling

GPUS = "8,16,32,64,128,256,512,1024,2048,4096"
TOKENS = 2**22  # of the fixed batch, modelled
MODELLED, SIMULATED, ON_GPUS = "modelled", "measured on simulated devices", "measured on GPUs"
SHARED = "all devices share this machine's cores: total work only, CPU seconds per sequence, nothing about speed"
Row = dict[str, Any]
Case = tuple[Config, jax.sharding.Mesh]


def sizes_of(asked: argparse.Namespace, config: Config, default: str, batch: int) -> dict[str, list[tuple[int, int]]]:
    """Return (devices, sequences) of weak and strong scaling. Raises ValueError."""
    try:
        devices = sorted({int(text) for text in (asked.devices or default).split(",")})
    except ValueError:
        raise ValueError(f"--devices={asked.devices}: must be numbers; write e.g. --devices 8,64,512") from None
    mesh_size = math.prod(size for size in config.parallel.axes.values() if size > 0)
    per_device = asked.per_device or max(config.data.batch_size // mesh_size, 1)
    if devices[0] < 1:
        raise ValueError(f"--devices={devices[0]}: must be at least 1")
    return {"weak": [(n, per_device * n) for n in devices], "strong": [(n, asked.batch or batch) for n in devices]}


def modelled(asked: argparse.Namespace, config: Config) -> dict[str, list[Row]]:
    """Return the rows of weak and strong scaling by the planner. Raises ValueError."""
    choice.check_supported(config, chooses=True)
    sizes = sizes_of(asked, config, GPUS, max(TOKENS // config.data.seq_len, 1))
    neutral = choice.neutral(config, choice.vocabulary(config))
    rows = {}
    for kind, pairs in sizes.items():
        found = scaling.points(neutral, asked.gpu, pairs)
        base = scaling.base_of(found)
        rows[kind] = [of_point(point, base) for point in found]
    return rows


def of_point(point: scaling.Point, base: scaling.Point) -> Row:
    """Return the row of a number of GPUs; without a layout only its sizes."""
    row = {"devices": point.gpus, "batch": point.batch, "layout": point.layout or "does not fit"}
    if not point.layout:
        return row
    figures = {"step_seconds": point.step_seconds, "mfu": point.mfu, "seconds": point.seconds}
    return row | figures | {"efficiency": scaling.efficiency(point, base), "losses": scaling.losses(point, base)}


def measured(asked: argparse.Namespace, config: Config) -> dict[str, list[Row]]:
    """Time the steps of weak and strong scaling on the first devices of this machine. Raises ValueError or OSError."""
    meshes.configure(config.runtime.simulate, config.runtime.deterministic)
    others = math.prod(other_axes(config).values())
    doubled = (others * 2**k for k in range(32))
    default = ",".join(str(n) for n in doubled if n <= max(len(jax.devices()), others))
    vocab = None if config.model.vocab_size else batches.load(config.data).vocab_size
    cases = []
    for kind, pairs in sizes_of(asked, config, default, config.data.batch_size).items():
        cases += [(kind, devices, scaled(config, devices, batch, others, vocab)) for devices, batch in pairs]
    times = (take_turns if config.runtime.simulate else one_by_one)([case for _, _, case in cases], asked.rounds)
    rows: dict[str, list[Row]] = {"weak": [], "strong": []}
    for (kind, devices, (case, _)), steps in zip(cases, times, strict=True):
        wall, cpu = (statistics.median(seconds) for seconds in zip(*steps, strict=True))
        row = {"devices": devices, "batch": case.data.batch_size, "step_seconds": wall, "cpu_seconds": cpu}
        work = cpu if config.runtime.simulate else wall * devices
        rows[kind].append(row | {"work": work / case.data.batch_size})
        rows[kind][-1]["efficiency"] = rows[kind][0]["work"] / rows[kind][-1]["work"]
    return rows


def other_axes(config: Config) -> dict[str, int]:
    """Return the sizes of all axes but data. Raises ValueError."""
    others = {axis: size for axis, size in config.parallel.axes.items() if axis != "data"}
    for axis, size in others.items():
        if size < 1:
            raise ValueError(f"parallel.{axis}={size}: only the data axis grows with the devices; give a size")
    return others


def scaled(config: Config, devices: int, batch: int, others: int, vocab: int | None) -> Case:
    """Return the resolved config and the mesh on a number of devices. others: their product of all axes but data."""
    if devices % others:
        raise ValueError(f"--devices={devices}: must be a multiple of {others}, the axes of the config other than data")
    axes = config.parallel.axes | {"data": devices // others}
    mesh = meshes.make(**axes)
    return resolve(config.replace("data", batch_size=batch), mesh.shape, vocab), mesh


def take_turns(cases: list[Case], rounds: int) -> list[list[tuple[float, float]]]:
    """Return wall-clock and CPU seconds of the steps of each case: a slow moment of the machine slows all."""
    return measure([prepare(*case)[0] for case in cases], rounds)


def one_by_one(cases: list[Case], rounds: int) -> list[list[tuple[float, float]]]:
    """Return the same, with one state in memory at a time."""
    return [measure([prepare(*case)[0]], rounds)[0] for case in cases]


def marked(row: Row) -> str:
    """Format an efficiency, with a mark where it is good."""
    return f"{row['efficiency']:.1%} {'yes' if row['efficiency'] >= scaling.GOOD else 'no'}"


def rest(row: Row) -> str:
    """Say which parts of the step take most of the lost efficiency."""
    return ", ".join(f"{part} {lost:.1%}" for part, lost in row["losses"].items() if lost >= 0.005) or "-"


def show_modelled(kind: str, rows: list[Row]) -> Table:
    """Return the table of modelled weak or strong scaling."""
    table = Table("devices", "sequences", "layout", "s per step", "MFU", title=f"{kind} scaling, {MODELLED}")
    for column in f"efficiency, >= {scaling.GOOD:.0%}", "lost to":
        table.add_column(column)
    for row in rows:
        cells = [f"{row['devices']:,}", f"{row['batch']:,}", row["layout"]]
        if "efficiency" in row:
            cells += [f"{row['step_seconds']:.3f}", f"{row['mfu']:.1%}", marked(row), rest(row)]
        table.add_row(*cells)
    return table


def show_measured(kind: str, rows: list[Row], way: str) -> Table:
    """Return the table of measured weak or strong scaling."""
    is_work = way == SIMULATED
    compared = "work per sequence of the first over this" if is_work else "efficiency"
    table = Table("devices", "sequences", title=f"{kind} scaling, {way}")
    columns = "ms per step", "CPU ms" if is_work else "sequences/s per device"
    for column in (*columns, f"{compared}, >= {scaling.GOOD:.0%}"):
        table.add_column(column, justify="right")
    for row in rows:
        rate = row["batch"] / row["step_seconds"] / row["devices"]
        second = f"{row['cpu_seconds'] * 1e3:,.1f}" if is_work else f"{rate:,.2f}"
        cells = f"{row['devices']:,}", f"{row['batch']:,}", f"{row['step_seconds'] * 1e3:,.1f}"
        table.add_row(*cells, second, marked(row))
    return table


def draw(rows: dict[str, list[Row]], title: str, path: Path) -> None:
    """Draw the efficiency over devices; of modelled steps also the shares of their parts."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.5), layout="constrained")
    for axes, (kind, of_kind) in zip(figure.subplots(1, 2, sharey=True), rows.items(), strict=True):
        fitting = [row for row in of_kind if "efficiency" in row]
        names = [f"{row['devices']:,}" for row in fitting]
        bottom = [0.0] * len(fitting)
        for part in dict.fromkeys(part for row in fitting for part in row.get("seconds", {})):
            shares = [row["seconds"].get(part, 0.0) / row["step_seconds"] for row in fitting]
            axes.bar(names, shares, bottom=bottom, label=part, alpha=0.6)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
        axes.plot(names, [row["efficiency"] for row in fitting], "k.-", label="efficiency")
        axes.axhline(scaling.GOOD, color="gray", linestyle="--", linewidth=1)
        axes.set(title=f"{kind} scaling", xlabel="devices")
        axes.tick_params(axis="x", rotation=45)
    axes.legend(fontsize="small", loc="lower left")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> int:
    """Print the tables, and write the files; -> 2 if the request is wrong."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpu", help="model this GPU instead of measuring: h100, ..., or a YAML file as for plan")
    parser.add_argument("--devices", help=f"numbers of devices (default: powers of 2; modelled: {GPUS})")
    parser.add_argument("--per-device", type=at_least(1), help="sequences per device, weak scaling; default: config")
    parser.add_argument(
        "--batch",
        type=at_least(1),
        help=f"sequences, strong scaling; default: config, or {TOKENS:,} tokens modelled",
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds of 3 steps each, measured (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), help="folder of scaling.json and scaling.png")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    console = Console(width=140)
    try:
        config = load(asked.config, asked.overrides)
        asked.gpu = asked.gpu and choice.kind_of_gpu(asked.gpu, config)
        way = MODELLED if asked.gpu else SIMULATED if config.runtime.simulate else ON_GPUS
        gpus = [] if way != ON_GPUS else [device for device in jax.devices() if device.platform == "gpu"]
        if way == ON_GPUS and len(gpus) < 2:
            print(f"{way}: nothing, as this machine has {len(gpus)} GPUs; use one with several, or --gpu h100 to model")
            return 0
        rows = modelled(asked, config) if asked.gpu else measured(asked, config)
        asked.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        return refuse(error)
    for kind, of_kind in rows.items():
        console.print(show_modelled(kind, of_kind) if asked.gpu else show_measured(kind, of_kind, way))
    rests_on = scaling.assumptions(asked.gpu) if asked.gpu else []
    for line in rests_on:
        console.print("  ".join(line), markup=False, soft_wrap=True)
    if way == SIMULATED:
        console.print(SHARED)
    title = f"{Path(asked.config).stem}: {way}{f', {asked.gpu}' if asked.gpu else ''}"
    draw(rows, title, asked.out / "scaling.png")
    (asked.out / "scaling.json").write_text(json.dumps({"way": way, "assumptions": rests_on, **rows}, indent=1) + "\n")
    console.print(f"wrote {asked.out}/scaling.json and scaling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
