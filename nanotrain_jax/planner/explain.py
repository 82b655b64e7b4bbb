"""The formulas behind an estimate, with this model's numbers put in, and where they come from.

Every line's numbers are arithmetic that gives its value: the tests compute them again.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple

from nanotrain_jax.audit import cost, hardware, memory, offloaded
from nanotrain_jax.audit.cost import Traffic
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import ENDS, LAYERS, Parameter
from nanotrain_jax.planner.estimate import Estimate, Transfer

DIMS = "VTDNKHF"  # in the order in which they are written: vocabulary, positions, model, heads, head dim, ffn


class Line(NamedTuple):
    """One formula: `what = formula = numbers = value unit`."""

    what: str
    formula: str
    numbers: str  # the formula with numbers put in: digits with commas, + - x / ^ ( )
    value: float
    unit: str


class Section(NamedTuple):
    """Lines that belong together."""

    title: str
    source: str
    lines: list[Line]


def explain(e: Estimate) -> list[Section]:
    """The sections of an estimate, each building on those before it."""
    found = [parameters(e), flops(e), state(e), activations(e), peak(e), host(e), moves(e), schedule(e), speed(e)]
    return [section for section in found if section.lines]


def number(x: float) -> str:
    """A number as people and Python read it: whole ones with commas, others with 5 digits."""
    return f"{round(x):,}" if x == round(x) and abs(x) < 1e15 else f"{x:.5g}"


def parameters(e: Estimate) -> Section:
    """How many, and how many of them multiply every token; by the table of parameters, from the names of its dims."""
    m, n = e.config.model, number
    rows = table(m).values()
    of_layers = [row for row in rows if row.part == LAYERS]
    matmuls = _counted("matmuls of a layer", [row for row in of_layers if row.is_matmul])
    vectors = _counted("norms and biases of a layer", [row for row in of_layers if not row.is_matmul])
    ends = _counted("both ends", [row for row in rows if row.part == ENDS])
    head = _counted("head", [row for row in rows if row.part == ENDS and row.is_matmul])
    lines = [
        matmuls,
        vectors,
        ends,
        Line(
            "all",
            "L (matmuls + norms and biases) + ends",
            f"{m.num_layers} x ({n(matmuls.value)} + {n(vectors.value)}) + {n(ends.value)}",
            cost.parameters(m),
            "parameters",
        ),
        Line(
            "N, which multiply every token",
            f"L matmuls + {head.formula}",
            f"{m.num_layers} x {n(matmuls.value)} + {head.numbers}",
            cost.matmul_parameters(m),
            "parameters",
        ),
    ]
    return Section("Parameters", "GPT-2 (Radford et al. 2019), Llama 3 (arXiv 2407.21783, table 3)", lines)


def _counted(what: str, rows: list[Parameter]) -> Line:
    """The number of parameters of some rows: each product of dims, and how often it is there."""
    sizes = [
        sorted(zip(row.layout.split(), row.shape, strict=True), key=lambda dim: DIMS.index(dim[0])) for row in rows
    ]
    formula, numbers = [], []
    for product, times in Counter(map(tuple, sizes)).items():
        names, values = zip(*product, strict=True)
        formula.append(" ".join([str(times)] * (times > 1) + list(names)))
        numbers.append(" x ".join(map(number, [times] * (times > 1) + list(values))))
    return Line(what, " + ".join(formula), " + ".join(numbers), sum(row.size for row in rows), "parameters")


def flops(e: Estimate) -> Section:
    """What a token costs, and what one GPU executes."""
    c, m, n = e.config, e.config.model, number
    L, D, T, N = m.num_layers, m.d_model, c.data.seq_len, cost.matmul_parameters(m)
    here, tokens = cost.flops_here(c), cost.tokens_per_device(c)
    forward = f"{n(here['layers'])} + {n(here['head'])} + {n(here['attention'])}"
    full = cost.flops_per_token(m, T)["full"]
    lines = [
        Line("useful, per token", "6 N + 12 L D T", f"6 x {n(N)} + 12 x {L} x {n(D)} x {n(T)}", full, "FLOPs"),
        Line(
            "executed by a GPU, per step",
            "(3 (layers + head + attention) + computed again) tokens",
            f"(3 x ({forward}) + {n(here['again'])}) x {n(tokens)}",
            e.flops,
            "FLOPs",
        ),
    ]
    source = "PaLM (arXiv 2204.02311, appendix B), attention in full; of the stage with the head, over tensor"
    return Section("FLOPs", source, lines)


def state(e: Estimate) -> Section:
    """What rests between steps."""
    p, n = e.config.parallel, number
    whole, shard = memory.held(e.config)
    parts, b = memory.state(e.config), cost.BYTES[e.config.precision.compute]
    psi, over = sum(whole.values()), sum(shard.values())
    here = f"{n(whole[LAYERS])} + {n(whole[ENDS])}"
    lines = [Line("Psi", "layers / (P t) + ends / t, what is split", here, psi, "parameters on a GPU")]
    if p.zero and p.data > 1:
        both = f"{n(shard[LAYERS])} + {n(shard[ENDS])}"
        lines.append(Line("Psi / N", f"over {p.data} data, what is split", both, over, "parameters"))
    rests = 12 if b == 2 else 8
    lines += [
        Line(
            "weights",
            f"{b} Psi" + " / N" * (p.zero == 3),
            f"{b} x {n(over if p.zero == 3 else psi)}",
            parts["params"],
            "bytes",
        ),
        Line(
            "master weights and moments" if b == 2 else "moments",
            f"{rests} Psi" + " / N" * (p.zero > 0),
            f"{rests} x {n(over if p.zero else psi)}",
            parts["optimizer"],
            "bytes",
        ),
    ]
    return Section("State", "ZeRO (arXiv 1910.02054, section 3.1)", lines)


def activations(e: Estimate) -> Section:
    """What layers keep between their forward and their backward."""
    c, p, n = e.config, e.config.parallel, number
    b, tokens = cost.BYTES[c.precision.compute], cost.tokens_per_device(c) / p.microbatches
    remat = c.memory.rematerialization
    layer, kept = memory.layer_activations(c, remat), memory.activations(c)
    whole, inside = memory.layer_parts(c, remat)
    split = p.tensor if p.sequence_parallel else 1
    lines = [
        Line(
            f"a layer, per token (remat {remat})",
            "whole / t + split / t" if split > 1 else "whole + split / t",
            f"{n(whole)} / {split} + {n(inside)} / {p.tensor}",
            layer,
            "elements",
        )
    ]
    if p.pipe == 1:
        shown = f"{c.model.num_layers} x {n(layer)}"
        lines.append(Line("all layers", "L of them", shown, kept, "elements per token"))
    else:
        slots = cost.outline(c).slots
        late, handed = memory.layer_split(c, remat)
        one = f"{slots['backward']} x ({n(layer)} - {n(late)}) + {slots['late']} x {n(late)}"
        waiting = f"({slots['inputs']} + {slots['gradients']}) x {c.model.d_model} / {split}"
        formula = "L / (P C) (slots (a layer - late) + late slots late + handed slots handed) + waiting x"
        numbers = (
            f"{c.model.num_layers} / ({p.pipe} x {p.chunks}) x ({one} + {slots['handed']} x {n(handed)}) + {waiting}"
        )
        if p.idle == "skip":
            lines.append(Line("all that a stage keeps", formula, numbers, kept, "elements per token"))
    size = e.moments["loss"]["activations"] + e.on_host.get("activations", 0.0)
    lines.append(Line("of a microbatch", "bytes tokens elements", f"{b} x {n(tokens)} x {n(kept)}", size, "bytes"))
    return Section("Activations", "Korthikanti et al. 2022 (arXiv 2205.05198, section 4), without dropout", lines)


def peak(e: Estimate) -> Section:
    """The three moments, part by part."""
    lines = []
    for moment, parts in e.moments.items():
        kept = {what: size for what, size in parts.items() if size}
        shown = " + ".join(f"{size / 1e9:.5g}" for size in kept.values())
        lines.append(Line(moment, " + ".join(kept), shown, sum(parts.values()) / 1e9, "GB"))
    return Section("Peak", "the largest of three moments; audit/memory.py says what each part is", lines)


def host(e: Estimate) -> Section:
    """What rests in host memory, and what is copied."""
    found, b = offloaded.large(e.config), cost.BYTES[e.config.precision.compute]
    every, gradients = sum(x.size for x in found), sum(x.size for x in found if x.far_gradient)
    factors = {
        "optimizer": (offloaded.optimizer_bytes(e.config), every),
        "params": (b, every),
        "gradients": (4, gradients),
    }
    lines = []
    for what, size in e.on_host.items():
        factor, elements = factors.get(what, (1, size))
        shown = (
            ("what layers keep", number(size))
            if what == "activations"
            else (f"{factor} S", f"{factor} x {number(elements)}")
        )
        lines.append(Line(what, *shown, size, "bytes"))
    for to in ("device", "host"):
        rows = [t for t in e.copies if t.op == f"to {to}"]
        formula, shown = " + ".join(t.why for t in rows), " + ".join(f"{t.bytes / 1e9:.5g}" for t in rows)
        lines += [Line(f"copied to the {to}", formula, shown, sum(t.bytes for t in rows) / 1e9, "GB")] if rows else []
    source = "ZeRO-Offload (2101.06840), ZeRO-Infinity (2104.07857); S: elements that rest there. audit/offloaded.py"
    return Section("Host memory, per GPU and step", source, lines)


def moves(e: Estimate) -> Section:
    """Every row of what moves: the ring's factor and the whole buffers."""
    lines = []
    for t in e.transfers:
        group, (formula, numbers) = prod(getattr(e.config.parallel, axis) for axis in t.axis.split(",")), buffers(e, t)
        if t.op != "permute":
            factor = 2 if t.op == "all_reduce" else 1
            formula, numbers = f"(n - 1) / n {formula}", f"({group} - 1) / {group} x {numbers}"
            formula, numbers = ("2 " + formula, f"{factor} x {numbers}") if factor == 2 else (formula, numbers)
        lines.append(Line(f"{t.axis} {t.op}", formula, numbers, t.bytes, f"bytes: {t.why}"))
    source = "rings; volumes: ZeRO (1910.02054, section 7), Megatron-LM (1909.08053, 2205.05198, 2104.04473)"
    return Section("What moves, per GPU and step", source, lines)


def buffers(e: Estimate, t: Transfer) -> tuple[str, str]:
    """The whole buffers of a row, as a formula and in numbers: bytes b of x, w of weights, g of gradients."""
    c, m, p, n = e.config, e.config.model, e.config.parallel, number
    b, tokens = cost.BYTES[c.precision.compute], cost.tokens_per_device(c)
    L, M = m.num_layers // p.pipe, p.microbatches
    if t.op == "permute":
        split, ticks = p.tensor if p.sequence_parallel else 1, cost.outline(c).ticks
        shown = f"2 x {ticks} x {b} x {n(tokens)} / {M} x {n(m.d_model)} / {split}"
        return "2 ticks b B T D / M" + " / t" * (split > 1), shown
    if t.what in (Traffic.ACTIVATIONS, Traffic.ACTIVATIONS_AND_AGAIN):
        there, back = cost.tensor_passes(c)
        passes = back if t.op == "reduce_scatter" else there
        return f"b B T D ({passes} L + 2)", f"{b} x {n(tokens)} x {n(m.d_model)} x ({passes} x {L} + 2)"
    if t.what is Traffic.LOSS:
        return "3 x 4 B T", f"3 x 4 x {n(tokens)}"
    return parameters_moved(e, t)


def parameters_moved(e: Estimate, t: Transfer) -> tuple[str, str]:
    """The whole buffers of gradients or weights of a row, from the same table as its bytes."""
    elements: dict[tuple[int, str, int], float] = {}
    for part in cost.parameter_buffers(e.config):
        if (",".join(part.axes), part.op, part.what) == (t.axis, t.op, t.what):
            key = part.itemsize, part.part, part.times
            elements[key] = elements.get(key, 0.0) + part.elements
    itemsize = next(iter(elements))[0]
    formula = " + ".join(f"{times} Psi_{name}" for _, name, times in elements)
    numbers = " + ".join(f"{times} x {number(size)}" for (_, _, times), size in elements.items())
    symbol = "g" if t.what.is_gradients else "w"
    return f"{symbol} ({formula}), of what moves this way", f"{itemsize} x ({numbers})"


def schedule(e: Estimate) -> Section:
    """How long stages wait."""
    p = e.config.parallel
    if p.pipe == 1:
        return Section("Pipeline", "", [])
    P, M, C = p.pipe, p.microbatches, p.chunks
    lines = []
    if p.schedule in ("gpipe", "1f1b", "interleaved"):
        ideal = (P - 1) / (C * M)
        numbers = f"({P} - 1) / ({C} x {M})"
        lines.append(Line("bubble, of the ideal time", "(P - 1) / (C M)", numbers, ideal, "(published)"))
    bubble = e.seconds.get("bubble", 0.0)
    busy = bubble / e.bubble_fraction - bubble if e.bubble_fraction else 0.0
    if bubble:
        numbers = f"{bubble!r} / ({busy!r} + {bubble!r})"
        what = "bubble, of the schedule (modelled, with the head and what a tick costs)"
        lines.append(Line(what, "waiting / (work + waiting)", numbers, e.bubble_fraction, ""))
    return Section("Pipeline", "Narayanan et al. 2021 (arXiv 2104.04473, section 2.2)", lines)


def speed(e: Estimate) -> Section:
    """The modelled step, and what is made of it."""
    c, n, gpu = e.config, number, hardware.find(e.gpu)
    tokens = c.data.batch_size * c.data.seq_len
    full, causal = cost.flops_per_token(c.model, c.data.seq_len).values()
    shown = " + ".join(f"{s:.6g}" for s in e.seconds.values())
    lines = [
        Line("step (modelled)", " + ".join(e.seconds), shown, e.step_seconds, "s"),
        Line(
            "tokens per second",
            "batch T / step",
            f"{c.data.batch_size} x {n(c.data.seq_len)} / {e.step_seconds!r}",
            e.tokens_per_second,
            "",
        ),
        Line(
            "MFU",
            "useful FLOPs / (step GPUs peak)",
            f"{n(full)} x {n(tokens)} / ({e.step_seconds!r} x {e.gpus} x {gpu.peak_flops:.6g})",
            e.mfu,
            "attention in full (PaLM)",
        ),
        Line(
            "MFU, causal",
            "(6 N + 6 L D T) tokens / (step GPUs peak)",
            f"{n(causal)} x {n(tokens)} / ({e.step_seconds!r} x {e.gpus} x {gpu.peak_flops:.6g})",
            e.mfu_causal,
            "attention's causal half",
        ),
    ]
    return Section("Speed, modelled", "roofline (Williams et al. 2009) with the shares in planner/estimate.py", lines)
