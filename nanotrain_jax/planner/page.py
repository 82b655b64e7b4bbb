"""The plan as one HTML page: does it fit, how fast, what moves, which other layouts there are, and every formula.

One file, with its style and its picture inside: it asks nothing of a network, runs no script, follows the reader's
light or dark, fits a telephone, and prints. Colours are Paul Tol's "bright", told apart by the colour-blind. GB are 1e9
bytes. Bytes are closed forms (audit/) and every time is modelled (planner/estimate.py); the page says so.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from math import floor, log10
from typing import Any, NamedTuple

import jax
import matplotlib

from nanotrain_jax.audit import cost, hardware
from nanotrain_jax.parallel import chart, gantt, schedule
from nanotrain_jax.planner import explain, markup
from nanotrain_jax.planner.compiled import moved
from nanotrain_jax.planner.estimate import Estimate, Verdict, layers_time, margin, verdict
from nanotrain_jax.planner.search import Found

# Backgrounds, each with the ink that can be read on it.
BLUE, GREEN, PURPLE, SLATE = (f"background:{c};color:#fff" for c in ("#4477aa", "#228833", "#aa3377", "#5b6573"))
CYAN, YELLOW, RED, GREY = (f"background:{c};color:#111" for c in ("#66ccee", "#ccbb44", "#ee6677", "#bbbbbb"))
PALE = "background:#a9b4c2;color:#111"
WAITS = "background:var(--waits);color:var(--ink)"
MOVES = "what moves over it and is not hidden"
PARTS = {  # of memory
    "params": (BLUE, "weights that compute"),
    "optimizer": (CYAN, "Adam's moments, and float32 weights beside 16-bit ones"),
    "gradients": (GREEN, "their sums, and what is being made"),
    "activations": (YELLOW, "what layers keep for their backward"),
    "loss": (RED, "logits and their gradient"),
    "layer": (PURPLE, "what one layer makes on its way"),
    "buffers": (GREY, "gathered, or on its way between GPUs"),
}
TIMES = {  # what a step's time goes into; others: several mesh axes together
    "compute": (BLUE, "matmuls, attention, norms; what is computed again"),
    "bubble": (WAITS, "stages wait for one another"),
    "update": (PURPLE, "the optimizer reads and writes its state"),
    "tensor": (YELLOW, MOVES),
    "data": (GREEN, MOVES),
    "replica": (CYAN, MOVES),
    "pipe": (RED, MOVES),
    "host": (GREY, "what is copied from and to host memory and is not hidden"),
}
DRAWN = {"stages": 8, "chunks": 4, "microbatches": 16, "units": 32}  # at most; with chunks half the stages
GB = 1e9
SHOWN = 10  # candidates, and reasons for rejection
SIGNS: dict[Verdict, str] = {"fits": "✓", "may not fit": "?", "does not fit": "✕"}
CLASSES: dict[Verdict, str] = {"fits": "good", "may not fit": "maybe", "does not fit": "bad"}


class Origin(NamedTuple):
    """Where a page comes from."""

    config: str  # path of the config
    command: str  # the command line
    made: str  # by which versions and when, see `made`


def made() -> str:
    """Versions of this package and of jax, and the date with the time zone."""
    try:
        ours = version("nanotrain_jax")
    except PackageNotFoundError:  # run from a folder, not installed
        ours = "(not installed)"
    return f"nanotrain_jax {ours}, jax {jax.__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"


def html(
    plan: Estimate,
    explained: Sequence[explain.Section],
    found: Found | None = None,
    compiled: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
) -> str:
    """The page of a plan, as text.

    explained: what explain.explain said. found: what search.search found, if it searched. compiled: what
    compiled.compile_step returned, if it compiled. origin: config, command line, versions and date, to be shown.
    Whatever text they hold is escaped.
    """
    m = plan.config.model
    name = f"{escape(m.family)} <span>{_short(cost.parameters(m))} parameters</span>"
    title = (f"{origin.config}: " if origin else "") + f"{m.family} on {plan.gpus} x {plan.gpu}"
    body = [_headline(plan, name, compiled), _memory(plan, compiled), _time(plan), _schedule(plan)]
    body += [_communication(plan, compiled), _candidates(plan, found), _formulas(explained)]
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
        return "Made by nanotrain_jax.plan."
    return f"<p>Config {escape(origin.config)}. {escape(origin.made)}.</p><code>{escape(origin.command)}</code>"


def _headline(plan: Estimate, name: str, compiled: Mapping[str, Any] | None) -> str:
    c, p, gpu = plan.config, plan.config.parallel, hardware.find(plan.gpu)
    sequences = c.data.batch_size // (p.replica * p.data * p.microbatches)
    facts = {
        "GPUs": f"{plan.gpus:,} x {gpu.kind}",
        "mesh": _mesh(plan),
        "ZeRO": f"stage {p.zero}" if p.zero else "none",
        "schedule": _schedule_name(plan) + (f", {p.chunks} chunks" if p.chunks > 1 else ""),
        "microbatches": f"{p.microbatches:,} of {sequences:,} x {c.data.seq_len:,} tokens",
        "remat": c.memory.remat,
    }
    if c.model.loss_chunk:
        facts["loss chunk"] = f"{c.model.loss_chunk:,} tokens"
    spare = plan.limit_bytes - (compiled["peak_bytes"] if compiled else plan.peak_bytes)
    by = f"{_gb(abs(spare))} {'to spare' if spare >= 0 else 'too much'}, {'compiled' if compiled else 'estimated'}"
    said = verdict(compiled["peak_bytes"], 0.0, plan.limit_bytes) if compiled else plan.verdict
    if said == "may not fit":
        by += f", less than the estimate's margin of {margin(c):.0%}: compile it (--compile)"
    mfu = f"of {gpu.peak_flops / 1e12:,.4g} TFLOP/s, attention in full; {plan.mfu_causal:.1%} with its causal half"
    waits = "of the schedule's time" if p.pipe > 1 else "there are no stages"
    speed, batch = plan.tokens_per_second, f"{c.data.batch_size:,} x {c.data.seq_len:,} tokens"
    tiles = (
        ("peak memory per GPU", *_gb(plan.peak_bytes).split(), f"of {_gb(plan.limit_bytes)} that JAX takes"),
        ("step, modelled", *_seconds(plan.step_seconds).split(), f"for {batch}"),
        ("tokens/s, modelled", f"{speed:,.0f}", "", f"{speed / plan.gpus:,.0f} per GPU"),
        ("MFU, modelled", f"{100 * plan.mfu:.1f}", "%", mfu),
        ("bubble, modelled", f"{100 * plan.bubble_fraction:.1f}", "%", waits),
    )
    return (
        f'<header><h1>{name}</h1><p class="verdict {CLASSES[said]}"><b>{SIGNS[said]} {said}</b> {by}</p>'
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
    whole, limit, moments = hardware.find(plan.gpu).memory_bytes, plan.limit_bytes, plan.moments
    sums = {moment: sum(parts.values()) for moment, parts in moments.items()}
    scale = max(whole, *sums.values(), compiled["peak_bytes"] if compiled else 0)
    line = f'<i class="limit" style="left:{limit / scale:.4%}"></i>'

    def row(name: str, parts: list[tuple[str, float, str]], more: str = "") -> str:
        total = sum(size for _, size, _ in parts)
        over, mark = "", line
        if total > limit:
            over, more = " over", f"{_gb(total - limit)} over"
            mark += f'<i class="excess" style="left:{limit / scale:.4%};width:{(total - limit) / scale:.4%}"></i>'
        peak = "<small>peak</small>" if name == plan.peak else ""
        figure = f"<span><b>{_gb(total)}</b><small>{more}</small></span>"
        return f'<div class="row{over}"><span>{name}{peak}</span>{markup.bar(parts, scale, _gb, mark)}{figure}</div>'

    flag = f"left:{limit / scale:.4%}" if limit < scale / 2 else f"right:{1 - limit / scale:.4%}"
    flag = f'<div class="flag"><span style="{flag}">limit {_gb(limit)}</span></div>'
    rows = [f'<div class="row"><span></span>{flag}</div>']
    rows += [row(moment, [(k, v, PARTS[k][0]) for k, v in parts.items()]) for moment, parts in moments.items()]
    lead = f"""What a GPU holds in the three moments of a step in which it may hold most. Of its {_gb(whole)} JAX
    takes the {limit / whole:.0%} up to the line. While a checkpoint is written, a host holds
    {_gb(plan.host_bytes)} of state."""
    if plan.on_host:
        parts = ", ".join(f"{what} {_gb(size)}" for what, size in plan.on_host.items())
        lead += f" For each GPU its host's memory holds {_gb(sum(plan.on_host.values()))} ({parts})."
    if plan.rough:
        lead += " Attention is not flash attention here, but stores its scores: the estimate is less exact."
    if compiled:
        peak = compiled["peak_bytes"]
        state = min(compiled["argument_bytes"], peak)
        parts = [("arguments", state, SLATE), ("the rest", peak - state, PALE)]
        rows.append(row("compiled", parts, f"ratio {peak / plan.peak_bytes:.3f}"))
        lead += " Compiled: the peak of the real step; its arguments are params, optimizer and a batch."
    table = [
        [markup.key(style, part), *(_number(parts[part] / GB) for parts in moments.values()), what]
        for part, (style, what) in PARTS.items()
    ]
    table.append(["together", *(_number(size / GB) for size in sums.values()), ""])
    head = ["part", *(f">{moment}, GB" for moment in moments), "what it is"]
    bars = f'<div class="rows">{"".join(rows)}</div>'
    return markup.section("Memory per GPU", lead, bars + markup.table(head, table, {len(table) - 1}))


def _time(plan: Estimate) -> str:
    bar, rows = [], []
    for what, s in plan.seconds.items():
        style, meaning = TIMES.get(what, (SLATE, MOVES))
        bar.append((_axes(what), s, style))
        rows.append([markup.key(style, _axes(what)), _seconds(s), f"{s / plan.step_seconds:.2%}", meaning])
    rows.append(["the step", _seconds(plan.step_seconds), "100%", ""])
    table = markup.table(["part", ">time, modelled", ">of the step", "what it is"], rows, {len(rows) - 1})
    lead = "Modelled: work takes as long as the slowest of the matrix units, the memory and the link that it needs."
    return markup.section(
        "Where the step's time goes",
        lead,
        f'<div class="rows">{markup.bar(bar, plan.step_seconds, _seconds)}</div>{table}',
    )


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
    table = schedule.make(p.schedule, P, M, C)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "page"}):  # text stays text; same page again
        file, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        gantt.picture(table, costs, widest=10.5).savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    for ink, ours in {  # for light and dark
        gantt.WAITS: "var(--waits)",
        gantt.PALE: "var(--mute)",
        f"stroke: {gantt.LINES}": "stroke: var(--page)",
    }.items():
        svg = svg.replace(ink, ours)
    sizes = (("stages", P, p.pipe), ("chunks", C, p.chunks), ("microbatches", M, p.microbatches))
    less = ", ".join(f"{n:,} of {whole:,} {what}" for what, n, whole in sizes if n < whole)
    lead = f"""Work is as wide as its modelled time. {f"Drawn are {less}" if less else "Drawn whole"}:
    {chart.stats(table, *costs).bubble_fraction:.1%} of the picture is bubble. Of the plan's own schedule, with both
    ends of the model and what moves, it is {plan.bubble_fraction:.1%}."""
    return markup.section(
        f"Schedule {_schedule_name(plan)}", lead, f'<div class="scroll gantt" tabindex="0">{svg}</div>'
    )


def _communication(plan: Estimate, compiled: Mapping[str, Any] | None) -> str:
    every = plan.transfers + plan.copies
    longest, rows = max((t.seconds for t in every), default=0.0), []
    for t in every:
        bar = markup.mini((t.exposed / longest, YELLOW), ((t.seconds - t.exposed) / longest, WAITS))
        when = "per microbatch" if t.when == "microbatch" else "per step"
        times = bar, _seconds(t.seconds), _seconds(t.exposed)
        rows.append([_axes(t.axis), t.op.replace("_", "-"), _number(t.bytes / GB), *times, t.link, when, t.why])
    head = ["axis", "operation", ">GB per GPU", "", ">time, modelled", ">exposed", "link", "when", "what"]
    body = markup.table(head, rows) if rows else "<p>Nothing moves between GPUs.</p>"
    if compiled:
        rows, theory, found = [], moved(plan), {(row["axis"], row["op"]): row for row in compiled["collectives"]}
        for axis, op in {**theory, **found}:
            said, row = theory[axis, op], found.get((axis, op), {})
            size = row.get("bytes_per_device", 0.0)
            sizes = _number(size / GB), _number(said / GB), f"{size / said:.3f}" if said else "-"
            alone = f"{row['exposed_bytes'] / size:.1%}" if size else "-"
            rows.append([_axes(axis), op.replace("_", "-"), *sizes, _number(row.get("count", 0)), alone])
        head = ["axis", "operation", ">compiled, GB", ">theory, GB", ">ratio", ">times", ">with nothing beside it"]
        body += "<h3>In the compiled step</h3>" + markup.table(head, rows)
    lead = "Bytes that a GPU sends in a step, and how long it takes. Exposed, in colour: while nothing is computed."
    if plan.copies:
        lead += " With its host it exchanges them, both ways at a time."
    return markup.section("What moves, by mesh axis", lead, body)


def _candidates(plan: Estimate, found: Found | None) -> str:
    if found is None:
        return ""
    best, rows, body = found.best[:SHOWN], [], ""
    for rank, e in enumerate(best, 1):
        p, bar = e.config.parallel, markup.mini((e.step_seconds / max(e.step_seconds for e in best), BLUE))
        remat = e.config.memory.remat + f", loss_chunk={e.config.model.loss_chunk}" * (e.config.model.loss_chunk > 0)
        layout = _mesh(e), p.zero, _schedule_name(e), p.chunks, f"{p.microbatches:,}", remat
        numbers = f"{100 * e.mfu:.1f}", f"{100 * e.bubble_fraction:.1f}"
        rows.append([rank, *layout, _number(e.peak_bytes / GB), bar, _seconds(e.step_seconds), *numbers])
    head = ["", "mesh", ">ZeRO", "schedule", ">chunks", ">microbatches", "remat", ">peak GB", "", ">step, modelled"]
    this = {i for i, e in enumerate(best) if e.config == plan.config}
    if best:
        body = markup.table([*head, ">MFU %", ">bubble %"], rows, this)
    reasons = found.rejected.most_common(SHOWN)
    if reasons:
        most, rest = reasons[0][1], found.rejected.total() - sum(n for _, n in reasons)
        rows = [[f"{n:,}", markup.mini((n / most, GREY)), reason] for reason, n in reasons]
        rows += [[f"{rest:,}", "", f"{len(found.rejected) - SHOWN:,} other reasons"]] * (rest > 0)
        body += "<h3>Rejected, and why</h3>" + markup.table([">layouts", "", "reason"], rows)
    lead = f"{found.tried:,} layouts were estimated. Here are the best of each mesh and schedule, fastest first"
    lead += "; this plan is marked." if this else "."
    return markup.section("Candidates", lead, body)


def _formulas(explained: Sequence[explain.Section]) -> str:
    body = ""
    for section in explained:
        body += f"<h3>{escape(section.title)} <small>{escape(section.source)}</small></h3>"
        for line in section.lines:
            sums = f"<code>= {escape(line.formula)}</code><code>= {escape(line.numbers)}</code>"
            value = f"<p><b>{explain.number(line.value)}</b> {escape(line.unit)}</p>"
            body += f'<div class="formula"><span>{escape(line.what)}</span><div>{sums}</div>{value}</div>'
    return (
        markup.section("Formulas", "Each with this plan's numbers put in, and where it comes from.", body)
        if body
        else ""
    )


def _axes(text: str) -> str:
    return text.replace(",", " x ")


def _mesh(e: Estimate) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in e.config.parallel.axes.items() if size > 1) or "one GPU"


def _schedule_name(e: Estimate) -> str:
    return e.config.parallel.schedule if e.config.parallel.pipe > 1 else "no stages"


def _number(x: float) -> str:
    """Whole numbers whole, others to three digits."""
    if float(x).is_integer():
        return f"{x:,.0f}"
    return f"{x:,.{max(0, 2 - floor(log10(abs(x))))}f}" if abs(x) >= 1e-4 else f"{x:.3g}"


def _gb(size: float) -> str:
    return f"{_number(size / GB)} GB"


def _seconds(s: float) -> str:
    unit, size = ("s", 1.0) if s >= 1 or s == 0 else ("ms", 1e-3) if s >= 1e-3 else ("µs", 1e-6)
    return f"{_number(s / size)} {unit}"


def _short(count: int) -> str:
    unit, size = next((u for u in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if count >= u[1]), ("K", 1e3))
    return f"{_number(count / size)}{unit}"
