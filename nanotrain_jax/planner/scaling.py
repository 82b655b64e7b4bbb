"""Modelled scaling: the best layout on more and more GPUs, and what its step loses. Nothing here is measured.

    weak     the batch grows with the GPUs
    strong   the batch is fixed

Efficiency is tokens per second and GPU over those of the first number of GPUs that the model fits on: T1 / T_N with
weak scaling, T1 / (N T_N) with strong scaling. Every layout is the best of `search`, which may differ between numbers.

The planner's step time (step_time.py) has no latency that grows with a group. Here it is added to collectives of
weights and gradients. The layout is the first, of the search's best of each mesh and schedule (ranked without latency),
whose step is within 1% of the shortest. The latency is that of NCCL's own cost model (src/graph/tuning.cc, protocol
Simple): a ring of n GPUs in d NVLink domains takes n - d hops over NVLink and d - 1 over the network; a tree of an
all-reduce n/d - 1 and log2 d, twice. Counted is at least one collective for each layer that communicates in a loop, and
one of each kind after it; as much of it is hidden as of the bytes.

Not modelled: input, evaluations, checkpoints, congestion, stragglers, failures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import hardware, parameter_traffic
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.planner import overlap, search
from nanotrain_jax.planner.compute_time import COLLECTIVE, KERNEL, STREAM
from nanotrain_jax.planner.estimate import MEMORY_FRACTION, Estimate
from nanotrain_jax.planner.step_time import LINK, TICK, Transfer, link

NVLINK_HOP, NETWORK_HOP = 3.4e-6, 14e-6  # seconds, of a ring
NVLINK_LEVEL, NETWORK_LEVEL = 4e-6, 14e-6  # of a tree
GOOD = 0.8  # the efficiency below which a number of GPUs is marked


class Point(NamedTuple):
    """A number of GPUs with its best layout."""

    gpus: int
    batch: int  # sequences
    layout: str  # "" if no layout fits
    seconds: dict[str, float]  # of a step: compute, exposed communication by axis, bubble, update, host, latency
    mfu: float  # full attention

    @property
    def step_seconds(self) -> float:
        """Modelled seconds of a step."""
        return sum(self.seconds.values())

    @property
    def work(self) -> dict[str, float]:
        """GPU-seconds per sequence, by part of the step."""
        return {part: seconds * self.gpus / self.batch for part, seconds in self.seconds.items()}


def points(config: Config, gpu: str, sizes: Iterable[tuple[int, int]]) -> list[Point]:
    """Return the best layout for each (number of GPUs, batch in sequences). config: as for `search.search`."""
    return [_point(config.replace("data", batch_size=batch), gpu, gpus) for gpus, batch in sizes]


def _point(config: Config, gpu: str, gpus: int) -> Point:
    found = [e for e in search.search(config, gpu, gpus).best if e.fits]
    if not found:
        return Point(gpus, config.data.batch_size, "", {}, 0.0)
    totals = [e.step_seconds + latency(e) for e in found]
    best, total = next(pair for pair in zip(found, totals, strict=True) if pair[1] <= 1.01 * min(totals))
    mfu = best.mfu * best.step_seconds / total
    return Point(gpus, config.data.batch_size, search.describe(best.config), parts(best), mfu)


def parts(e: Estimate) -> dict[str, float]:
    """Return the seconds of a step by part. data: exposed communication over data, replica, context or several axes."""
    seconds: dict[str, float] = {}
    for part, value in e.seconds.items():
        name = part if part in ("compute", "tensor", "pipe", "bubble", "update", "host") else "data"
        seconds[name] = seconds.get(name, 0.0) + value
    return seconds | {"latency": latency(e)}


def latency(e: Estimate) -> float:
    """Return the exposed seconds of latency in a step, of collectives of weights and gradients."""
    exposed = ((t, t.exposed / t.seconds) for t in e.transfers if t.seconds)
    return sum(collectives(e.config, t) * collective_latency(e, t) * share for t, share in exposed)


def collectives(config: Config, transfer: Transfer) -> int:
    """Return the least number of collectives of a transfer in a step; 0 unless it moves weights or gradients."""
    buffers = parameter_traffic.parameter_buffers(config)
    moved = [b for b in buffers if (",".join(b.axes), b.op, b.what) == (transfer.axis, transfer.op, transfer.what)]
    in_loop, _ = parameter_traffic.arrays_of_layers(config)
    times = {part: max(b.times for b in moved if b.part == part) for part in {b.part for b in moved}}
    return sum(n * (in_loop if part == LAYERS and transfer.when == "microbatch" else 1) for part, n in times.items())


def collective_latency(e: Estimate, transfer: Transfer) -> float:
    """Return the seconds of latency of one collective: of a ring, or of a tree for an all-reduce."""
    axes = tuple(transfer.axis.split(","))
    group, local = link(axes, tuple(e.config.parallel.axes.values()), hardware.find(e.gpu).joined)
    domains = group / local
    if transfer.op == "all_reduce":
        return 2 * ((local - 1) * NVLINK_LEVEL + math.log2(domains) * NETWORK_LEVEL)
    return (group - domains) * NVLINK_HOP + (domains - 1) * NETWORK_HOP


def efficiency(point: Point, base: Point) -> float:
    """Return tokens per second and GPU of a point over those of another."""
    return sum(base.work.values()) / sum(point.work.values())


def losses(point: Point, base: Point) -> dict[str, float]:
    """Return what each part of the step takes of the efficiency, largest first: they sum to 1 - efficiency.

    compute: smaller matmuls, recomputation, uneven stages. Negative: the part takes less than at the base.
    """
    total = sum(point.work.values())
    names = dict.fromkeys([*base.work, *point.work])
    lost = {name: (point.work.get(name, 0.0) - base.work.get(name, 0.0)) / total for name in names}
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


def base_of(found: Sequence[Point]) -> Point:
    """Return the first point whose model fits. Raises ValueError if there is none."""
    for point in found:
        if point.layout:
            return point
    raise ValueError(
        f"no layout fits on {', '.join(str(point.gpus) for point in found)} GPUs; use more, or larger ones"
    )


def assumptions(gpu: str) -> list[tuple[str, str, str]]:
    """Return what the figures rest on: what, value, source."""
    g = hardware.find(gpu)
    figures = "data sheet" if gpu in hardware.PUBLISHED else "your file"
    hidden = (
        f"{overlap.HIDDEN_TENSOR:.0%} of tensor's, {overlap.HIDDEN_LAYERS:.0%} of ZeRO's in the loops over layers, "
        f"{overlap.HIDDEN_PIPE:.0%} between stages; nothing of what moves once per step"
    )
    hops = f"{NVLINK_HOP * 1e6:g} us over NVLink, {NETWORK_HOP * 1e6:g} us over the network"
    kernel, collective, tick = (1e6 * s for s in (KERNEL, COLLECTIVE, TICK))
    delays = f"kernel {kernel:g} us, collective of tensor {collective:g} us, tick {tick:g} us"
    return [
        ("16-bit matmuls", f"{g.peak_flops / 1e12:g} TFLOP/s, of it {g.matmul:.0%}", f"{figures}; share assumed"),
        ("memory", f"{g.memory_bandwidth / 1e12:.3g} TB/s, of it {STREAM:.0%}", f"{figures}; share assumed"),
        ("NVLink", f"{g.nvlink / 1e9:g} GB/s among {g.joined}, of it {LINK:.0%}", f"{figures}; share assumed"),
        ("network", f"{g.network / 1e9:g} GB/s per GPU, of it {LINK:.0%}", f"{figures}; share assumed"),
        ("hop of a ring", hops, "NCCL's cost model"),
        ("latencies", delays, "assumed"),
        ("communication behind compute", hidden, "compiled programs, on average"),
        ("memory of a layout", f"fits in {MEMORY_FRACTION:.0%} of the GPU's with its margin", "closed form"),
        ("input, checkpoints, congestion, stragglers, failures", "none", "not modelled"),
    ]
