"""An estimate, the candidates of a search, formulas and a compiled step as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import cost, hardware
from nanotrain_jax.planner.compiled import moved, ratios
from nanotrain_jax.planner.estimate import Estimate
from nanotrain_jax.planner.explain import Section, number
from nanotrain_jax.planner.search import Found, words

GB = 1e9


def estimated(console: Console, e: Estimate) -> None:
    """The estimate in three tables: memory, what moves, time."""
    c, m = e.config, e.config.model
    console.print(f"{m.family} of {cost.parameters(m):,} parameters on {e.gpus} x {e.gpu}: {words(c)}")
    console.print(f"{c.data.batch_size} sequences of {c.data.seq_len} tokens in a step")
    table = Table(title="memory per GPU, GB", title_justify="left")
    for name in ("", *e.moments):
        table.add_column(name, justify="right" if name else "left", style="bold" if name == e.peak else None)
    for part in next(iter(e.moments.values())):
        table.add_row(part, *(f"{parts[part] / GB:,.2f}" for parts in e.moments.values()))
    table.add_section()
    table.add_row("together", *(f"{sum(parts.values()) / GB:,.2f}" for parts in e.moments.values()))
    console.print(table)
    if e.transfers:
        table = Table(title="what moves per GPU and step", title_justify="left")
        for name in ("axis", "operation", "GB", "link", "ms, modelled", "not hidden", "why"):
            table.add_column(name, justify="right" if name in ("GB", "ms, modelled", "not hidden") else "left")
        for t in e.transfers:
            numbers = f"{t.bytes / GB:,.3f}", t.link, f"{1e3 * t.seconds:,.1f}", f"{1e3 * t.exposed:,.1f}"
            table.add_row(t.axis, t.op, *numbers, t.why)
        console.print(table)
    shares = {what: seconds / e.step_seconds for what, seconds in e.seconds.items()}
    parts = ", ".join(f"{what} {share:.1%}" for what, share in shares.items() if share > 5e-4)
    waits = f"; stages wait {e.bubble_fraction:.1%} of the schedule" if c.parallel.pipe > 1 else ""
    speed = f"{e.tokens_per_second:,.0f} tokens/s, MFU {e.mfu:.1%} (attention in full){waits}"
    console.print(f"a step of {e.step_seconds:,.3f} s, modelled ({parts}); {speed}")
    console.print(f"while a checkpoint is written a host holds {e.host_bytes / GB:,.1f} GB of state")


def candidates(console: Console, found: Found) -> None:
    """The ten best layouts, and why the others are not among them."""
    table = Table(title="the best of each mesh and schedule, by modelled time", title_justify="left")
    numbers = "", "ZeRO", "microbatches", "GB", "step s", "MFU"
    for name in ("", "mesh", "ZeRO", "schedule", "microbatches", "remat", "GB", "step s", "MFU", "besides computing"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name != "mesh")
    for rank, e in enumerate(found.best[:10], 1):
        p, losses = e.config.parallel, sorted(((s, what) for what, s in e.seconds.items() if what != "compute"))[::-1]
        why = ", ".join(f"{what} {s / e.step_seconds:.1%}" for s, what in losses[:2] if s > 5e-4 * e.step_seconds)
        schedule = p.schedule + (f":{p.chunks}" if p.chunks > 1 else "") if p.pipe > 1 else ""
        row = f"{e.peak_bytes / GB:.1f}", f"{e.step_seconds:,.3f}", f"{e.mfu:.1%}", why
        mesh, *_ = words(e.config).split(",")
        table.add_row(str(rank), mesh, str(p.zero), schedule, str(p.microbatches), e.config.memory.remat, *row)
    console.print(table)
    console.print(f"{found.tried:,} layouts estimated; not among them, or not fitting:")
    for reason, count in found.rejected.most_common(8):
        console.print(f"  {count:>6,}  {reason}")


def formulas(console: Console, explained: Sequence[Section]) -> None:
    """Every formula with its numbers and its source."""
    for section in explained:
        console.print(f"\n[bold]{section.title}[/bold]  [dim]{section.source}[/dim]")
        for line in section.lines:
            console.print(f"  {line.what} = {line.formula}", highlight=False)
            value = f"[bold]{number(line.value)}[/bold] {line.unit}"
            console.print(f"      = {line.numbers} = {value}", highlight=False)


def compiled(console: Console, e: Estimate, found: dict[str, Any]) -> None:
    """The compiled step beside the estimate."""
    table = Table(
        title=f"compiled in {found['compile_seconds']:.0f} s with jax {found['jax']}, beside the estimate",
        title_justify="left",
    )
    for name in ("per GPU and step", "compiled", "estimated", "ratio"):
        table.add_column(name, justify="right" if name != "per GPU and step" else "left")
    over = ratios(e, found)
    wire = sum(row["bytes_per_device"] for row in found["collectives"])
    for name, unit, value in (
        ("peak_bytes", GB, found["peak_bytes"]),
        ("argument_bytes", GB, found["argument_bytes"]),
        ("flops", 1e12, found["flops"]),
        ("wire_bytes", GB, wire),
    ):
        what = name.replace("_bytes", ", GB").replace("flops", "TFLOP")
        estimated = value / over[name] / unit if over[name] else 0.0
        table.add_row(what, f"{value / unit:,.3f}", f"{estimated:,.3f}", f"{over[name]:.3f}")
    theory = moved(e)
    for row in found["collectives"]:
        said, got = theory.get((row["axis"], row["op"]), 0.0), row["bytes_per_device"]
        shown = f"{row['axis']} {row['op']}, GB ({row['exposed_bytes'] / got:.0%} with nothing beside it)"
        table.add_row(shown, f"{got / GB:,.3f}", f"{said / GB:,.3f}", f"{got / said:.3f}" if said else "-")
    console.print(table)


def verdict(console: Console, e: Estimate, compiled: dict[str, Any] | None, fits: bool) -> None:
    """Whether it fits, and by how much."""
    peak, limit = compiled["peak_bytes"] if compiled else e.peak_bytes, e.limit_bytes
    share, how = limit / hardware.find(e.gpu).memory_bytes, "compiled" if compiled else "estimated"
    rest = f"{(limit - peak) / GB:,.1f} GB to spare" if fits else f"{(peak - limit) / GB:,.1f} GB too much"
    console.print(
        f"[bold]{'fits' if fits else 'does not fit'}[/bold]: {peak / GB:,.1f} GB ({how}) of the {limit / GB:,.1f} GB "
        f"that JAX takes of each {e.gpu} ({share:.0%}): {rest}"
    )
