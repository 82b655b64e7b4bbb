"""Wire bytes of a step between devices, in closed form, with sources. For resolved configs.

Symbols as in costs/counts.py: Psi parameters on a device before ZeRO, N devices of ZeRO, R along replica, t along
tensor, c along context, M microbatches. Bytes are those one device sends on a ring: all-reduce 2 (N-1)/N S, all-gather,
reduce-scatter and all-to-all (N-1)/N S, permute S, for a buffer of S bytes.
"""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

from nanotrain_jax.config.execution import Execution, execution, reduces_per_layer
from nanotrain_jax.config.schema import EIGHT_BITS, Config, Parallel
from nanotrain_jax.costs import compression, muon
from nanotrain_jax.costs.counts import (
    BYTES,
    gradient_bytes,
    is_sharded,
    last_matmuls_spared,
    local_elements,
    local_kv_width,
    outline,
    repeats_communication,
    rows,
    stage_layers,
    tokens_per_device,
    zero_devices,
)
from nanotrain_jax.models.parameters import ENDS, Parameter
from nanotrain_jax.parallel import quantization
from nanotrain_jax.parallel.mesh import BATCH_AXES, ZERO_AXES


class Traffic(Enum):
    """What a row of `communication` moves between devices."""

    GRADIENTS = "gradients"
    GRADIENT_SHARDS = "gradient shards"
    COMPRESSED = "gradients, compressed"
    WEIGHTS = "weights, forward and backward"
    UPDATED_WEIGHTS = "updated weights"
    ACTIVATIONS = "activations"
    REGATHERED_ACTIVATIONS = "activations, gathered again in the backward"
    BETWEEN_STAGES = "activations and their gradients"
    SHARED_BY_STAGES = "activations and their gradients at both ends"
    ATTENTION = "keys, values and their gradients"
    HEADS = "queries, keys, values and outputs, tokens for heads"
    LOSS = "loss"
    SYNCHRONIZATION = "weights of replicas"
    MOMENTUM = "momentum, shards for whole matrices"

    @property
    def is_gradients(self) -> bool:
        """True if the row moves gradients of parameters."""
        return self in (Traffic.GRADIENTS, Traffic.GRADIENT_SHARDS, Traffic.COMPRESSED)


class Buffer(NamedTuple):
    """Gradients or weights of one row of the parameter table that a device communicates in a step."""

    axes: tuple[str, ...]  # mesh axes with more than one device
    op: str
    what: Traffic
    part: str  # of the tree of parameters: layers or ends
    itemsize: float  # bytes per element on the wire
    times: int  # collectives per step
    elements: float  # of the full buffer; in 8 bits with the padding to whole blocks


def communication(config: Config) -> list[dict[str, Any]]:
    """Return the wire bytes per device and step, one row per mesh axes, operation and kind of traffic.

    ZeRO (arXiv 1910.02054, section 7), with gradients in precision.grad_reduce (g bytes) and weights in
    precision.compute (w bytes):
        stage 0   all-reduce               2 g Psi        over replica, data and context
        stage 1   reduce-scatter             g Psi        all-gather         w Psi
        stage 2   reduce-scatter           M g Psi        all-gather         w Psi
        stage 3   reduce-scatter           M g Psi        all-gather       M w (2 Psi_layers + Psi_ends)
    each times (N-1)/N, over data and context; without prefetch block:n gathers layers once more, to recompute a block.
    From stage 1, gradient shards are all-reduced over replica: 2 (R-1)/R g Psi / N. In 8 bits: `on_the_wire`; with
    parallel.compress `compression.sums`; with parallel.sync_every nothing over replica, but `synchronization`.
    optimizer.name=muon adds all-to-alls (costs/muon.py).

    Tensor parallelism: `tensor_buffers`. Attention over context: `attention_buffers`.

    Pipeline parallelism (arXiv 2104.04473, section 3.2): permute 2 w B T D per tick (B T D / t with sequence
    parallelism), where a schedule uses M C of its ticks each way; gradients of the ends are summed over stages too.
    With the vocabulary over pipe (arXiv 2411.05288) those of embedding and head are not, and `shares_of_ends`.
    Tied embeddings are gathered, and their gradients scattered, at both ends (ZeRO 2 and 3, `Execution.is_by_hand`).
    """
    p = config.parallel
    found: dict[tuple[str, str, Traffic], float] = {}

    def add(axes: tuple[str, ...], op: str, size: float, what: Traffic) -> None:
        """size: bytes of the full buffer."""
        key = ",".join(axes), op, what
        found[key] = found.get(key, 0.0) + on_a_ring(axes, op, size, p)

    for buffer in parameter_buffers(config):
        add(buffer.axes, buffer.op, buffer.times * buffer.itemsize * buffer.elements, buffer.what)

    if p.compression.kind != "none" and not p.sync_every:
        for summed in compression.all_sums(config):
            add(summed.axes, summed.op, summed.bytes, Traffic.COMPRESSED)
    for exchange in muon.exchanges(config):
        add(exchange.axes, "all_to_all", exchange.bytes, Traffic.MOMENTUM)
    for op, size, what in tensor_buffers(config):
        if op == "permute":
            found["tensor", op, what] = (p.tensor - 1) / p.tensor * size
        else:
            add(("tensor",), op, size, what)
    add(p.vocab_axes, "all_reduce", 3 * 4 * tokens_per_device(config), Traffic.LOSS)
    for op, size, what in attention_buffers(config):
        if op == "permute":
            found["context", op, what] = size
        else:
            add(("context",), op, size, what)
    if p.pipe > 1:
        x = between_stages(config)
        found["pipe", "permute", Traffic.BETWEEN_STAGES] = 2 * outline(config).ticks * x
        if p.vocab_over_pipe:
            add(("pipe",), "all_reduce", 4 * shares_of_ends(config) * x, Traffic.SHARED_BY_STAGES)
    return [
        {"axis": axis, "op": op, "bytes_per_device": size, "what": what}
        for (axis, op, what), size in found.items()
        if size
    ]


def synchronization(config: Config) -> list[dict[str, Any]]:
    """Return the wire bytes per device of an outer step (parallel.sync_every), in rows as those of `communication`.

    DiLoCo (arXiv 2311.08105), in float32, with the shards of ZeRO 1 to 3: all-reduce 2 (R-1)/R x 4 Psi / N over
    replica, or with parallel.compress `compression.sums`. ZeRO 1 and 2 all-gather the weights in precision.compute,
    (N-1)/N w Psi, as a step does.
    """
    p = config.parallel
    if not p.sync_every:
        return []
    found: dict[tuple[str, str], float] = {}
    for summed in compression.all_sums(config):
        key = ",".join(summed.axes), summed.op
        found[key] = found.get(key, 0.0) + on_a_ring(*summed, p)
    axes = tuple(axis for axis in ZERO_AXES if getattr(p, axis) > 1)
    if p.zero in (1, 2) and axes:
        weights = BYTES[config.precision.compute] * sharded_elements(config)
        found[",".join(axes), "all_gather"] = on_a_ring(axes, "all_gather", weights, p)
    what = Traffic.SYNCHRONIZATION
    return [{"axis": axis, "op": op, "bytes_per_device": size, "what": what} for (axis, op), size in found.items()]


def on_a_ring(axes: tuple[str, ...], op: str, size: float, p: Parallel) -> float:
    """Return the bytes that a device sends of a full buffer of this size."""
    n = prod(getattr(p, axis) for axis in axes)
    return (2 if op == "all_reduce" else 1) * (n - 1) / n * size


def sharded_elements(config: Config) -> float:
    """Return the elements of a device's weights that ZeRO shards, before it does."""
    return sum(local_elements(row, config) for row in rows(config).values() if is_sharded(row, config))


def between_stages(config: Config) -> float:
    """Return the bytes of the activation that a stage sends to the next, of one microbatch."""
    p = config.parallel
    x = BYTES[config.precision.compute] * tokens_per_device(config) * config.model.d_model / p.microbatches
    return x / p.tensor if p.sequence_parallel else x


def shares_of_ends(config: Config) -> int:
    """Return how often stages all-reduce 4 w B T D, with the vocabulary over pipe (parallel/pipeline/both_ends.py): in
    every tick, or with several chunks for every microbatch.
    """
    p = config.parallel
    in_every_tick = p.chunks == 1 or p.idle == "mask"
    return outline(config).ticks if in_every_tick else p.microbatches


def attention_buffers(config: Config) -> list[tuple[str, float, Traffic]]:
    """Return operation, bytes and kind of what attention over context communicates in a step, over all layers.

    For each layer and token of a device, with K key heads and N query heads of width H (parallel/context.py):
        ring      permutes      2 (c-1) w K H each way, and 8 c K H of float32 gradients
        gather    all-gather    the same                reduce-scatter   8 (c-1) K H
        ulysses   all-to-all    2 (c-1)/c w (N + K) H each way
    and the forward's once more where block:n, or `full` with ulysses, recomputes it. Returns, of all-gather,
    reduce-scatter and all-to-all, the bytes of the full buffer; of permutes, those sent.
    """
    p, m, c = config.parallel, config.model, config.parallel.context
    if c == 1:
        return []
    w, tokens = BYTES[config.precision.compute], tokens_per_device(config) * stage_layers(config)
    passes = 3 if repeats_communication(config) else 2
    kv = 2 * tokens * local_kv_width(config)
    if p.context_attention == "ring":
        return [("permute", passes * (c - 1) * w * kv + 4 * c * kv, Traffic.ATTENTION)]
    if p.context_attention == "gather":
        gathered, scattered = passes * c * w * kv, 4 * c * kv
        return [
            ("all_gather", gathered, Traffic.ATTENTION),
            ("reduce_scatter", scattered, Traffic.ATTENTION),
        ]
    queries = 2 * tokens * m.d_model / p.tensor  # and outputs
    return [("all_to_all", passes * w * (queries + ulysses_copies(config) * kv), Traffic.HEADS)]


def ulysses_copies(config: Config) -> float:
    """Return how many devices along context need each key head: several where there are fewer heads than devices."""
    p, local_heads = config.parallel, max(1, config.model.num_kv_heads / config.parallel.tensor)
    return max(1, p.context / local_heads)


def parameter_buffers(config: Config) -> list[Buffer]:
    """Return the full buffers of gradients and weights that `communication` sums, for each row of parameters."""
    p, policy = config.parallel, config.memory.rematerialization.policy
    g, w, M = gradient_bytes(config), BYTES[config.precision.compute], p.microbatches
    in_loop, after_loop = arrays_of_layers(config)
    buffers = []

    def add(axes: tuple[str, ...], op: str, what: Traffic, times: int, arrays: int, divisor: float = 1) -> None:
        """Append the buffers of the current row. arrays: those in which a parameter of layers travels."""
        apart = ("replica",) if p.sync_every else ()
        present = tuple(axis for axis in axes if getattr(p, axis) > 1 and axis not in apart)
        if present and not (row.is_frozen and what is not Traffic.WEIGHTS):
            itemsize, elements = g if what.is_gradients else w, local_elements(row, config) / divisor
            plain = Buffer(present, op, what, row.part, itemsize, times, elements)
            buffers.extend(on_the_wire(plain, row, 1 if row.part == ENDS else arrays, config))

    replica = ("replica",) if p.compression.kind == "none" else ()  # else costs/compression.py
    batch = *replica, *ZERO_AXES
    for row in rows(config).values():
        partial = row.is_partial or (row.split_dim is None and p.sequence_parallel)
        is_replicated = row.part == ENDS and not (row.is_padded and p.vocab_over_pipe)
        stages = ("pipe",) if is_replicated else ()
        over = ("tensor",) if partial else ()
        if p.zero == 0 and execution(config) is Execution.PER_LAYER:  # inside the backward; over tensor once, after it
            add(BATCH_AXES, "all_reduce", Traffic.GRADIENTS, 1, in_loop)
            add(over, "all_reduce", Traffic.GRADIENTS, 1, after_loop)
            continue
        if p.zero == 0 or not is_sharded(row, config):
            add((*stages, *batch, *over), "all_reduce", Traffic.GRADIENTS, 1, after_loop)
            continue
        uses = 2 if row.used == "both" and execution(config).is_by_hand else 1  # one at each end
        add(ZERO_AXES, "reduce_scatter", Traffic.GRADIENTS, uses * M if p.zero > 1 else 1, in_loop)
        shards = zero_devices(config)
        add((*stages, *replica, *over), "all_reduce", Traffic.GRADIENT_SHARDS, 1, after_loop, shards)
        if p.zero < 3:
            add(ZERO_AXES, "all_gather", Traffic.UPDATED_WEIGHTS, 1, after_loop)
            continue
        passes = uses if row.part == ENDS else 3 if policy == "block" and not p.prefetch else 2
        add(ZERO_AXES, "all_gather", Traffic.WEIGHTS, M * passes, in_loop)
    return buffers


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


def on_the_wire(buffer: Buffer, row: Parameter, arrays: int, config: Config) -> list[Buffer]:
    """Return the buffers in which gradients or weights of a row, so many arrays, travel: in 8 bits, or as they are.

    In 8 bits (parallel/communication.py, quantization.py; ZeRO++, arXiv 2306.10209) each array is padded to whole
    blocks, and an element takes 1 + 4/128 bytes:
        precision.grad_reduce=int8, float8   reduce-scatter: an all-to-all; all-reduce: an all-to-all and an all-gather
        precision.gather=int8                all-gather, of matrices of layers
        precision.gather=float8              the same with 1 byte per element, and 4 per shard of each matrix
    """
    N, gather = prod(getattr(config.parallel, axis) for axis in buffer.axes), config.precision.gather
    is_matrix_of_layer = buffer.what is Traffic.WEIGHTS and row.part != ENDS and len(row.shape) > 1
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


def tensor_buffers(config: Config) -> list[tuple[str, float, Traffic]]:
    """Return operation, bytes of the full buffer and kind of what tensor parallelism communicates in a step.

    Megatron-LM, arXiv 1909.08053, section 3, in w B T D (t-1)/t, summed over microbatches:
        all-reduce       2 (4 L + 2)         per layer two in the forward and two in the backward; one of the embedding
                                             look-up, one of the loss
        with sequence parallelism (arXiv 2205.05198, section 4.2.2) as pairs; the backward of each layer gathers the
        inputs of its matmuls again instead of storing them:
        all-gather       6 L + 2
        reduce-scatter   4 L + 2
    Recomputation adds: `full` one all-reduce per layer (a reduce-scatter), block:n two (two pairs). With
    parallel.overlap_tensor permutes replace all but the gathers again, 2 L scatters and those of look-up and loss.
    Gradients of frozen weights do not gather inputs again.
    The loss all-reduces 3 scalars per token. Gradients of parameters that every device of the axis stores are summed
    over tensor where they are partial: all of them under sequence parallelism, else those of keys and values with fewer
    heads than t.
    """
    p, L, tokens = config.parallel, stage_layers(config), tokens_per_device(config)
    activations = BYTES[config.precision.compute] * tokens * config.model.d_model
    gathers, scatters = tensor_passes(config)
    if not p.sequence_parallel:
        return [("all_reduce", (gathers * L + 2) * activations, Traffic.ACTIVATIONS)]
    if p.tensor > 1 and p.overlap_tensor:
        is_full = config.memory.rematerialization.policy == "full"
        of_layer, regathers = gathers + scatters, 0 if is_full else regathered_inputs(config)
        return [
            ("permute", (of_layer - regathers - 2) * L * activations, Traffic.ACTIVATIONS),
            ("all_gather", (regathers * L + 2) * activations, Traffic.REGATHERED_ACTIVATIONS),
            ("reduce_scatter", (2 * L + 2) * activations, Traffic.ACTIVATIONS),
        ]
    return [
        ("all_gather", (gathers * L + 2) * activations, Traffic.REGATHERED_ACTIVATIONS),
        ("reduce_scatter", (scatters * L + 2) * activations, Traffic.ACTIVATIONS),
    ]


def tensor_passes(config: Config) -> tuple[float, float]:
    """Return the gathers and the scatters per layer over tensor; without sequence parallelism: all-reduces, and 0.

    See `tensor_buffers`: 4 of each, those of recomputation, and 2 gathers of matmul inputs (not with `full`, which has
    just recomputed them).
    """
    policy = config.memory.rematerialization.policy
    inputs = regathered_inputs(config)
    recomputed = {"none": 0, "selective": 0, "full": 1, "block": 2 - last_matmuls_spared(config)}[policy]
    if not config.parallel.sequence_parallel:
        return 4 + recomputed, 0
    return 4 + (2 + inputs if policy == "block" else 2 if policy == "full" else inputs), 4 + recomputed


def regathered_inputs(config: Config) -> int:
    """Return how many matmul inputs of a layer the backward gathers again, for gradients of weights: those of attention
    and of the MLP, unless the weights that they enter are frozen."""
    entering = {path: row for path, row in rows(config).items() if row.is_matmul and row.layout.startswith("D ")}
    return len({path.rpartition("/")[0] for path, row in entering.items() if not row.is_frozen})


def conditional_rates(config: Config) -> dict[str, Fraction]:
    """Return the average executions of each at-most-once loop of the pipeline, per tick that reaches it (`hlo.walk`).

    Each stage has M C units of F, B and W over all ticks. "first" and "last" are of a stage that holds both ends; with
    the vocabulary over pipe of all stages, M times in the ticks of a step.
    """
    p = config.parallel
    if execution(config) is not Execution.PIPELINE:
        return {}
    schedule, last_of_chunk = outline(config), Fraction(1, p.microbatches)
    per_tick = Fraction(p.microbatches * p.chunks, schedule.ticks)
    of_ends = Fraction(p.microbatches, schedule.ticks) if p.vocab_over_pipe else Fraction(1, p.chunks)
    return {
        "forward": per_tick,
        "backward": per_tick,
        "weight": per_tick / max(1, schedule.weights),
        "first": of_ends,
        "last": of_ends,
        "accumulate": 1 - last_of_chunk,  # parallel.grad_reduce=per_layer: every microbatch of a chunk but the last
        "reduce": last_of_chunk,
        "layer": Fraction(1),  # of a stage without padding
    }
