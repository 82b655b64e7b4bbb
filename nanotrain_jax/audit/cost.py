"""Closed forms: what a run must compute and move, with sources. For resolved configs. What it stores: audit/memory.py.

Psi is the number of parameters that a device holds when ZeRO shards nothing (with t tensor-parallel devices 1/t of
those that are split; with P pipeline stages 1/P of the layers, and both ends), N the devices along `data`, R those
along `replica`, M the microbatches. Where stages differ, a stage that had both ends is meant: none does more. What
ZeRO leaves whole (vectors under parallel.persist_below, arrays without a dim that N divides) counts as that: stored by
all, all-reduced.
"""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

from nanotrain_jax.config import Config, Model
from nanotrain_jax.execution import Execution, execution
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import ENDS, LAYERS, Parameter
from nanotrain_jax.parallel import chart

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Traffic(Enum):
    """What a row of `communication` moves between devices."""

    GRADIENTS = "gradients"
    GRADIENTS_OF_GROUPS = "gradients between groups"
    WEIGHTS = "weights, forward and backward"
    UPDATED_WEIGHTS = "updated weights"
    ACTIVATIONS = "activations"
    ACTIVATIONS_AND_AGAIN = "activations, and again in the backward"
    BETWEEN_STAGES = "activations and their gradients"
    LOSS = "loss"

    @property
    def is_gradients(self) -> bool:
        """Whether gradients of parameters move."""
        return self in (Traffic.GRADIENTS, Traffic.GRADIENTS_OF_GROUPS)


def parameters(model: Model) -> int:
    """Number of parameters (tied embeddings counted once, padding not)."""
    return sum(row.size * _times(row, model) for row in table(model).values())


def _times(parameter: Parameter, model: Model) -> int:
    return model.num_layers if parameter.part == LAYERS else 1


def local(parameter: Parameter, config: Config) -> float:
    """Elements on a device of all layers' arrays of this row, where ZeRO shards nothing."""
    p = config.parallel
    stages = p.pipe if parameter.part == LAYERS else 1
    split = p.tensor if parameter.split_dim is not None else 1
    return parameter.size * _times(parameter, config.model) / split / stages


def sharded(parameter: Parameter, config: Config) -> bool:
    """Whether ZeRO, from stage 1, splits it over data: along a dim that data divides and tensor has not taken."""
    data = config.parallel.data
    return (
        data > 1 and parameter.size >= config.parallel.persist_below and any(dim % data == 0 for dim in parameter.free)
    )


def rows(parameter: Parameter, config: Config) -> int:
    """Size on a device of the first dim (of a stack of layers: the second), where ZeRO shards it."""
    p, first = config.parallel, parameter.shape[0]
    if parameter.split_dim == 0:
        return first // p.tensor
    can = [dim for dim in parameter.free if dim % p.data == 0]
    return first // p.data if p.zero and sharded(parameter, config) and max(can) == first else first


def kv_width(model: Model) -> int:
    """Of all heads of keys: K H."""
    return model.d_model // model.num_heads * model.num_kv_heads


def matmul_parameters(model: Model) -> int:
    """Parameters that multiply every token: with the output head, without look-ups, biases and norms."""
    return sum(row.size * _times(row, model) for row in table(model).values() if row.is_matmul)


def flops_per_token(model: Model, seq_len: int) -> dict[str, float]:
    """FLOPs of forward and backward per token, N = matmul parameters, L layers, d model width, T sequence length.

    full    6 N + 12 L d T   attention counted in full (PaLM, arXiv 2204.02311, appendix B; what most published MFU use)
    causal  6 N +  6 L d T   only the half of attention that a causal mask leaves
    Recomputation is not counted.
    """
    N, attention = matmul_parameters(model), model.num_layers * model.d_model * seq_len
    return {"full": 6.0 * N + 12.0 * attention, "causal": 6.0 * N + 6.0 * attention}


def step_flops(config: Config) -> float:
    """Matmul FLOPs that one device executes in one step, attention counted in full, recomputation included."""
    parts = flops_here(config)
    return (3 * (parts["layers"] + parts["head"] + parts["attention"]) + parts["again"]) * tokens_per_device(config)


def flops_here(config: Config) -> dict[str, float]:
    """Matmul FLOPs per token that one device executes.

    layers, head, attention   in the forward; the backward takes twice as many
    again                     what is computed again, besides 6 N + 12 L d T:
        selective   4 L d T                          attention's forward
        full        2 N_layers + 4 L d T - 2 L d F   the forward, but for the last matmul
        block:n     2 N_layers + 4 L d T             the whole forward

    all over the tensor axis; of keys and values each device computes at least one head. With pipeline stages: of the
    stage with the head; microbatches that idle stages compute to throw away (parallel.idle=mask) are not counted.
    """
    m, T, t = config.model, config.data.seq_len, config.parallel.tensor
    L = m.num_layers / config.parallel.pipe  # on a device
    times, flops = {LAYERS: L, ENDS: 1}, {LAYERS: 0.0, ENDS: 0.0}
    for row in table(m, t).values():
        if row.is_matmul:
            share = 1 / m.num_kv_heads if row.is_partial else 1.0 if row.split_dim is None else 1 / t
            flops[row.part] += 2 * row.size * times[row.part] * share
    layers, attention = flops[LAYERS], 4.0 * L * m.d_model * T / t
    last = 2.0 * L * m.d_model * m.d_ff / t
    again = {"none": 0.0, "selective": attention, "full": layers + attention - last, "block": layers + attention}
    policy = config.memory.rematerialization.policy
    return {"layers": layers, "head": flops[ENDS], "attention": attention, "again": again[policy]}


def communication(config: Config) -> list[dict[str, Any]]:
    """Wire bytes per device and step, by mesh axes and operation (ring; see audit/hlo.py), and what moves.

    ZeRO (arXiv 1910.02054, section 7), with gradients in precision.grad_reduce (g bytes) and weights in
    precision.compute (w bytes):
        stage 0   all-reduce               2 g Psi        over replica and data
        stage 1   reduce-scatter             g Psi        all-gather         w Psi
        stage 2   reduce-scatter           M g Psi        all-gather         w Psi
        stage 3   reduce-scatter           M g Psi        all-gather       M w (2 Psi_layers + Psi_ends)
    each times (N-1)/N; block:n gathers layers once more, to compute a block again. From stage 1, shards are
    all-reduced over replica: 2 (R-1)/R g Psi / N.

    Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3), in w B T D (t-1)/t, summed over microbatches:
        all-reduce       2 (4 L + 2)         in forward and backward two per layer; of the look-up and the loss one each
        with sequence parallelism (arXiv 2205.05198, section 4.2.2) as pairs, and in the backward of each layer what
        the matmuls took is gathered again instead of kept:
        all-gather       6 L + 2
        reduce-scatter   4 L + 2
    besides what is computed again: `full` one all-reduce per layer (a reduce-scatter), block:n two (two pairs). The
    loss: 3 scalars per token, all-reduced. Gradients of what all devices of the axis store are summed over it where
    they are partial: all of them under sequence parallelism, else those of keys and values with fewer heads than t.

    Pipeline (arXiv 2104.04473, section 3.2): permute 2 w B T D per tick (B T D / t with sequence parallelism), where
    a schedule uses M C of its ticks each way; gradients of the ends are summed over stages too. Tied embeddings are
    gathered, and their gradients scattered, at both ends (ZeRO 2 and 3); also without stages, where the
    layers' loop is written by hand (`Execution.is_by_hand`).
    """
    p, m = config.parallel, config.model
    w, L = BYTES[config.precision.compute], m.num_layers // p.pipe
    rows: dict[tuple[str, str, Traffic], float] = {}

    def add(axes: tuple[str, ...], op: str, size: float, what: Traffic) -> None:
        """size: bytes of the whole buffer."""
        n = prod(getattr(p, axis) for axis in axes)
        if n > 1:
            key = ",".join(axes), op, what
            rows[key] = rows.get(key, 0.0) + (2 if op == "all_reduce" else 1) * (n - 1) / n * size

    for part in parameter_buffers(config):
        add(part.axes, part.op, part.times * part.itemsize * part.elements, part.what)

    tensor, tokens = ("tensor",), tokens_per_device(config)
    activations, (there, back) = w * tokens * m.d_model, tensor_passes(config)
    if p.sequence_parallel:
        add(tensor, "all_gather", (there * L + 2) * activations, Traffic.ACTIVATIONS_AND_AGAIN)
        add(tensor, "reduce_scatter", (back * L + 2) * activations, Traffic.ACTIVATIONS)
    else:
        add(tensor, "all_reduce", (there * L + 2) * activations, Traffic.ACTIVATIONS)
    add(tensor, "all_reduce", 3 * 4 * tokens, Traffic.LOSS)
    if p.pipe > 1:
        ticks = outline(config).ticks
        x = activations / p.microbatches / (p.tensor if p.sequence_parallel else 1)
        rows["pipe", "permute", Traffic.BETWEEN_STAGES] = 2 * ticks * x
    return [
        {"axis": axis, "op": op, "bytes_per_device": size, "what": what}
        for (axis, op, what), size in rows.items()
        if size
    ]


class Buffer(NamedTuple):
    """Gradients or weights of one kind of parameters that a device communicates in a step."""

    axes: tuple[str, ...]  # of the mesh, those with several devices
    op: str
    what: Traffic
    part: str  # of the parameters
    itemsize: int  # bytes per element on the wire
    times: int  # how often in a step
    elements: float  # of the whole buffer


def parameter_buffers(config: Config) -> list[Buffer]:
    """The whole buffers of gradients and weights behind `communication`, for each kind of parameters."""
    p, m, policy = config.parallel, config.model, config.memory.rematerialization.policy
    g, w, M = BYTES[config.precision.grad_reduce], BYTES[config.precision.compute], p.microbatches
    found = []

    def add(axes: tuple[str, ...], op: str, what: Traffic, itemsize: int, times: int, divisor: int = 1) -> None:
        """For the row at hand."""
        present = tuple(axis for axis in axes if getattr(p, axis) > 1)
        if present:
            found.append(Buffer(present, op, what, row.part, itemsize, times, local(row, config) / divisor))

    for row in table(m, p.tensor).values():
        partial = row.is_partial or (row.split_dim is None and p.sequence_parallel)
        stages = ("pipe",) if row.part == ENDS else ()
        over = ("tensor",) if partial else ()
        if p.zero == 0 and p.grad_reduce == "per_layer":  # in the backward; over tensor once, after it
            add(("replica", "data"), "all_reduce", Traffic.GRADIENTS, g, 1)
            add(over, "all_reduce", Traffic.GRADIENTS, g, 1)
            continue
        if p.zero == 0 or not sharded(row, config):
            add((*stages, "replica", "data", *over), "all_reduce", Traffic.GRADIENTS, g, 1)
            continue
        uses = 2 if row.used == "both" and execution(config).is_by_hand else 1  # one at each end
        add(("data",), "reduce_scatter", Traffic.GRADIENTS, g, uses * M if p.zero > 1 else 1)
        add((*stages, "replica", *over), "all_reduce", Traffic.GRADIENTS_OF_GROUPS, g, 1, p.data)
        if p.zero == 3:
            passes = uses if row.part == ENDS else 3 if policy == "block" else 2
            add(("data",), "all_gather", Traffic.WEIGHTS, w, M * passes)
        else:
            add(("data",), "all_gather", Traffic.UPDATED_WEIGHTS, w, 1)
    return found


def turns(config: Config) -> dict[str, Fraction]:
    """How often, on average, the pipeline's loops of one turn or none run when a stage reaches them (`hlo.walk`).

    Each stage has M C units of F, B and W in all ticks. "first" and "last" are of a stage that had both ends.
    """
    p = config.parallel
    if execution(config) is not Execution.PIPELINE:
        return {}
    found, units, ends = outline(config), p.microbatches * p.chunks, Fraction(1, p.chunks)
    often = Fraction(units, found.ticks)
    per_slot = often / max(1, found.weights)
    return {"forward": often, "backward": often, "weight": per_slot, "first": ends, "last": ends}


def tensor_passes(config: Config) -> tuple[int, int]:
    """How often a layer gathers, and how often it scatters; without sequence parallelism: all-reduces, and 0.

    See `communication`: 4 each, what is computed again, and 2 gathers of what its matmuls took (`full` just made it).
    """
    again = {"none": 0, "selective": 0, "full": 1, "block": 2}[config.memory.rematerialization.policy]
    if not config.parallel.sequence_parallel:
        return 4 + again, 0
    return 4 + (2 if again < 2 else 4), 4 + again


def outline(config: Config) -> chart.Outline:
    """What the config's pipeline schedule costs."""
    p = config.parallel
    return chart.outline(p.schedule if p.pipe > 1 else "1f1b", p.pipe, p.microbatches, p.chunks)


def devices(config: Config) -> int:
    """Of the whole mesh."""
    return prod(config.parallel.axes.values())


def tokens_per_device(config: Config) -> float:
    """Of a step."""
    return config.data.batch_size * config.data.seq_len / (config.parallel.replica * config.parallel.data)
