"""Slow devices (runtime.time_devices_every): a matmul on each device alone, without communication, every so many steps.

In a step all devices wait for the slowest, so the time of a step names none (Megatron-LM's straggler detector and
NVIDIA's resiliency extension time parts of a step that have no collectives, for the same reason).
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from nanotrain_jax.run.verification import device_name

SLOW = 1.2  # times the median
MATMULS = 16  # one after another, so that their start does not count
SIZE = {"cpu": 256}  # rows of the matrices, by platform
LARGE = 4096  # of other platforms: 2.2 TFLOP, 3 ms at 700 TFLOP/s, and 100 MB
REPEATS = 3  # the fastest counts: what else a host does only slows


class Slow(NamedTuple):
    """The slowest device: its number in the mesh, its seconds, and the median of all."""

    device: int
    seconds: float
    median: float

    @property
    def ratio(self) -> float:
        """How many times the median it takes."""
        return self.seconds / self.median


@partial(jax.jit, static_argnames="size")
def matmuls(scale: jax.Array, size: int) -> jax.Array:
    """scale [], 1 -> [size size]: MATMULS matmuls, on the device of scale.

    By the matrix of the discrete Hartley transform, which is its own inverse: no product grows or fades.
    """
    dtype = jnp.float32 if size == SIZE["cpu"] else jnp.bfloat16
    row = jnp.arange(size)
    angles = (row[:, None] * row[None, :] % size).astype(jnp.float32) * (2 * math.pi / size)
    hartley = ((jnp.cos(angles) + jnp.sin(angles)) * (scale / math.sqrt(size))).astype(dtype)
    return lax.fori_loop(0, MATMULS, lambda _, product: product @ hartley, hartley)


def measured(device: jax.Device) -> float:
    """Return the seconds that a device of this process takes for the matmuls, without their compilation."""
    size, scale = SIZE.get(device.platform, LARGE), jax.device_put(np.float32(1), device)
    jax.block_until_ready(matmuls(scale, size))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(matmuls(scale, size))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def of_all(mesh: Mesh) -> np.ndarray:
    """Time each device, those of a process one after another; called by all processes: -> seconds [devices]."""
    own = np.zeros(mesh.size, np.float32)
    for number, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            own[number] = measured(device)
    return own if jax.process_count() == 1 else multihost_utils.process_allgather(own).sum(axis=0)


def slowest(seconds: np.ndarray) -> Slow | None:
    """Return the slowest device if it takes more than SLOW times the median. seconds: [devices]."""
    device = int(np.argmax(seconds))
    found = Slow(device, float(seconds[device]), float(np.median(seconds)))
    return found if found.ratio > SLOW else None


def described(slow: Slow, mesh: Mesh) -> str:
    """Return "process 1, local device 0 (data 4) takes 1.62 times ..."."""
    return (
        f"{device_name(mesh, slow.device)} takes {slow.ratio:.2f} times the median of {mesh.size} devices for matmuls "
        f"without communication ({1e3 * slow.seconds:.3g} ms, median {1e3 * slow.median:.3g} ms)"
    )
