"""What the compiled step reads and writes in device memory (HBM), by part and per layer, beside the least possible."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from nanotrain_jax.audit import hlo, traffic
from nanotrain_jax.audit.live_ranges import Origin
from nanotrain_jax.audit.traffic import Kernel
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import communication, hbm
from nanotrain_jax.planner.timeline import PHASES, phase_of, source
from nanotrain_jax.step import forward

SCOPE = re.compile(r"\b(?:loss|layer)\b")  # of `jax.named_scope`, in op_name
SOURCES = 12  # lines of source, at most
REST = "rest"  # the part with the embedding, sums over microbatches, and what says nothing of where it was traced


def summary(text: str, config: Config) -> dict[str, Any]:
    """Return the bytes and kernels of a step, per device, in the form of `plan --json`. text: of the compiled step.

    parts: of layers, loss, update, communication and the rest, beside minimum_bytes (`costs/hbm.py`; absent where that
    has no form). layer: of one layer and microbatch, without collectives, and the lines of source with most bytes.
    """
    found = traffic.kernels(text, communication.conditional_rates(config))
    least, of_layer = hbm.step_bytes(config), hbm.layer_bytes(config)
    totals: dict[str, dict[str, float]] = {name: {"bytes": 0.0, "kernels": 0.0} for name in (*hbm.PARTS, REST)}
    for kernel in found:
        total = totals[_part(kernel)]
        total["bytes"] += float(kernel.count * kernel.bytes)
        total["kernels"] += float(kernel.count)
    parts = [
        {"part": name} | total | ({"minimum_bytes": least[name]} if name in least else {})
        for name, total in totals.items()
    ]
    out: dict[str, Any] = {key: sum(part[key] for part in parts) for key in ("bytes", "kernels")} | {"parts": parts}
    if of_layer:
        of_layers = [kernel for kernel in found if _part(kernel) == hbm.LAYERS]
        out["layer"] = _layer(of_layers, config) | {"minimum_bytes": sum(of_layer.values()), "minimum": of_layer}
    return out


def _part(kernel: Kernel) -> str:
    """Return the part of a step that a kernel is of."""
    scopes = set(SCOPE.findall(kernel.op_name))
    if kernel.opcode.removesuffix("-start") in hlo.OPERATIONS:
        return hbm.COMMUNICATION
    if "loss" in scopes:
        return hbm.LOSS
    if "layer" in scopes or any(frame.function == forward.run_stack.__name__ for frame in kernel.stack):
        return hbm.LAYERS
    phase = phase_of(Origin(kernel.opcode, "", kernel.op_name, kernel.stack))
    return hbm.UPDATE if phase == PHASES.index("update") else REST


def _layer(found: list[Kernel], config: Config) -> dict[str, Any]:
    runs = config.model.num_layers * config.parallel.microbatches
    by_source: Counter[tuple[str, str]] = Counter()
    kernels: Counter[tuple[str, str]] = Counter()
    for kernel in found:
        line = source(kernel.stack), "backward" if "transpose(" in kernel.op_name else "forward"
        by_source[line] += float(kernel.count * kernel.bytes / runs)
        kernels[line] += float(kernel.count / runs)
    rows = [
        {"source": line[0], "phase": line[1], "bytes": size, "kernels": kernels[line]}
        for line, size in by_source.most_common(SOURCES)
    ]
    return {"bytes": by_source.total(), "kernels": kernels.total(), "sources": rows}
