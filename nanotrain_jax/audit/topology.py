"""Accelerators that are not here, as devices that only the compiler sees.

`compile_only("h100", 64)` gives 64 devices for `mesh.make(devices=...)`: XLA compiles for them as it would on the
cluster (same passes, same schedule, same buffers) on a machine without a GPU or a driver. It needs the CUDA compiler
of `pip install 'nanotrain_jax[cuda12]'`. Nothing can run on them, and nothing is autotuned.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import jax
from jax.experimental import topologies

from nanotrain_jax.audit import hardware

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


class NoCompiler(RuntimeError):
    """The CUDA compiler is not installed."""


def compile_only(gpu: str, count: int) -> list[jax.Device]:
    """`count` devices of a kind (a name in hardware.GPUS) to compile for, host by host.

    Raises ValueError for a kind or count that is not known, NoCompiler where the CUDA compiler is not installed.
    """
    found = hardware.find(gpu)
    hardware.check_count(gpu, count)
    check_compiler(gpu)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # that check wants a driver
    target = TARGET.format(gpu=found, optin=found.shared_bytes - 1024)
    hosts, each = (count // found.host, found.host) if count > found.host else (1, count)
    shape = f"1x{hosts}x{each}"
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices


def check_compiler(gpu: str) -> None:
    """Raise NoCompiler where the CUDA compiler is not installed. Starts nothing."""
    if not any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins")):
        raise NoCompiler(
            f"cannot compile for {gpu}: the CUDA compiler is not installed; pip install 'nanotrain_jax[cuda12]'"
        )
