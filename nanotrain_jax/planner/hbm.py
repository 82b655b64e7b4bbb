"""What the compiled step reads and writes in device memory (HBM), and per layer beside the least possible."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nanotrain_jax.audit import hlo, traffic
from nanotrain_jax.audit.traffic import Kernel
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import communication, hbm
from nanotrain_jax.planner.timeline import source
from nanotrain_jax.step import forward

SOURCES = 12  # lines of source, at most


def summary(text: str, config: Config) -> dict[str, Any]:
    """Return the bytes and kernels of a step, per device, in the form of `plan --json`. text: of the compiled step.

    layer: of one layer and microbatch, without collectives, beside minimum_bytes (`costs/hbm.py`), and the lines of
    source with most bytes; absent where that form does not hold.
    """
    found = traffic.kernels(text, communication.conditional_rates(config))
    out: dict[str, Any] = {
        "bytes": float(sum(kernel.count * kernel.bytes for kernel in found)),
        "kernels": float(sum(kernel.count for kernel in found)),
    }
    least = hbm.layer_bytes(config)
    if least:
        of_layers = [kernel for kernel in found if _is_of_layers(kernel)]
        out["layer"] = _layer(of_layers, config) | {"minimum_bytes": sum(least.values()), "minimum": least}
    return out


def _is_of_layers(kernel: Kernel) -> bool:
    in_stack = any(frame.function == forward.run_stack.__name__ for frame in kernel.stack)
    return in_stack and kernel.opcode.removesuffix("-start") not in hlo.OPERATIONS


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
