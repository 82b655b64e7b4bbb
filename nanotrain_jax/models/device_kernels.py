"""Which kernels a kind of device runs: of attention, of norms, GELU and softmax, of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.kernels import tiles
from nanotrain_jax.kernels.limits import GROUPED_CAPABILITY
from nanotrain_jax.parallel.expert import kernels
from nanotrain_jax.parallel.expert.grouped_matmul import Kernel


def of_attention(config: Model, dtype: jnp.dtype, device: jax.Device) -> str:
    """Resolve `auto` for a device: cudnn (flash attention) if it supports the model, else xla.

    Raises ValueError if the config sets cudnn and it does not support the model.
    """
    is_supported = _is_ampere(device) and fits_flash(config, dtype.name)
    if config.attention == "cudnn" and not is_supported:
        raise ValueError(
            "model.attention=cudnn needs an NVIDIA GPU (Ampere or newer), a 16-bit precision.compute and a head dim of "
            f"at most 128 that 8 divides, not {device.platform}, {dtype} and {config.head_width}; use auto or xla"
        )
    return ("cudnn" if is_supported else "xla") if config.attention == "auto" else config.attention


def has_ours(config: Model, device: jax.Device) -> bool:
    """True if norms, GELU and softmax run by our kernels on a device of this kind (`model.kernels`).

    Raises ValueError if the config asks for them and JAX has no Triton backend of Pallas.
    """
    if tiles.triton is None:
        if config.kernels == "pallas":
            raise ValueError(
                f"model.kernels=pallas needs the Triton backend of Pallas, which jax {jax.__version__} lacks; use auto "
                "or xla"
            )
        return False
    return config.kernels == "pallas" or (config.kernels == "auto" and _is_ampere(device))


def of_experts(config: Config, device: jax.Device) -> Kernel | None:
    """Return what multiplies the rows of experts on a device, None for padded matmuls. Raises ValueError if the config
    asks for a kernel that the device lacks, or that is not installed."""
    kernel = config.model.grouped_matmul
    if kernel == "padded":
        return None
    check_grouped(config, capability(device))
    if not kernels.is_installed():
        version = ".".join(map(str, kernels.FIRST_VERSION))
        raise ValueError(
            f"model.grouped_matmul={kernel}: tokamax {version} or newer is not installed; pip install "
            "'nanotrain_jax[kernels]' with Python 3.12 or newer, or use padded"
        )
    return kernels.KERNELS[kernel](device)


def check_flash_rows(config: Config) -> None:
    """Raise Misfit for rows whose parts cuDNN attention cannot take: their backward needs an even number of tokens.

    A row is cut into 2 c parts for context parallelism but Ulysses, and in two to keep documents or pictures apart.
    """
    p, d = config.parallel, config.data
    is_cut = (p.context > 1 and p.context_attention != "ulysses") or not d.attend_across_documents or config.vision
    multiple = 4 * p.context if is_cut else 2
    if d.seq_len % multiple:
        longer = -(-d.seq_len // multiple) * multiple
        raise Misfit(
            f"data.seq_len={d.seq_len} must be a multiple of {multiple} for flash attention",
            f"use data.seq_len={longer}, or model.attention=xla",
        )


def check_grouped(config: Config, generation: float) -> None:
    """Raise ValueError if the config asks for a kernel that GPUs of this compute capability lack (0: others)."""
    kernel = config.model.grouped_matmul
    if kernel != "padded" and int(generation) != GROUPED_CAPABILITY:
        raise ValueError(
            f"model.grouped_matmul={kernel} needs NVIDIA GPUs of the Hopper generation (compute capability "
            f"{GROUPED_CAPABILITY}), not {generation:g}; use padded"
        )


def _is_ampere(device: jax.Device) -> bool:
    """True for an NVIDIA GPU that is Ampere or newer."""
    return capability(device) >= 8.0


def capability(device: jax.Device) -> float:
    """Return the compute capability of an NVIDIA GPU, 0 of another device."""
    is_gpu = device.platform in ("gpu", "cuda")
    return float(getattr(device, "compute_capability", None) or 8.0) if is_gpu else 0.0
