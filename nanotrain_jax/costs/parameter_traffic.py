"""Gradients and weights that travel between devices in a step, one row of the parameter table after another.

For resolved configs. Symbols and sources: costs/communication.py.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from nanotrain_jax.config.execution import Execution, execution, reduces_per_layer
from nanotrain_jax.config.schema import EIGHT_BITS, Config
from nanotrain_jax.costs import vision
from nanotrain_jax.costs.counts import (
    BYTES,
    encodes,
    gradient_bytes,
    is_sharded,
    last_matmuls_spared,
    local_elements,
    rows,
    runs,
    stage_layers,
    zero_devices_of,
)
from nanotrain_jax.costs.mixture import first_runs, looks_up_again
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.models.decoder_table import DOWN, EMBEDDING
from nanotrain_jax.models.parameters import DENSE, ENCODER, ENDS, LAYERS, VISION, Parameter
from nanotrain_jax.parallel.collectives import buckets
from nanotrain_jax.parallel.gradients import quantization
from nanotrain_jax.parallel.mesh import ZERO_AXES


class Buffer(NamedTuple):
    """Gradients or weights of one row of the parameter table that a device communicates in a step."""

    axes: tuple[str, ...]  # mesh axes with more than one device
    op: str
    what: Traffic
    part: str  # of the tree of parameters
    itemsize: float  # bytes per element on the wire
    times: float  # collectives per step
    elements: float  # of the full buffer; in 8 bits with the padding to whole blocks


def sharded_elements(config: Config) -> float:
    """Return the elements of a device's weights that ZeRO shards, before it does."""
    return sum(local_elements(row, config) for row in rows(config).values() if is_sharded(row, config))


def parameter_buffers(config: Config) -> list[Buffer]:
    """Return the full buffers of gradients and weights that `communication` sums, for each row of parameters."""
    p = config.parallel
    g, w = gradient_bytes(config), BYTES[config.precision.compute]
    buffers = []

    def add(axes: tuple[str, ...], op: str, what: Traffic, times: float, arrays: int, divisor: float = 1) -> None:
        """Append the buffers of the current row. arrays: those in which it travels."""
        apart = ("replica",) if p.sync_every else ()
        present = tuple(axis for axis in axes if p.axes[axis] > 1 and axis not in apart)
        if present and not (row.is_frozen and what is not Traffic.WEIGHTS):
            itemsize, elements = g if what.is_gradients else w, local_elements(row, config) / divisor
            plain = Buffer(present, op, what, row.part, itemsize, times, elements)
            buffers.extend(on_the_wire(plain, row, arrays, config))

    replica = ("replica",) if p.compression.kind == "none" else ()  # else costs/compression.py
    arrays_of = {LAYERS: arrays_of_layers(config)}
    arrays_of |= {DENSE: arrays_of_stack(config, config.model.dense_layers)}
    arrays_of |= {ENCODER: arrays_of_stack(config, config.vision.num_layers if config.vision else 1)}
    for path, row in rows(config).items():
        in_loop, after_loop = arrays_of.get(row.part, (1, 1))
        is_of_decoder = row.part in (LAYERS, DENSE, ENDS)
        partial = row.is_partial or (row.split_dim is None and p.sequence_parallel and is_of_decoder)
        is_replicated = row.part != LAYERS and not (row.is_padded and p.vocab_over_pipe)
        stages = ("pipe",) if is_replicated else ()
        over = ("tensor",) if partial else ()
        zero_axes = tuple(axis for axis in ZERO_AXES if axis != "expert" or not row.has_experts)
        batch = *replica, *zero_axes
        if p.zero == 0 and execution(config) is Execution.PER_LAYER:  # inside the backward; over tensor once, after it
            add(("replica", *zero_axes), "all_reduce", Traffic.GRADIENTS, 1, in_loop)
            add(over, "all_reduce", Traffic.GRADIENTS, 1, after_loop)
            continue
        if p.zero == 0 or not is_sharded(row, config):
            add((*stages, *batch, *over), "all_reduce", Traffic.GRADIENTS, 1, after_loop)
            continue
        times = uses(path, row, config)
        add(zero_axes, "reduce_scatter", Traffic.GRADIENTS, times if p.zero > 1 else 1, in_loop)
        shards = zero_devices_of(row, config)
        add((*stages, *replica, *over), "all_reduce", Traffic.GRADIENT_SHARDS, 1, after_loop, shards)
        if p.zero < 3:
            add(zero_axes, "all_gather", Traffic.UPDATED_WEIGHTS, 1, after_loop)
            continue
        add(zero_axes, "all_gather", Traffic.WEIGHTS, times * passes(path, row, config), in_loop)
    return buffers


def uses(path: str, row: Parameter, config: Config) -> float:
    """Return how often a step uses a parameter, in forwards: `counts.runs`, or once for each microbatch that a device
    encodes. Loops by hand use ends at each end apart, and the embedding again for the question about a picture."""
    if row.part in (VISION, ENCODER):
        return encodes(config)
    is_by_hand = execution(config).is_by_hand
    is_asked = is_by_hand and config.vision is not None and path == EMBEDDING
    return runs(config, row.part) * (2 if row.used == "both" and is_by_hand else 1) + is_asked * encodes(config)


def passes(path: str, row: Parameter, config: Config) -> float:
    """Return how often ZeRO 3 gathers a parameter for each of its `uses`: ends once, layers for the backward again, and
    once more to recompute a block (not those that are gathered ahead, nor what recomputation spares)."""
    if not row.is_stacked:
        return 1 + (path == EMBEDDING and looks_up_again(config))
    again = row.part == DENSE and first_runs(config)[1] > 0
    if row.part == ENCODER and not vision.has_backward(config, vision.LAYERS):
        return 1
    if config.memory.rematerialization.policy != "block" or (config.parallel.prefetch and row.part == LAYERS):
        return 2 + again
    return 3 + again - (last_matmuls_spared(config) if path == DOWN and _is_gathered_alone(path, config) else 0)


def _is_gathered_alone(path: str, config: Config) -> bool:
    """True if a weight of layers has a bucket of its own (`zero.Zero.gather`)."""
    of_layers = sorted(
        (name, BYTES[config.precision.compute] * local_elements(row, config) / stage_layers(config))
        for name, row in rows(config).items()
        if row.part == LAYERS and is_sharded(row, config) and row.is_frozen == rows(config)[path].is_frozen
    )
    names, sizes = zip(*of_layers, strict=True)
    return [names.index(path)] in buckets(sizes, config.parallel.bucket_mb * 2**20)


def arrays_of_layers(config: Config) -> tuple[int, int]:
    """Return the number of arrays in which ZeRO sends a parameter of all layers of a device: in the loop over layers,
    and what is left after it.

    In the loop one per layer, or per block where our own loop sends blocks; after it, the stacked array, unless stages
    reduce all in their loop. Gradients of stages 0 and 1 are sent after it, unless per layer.
    """
    p, remat, is_pipeline = config.parallel, config.memory.rematerialization, execution(config) is Execution.PIPELINE
    per_layer = reduces_per_layer(config)
    sends_rows = is_pipeline and (p.prefetch or per_layer)
    rows = stage_layers(config) // (remat.block if sends_rows and remat.policy == "block" else 1)
    return rows if p.zero > 1 or per_layer else 1, rows if is_pipeline and per_layer else 1


def arrays_of_stack(config: Config, layers: int) -> tuple[int, int]:
    """Return the same of a further stack of layers, which JAX differentiates as a loop over them everywhere."""
    is_in_loop = config.parallel.zero > 1 or execution(config) is Execution.PER_LAYER
    return layers if is_in_loop else 1, 1


def on_the_wire(buffer: Buffer, row: Parameter, arrays: int, config: Config) -> list[Buffer]:
    """Return the buffers in which gradients or weights of a row, so many arrays, travel: in 8 bits, or as they are.

    In 8 bits (parallel/zero/communication.py, quantization.py; ZeRO++, arXiv 2306.10209) each array is padded to whole
    blocks, and an element takes 1 + 4/128 bytes:
        precision.grad_reduce=int8, float8   reduce-scatter: an all-to-all; all-reduce: an all-to-all and an all-gather
        precision.gather=int8                all-gather, of matrices of layers
        precision.gather=float8              the same with 1 byte per element, and 4 per shard of each matrix
    """
    N, gather = prod(config.parallel.axes[axis] for axis in buffer.axes), config.precision.gather
    is_matrix_of_layer = buffer.what is Traffic.WEIGHTS and row.is_stacked and len(row.shape) > 1
    if is_matrix_of_layer and gather == "float8":
        return [buffer._replace(itemsize=1), buffer._replace(itemsize=4, elements=arrays * N)]
    is_chosen = is_matrix_of_layer and gather == "int8"
    if buffer.what.is_gradients:
        is_chosen = config.precision.grad_reduce in EIGHT_BITS
    size = buffer.elements / arrays
    if not is_chosen or not quantization.is_quantized(size, N, config.parallel.persist_below):
        return [buffer]
    sent = buffer._replace(itemsize=quantization.BYTES, elements=arrays * quantization.padded(size, N))
    ops = {"reduce_scatter": ["all_to_all"], "all_reduce": ["all_to_all", "all_gather"], "all_gather": ["all_gather"]}
    return [sent._replace(op=op) for op in ops[buffer.op]]
