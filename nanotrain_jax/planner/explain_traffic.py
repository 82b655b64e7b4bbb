"""Formulas of an estimate's wire bytes with this run's numbers substituted, as planner/explain.py."""

from __future__ import annotations

from math import prod

from nanotrain_jax.config.schema import EIGHT_BITS
from nanotrain_jax.costs import communication, compression, counts, mixture, muon, tensor_traffic, vision
from nanotrain_jax.costs.parameter_traffic import parameter_buffers, sharded_elements
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.planner.estimate import Estimate
from nanotrain_jax.planner.formula import Line, Section, number
from nanotrain_jax.planner.step_time import Transfer


def traffic(e: Estimate) -> Section:
    """Return every transfer: the ring factor times the full buffers."""
    lines = []
    for t in e.transfers:
        group, (formula, numbers) = prod(e.config.parallel.axes[axis] for axis in t.axis.split(",")), buffers(e, t)
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
    L, M = counts.stage_layers(c) + m.dense_layers, p.microbatches
    if t.what in (Traffic.ATTENTION, Traffic.HEADS):
        return attention_buffers(e, t)
    if t.what is Traffic.BETWEEN_STAGES:
        split, ticks = p.tensor if p.sequence_parallel else 1, counts.outline(c).ticks
        of_x, queue = f"{b} x {n(tokens)} / {M} x {n(m.d_model)} / {split}", mixture.router_queue_bytes(c)
        formula = "b B T D / M" + " / t" * (split > 1)
        if queue:
            return f"2 ticks ({formula} + routers)", f"2 x {ticks} x ({of_x} + {n(queue)})"
        return f"2 ticks {formula}", f"2 x {ticks} x {of_x}"
    if t.what is Traffic.SHARED_BY_STAGES:
        split, times = p.tensor if p.sequence_parallel else 1, communication.shares_of_ends(c)
        each = times // M if times in (3 * M, 4 * M) else times // counts.outline(c).ticks
        shown = f"{each} x {times // each} x {b} x {n(tokens)} / {M} x {n(m.d_model)} / {split}"
        often, queue = "M" if times == each * M else "ticks", mixture.router_queue_bytes(c)
        if queue:
            formula = f"{each} {often} (b B T D / M" + " / t" * (split > 1) + " + routers)"
            return formula, f"({shown} + {each} x {times // each} x {n(queue)})"
        return f"{each} {often} b B T D / M" + " / t" * (split > 1), shown
    if t.what in (Traffic.ACTIVATIONS, Traffic.REGATHERED_ACTIVATIONS):
        gathers, scatters = tensor_traffic.tensor_passes(c)
        passes = scatters if t.op == "reduce_scatter" else gathers
        ends = tensor_traffic.ends_gathered(c) if t.op == "all_gather" else tensor_traffic.ends_scattered(c)
        return f"b B T D ({passes} L + {ends})", f"{b} x {n(tokens)} x {n(m.d_model)} x ({passes} x {L} + {ends})"
    if t.what is Traffic.ADAPTERS:
        (_, times), R = counts.adapted(c), m.lora.rank
        times *= 1 + (t.op != "all_gather" and c.memory.rematerialization.recomputes_layers)
        return f"{times} L b B T R", f"{times} x {L} x {b} x {n(tokens)} x {R}"
    if t.what in (Traffic.ENCODER, Traffic.ENCODED, Traffic.QUESTION):
        return of_pictures(e, t)
    if t.what in (Traffic.SYNCHRONIZATION, Traffic.COMPRESSED):
        return replica_buffers(e, t)
    if t.what is Traffic.MOMENTUM:
        size = sum(x.bytes for x in muon.exchanges(c) if ",".join(x.axes) == t.axis) / 2
        return "2 of matrices, padded to whole matrices per device", f"2 x {n(size)}"
    if t.what is Traffic.ROUTERS:
        size = sum(size for axes, size in communication.router_buffers(c) if ",".join(axes) == t.axis)
        return "loads of L E experts, of microbatches and the step", n(size)
    if t.what is Traffic.EXPERTS:
        return exchanged_rows(e)
    if t.what is Traffic.LOSS and t.axis == "context":  # of DPO
        sequences, pairs = tokens * p.context / c.data.seq_len, c.data.pairs_per_row
        return "7 x 4 P B", f"7 x 4 x {pairs} x {n(sequences)}"
    if t.what is Traffic.LOSS:
        again = "2 x " * counts.computes_logits_again(c)
        return f"{again}3 x 4 B T", f"{again}3 x 4 x {n(tokens)}"
    return of_parameters(e, t)


def of_pictures(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of the encoder's activations, or of the encoded pictures."""
    c, v, p, n, D = e.config, e.config.vision, e.config.parallel, number, number(e.config.model.d_model)
    b, K, encoded = counts.BYTES[c.precision.compute], v.max_tokens, n(vision.pictures(c))
    if t.what is Traffic.ENCODER:
        times = vision.all_reduces_per_layer(c)
        return f"b pictures {times} L K E", f"{b} x {encoded} x {times} x {v.num_layers} x {K} x {n(v.width)}"
    if t.axis == "pipe":
        starts = t.op == "all_gather"  # where attention begins
        formula, shown = "b K D" + " + 4 T" * starts, f"{b} x {K} x {D}" + f" + 4 x {n(c.data.seq_len)}" * starts
        return f"P pictures ({formula})", f"{p.pipe} x {encoded} x ({shown})"
    if t.what is Traffic.QUESTION:
        return "b D Q pictures", f"{b} x {D} x {vision.text_tokens(c)} x {encoded}"
    return "b D K B", f"{b} x {D} x {K} x {n(counts.rows_per_device(c))}"


def attention_buffers(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of attention over context; of a ring, the bytes sent. KH: of a tensor-parallel device."""
    c, p, n = e.config, e.config.parallel, number
    b, L, size = counts.BYTES[c.precision.compute], counts.stage_layers(c) + c.model.dense_layers, p.context
    tokens, width = n(counts.tokens_per_device(c)), n(counts.local_kv_width(c))
    passes = n(communication.attention_passes(c))
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


def exchanged_rows(e: Estimate) -> tuple[str, str]:
    """Return the full buffers of rows that travel to their experts and back, S of a microbatch."""
    c, n = e.config, number
    b, again = counts.BYTES[c.precision.compute], c.memory.rematerialization.policy == "block"
    times = communication.exchanges(c)
    layers = counts.stage_layers(c) * counts.runs(c, LAYERS)
    rows = f"{n(mixture.exchanged_rows(c))} x ({n(times)} x {b} x {n(c.model.d_model)} + {4 * (3 + again)})"
    formula = f"L M (S ({n(times)} b D + {4 * (3 + again)}) + {4 * (2 + again)} E)"
    return formula, f"{n(layers)} x ({rows} + {4 * (2 + again)} x {c.model.experts.num})"


def replica_buffers(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of what is summed over replica apart from other gradients, or of weights after it."""
    c, p = e.config, e.config.parallel
    summed = [s.bytes for s in compression.all_sums(c) if (",".join(s.axes), s.op) == (t.axis, t.op)]
    is_whole = t.op == "all_reduce" and p.compression.kind in ("none", "topk", *EIGHT_BITS)
    way = "float32" if is_whole else p.compress
    formula, size = f"of the arrays in {way}", number(sum(summed))
    if not summed:
        w = counts.BYTES[c.precision.compute]
        formula, size = "w Psi", f"{w} x {number(sharded_elements(c))}"
    steps = p.sync_every if t.what is Traffic.SYNCHRONIZATION else 1
    return (f"{formula} / parallel.sync_every", f"{size} / {steps}") if steps > 1 else (formula, size)


def of_parameters(e: Estimate, t: Transfer) -> tuple[str, str]:
    """Return the full buffers of gradients or weights of a transfer, from the same table as its bytes."""
    plain = counts.gradient_bytes(e.config) if t.what.is_gradients else counts.BYTES[e.config.precision.compute]
    symbols = {plain: "g" if t.what.is_gradients else "w"}
    by_itemsize: dict[float, dict[tuple[str, int], float]] = {}
    for buffer in parameter_buffers(e.config):
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
