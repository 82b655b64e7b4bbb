"""Compile-only devices: compile for a GPU cluster on a machine without GPUs (ahead-of-time compilation).

`compile_only("h100", 64)` returns 64 devices for `mesh.make(devices=...)`: XLA compiles for them as on the cluster
(same passes, same schedule, same buffers), without a GPU or a driver. Needs the CUDA compiler of
`pip install 'nanotrain_jax[cuda12]'`. Programs cannot run on these devices, and kernels are not autotuned.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import jax
from jax.experimental import topologies

from nanotrain_jax.costs import hardware

# XLA's GpuTargetConfig as text. Shared memory per block: that of a core less 1 KiB, which CUDA reserves.
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


class NoCompiler(RuntimeError):
    """The CUDA compiler is not installed."""


def compile_only(gpu: str, count: int) -> list[jax.Device]:
    """Return `count` devices of a GPU (a name in hardware.GPUS) to compile for, host by host.

    Raises ValueError for an unknown GPU or an invalid count, NoCompiler if the CUDA compiler is not installed.
    """
    figures = hardware.find(gpu)
    hardware.check_count(gpu, count)
    check_compiler(gpu)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the check needs a driver
    target = TARGET.format(gpu=figures, optin=figures.shared_bytes - 1024)
    hosts, per_host = (count // figures.host, figures.host) if count > figures.host else (1, count)
    shape = f"1x{hosts}x{per_host}"
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices


def check_compiler(gpu: str) -> None:
    """Raise NoCompiler if the CUDA compiler is not installed, without starting it."""
    if not any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins")):
        raise NoCompiler(
            f"cannot compile for {gpu}: the CUDA compiler is not installed; pip install 'nanotrain_jax[cuda12]'"
        )
