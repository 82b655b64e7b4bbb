"""The device mesh: five named axes, always present; an axis of size 1 costs nothing.

    pipe, replica, data, context, tensor      slowest links first, tensor innermost on the fastest

The batch is split over `replica` and `data` (rows) and `context` (tokens): gradients are summed over those three.
Devices come in the order of processes, so an inner axis lies within a process, and a host, as far as its size allows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("pipe", "replica", "data", "context", "tensor")
BATCH_AXES = ("replica", "data", "context")


def configure(simulate: int = 0, deterministic: bool = False, compile_cache: str | None = None) -> None:
    """Set up JAX; to be called before the first use of a device.

    simulate: number of CPU devices for this process to pretend to have (0: the machine's own devices).
    deterministic: deterministic GPU kernels. compile_cache: folder for compiled programs. Arrays that rest on the host
    may take all of its memory (XLA's own limit is 64 GB), unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise.
    Raises ValueError if JAX has already started with another number of devices.
    """
    if simulate:
        _simulate(simulate)
    host_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**9
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_gb))
    if deterministic:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    if compile_cache:
        jax.config.update("jax_compilation_cache_dir", compile_cache)


def _simulate(count: int) -> None:
    """Have JAX pretend that the CPU is so many devices. Raises ValueError if it runs with another number already."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices()) != count:
            raise ValueError(
                f"runtime.simulate={count} came too late: JAX already runs with {len(jax.devices())} devices; "
                "configure the mesh before anything else uses JAX"
            ) from None


def make(
    pipe: int = 1,
    replica: int = 1,
    data: int = -1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes pipe, replica, data, context, tensor over the first devices; one size may be -1: the rest.

    Raises ValueError if the sizes do not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    asked = dict(zip(AXES, (pipe, replica, data, context, tensor), strict=True))
    named = " ".join(f"{axis}={size}" for axis, size in asked.items())
    free = [axis for axis, size in asked.items() if size == -1]
    bad = [axis for axis, size in asked.items() if size < 1 and size != -1]
    if bad:
        raise ValueError(f"parallel.{bad[0]}={asked[bad[0]]}: an axis has 1 or more devices, or -1 for the rest")
    if len(free) > 1:
        raise ValueError(f"mesh {named}: only one axis can be -1; give the size of the others")
    fixed = math.prod(size for size in asked.values() if size != -1)
    if free:
        if len(devices) % fixed:
            raise ValueError(
                f"mesh {named}: {len(devices)} devices cannot be split into groups of {fixed}; "
                f"use sizes whose product divides {len(devices)}, or another runtime.simulate"
            )
        asked[free[0]] = len(devices) // fixed
    sizes = tuple(asked.values())
    needed = math.prod(sizes)
    if needed > len(devices):
        simulated = f", or runtime.simulate={needed} to try it on this machine's CPU" if needed <= 4096 else ""
        raise ValueError(
            f"mesh {named} needs {needed} devices but there are {len(devices)}; use a smaller mesh{simulated}"
        )
    idle = sorted({d.process_index for d in devices} - {d.process_index for d in devices[:needed]})
    if idle:
        raise ValueError(
            f"mesh {named} takes {needed} of {len(devices)} devices, and leaves none to process {idle[0]}; "
            "use a larger mesh, or fewer processes"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed])


def straddles(mesh: Mesh, hosts: Sequence[str]) -> str:
    """What is slow about a mesh whose processes run on these hosts, in one line; "" if nothing.

    Tensor parallelism moves activations in every layer: its groups belong where the links are fastest.
    """
    host = np.vectorize(lambda device: hosts[device.process_index])(mesh.devices)
    across = max(len(set(group)) for group in host.reshape(-1, mesh.shape["tensor"]))
    if across == 1:
        return ""
    fits = math.gcd(*np.unique(host, return_counts=True)[1])
    return (
        f"parallel.tensor={mesh.shape['tensor']} spans {across} hosts, whose network is far slower than the links "
        f"within one; use a divisor of {fits}, and parallel.pipe or parallel.data across hosts"
    )
