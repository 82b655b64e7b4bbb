"""Closed forms of host offload: what rests in host memory, and what is copied between it and the device in a step.

For resolved configs; bytes per device. S is the number of elements that a device stores where ZeRO shards them (of
arrays of at least parallel.persist_below elements, in one layer: smaller ones stay on the device), M the microbatches.
What is copied can be seen in the compiled program (audit/copies.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from nanotrain_jax.audit.cost import BYTES, local, rows, sharded
from nanotrain_jax.config import Config
from nanotrain_jax.execution import Execution, execution, gradients_on_host
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import LAYERS, Parameter
from nanotrain_jax.parallel.offload import pieces
from nanotrain_jax.parallel.update import PARTS


class Copied(Enum):
    """What a row of `copied` moves between a device and its host."""

    STATE = "master weights and moments"
    UPDATED_WEIGHTS = "updated weights"
    GRADIENTS = "gradients"
    GRADIENTS_TO_ADD_TO = "gradients, to be added to"
    GRADIENTS_FOR_NORM = "gradients, for their norm"
    GRADIENTS_FOR_UPDATE = "gradients, for the update"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"

    @property
    def is_per_microbatch(self) -> bool:
        """Whether each microbatch copies it, while it computes; the update copies the others, once."""
        return self in (Copied.GRADIENTS, Copied.GRADIENTS_TO_ADD_TO, Copied.WEIGHTS, Copied.ACTIVATIONS)


class Large(NamedTuple):
    """A parameter whose state may lie on the host."""

    parameter: Parameter
    size: float  # elements, on a device
    far_gradient: bool  # from ZeRO 2 on, without stages: no other device adds to it

    @property
    def in_layers(self) -> bool:
        """Whether it is a stack of arrays, one for each layer."""
        return self.parameter.part == LAYERS


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
    on_host = gradients_on_host(config) and execution(config) is Execution.OFFLOADED
    for row in table(config.model, p.tensor).values():
        if row.size >= p.persist_below:
            split = sharded(row, config) and p.zero > 0
            size = local(row, config) / (p.data if split else 1)
            alone = p.replica == 1 and (row.split_dim is not None or p.tensor == 1) and (split or p.data == 1)
            found.append(Large(row, size, alone and on_host))
    return found


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
    """What moves between host and device in a step. kept: as in `rests`; passed: what one microbatch keeps.

    optimizer    12 S there and back (ZeRO-Offload, arXiv 2101.06840, section 4.1); 2 S of weights back, if they rest
                 there
    params       to the device: M (2 w S_layers + w S_ends), w bytes each: forward and backward; embedding and head once
                 each
    gradients    4 S to the host per microbatch, and to the device: per microbatch but the first, once for their norm,
                 once for the update
    activations  what is kept, there and back; with stages their slots are filled with zeros first

    A loop fetches one piece more than it uses: the update's a quarter of a layer, that of weights a layer. With
    memory.offload_optimizer=nvme the update is not part of the step's program (nvme/update.py): it is not counted here.
    """
    p, m, found = config.parallel, config.memory, large(config)
    w, M, L = BYTES[config.precision.compute], p.microbatches, config.model.num_layers / p.pipe
    far_params, block = m.offload_params == "host", m.rematerialization.block
    moved: list[dict[str, Any]] = []

    def add(to: str, what: Copied, size: float) -> None:
        if size:
            moved.append({"to": to, "bytes_per_device": size, "what": what})

    every, once_more = sum(x.size for x in found), _streamed(found, turns(config))
    if m.offload_optimizer == "host":
        state = optimizer_bytes(config) + (4 if far_params and w == 4 else 0)
        add("device", Copied.STATE, state * once_more)
        add("host", Copied.STATE, optimizer_bytes(config) * every)
        add("host", Copied.UPDATED_WEIGHTS, w * every if far_params else 0.0)
    far = [x for x in found if x.far_gradient]
    gradients = sum(x.size for x in far)
    add("host", Copied.GRADIENTS, 4 * M * gradients)
    add("device", Copied.GRADIENTS_TO_ADD_TO, 4 * (M - 1) * gradients)
    add("device", Copied.GRADIENTS_FOR_NORM, 4 * _streamed(far, norm_turns(config)))
    if m.offload_optimizer == "host":
        add("device", Copied.GRADIENTS_FOR_UPDATE, 4 * _streamed(far, turns(config)))
    if far_params:
        passes = 2 + (block / L if p.pipe == 1 else 0)
        of_layers = sum(x.size for x in found if x.in_layers)
        add("device", Copied.WEIGHTS, w * M * (passes * of_layers + every - of_layers))
    if m.offload_activations == "host":
        add("host", Copied.ACTIVATIONS, passed * M + (kept if p.pipe > 1 else 0))
        ahead = block / L if execution(config) is Execution.OFFLOADED else 0
        add("device", Copied.ACTIVATIONS, passed * M * (1 + ahead))
    return moved


def _streamed(found: list[Large], turns: dict[Parameter, int]) -> float:
    """Elements that come to the device where arrays are streamed in pieces, of which one too many is fetched."""
    pieces = ((x.size, turns[x.parameter]) for x in found)
    return sum(size * (1 + 1 / count if count > 1 else 1) for size, count in pieces)


def turns(config: Config) -> dict[Parameter, int]:
    """In how many pieces the update streams each array (parallel/update.py)."""
    found, L = large(config), config.model.num_layers // config.parallel.pipe
    stacked = [x for x in found if x.in_layers]
    parts = next(n for n in (PARTS, 2, 1) if all(rows(x.parameter, config) % n == 0 for x in stacked))
    limit = sum(x.size for x in stacked) // L // parts or 1
    return {
        x.parameter: L * parts if x.in_layers else pieces(int(x.size), rows(x.parameter, config), int(limit))
        for x in found
    }


def norm_turns(config: Config) -> dict[Parameter, int]:
    """In how many pieces the norm of the gradients streams each array."""
    found, L = large(config), config.model.num_layers // config.parallel.pipe
    largest = max((x.size / L for x in found if x.in_layers), default=1)
    return {
        x.parameter: pieces(int(x.size), L if x.in_layers else rows(x.parameter, config), int(largest)) for x in found
    }
