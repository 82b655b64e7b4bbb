"""The device mesh: six named axes, always present; an axis of size 1 costs nothing.

    pipe, replica, data, expert, context, tensor      slowest links first, tensor innermost on the fastest links

The batch is sharded over `replica`, `data` and `expert` (rows) and `context` (tokens); gradients are summed over these
four. ZeRO shards over `data`, `expert` and `context`. `expert` is the inner part of data parallelism: devices along it
share the experts of a mixture, so that of their weights it is no axis of ZeRO, and their gradients are not summed over
it. For all else it is a part of data: parallel.data counts both.
Devices are in process order, so an inner axis stays within a process, and within a host, as far as its size allows.
"""

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("pipe", "replica", "data", "expert", "context", "tensor")
BATCH_AXES = ("replica", "data", "expert", "context")
ZERO_AXES = ("data", "expert", "context")
PINNED = {  # settings of JAX that change the numbers of a run, or make it fail
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_disable_jit": False,
}


def pin() -> list[str]:
    """Set JAX to what all numbers here assume, whatever the environment says; -> a line for each other setting."""
    found = {name: getattr(jax.config, name) for name in PINNED}
    for name, value in PINNED.items():
        jax.config.update(name, value)
    return [
        f"{name.upper()}={value} has no effect: a run has {PINNED[name]}"
        for name, value in found.items()
        if value != getattr(jax.config, name)
    ]


def configure(simulate: int = 0, deterministic: bool = False, compile_cache: str | None = None) -> list[str]:
    """Set up JAX; -> notes (see `pin`). Call it before the first use of a device.

    simulate: number of simulated CPU devices of this process (0: use the machine's devices).
    deterministic: use deterministic GPU kernels. compile_cache: folder for compiled programs. Sets the limit of pinned
    host memory to the host's memory (XLA's default is 64 GB), unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set.
    Raises ValueError if JAX already runs with another number of devices.
    """
    if simulate:
        _simulate(simulate)
    host_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**9
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_gb))
    if deterministic:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    if compile_cache:
        jax.config.update("jax_compilation_cache_dir", compile_cache)
    return pin()


def _simulate(count: int) -> None:
    """Simulate count devices on the CPU. Raises ValueError if JAX already runs with another number."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices()) != count:
            raise ValueError(
                f"runtime.simulate={count}: JAX already runs with {len(jax.devices())} devices; "
                "configure the mesh before anything else uses JAX"
            ) from None


def make(devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """Return a mesh with all AXES over the first devices. A size of -1 takes the rest.

    sizes: of axes; data is the rest by default, others 1. Raises ValueError if they do not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if unknown := sizes.keys() - set(AXES):
        raise ValueError(f"a mesh has no axis {min(unknown)!r}; use {', '.join(AXES)}")
    sizes_by_axis = dict.fromkeys(AXES, 1) | {"data": -1} | sizes
    named = " ".join(f"{axis}={size}" for axis, size in sizes_by_axis.items())
    free = [axis for axis, size in sizes_by_axis.items() if size == -1]
    bad = [axis for axis, size in sizes_by_axis.items() if size < 1 and size != -1]
    if bad:
        raise ValueError(
            f"parallel.{bad[0]}={sizes_by_axis[bad[0]]}: must be 1 or more, or -1 for the remaining devices"
        )
    if len(free) > 1:
        raise ValueError(f"mesh {named}: only one axis can be -1; set the size of the others")
    fixed = math.prod(size for size in sizes_by_axis.values() if size != -1)
    if free:
        if len(devices) % fixed:
            raise ValueError(
                f"mesh {named}: {len(devices)} devices cannot be split into groups of {fixed}; "
                f"use sizes whose product divides {len(devices)}, or another runtime.simulate"
            )
        sizes_by_axis[free[0]] = len(devices) // fixed
    sizes = tuple(sizes_by_axis.values())
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


def cross_host_warning(mesh: Mesh, hosts: Sequence[str]) -> str:
    """Return a one-line warning if a tensor-parallel group spans hosts, else "". hosts: the host of each process.

    Tensor parallelism moves activations in every layer, so its groups need the fastest links.
    """
    host = np.vectorize(lambda device: hosts[device.process_index])(mesh.devices)
    hosts_per_group = max(len(set(group)) for group in host.reshape(-1, mesh.shape["tensor"]))
    if hosts_per_group == 1:
        return ""
    devices_per_host = math.gcd(*np.unique(host, return_counts=True)[1])
    return (
        f"parallel.tensor={mesh.shape['tensor']} spans {hosts_per_group} hosts, and the network is far slower "
        f"than the links within a host; use a divisor of {devices_per_host}, and parallel.pipe or parallel.data across "
        "hosts"
    )
