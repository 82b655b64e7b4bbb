"""Closed forms of host offload: host memory per device, and host-device copies of a step. For resolved configs.

Bytes per device. S is the number of elements per device of the offloaded parameters, sharded by ZeRO: arrays of at
least parallel.persist_below elements per layer; smaller ones stay on the device. M is the number of microbatches. The
compiled program shows the same copies (audit/copies.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from nanotrain_jax.config.execution import Execution, casts_at_use, execution, gradients_on_host
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs.counts import BYTES, is_sharded, local_elements, local_rows, rows, stage_layers, zero_devices
from nanotrain_jax.models.parameters import CONSTANTS, LAYERS, Parameter
from nanotrain_jax.parallel.offload.host_offload import num_slices
from nanotrain_jax.parallel.zero.optimizer_step import SLICES_PER_LAYER


class HostCopy(Enum):
    """What a row of `host_copies` moves between a device and its host."""

    STATE = "master weights and moments"
    UPDATED_WEIGHTS = "updated weights"
    GRADIENTS = "gradients"
    ACCUMULATED_GRADIENTS = "gradients, to accumulate into"
    GRADIENTS_FOR_NORM = "gradients, for the global norm"
    GRADIENTS_FOR_UPDATE = "gradients, for the update"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"

    @property
    def is_per_microbatch(self) -> bool:
        """True if each microbatch copies it, overlapped with its compute; the update copies the others, once."""
        return self in (HostCopy.GRADIENTS, HostCopy.ACCUMULATED_GRADIENTS, HostCopy.WEIGHTS, HostCopy.ACTIVATIONS)


class Offloaded(NamedTuple):
    """A parameter whose optimizer state is in host memory or on NVMe; or would be, if it were not frozen."""

    parameter: Parameter
    size: float  # elements on a device
    has_host_gradient: bool  # ZeRO 2 and up without pipeline stages, where no other device adds to the gradient

    @property
    def in_layers(self) -> bool:
        """True if it is a stack of arrays, one per layer."""
        return self.parameter.part == LAYERS


def modes(config: Config) -> tuple[str, str, str]:
    """Return the placement of optimizer state, parameters and activations."""
    m = config.memory
    return m.offload_optimizer, m.offload_params, m.offload_activations


def offloaded(config: Config) -> list[Offloaded]:
    """Return the parameters with state in host memory (memory.offload_optimizer=host) or on NVMe (nvme; gradients are
    in host memory)."""
    p = config.parallel
    if config.memory.offload_optimizer == "none":
        return []
    parameters = []
    on_host = gradients_on_host(config) and execution(config) is Execution.OFFLOADED
    N = zero_devices(config)
    for row in rows(config).values():
        if row.size >= p.persist_below and row.init not in CONSTANTS:
            split = is_sharded(row, config) and p.zero > 0
            size = local_elements(row, config) / (N if split else 1)
            alone = p.replica == 1 and (row.split_dim is not None or p.tensor == 1) and (split or N == 1)
            parameters.append(Offloaded(row, size, alone and on_host and not row.is_frozen))
    return parameters


def updated(config: Config) -> list[Offloaded]:
    """Return those of `offloaded` that are not frozen."""
    return [x for x in offloaded(config) if not x.parameter.is_frozen]


def optimizer_bytes(config: Config) -> int:
    """Return the bytes per element of master weights and moments; stored float32 weights are the master."""
    return 8 if weight_bytes(config) == 4 else 12


def weight_bytes(config: Config) -> int:
    """Return the bytes per element of the stored weights."""
    return 4 if casts_at_use(config) else BYTES[config.precision.compute]


def host_memory(config: Config, residual_bytes: float) -> dict[str, float]:
    """Return the host memory of a step, part -> bytes. residual_bytes: all layers' activations (costs/memory.py).

    optimizer    12 S (8 S in float32); on NVMe instead with memory.offload_optimizer=nvme (`nvme_bytes`)
    params       2 S (4 S)
    gradients    4 S, at ZeRO 2 and up without pipeline stages
    activations  what `remat` keeps
    """
    parameters, m = offloaded(config), config.memory
    elements, trained = (sum(x.size for x in chosen) for chosen in (parameters, updated(config)))
    parts = {"optimizer": optimizer_bytes(config) * trained if m.offload_optimizer == "host" else 0.0}
    parts["params"] = BYTES[config.precision.compute] * elements if m.offload_params == "host" else 0.0
    parts["gradients"] = 4 * sum(x.size for x in parameters if x.has_host_gradient)
    parts["activations"] = residual_bytes if m.offload_activations == "host" else 0.0
    return {part: size for part, size in parts.items() if size}


def nvme_bytes(config: Config) -> float:
    """Return the bytes of master weights and moments on NVMe per device, which a step reads and writes: 12 S."""
    on_nvme = config.memory.offload_optimizer == "nvme"
    return optimizer_bytes(config) * sum(x.size for x in updated(config)) if on_nvme else 0.0


def host_copies(config: Config, residual_bytes: float, microbatch_bytes: float) -> list[dict[str, Any]]:
    """Return the copies between host and device in a step: direction, bytes, what.

    residual_bytes: as in `host_memory`; microbatch_bytes: the activations that one microbatch keeps.

    optimizer    12 S each way (ZeRO-Offload, arXiv 2101.06840, section 4.1); 2 S of weights to the host if the
                 parameters are there
    params       to the device: M (2 w S_layers + w S_ends), w bytes each: forward and backward; embedding and head once
                 each
    gradients    4 S to the host per microbatch; to the device per microbatch but the first, once for the global norm,
                 once for the update
    activations  each way once; with pipeline stages their slots are first filled with zeros

    Each double-buffered loop fetches one chunk more than it uses: a quarter of a layer in the update, a layer of
    weights. With memory.offload_optimizer=nvme the update is a separate program (nvme/update.py), not counted here.
    """
    p, m, parameters = config.parallel, config.memory, offloaded(config)
    w, M, L = BYTES[config.precision.compute], p.microbatches, stage_layers(config)
    has_host_params, block = m.offload_params == "host", m.rematerialization.block
    copies: list[dict[str, Any]] = []

    def add(to: str, what: HostCopy, size: float) -> None:
        if size:
            copies.append({"to": to, "bytes_per_device": size, "what": what})

    trained = updated(config)
    elements, fetched = sum(x.size for x in trained), _fetched(trained, update_chunks(config))
    if m.offload_optimizer == "host":
        state = optimizer_bytes(config) + (4 if has_host_params and w == 4 else 0)
        add("device", HostCopy.STATE, state * fetched)
        add("host", HostCopy.STATE, optimizer_bytes(config) * elements)
        add("host", HostCopy.UPDATED_WEIGHTS, w * elements if has_host_params else 0.0)
    with_gradient = [x for x in parameters if x.has_host_gradient]
    gradients = sum(x.size for x in with_gradient)
    add("host", HostCopy.GRADIENTS, 4 * M * gradients)
    add("device", HostCopy.ACCUMULATED_GRADIENTS, 4 * (M - 1) * gradients)
    add("device", HostCopy.GRADIENTS_FOR_NORM, 4 * _fetched(with_gradient, norm_chunks(config)))
    if m.offload_optimizer == "host":
        add("device", HostCopy.GRADIENTS_FOR_UPDATE, 4 * _fetched(with_gradient, update_chunks(config)))
    if has_host_params:
        passes = 2 + (block / L if p.pipe == 1 else 0)
        of_layers = sum(x.size for x in parameters if x.in_layers)
        of_ends = sum(x.size for x in parameters if not x.in_layers)
        add("device", HostCopy.WEIGHTS, w * M * (passes * of_layers + of_ends))
    if m.offload_activations == "host":
        add("host", HostCopy.ACTIVATIONS, microbatch_bytes * M + (residual_bytes if p.pipe > 1 else 0))
        prefetched = block / L if execution(config) is Execution.OFFLOADED else 0
        add("device", HostCopy.ACTIVATIONS, microbatch_bytes * M * (1 + prefetched))
    return copies


def _fetched(parameters: list[Offloaded], chunks: dict[Parameter, int]) -> float:
    """Return the elements copied to the device where arrays stream in chunks and the prefetch fetches one too many."""
    counts = ((x.size, chunks[x.parameter]) for x in parameters)
    return sum(size * (1 + 1 / count if count > 1 else 1) for size, count in counts)


def update_chunks(config: Config) -> dict[Parameter, int]:
    """Return the number of chunks in which the update streams each array (parallel/zero/optimizer_step.py)."""
    parameters, L = updated(config), stage_layers(config)
    stacked = [x for x in parameters if x.in_layers]
    per_layer = next(
        n for n in (SLICES_PER_LAYER, 2, 1) if all(local_rows(x.parameter, config) % n == 0 for x in stacked)
    )
    limit = sum(x.size for x in stacked) // L // per_layer or 1
    return {
        x.parameter: L * per_layer
        if x.in_layers
        else num_slices(int(x.size), local_rows(x.parameter, config), int(limit))
        for x in parameters
    }


def norm_chunks(config: Config) -> dict[Parameter, int]:
    """Return the number of chunks in which the global norm streams each gradient."""
    parameters, L = offloaded(config), stage_layers(config)
    limit = int(max((x.size / L for x in parameters if x.in_layers), default=1))
    return {
        x.parameter: num_slices(int(x.size), L if x.in_layers else local_rows(x.parameter, config), limit)
        for x in parameters
    }
