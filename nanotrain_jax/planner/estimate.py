"""Estimate memory, communication, FLOPs and step time of a run, by closed forms alone.

Memory, bytes and FLOPs are formulas that the tests hold to the compiled program (audit/). Time is *modelled* by a
roofline (Williams et al. 2009): an operation takes as long as the slowest of the matrix units, the memory and the link
that it uses, at the fractions of their peaks given below. Nothing here is measured.

    one microbatch, one stage     F   forward of its layers: each matmul's 2 m k n FLOPs or its bytes, whichever takes
                                      longer; attention (flash: the causal half of the scores); norms, residual stream
                                      and activation function at memory bandwidth; exposed tensor communication
                                  B   recomputation, gradients of inputs; attention 5/2 of its forward
                                  W   gradients of weights
    all microbatches              ticks, each as long as its busiest stage (`schedule_text.stats`), with the head on the
                                  last stage; without stages M (F + B + W)
    once per step                 gradients and weights communicated after the backward; the update at memory bandwidth
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config, fits_flash, padded_vocab
from nanotrain_jax.costs import communication, counts, flops, hardware, memory, offload
from nanotrain_jax.costs.hardware import Gpu
from nanotrain_jax.models.decoder_table import table
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.parallel.mesh import AXES

MEMORY_FRACTION = 0.75  # of a GPU's memory, which JAX preallocates (XLA_PYTHON_CLIENT_MEM_FRACTION)

# Margin of the peak estimate, as a fraction of it. Of the 94 peaks in tests/golden/audit.json (48 layouts, two
# compilers; two are not estimated) 95% are at most 3.8% above their estimates, and all but one within the margin; those
# that store attention scores are up to 5.9% above. A margin is needed because a search favours underestimated layouts.
MARGIN, SCORES_MARGIN = 0.05, 0.1

# Fractions of peak memory and link bandwidth that good kernels reach; for matrix units see hardware.Gpu.matmul.
STREAM = 0.8
LINK = 0.8

# Latency in seconds of a kernel, of a collective, and of a pipeline tick (each branch of a stage, for its forward, its
# backward and its ends, synchronizes with the host). Assumed, not measured.
KERNEL, COLLECTIVE, TICK = 3e-6, 15e-6, 50e-6

# Fractions of the wire bytes that overlap with matmuls, as the compiled programs schedule them (scripts/audit.py).
HIDDEN_TENSOR = 0.3
HIDDEN_LAYERS = 0.5  # ZeRO 2 and 3, in the loops over layers, if a layer exceeds one bucket; else 0
HIDDEN_PIPE = 1.0


Verdict = Literal["fits", "may not fit", "does not fit"]


class Transfer(NamedTuple):
    """Traffic of one kind along some mesh axes, or between device and host, per device and step."""

    axis: str
    op: str
    what: communication.Traffic | offload.HostCopy
    why: str  # `what` as text
    bytes: float  # on the wire
    link: str  # NVLink, network, or network x k: over k adapters at once
    seconds: float
    exposed: float  # seconds not hidden behind compute
    when: Literal["microbatch", "step"]  # inside the loops; or once, after the backward


class Estimate(NamedTuple):
    """Bytes and FLOPs per device and step; seconds are modelled."""

    config: Config
    gpu: str
    gpus: int
    moments: dict[str, memory.Parts]
    peak: str  # the moment of peak memory
    peak_bytes: float
    limit_bytes: float  # GPU memory times the memory fraction
    host_bytes: float  # host memory while a checkpoint is written: the state that a host's devices write
    on_host: memory.Parts  # host memory of a device, between and within steps (memory.offload_*)
    nvme_bytes: float  # of a device's files, which a step reads and writes (memory.offload_optimizer=nvme)
    transfers: list[Transfer]
    copies: list[Transfer]  # between a device and its host; axis is "host"
    flops: float  # hardware FLOPs
    seconds: dict[str, float]  # compute, bubble, update, host, and exposed communication by axes; their sum is the step
    bubble_fraction: float  # of the time of the schedule
    step_seconds: float
    tokens_per_second: float
    mfu: float  # of 6 N + 12 L d T model FLOPs per token: full attention (as PaLM counts)
    mfu_causal: float  # of 6 N + 6 L d T: the half of attention that a causal mask leaves

    @property
    def stores_scores(self) -> bool:
        """True if attention scores are stored, of which XLA keeps more or less than the program asks for."""
        return stores_scores(self.config)

    @property
    def verdict(self) -> Verdict:
        """Compare the peak, with the estimate's margin, to the memory limit."""
        return verdict(self.peak_bytes, margin(self.config), self.limit_bytes)

    @property
    def fits(self) -> bool:
        """True if the peak fits with the estimate's margin."""
        return self.verdict == "fits"

    @property
    def within_margin(self) -> bool:
        """True if the peak fits only without the estimate's margin: compile to decide."""
        return self.verdict == "may not fit"


def stores_scores(config: Config) -> bool:
    """True without flash attention: stored scores make the memory estimate less accurate."""
    return not fits_flash(config.model, config.precision.compute)


def margin(config: Config) -> float:
    """Return the margin of the peak estimate, as a fraction of it."""
    return SCORES_MARGIN if stores_scores(config) else MARGIN


def verdict(peak_bytes: float, margin: float, limit_bytes: float) -> Verdict:
    """Compare a peak to a memory limit. margin: a fraction of the peak; 0 for a compiled peak."""
    if peak_bytes > limit_bytes:
        return "does not fit"
    return "fits" if peak_bytes * (1 + margin) <= limit_bytes else "may not fit"


def estimate(config: Config, gpu: str, memory_fraction: float = MEMORY_FRACTION) -> Estimate:
    """Return the estimate of a resolved config. Raises ValueError for an unknown GPU."""
    figures, config = hardware.find(gpu), on_hardware(config, gpu)
    moments = memory.moments(config, figures.capability)
    sums = {moment: sum(parts.values()) for moment, parts in moments.items()}
    peak = max(sums, key=sums.__getitem__)
    gpus = counts.devices(config)
    seconds, bubble, transfers, copies = times(config, figures)
    step = sum(seconds.values())
    m, tokens = config.model, config.data.batch_size * config.data.seq_len
    model_flops = flops.flops_per_token(m, config.data.seq_len)
    peak_flops = step * gpus * figures.peak_flops
    return Estimate(
        config=config,
        gpu=gpu,
        gpus=gpus,
        moments=moments,
        peak=peak,
        peak_bytes=sums[peak],
        limit_bytes=memory_fraction * figures.memory_bytes,
        host_bytes=checkpoint_bytes(config) * min(gpus, figures.host),
        on_host=memory.on_host(config),
        nvme_bytes=offload.nvme_bytes(config),
        transfers=transfers,
        copies=copies,
        flops=flops.step_flops(config),
        seconds=seconds,
        bubble_fraction=bubble,
        step_seconds=step,
        tokens_per_second=tokens / step,
        mfu=model_flops["full"] * tokens / peak_flops,
        mfu_causal=model_flops["causal"] * tokens / peak_flops,
    )


def on_hardware(config: Config, gpu: str) -> Config:
    """Return the config with attention=auto resolved for the GPU: no flash attention on simulated devices."""
    simulated = gpu == hardware.SIMULATED and config.model.attention == "auto"
    return config.replace("model", attention="xla") if simulated else config


def checkpoint_bytes(config: Config) -> float:
    """Return the bytes that one device copies to its host to write a checkpoint: replicated arrays are divided among
    their devices. State on NVMe (memory.offload_optimizer=nvme) is written array by array and not counted."""
    p, state = config.parallel, memory.state(config)
    weight_copies = p.replica * (1 if p.zero == 3 else p.data)
    optimizer = state["optimizer"] - offload.nvme_bytes(config)
    return state["params"] / weight_copies + optimizer / (p.replica * (1 if p.zero else p.data))


def on_gpus(config: Config, gpus: int, gpu: str, vocab: int | None = None) -> Config:
    """Return the config's own layout resolved for a number of GPUs (0: the size of its mesh).

    The axis that is -1, else data, takes the remaining GPUs; if data was given, the batch per device does not change.
    vocab: size of the tokenizer's vocabulary, if known. Raises ValueError.
    """
    p, axes = config.parallel, config.parallel.axes
    free = [axis for axis, size in axes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"parallel.{free[0]}=-1 and parallel.{free[1]}=-1: one axis at most can be -1; give a size")
    if free and not gpus:
        raise ValueError(f"parallel.{free[0]}=-1 takes the remaining devices; give their number with --gpus")
    gpus = gpus or counts.devices(config)
    hardware.check_count(gpu, gpus)
    scaled = (free or ["data"])[0]
    axes[scaled] = max(gpus // prod(size for axis, size in axes.items() if axis != scaled), 1)
    if prod(axes.values()) != gpus:
        fixed = " x ".join(f"parallel.{axis}={size}" for axis, size in axes.items() if size > 1 and axis != scaled)
        raise ValueError(f"{fixed} does not divide {gpus} GPUs; use a multiple of it, or another mesh")
    if p.data != -1:
        config = config.replace("data", batch_size=max(config.data.batch_size * axes["data"] // p.data, 1))
    return resolve(config, axes, vocab)


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

    A ring inside an NVLink domain runs at NVLink bandwidth; a ring across domains at network bandwidth, over as many
    adapters as it has members in a domain: k GPUs of a host share k.
    """
    p = config.parallel
    rows = [row for row in table(config.model, p.tensor).values() if row.part == LAYERS]
    layer = sum(counts.local_elements(row, config) for row in rows)
    layer *= counts.BYTES[config.precision.compute] * p.pipe / config.model.num_layers
    transfers = []
    for row in communication.communication(config):
        axis, op, what, size = row["axis"], row["op"], row["what"], row["bytes_per_device"]
        group, local = link(tuple(axis.split(",")), tuple(p.axes.values()), gpu.joined)
        bandwidth = gpu.nvlink if local == group else min(gpu.nvlink, local * gpu.network)
        intra_domain = "memory" if gpu.kind == "cpu" else "NVLink"
        name = intra_domain if local == group else "network" if local == 1 else f"network x {local}"
        seconds, hidden, when = size / (bandwidth * LINK), 0.0, "step"
        if axis == "tensor" and not what.is_gradients:
            hidden, when = HIDDEN_TENSOR, "microbatch"
        elif op == "permute":
            hidden, when = HIDDEN_PIPE, "microbatch"
        elif axis == "data" and (p.zero == 3 or (p.zero == 2 and op == "reduce_scatter")):
            hidden, when = HIDDEN_LAYERS if layer > p.bucket_mb * 2**20 else 0.0, "microbatch"
        exposed = seconds - min(seconds * hidden, compute)
        transfers.append(Transfer(axis, op, what, what.value, size, name, seconds, exposed, when))
    return transfers


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
    M, C = p.microbatches, p.chunks
    (F, B, W), ends = layers_time(config, gpu), ends_time(config, gpu)
    compute = M * (F + B + W + sum(ends))
    moved = transfers(config, gpu, compute)
    # Forward share of exposed traffic. Tensor: half; with sequence parallelism 4 of 10, as the backward gathers again.
    # ZeRO per microbatch: a third, the weights; the backward moves weights and gradients.
    share = {"tensor": 0.4 if p.sequence_parallel else 0.5, "pipe": 0.5, "data": 1 / 3}
    per_microbatch = {t: t.exposed / M for t in moved if t.when == "microbatch"}
    forward = sum(seconds * share[t.axis] for t, seconds in per_microbatch.items())
    busy = total = compute + M * sum(per_microbatch.values())
    if p.pipe > 1:
        costs = F + ends[0] + forward, B + ends[1] + sum(per_microbatch.values()) - forward, W
        table = counts.outline(config)
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
    """Return F, B and W of one microbatch through a stage's layers in seconds, without communication."""
    m, p = config.model, config.parallel
    t, n, b = p.tensor, counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    D, T, L = m.d_model, config.data.seq_len, m.num_layers / p.pipe
    K, num_up = counts.kv_width(m) * max(1, t / m.num_kv_heads), 1 + m.features.gated_mlp

    def matmul(k: float, out: float) -> float:
        return _matmul((n, k, out), b, gpu)

    inner = 2 * matmul(D, D / t) + 2 * matmul(D, K / t) + num_up * matmul(D, m.d_ff / t)
    down = matmul(m.d_ff / t, D)
    flash = fits_flash(m, config.precision.compute)
    scores = 4.0 * n * D / t * T
    rate = gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5)
    attention = scores / 2 / rate if flash else scores / rate
    if not flash:  # write and read scores and probabilities
        attention += 20.0 * n * T * m.num_heads / t / (STREAM * gpu.memory_bandwidth)
    split_x = t if p.sequence_parallel else 1
    rotary = 0 if m.features.learned_positions else 2 * (D + K) / t
    stream = b * n * (10 * D / split_x + rotary + (1 + num_up) * m.d_ff / t)
    elementwise = stream / (STREAM * gpu.memory_bandwidth) + 6 * KERNEL
    forward = inner + down + attention + elementwise
    recompute = {"none": 0.0, "selective": attention + elementwise, "full": forward - down, "block": forward}
    B = recompute[config.memory.rematerialization.policy] + inner + down + 2.5 * attention + 2 * elementwise
    if t > 1:
        forward, B = forward + 4 * COLLECTIVE, B + 6 * COLLECTIVE
    return L * forward, L * B, L * (inner + down)


def ends_time(config: Config, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds of forward and backward of head and loss for one microbatch: logits are float32, read and
    written three times.

    With model.loss_chunk each chunk reads and writes the float32 gradient of the head.
    """
    m, p = config.model, config.parallel
    t, n, b = p.tensor, counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    V = padded_vocab(m.vocab_size, t) / t
    head, logits = _matmul((n, m.d_model, V), b, gpu), 12.0 * n * V / (STREAM * gpu.memory_bandwidth)
    chunks = n / m.loss_chunk if m.loss_chunk else 0
    sums = chunks * 8.0 * V * m.d_model / (STREAM * gpu.memory_bandwidth)
    return head + logits, 2 * head + logits + sums


def update_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds to read and write the state, read the gradients, and read them again for the global norm."""
    state = memory.state(config)
    gradients = 8 * state["optimizer"] / (12 if counts.BYTES[config.precision.compute] == 2 else 8)
    return (2 * state["optimizer"] + state["params"] + gradients) / (STREAM * gpu.memory_bandwidth)


def _matmul(sizes: tuple[float, float, float], b: int, gpu: Gpu) -> float:
    """Return the seconds of [m k] @ [k n]; in float32 (TF32) the matrix units run at half their rate."""
    m, k, n = sizes
    flops = 2.0 * m * k * n / (gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5))
    return KERNEL + max(flops, b * (m * k + k * n + m * n) / (STREAM * gpu.memory_bandwidth))
