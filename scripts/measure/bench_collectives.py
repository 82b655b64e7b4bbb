"""Time collectives and the all-reduce algorithms of gradients/all_reduce.py: a table, a picture, one JSON line.

    python scripts/measure/bench_collectives.py [--simulate 8] [--sizes 4K,1M,64M] [--rounds 5] [--picture FILE]
    python scripts/measure/bench_collectives.py --gpu h100 --gpus 8     compile for GPUs: steps and bytes only

Bandwidths as nccl-tests defines them, from S, the bytes of the summed (gathered, scattered) array on a device:
algorithm S / t; bus S / t x (N-1)/N, twice that for all-reduce. Operations take turns, so that a slow moment of the
machine slows all. On simulated devices times compare total work on this machine, not networks.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import topology, wire
from nanotrain_jax.config.load import Parser, at_least, refuse
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.collectives import all_gather, all_to_all, reduce_scatter
from nanotrain_jax.parallel.gradients import all_reduce

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
AXIS = "data"
Row = dict[str, Any]


def _gather(x: jax.Array) -> jax.Array:
    N = lax.axis_size(AXIS)
    return all_gather([x[: len(x) // N]], AXIS, [0])[0]


def _exchange(x: jax.Array) -> jax.Array:
    return all_to_all(x.reshape(lax.axis_size(AXIS), -1), AXIS, 0, 0)


OPERATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "psum": partial(lax.psum, axis_name=AXIS),
    **{name: partial(function, axis=AXIS) for name, function in all_reduce.ALGORITHMS.items()},
    "reduce_scatter": lambda x: reduce_scatter([x], AXIS, [0])[0],
    "all_gather": _gather,
    "all_to_all": _exchange,
}


def size_of(text: str) -> int:
    """Return bytes: 4K, 1M, 2G or a number. Raises ValueError."""
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdigit() or int(number) < 1:
        raise ValueError(f"--sizes={text}: use a number of bytes, with K, M or G")
    return int(number) * unit


def compiled(name: str, size: int, mesh: jax.sharding.Mesh) -> tuple[Callable, jax.ShapeDtypeStruct]:
    """Compile an operation on `size` float32 bytes per device, rounded up to whole parts -> program, type of x."""
    N = mesh.shape[AXIS]
    elements = -(-size // (4 * N * N)) * N * N

    def run(x_NS: jax.Array) -> jax.Array:
        return OPERATIONS[name](x_NS[0])[None]

    sharded = P(None) if name == "psum" else P(AXIS)
    over = jax.shard_map(run, mesh=mesh, in_specs=P(AXIS), out_specs=sharded, check_vma=True)
    x = jax.ShapeDtypeStruct((N, elements), jnp.float32, sharding=NamedSharding(mesh, P(AXIS)))
    return jax.jit(over).lower(x).compile(), x


def figures(name: str, program: jax.stages.Compiled, x: jax.ShapeDtypeStruct, N: int) -> Row:
    """Return steps (collectives one after another) and wire bytes per device of the compiled program."""
    found = wire.collectives(program.as_text(), {AXIS: N})
    return {
        "operation": name,
        "bytes": x.size * x.dtype.itemsize // N,
        "steps": int(sum(c.count for c in found)) // (2 if name == "two_rings" else 1),
        "wire_bytes": float(sum(c.count * c.bytes for c in found)),
    }


def measure(programs: list[tuple[Callable, jax.Array]], rounds: int) -> list[float]:
    """Return the median seconds of each program, which take turns; the first turn does not count.

    On GPUs several executions are in flight, so that the time is not that of a launch from the host.
    """
    in_flight = 20 if jax.devices()[0].platform == "gpu" else 1  # XLA:CPU aborts with many
    times: list[list[float]] = [[] for _ in programs]
    for turn in range(rounds + 1):
        for i in (np.arange(len(programs)) + turn) % len(programs):
            program, x = programs[i]
            times[i].append(seconds_of(program, x, in_flight))
    return [statistics.median(seconds[1:]) for seconds in times]


def seconds_of(program: Callable, x: jax.Array, in_flight: int) -> float:
    """Return the seconds of one execution of a program, of several in flight."""
    started = time.perf_counter()
    for _ in range(in_flight):
        last = program(x)
    jax.block_until_ready(last)
    return (time.perf_counter() - started) / in_flight


def with_bandwidths(row: Row, seconds: float, N: int) -> Row:
    """Add time and bandwidths to a row."""
    is_half = row["operation"] in ("reduce_scatter", "all_gather", "all_to_all")
    bandwidth = row["bytes"] / seconds
    bus = bandwidth * (1 if is_half else 2) * (N - 1) / N
    return row | {"seconds": seconds, "algorithm_bandwidth": bandwidth, "bus_bandwidth": bus}


def show(rows: list[Row], title: str) -> Table:
    """Return the table. Bytes are decimal."""
    table = Table("operation", title=title)
    for column in ("MB", "steps", "wire MB", "ms", "algorithm GB/s", "bus GB/s"):
        table.add_column(column, justify="right")
    for row in rows:
        timed = ["-", "-", "-"]
        if "seconds" in row:
            bandwidths = (f"{row[f'{kind}_bandwidth'] / 1e9:,.2f}" for kind in ("algorithm", "bus"))
            timed = [f"{row['seconds'] * 1e3:,.3f}", *bandwidths]
        sizes = f"{row['bytes'] / 1e6:,.3f}", str(row["steps"]), f"{row['wire_bytes'] / 1e6:,.3f}"
        table.add_row(row["operation"], *sizes, *timed)
    return table


def draw(rows: list[Row], path: str, title: str) -> None:
    """Write the bus bandwidth of each operation over sizes."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in OPERATIONS:
        mine = [row for row in rows if row["operation"] == name]
        axes.plot([row["bytes"] for row in mine], [row["bus_bandwidth"] / 1e9 for row in mine], marker=".", label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s", title=title)
    axes.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)


def _mesh(asked: argparse.Namespace) -> jax.sharding.Mesh:
    if asked.gpu:
        return jax.sharding.Mesh(np.array(topology.compile_only(asked.gpu, asked.gpus)), (AXIS,))
    meshes.configure(asked.simulate)
    return jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))


def main(argv: list[str] | None = None) -> int:
    """Print a table and one JSON line; -> 2 if the request is wrong."""
    parser = Parser(description="Time collectives and all-reduce algorithms.")
    parser.add_argument(
        "--simulate", type=int, default=8, help="simulated CPU devices (default: 8); 0: the real devices"
    )
    parser.add_argument("--gpu", help="compile for this GPU instead, and time nothing: h100, ...")
    parser.add_argument("--gpus", type=int, default=8, help="with --gpu: how many (default: 8)")
    parser.add_argument("--sizes", default="4K,64K,1M,16M", help="bytes per device (default: 4K,64K,1M,16M)")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="executions of each (default: 5)")
    parser.add_argument("--picture", metavar="FILE", help="draw bus bandwidth over size")
    asked = parser.parse_args(argv)
    try:
        sizes = [size_of(text) for text in asked.sizes.split(",")]
        mesh = _mesh(asked)
    except ValueError as error:
        return refuse(error)
    N, rows = mesh.shape[AXIS], []
    for size in sizes:
        programs = [compiled(name, size, mesh) for name in OPERATIONS]
        of_size = [figures(name, *program, N) for name, program in zip(OPERATIONS, programs, strict=True)]
        if not asked.gpu:
            ready = [(program, jax.device_put(np.ones(x.shape, x.dtype), x.sharding)) for program, x in programs]
            times = measure(ready, asked.rounds)
            of_size = [with_bandwidths(row, seconds, N) for row, seconds in zip(of_size, times, strict=True)]
        rows += of_size
    device = f"{asked.gpu}, compiled" if asked.gpu else mesh.devices.flat[0].device_kind
    title = f"{N} x {device}, jax {jax.__version__}"
    Console(width=100).print(show(rows, title))
    if asked.picture and not asked.gpu:
        draw(rows, asked.picture, title)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
