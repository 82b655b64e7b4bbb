"""Print an estimate, search results, formulas and a compiled step as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import counts, hardware, memory
from nanotrain_jax.models.experts import way_of_matmuls
from nanotrain_jax.planner import compiled as compiler
from nanotrain_jax.planner.compute_time import STREAM
from nanotrain_jax.planner.estimate import Estimate, Verdict, margin, stores_scores
from nanotrain_jax.planner.formula import Section, number
from nanotrain_jax.planner.search import SearchResult, describe
from nanotrain_jax.planner.training_stages import Staged


def _unit(e: Estimate) -> tuple[float, str]:
    return (1e9, "GB") if e.peak_bytes >= 1e9 else (1e6, "MB")


def estimated(console: Console, e: Estimate) -> None:
    """Print peak memory, communication, and step time with throughput and MFU."""
    c, m, (unit, name) = e.config, e.config.model, _unit(e)
    console.print(f"{m.family}, {counts.all_parameters(c):,} parameters, on {e.gpus} x {e.gpu}: {describe(c)}")
    console.print(f"global batch: {c.data.batch_size} sequences of {c.data.seq_len} tokens")
    if c.train.lora:
        adapters(console, e)
    if m.experts:
        console.print(way_of_matmuls(c))
    table = Table(title=f"peak memory per GPU, {name}", title_justify="left")
    for moment in ("", *e.moments):
        table.add_column(moment, justify="right" if moment else "left", style="bold" if moment == e.peak else None)
    for part in next(iter(e.moments.values())):
        table.add_row(part, *(f"{parts[part] / unit:,.2f}" for parts in e.moments.values()))
    table.add_section()
    table.add_row("total", *(f"{sum(parts.values()) / unit:,.2f}" for parts in e.moments.values()))
    console.print(table)
    if e.on_host:
        parts = ", ".join(f"{part} {size / unit:,.2f}" for part, size in e.on_host.items())
        total = sum(e.on_host.values()) / unit
        console.print(f"host memory per GPU, {name}: {parts}; total {total:,.2f}")
    if e.nvme_bytes:
        console.print(
            f"NVMe per GPU, {name}: {e.nvme_bytes / unit:,.2f}, read and written by each step; not included in the "
            "modelled time"
        )
    if e.transfers or e.copies:
        table = Table(title="communication per GPU and step, modelled", title_justify="left")
        for column in ("axis", "operation", name, "link", "ms", "exposed ms", "traffic"):
            table.add_column(column, justify="right" if column in (name, "ms", "exposed ms") else "left")
        for t in e.transfers + e.copies:
            numbers = f"{t.bytes / unit:,.3f}", t.link, f"{1e3 * t.seconds:,.1f}", f"{1e3 * t.exposed:,.1f}"
            table.add_row(t.axis, t.op, *numbers, t.why)
        console.print(table)
    shares = {part: seconds / e.step_seconds for part, seconds in e.seconds.items()}
    parts = ", ".join(f"{part} {share:.1%}" for part, share in shares.items() if share > 5e-4)
    bubble = f"; the bubble is {e.bubble_fraction:.1%} of the schedule's time" if c.parallel.pipe > 1 else ""
    mfu = f"MFU {e.mfu:.1%} ({e.mfu_causal:.1%} with causal attention FLOPs)"
    console.print(f"step time {e.step_seconds:,.3f} s, modelled: {parts}{bubble}")
    console.print(f"throughput {e.tokens_per_second:,.0f} tokens/s, {mfu}")
    if stores_scores(e.config):
        console.print("no flash attention: attention scores are stored, and the memory estimate is less accurate")
    console.print(f"host memory while writing a checkpoint: {e.host_bytes / unit:,.1f} {name} of state per host")


def adapters(console: Console, e: Estimate) -> None:
    """Print what train.lora trains, and the memory of training all weights in the same layout."""
    c, (unit, name) = e.config, _unit(e)
    whole = c.replace("model", lora=None).replace("train", lora=None, freeze=())
    trained, count = counts.all_parameters(c) - counts.frozen_parameters(c), counts.all_parameters(whole)
    _, parts = memory.peak(whole)
    state, peak = (sum(sizes.values()) / unit for sizes in (memory.state(whole), parts))
    console.print(
        f"adapters: {trained:,} parameters train, {trained / count:.1%} of the {count:,} frozen ones; all weights "
        f"would take {state:,.1f} {name} of state and {peak:,.1f} at the peak"
    )


def phases(console: Console, config: Config) -> None:
    """Print which phase of a stage is planned, if it has several, and what the data decide."""
    if config.train.epochs:
        console.print(f"train.epochs={config.train.epochs:g}: how many steps that is depends on the rows of the data")
    if config.train.batch_schedule or config.train.batch_growth:
        console.print(
            "this is the largest batch (train.batch_schedule, train.batch_growth); smaller ones have fewer microbatches"
        )
    if config.parallel.full_sync_steps:
        console.print("this is after parallel.full_sync_steps; before, gradients are summed whole over replica")


def training_stages(console: Console, stages: Sequence[Staged]) -> None:
    """Print what each stage of training trains, its peak memory and step time, in the same layout."""
    if not stages:
        return
    unit, name = _unit(stages[-1].estimate)
    table = Table(title="stages of training (--stage NAME plans one)", title_justify="left")
    for column in ("stage", "steps", "trained", f"peak {name}", "step s", "hours"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for span, e in stages:
        trained = 1 - counts.frozen_parameters(e.config) / counts.all_parameters(e.config)
        hours = (span.last - span.first) * e.step_seconds / 3600
        steps = f"{span.first + 1:,} to {span.last:,}"
        peak = f"{e.peak_bytes / unit:,.2f}"
        table.add_row(span.name, steps, f"{trained:.1%}", peak, f"{e.step_seconds:,.3f}", f"{hours:,.2f}")
    console.print(table)


def candidates(console: Console, result: SearchResult) -> None:
    """Print the ten best layouts, and the most frequent reasons for rejection."""
    table = Table(title="best layout of each mesh and schedule, by modelled step time (ties: 1%)", title_justify="left")
    unit, size = _unit(result.best[0])
    numbers = "", "ZeRO", "microbatches", size, "step s", "MFU"
    for name in ("", "mesh", "ZeRO", "schedule", "microbatches", "remat", size, "step s", "MFU", "largest overheads"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name != "mesh")
    for rank, e in enumerate(result.best[:10], 1):
        p, overheads = e.config.parallel, ((s, part) for part, s in e.seconds.items() if part != "compute")
        largest = sorted(overheads)[::-1][:2]
        losses = ", ".join(f"{part} {s / e.step_seconds:.1%}" for s, part in largest if s > 5e-4 * e.step_seconds)
        schedule = p.schedule + (f":{p.chunks}" if p.chunks > 1 else "") if p.pipe > 1 else ""
        row = f"{e.peak_bytes / unit:.1f}", f"{e.step_seconds:,.3f}", f"{e.mfu:.1%}", losses
        remat = e.config.memory.remat + f", loss_chunk={e.config.model.loss_chunk}" * (e.config.model.loss_chunk > 0)
        mesh, *_ = describe(e.config).split(",")
        table.add_row(str(rank), mesh, str(p.zero), schedule, str(p.microbatches), remat, *row)
    console.print(table)
    console.print(f"{result.tried:,} layouts estimated; rejected, by reason:")
    for reason, count in result.rejected.most_common(8):
        console.print(f"  {count:>6,}  {reason}")


def formulas(console: Console, explained: Sequence[Section]) -> None:
    """Print every formula with its numbers and its source."""
    for section in explained:
        console.print(f"\n[bold]{section.title}[/bold]  [dim]{section.source}[/dim]")
        for line in section.lines:
            console.print(f"  {line.what} = {line.formula}", highlight=False)
            value = f"[bold]{number(line.value)}[/bold] {line.unit}"
            console.print(f"      = {line.numbers} = {value}", highlight=False)


def compiled(console: Console, e: Estimate, compiled: dict[str, Any]) -> None:
    """Print the compiled step beside its estimate."""
    title = f"compiled in {compiled['compile_seconds']:.0f} s with jax {compiled['jax']}, against the estimate"
    table, (unit, name) = Table(title=title, title_justify="left"), _unit(e)
    for column in ("per GPU and step", "compiled", "estimated", "ratio"):
        table.add_column(column, justify="left" if column == "per GPU and step" else "right")

    def row(what: str, actual: float, expected: float) -> None:
        table.add_row(what, f"{actual:,.3f}", f"{expected:,.3f}", f"{actual / expected:.3f}" if expected else "-")

    expected, wire = compiler.estimated(e), sum(c["bytes_per_device"] for c in compiled["collectives"])
    row(f"peak memory, {name}", compiled["peak_bytes"] / unit, expected["peak_bytes"] / unit)
    row(f"arguments, {name}", compiled["argument_bytes"] / unit, expected["argument_bytes"] / unit)
    row("hardware TFLOPs", compiled["flops"] / 1e12, expected["flops"] / 1e12)
    row(f"wire bytes, {name}", wire / unit, expected["wire_bytes"] / unit)
    by_axis = compiler.wire_bytes(e)
    for c in compiled["collectives"]:
        size, exposed = c["bytes_per_device"], c["exposed_bytes"] / c["bytes_per_device"]
        row(f"{c['axis']} {c['op']}, {name} ({exposed:.0%} exposed)", size / unit, by_axis[c["axis"], c["op"]] / unit)
    console.print(table)
    if e.gpu != hardware.SIMULATED:
        _memory_traffic(console, e, compiled["hbm"])


def _memory_traffic(console: Console, e: Estimate, found: dict[str, Any]) -> None:
    """Print what the compiled step reads and writes in device memory, by part: beside the least possible, and the
    share of the modelled step that it takes at the fraction of the bandwidth that `step_time` assumes."""
    (unit, name), rate = _unit(e), STREAM * hardware.find(e.gpu).memory_bandwidth
    table = Table(title=f"device memory traffic, at {STREAM:.0%} of the peak bandwidth", title_justify="left")
    for column in ("per GPU and step", name, "least", "ratio", "kernels", "ms", "of the step"):
        table.add_column(column, justify="left" if column == "per GPU and step" else "right")
    for part in [*found["parts"], {"part": "all"} | found]:
        size, least = part["bytes"], part.get("minimum_bytes")
        beside = (f"{least / unit:,.2f}", f"{size / least:.2f}") if least else ("-", "-")
        time = f"{1e3 * size / rate:,.1f}", f"{size / rate / e.step_seconds:.0%}"
        table.add_row(part["part"], f"{size / unit:,.2f}", *beside, f"{part['kernels']:,.0f}", *time)
    console.print(table)


HOLDERS = 12  # rows of the memory timeline
ARGUMENTS = "params", "optimizer", "batch"  # their kinds


def timeline(console: Console, e: Estimate, found: dict[str, Any]) -> None:
    """Print the memory of the compiled step at its peak: of each kind, beside the estimate, and its largest arrays."""
    (unit, name), at, expected = _unit(e), found["at"], e.moments[e.peak]
    kinds = {kind: sizes[at] for kind, sizes in found["curve"].items()}
    table = Table(title=f"at the peak ({found['phase'][at]})", title_justify="left")
    for column in ("kind", name, "estimated"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, size in kinds.items():
        if size >= unit / 200 or expected.get(kind):
            table.add_row(kind, f"{size / unit:,.2f}", f"{expected[kind] / unit:,.2f}" if kind in expected else "-")
    console.print(table)
    table = Table(title="largest arrays at the peak, besides arguments", title_justify="left")
    for column in (name, "kind", "phase", "array", "source"):
        table.add_column(column, justify="right" if column == name else "left")
    for row in [row for row in found["holders"] if row["kind"] not in ARGUMENTS][:HOLDERS]:
        table.add_row(f"{row['bytes'] / unit:,.2f}", *(escape(row[key]) for key in ("kind", "phase", "type", "source")))
    console.print(table)


def better(console: Console, e: Estimate, found: Estimate) -> None:
    """Print the layout that a search finds, in one line: it fits, or is faster."""
    unit, name = _unit(e)
    text = f"--choose finds {describe(found.config)}: "
    if e.verdict == "does not fit":
        text += f"fits in {found.peak_bytes / unit:,.1f} {name}, "
    text += f"modelled {found.step_seconds:,.3f} s"
    if found.step_seconds < e.step_seconds:
        text += f", {1 - found.step_seconds / e.step_seconds:.0%} less"
    console.print(text, soft_wrap=True)


def too_large(console: Console, e: Estimate, compiled: dict[str, Any], following: Estimate | None) -> None:
    """Print a candidate that does not fit as compiled, and the one to compile next."""
    unit, name = _unit(e)
    then = f"; compiling the next: {describe(following.config)}" if following else "; no candidates left"
    text = (
        f"does not fit as compiled: {compiled['peak_bytes'] / unit:,.2f} {name} ({e.peak_bytes / unit:,.2f} estimated) "
        f"of {e.limit_bytes / unit:,.2f}: {describe(e.config)}{then}"
    )
    console.print(text, soft_wrap=True)


COLORS: dict[Verdict, str] = {"fits": "green", "may not fit": "yellow", "does not fit": "red"}


def verdict(console: Console, e: Estimate, compiled: dict[str, Any] | None, verdict: Verdict) -> None:
    """Print the verdict with peak memory, limit and headroom."""
    (unit, name), limit = _unit(e), e.limit_bytes
    peak, how = (compiled["peak_bytes"], "compiled") if compiled else (e.peak_bytes, "estimated")
    text, rest = verdict, "over" if verdict == "does not fit" else "free"
    if verdict == "may not fit":
        text += ", compile it (--compile)"
        rest += f", less than the estimate's margin of {margin(e.config):.0%}"
    share = limit / hardware.find(e.gpu).memory_bytes
    console.print(
        f"[bold {COLORS[verdict]}]{text}[/]: peak memory {peak / unit:,.1f} {name} ({how}), limit {limit / unit:,.1f} "
        f"{name} ({share:.0%} of the {e.gpu}'s memory): {abs(limit - peak) / unit:,.1f} {name} {rest}"
    )
