"""Wire bytes and state of gradients that are summed over replica compressed, in closed form. For resolved configs.

Symbols as in costs/counts.py. A device has S elements of an array's gradient, or of its shard; R replicas.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from jax.sharding import PartitionSpec

from nanotrain_jax.config.schema import EIGHT_BITS, Config
from nanotrain_jax.costs.counts import gradient_bytes, is_sharded, layers_of, local_elements, rows, zero_devices_of
from nanotrain_jax.models.parameters import Parameter
from nanotrain_jax.parallel.gradients.compression import BLOCK, matrices_of
from nanotrain_jax.parallel.gradients.quantization import BYTES, is_quantized, padded
from nanotrain_jax.parallel.mesh import ZERO_AXES

REPLICA = ("replica",)


class Summed(NamedTuple):
    """A collective of a compressed sum: of a full buffer, as in costs/communication.py."""

    axes: tuple[str, ...]
    op: str
    bytes: float


def is_compressed(row: Parameter, config: Config) -> bool:
    """True if the gradient of a row is compressed: large arrays, with powersgd only matrices."""
    kind = config.parallel.compression.kind
    is_large = row.size >= config.parallel.persist_below
    return config.parallel.compression.has_residual and is_large and (kind != "powersgd" or len(row.shape) > 1)


def shard_elements(row: Parameter, config: Config) -> float:
    """Return S of a row: all its layers on a device, as ZeRO shards its master weights."""
    shards = zero_devices_of(row, config) if config.parallel.zero and is_sharded(row, config) else 1
    return local_elements(row, config) / shards


def sums(row: Parameter, config: Config) -> list[Summed]:
    """Return what is communicated to sum the gradient of a row, or its weights (parallel.sync_every), over replica.

    float8, int8   all-to-all, all-gather   (1 + 4/128) S each
    topk           all-gather   R S/1024 k (g + 2)                       k = ratio 1024, values of g bytes, places of 2
    randomk        all-reduce     S/1024 k g
    powersgd       all-reduce   4 rank (rows + columns) per layer        and inside a replica where matrices are sharded
    others         all-reduce   4 S, in float32                          small arrays; all without compression
    """
    how = config.parallel.compression
    S = shard_elements(row, config)
    if how.kind in EIGHT_BITS and is_quantized(S, config.parallel.replica, config.parallel.persist_below):
        sent = BYTES * padded(S, config.parallel.replica)
        return [Summed(REPLICA, "all_to_all", sent), Summed(REPLICA, "all_gather", sent)]
    if not is_compressed(row, config):
        return [Summed(REPLICA, "all_reduce", 4 * S)]
    if how.kind == "powersgd":
        return low_rank_sums(row, config)
    g = gradient_bytes(config)
    sent = ceil(S / BLOCK) * max(1, round(how.ratio * BLOCK))
    if how.kind == "topk":
        return [Summed(REPLICA, "all_gather", config.parallel.replica * sent * (g + 2))]
    return [Summed(REPLICA, "all_reduce", g * sent)]


def all_sums(config: Config) -> list[Summed]:
    """Return `sums` of all rows."""
    return [summed for row in rows(config).values() if not row.is_frozen for summed in sums(row, config)]


def low_rank_sums(row: Parameter, config: Config) -> list[Summed]:
    """Return what `compression.low_rank` communicates of a row."""
    p = config.parallel
    rank = p.compression.rank
    matrices = matrices_of(row.shape, layout(row, config), stacked=False)
    layers = layers_of(row, config)
    shards = [prod(p.axes[axis] for axis in axes) for axes in (matrices.row_axes, matrices.column_axes)]
    num_rows = prod(row.shape[: matrices.columns]) / shards[0]
    num_columns = prod(row.shape[matrices.columns :]) / shards[1]
    of_rows, of_columns = 4 * layers * rank * num_rows, 4 * layers * rank * num_columns
    found = [
        Summed(matrices.column_axes, "all_reduce", of_rows),
        Summed(REPLICA, "all_reduce", of_rows),
        Summed(matrices.row_axes, "all_reduce", 4 * layers * rank**2),
        Summed(matrices.row_axes, "all_reduce", of_columns),
        Summed(REPLICA, "all_reduce", of_columns),
        Summed(matrices.column_axes, "all_reduce", 4 * layers * rank),
    ]
    return [summed for summed in found if summed.axes]


def layout(row: Parameter, config: Config) -> PartitionSpec:
    """Return how a row's master weights are sharded, without the dim of layers."""
    p = config.parallel
    N = zero_devices_of(row, config)
    is_shared = row.has_experts and p.expert > 1
    entries: list = [None] * len(row.shape)
    taken = {row.split_dim, 0 if is_shared else None}
    if row.split_dim is not None:
        entries[row.split_dim] = p.vocab_axes if row.is_padded else ("tensor",) if p.tensor > 1 else None
    if is_shared:
        entries[0] = ("expert",)
    if p.zero and is_sharded(row, config):
        free = next(d for d, size in enumerate(row.shape) if d not in taken and size % N == 0)
        entries[free] = tuple(axis for axis in ZERO_AXES if p.axes[axis] > 1 and not (is_shared and axis == "expert"))
    return PartitionSpec(*(entry or None for entry in entries))


def state_elements(config: Config) -> tuple[float, float]:
    """Return the elements, in float32, that a device keeps between sums: of residuals, and with powersgd of bases."""
    p = config.parallel
    chosen = [row for row in rows(config).values() if is_compressed(row, config)]
    sums_of_rows = [low_rank_sums(row, config) for row in chosen] if p.compression.kind == "powersgd" else []
    bases = [next(s.bytes for s in reversed(of_row) if s.axes == REPLICA) / 4 for of_row in sums_of_rows]
    return sum(shard_elements(row, config) for row in chosen), sum(bases)
