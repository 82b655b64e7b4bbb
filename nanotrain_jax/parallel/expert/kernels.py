"""Grouped matmuls by a kernel of tokamax, in place of the padded matmuls of `grouped_matmul.py`.

tokamax (https://github.com/openxla/tokamax) has `ragged_dot`, a Pallas kernel (Mosaic) for NVIDIA GPUs of the Hopper
generation. It multiplies a group in tiles of 64 rows or so, and skips tiles of no group: beside the rows, parts of the
tiles at both ends of a group are executed, and no round is repeated. Its own backward loses the axes over which arrays
vary in `shard_map`; here its three forward calls are the forward and backward of `grouped_matmul`, and are cast.

`KERNELS` has a kernel for each name; tokamax is imported where one multiplies. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.kernels.limits import GROUPED_TILE
from nanotrain_jax.parallel.collectives import as_varying, varying_axes

FIRST_VERSION = 0, 0, 17  # those before it drop a remainder of D, and parse the command line of the program
AS_NEEDED = "as_needed_rows"  # named scope: of the rows of a buffer, a kernel multiplies those that groups have
CONTRACT_ROWS = lax.RaggedDotDimensionNumbers(  # x[M D], g[M F] -> [E D F]
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@cache
def is_installed() -> bool:
    """True if a version of tokamax is installed whose kernels are used here. Imports nothing."""
    try:
        version = metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(n) for n in version.split(".")[:3] if n.isdecimal()) >= FIRST_VERSION


def buffer_rows(rows: int) -> int:
    """Return how many rows the arrays of a kernel have for so many."""
    return -(-rows // GROUPED_TILE) * GROUPED_TILE


class Tokamax(NamedTuple):
    """The kernels of tokamax for a kind of device. implementation: of tokamax; "xla" is that of every device."""

    device: jax.Device  # to compile for: a device of this process, or of `audit.topology.compile_only`
    implementation: str = "mosaic"

    def multiply(self, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """x[M D], w[E D F], sizes[E] -> y[M F]; zeros after the last group, of which the kernel writes nothing."""
        import tokamax

        x_SD = _aligned(x_MD)
        with self._context():
            y_SF = tokamax.ragged_dot(x_SD, w_EDF, sizes_E, implementation=self.implementation)
        y_MF = as_varying(y_SF[: len(x_MD)], sorted(varying_axes(x_MD)))
        is_row_M1 = (jnp.arange(len(x_MD)) < sizes_E.sum())[:, None]
        return jnp.where(is_row_M1, y_MF, jnp.zeros_like(y_MF))

    def outer(self, x_MD: jax.Array, g_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """x[M D], g[M F], sizes[E] -> x^T g[E D F], summed over the rows of each group."""
        import tokamax

        with self._context():
            sums_EDF = tokamax.ragged_dot_general(
                _aligned(x_MD), _aligned(g_MF), sizes_E, CONTRACT_ROWS, implementation=self.implementation
            )
        return as_varying(sums_EDF, sorted(varying_axes(x_MD)))

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Let tokamax choose tiles for the device, which it asks JAX for, in a run one of its own; and promote dtypes,
        as its kernels need."""
        here = [d for d in jax.local_devices() if d.device_kind == self.device.device_kind]
        device = here[0] if here else self.device
        with jax.named_scope(AS_NEEDED), jax.default_device(device), jax.numpy_dtype_promotion("standard"):
            yield


KERNELS = {"tokamax": Tokamax}


def _aligned(x_MD: jax.Array) -> jax.Array:
    """x[M D] -> x[S D], with further rows of zeros, S of `buffer_rows`."""
    return jnp.pad(x_MD, ((0, buffer_rows(len(x_MD)) - len(x_MD)), (0, 0)))
