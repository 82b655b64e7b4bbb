"""Muon in closed form: which arrays it orthogonalizes, wire bytes, FLOPs, state and buffers. For resolved configs.

Symbols as in costs/counts.py. The momentum of a matrix [m n] of L layers is sharded over k = N t devices.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs.compression import layout, shard_elements
from nanotrain_jax.costs.counts import layers_of, rows
from nanotrain_jax.models.parameters import Parameter
from nanotrain_jax.parallel.gradients.compression import matrices_of
from nanotrain_jax.parallel.zero.muon import ITERATIONS


class Exchange(NamedTuple):
    """An all-to-all and its inverse: bytes of both full buffers, as in costs/communication.py."""

    axes: tuple[str, ...]
    bytes: float


def matrices(config: Config) -> list[Parameter]:
    """Return the rows that Muon orthogonalizes (`step.plan.optimizer_of`): none with another optimizer."""
    if config.optimizer.name != "muon":
        return []
    return [
        row
        for row in rows(config).values()
        if row.is_stacked and len(row.shape) > 1 and row.decay and not row.is_frozen
    ]


def wire_bytes(config: Config) -> int:
    """Return the bytes per element on the wire and in Newton-Schulz: float32 only if precision.compute is."""
    return 4 if config.precision.compute == "float32" else 2


def matrices_per_device(row: Parameter, config: Config) -> int:
    """Return how many matrices of a row a device orthogonalizes: ceil(L / k). Of experts L is that of all layers'
    experts on the device."""
    axes = config.parallel.axes
    over = [axis for found in _axes(row, config) for axis in found]
    experts = row.shape[0] // prod(axes[axis] for axis in _of_experts(row, config)) if row.has_experts else 1
    return ceil(layers_of(row, config) * experts / prod(axes[axis] for axis in over))


def exchanges(config: Config) -> list[Exchange]:
    """Return what `muon.orthogonalize` communicates: for each sharded dim of a row two all-to-alls of its shard,
    padded to k ceil(L / k) layers, m n / k elements each."""
    size = wire_bytes(config)
    found = []
    for row in matrices(config):
        shard = matrices_per_device(row, config) * prod(_sides(row))  # k ceil(L / k) m n / k
        found += [Exchange(axes, 2 * size * shard) for axes in _axes(row, config)]
    return found


def flops(config: Config) -> float:
    """Return the FLOPs of Newton-Schulz on a device and step: 5 (4 m^2 n + 2 m^3) of each of its matrices, m <= n."""
    total = 0.0
    for row in matrices(config):
        m, n = sorted(_sides(row))
        total += matrices_per_device(row, config) * ITERATIONS * (4.0 * m**2 * n + 2.0 * m**3)
    return total


def spared_bytes(config: Config) -> float:
    """Return the bytes of state that a device spares: the second moment of matrices."""
    return 4 * sum(shard_elements(row, config) for row in matrices(config))


def buffers(config: Config) -> float:
    """Return the bytes in use while the largest stack is orthogonalized: its shard before and after an all-to-all, and
    for one matrix three of its size and two Gram matrices."""
    size = wire_bytes(config)

    def of_row(row: Parameter) -> float:
        m, n = sorted(_sides(row))
        return size * (2 * matrices_per_device(row, config) * m * n + 3 * m * n + 2 * m**2)

    return max(map(of_row, matrices(config)), default=0.0)


def _sides(row: Parameter) -> tuple[int, int]:
    shape = row.shape[row.has_experts :]
    columns = matrices_of(shape, (), stacked=False).columns
    return prod(shape[:columns]), prod(shape[columns:])


def _axes(row: Parameter, config: Config) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each sharded dim of a row's matrices, as of their momentum."""
    entries = layout(row, config)[row.has_experts :]
    return [entry if isinstance(entry, tuple) else (entry,) for entry in entries if entry]


def _of_experts(row: Parameter, config: Config) -> tuple[str, ...]:
    """Return the mesh axes that shard the dim of experts of a row's momentum."""
    entry = layout(row, config)[0] or ()
    return entry if isinstance(entry, tuple) else (entry,)
