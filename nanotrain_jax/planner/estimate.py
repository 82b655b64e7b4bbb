"""Estimate memory, communication, FLOPs and step time of a run, by closed forms alone.

Memory, bytes and FLOPs are formulas that the tests hold to the compiled program (audit/). Time is *modelled*
(planner/step_time.py). Nothing here is measured.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import jax

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import counts, flops, hardware, memory, offload
from nanotrain_jax.costs.stored_parameters import frozen_elements
from nanotrain_jax.models.device_kernels import check_grouped
from nanotrain_jax.planner.step_time import Transfer, times

MEMORY_FRACTION = 0.75  # of a GPU's memory, which JAX preallocates (XLA_PYTHON_CLIENT_MEM_FRACTION)

# Margin of the peak estimate, as a fraction of it: no estimated peak in tests/golden/audit.json is further above.
# The larger one is for layouts that store attention scores, for an encoder of pictures (held by
# tests/audit/test_vision_compiled.py), and for ZeRO 3 with jax before
# 0.12, whose XLA may allocate the gradients of layers before the loss. A margin is needed because a search favours
# underestimated layouts.
MARGIN, LARGE_MARGIN = 0.05, 0.1

Verdict = Literal["fits", "may not fit", "does not fit"]


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
    def verdict(self) -> Verdict:
        """Compare the peak, with the estimate's margin, to the memory limit; `may not fit`: compile to decide."""
        return verdict(self.peak_bytes, margin(self.config), self.limit_bytes)

    @property
    def fits(self) -> bool:
        """True if the peak fits with the estimate's margin."""
        return self.verdict == "fits"


def stores_scores(config: Config) -> bool:
    """True without flash attention: XLA keeps more or less of stored scores than the program asks for."""
    return not fits_flash(config.model, config.precision.compute)


def margin(config: Config, jax_version: tuple[int, ...] = jax.__version_info__) -> float:
    """Return the margin of the peak estimate, as a fraction of it, with the compiler of a jax version."""
    is_early = jax_version < (0, 12) and config.parallel.zero == 3 and not config.parallel.prefetch
    return LARGE_MARGIN if stores_scores(config) or config.vision or is_early else MARGIN


def verdict(peak_bytes: float, margin: float, limit_bytes: float) -> Verdict:
    """Compare a peak to a memory limit. margin: a fraction of the peak; 0 for a compiled peak."""
    if peak_bytes > limit_bytes:
        return "does not fit"
    return "fits" if peak_bytes * (1 + margin) <= limit_bytes else "may not fit"


def estimate(config: Config, gpu: str, memory_fraction: float = MEMORY_FRACTION) -> Estimate:
    """Return the estimate of a resolved config. Raises ValueError for an unknown GPU."""
    figures, config = hardware.find(gpu), on_hardware(config, gpu)
    moments = memory.moments(config)
    sums = {moment: sum(parts.values()) for moment, parts in moments.items()}
    peak = max(sums, key=sums.__getitem__)
    gpus = counts.devices(config)
    seconds, bubble, transfers, copies = times(config, figures)
    step = sum(seconds.values())
    tokens = config.data.batch_size * config.data.seq_len
    model_flops = flops.flops_per_token(config)
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
    """Return the config for the GPU: on simulated devices `auto` is no flash attention, no kernel of ours and no layers
    written out. Raises ValueError if the config asks for a kernel that the GPU lacks."""
    check_grouped(config, hardware.find(gpu).capability)
    on_simulated = {"attention": "xla", "kernels": "xla", "unroll": False} if gpu == hardware.SIMULATED else {}
    return config.replace(
        "model", **{key: to for key, to in on_simulated.items() if getattr(config.model, key) == "auto"}
    )


def checkpoint_bytes(config: Config) -> float:
    """Return the bytes that one device copies to its host to write a checkpoint: replicated arrays are divided among
    their devices. State on NVMe (memory.offload_optimizer=nvme) is written array by array and not counted, the base of
    adapters (train.lora) is not written."""
    p, state = config.parallel, memory.state(config)
    N = counts.zero_devices(config)
    replicas = 1 if p.sync_every else p.replica  # that hold the same
    optimizer = (state["optimizer"] - offload.nvme_bytes(config)) / replicas + state.get("outer", 0.0) / p.replica
    optimizer += state.get("residuals", 0.0)
    params = state["params"]
    if config.train.lora:
        params -= counts.BYTES[config.precision.compute] * frozen_elements(config)
    return params / (replicas * (1 if p.zero == 3 else N)) + optimizer / (1 if p.zero else N)


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
        config = config.replace("data", batch_size=max(config.data.batch_size * axes["data"] * p.expert // p.data, 1))
    return resolve(config, axes, vocab)
