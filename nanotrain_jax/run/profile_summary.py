"""Summarize a profile in about ten lines: step time, waits, exposed collectives, where the time goes.

`jax.profiler.ProfileData` reads the trace. Operations get the names of their `jax.named_scope`s from the text of the
compiled program. xprof, where it is installed, adds what it knows about kernels.

On GPU all figures are of kernels on streams. XLA:CPU has no device: threads run the operations of all simulated devices
on the same cores, so that device idle time and exposed collectives mean nothing there and are not reported.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax

STEP, INPUT = "train", "input"  # names of the annotations in the training loop
COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)|^nccl", re.IGNORECASE)
CONTROL = re.compile(r"(while|conditional|call)[.\d]*$")  # contain the operations they run
PARTS = re.compile(
    r"(?<!jit\()\b(attention|mlp|norm|loss|embed|layer|clip|update|reduce|"
    r"(?:all_reduce|all_gather|reduce_scatter|all_to_all|all_max|shift)(?:_[a-z]+)+)\b"
)
KINDS = "collective", "copy"  # what may hide behind compute
TOP = 4  # operations listed

Intervals = list[tuple[float, float]]  # (start, end) in ns


class Operation(NamedTuple):
    """One execution of an HLO instruction, or a copy."""

    device: str
    kind: str  # compute, collective, copy
    name: str
    start: float  # ns
    end: float


class Trace(NamedTuple):
    """What the summary reads of a trace."""

    operations: list[Operation]  # within the steps
    steps: Intervals
    input_ns: float  # the host waiting for data, in all steps
    is_gpu: bool


def read(xplane: Path) -> Trace:
    """Read a trace. Raises ValueError if it holds no step."""
    planes = list(jax.profiler.ProfileData.from_file(str(xplane)).planes)
    host = [event for plane in planes if plane.name == "/host:CPU" for line in plane.lines for event in line.events]
    steps = sorted((e.start_ns, e.end_ns) for e in host if e.name == STEP and "step_num" in dict(e.stats))
    if not steps:
        raise ValueError("the trace holds no whole step")
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found = list(on_gpu(gpus) if gpus else on_cpu(host))
    begin, end = steps[0][0], steps[-1][1]
    inside = [o._replace(start=max(o.start, begin), end=min(o.end, end)) for o in found]
    waits = [e.duration_ns for e in host if e.name == INPUT and begin <= e.start_ns < end]
    return Trace([o for o in inside if o.start < o.end], steps, sum(waits), bool(gpus))


def on_gpu(planes: Iterable[Any]) -> Iterator[Operation]:
    """Yield the kernels and copies of each stream."""
    lines = ((plane.name, line) for plane in planes for line in plane.lines if line.name.startswith("Stream"))
    for device, event in ((device, event) for device, line in lines for event in line.events):
        name = dict(event.stats).get("hlo_op", event.name)
        is_collective = COLLECTIVE.match(name) or COLLECTIVE.match(event.name)
        kind = "collective" if is_collective else "copy" if event.name.startswith("Memcpy") else "compute"
        yield Operation(device, kind, name, event.start_ns, event.end_ns)


def on_cpu(events: Iterable[Any]) -> Iterator[Operation]:
    """Yield what threads execute of the compiled program."""
    for event in events:
        stats = dict(event.stats)
        if "hlo_op" in stats and not CONTROL.match(stats["hlo_op"]):
            kind = "collective" if COLLECTIVE.match(stats["hlo_op"]) else "compute"
            yield Operation(str(stats.get("device_ordinal")), kind, stats["hlo_op"], event.start_ns, event.end_ns)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return disjoint intervals that cover the same, in order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of what intervals cover."""
    return sum(end - start for start, end in union(intervals))


def exposed(waits: Iterable[tuple[float, float]], work: Iterable[tuple[float, float]]) -> float:
    """Return for how long one of waits runs and none of work."""
    work = list(work)
    return length([*waits, *work]) - length(work)


def part(source: str) -> str:
    """Return the innermost named part in an op_name, and whether it is its backward; "" without one."""
    names = PARTS.findall(source)
    is_backward = "transpose(" in source or "backward" in source
    return f"{names[-1]} backward" if names and is_backward else names[-1] if names else ""


def device_lines(trace: Trace) -> list[str]:
    """Lines about devices, means over them: idle time, collectives, copies."""
    if not trace.is_gpu:
        return ["device idle, exposed collectives  not known on CPU: threads of all devices share the cores"]
    window = trace.steps[-1][1] - trace.steps[0][0]
    figures = Counter()
    devices = {o.device for o in trace.operations}
    for device in devices:
        by_kind = {kind: [] for kind in ("compute", *KINDS)}
        for o in (o for o in trace.operations if o.device == device):
            by_kind[o.kind].append((o.start, o.end))
        figures["idle"] += window - length(chain(*by_kind.values()))
        for kind in KINDS:
            figures[kind] += length(by_kind[kind])
            figures[f"exposed {kind}"] += exposed(by_kind[kind], by_kind["compute"])
    each = max(1, len(devices))
    mean = {name: of_all(trace, figures[name] / each) for name in ("idle", *KINDS, *map("exposed {}".format, KINDS))}
    return [
        f"device idle        {mean['idle']}",
        f"collectives        {mean['collective']}, exposed {mean['exposed collective']}",
        f"copies             {mean['copy']}, exposed {mean['exposed copy']}",
    ]


def of_all(trace: Trace, nanoseconds: float) -> str:
    """Format a time of all steps as milliseconds per step and as a share."""
    total = trace.steps[-1][1] - trace.steps[0][0]
    return f"{nanoseconds / len(trace.steps) / 1e6:.2f} ms ({nanoseconds / total:.1%})"


def operation_lines(trace: Trace, sources: Mapping[str, str]) -> list[str]:
    """Lines about parts of the model and single operations, as shares of the time of all operations."""
    by_name, by_part = Counter(), Counter()
    for o in trace.operations:
        by_name[o.name] += o.end - o.start
        by_part[part(sources.get(o.name, "")) or "other"] += o.end - o.start
    total = max(sum(by_name.values()), 1)
    parts = (f"{name} {time / total:.0%}" for name, time in by_part.most_common(2 * TOP))
    lines = [f"time by part       {', '.join(parts)}"]
    for name, time in by_name.most_common(TOP):
        source = sources.get(name, "")
        primitive = re.findall(r"\w+", source)[-1:]
        lines.append(f"  {time / total:6.1%}  {'  '.join((name, ', '.join([part(source) or 'other', *primitive])))}")
    return lines


def kernel_line(xplane: Path, is_gpu: bool) -> str:
    """A line of what xprof knows about kernels, or how to get it."""
    if importlib.util.find_spec("xprof") is None:
        return "kernels            pip install 'nanotrain_jax[profile]' (xprof) for the share of tensor cores"
    if not is_gpu:
        return "kernels            none: xprof knows kernels of GPUs"
    table = tool(xplane, "kernel_stats")
    columns = [column["id"] for column in table["cols"]]
    rows = [dict(zip(columns, (cell.get("v") for cell in row["c"]), strict=True)) for row in table["rows"]]
    total = max(sum(row["total_duration_us"] for row in rows), 1e-9)
    on_tensor_cores = sum(row["total_duration_us"] for row in rows if row["is_kernel_using_tensor_core"])
    return (
        f"kernels            {len(rows)} different, tensor cores in {on_tensor_cores / total:.0%} of their time (xprof)"
    )


def tool(xplane: Path, name: str) -> Any:
    """Return what a tool of xprof says about a trace."""
    from xprof.convert import raw_to_tool_data

    return json.loads(raw_to_tool_data.xspace_to_tool_data([str(xplane)], name, {})[0])


def summary(xplane: Path, sources: Mapping[str, str]) -> str:
    """Return the summary of a trace. sources: op_name of each HLO instruction of the program (`hlo.sources`).

    Raises ValueError if the trace holds no step.
    """
    trace = read(xplane)
    devices = len({o.device for o in trace.operations})
    window = trace.steps[-1][1] - trace.steps[0][0]
    lines = [
        f"step time          {window / len(trace.steps) / 1e6:.2f} ms, mean of {len(trace.steps)} steps",
        f"input wait         {of_all(trace, trace.input_ns)}: the host waits for data",
        *device_lines(trace),
        *operation_lines(trace, sources),
        kernel_line(xplane, trace.is_gpu),
    ]
    title = f"profile of {devices} {'GPUs' if trace.is_gpu else 'simulated devices'} of this process, per step"
    return "\n".join([title, *(f"  {line}" for line in lines)])
