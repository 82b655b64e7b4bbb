"""Check that the run fits in memory, before the model is built: XLA aborts if an array cannot be allocated."""

from __future__ import annotations

import os

from jax.sharding import Mesh

from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import memory, offload

SLACK = 2.0  # reject a step whose estimated peak exceeds this multiple of the memory: the estimate is not exact on CPUs


def check(config: Config, mesh: Mesh) -> None:
    """Raise ValueError if the training state exceeds the memory, or a step SLACK times the memory. config: resolved.

    For built-in models and optimizers only: the memory of others is not known.
    """
    if not config.is_built_in or config.optimizer.factory:
        return
    devices = mesh.local_devices
    state = sum(memory.state(config).values()) - offload.nvme_bytes(config)
    if devices[0].platform == "cpu":  # devices and host share one memory
        share, name = len(devices), f"{len(devices)} simulated devices"
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        config = config.replace("model", attention="xla", kernels="xla", unroll=False)
    else:
        share, name = 1, f"one {devices[0].device_kind}"
        available = (devices[0].memory_stats() or {}).get("bytes_limit") or float("inf")
        state -= sum(size for part, size in memory.on_host(config).items() if part in ("params", "optimizer"))
    step = sum(memory.peak(config)[1].values())
    for what, size, limit in (("weights and optimizer state", state, available), ("a step", step, SLACK * available)):
        if size * share > limit:
            raise ValueError(
                f"{what} would take about {size * share / 1e9:,.0f} GB on {name}, more than the available "
                f"{available / 1e9:,.0f} GB; use a smaller model, batch or sequence, or more devices (python -m "
                "nanotrain_jax.plan shows what fits)"
            )
