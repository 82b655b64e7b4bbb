"""Can the machine hold the run at all? Asked before the model is built: XLA aborts where an array cannot exist."""

from __future__ import annotations

import os

from jax.sharding import Mesh

from nanotrain_jax.audit import memory, offloaded
from nanotrain_jax.config import Config

SLACK = 2.0  # a step is refused above this many times the memory: estimates of its peak are not exact on CPUs


def check(config: Config, mesh: Mesh) -> None:
    """Raise ValueError if the state of training, or by far a step, is larger than the memory. config: resolved.

    Only for the decoder: the memory of a step of another model is not known.
    """
    if config.model.factory:
        return
    devices = mesh.local_devices
    state = sum(memory.state(config).values()) - offloaded.in_files(config)
    if devices[0].platform == "cpu":  # one memory for all devices and their host
        share, name = len(devices), f"{len(devices)} simulated devices"
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        config = config.replace("model", attention="xla")
    else:
        share, name = 1, f"one {devices[0].device_kind}"
        there = (devices[0].memory_stats() or {}).get("bytes_limit") or float("inf")
        state -= sum(size for part, size in memory.on_host(config).items() if part in ("params", "optimizer"))
    step = sum(memory.peak(config)[1].values())
    for what, size, limit in (("weights and optimizer state", state, there), ("a step", step, SLACK * there)):
        if size * share > limit:
            raise ValueError(
                f"{what} would take about {size * share / 1e9:,.0f} GB on {name}, more than the {there / 1e9:,.0f} GB "
                "there are; use a smaller model, batch or sequence, or more devices (python -m nanotrain_jax.plan says "
                "what fits)"
            )
