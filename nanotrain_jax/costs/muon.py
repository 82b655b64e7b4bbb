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
    """Return how many matrices of a row a device orthogonalizes: ceil(L / k)."""
    over = [axis for axes in _axes(row, config) for axis in axes]
    return ceil(layers_of(row, config) / prod(config.parallel.axes[axis] for axis in over))


def exchanges(config: Config) -> list[Exchange]:
    """Return what `muon.orthogonalize` communicates: for each sharded dim of a row two all-to-alls of its shard,
    padded to k ceil(L / k) layers, m n / k elements each."""
    size = wire_bytes(config)
    found = []
    for row in matrices(config):
        shard = matrices_per_device(row, config) * row.size  # k ceil(L / k) m n / k
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
        return size * (2 * matrices_per_device(row, config) * row.size + 3 * m * n + 2 * m**2)

    return max(map(of_row, matrices(config)), default=0.0)


def _sides(row: Parameter) -> tuple[int, int]:
    columns = matrices_of(row.shape, (), stacked=False).columns
    return prod(row.shape[:columns]), prod(row.shape[columns:])


def _axes(row: Parameter, config: Config) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each sharded dim of a row's momentum."""
    return [entry if isinstance(entry, tuple) else (entry,) for entry in layout(row, config) if entry]
