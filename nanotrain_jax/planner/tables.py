"""An estimate, the candidates of a search, formulas and a compiled step as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import cost, hardware
from nanotrain_jax.planner.compiled import estimated as theory
from nanotrain_jax.planner.compiled import moved
from nanotrain_jax.planner.estimate import Estimate, Verdict, margin
from nanotrain_jax.planner.explain import Section, number
from nanotrain_jax.planner.search import Found, words


def _unit(e: Estimate) -> tuple[float, str]:
    return (1e9, "GB") if e.peak_bytes >= 1e9 else (1e6, "MB")


def estimated(console: Console, e: Estimate) -> None:
    """The estimate in three tables: memory, what moves, time."""
    c, m, (unit, name) = e.config, e.config.model, _unit(e)
    console.print(f"{m.family} of {cost.parameters(m):,} parameters on {e.gpus} x {e.gpu}: {words(c)}")
    console.print(f"{c.data.batch_size} sequences of {c.data.seq_len} tokens in a step")
    table = Table(title=f"memory per GPU, {name}", title_justify="left")
    for moment in ("", *e.moments):
        table.add_column(moment, justify="right" if moment else "left", style="bold" if moment == e.peak else None)
    for part in next(iter(e.moments.values())):
        table.add_row(part, *(f"{parts[part] / unit:,.2f}" for parts in e.moments.values()))
    table.add_section()
    table.add_row("together", *(f"{sum(parts.values()) / unit:,.2f}" for parts in e.moments.values()))
    console.print(table)
    if e.on_host:
        parts = ", ".join(f"{what} {size / unit:,.2f}" for what, size in e.on_host.items())
        whole = sum(e.on_host.values()) / unit
        console.print(f"in host memory, {name} for each GPU: {parts}; together {whole:,.2f}")
    if e.nvme_bytes:
        console.print(
            f"on NVMe, {name} for each GPU: {e.nvme_bytes / unit:,.2f}, which each step reads and writes; the modelled "
            "time knows nothing of it"
        )
    if e.transfers or e.copies:
        table = Table(title="what moves per GPU and step", title_justify="left")
        for column in ("axis", "operation", name, "link", "ms, modelled", "not hidden", "why"):
            table.add_column(column, justify="right" if column in (name, "ms, modelled", "not hidden") else "left")
        for t in e.transfers + e.copies:
            numbers = f"{t.bytes / unit:,.3f}", t.link, f"{1e3 * t.seconds:,.1f}", f"{1e3 * t.exposed:,.1f}"
            table.add_row(t.axis, t.op, *numbers, t.why)
        console.print(table)
    shares = {what: seconds / e.step_seconds for what, seconds in e.seconds.items()}
    parts = ", ".join(f"{what} {share:.1%}" for what, share in shares.items() if share > 5e-4)
    waits = f"; stages wait {e.bubble_fraction:.1%} of the schedule" if c.parallel.pipe > 1 else ""
    mfu = f"MFU {e.mfu:.1%} (attention in full; {e.mfu_causal:.1%} with its causal half)"
    speed = f"{e.tokens_per_second:,.0f} tokens/s, {mfu}{waits}"
    console.print(f"a step of {e.step_seconds:,.3f} s, modelled ({parts}); {speed}")
    if e.rough:
        console.print("attention is not flash attention here, but stores its scores: the estimate is less exact")
    console.print(f"while a checkpoint is written a host holds {e.host_bytes / unit:,.1f} {name} of state")


def candidates(console: Console, found: Found) -> None:
    """The ten best layouts, and why the others are not among them."""
    table = Table(
        title="the best of each mesh and schedule, by modelled time (within 1% counts as equal)", title_justify="left"
    )
    unit, size = _unit(found.best[0])
    numbers = "", "ZeRO", "microbatches", size, "step s", "MFU"
    for name in ("", "mesh", "ZeRO", "schedule", "microbatches", "remat", size, "step s", "MFU", "besides computing"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name != "mesh")
    for rank, e in enumerate(found.best[:10], 1):
        p, losses = e.config.parallel, sorted(((s, what) for what, s in e.seconds.items() if what != "compute"))[::-1]
        why = ", ".join(f"{what} {s / e.step_seconds:.1%}" for s, what in losses[:2] if s > 5e-4 * e.step_seconds)
        schedule = p.schedule + (f":{p.chunks}" if p.chunks > 1 else "") if p.pipe > 1 else ""
        row = f"{e.peak_bytes / unit:.1f}", f"{e.step_seconds:,.3f}", f"{e.mfu:.1%}", why
        remat = e.config.memory.remat + f", loss_chunk={e.config.model.loss_chunk}" * (e.config.model.loss_chunk > 0)
        mesh, *_ = words(e.config).split(",")
        table.add_row(str(rank), mesh, str(p.zero), schedule, str(p.microbatches), remat, *row)
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
    title = f"compiled in {found['compile_seconds']:.0f} s with jax {found['jax']}, beside the estimate"
    table, (unit, name) = Table(title=title, title_justify="left"), _unit(e)
    for column in ("per GPU and step", "compiled", "estimated", "ratio"):
        table.add_column(column, justify="left" if column == "per GPU and step" else "right")

    def row(what: str, got: float, said: float) -> None:
        table.add_row(what, f"{got:,.3f}", f"{said:,.3f}", f"{got / said:.3f}" if said else "-")

    said, wire = theory(e), sum(c["bytes_per_device"] for c in found["collectives"])
    row(f"peak, {name}", found["peak_bytes"] / unit, said["peak_bytes"] / unit)
    row(f"arguments, {name}", found["argument_bytes"] / unit, said["argument_bytes"] / unit)
    row("TFLOP", found["flops"] / 1e12, said["flops"] / 1e12)
    row(f"on the wire, {name}", wire / unit, said["wire_bytes"] / unit)
    on_axes = moved(e)
    for c in found["collectives"]:
        got, alone = c["bytes_per_device"], c["exposed_bytes"] / c["bytes_per_device"]
        what = f"{c['axis']} {c['op']}, {name} ({alone:.0%} with nothing beside it)"
        row(what, got / unit, on_axes[c["axis"], c["op"]] / unit)
    console.print(table)


def slower(console: Console, e: Estimate, better: Estimate) -> None:
    """One line: which layout a search finds, and how much faster it is."""
    less = 1 - better.step_seconds / e.step_seconds
    text = f"--choose finds {words(better.config)}: modelled {better.step_seconds:,.3f} s, {less:.0%} less"
    console.print(text, soft_wrap=True)


def too_large(console: Console, e: Estimate, compiled: dict[str, Any], following: Estimate | None) -> None:
    """A candidate that does not fit as compiled, and the one that is compiled next."""
    unit, name = _unit(e)
    then = f"; compiling the next: {words(following.config)}" if following else "; there is no other candidate"
    text = (
        f"does not fit as compiled: {compiled['peak_bytes'] / unit:,.2f} {name} ({e.peak_bytes / unit:,.2f} estimated) "
        f"of {e.limit_bytes / unit:,.2f}: {words(e.config)}{then}"
    )
    console.print(text, soft_wrap=True)


COLORS: dict[Verdict, str] = {"fits": "green", "may not fit": "yellow", "does not fit": "red"}


def verdict(console: Console, e: Estimate, compiled: dict[str, Any] | None, verdict: Verdict) -> None:
    """Whether it fits, and by how much."""
    (unit, name), limit = _unit(e), e.limit_bytes
    peak, how = (compiled["peak_bytes"], "compiled") if compiled else (e.peak_bytes, "estimated")
    said, more = verdict, "too much" if verdict == "does not fit" else "to spare"
    if verdict == "may not fit":
        said += ", compile it (--compile)"
        more += f", less than the estimate's margin of {margin(e.config):.0%}"
    console.print(
        f"[bold {COLORS[verdict]}]{said}[/]: {peak / unit:,.1f} {name} ({how}) of the "
        f"{limit / unit:,.1f} {name} that JAX takes of each {e.gpu} ({limit / hardware.find(e.gpu).memory_bytes:.0%}): "
        f"{abs(limit - peak) / unit:,.1f} {name} {more}"
    )
