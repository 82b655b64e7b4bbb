"""Render a plan as one HTML page: verdict, peak memory, step time, schedule, communication, candidates, formulas.

The file is self-contained (styles and picture inline): no network requests, no scripts, light and dark mode, readable
on a phone and in print. Colours are Paul Tol's colour-blind-safe "bright" scheme. GB are 1e9 bytes. Bytes are closed
forms (held to audit/) and every time is modelled (planner/estimate.py); the page says so.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import matplotlib

from nanotrain_jax.costs import counts, hardware
from nanotrain_jax.parallel.pipeline import gantt, schedule, schedule_text
from nanotrain_jax.planner import formula
from nanotrain_jax.planner.compiled import wire_bytes
from nanotrain_jax.planner.compute_time import layers_time
from nanotrain_jax.planner.estimate import Estimate, Verdict, margin, stores_scores, verdict
from nanotrain_jax.planner.report import markup, timeline, units
from nanotrain_jax.planner.search import SearchResult

# Backgrounds, each with a text colour of sufficient contrast.
BLUE, GREEN, PURPLE, SLATE = (f"background:{c};color:#fff" for c in ("#4477aa", "#228833", "#aa3377", "#5b6573"))
CYAN, YELLOW, RED, GREY = (f"background:{c};color:#111" for c in ("#66ccee", "#ccbb44", "#ee6677", "#bbbbbb"))
PALE = "background:#a9b4c2;color:#111"
WAITS = "background:var(--waits);color:var(--ink)"
EXPOSED = "exposed communication over this axis"
PARTS = {  # of peak memory
    "params": (BLUE, "weights in the compute dtype"),
    "optimizer": (CYAN, "moments, and float32 master weights of 16-bit weights"),
    "outer": (SLATE, "outer optimizer of parallel.sync_every: weights and momentum"),
    "residuals": (PALE, "what parallel.compress has not yet sent"),
    "gradients": (GREEN, "accumulated gradients, and those of the current microbatch"),
    "activations": (YELLOW, "stored by layers for their backward"),
    "loss": (RED, "logits and their gradient"),
    "layer": (PURPLE, "working set of one layer"),
    "buffers": (GREY, "gathered, or in flight between GPUs"),
}
TIMES = {  # parts of a step's time; others: several mesh axes together
    "compute": (BLUE, "matmuls, attention, norms, recomputation"),
    "encoder": (SLATE, "pictures are encoded, forward and backward"),
    "bubble": (WAITS, "pipeline stages are idle"),
    "update": (PURPLE, "the optimizer reads and writes its state"),
    "tensor": (YELLOW, EXPOSED),
    "data": (GREEN, EXPOSED),
    "context": (PURPLE, EXPOSED),
    "replica": (CYAN, EXPOSED),
    "pipe": (RED, EXPOSED),
    "host": (GREY, "exposed copies to and from host memory"),
}
DRAWN = {"stages": 8, "chunks": 4, "microbatches": 16, "units": 32}  # at most; with chunks half the stages
SHOWN = 10  # candidates, and reasons for rejection
SIGNS: dict[Verdict, str] = {"fits": "✓", "may not fit": "?", "does not fit": "✕"}
CLASSES: dict[Verdict, str] = {"fits": "good", "may not fit": "maybe", "does not fit": "bad"}


class Origin(NamedTuple):
    """Provenance of a page."""

    config: str  # path of the config
    command: str  # the command line
    versions: str  # and date, see `versions`


def versions() -> str:
    """Return the versions of this package and of jax, and the date with the time zone."""
    try:
        package = version("nanotrain_jax")
    except PackageNotFoundError:  # run from a folder, not installed
        package = "(not installed)"
    return f"nanotrain_jax {package}, jax {jax.__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"


def html(
    plan: Estimate,
    explained: Sequence[formula.Section],
    found: SearchResult | None = None,
    compiled: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
) -> str:
    """Return the page of a plan as text.

    explained: the result of explain.explain. found: of search.search, if any. compiled: of compiled.compile_step, if
    any. origin: config, command line, versions and date to show. All their text is escaped.
    """
    m = plan.config.model
    name = f"{escape(m.family)} <span>{units.short(counts.all_parameters(plan.config))} parameters</span>"
    title = (f"{origin.config}: " if origin else "") + f"{m.family} on {plan.gpus} x {plan.gpu}"
    body = [_headline(plan, name, compiled), _memory(plan, compiled), _timeline(plan, compiled), _time(plan)]
    body += [_schedule(plan), _communication(plan, compiled), _candidates(plan, found), _formulas(explained)]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title><style>{markup.CSS}</style></head><body><main>
{"".join(body)}
<footer>GB are 1e9 bytes. Memory, bytes and FLOPs are closed forms; times are modelled, not measured.
{_origin(origin)}</footer></main></body></html>
"""


def _origin(origin: Origin | None) -> str:
    if origin is None:
        return "Generated by nanotrain_jax.plan."
    return f"<p>Config {escape(origin.config)}. {escape(origin.versions)}.</p><code>{escape(origin.command)}</code>"


def _headline(plan: Estimate, name: str, compiled: Mapping[str, Any] | None) -> str:
    c, p, gpu = plan.config, plan.config.parallel, hardware.find(plan.gpu)
    sequences = c.data.batch_size // (p.replica * p.data * p.microbatches)
    facts = {
        "GPUs": f"{plan.gpus:,} x {gpu.kind}",
        "mesh": _mesh(plan) + f" ({p.context_attention} attention)" * (p.context > 1),
        "ZeRO": f"stage {p.zero}" if p.zero else "none",
        "schedule": _schedule_name(plan) + (f", {p.chunks} chunks" if p.chunks > 1 else ""),
        "microbatches": f"{p.microbatches:,} of {sequences:,} x {c.data.seq_len:,} tokens",
        "remat": c.memory.remat,
    }
    if c.model.loss_chunk:
        facts["loss chunk"] = f"{c.model.loss_chunk:,} tokens"
    free = plan.limit_bytes - (compiled["peak_bytes"] if compiled else plan.peak_bytes)
    headroom = f"{units.gb(abs(free))} {'free' if free >= 0 else 'over'}, {'compiled' if compiled else 'estimated'}"
    fit = verdict(compiled["peak_bytes"], 0.0, plan.limit_bytes) if compiled else plan.verdict
    if fit == "may not fit":
        headroom += f", less than the estimate's margin of {margin(c):.0%}: compile it (--compile)"
    mfu = f"of {gpu.peak_flops / 1e12:,.4g} TFLOP/s; {plan.mfu_causal:.1%} with causal attention FLOPs"
    of_schedule = "of the schedule's time" if p.pipe > 1 else "no pipeline stages"
    speed, batch = plan.tokens_per_second, f"{c.data.batch_size:,} x {c.data.seq_len:,} tokens"
    tiles = (
        ("peak memory per GPU", *units.gb(plan.peak_bytes).split(), f"of a limit of {units.gb(plan.limit_bytes)}"),
        ("step, modelled", *units.seconds(plan.step_seconds).split(), f"for {batch}"),
        ("tokens/s, modelled", f"{speed:,.0f}", "", f"{speed / plan.gpus:,.0f} per GPU"),
        ("MFU, modelled", f"{100 * plan.mfu:.1f}", "%", mfu),
        ("bubble, modelled", f"{100 * plan.bubble_fraction:.1f}", "%", of_schedule),
    )
    return (
        f'<header><h1>{name}</h1><p class="verdict {CLASSES[fit]}"><b>{SIGNS[fit]} {fit}</b> {headroom}</p>'
        + '<dl class="facts">'
        + "".join(f"<div><dt>{key}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
        + '</dl><div class="tiles">'
        + "".join(
            f"<div><h3>{what}</h3><p>{number}<small>{unit}</small></p><p>{more}</p></div>"
            for what, number, unit, more in tiles
        )
        + "</div></header>"
    )


def _memory(plan: Estimate, compiled: Mapping[str, Any] | None) -> str:
    capacity, limit, moments = hardware.find(plan.gpu).memory_bytes, plan.limit_bytes, plan.moments
    sums = {moment: sum(parts.values()) for moment, parts in moments.items()}
    scale = max(capacity, *sums.values(), compiled["peak_bytes"] if compiled else 0)
    line = f'<i class="limit" style="left:{limit / scale:.4%}"></i>'

    def row(name: str, parts: list[tuple[str, float, str]], note: str = "") -> str:
        total = sum(size for _, size, _ in parts)
        over, mark = "", line
        if total > limit:
            over, note = " over", f"{units.gb(total - limit)} over"
            mark += f'<i class="excess" style="left:{limit / scale:.4%};width:{(total - limit) / scale:.4%}"></i>'
        peak = "<small>peak</small>" if name == plan.peak else ""
        figure = f"<span><b>{units.gb(total)}</b><small>{note}</small></span>"
        bar = markup.bar(parts, scale, units.gb, mark)
        return f'<div class="row{over}"><span>{name}{peak}</span>{bar}{figure}</div>'

    flag = f"left:{limit / scale:.4%}" if limit < scale / 2 else f"right:{1 - limit / scale:.4%}"
    flag = f'<div class="flag"><span style="{flag}">limit {units.gb(limit)}</span></div>'
    rows = [f'<div class="row"><span></span>{flag}</div>']
    rows += [row(moment, [(k, v, PARTS[k][0]) for k, v in parts.items()]) for moment, parts in moments.items()]
    lead = f"""Memory of a GPU in the moments of a step that can be its peak. The line is the limit: JAX
    preallocates {limit / capacity:.0%} of the {units.gb(capacity)}. While a checkpoint is written, each host holds
    {units.gb(plan.host_bytes)} of state."""
    if plan.on_host:
        parts = ", ".join(f"{part} {units.gb(size)}" for part, size in plan.on_host.items())
        lead += f" Host memory per GPU: {units.gb(sum(plan.on_host.values()))} ({parts})."
    if stores_scores(plan.config):
        lead += " No flash attention: attention scores are stored, and the estimate is less accurate."
    if compiled:
        peak = compiled["peak_bytes"]
        state = min(compiled["argument_bytes"], peak)
        parts = [("arguments", state, SLATE), ("temporaries", peak - state, PALE)]
        rows.append(row("compiled", parts, f"ratio {peak / plan.peak_bytes:.3f}"))
        lead += " Compiled: peak memory of the real step; its arguments are params, optimizer state and a batch."
    table = [
        [markup.key(style, part), *(units.gigabytes(parts[part]) for parts in moments.values()), meaning]
        for part, (style, meaning) in PARTS.items()
        if part in moments[plan.peak]
    ]
    table.append(["total", *(units.gigabytes(size) for size in sums.values()), ""])
    head = ["part", *(f">{moment}, GB" for moment in moments), "description"]
    bars = f'<div class="rows">{"".join(rows)}</div>'
    return markup.section("Peak memory per GPU", lead, bars + markup.table(head, table, {len(table) - 1}))


def _timeline(plan: Estimate, compiled: Mapping[str, Any] | None) -> str:
    found = (compiled or {}).get("timeline")
    if not found:
        return ""
    drawn = f'<div class="scroll gantt" tabindex="0">{timeline.picture(found, plan.limit_bytes)}</div>'
    keys = {kind: markup.key(f"background:{color}", kind) for kind, color in timeline.COLORS.items()}
    rows = [
        [units.gigabytes(row["bytes"]), keys[row["kind"]], row["phase"], row["type"], row["source"]]
        for row in found["holders"]
    ]
    table = markup.table([">GB", "kind", "traced in", "array", "source"], rows)
    lead = """What the compiler holds in memory during each instruction of the compiled step, in order of execution; a
    loop is drawn once. Kinds are the parts of the estimate above. The table has the largest arrays at the peak."""
    return markup.section("Memory timeline", lead, drawn + table)


def _time(plan: Estimate) -> str:
    bar, rows = [], []
    for part, s in plan.seconds.items():
        style, meaning = TIMES.get(part, (SLATE, EXPOSED))
        bar.append((_axes(part), s, style))
        rows.append([markup.key(style, _axes(part)), units.seconds(s), f"{s / plan.step_seconds:.2%}", meaning])
    rows.append(["step", units.seconds(plan.step_seconds), "100%", ""])
    table = markup.table(["part", ">time, modelled", ">of the step", "description"], rows, {len(rows) - 1})
    lead = "Modelled by a roofline: the slowest of matrix units, memory and link bounds each operation."
    drawn = f'<div class="rows">{markup.bar(bar, plan.step_seconds, units.seconds)}</div>'
    return markup.section("Step time breakdown", lead, drawn + table)


def _schedule(plan: Estimate) -> str:
    p = plan.config.parallel
    if p.pipe == 1:
        return ""
    C = min(p.chunks, DRAWN["chunks"])
    P = min(p.pipe, DRAWN["stages"] // (2 if C > 1 else 1))
    M = min(p.microbatches, DRAWN["microbatches"], max(DRAWN["units"] // C, P))
    M -= M % P if p.schedule == "interleaved" else 0
    F, B, W = layers_time(plan.config, hardware.find(plan.gpu))
    costs = 1.0, max(round(B / F, 2), 0.01), max(round(W / F, 2), 0.01)
    table = schedule.make(p.schedule, P, M, C, bool(p.vocab_over_pipe))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "page"}):  # text, not paths; deterministic
        file, no_metadata = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        gantt.picture(table, costs, widest=10.5).savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    for color, variable in {  # for light and dark
        gantt.BUBBLE: "var(--waits)",
        gantt.PALE: "var(--mute)",
        f"stroke: {gantt.LINES}": "stroke: var(--page)",
    }.items():
        svg = svg.replace(color, variable)
    sizes = (("stages", P, p.pipe), ("chunks", C, p.chunks), ("microbatches", M, p.microbatches))
    reduced = ", ".join(f"{n:,} of {full:,} {what}" for what, n, full in sizes if n < full)
    lead = f"""Widths are modelled times. {f"Drawn: {reduced}" if reduced else "Drawn in full"}; bubble
    {schedule_text.stats(table, *costs).bubble_fraction:.1%} of the picture. The bubble of the plan's full schedule,
    with embedding, head and communication, is {plan.bubble_fraction:.1%}."""
    drawn = f'<div class="scroll gantt" tabindex="0">{svg}</div>'
    return markup.section(f"Schedule {_schedule_name(plan)}", lead, drawn)


def _communication(plan: Estimate, compiled: Mapping[str, Any] | None) -> str:
    traffic = plan.transfers + plan.copies
    longest, rows = max((t.seconds for t in traffic), default=0.0), []
    for t in traffic:
        bar = markup.mini((t.exposed / longest, YELLOW), ((t.seconds - t.exposed) / longest, WAITS))
        when = "per microbatch" if t.when == "microbatch" else "per step"
        times = bar, units.seconds(t.seconds), units.seconds(t.exposed)
        rows.append([_axes(t.axis), t.op.replace("_", "-"), units.gigabytes(t.bytes), *times, t.link, when, t.why])
    head = ["axis", "operation", ">GB per GPU", "", ">time, modelled", ">exposed", "link", "when", "traffic"]
    body = markup.table(head, rows) if rows else "<p>No communication between GPUs.</p>"
    if compiled:
        rows, theory = [], wire_bytes(plan)
        actual = {(row["axis"], row["op"]): row for row in compiled["collectives"]}
        for axis, op in {**theory, **actual}:
            expected, row = theory[axis, op], actual.get((axis, op), {})
            size = row.get("bytes_per_device", 0.0)
            sizes = (
                units.gigabytes(size),
                units.gigabytes(expected),
                f"{size / expected:.3f}" if expected else "-",
            )
            exposed = f"{row['exposed_bytes'] / size:.1%}" if size else "-"
            rows.append([_axes(axis), op.replace("_", "-"), *sizes, units.number(row.get("count", 0)), exposed])
        head = ["axis", "operation", ">compiled, GB", ">estimated, GB", ">ratio", ">count", ">exposed"]
        body += "<h3>In the compiled step</h3>" + markup.table(head, rows)
    lead = "Bytes that a GPU sends per step, and their time. Exposed time, in colour, is not hidden behind compute."
    if plan.copies:
        lead += " Host rows are copies between GPU and host memory; the two directions overlap."
    return markup.section("Communication by mesh axis", lead, body)


def _candidates(plan: Estimate, found: SearchResult | None) -> str:
    if found is None:
        return ""
    best, rows, body = found.best[:SHOWN], [], ""
    for rank, e in enumerate(best, 1):
        p, bar = e.config.parallel, markup.mini((e.step_seconds / max(e.step_seconds for e in best), BLUE))
        remat = e.config.memory.remat + f", loss_chunk={e.config.model.loss_chunk}" * (e.config.model.loss_chunk > 0)
        layout = _mesh(e), p.zero, _schedule_name(e), p.chunks, f"{p.microbatches:,}", remat
        numbers = f"{100 * e.mfu:.1f}", f"{100 * e.bubble_fraction:.1f}"
        rows.append([rank, *layout, units.gigabytes(e.peak_bytes), bar, units.seconds(e.step_seconds), *numbers])
    head = ["", "mesh", ">ZeRO", "schedule", ">chunks", ">microbatches", "remat", ">peak GB", "", ">step, modelled"]
    current = {i for i, e in enumerate(best) if e.config == plan.config}
    if best:
        body = markup.table([*head, ">MFU %", ">bubble %"], rows, current)
    reasons = found.rejected.most_common(SHOWN)
    if reasons:
        most, rest = reasons[0][1], found.rejected.total() - sum(n for _, n in reasons)
        rows = [[f"{n:,}", markup.mini((n / most, GREY)), reason] for reason, n in reasons]
        rows += [[f"{rest:,}", "", f"{len(found.rejected) - SHOWN:,} other reasons"]] * (rest > 0)
        body += "<h3>Rejected layouts by reason</h3>" + markup.table([">layouts", "", "reason"], rows)
    lead = f"{found.tried:,} layouts were estimated. The best of each mesh and schedule, fastest first"
    lead += "; this plan is highlighted." if current else "."
    return markup.section("Candidates", lead, body)


def _formulas(explained: Sequence[formula.Section]) -> str:
    body = ""
    for section in explained:
        body += f"<h3>{escape(section.title)} <small>{escape(section.source)}</small></h3>"
        for line in section.lines:
            arithmetic = f"<code>= {escape(line.formula)}</code><code>= {escape(line.numbers)}</code>"
            value = f"<p><b>{formula.number(line.value)}</b> {escape(line.unit)}</p>"
            body += f'<div class="formula"><span>{escape(line.what)}</span><div>{arithmetic}</div>{value}</div>'
    lead = "Each formula with this plan's numbers substituted, and its source."
    return markup.section("Formulas", lead, body) if body else ""


def _axes(text: str) -> str:
    return text.replace(",", " x ")


def _mesh(e: Estimate) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in e.config.parallel.axes.items() if size > 1) or "one GPU"


def _schedule_name(e: Estimate) -> str:
    return e.config.parallel.schedule if e.config.parallel.pipe > 1 else "no pipeline"
