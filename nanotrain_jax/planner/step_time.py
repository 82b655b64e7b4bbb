"""Modelled time of a step: a roofline (Williams et al. 2009). Nothing here is measured.

An operation takes as long as the slowest of the matrix units, the memory and the link that it uses, at the fractions of
their peaks given below.

    one microbatch, one stage     F, B, W of compute_time.py, and exposed communication
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

from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import communication, counts, memory, mixture, offload
from nanotrain_jax.costs.hardware import Gpu
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.parallel.mesh import AXES
from nanotrain_jax.planner.compute_time import (
    attention_time,
    encoder_time,
    ends_time,
    first_time,
    layers_time,
    matmuls_time,
    update_time,
)
from nanotrain_jax.planner.overlap import When, overlap

LINK = 0.8  # of the peak of a link, which good collectives reach

# Seconds of a pipeline tick beside its work: each branch of a stage, for its forward, its backward and its ends,
# synchronizes with the host; and of the ends of a microbatch, if split over stages: three branches, scalars of the
# loss. Assumed, not measured.
TICK, ENDS_TICK = 50e-6, 2e-4


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
