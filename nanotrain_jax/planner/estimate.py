"""What a run will need and how fast it will be, by closed forms alone: memory, communication, FLOPs, a modelled time.

Memory, bytes and FLOPs are formulas that the tests hold to the compiled program (audit/). The time is *modelled*, a
roofline (Williams et al. 2009): work takes as long as the slowest of the matrix units, the memory and the link that it
needs, at the shares of their peaks that stand below; nothing here was measured.

    one microbatch, one stage     F   forward of its layers: each matmul's 2 m k n FLOPs or its bytes, whichever takes
                                      longer; attention (flash: half of the scores, the causal ones); norms, residual
                                      stream and activation at the memory's speed; what tensor moves and cannot hide
                                  B   what is computed again, gradients of inputs; attention 5/2 of its forward
                                  W   gradients of weights
    all microbatches              the schedule's ticks, each as long as its busiest stage (parallel/chart.py), with the
                                  head's work on the last; without stages M (F + B + W)
    once per step                 gradients and weights that travel after the backward; the update at the memory's speed
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from nanotrain_jax.audit import cost, hardware, memory, offloaded
from nanotrain_jax.audit.hardware import Gpu
from nanotrain_jax.config import Config, fits_flash, padded_vocab
from nanotrain_jax.mesh import AXES
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.resolved import resolve

TAKEN = 0.75  # the share of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION)

# How much more than its estimate a program may need, as a share of it. Of the 94 peaks in tests/golden/audit.json (48
# layouts, two compilers; two are not estimated) 95% are at most 3.8% above their estimates, and all but one within
# the margin; those that store scores of attention are up to 5.9% above. A search picks what is estimated too low.
MARGIN, ROUGH_MARGIN = 0.05, 0.1

# Shares of the peaks of memory and links that good kernels reach; of the matrix units: hardware.Gpu.matmul.
STREAM = 0.8
LINK = 0.8

# Seconds that pass however small the work: for a kernel to start and end, for a collective, for a tick of the pipeline
# (a GPU asks its host before a stage does its forward, its backward, its ends). Assumed, not measured.
KERNEL, COLLECTIVE, TICK = 3e-6, 15e-6, 50e-6

# Shares of the wire bytes that travel behind matmuls, as the compiled programs schedule them (README, audit).
HIDDEN_TENSOR = 0.3
HIDDEN_LAYERS = 0.5  # ZeRO 2 and 3, in the loops over layers, where a layer is more than one bucket; else 0
HIDDEN_PIPE = 1.0


Verdict = Literal["fits", "may not fit", "does not fit"]


class Transfer(NamedTuple):
    """What moves along some mesh axes in a step, per device."""

    axis: str
    op: str
    what: cost.Traffic | offloaded.Copied
    why: str  # the same in words
    bytes: float  # on the wire
    link: str  # NVLink, network, or network x k: with k adapters at a time
    seconds: float
    exposed: float  # seconds in which nothing is computed
    when: str  # microbatch (in the loops) or step (once, after the backward)


class Estimate(NamedTuple):
    """Bytes and FLOPs per device and step; seconds are modelled."""

    config: Config
    gpu: str
    gpus: int
    moments: dict[str, memory.Parts]
    peak: str  # the moment in which most is held
    peak_bytes: float
    limit_bytes: float  # what JAX takes of the GPU's memory
    host_bytes: float  # of a host's memory, while a checkpoint is written: its share of the state
    on_host: memory.Parts  # bytes of host memory that a device needs between steps and in them (memory.offload_*)
    nvme_bytes: float  # of a device's files, which a step reads and writes (memory.offload_optimizer=nvme)
    transfers: list[Transfer]
    copies: list[Transfer]  # between a device and its host; axis is "host"
    flops: float
    seconds: dict[str, float]  # compute, bubble, update, host, and by axes what moves and is not hidden: the step
    bubble_fraction: float  # of the time of the schedule
    step_seconds: float
    tokens_per_second: float
    mfu: float  # 6 N + 12 L d T per token, attention in full (as PaLM counts)
    mfu_causal: float  # 6 N + 6 L d T per token, the half of attention that a causal mask leaves

    @property
    def rough(self) -> bool:
        """Whether scores of attention are stored, of which XLA keeps more or less than the program asks for."""
        return is_rough(self.config)

    @property
    def verdict(self) -> Verdict:
        """Whether JAX's share of the GPU's memory holds the peak, and the estimate's margin above it."""
        return verdict(self.peak_bytes, margin(self.config), self.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether it fits with the estimate's margin."""
        return self.verdict == "fits"

    @property
    def within_margin(self) -> bool:
        """Whether it fits without the estimate's margin, but not with it: only the compiler can tell."""
        return self.verdict == "may not fit"


def is_rough(config: Config) -> bool:
    """Whether scores of attention are stored, whose memory is estimated less exactly."""
    return not fits_flash(config.model, config.precision.compute)


def margin(config: Config) -> float:
    """How much more than its estimated peak a program may need, as a share of it."""
    return ROUGH_MARGIN if is_rough(config) else MARGIN


def verdict(peak_bytes: float, margin: float, limit_bytes: float) -> Verdict:
    """Whether a limit holds a peak, and a margin (a share of the peak) above it. Compiled peaks have a margin of 0."""
    if peak_bytes > limit_bytes:
        return "does not fit"
    return "fits" if peak_bytes * (1 + margin) <= limit_bytes else "may not fit"


def estimate(config: Config, gpu: str, taken: float = TAKEN) -> Estimate:
    """The estimate of a resolved config. Raises ValueError for an unknown GPU."""
    found, config = hardware.find(gpu), on_hardware(config, gpu)
    moments = memory.moments(config, found.capability)
    sums = {moment: sum(parts.values()) for moment, parts in moments.items()}
    peak = max(sums, key=sums.__getitem__)
    gpus = cost.devices(config)
    seconds, bubble, moved, copied = times(config, found)
    step = sum(seconds.values())
    m, tokens = config.model, config.data.batch_size * config.data.seq_len
    useful = cost.flops_per_token(m, config.data.seq_len)
    peak_flops = step * gpus * found.peak_flops
    return Estimate(
        config=config,
        gpu=gpu,
        gpus=gpus,
        moments=moments,
        peak=peak,
        peak_bytes=sums[peak],
        limit_bytes=taken * found.memory_bytes,
        host_bytes=saved(config) * min(gpus, found.host),
        on_host=memory.on_host(config),
        nvme_bytes=offloaded.in_files(config),
        transfers=moved,
        copies=copied,
        flops=cost.step_flops(config),
        seconds=seconds,
        bubble_fraction=bubble,
        step_seconds=step,
        tokens_per_second=tokens / step,
        mfu=useful["full"] * tokens / peak_flops,
        mfu_causal=useful["causal"] * tokens / peak_flops,
    )


def on_hardware(config: Config, gpu: str) -> Config:
    """The config with the attention that `auto` stands for there: no flash attention on simulated devices."""
    simulated = gpu == hardware.SIMULATED and config.model.attention == "auto"
    return config.replace("model", attention="xla") if simulated else config


def saved(config: Config) -> float:
    """Bytes of a checkpoint that one device writes at a time: of what several hold each writes a share. What is in
    files (memory.offload_optimizer=nvme) is written array by array, and not counted."""
    p, state = config.parallel, memory.state(config)
    weights = p.replica * (1 if p.zero == 3 else p.data)
    at_once = state["optimizer"] - offloaded.in_files(config)
    return state["params"] / weights + at_once / (p.replica * (1 if p.zero else p.data))


def on_gpus(config: Config, gpus: int, gpu: str, vocab: int | None = None) -> Config:
    """The config's own layout on so many GPUs (0: as many as its mesh has), resolved.

    The axis that is -1, or else data, becomes what they allow; where data was given, a device's share of the batch does
    not change. vocab: ids of the tokenizer, if it has a say. Raises ValueError.
    """
    p, axes = config.parallel, config.parallel.axes
    free = [axis for axis, size in axes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"parallel.{free[0]}=-1 and parallel.{free[1]}=-1: only one axis takes what devices remain")
    if free and not gpus:
        raise ValueError(f"parallel.{free[0]}=-1 takes whatever devices remain; say how many there are with --gpus")
    gpus = gpus or cost.devices(config)
    hardware.check_count(gpu, gpus)
    changes = (free or ["data"])[0]
    axes[changes] = max(gpus // prod(size for axis, size in axes.items() if axis != changes), 1)
    if prod(axes.values()) != gpus:
        asked = " x ".join(f"parallel.{axis}={size}" for axis, size in axes.items() if size > 1 and axis != changes)
        raise ValueError(f"{asked} does not divide {gpus} GPUs; use a number of them that it does, or another mesh")
    if p.data != -1:
        config = config.replace("data", batch_size=max(config.data.batch_size * axes["data"] // p.data, 1))
    return resolve(config, axes, vocab)


@cache
def link(axes: tuple[str, ...], sizes: tuple[int, ...], joined: int) -> tuple[int, int]:
    """-> (devices of a group along some mesh axes, how few of them NVLink joins). sizes: of all axes, in mesh order.

    Devices are numbered along the mesh with the last axis fastest, `joined` after another on one NVLink.
    """
    ids = np.arange(prod(sizes)).reshape(sizes) // joined
    ids = np.moveaxis(ids, [AXES.index(a) for a in axes], range(len(axes)))
    groups = ids.reshape(prod(ids.shape[: len(axes)]), -1)
    fewest = min(np.unique(group, return_counts=True)[1].min() for group in np.unique(groups, axis=1).T)
    return groups.shape[0], int(fewest)


def transfers(config: Config, gpu: Gpu, compute: float) -> list[Transfer]:
    """What moves in a step, by which links, and how long it takes. compute: seconds behind which it can hide.

    A ring within NVLink runs at its speed; one that leaves it passes the network, with as many adapters as it has
    members on one side: k GPUs of a host share k.
    """
    p = config.parallel
    layer = sum(cost.local(row, config) for row in table(config.model, p.tensor).values() if row.part == LAYERS)
    layer *= cost.BYTES[config.precision.compute] * p.pipe / config.model.num_layers
    found = []
    for row in cost.communication(config):
        axis, op, what, size = row["axis"], row["op"], row["what"], row["bytes_per_device"]
        group, near = link(tuple(axis.split(",")), tuple(p.axes.values()), gpu.joined)
        speed = gpu.nvlink if near == group else min(gpu.nvlink, near * gpu.network)
        inside = "memory" if gpu.kind == "cpu" else "NVLink"
        name = inside if near == group else "network" if near == 1 else f"network x {near}"
        seconds, hidden, when = size / (speed * LINK), 0.0, "step"
        if axis == "tensor" and not what.is_gradients:
            hidden, when = HIDDEN_TENSOR, "microbatch"
        elif op == "permute":
            hidden, when = HIDDEN_PIPE, "microbatch"
        elif axis == "data" and (p.zero == 3 or (p.zero == 2 and op == "reduce_scatter")):
            hidden, when = HIDDEN_LAYERS if layer > p.bucket_mb * 2**20 else 0.0, "microbatch"
        exposed = seconds - min(seconds * hidden, compute)
        found.append(Transfer(axis, op, what, what.value, size, name, seconds, exposed, when))
    return found


def copies(config: Config, gpu: Gpu, compute: float) -> tuple[list[Transfer], float]:
    """What is copied between a device and its host, and the seconds of it that nothing hides.

    Both directions at a time. What each microbatch copies hides behind its computing; the update's copies, and that of
    gradients for their norm, behind nothing.
    """
    link = "NVLink-C2C" if gpu.to_host > 100e9 else "memory" if gpu.kind == "cpu" else "PCIe"
    waits, found = {}, []
    for row in memory.copied(config):
        to, what, size = row["to"], row["what"], row["bytes_per_device"]
        seconds = size / (gpu.to_host * LINK)
        when = "microbatch" if what.is_per_microbatch else "step"
        waits[when, to] = waits.get((when, to), 0.0) + seconds
        found.append(Transfer("host", f"to {to}", what, what.value, size, link, seconds, 0.0, when))
    longest = {when: max(waits.get((when, to), 0.0) for to in ("device", "host")) for when in ("microbatch", "step")}
    share = {"microbatch": 1 - min(1.0, compute / (longest["microbatch"] or 1.0)), "step": 1.0}
    exposed = sum(longest[when] * share[when] for when in longest)
    return [t._replace(exposed=t.seconds * share[t.when]) for t in found], exposed


def times(config: Config, gpu: Gpu) -> tuple[dict[str, float], float, list[Transfer], list[Transfer]]:
    """-> seconds of a step by what they go into, the share of the schedule's time that stages wait, what moves between
    devices, and what is copied between them and their hosts."""
    p = config.parallel
    M, C = p.microbatches, p.chunks
    (F, B, W), ends = layers_time(config, gpu), ends_time(config, gpu)
    compute = M * (F + B + W + sum(ends))
    moved = transfers(config, gpu, compute)
    # Tensor's traffic goes forward and back in equal parts, but for what the backward gathers again: 4 of 10. Of what
    # ZeRO moves for each microbatch a third goes forward: weights; weights and gradients go back.
    share = {"tensor": 0.4 if p.sequence_parallel else 0.5, "pipe": 0.5, "data": 1 / 3}
    waits = {t: t.exposed / M for t in moved if t.when == "microbatch"}
    forward = sum(seconds * share[t.axis] for t, seconds in waits.items())
    busy = total = compute + M * sum(waits.values())
    if p.pipe > 1:
        costs = F + ends[0] + forward, B + ends[1] + sum(waits.values()) - forward, W
        table = cost.outline(config)
        total = table.time(*(seconds / C for seconds in costs)) + table.ticks * TICK
        if p.idle == "mask":  # every stage computes in every tick
            total = table.ticks * ((costs[0] + costs[1] + max(table.weights, 1) * W) / C + TICK)
    by_axis: dict[str, float] = {}
    for t in moved:
        by_axis[t.axis] = by_axis.get(t.axis, 0.0) + t.exposed
    copied, exposed = copies(config, gpu, compute)
    seconds = {"compute": compute, **by_axis, "bubble": total - busy, "update": update_time(config, gpu)}
    seconds["host"] = exposed
    return {what: s for what, s in seconds.items() if s > 0}, 1 - busy / total, moved, copied


def layers_time(config: Config, gpu: Gpu) -> tuple[float, float, float]:
    """F, B and W of one microbatch through a stage's layers, without what moves between devices."""
    m, p = config.model, config.parallel
    t, n, b = p.tensor, cost.tokens_per_device(config) / p.microbatches, cost.BYTES[config.precision.compute]
    D, T, L = m.d_model, config.data.seq_len, m.num_layers / p.pipe
    K, entered = cost.kv_width(m) * max(1, t / m.num_kv_heads), 1 + m.features.gated_mlp

    def matmul(k: float, out: float) -> float:
        return _matmul((n, k, out), b, gpu)

    inner = 2 * matmul(D, D / t) + 2 * matmul(D, K / t) + entered * matmul(D, m.d_ff / t)
    last = matmul(m.d_ff / t, D)
    flash = fits_flash(m, config.precision.compute)
    scores = 4.0 * n * D / t * T
    rate = gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5)
    attention = scores / 2 / rate if flash else scores / rate
    if not flash:  # scores and probabilities, written and read
        attention += 20.0 * n * T * m.num_heads / t / (STREAM * gpu.memory_bandwidth)
    split_x = t if p.sequence_parallel else 1
    rotary = 0 if m.features.learned_positions else 2 * (D + K) / t
    stream = b * n * (10 * D / split_x + rotary + (1 + entered) * m.d_ff / t)
    light = stream / (STREAM * gpu.memory_bandwidth) + 6 * KERNEL
    forward = inner + last + attention + light
    again = {"none": 0.0, "selective": attention + light, "full": forward - last, "block": forward}
    B = again[config.memory.rematerialization.policy] + inner + last + 2.5 * attention + 2 * light
    if t > 1:
        forward, B = forward + 4 * COLLECTIVE, B + 6 * COLLECTIVE
    return L * forward, L * B, L * (inner + last)


def ends_time(config: Config, gpu: Gpu) -> tuple[float, float]:
    """Forward and backward of the head and the loss for one microbatch: logits are float32, read and written thrice.

    With model.loss_chunk each chunk reads and writes the float32 gradient of the head.
    """
    m, p = config.model, config.parallel
    t, n, b = p.tensor, cost.tokens_per_device(config) / p.microbatches, cost.BYTES[config.precision.compute]
    V = padded_vocab(m.vocab_size, t) / t
    head, logits = _matmul((n, m.d_model, V), b, gpu), 12.0 * n * V / (STREAM * gpu.memory_bandwidth)
    chunks = n / m.loss_chunk if m.loss_chunk else 0
    sums = chunks * 8.0 * V * m.d_model / (STREAM * gpu.memory_bandwidth)
    return head + logits, 2 * head + logits + sums


def update_time(config: Config, gpu: Gpu) -> float:
    """Reading and writing the state that is here, the gradients, and the gradients again for their norm."""
    state = memory.state(config)
    gradients = 8 * state["optimizer"] / (12 if cost.BYTES[config.precision.compute] == 2 else 8)
    return (2 * state["optimizer"] + state["params"] + gradients) / (STREAM * gpu.memory_bandwidth)


def _matmul(sizes: tuple[float, float, float], b: int, gpu: Gpu) -> float:
    """Seconds of [m k] @ [k n]; the matrix units run at half speed in float32 (TF32)."""
    m, k, n = sizes
    flops = 2.0 * m * k * n / (gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5))
    return KERNEL + max(flops, b * (m * k + k * n + m * n) / (STREAM * gpu.memory_bandwidth))
