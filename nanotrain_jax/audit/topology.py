"""Accelerators that are not here: their figures, and devices that only the compiler sees.

`compile_only("h100", 64)` gives 64 devices for `mesh.make(devices=...)`: XLA compiles for them as it would on the
cluster (same passes, same schedule, same buffers) on a machine without a GPU or a driver. It needs the CUDA compiler
of `pip install 'nanotrain_jax[cuda12]'`. Nothing can run on them, and nothing is autotuned.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

PER_HOST = 8  # GPUs of one host, joined by NVLink


class Gpu(NamedTuple):
    """Figures of one accelerator, SXM form. Bytes, bytes per second, FLOP per second.

    peak_flops: dense 16-bit matmuls, without sparsity (NVIDIA data sheets: A100 2021, H100 and H200 2023, B200 2024).
    The others: what the CUDA runtime reports of the device, as OpenXLA publishes it for its own GPU targets.
    """

    kind: str  # what jax.Device.device_kind says
    peak_flops: float
    memory_bytes: int
    memory_bandwidth: int
    capability: int  # major CUDA compute capability
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # per core


GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", 312e12, 85_100_068_864, 2_039_040_000_000, 8, 108, 64, 1.41, 41_943_040, 167_936
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", 989e12, 84_942_979_072, 3_352_320_000_000, 9, 132, 128, 1.98, 52_428_800, 233_472
    ),
    "h200": Gpu(
        "NVIDIA H200 141GB HBM3e", 989e12, 151_397_597_184, 4_800_000_000_000, 9, 132, 128, 1.98, 52_428_800, 233_472
    ),
    "b200": Gpu("NVIDIA B200", 2250e12, 191_514_411_008, 7_672_320_000_000, 10, 148, 128, 1.965, 132_644_864, 233_472),
}

# XLA's GpuTargetConfig, as text. Shared memory per block is what a core has less 1 KiB, which CUDA keeps.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_bytes} shared_memory_per_block_optin: {optin}
  core_count: {gpu.cores} clock_rate_ghz: {gpu.clock_ghz} l2_cache_size: {gpu.l2_bytes}
  memory_bandwidth: {gpu.memory_bandwidth} device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {gpu.capability} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{gpu.kind}"
"""


def peak_flops(device_kind: str) -> float | None:
    """Dense 16-bit FLOP/s of one device, or None if it is not in the table (a CPU, say)."""
    return next((gpu.peak_flops for name, gpu in GPUS.items() if name.upper() in device_kind), None)


def compile_only(gpu: str, count: int) -> list[jax.Device]:
    """`count` devices of a kind (a100, h100, h200, b200) to compile for; 8 to a host.

    Raises ValueError for a kind or count that is not known, RuntimeError where the CUDA compiler is not installed.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r} is unknown; use {', '.join(GPUS)}")
    if count < 1 or (count > PER_HOST and count % PER_HOST):
        raise ValueError(f"gpus={count}: 1 to {PER_HOST}, or whole hosts of {PER_HOST}; use {-(-count // 8) * 8 or 1}")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # that check wants a driver
    target = TARGET.format(gpu=GPUS[gpu], optin=GPUS[gpu].shared_bytes - 1024)
    hosts, each = (count // PER_HOST, PER_HOST) if count > PER_HOST else (1, count)
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x{hosts}x{each}")
    except NotImplementedError:
        raise RuntimeError(
            f"cannot compile for {gpu}: the CUDA compiler is not installed; pip install 'nanotrain_jax[cuda12]'"
        ) from None
    return topology.devices
