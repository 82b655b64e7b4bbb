"""Formulas of an estimate with this run's numbers substituted, and their sources.

The numbers of every line are arithmetic that evaluates to its value: the tests evaluate them.
"""

from __future__ import annotations

from collections import Counter

from nanotrain_jax.config.execution import execution
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import activations as costs
from nanotrain_jax.costs import (
    compression,
    counts,
    flops,
    hardware,
    memory,
    mixture,
    muon,
    offload,
    vision,
    vision_memory,
)
from nanotrain_jax.costs.stored_parameters import frozen_elements, trained_parameters
from nanotrain_jax.models import vision_table
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import DENSE, ENCODER, ENDS, LAYERS, VISION, Parameter
from nanotrain_jax.planner.estimate import Estimate
from nanotrain_jax.planner.explain_traffic import traffic
from nanotrain_jax.planner.formula import Line, Section, number

# In printing order: vocabulary, positions, patch, model, encoder, query heads, kv heads, head dim, ffn or features of a
# position, width of the scorers and their number; of constants of a layer 2 and 1.
DIMS = "2VTPDENKHFSs1R"


def explain(e: Estimate) -> list[Section]:
    """Return the sections of an estimate; each uses values of those before it."""
    sections = [parameters(e), pictures(e), compute(e), state(e), activations(e), peak(e), host(e), traffic(e)]
    return [section for section in (*sections, bubble(e), speed(e)) if section.lines]


def parameters(e: Estimate) -> Section:
    """Count all parameters, and those that multiply every token, from the dims in the parameter table."""
    m, n = e.config.model, number
    rows = table(m).values()
    of_layers = [row for row in rows if row.part == LAYERS]
    matmuls = _counted("matmuls, per layer", [row for row in of_layers if row.is_matmul])
    vectors = _counted("norms and biases, per layer", [row for row in of_layers if not row.is_matmul])
    ends = _counted("ends (before and after the layers)", [row for row in rows if row.part == ENDS])
    head = _counted("head", [row for row in rows if row.part == ENDS and row.is_matmul])
    decoder = f"{m.main_layers} x ({n(matmuls.value)} + {n(vectors.value)}) + {n(ends.value)}"
    formula, lines = "L (matmuls + norms and biases) + ends", [matmuls, vectors, ends]
    of_dense = [row for row in rows if row.part == DENSE]
    dense = _counted("matmuls, per layer without experts", [row for row in of_dense if row.is_matmul])
    if of_dense:
        others = _counted("its norms and biases", [row for row in of_dense if not row.is_matmul])
        formula = f"{formula} + K (matmuls and norms without experts)"
        decoder = f"{decoder} + {m.dense_layers} x ({n(dense.value)} + {n(others.value)})"
        lines += [dense, others]
    lines.append(Line("total", formula, decoder, counts.parameters(m), "parameters"))
    per_layer, values = "matmuls", n(matmuls.value)
    if m.experts:
        left, of_them = m.experts.num - m.experts.top_k, [row for row in of_layers if row.share < 1]
        sizes = f"{len(of_them)} x {left} x {n(m.d_model)} x {n(m.mlp_width)}"
        count = sum(row.size * (1 - row.share) for row in of_them)
        lines.append(
            Line("experts that a token does not go to", f"{len(of_them)} (E - k) D F", sizes, count, "parameters")
        )
        per_layer, values = "(matmuls - other experts)", f"({values} - {n(count)})"
    formula, numbers = f"L {per_layer} + {head.formula}", f"{m.main_layers} x {values} + {head.numbers}"
    if of_dense:
        formula, numbers = f"{formula} + K without experts", f"{numbers} + {m.dense_layers} x {n(dense.value)}"
    multiplied = "N, parameters that multiply every token"
    lines.append(Line(multiplied, formula, numbers, counts.matmul_parameters(m), "parameters"))
    if e.config.vision:
        of_vision = vision_table.table(e.config.vision, m.d_model).values()
        layer = _counted("encoder of pictures, per layer", [row for row in of_vision if row.part == ENCODER])
        others = _counted("before and after its layers", [row for row in of_vision if row.part == VISION])
        count = e.config.vision.num_layers
        total = f"{n(counts.parameters(m))} + {count} x {n(layer.value)} + {n(others.value)}"
        formula = "decoder + L layer + others"
        lines += [layer, others, Line("with vision", formula, total, counts.all_parameters(e.config), "parameters")]
    return Section("Parameters", "GPT-2 (Radford et al. 2019), Llama 3 (arXiv 2407.21783, table 3)", lines)


def _counted(what: str, rows: list[Parameter]) -> Line:
    """Return the line of the sum of some rows: each product of dims, and its number of arrays."""
    named = [zip((word.partition("/")[0] for word in row.layout.split()), row.shape, strict=True) for row in rows]
    sizes = [sorted(dims, key=lambda dim: DIMS.index(dim[0])) for dims in named]
    formula, numbers = [], []
    for product, times in Counter(map(tuple, sizes)).items():
        names, values = zip(*product, strict=True)
        formula.append(" ".join([str(times)] * (times > 1) + list(names)))
        numbers.append(" x ".join(map(number, [times] * (times > 1) + list(values))))
    return Line(what, " + ".join(formula), " + ".join(numbers), sum(row.size for row in rows), "parameters")


def pictures(e: Estimate) -> Section:
    """Return the FLOPs of the encoder of pictures."""
    c, v, n = e.config, e.config.vision, number
    if v is None:
        return Section("Encoder of pictures", "", [])
    whole = c.replace("parallel", tensor=1)
    forward, backward, _ = vision.picture_flops(whole)
    layers = f"24 x {v.num_layers} x {v.max_tokens} x {v.width}^2 + 4 x {v.num_layers} x {v.max_tokens}^2 x {v.width}"
    around = [product.flops for product in vision.outside_layers(c)]
    shown = f"{layers} + {' + '.join(map(n, around))}"
    executed = " + ".join(map(n, vision.picture_flops(c)))
    once = vision.positions(c)
    positions = counts.encodes(c) * (once.flops + once.backward(vision.trained(c)))
    encoder = f"{n(vision.pictures(c))} x ({executed}) + {n(positions)}"
    of_encoder = "pictures (forward + backward + recompute) + positions"
    both = f"{n(forward)} + {n(backward)}"
    lines = [
        Line("forward of a picture", "24 L K E^2 + 4 L K^2 E + matmuls around the layers", shown, forward, "FLOPs"),
        Line("picture", "forward + backward to what trains", both, forward + backward, "FLOPs"),
        Line("encoder, per GPU and step", of_encoder, encoder, vision.step_flops(c), "FLOPs"),
    ]
    return Section("Encoder of pictures", "costs/vision.py; ViT (arXiv 2010.11929)", lines)


def compute(e: Estimate) -> Section:
    """Return model FLOPs per token, and hardware FLOPs per GPU."""
    c, m, n = e.config, e.config.model, number
    L, Q, T, N = m.num_layers, counts.query_width(m), c.data.seq_len, counts.matmul_parameters(m)
    W = sum(counts.windows(c)) / L
    frozen = counts.frozen_matmul_parameters(c)
    local, tokens, iterations = flops.local_flops(c), counts.tokens_per_device(c), muon.flops(c)
    full, picture, encoder = flops.flops_per_token(c)["full"], vision.model_flops(c), vision.step_flops(c)
    width = "D" if m.d_model == Q else "Q"
    formula, numbers = f"6 N + 12 L {width} {'T' if W == T else 'W'}", f"6 x {n(N)} + 12 x {L} x {n(Q)} x {n(W)}"
    if frozen:
        formula, numbers = f"{formula} - 2 frozen", f"{numbers} - 2 x {n(frozen)}"
    if picture:
        formula, numbers = f"{formula} + picture / T", f"{numbers} + {n(picture)} / {n(T)}"
    lines = [Line("model FLOPs, per token", formula, numbers, full, "FLOPs")]
    formula = "(2 (layers + head) + 3 attention + weights + recompute) tokens"
    numbers = f"(2 x ({n(local['layers'])} + {n(local['head'])}) + 3 x {n(local['attention'])} + {n(local['weights'])}"
    numbers += f" + {n(local['recompute'])}) x {n(tokens)}"
    for part, value in {"encoder": encoder, "Newton-Schulz": iterations}.items():
        if value:
            formula, numbers = f"{formula} + {part}", f"{numbers} + {n(value)}"
    lines.append(Line("hardware FLOPs, per GPU and step", formula, numbers, e.flops, "FLOPs"))
    if m.experts:
        M, padding, k = c.parallel.microbatches, mixture.padded_rows(c), m.experts.top_k
        formula = f"tokens / M x k x {'1, by a kernel' if mixture.has_kernel(c) else 'padding'}"
        numbers = f"{n(tokens)} / {M} x {k} x {padding:.7g}"
        lines.append(Line("rows that experts multiply", formula, numbers, tokens / M * k * padding, "rows"))
    source = "PaLM (arXiv 2204.02311, appendix B), full attention; hardware: of the stage with the head, over tensor"
    return Section("FLOPs", source, lines)


def state(e: Estimate) -> Section:
    """Return the bytes of training state between steps."""
    p, n = e.config.parallel, number
    full, shard = trained_parameters(e.config)
    parts, b = memory.state(e.config), offload.weight_bytes(e.config)
    psi, over = sum(full.values()), sum(shard.values())
    parts_of_psi, has_vision = [part for part in (LAYERS, DENSE, ENDS, VISION) if full[part]], bool(e.config.vision)
    formula = "layers / (P t) + ends / t" + " + vision, its layers / t" * has_vision + ", of split arrays"
    shown = " + ".join(n(full[part]) for part in parts_of_psi) or "0"
    lines = [Line("Psi", formula, shown, psi, "parameters per GPU")]
    frozen, w = frozen_elements(e.config), counts.BYTES[e.config.precision.compute]
    if frozen:
        lines[0] = lines[0]._replace(what="Psi, of trained parameters")
    if p.zero and counts.zero_devices(e.config) > 1:
        sharded = " + ".join(n(shard[part]) for part in parts_of_psi)
        axes = f"{p.data} data" + f" x {p.context} context" * (p.context > 1)
        lines.append(Line("Psi / N", f"N = {axes}, of sharded arrays", sharded, over, "parameters per GPU"))
    optimizer, spared = offload.optimizer_bytes(e.config), muon.spared_bytes(e.config)
    formula = f"{b} Psi" + " / N" * (p.zero == 3) + f" + {w} frozen" * bool(frozen)
    shown = f"{b} x {n(over if p.zero == 3 else psi)}" + f" + {w} x {n(frozen)}" * bool(frozen)
    lines.append(Line("weights", formula, shown, parts["params"], "bytes"))
    what = "master weights and moments" if b == 2 else "moments"
    formula = f"{optimizer} Psi" + " / N" * (p.zero > 0) + " - 4 of matrices (muon)" * bool(spared)
    shown = f"{optimizer} x {n(over if p.zero else psi)}" + f" - {n(spared)}" * bool(spared)
    lines.append(Line(what, formula, shown, parts["optimizer"], "bytes"))
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
    formula = "residual width / t + inner width / t" if split > 1 else "residual width + inner width / t"
    shown = f"{n(like_x)} / {split} + {n(inner)} / {p.tensor}"
    if c.train.lora:
        formula, shown = f"{formula} + x A of adapters", f"{shown} + {n(costs.adapter_width(c, remat))}"
    if c.model.experts:
        formula, shown = f"{formula} + logits of the router", f"{shown} + {n(costs.router_width(c, remat))}"
    lines = [Line(f"per layer and token (remat {remat})", formula, shown, layer, "elements")]
    if p.pipe == 1:
        formula, shown, first = "L layers", f"{c.model.main_layers} x {n(layer)}", mixture.first_layers(c)
        if first and not execution(c).is_by_hand:
            formula, shown = f"{formula} + without experts", f"{shown} + {n(costs.activations(first))}"
        lines.append(Line("all layers", formula, shown, stored, "elements per token"))
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
    formula, shown = "bytes tokens elements", f"{b} x {n(tokens)} x {n(stored)}"
    if c.vision:
        kept = n(vision_memory.kept(c)), n(vision_memory.encoded(c))
        formula, shown = f"{formula} + of the encoder + encoded pictures", f"{shown} + {kept[0]} + {kept[1]}"
    lines.append(Line("activations", formula, shown, size, "bytes"))
    return Section("Activations", "Korthikanti et al. 2022 (arXiv 2205.05198, section 4), without dropout", lines)


def peak(e: Estimate) -> Section:
    """Return the sum of the parts of each moment."""
    lines = []
    for moment, parts in e.moments.items():
        present = {part: size for part, size in parts.items() if size}
        shown = " + ".join(f"{size / 1e9:.5g}" for size in present.values())
        lines.append(Line(moment, " + ".join(present), shown, sum(parts.values()) / 1e9, "GB"))
    return Section("Peak memory", "the largest of these moments; costs/memory.py describes each part", lines)


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
        formula, shown = f"{factor} S", f"{factor} x {number(S)}"
        if part == "activations":
            formula, shown = "activations of all layers", number(size)
        lines.append(Line(part, formula, shown, size, "bytes"))
    for to in ("device", "host"):
        rows = [t for t in e.copies if t.op == f"to {to}"]
        formula, shown = " + ".join(t.why for t in rows), " + ".join(f"{t.bytes / 1e9:.5g}" for t in rows)
        lines += [Line(f"copied to the {to}", formula, shown, sum(t.bytes for t in rows) / 1e9, "GB")] if rows else []
    source = "ZeRO-Offload (2101.06840), ZeRO-Infinity (2104.07857); S: offloaded elements. costs/offload.py"
    return Section("Host memory, per GPU and step", source, lines)


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
    lines += [_busiest(e.config)] if any(counts.loads_of_ends(e.config)) else []
    idle = e.seconds.get("bubble", 0.0)
    busy = idle / e.bubble_fraction - idle if e.bubble_fraction else 0.0
    if idle:
        numbers = f"{idle!r} / ({busy!r} + {idle!r})"
        what = "bubble / schedule time (modelled, with the head and the latency of ticks)"
        lines.append(Line(what, "idle / (busy + idle)", numbers, e.bubble_fraction, ""))
    return Section("Pipeline bubble", "Narayanan et al. 2021 (arXiv 2104.04473, section 2.2)", lines)


def _busiest(config: Config) -> Line:
    """Return the work of the chunk of layers that has most, for which all stages wait in a tick."""
    layers, (loss, first) = counts.layers_of_chunks(config).ravel(), counts.loads_of_ends(config)
    ends = [0.0] * len(layers)
    ends[0], ends[-1] = first, loss
    busiest = (layers + ends).argmax()
    numbers = f"{layers[busiest]} + {ends[busiest]!r}"
    what, formula = "the busiest chunk", "its layers + the dense layers of a mixture before them, or the loss"
    return Line(what, formula, numbers, layers[busiest] + ends[busiest], "layers")


def speed(e: Estimate) -> Section:
    """Return the modelled step time, throughput and MFU."""
    c, n, gpu = e.config, number, hardware.find(e.gpu)
    tokens = c.data.batch_size * c.data.seq_len
    full, causal = flops.flops_per_token(c).values()
    shown = " + ".join(f"{s:.6g}" for s in e.seconds.values())
    rate = f"{c.data.batch_size} x {n(c.data.seq_len)} / {e.step_seconds!r}"
    peak, possible = "step time GPUs peak FLOP/s", f"({e.step_seconds!r} x {e.gpus} x {gpu.peak_flops:.6g})"
    of_full, of_causal = (f"{n(per_token)} x {n(tokens)} / {possible}" for per_token in (full, causal))
    lines = [
        Line("step time", " + ".join(e.seconds), shown, e.step_seconds, "s"),
        Line("tokens per second", "batch T / step time", rate, e.tokens_per_second, ""),
        Line("MFU", f"model FLOPs per token x tokens / ({peak})", of_full, e.mfu, "full attention (PaLM)"),
        Line("MFU, causal", f"(6 N + 6 L D T) tokens / ({peak})", of_causal, e.mfu_causal, "causal half of attention"),
    ]
    source = "roofline (Williams et al. 2009), efficiencies of planner/estimate.py"
    return Section("Throughput, modelled", source, lines)
