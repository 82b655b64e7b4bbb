"""Compare our training step with the same step under plain `jax.jit`, where the compiler chooses the communication.

    python scripts/measure/compare_jit.py --config quickstart [--stages 0,1,2,3] [--steps 30] [section.key=value]
    python scripts/measure/compare_jit.py --config quickstart [--stages 0,1,2,3] --gpu h100 [--gpus 8] [...]

Three programs with the same model, optimizer, accumulation, clipping, State and shardings of State, per ZeRO stage:

    ours                step.train: one shard_map with explicit collectives
    jit                 only State and batch are annotated; XLA's partitioner does the rest
    jit + constraints   activations are annotated as well, before and after attention and MLP and at the logits, as
                        MaxText does; with parallel.tensor split over tokens there, if parallel.sequence_parallel;
                        with parallel.context tokens are split everywhere; with parallel.pipe stages are (jit_step.py)

The first form runs them in turn, step by step; the second only compiles them, without GPUs. Both first check that the
losses of all three agree in float32, on a small model of the same family, layout and options.

We reduce gradients in precision.grad_reduce; under jit they are reduced in the dtype of the matmuls, precision.compute:
set both to the same dtype for a fair comparison. XLA options are the same for all three.
"""

import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
from bench import on_mesh, random_batch
from jax.sharding import Mesh
from jit_step import jit_step
from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import hlo, matmuls, topology, wire
from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.derived import padded_vocab
from nanotrain_jax.config.load import Parser, at_least, load, refuse
from nanotrain_jax.costs import communication, counts, hardware
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step import build as steps

WARMUP, MIN_STEPS = 3, 30  # warm-up rounds; timed steps: the median of fewer is too noisy
FIGURES = {  # name -> (column, unit, digits); the first three if programs run, the others if they are only compiled
    "step_seconds": ("median ms", 1e-3, 1),
    "step_seconds_min": ("min ms", 1e-3, 1),
    "ratio_to_ours": ("ratio to ours", 1, 3),
    "wire_bytes": ("wire MiB", 2**20, 1),
    "exposed_bytes": ("exposed MiB", 2**20, 1),  # while nothing computes
    "unhidden_bytes": ("unhidden MiB", 2**20, 1),  # while no matmul does
    "matmul_flops": ("matmul GFLOP", 1e9, 1),
    "argument_bytes": ("args MiB", 2**20, 1),
    "temp_bytes": ("temp MiB", 2**20, 1),
    "peak_bytes": ("peak MiB", 2**20, 1),
    "compile_seconds": ("compile s", 1, 1),
}


def programs(config: configs.Config, mesh: Mesh) -> tuple[steps.Step, dict[str, Callable]]:
    """Return our Step, and the three training functions by name."""
    step, jit, constrained = steps.build(config, mesh), jit_step(config, mesh, False), jit_step(config, mesh, True)
    return step, {"ours": step.train, "jit": jit, "jit + constraints": constrained}


def random_batches(config: configs.Config, step: steps.Step) -> dict[str, steps.Tree]:
    """Return a batch of random tokens, placed on the mesh, for each program: ours takes tokens in its own order."""
    own, natural = (random_batch(config, step, order) for order in (step.token_order, None))
    return {"ours": own, "jit": natural, "jit + constraints": natural}


def check(config: configs.Config, updates: int = 3, tolerance: float = 1e-5) -> None:
    """Run the three programs on a small model in float32. Raises ValueError unless their losses agree."""
    mesh = meshes.make(**config.parallel.axes)
    N, devices, rows = config.model.num_heads, mesh.size, mesh.size * config.parallel.microbatches
    vocab = padded_vocab(16 * devices, mesh.shape["tensor"])
    sizes = {"d_model": 8 * N, "d_ff": 16 * devices, "vocab_size": vocab, "max_seq_len": 16}
    config = config.replace("model", attention="xla", **sizes).replace("data", batch_size=2 * rows, seq_len=16)
    config = config.replace("precision", compute="float32", grad_reduce="float32")
    config, losses = config.replace("parallel", persist_below=256), {}  # so that some small arrays are sharded
    with jax.default_matmul_precision("highest"):  # GPUs multiply float32 as TF32 otherwise
        step, trains = programs(config, mesh)
        batches = random_batches(config, step)
        for name, train in trains.items():
            state, losses[name] = step.init(), []
            for _ in range(updates):
                state, metrics, *_ = train(state, batches[name])
                losses[name].append(float(metrics["loss"]))
    if not all(np.allclose(each, losses["ours"], rtol=tolerance, atol=0) for each in losses.values()):
        raise ValueError(
            f"parallel.zero={config.parallel.zero}: the programs compute different losses, so they are not compared: "
            f"first losses {losses} must agree to {tolerance}"
        )


def run(config: configs.Config, mesh: Mesh, count: int) -> list[dict]:
    """Run the three programs in turn, each on its own state; -> a row of figures per program."""
    step, trains = programs(config, mesh)
    batches, names = random_batches(config, step), list(trains)
    trains = {name: train.lower(step.state, step.batch).compile() for name, train in trains.items()}
    states, times, losses = {name: step.init() for name in names}, {name: [] for name in names}, {}
    for i in range(WARMUP + count):
        for name in names[i % 3 :] + names[: i % 3]:  # rotate the order
            started = time.perf_counter()
            states[name], metrics, *_ = jax.block_until_ready(trains[name](states[name], batches[name]))
            times[name].append(time.perf_counter() - started)
            losses[name] = float(metrics["loss"])
    rows = [{"stage": config.parallel.zero, "program": name, "loss": losses[name]} for name in names]
    for row, timed in zip(rows, (times[name][WARMUP:] for name in names), strict=True):
        row |= {"step_seconds": statistics.median(timed), "step_seconds_min": min(timed)}
        row["ratio_to_ours"] = row["step_seconds"] / rows[0]["step_seconds"]
    return rows


def compiled(train: Callable, step: steps.Step, attempts: int = 3) -> tuple[jax.stages.Compiled, float]:
    """Return the compiled program and the seconds it took. Retries if ptxas did not start."""
    started = time.perf_counter()
    try:
        return train.lower(step.state, step.batch).compile(), time.perf_counter() - started
    except jax.errors.JaxRuntimeError as error:
        if attempts == 1 or "Failed to launch ptxas" not in str(error):
            raise
    return compiled(train, step, attempts - 1)


def with_numbered_groups(text: str) -> str:
    """Return compiled text with replica groups by device number; XLA's partitioner writes them as axes of a mesh."""

    def numbered(match: re.Match) -> str:
        axes, dims, order, over = match.groups()
        sizes = [int(size) for size in re.findall(r"=(\d+)", axes)]
        names, over = (re.findall(r"'(\w+)'", part) for part in (axes, over))
        devices = np.arange(np.prod(sizes))
        if dims:  # the mesh has its devices in another order
            dims, order = ([int(n) for n in part.split(",")] for part in (dims, order))
            devices = devices.reshape(dims).transpose(order)
        grouped = sorted(range(len(names)), key=lambda d: names[d] in over)
        size = np.prod([sizes[names.index(axis)] for axis in over])
        groups = devices.reshape(sizes).transpose(grouped).reshape(-1, size)
        return "replica_groups={" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"

    mesh = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{((?:'\w+',?)*)\}"
    text = re.sub(mesh, numbered, text)
    if "replica_groups=mesh" in text:
        raise ValueError("replica groups along parts of axes")
    return text


def audit(config: configs.Config, mesh: Mesh) -> list[dict]:
    """Compile the three programs; -> a row of figures per program. Figures may be None: "notes" say why."""
    step, trains = programs(config, mesh)
    rows = [audit_program(config, mesh, step, name, train) for name, train in trains.items()]
    if all(row["compile_seconds"] is not None for row in rows):
        return rows
    with_xla = audit(config.replace("model", attention="xla"), mesh)
    return rows + [row | {"program": row["program"] + " (xla attention)"} for row in with_xla]


def collectives(text: str, axes: Mapping[str, int], rates: hlo.Rates) -> list[wire.Collective]:
    """`wire.collectives`, also of groups along a part of an axis: XLA's partitioner splits axes into factors."""
    factors = {}
    for axis, size in axes.items():
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        while size > 1:
            prime = min(d for d in divisors if size % d == 0)
            factors[f"{axis} {size}"], size = prime, size // prime
    found = wire.collectives(text, factors, rates)
    return [c._replace(axes=tuple(dict.fromkeys(axis.split()[0] for axis in c.axes))) for c in found]


def audit_program(config: configs.Config, mesh: Mesh, step: steps.Step, name: str, train: Callable) -> dict:
    """Return the row of one program."""
    row = dict.fromkeys(list(FIGURES)[3:]) | {"stage": config.parallel.zero, "program": name, "notes": []}
    try:
        program, row["compile_seconds"] = compiled(train, step)
    except jax.errors.JaxRuntimeError as error:
        if name == "ours" or config.model.attention == "xla":
            raise
        return row | {"notes": [f"compilation failed; see the rows with xla attention: {str(error)[:200]}"]}
    row |= hlo.memory(program)
    try:
        text = with_numbered_groups(program.as_text())
        rates = communication.conditional_rates(config)  # of branches of our pipeline
        moved = row["collectives"] = wire.summary(collectives(text, mesh.shape, rates))
        row["wire_bytes"] = sum(kind["bytes_per_device"] for kind in moved)
        row["exposed_bytes"] = sum(kind["exposed_bytes"] for kind in moved)
        row["unhidden_bytes"] = row["wire_bytes"] - sum(kind["behind_matmuls_bytes"] for kind in moved)
        row["matmul_flops"] = float(matmuls.flops(text, rates))
    except ValueError as error:
        row["notes"] = [f"n/a: {error}"]
    return row


def show(rows: list[dict], title: str) -> Table:
    """Return a table: a row per program (bytes, FLOPs: per device), and per stage ours over the better jit."""
    figures = {key: figure for key, figure in FIGURES.items() if key in rows[0]}

    def cell(value: float | None, unit: float, digits: int) -> str:
        return "n/a" if value is None else f"{value / unit:,.{digits}f}"

    table = Table("stage", "program", *(column for column, _, _ in figures.values()), title=title)
    for first in range(0, len(rows), 3):
        ours, *others = rows[first : first + 3]
        for row in (ours, *others):
            cells = (cell(row[key], unit, digits) for key, (_, unit, digits) in figures.items())
            table.add_row(str(row["stage"]), row["program"], *cells)
        best = {key: min((o[key] for o in others if o[key] is not None), default=None) for key in figures}
        known = {key for key in figures if ours[key] is not None and (best[key] or 0) > figures[key][1] / 20}  # not 0.0
        ratios = (f"{ours[key] / best[key]:.3f}" if key in known else "n/a" for key in figures)
        table.add_row(str(ours["stage"]), "ours / best jit", *ratios, style="bold", end_section=True)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Compare our training step with the same step under plain jax.jit.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages (default: 0,1,2,3)")
    parser.add_argument("--steps", type=at_least(1), default=MIN_STEPS, help=f"timed steps (default: {MIN_STEPS})")
    parser.add_argument("--gpu", help=f"compile only, for this GPU: {', '.join(hardware.GPUS)}")
    parser.add_argument("--gpus", type=int, default=8, help="number of GPUs (default: 8)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    try:
        config, rows, stages = load(asked.config, asked.overrides), [], asked.stages.split(",")
        if not set(stages) <= set("0123"):
            raise ValueError(f"--stages={asked.stages}: stages must be 0 to 3")
        meshes.configure(asked.gpus if asked.gpu else config.runtime.simulate, config.runtime.deterministic)
        try:
            devices = topology.compile_only(asked.gpu, asked.gpus) if asked.gpu else None
        except RuntimeError as error:  # no CUDA compiler
            raise ValueError(str(error)) from None
        config, mesh = on_mesh(config, devices)
        for stage in map(int, stages):
            staged = config.replace("parallel", zero=stage, prefetch=config.parallel.prefetch and stage == 3)
            check(staged)
            rows += audit(staged, mesh) if asked.gpu else run(staged, mesh, asked.steps)
    except (ValueError, OSError) as error:
        return refuse(error)
    about = {"device": mesh.devices.flat[0].device_kind, "devices": mesh.size, "jax": jax.__version__}
    about |= {"parameters": counts.parameters(config.model), "remat": config.memory.remat, **dict(config.precision)}
    title = "{devices} x {device}, jax {jax}, {parameters:,} parameters, {compute}, grads {grad_reduce}, remat {remat}"
    few = f" (noisy: fewer than {MIN_STEPS})" * (asked.steps < MIN_STEPS)
    title = title.format(**about) + (", compiled only" if asked.gpu else f", {asked.steps} steps each{few}")
    Console(width=130).print(show(rows, title))
    for line in (f"stage {r['stage']}, {r['program']}: {note}" for r in rows for note in r.get("notes", ())):
        print(" ".join(line.split()))
    print(json.dumps(about | {"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
