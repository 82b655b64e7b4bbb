"""Modelled time of a step: a roofline (Williams et al. 2009). Nothing here is measured.

An operation takes as long as the slowest of the matrix units, the memory and the link that it uses, at the fractions of
their peaks given below.

    one microbatch, one stage     F   forward of its layers: each matmul's 2 m k n FLOPs or its bytes, whichever takes
                                      longer; attention (flash: the causal half of the scores); norms, residual stream
                                      and activation function at memory bandwidth; exposed tensor communication
                                  B   recomputation, gradients of inputs; attention 5/2 of its forward
                                  W   gradients of weights
    all microbatches              ticks, each as long as its busiest stage (`schedule_text.stats`), with the head on the
                                  last stage, or with parallel.vocab_over_pipe 1/P of it on all; without stages
                                  M (F + B + W)
    once per step                 gradients and weights communicated after the backward; the update at memory bandwidth
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from nanotrain_jax.config.derived import fits_flash, padded_vocab
from nanotrain_jax.config.execution import execution, writes_layers_out
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import activations, communication, counts, flops, hbm, memory, mixture, muon, offload, vision
from nanotrain_jax.costs.hardware import Gpu
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.models.parameters import ENCODER, ENDS, LAYERS
from nanotrain_jax.parallel.mesh import AXES
from nanotrain_jax.planner.overlap import When, overlap

# Fractions of peak memory and link bandwidth that good kernels reach; for matrix units see hardware.Gpu.matmul.
STREAM = 0.8
LINK = 0.8

# Latency in seconds of a kernel, of a collective, and of a pipeline tick (each branch of a stage, for its forward, its
# backward and its ends, synchronizes with the host). Assumed, not measured.
KERNEL, COLLECTIVE, TICK = 3e-6, 15e-6, 50e-6
ENDS_TICK = 2e-4  # of the ends of a microbatch, if split over stages: three branches, scalars of the loss; assumed

# Rate of FP8 matmuls over 16-bit ones, of a peak twice as high (assumed, not measured); and the bytes to quantize an
# element: read twice, written once.
FLOAT8, QUANTIZE = 1.6, 5


class Transfer(NamedTuple):
    """Traffic of one kind along some mesh axes, or between device and host, per device and step."""

    axis: str
    op: str
    what: Traffic | offload.HostCopy
    why: str  # `what` as text
    bytes: float  # on the wire
    link: str  # NVLink, network, or network x k: over k adapters at once
    seconds: float
    exposed: float  # seconds not hidden behind compute
    when: When


@cache
def link(axes: tuple[str, ...], sizes: tuple[int, ...], joined: int) -> tuple[int, int]:
    """Return the size of a group along some mesh axes, and the fewest of its devices in one NVLink domain.

    sizes: of all axes, in mesh order. Devices are numbered along the mesh with the last axis fastest; `joined`
    consecutive ones share an NVLink domain.
    """
    ids = np.arange(prod(sizes)).reshape(sizes) // joined
    ids = np.moveaxis(ids, [AXES.index(a) for a in axes], range(len(axes)))
    groups = ids.reshape(prod(ids.shape[: len(axes)]), -1)
    fewest = min(np.unique(group, return_counts=True)[1].min() for group in np.unique(groups, axis=1).T)
    return groups.shape[0], int(fewest)


def transfers(config: Config, gpu: Gpu, compute: float) -> list[Transfer]:
    """Return the traffic of a step with its links and modelled seconds. compute: seconds that can hide it.

    Inside an NVLink domain everything runs at NVLink bandwidth. Across domains a collective runs at network bandwidth,
    over as many adapters as the group has members in a domain: k GPUs of a host share k. A permute takes as long as its
    slowest pair: GPUs in two domains, over one adapter.
    """
    p = config.parallel
    of_layers = [row for row in counts.rows(config).values() if row.part == LAYERS]
    layer = sum(counts.local_elements(row, config) for row in of_layers)
    layer *= counts.BYTES[config.precision.compute] / counts.stage_layers(config)
    per_sync = communication.synchronization(config)  # once in sync_every steps
    per_step = [row | {"bytes_per_device": row["bytes_per_device"] / p.sync_every} for row in per_sync]
    transfers = []
    for row in communication.communication(config) + per_step:
        axis, op, what, size = row["axis"], row["op"], row["what"], row["bytes_per_device"]
        group, local = link(tuple(axis.split(",")), tuple(p.axes.values()), gpu.joined)
        local = 1 if op == "permute" and local < group else local
        bandwidth = gpu.nvlink if local == group else min(gpu.nvlink, local * gpu.network)
        intra_domain = "memory" if gpu.kind == "cpu" else "NVLink"
        name = intra_domain if local == group else "network" if local == 1 else f"network x {local}"
        seconds = size / (bandwidth * LINK)
        hidden, when = overlap(config, op, what, layer > p.bucket_mb * 2**20)
        behind = hops_time(config, gpu) if what is Traffic.ATTENTION else compute
        if axis == "tensor" and op == "permute":
            behind = tensor_hops_time(config, gpu)
        exposed = seconds - min(seconds * hidden, behind)
        transfers.append(Transfer(axis, op, what, what.value, size, name, seconds, exposed, when))
    return transfers


def hops_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds of attention over keys and values of other devices in a step, forward and backward."""
    p = config.parallel
    passes = 1 + 2.5 + counts.repeats_communication(config)
    layers = counts.stage_layers(config)
    return p.microbatches * layers * passes * attention_time(config, gpu) * (p.context - 1) / p.context


def tensor_hops_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds in a step of the matmuls behind which activations hop over tensor (parallel.overlap_tensor):
    those of every forward of the layers, and in the backward those after which a sum is scattered, counted as half. Of
    experts none."""
    t, policy = config.parallel.tensor, config.memory.rematerialization.policy
    passes = 1.5 + (policy in ("full", "block"))
    layers, first = counts.stage_layers(config) * _hopped_time(config, gpu), mixture.first_layers(config)
    if first is not None:
        layers += first.model.num_layers * _hopped_time(first, gpu)
    return config.parallel.microbatches * passes * layers * (t - 1) / t


def _hopped_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds of the matmuls in the forward of a layer behind which activations hop over tensor."""
    of_layer = matmuls_time(config, gpu)
    return of_layer["attention"] if config.model.experts else sum(of_layer.values())


def copies(config: Config, gpu: Gpu, compute: float) -> tuple[list[Transfer], float]:
    """Return the copies between a device and its host, and the seconds of them that are exposed.

    The two directions overlap. Copies of each microbatch hide behind its compute; those of the update, and of gradients
    for the global norm, are exposed.
    """
    link = "NVLink-C2C" if gpu.to_host > 100e9 else "memory" if gpu.kind == "cpu" else "PCIe"
    totals, copies = {}, []
    for row in memory.host_copies(config):
        to, what, size = row["to"], row["what"], row["bytes_per_device"]
        seconds = size / (gpu.to_host * LINK)
        when = "microbatch" if what.is_per_microbatch else "step"
        totals[when, to] = totals.get((when, to), 0.0) + seconds
        copies.append(Transfer("host", f"to {to}", what, what.value, size, link, seconds, 0.0, when))
    longest = {when: max(totals.get((when, to), 0.0) for to in ("device", "host")) for when in ("microbatch", "step")}
    share = {"microbatch": 1 - min(1.0, compute / (longest["microbatch"] or 1.0)), "step": 1.0}
    exposed = sum(longest[when] * share[when] for when in longest)
    return [t._replace(exposed=t.seconds * share[t.when]) for t in copies], exposed


def times(config: Config, gpu: Gpu) -> tuple[dict[str, float], float, list[Transfer], list[Transfer]]:
    """Return the seconds of a step by part, the bubble as a fraction of the schedule, the traffic between devices, and
    the copies between devices and hosts."""
    p = config.parallel
    M = p.microbatches
    (F, B, W), first, ends = layers_time(config, gpu), first_time(config, gpu), ends_time(config, gpu)
    compute = M * (F + B + W + sum(first) + sum(ends))
    moved = transfers(config, gpu, compute)
    per_microbatch = {t: t.exposed / M for t in moved if t.when == "microbatch"}
    forward = sum(seconds * _forward_share(config, t) for t, seconds in per_microbatch.items())
    busy = total = compute + M * sum(per_microbatch.values())
    if p.pipe > 1:
        layers = F + forward, B + sum(per_microbatch.values()) - forward, W
        total = schedule_time(config, layers, first, ends)
    by_axis: dict[str, float] = {}
    for t in moved:
        by_axis[t.axis] = by_axis.get(t.axis, 0.0) + t.exposed
    copied, exposed = copies(config, gpu, compute)
    seconds = {"compute": compute, "encoder": encoder_time(config, gpu), **by_axis}
    seconds |= {"bubble": total - busy, "update": update_time(config, gpu)}
    seconds["host"] = exposed
    return {what: s for what, s in seconds.items() if s > 0}, 1 - busy / total, moved, copied


def schedule_time(
    config: Config, layers: tuple[float, float, float], first: tuple[float, float], ends: tuple[float, float]
) -> float:
    """Return the seconds of all ticks of a pipeline schedule, each as long as its busiest stage.

    layers: F, B and W of one microbatch on a stage with most layers. first: F and B of `first_time`, on the first
    stage. ends: F and B of the loss, on the last stage; with the vocabulary over pipe on each stage, once for each
    microbatch.
    """
    p, table = config.parallel, counts.outline(config)
    F, B, W = layers
    of_ends = 0.0
    if p.vocab_over_pipe:
        of_ends = p.microbatches * (sum(ends) + ENDS_TICK)
    else:
        shares = counts.layers_of_chunks(config).sum(0) / counts.stage_layers(config)  # of layers, by stage
        of_ends_of_stages = (shares[0], first), (shares[-1], ends)
        F, B = (max(x, *(float(s) * x + e[i] for s, e in of_ends_of_stages)) for i, x in enumerate((F, B)))
    if p.idle == "skip":
        return table.time(F / p.chunks, B / p.chunks, W / p.chunks) + table.ticks * TICK + of_ends
    in_tick = (F + B + max(table.weights, 1) * W) / p.chunks + TICK  # every stage computes in every tick
    return table.ticks * (in_tick + of_ends / p.microbatches)


def _forward_share(config: Config, transfer: Transfer) -> float:
    """Return the share of a microbatch's exposed traffic that is in the forward.

    Tensor: half; with sequence parallelism 4 of 10, as the backward gathers again. ZeRO: a third, the weights; the
    backward moves weights and gradients. Ring: none, the gradients' last hop; gather: a quarter, as its backward moves
    float32 gradients too.
    """
    if transfer.what in (Traffic.WEIGHTS, Traffic.GRADIENTS):
        return 1 / 3
    if transfer.what is Traffic.ATTENTION:
        return 0.0 if transfer.op == "permute" else 0.25
    return 0.4 if transfer.axis == "tensor" and config.parallel.sequence_parallel else 0.5


def attention_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds of the forward of attention of one layer and microbatch, without communication.

    Flash, and blocks over context: without the scores of later tokens.
    """
    m, p, T, S = config.model, config.parallel, config.data.seq_len, counts.computed_keys(config)
    n, b = counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    flash = fits_flash(m, config.precision.compute)
    scores = 4.0 * n * counts.query_width(m) / p.tensor * S
    seen = 1 - S / (2 * T) if flash or p.is_blockwise else 1
    seconds = scores * seen / (gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5))
    if not flash:  # write and read scores and probabilities
        seconds += 20.0 * n * T * m.num_heads / p.tensor / (STREAM * gpu.memory_bandwidth)
    return seconds


def layers_time(config: Config, gpu: Gpu) -> tuple[float, float, float]:
    """Return F, B and W of one microbatch through a stage's layers in seconds, without communication."""
    m, p = config.model, config.parallel
    t, n, b = p.tensor, counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    D, Q, L, K = m.d_model, counts.query_width(m), counts.stage_layers(config), _stored_kv_width(config)
    num_up, matmuls = 1 + m.features.gated_mlp, matmuls_time(config, gpu)
    inner, down = matmuls["attention"] + matmuls["up"], matmuls["down"]
    attention = attention_time(config, gpu)
    split_x = t if p.sequence_parallel else 1
    of_heads = ((not m.features.learned_positions) + m.features.qk_norm) * 2 * (Q + K) / t  # rotary, norms
    stream = b * n * ((10 + 4 * m.features.norms_after) * D / split_x + of_heads + (1 + num_up) * m.ffn_width / t)
    elementwise = stream / (STREAM * gpu.memory_bandwidth) + 6 * KERNEL
    forward = inner + down + attention + elementwise
    kept = attention if p.is_blockwise else 0.0  # `selective` and `full` keep the output of ring and gather
    if config.precision.matmul == "float8":  # inputs and weights; in the backward gradients and weights
        quantize = quantize_time(config, gpu)
        forward, elementwise = forward + quantize, elementwise + quantize
    recompute = {
        "none": 0.0,
        "selective": attention - kept + elementwise,
        "full": forward - down * (not m.features.norms_after) - kept,
    }
    recompute["block"] = forward
    B = recompute[config.memory.rematerialization.policy] + inner + down + 2.5 * attention + 2 * elementwise
    if t > 1 and p.overlap_tensor:
        blocks, plain = (1, 1) if m.experts else (2, 0)  # of attention and MLP
        columns = Q + 2 * K + (0 if m.experts else num_up * m.d_ff)
        written = b * n * (columns / t + blocks * D)  # a hop copies its block of rows into the whole
        hops = 2 * written / (STREAM * gpu.memory_bandwidth) + 2 * blocks * (t - 1) * 3 * KERNEL
        forward += hops + 2 * plain * COLLECTIVE
        B += hops / 2 + (2 * blocks + 3 * plain) * COLLECTIVE
    elif t > 1:
        forward, B = forward + 4 * COLLECTIVE, B + 6 * COLLECTIVE
    forward, B = (seconds + stacks_time(config, gpu) for seconds in (forward, B))
    return L * forward, L * B, L * (inner + down) * flops.trained_share(config, LAYERS)


def matmuls_time(config: Config, gpu: Gpu) -> dict[str, float]:
    """Return the seconds of the matmuls in the forward of a layer and microbatch: of attention, of up (with gate), and
    of down."""
    m, t, b = config.model, config.parallel.tensor, counts.BYTES[config.precision.compute]
    n = counts.tokens_per_device(config) / config.parallel.microbatches
    D, Q, K, F = m.d_model, counts.query_width(m), _stored_kv_width(config), mixture.computed_ffn_width(config)
    faster = FLOAT8 if config.precision.matmul == "float8" else 1.0

    def matmul(k: float, out: float) -> float:
        return _matmul((n, k, out), b, gpu) / faster

    attention = matmul(D, Q / t) + matmul(Q / t, D) + 2 * matmul(D, K / t)
    return {
        "attention": attention,
        "up": (1 + m.features.gated_mlp) * matmul(D, F / t),
        "down": matmul(F / t, D),
    }


def _stored_kv_width(config: Config) -> float:
    """Return the width of keys over all devices of tensor: with fewer heads than devices several store one."""
    return counts.kv_width(config.model) * max(1, config.parallel.tensor / config.model.num_kv_heads)


def first_time(config: Config, gpu: Gpu) -> tuple[float, float]:
    """Return F and B, with W, of one microbatch through the first, dense layers of a mixture, in seconds; the backward
    by hand recomputes F (`mixture.first_runs`)."""
    first = mixture.first_layers(config)
    if first is None:
        return 0.0, 0.0
    (F, B, W), (_, again) = layers_time(first, gpu), mixture.first_runs(config)
    return F, B + W + (F if again else 0.0)


def stacks_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds in which a loop over layers copies what a layer keeps to the stacks of all, or from them; in
    loops whose backward is written by hand it is not modelled."""
    if execution(config).is_by_hand or writes_layers_out(config, "cpu" if gpu.kind == "cpu" else "gpu"):
        return 0.0
    tokens = counts.tokens_per_device(config) / config.parallel.microbatches
    kept = tokens * activations.layer_activations(config, config.memory.rematerialization)
    return 2 * counts.BYTES[config.precision.compute] * kept / (STREAM * gpu.memory_bandwidth)


def encoder_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds in which a device encodes its pictures, forward and backward, without communication: layers as
    those of a decoder, the matmuls around them at the rate of the matrix units. Of textures only the matmul."""
    if config.vision is None:
        return 0.0
    trained = vision.trained(config)
    F, B, W = layers_time(vision.as_decoder(config), gpu)
    layers = F + vision.has_backward(config, vision.LAYERS) * (B + W * flops.trained_share(config, ENCODER))
    outside = sum(product.flops + product.backward(trained) for product in vision.outside_layers(config))
    rate = gpu.matmul * gpu.peak_flops * (1.0 if counts.BYTES[config.precision.compute] == 2 else 0.5)
    return counts.encodes(config) * layers + vision.pictures(config) * outside / rate


def quantize_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds to quantize the operands of a layer's seven matmuls to FP8; of experts, of all their rows."""
    m, t, D, Q = config.model, config.parallel.tensor, config.model.d_model, counts.query_width(config.model)
    K, matrices = _stored_kv_width(config), 2 + m.features.gated_mlp
    rows, mlps = (1, 1) if not m.experts else (mixture.rows_per_token(config), m.experts.num // config.parallel.expert)
    shared = m.experts.shared if m.experts else 0
    n = counts.tokens_per_device(config) / config.parallel.microbatches
    of_tokens = n * ((1 + rows + (shared > 0)) * D + (Q + mixture.kept_ffn_width(config)) / t)
    of_weights = (2 * D * (Q + K) + matrices * D * m.mlp_width * (mlps + shared)) / t
    return QUANTIZE * (of_tokens + of_weights) / (STREAM * gpu.memory_bandwidth) + 4 * 7 * KERNEL


def ends_time(config: Config, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds of forward and backward of head and loss for one microbatch. Beside the matmuls logits are
    read for their softmax and for their gradient, which is written.

    With model.loss_chunk each chunk reads and writes the float32 gradient of the head.
    """
    m, p = config.model, config.parallel
    n, b = counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    V = padded_vocab(m.vocab_size, p.vocab_shards) / p.vocab_shards
    head, element = _matmul((n, m.d_model, V), b, gpu), n * V / (STREAM * gpu.memory_bandwidth)
    logits = counts.logit_bytes(config) * element
    chunks = n / m.loss_chunk if m.loss_chunk else 0
    sums = chunks * 8.0 * V * m.d_model / (STREAM * gpu.memory_bandwidth)
    return head + logits, (1 + flops.trained_share(config, ENDS)) * head + logits + b * element + sums


def update_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds of the update's least bytes (costs/hbm.py), and of Muon's Newton-Schulz iterations."""
    streamed = hbm.update_bytes(config) / (STREAM * gpu.memory_bandwidth)
    rate = gpu.matmul * gpu.peak_flops * (1.0 if muon.wire_bytes(config) == 2 else 0.5)
    return streamed + muon.flops(config) / rate


def _matmul(sizes: tuple[float, float, float], b: int, gpu: Gpu) -> float:
    """Return the seconds of [m k] @ [k n]; in float32 (TF32) the matrix units run at half their rate."""
    m, k, n = sizes
    flops = 2.0 * m * k * n / (gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5))
    return KERNEL + max(flops, b * (m * k + k * n + m * n) / (STREAM * gpu.memory_bandwidth))
