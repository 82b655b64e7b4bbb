"""Time every kernel of a config's step on a GPU, beside the bytes that the audit says it moves.

    python scripts/gpu/kernel_times.py --config FILE [--steps 5] [--out FOLDER] [section.key=value ...]

Prints, by line of source and phase, milliseconds, GB and GB/s per step, and for how long no kernel runs. CUDA graphs
are off in the profiled program: inside of them the profiler does not say which instruction of the program a kernel is
of. --out: also the program's text, and figures of each kernel as JSON.
"""

import gzip
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

sys.path.extend(str(Path(__file__).parents[2] / name) for name in (".", "scripts/measure"))  # need not be installed
import bench

from nanotrain_jax.audit import hlo, traffic
from nanotrain_jax.config.load import Parser, at_least, load, refuse
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import communication
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner import hbm
from nanotrain_jax.run import profile_summary as profiles
from nanotrain_jax.step import build as steps

NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
WARMUP = 3
SHOWN = 24  # lines of a table


class Timed(NamedTuple):
    """A kernel of the program, or all executions of the kernels of a line."""

    source: str
    phase: str  # forward, backward
    opcode: str
    seconds: float  # per step
    bytes: float  # per step
    count: float  # executions per step


def profiled(config: Config, count: int) -> tuple[str, profiles.Trace]:
    """Run the step of a config -> the text of the compiled program, and the trace of count steps."""
    meshes.configure(config.runtime.simulate, config.runtime.deterministic)
    config, mesh = bench.on_mesh(config)
    step = steps.build(config, mesh)
    state, batch = step.init(), bench.random_batch(config, step)
    options = {} if config.runtime.simulate else NO_GRAPHS
    train = step.train.lower(step.state, step.batch).compile(compiler_options=options)
    for _ in range(WARMUP):
        state, *_ = jax.block_until_ready(train(state, batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for k in range(count):
                with jax.profiler.StepTraceAnnotation(profiles.STEP, step_num=k):
                    state, metrics, _ = train(state, batch)
                    if k == count - 1:
                        jax.block_until_ready((state, metrics))
        xplane = next(Path(folder).rglob("*.xplane.pb"))
        return train.as_text(), profiles.read(xplane)


def timed(text: str, trace: profiles.Trace, config: Config) -> dict[str, Timed]:
    """Return the kernels of the program by name, and those that only the trace knows. Times are means over steps."""
    devices = len({o.device for o in trace.operations}) or 1
    runs = len(trace.steps) * devices
    seconds, counts = Counter(), Counter()
    for o in trace.operations:
        seconds[o.name] += (o.end - o.start) / 1e9 / runs
        counts[o.name] += 1 / runs
    found = {kernel.name: kernel for kernel in traffic.kernels(text, communication.conditional_rates(config))}
    kernel_of = fused_in(text)
    out = {}
    for name, time in seconds.most_common():
        kernel = found.get(name) or found.get(kernel_of.get(name, ""))
        if kernel is None:
            out[name] = Timed("not in the program", "", "", time, 0.0, counts[name])
        else:
            phase = "backward" if "transpose(" in kernel.op_name else "forward"
            moved = kernel.bytes * counts[name]
            out[name] = Timed(hbm.source(kernel.stack), phase, kernel.opcode, time, moved, counts[name])
    return out


def fused_in(text: str) -> dict[str, str]:
    """Return, by name, the instruction that an instruction is fused in: matmuls with the slices that they read."""
    blocks = hlo.parse(text).computations
    calls = ((i.name, name) for block in blocks.values() for i in block for name in traffic.FUSED.findall(i.attributes))
    return {inner.name: outer for outer, name in calls for inner in blocks[name]}


def by_line(kernels: dict[str, Timed]) -> list[Timed]:
    """Return the kernels of a line and phase together, the longest first."""
    sums: dict[tuple[str, str, str], list[Timed]] = {}
    for kernel in kernels.values():
        sums.setdefault((kernel.source, kernel.phase, kernel.opcode), []).append(kernel)
    rows = [
        Timed(*line, sum(k.seconds for k in each), sum(k.bytes for k in each), sum(k.count for k in each))
        for line, each in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def table(rows: list[Timed], title: str) -> Table:
    """Return rows as a table."""
    out = Table(title=title)
    for column in ("source", "phase", "opcode", "ms", "GB", "GB/s", "kernels"):
        out.add_column(column)
    for row in rows:
        rate = f"{row.bytes / row.seconds / 1e9:,.0f}" if row.bytes and row.seconds else ""
        out.add_row(*row[:3], f"{row.seconds * 1e3:.3f}", f"{row.bytes / 1e9:.2f}", rate, f"{row.count:,.0f}")
    return out


def totals(kernels: dict[str, Timed], trace: profiles.Trace) -> dict[str, float]:
    """Return seconds and bytes per step, and for how long a device runs no kernel."""
    window = trace.steps[-1][1] - trace.steps[0][0]
    devices = {o.device for o in trace.operations} or {""}
    spans = [[(o.start, o.end) for o in trace.operations if o.device == device] for device in devices]
    busy = sum(map(profiles.length, spans)) / len(devices)
    count = len(trace.steps)
    return {
        "step_seconds": window / count / 1e9,
        "idle_seconds": (window - busy) / count / 1e9,
        "kernel_seconds": sum(k.seconds for k in kernels.values()),
        "bytes": sum(k.bytes for k in kernels.values()),
        "kernels": sum(k.count for k in kernels.values()),
    }


def measure(config: Config, count: int, out: Path | None = None) -> dict[str, Any]:
    """Return totals, and rows by line of source. out: folder for the program's text and each kernel."""
    text, trace = profiled(config, count)
    kernels = timed(text, trace, config)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "step.hlo.gz").write_bytes(gzip.compress(text.encode()))
        rows = {key: kernel._asdict() for key, kernel in kernels.items()}
        (out / "step.json").write_text(json.dumps(rows, indent=0))
    return totals(kernels, trace) | {"rows": [row._asdict() for row in by_line(kernels)]}


def main(argv: list[str] | None = None) -> int:
    """Print the tables; -> 2 if the request is wrong."""
    parser = Parser(description="Time every kernel of a step beside the bytes that it moves.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=at_least(1), default=5, help="profiled steps (default: 5)")
    parser.add_argument("--out", type=Path, help="folder for the program's text and figures of each kernel")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args(argv)
    try:
        figures = measure(load(asked.config, asked.overrides), asked.steps, asked.out)
    except (ValueError, OSError) as error:
        return refuse(error)
    rows = [Timed(**row) for row in figures.pop("rows")]
    Console(width=150).print(table(rows[:SHOWN], f"{len(rows)} lines of source, per step"))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
