"""Formulas of an estimate with this run's numbers substituted, and their sources.

The numbers of every line are arithmetic that evaluates to its value: the tests evaluate them.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple

from nanotrain_jax.costs import activations as costs
from nanotrain_jax.costs import communication, compression, counts, flops, hardware, memory, muon, offload
from nanotrain_jax.costs.communication import Traffic
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import ENDS, LAYERS, Parameter
from nanotrain_jax.planner.estimate import Estimate
from nanotrain_jax.planner.step_time import Transfer

DIMS = "VTDNKHF"  # in printing order: vocabulary, positions, model, query heads, kv heads, head dim, ffn


class Line(NamedTuple):
    """One formula: `what = formula = numbers = value unit`."""

    what: str
    formula: str
    numbers: str  # the formula with numbers substituted: digits with commas, + - x / ^ ( )
    value: float
    unit: str


class Section(NamedTuple):
    """Formulas of one topic, with their source."""

    title: str
    source: str
    lines: list[Line]


def explain(e: Estimate) -> list[Section]:
    """Return the sections of an estimate; each uses values of those before it."""
    sections = [parameters(e), compute(e), state(e), activations(e), peak(e), host(e), traffic(e), bubble(e), speed(e)]
    return [section for section in sections if section.lines]


def number(x: float) -> str:
    """Format a number: whole ones with commas, others with 5 significant digits."""
    return f"{round(x):,}" if x == round(x) and abs(x) < 1e15 else f"{x:.5g}"


def parameters(e: Estimate) -> Section:
    """Count all parameters, and those that multiply every token, from the dims in the parameter table."""
    m, n = e.config.model, number
    rows = table(m).values()
    of_layers = [row for row in rows if row.part == LAYERS]
    matmuls = _counted("matmuls, per layer", [row for row in of_layers if row.is_matmul])
    vectors = _counted("norms and biases, per layer", [row for row in of_layers if not row.is_matmul])
    ends = _counted("ends (before and after the layers)", [row for row in rows if row.part == ENDS])
    head = _counted("head", [row for row in rows if row.part == ENDS and row.is_matmul])
    lines = [
        matmuls,
        vectors,
        ends,
        Line(
            "total",
            "L (matmuls + norms and biases) + ends",
            f"{m.num_layers} x ({n(matmuls.value)} + {n(vectors.value)}) + {n(ends.value)}",
            counts.parameters(m),
            "parameters",
        ),
        Line(
            "N, parameters that multiply every token",
            f"L matmuls + {head.formula}",
            f"{m.num_layers} x {n(matmuls.value)} + {head.numbers}",
            counts.matmul_parameters(m),
            "parameters",
        ),
    ]
    return Section("Parameters", "GPT-2 (Radford et al. 2019), Llama 3 (arXiv 2407.21783, table 3)", lines)


def _counted(what: str, rows: list[Parameter]) -> Line:
    """Return the line of the sum of some rows: each product of dims, and its number of arrays."""
    sizes = [
        sorted(zip(row.layout.split(), row.shape, strict=True), key=lambda dim: DIMS.index(dim[0])) for row in rows
    ]
    formula, numbers = [], []
    for product, times in Counter(map(tuple, sizes)).items():
        names, values = zip(*product, strict=True)
        formula.append(" ".join([str(times)] * (times > 1) + list(names)))
        numbers.append(" x ".join(map(number, [times] * (times > 1) + list(values))))
    return Line(what, " + ".join(formula), " + ".join(numbers), sum(row.size for row in rows), "parameters")


def compute(e: Estimate) -> Section:
    """Return model FLOPs per token, and hardware FLOPs per GPU."""
    c, m, n = e.config, e.config.model, number
    L, D, T, N = m.num_layers, m.d_model, c.data.seq_len, counts.matmul_parameters(m)
    frozen = counts.frozen_matmul_parameters(c)
    local, tokens, iterations = flops.local_flops(c), counts.tokens_per_device(c), muon.flops(c)
    full = flops.flops_per_token(c)["full"]
    lines = [
        Line(
            "model FLOPs, per token",
            "6 N + 12 L D T" + " - 2 frozen" * bool(frozen),
            f"6 x {n(N)} + 12 x {L} x {n(D)} x {n(T)}" + f" - 2 x {n(frozen)}" * bool(frozen),
            full,
            "FLOPs",
        ),
        Line(
            "hardware FLOPs, per GPU and step",
            "(2 (layers + head) + 3 attention + weights + recompute) tokens" + " + Newton-Schulz" * bool(iterations),
            f"(2 x ({n(local['layers'])} + {n(local['head'])}) + 3 x {n(local['attention'])} + {n(local['weights'])} + "
            f"{n(local['recompute'])}) x {n(tokens)}" + f" + {n(iterations)}" * bool(iterations),
            e.flops,
            "FLOPs",
        ),
    ]
    source = "PaLM (arXiv 2204.02311, appendix B), full attention; hardware: of the stage with the head, over tensor"
    return Section("FLOPs", source, lines)


def state(e: Estimate) -> Section:
    """Return the bytes of training state between steps."""
    p, n = e.config.parallel, number
    full, shard = memory.trained_parameters(e.config)
    parts, b = memory.state(e.config), offload.weight_bytes(e.config)
    psi, over = sum(full.values()), sum(shard.values())
    parts_of_psi = f"{n(full[LAYERS])} + {n(full[ENDS])}"
    lines = [Line("Psi", "layers / (P t) + ends / t, of split arrays", parts_of_psi, psi, "parameters per GPU")]
    frozen, w = memory.frozen_elements(e.config), counts.BYTES[e.config.precision.compute]
    if frozen:
        lines[0] = lines[0]._replace(what="Psi, of trained parameters")
    if p.zero and counts.zero_devices(e.config) > 1:
        sharded = f"{n(shard[LAYERS])} + {n(shard[ENDS])}"
        axes = f"{p.data} data" + f" x {p.context} context" * (p.context > 1)
        lines.append(Line("Psi / N", f"N = {axes}, of sharded arrays", sharded, over, "parameters per GPU"))
    optimizer, spared = offload.optimizer_bytes(e.config), muon.spared_bytes(e.config)
    lines += [
        Line(
            "weights",
            f"{b} Psi" + " / N" * (p.zero == 3) + f" + {w} frozen" * bool(frozen),
            f"{b} x {n(over if p.zero == 3 else psi)}" + f" + {w} x {n(frozen)}" * bool(frozen),
            parts["params"],
            "bytes",
        ),
        Line(
            "master weights and moments" if b == 2 else "moments",
            f"{optimizer} Psi" + " / N" * (p.zero > 0) + " - 4 of matrices (muon)" * bool(spared),
            f"{optimizer} x {n(over if p.zero else psi)}" + f" - {n(spared)}" * bool(spared),
            parts["optimizer"],
            "bytes",
        ),
    ]
    if p.sync_every:
        formula, shown = "8 Psi" + " / N" * (p.zero > 0), f"8 x {n(over if p.zero else psi)}"
        lines.append(Line("theta and momentum of the outer optimizer", formula, shown, parts["outer"], "bytes"))
    if "residuals" in parts:
        residual, basis = compression.state_elements(e.config)
        shown = f"4 x ({n(residual)} + {n(basis)})"
        formula = "4 (elements of compressed arrays + bases)"
        lines.append(Line(f"residuals of parallel.compress={p.compress}", formula, shown, parts["residuals"], "bytes"))
    return Section("Model states", "ZeRO (arXiv 1910.02054, section 3.1)", lines)


def activations(e: Estimate) -> Section:
    """Return what layers store from their forward to their backward."""
    c, p, n = e.config, e.config.parallel, number
    b, tokens = counts.BYTES[c.precision.compute], counts.tokens_per_device(c) / p.microbatches
    remat = c.memory.rematerialization
    layer, stored = costs.layer_activations(c, remat), costs.activations(c)
    like_x, inner = costs.layer_widths(c, remat)
    split = p.tensor if p.sequence_parallel else 1
    lines = [
        Line(
            f"per layer and token (remat {remat})",
            "residual width / t + inner width / t" if split > 1 else "residual width + inner width / t",
            f"{n(like_x)} / {split} + {n(inner)} / {p.tensor}",
            layer,
            "elements",
        )
    ]
    if p.pipe == 1:
        shown = f"{c.model.num_layers} x {n(layer)}"
        lines.append(Line("all layers", "L layers", shown, stored, "elements per token"))
    else:
        slots = counts.outline(c).slots
        late, handed = costs.weight_grad_residuals(c, remat)
        in_slots = f"{slots['backward']} x ({n(layer)} - {n(late)}) + {slots['backward_weight']} x {n(late)}"
        waiting = f"({slots['inputs']} + {slots['gradients']}) x {c.model.d_model} / {split}"
        formula = "L / C (slots (layer - late) + late slots late + handed slots handed) + stage buffers x"
        in_slots += f" + {slots['intermediates']} x {n(handed)}"
        numbers = f"{counts.stage_layers(c)} / {p.chunks} x ({in_slots}) + {waiting}"
        if p.idle == "skip":
            lines.append(Line("all layers of a stage", formula, numbers, stored, "elements per token"))
    size = e.moments["loss"]["activations"] + e.on_host.get("activations", 0.0)
    lines.append(Line("activations", "bytes tokens elements", f"{b} x {n(tokens)} x {n(stored)}", size, "bytes"))
    return Section("Activations", "Korthikanti et al. 2022 (arXiv 2205.05198, section 4), without dropout", lines)


def peak(e: Estimate) -> Section:
    """Return the sum of the parts of each moment."""
    lines = []
    for moment, parts in e.moments.items():
        present = {part: size for part, size in parts.items() if size}
        shown = " + ".join(f"{size / 1e9:.5g}" for size in present.values())
        lines.append(Line(moment, " + ".join(present), shown, sum(parts.values()) / 1e9, "GB"))
    return Section("Peak memory", "the largest of four moments; costs/memory.py describes each part", lines)


def host(e: Estimate) -> Section:
    """Return host memory, and host-device copies."""
    parameters, b = offload.offloaded(e.config), counts.BYTES[e.config.precision.compute]
    elements = sum(x.size for x in parameters)
    gradients = sum(x.size for x in parameters if x.has_host_gradient)
    factors = {
        "optimizer": (offload.optimizer_bytes(e.config), sum(x.size for x in offload.updated(e.config))),
        "params": (b, elements),
        "gradients": (4, gradients),
    }
    lines = []
    for part, size in e.on_host.items():
        factor, S = factors.get(part, (1, size))
        shown = (
            ("activations of all layers", number(size))
            if part == "activations"
            else (f"{factor} S", f"{factor} x {number(S)}")
        )
        lines.append(Line(part, *shown, size, "bytes"))
    for to in ("device", "host"):
        rows = [t for t in e.copies if t.op == f"to {to}"]
        formula, shown = " + ".join(t.why for t in rows), " + ".join(f"{t.bytes / 1e9:.5g}" for t in rows)
        lines += [Line(f"copied to the {to}", formula, shown, sum(t.bytes for t in rows) / 1e9, "GB")] if rows else []
    source = "ZeRO-Offload (2101.06840), ZeRO-Infinity (2104.07857); S: offloaded elements. costs/offload.py"
    return Section("Host memory, per GPU and step", source, lines)


def traffic(e: Estimate) -> Section:
    """Return every transfer: the ring factor times the full buffers."""
    lines = []
    for t in e.transfers:
        group, (formula, numbers) = prod(getattr(e.config.parallel, axis) for axis in t.axis.split(",")), buffers(e, t)
        if t.op != "permute":
            factor = 2 if t.op == "all_reduce" else 1
            formula, numbers = f"(n - 1) / n {formula}", f"({group} - 1) / {group} x {numbers}"
            formula, numbers = ("2 " + formula, f"{factor} x {numbers}") if factor == 2 else (formula, numbers)
        lines.append(Line(f"{t.axis} {t.op}", formula, numbers, t.bytes, f"bytes: {t.why}"))
    source = "rings; volumes: ZeRO (1910.02054, section 7), Megatron-LM (1909.08053, 2205.05198, 2104.04473)"
    return Section("Communication, per GPU and step", source, lines)


def buffers(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of a transfer as formula and numbers: b bytes of activations, w weights, g gradients."""
    c, m, p, n = e.config, e.config.model, e.config.parallel, number
    b, tokens = counts.BYTES[c.precision.compute], counts.tokens_per_device(c)
    L, M = counts.stage_layers(c), p.microbatches
    if t.what in (Traffic.ATTENTION, Traffic.HEADS):
        return attention_buffers(e, t)
    if t.what is Traffic.BETWEEN_STAGES:
        split, ticks = p.tensor if p.sequence_parallel else 1, counts.outline(c).ticks
        shown = f"2 x {ticks} x {b} x {n(tokens)} / {M} x {n(m.d_model)} / {split}"
        return "2 ticks b B T D / M" + " / t" * (split > 1), shown
    if t.what is Traffic.SHARED_BY_STAGES:
        split, times = p.tensor if p.sequence_parallel else 1, communication.shares_of_ends(c)
        shown = f"4 x {times} x {b} x {n(tokens)} / {M} x {n(m.d_model)} / {split}"
        return ("4 ticks" if p.chunks == 1 else "4 M") + " b B T D / M" + " / t" * (split > 1), shown
    if t.what in (Traffic.ACTIVATIONS, Traffic.REGATHERED_ACTIVATIONS):
        gathers, scatters = communication.tensor_passes(c)
        passes = scatters if t.op == "reduce_scatter" else gathers
        return f"b B T D ({passes} L + 2)", f"{b} x {n(tokens)} x {n(m.d_model)} x ({passes} x {L} + 2)"
    if t.what in (Traffic.SYNCHRONIZATION, Traffic.COMPRESSED):
        return replica_buffers(e, t)
    if t.what is Traffic.MOMENTUM:
        size = sum(x.bytes for x in muon.exchanges(c) if ",".join(x.axes) == t.axis) / 2
        return "2 of matrices, padded to whole matrices per device", f"2 x {n(size)}"
    if t.what is Traffic.LOSS:
        return "3 x 4 B T", f"3 x 4 x {n(tokens)}"
    return parameter_buffers(e, t)


def attention_buffers(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of attention over context; of a ring, the bytes sent. KH: of a tensor-parallel device."""
    c, p, n = e.config, e.config.parallel, number
    b, L, size = counts.BYTES[c.precision.compute], counts.stage_layers(c), p.context
    tokens, width = n(counts.tokens_per_device(c)), n(counts.local_kv_width(c))
    passes = 3 if counts.repeats_communication(c) else 2
    if t.op == "permute":
        shown = f"2 x {L} x {tokens} x {width} x ({passes} x ({size} - 1) x {b} + 4 x {size})"
        return f"2 L B T KH ({passes} (c - 1) b + 4 c)", shown
    if t.op == "all_gather":
        return f"{passes} c b 2 L B T KH", f"{passes} x {size} x {b} x 2 x {L} x {tokens} x {width}"
    if t.op == "reduce_scatter":
        return "4 c 2 L B T KH", f"4 x {size} x 2 x {L} x {tokens} x {width}"
    copies, queries = n(communication.ulysses_copies(c)), f"{n(c.model.d_model)} / {p.tensor}"
    shown = f"{passes} x {b} x 2 x {L} x {tokens} x ({queries} + {copies} x {width})"
    return f"{passes} b 2 L B T (D / t + copies KH)", shown


def replica_buffers(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of what is summed over replica apart from other gradients, or of weights after it."""
    c, p = e.config, e.config.parallel
    summed = [s.bytes for s in compression.all_sums(c) if (",".join(s.axes), s.op) == (t.axis, t.op)]
    way = "float32" if p.compression.kind == "none" else p.compress
    formula, size = f"of the arrays in {way}", number(sum(summed))
    if not summed:
        w = counts.BYTES[c.precision.compute]
        formula, size = "w Psi", f"{w} x {number(communication.sharded_elements(c))}"
    steps = p.sync_every if t.what is Traffic.SYNCHRONIZATION else 1
    return (f"{formula} / parallel.sync_every", f"{size} / {steps}") if steps > 1 else (formula, size)


def parameter_buffers(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of gradients or weights of a transfer, from the same table as its bytes."""
    plain = counts.gradient_bytes(e.config) if t.what.is_gradients else counts.BYTES[e.config.precision.compute]
    symbols = {plain: "g" if t.what.is_gradients else "w"}
    by_itemsize: dict[float, dict[tuple[str, int], float]] = {}
    for buffer in communication.parameter_buffers(e.config):
        if (",".join(buffer.axes), buffer.op, buffer.what) == (t.axis, t.op, t.what):
            elements, key = by_itemsize.setdefault(buffer.itemsize, {}), (buffer.part, buffer.times)
            elements[key] = elements.get(key, 0.0) + buffer.elements
    formulas, numbers = [], []
    for itemsize, elements in by_itemsize.items():
        formula = " + ".join(f"{times} Psi_{name}" for name, times in elements)
        shown = " + ".join(f"{times} x {number(size)}" for (_, times), size in elements.items())
        formulas.append(f"{symbols.get(itemsize, itemsize)} ({formula})")
        numbers.append(f"{itemsize} x ({shown})")
    formula, shown = (
        " + ".join(terms) if len(terms) == 1 else f"({' + '.join(terms)})" for terms in (formulas, numbers)
    )
    return f"{formula}, of the arrays in this transfer", shown


def bubble(e: Estimate) -> Section:
    """Return the bubble: published, and of the modelled schedule."""
    p = e.config.parallel
    if p.pipe == 1:
        return Section("Pipeline bubble", "", [])
    P, M, C = p.pipe, p.microbatches, p.chunks
    lines = []
    if p.schedule in ("gpipe", "1f1b", "interleaved"):
        ideal = (P - 1) / (C * M)
        numbers = f"({P} - 1) / ({C} x {M})"
        lines.append(Line("bubble / ideal time", "(P - 1) / (C M)", numbers, ideal, "(published)"))
    idle = e.seconds.get("bubble", 0.0)
    busy = idle / e.bubble_fraction - idle if e.bubble_fraction else 0.0
    if idle:
        numbers = f"{idle!r} / ({busy!r} + {idle!r})"
        what = "bubble / schedule time (modelled, with the head and the latency of ticks)"
        lines.append(Line(what, "idle / (busy + idle)", numbers, e.bubble_fraction, ""))
    return Section("Pipeline bubble", "Narayanan et al. 2021 (arXiv 2104.04473, section 2.2)", lines)


def speed(e: Estimate) -> Section:
    """Return the modelled step time, throughput and MFU."""
    c, n, gpu = e.config, number, hardware.find(e.gpu)
    tokens = c.data.batch_size * c.data.seq_len
    full, causal = flops.flops_per_token(c).values()
    shown = " + ".join(f"{s:.6g}" for s in e.seconds.values())
    lines = [
        Line("step time", " + ".join(e.seconds), shown, e.step_seconds, "s"),
        Line(
            "tokens per second",
            "batch T / step time",
            f"{c.data.batch_size} x {n(c.data.seq_len)} / {e.step_seconds!r}",
            e.tokens_per_second,
            "",
        ),
        Line(
            "MFU",
            "model FLOPs per token x tokens / (step time GPUs peak FLOP/s)",
            f"{n(full)} x {n(tokens)} / ({e.step_seconds!r} x {e.gpus} x {gpu.peak_flops:.6g})",
            e.mfu,
            "full attention (PaLM)",
        ),
        Line(
            "MFU, causal",
            "(6 N + 6 L D T) tokens / (step time GPUs peak FLOP/s)",
            f"{n(causal)} x {n(tokens)} / ({e.step_seconds!r} x {e.gpus} x {gpu.peak_flops:.6g})",
            e.mfu_causal,
            "causal half of attention",
        ),
    ]
    source = "roofline (Williams et al. 2009), efficiencies of planner/estimate.py"
    return Section("Throughput, modelled", source, lines)
