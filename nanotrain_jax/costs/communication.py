"""Wire bytes of a step between devices, in closed form, with sources. For resolved configs.

Symbols as in costs/counts.py: Psi parameters on a device before ZeRO, N devices of ZeRO, R along replica, t along
tensor, c along context, M microbatches. Bytes are those one device sends on a ring: all-reduce 2 (N-1)/N S, all-gather,
reduce-scatter and all-to-all (N-1)/N S, permute S, for a buffer of S bytes.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

from nanotrain_jax.config.execution import Execution, execution
from nanotrain_jax.config.schema import Config, Parallel
from nanotrain_jax.costs import compression, counts, mixture, muon, tensor_traffic, vision
from nanotrain_jax.costs.counts import BYTES
from nanotrain_jax.costs.parameter_traffic import parameter_buffers, sharded_elements
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.models.decoder_table import EMBEDDING, MLP
from nanotrain_jax.models.parameters import ENDS, LAYERS
from nanotrain_jax.parallel.mesh import BATCH_AXES, ZERO_AXES


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
    Tensor parallelism: tensor_traffic.py. Over context: `attention_buffers`. Pictures: `vision.buffers`. Muon: muon.py.
    Pipeline parallelism (arXiv 2104.04473, section 3.2): permute 2 w B T D per tick (B T D / t with sequence
    parallelism), where a schedule uses M C of its ticks each way; gradients of the ends are summed over stages too.
    With the vocabulary over pipe (arXiv 2411.05288) those of embedding and head are not, and `shares_of_ends`. With
    parallel.idle=mask idle stages communicate as well (`counts.runs` in place of M).
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
    for op, size, what in tensor_traffic.tensor_buffers(config):
        add(("tensor",), op, size, what)
    tokens = counts.tokens_per_device(config) / p.microbatches * counts.runs(config, ENDS)
    times = 2 if counts.computes_logits_again(config) else 1
    add(p.vocab_axes, "all_reduce", times * 3 * 4 * tokens, Traffic.LOSS)
    add(("context",), "all_reduce", sums_of_pairs(config), Traffic.LOSS)
    for op, size, what in attention_buffers(config):
        if op == "permute":
            found["context", op, what] = size
        else:
            add(("context",), op, size, what)
    for axes, size in router_buffers(config):
        add(axes, "all_reduce", size, Traffic.ROUTERS)
    add(("expert",), "all_to_all", exchanged_bytes(config), Traffic.EXPERTS)
    for axis, op, size, what in vision.buffers(config):
        add((axis,), op, size, what)
    if p.pipe > 1:
        x = between_stages(config)
        found["pipe", "permute", Traffic.BETWEEN_STAGES] = 2 * counts.outline(config).ticks * x
        if p.vocab_over_pipe:
            add(("pipe",), "all_reduce", shares_of_ends(config) * x, Traffic.SHARED_BY_STAGES)
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
    axes = tuple(axis for axis in ZERO_AXES if p.axes[axis] > 1)
    if p.zero in (1, 2) and axes:
        weights = BYTES[config.precision.compute] * sharded_elements(config)
        found[",".join(axes), "all_gather"] = on_a_ring(axes, "all_gather", weights, p)
    what = Traffic.SYNCHRONIZATION
    return [{"axis": axis, "op": op, "bytes_per_device": size, "what": what} for (axis, op), size in found.items()]


def on_a_ring(axes: tuple[str, ...], op: str, size: float, p: Parallel) -> float:
    """Return the bytes that a device sends of a full buffer of this size."""
    n = prod(p.axes[axis] for axis in axes)
    return (2 if op == "all_reduce" else 1) * (n - 1) / n * size


def between_stages(config: Config) -> float:
    """Return the bytes of the activation that a stage sends to the next, of one microbatch."""
    p = config.parallel
    x = BYTES[config.precision.compute] * counts.tokens_per_device(config) * config.model.d_model / p.microbatches
    return (x / p.tensor if p.sequence_parallel else x) + mixture.router_queue_bytes(config)


def sums_of_pairs(config: Config) -> float:
    """Return the bytes of sums over the tokens of P pairs in each row (models/dpo.py): in each use of the ends 2 P
    log-probabilities, 2 P numbers of targets and P gradients of margins, and once 2 P numbers of the whole batch."""
    if not config.train.objective:
        return 0.0
    p, P = config.parallel, config.data.pairs_per_row
    rows = counts.tokens_per_device(config) * p.context / config.data.seq_len
    return 4 * P * rows * (5 * counts.runs(config, ENDS) / p.microbatches + 2)


def router_buffers(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """Return the axes and bytes of the all-reduces of a step that balance and measure experts (models/balance.py).

    The loads of L routers, of each microbatch for the loss that balances, and once for the metrics; where devices have
    the same ones, to declare them so: over tensor and stages, without sequence parallelism in each layer.
    """
    m, p = config.model, config.parallel
    if not m.experts:
        return []

    def several(*axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if p.axes[axis] > 1 and (axis != "replica" or not p.sync_every))

    loads, microbatches = 4 * m.main_layers * m.experts.num, counts.runs(config, ENDS)
    of_loss = (loads + 4) * microbatches * m.experts.adds_loss
    stages = ("pipe",) * (execution(config) is Execution.PIPELINE)
    same = tuple(axis for axis in p.vocab_axes if axis == "pipe" or p.sequence_parallel)
    found = [
        (several(*BATCH_AXES), of_loss),
        (several(*stages, *BATCH_AXES), loads + 8.0),
        (same, (loads + 8.0) * microbatches),
    ]
    if p.tensor > 1 and not p.sequence_parallel:
        rows = mixture.router_queue_bytes(config) / m.main_layers * counts.stage_layers(config)
        found.append((("tensor",), rows * counts.runs(config, LAYERS)))
    return found


def exchanged_bytes(config: Config) -> float:
    """Return the bytes of the buffers that travel over expert in a step (parallel/expert/exchange.py), of all layers.

    Rows of w D bytes as often as `exchanges` says. Beside each row its gate, float32, there and its gradient back, and
    4 bytes per expert: how many rows.
    """
    m, rows = config.model, mixture.exchanged_rows(config)
    if not rows:
        return 0.0
    again = config.memory.rematerialization.policy == "block"
    of_row = exchanges(config) * BYTES[config.precision.compute] * m.d_model + 4 * (3 + again)
    layers = counts.stage_layers(config) * counts.runs(config, LAYERS)
    return layers * (rows * of_row + 4 * m.experts.num * (2 + again))


def exchanges(config: Config) -> float:
    """Return how often rows travel in the forward and backward of a microbatch.

    To their experts and back, in the forward and in the backward; to their experts once more for the gradients of gate
    and up, or if full remat computes these again: 5 times. With block:n the forward's twice more.
    """
    policy = config.memory.rematerialization.policy
    trains = any(not counts.rows(config)[f"{MLP}/{name}_EDF"].is_frozen for name in ("gate", "up"))
    of_block = 2 - counts.last_matmuls_spared(config) if policy == "block" else 0
    return 4 + (trains or policy == "full") + of_block


def shares_of_ends(config: Config) -> int:
    """Return how often stages all-reduce w B T D, with the vocabulary over pipe (parallel/pipeline/both_ends.py).

    4 times, or 3 if the embedding is frozen, in every tick, or with several chunks for every microbatch.
    """
    p = config.parallel
    in_every_tick = p.chunks == 1 or p.idle == "mask"
    each = 3 if counts.rows(config)[EMBEDDING].is_frozen else 4
    return each * (counts.outline(config).ticks if in_every_tick else p.microbatches)


def attention_buffers(config: Config) -> list[tuple[str, float, Traffic]]:
    """Return operation, bytes and kind of what attention over context communicates in a step, over all layers.

    For each layer and token of a device, with K key heads and N query heads of width H (parallel/context/context.py):
        ring      permutes      2 (c-1) w K H each way, and 8 c K H of float32 gradients
        gather    all-gather    the same                reduce-scatter   8 (c-1) K H
        ulysses   all-to-all    2 (c-1)/c w (N + K) H each way
    and the forward's once more where block:n, or `full` with ulysses, recomputes it. Returns, of all-gather,
    reduce-scatter and all-to-all, the bytes of the full buffer; of permutes, those sent.
    """
    p, m, c = config.parallel, config.model, config.parallel.context
    if c == 1:
        return []
    w, (first, _) = BYTES[config.precision.compute], mixture.first_runs(config)
    layers = counts.stage_layers(config) * counts.runs(config, LAYERS) + first
    tokens = counts.tokens_per_device(config) / p.microbatches * layers
    passes = attention_passes(config)
    kv = 2 * tokens * counts.local_kv_width(config)
    if p.context_attention == "ring":
        return [("permute", passes * (c - 1) * w * kv + 4 * c * kv, Traffic.ATTENTION)]
    if p.context_attention == "gather":
        gathered, scattered = passes * c * w * kv, 4 * c * kv
        return [
            ("all_gather", gathered, Traffic.ATTENTION),
            ("reduce_scatter", scattered, Traffic.ATTENTION),
        ]
    queries = 2 * tokens * counts.query_width(m) / p.tensor  # and outputs
    return [("all_to_all", passes * w * (queries + ulysses_copies(config) * kv), Traffic.HEADS)]


def attention_passes(config: Config) -> float:
    """Return how often attention over context communicates in a step, for each layer and microbatch."""
    first, again = mixture.first_runs(config)
    layers = counts.stage_layers(config) * counts.runs(config, LAYERS) + first
    return (3 if counts.repeats_communication(config) else 2) + again / layers


def ulysses_copies(config: Config) -> float:
    """Return how many devices along context need each key head: several where there are fewer heads than devices."""
    p, local_heads = config.parallel, max(1, config.model.num_kv_heads / config.parallel.tensor)
    return max(1, p.context / local_heads)


def conditional_rates(config: Config) -> dict[str, Fraction]:
    """Return the average executions of each at-most-once loop of the pipeline, per tick that reaches it (`hlo.walk`).

    Each stage has M C units of F, B and W over all ticks. "first" and "last" are of a stage that holds both ends; with
    the vocabulary over pipe of all stages, M times in the ticks of a step.
    """
    p = config.parallel
    of_experts = {"further_rounds": Fraction(0)}
    if config.model.experts:
        of_experts["rows"] = mixture.share_of_buffer(config)
    if execution(config) is not Execution.PIPELINE:
        return of_experts
    schedule, last_of_chunk = counts.outline(config), Fraction(1, p.microbatches)
    per_tick = Fraction(p.microbatches * p.chunks, schedule.ticks)
    of_ends = Fraction(p.microbatches, schedule.ticks) if p.vocab_over_pipe else Fraction(1, p.chunks)
    return of_experts | {
        "forward": per_tick,
        "backward": per_tick,
        "weight": per_tick / max(1, schedule.weights),
        "first": of_ends,
        "last": of_ends,
        "accumulate": 1 - last_of_chunk,  # parallel.grad_reduce=per_layer: every microbatch of a chunk but the last
        "reduce": last_of_chunk,
        "layer": Fraction(1),  # of a stage without padding
    }
