"""Closed forms of host offload: what rests in host memory, and what is copied between it and the device in a step.

For resolved configs; bytes per device. S is the number of elements that a device stores where ZeRO shards them (of
arrays of at least parallel.persist_below elements, in one layer: smaller ones stay on the device), M the microbatches.
What is copied can be seen in the compiled program (audit/copies.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nanotrain_jax.audit.cost import BYTES, Array, arrays, by_hand, local, rows, sharded
from nanotrain_jax.config import Config
from nanotrain_jax.parallel.offload import pieces
from nanotrain_jax.parallel.update import PARTS

# What every microbatch copies, while it computes; the rest is copied once, in the update.
IN_BACKWARD = ("gradients", "gradients, to be added to", "weights", "activations")


class Large(NamedTuple):
    """The arrays of one kind that may rest on the host, on a device."""

    array: Array
    size: float  # elements
    far_gradient: bool  # from ZeRO 2 on, without stages: no other device adds to it


def modes(config: Config) -> tuple[str, str, str]:
    """Where optimizer state, parameters and activations rest."""
    m = config.memory
    return m.offload_optimizer, m.offload_params, m.offload_activations


def large(config: Config) -> list[Large]:
    """What rests on the host where memory.offload_optimizer=host, in files where it is nvme (gradients on the host)."""
    p = config.parallel
    if config.memory.offload_optimizer == "none":
        return []
    found = []
    for a in arrays(config.model, p.tensor):
        if a.size >= p.persist_below:
            split = sharded(a, config) and p.zero > 0
            size = local(a, config) / (p.data if split else 1)
            alone = p.replica == 1 and (a.tensor == "split" or p.tensor == 1) and (split or p.data == 1)
            found.append(Large(a, size, alone and p.zero >= 2 and is_streamed(config)))
    return found


def is_streamed(config: Config) -> bool:
    """Whether layers run in a loop of their own (parallel/streamed.py), with what rests on the host one layer ahead."""
    return by_hand(config) and config.parallel.pipe == 1


def optimizer_bytes(config: Config) -> int:
    """Per element: master weights and moments; in float32 the stored weights are the master."""
    return 8 if config.precision.compute == "float32" else 12


def rests(config: Config, kept: float) -> dict[str, float]:
    """What a step needs of host memory. kept: bytes of all that layers keep for their backward (audit/memory.py).

    optimizer    12 S (8 S in float32); with memory.offload_optimizer=nvme that is in files (`in_files`)
    params       2 S (4 S)
    gradients    4 S, from ZeRO 2 on and without pipeline stages
    activations  what `remat` keeps
    """
    found, m = large(config), config.memory
    every = sum(x.size for x in found)
    parts = {"optimizer": optimizer_bytes(config) * every if m.offload_optimizer == "host" else 0.0}
    parts["params"] = BYTES[config.precision.compute] * every if m.offload_params == "host" else 0.0
    parts["gradients"] = 4 * sum(x.size for x in found if x.far_gradient)
    parts["activations"] = kept if m.offload_activations == "host" else 0.0
    return {what: size for what, size in parts.items() if size}


def in_files(config: Config) -> float:
    """Bytes of master weights and moments that rest on NVMe for a device, and that a step reads and writes: 12 S."""
    is_there = config.memory.offload_optimizer == "nvme"
    return optimizer_bytes(config) * sum(x.size for x in large(config)) if is_there else 0.0


def copied(config: Config, kept: float, passed: float) -> list[dict[str, Any]]:
    """What moves between host and device in a step, and why. kept: as in `rests`; passed: what one microbatch keeps.

    optimizer    12 S there and back (ZeRO-Offload, arXiv 2101.06840, section 4.1); 2 S of weights back, if they rest
                 there
    params       to the device: M (2 w S_layers + w S_ends), w bytes each: forward and backward; embedding and head once
                 each
    gradients    4 S to the host per microbatch, and to the device: per microbatch but the first, once for their norm,
                 once for the update
    activations  what is kept, there and back; with stages their slots are filled with zeros first

    A loop fetches one piece more than it uses: the update's a quarter of a layer, that of weights a layer. With
    memory.offload_optimizer=nvme the update is not part of the step's program (piecewise.py): it is not counted here.
    """
    p, m, found = config.parallel, config.memory, large(config)
    w, M, L = BYTES[config.precision.compute], p.microbatches, config.model.num_layers / p.pipe
    far_params = m.offload_params == "host"
    moved: list[dict[str, Any]] = []

    def add(to: str, why: str, size: float) -> None:
        if size:
            moved.append({"to": to, "bytes_per_device": size, "why": why})

    in_layers, cuts = [x for x in found if x.array.where == "layers"], turns(config)
    again = lambda x: x.size * (1 + 1 / cuts[x.array] if cuts[x.array] > 1 else 1)
    every, once_more = sum(x.size for x in found), sum(map(again, found))
    if m.offload_optimizer == "host":
        state = optimizer_bytes(config) + (4 if far_params and w == 4 else 0)
        add("device", "master weights and moments", state * once_more)
        add("host", "master weights and moments", optimizer_bytes(config) * every)
        add("host", "updated weights", w * every if far_params else 0.0)
    far = [x for x in found if x.far_gradient]
    layers, ends = (sum(x.size for x in far if (x in in_layers) is inside) for inside in (True, False))
    add("host", "gradients", 4 * M * (layers + ends))
    add("device", "gradients, to be added to", 4 * (M - 1) * (layers + ends))
    largest = max((x.size / L for x in in_layers), default=1)
    cut = lambda x: pieces(int(x.size), int(L) if x in in_layers else rows(x.array, config), int(largest))
    normed = sum(x.size * (1 + 1 / cut(x) if cut(x) > 1 else 1) for x in far)
    add("device", "gradients, for their norm", 4 * normed)
    if m.offload_optimizer == "host":
        add("device", "gradients, for the update", 4 * sum(map(again, far)))
    if far_params:
        size = int(m.remat.partition(":")[2] or 1)
        passes = 2 + (size / L if p.pipe == 1 else 0)
        of_layers = sum(x.size for x in in_layers)
        add("device", "weights", w * M * (passes * of_layers + every - of_layers))
    if m.offload_activations == "host":
        add("host", "activations", passed * M + (kept if p.pipe > 1 else 0))
        size = int(m.remat.partition(":")[2] or 1)
        add("device", "activations", passed * M * (1 + size / L if is_streamed(config) else 1))
    return moved


def turns(config: Config) -> dict[Array, int]:
    """In how many pieces the update streams each array (parallel/update.py)."""
    found, L = large(config), config.model.num_layers // config.parallel.pipe
    of_layers = {x.array: x.size for x in found if x.array.where == "layers"}
    parts = next(n for n in (PARTS, 2, 1) if all(rows(a, config) % n == 0 for a in of_layers))
    limit = sum(x.size for x in found if x.array in of_layers) // L // parts or 1
    return {
        x.array: L * parts if x.array in of_layers else pieces(int(x.size), rows(x.array, config), int(limit))
        for x in found
    }
