"""Collectives that send 8 bits per element and keep no state (ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3).

Values travel in blocks of 128, each with a float32 scale: its largest magnitude over 127 (int8) or 448 (float8, e4m3).

    reduce_scatter   quantize, all-to-all, dequantize, sum in float32      gradients (qgZ)
    all_reduce       the same, quantize the sum, all-gather, dequantize    gradients
    all_gather       quantize, all-gather, dequantize                      weights (qwZ)

An element is rounded once per hop, whatever the number of devices: a ring of 8-bit sums would round N - 1 times. The
wire takes 1 + 4/128 bytes per element, and arrays are padded to whole blocks for each device. Values and scales are one
message of uint8, since some backends convert collectives of other 8-bit types.

A block with NaN or infinity gets that as its scale: all of it arrives as NaN or infinity, so a step can be skipped.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nanotrain_jax.parallel import collectives
from nanotrain_jax.parallel.collectives import Axis
from nanotrain_jax.parallel.tensor import float8

Kind = Literal["int8", "float8"]
BLOCK = 128  # elements
BYTES = 1 + 4 / BLOCK  # per element on the wire
SMALLEST = 1e-30  # a block with smaller values alone is rounded to zeros
DTYPES = {"int8": jnp.int8, "float8": float8.E4M3}
LARGEST = {"int8": 127.0, "float8": 448.0}


class Blocks(NamedTuple):
    """Quantized values: value * scale."""

    value: jax.Array  # [... b 128], int8 or e4m3
    scale: jax.Array  # [... b], float32


def is_quantized(elements: float, devices: int, least: int) -> bool:
    """True if 8 bits are used for an array: it has `least` elements, and a block for each device, so that padding at
    most doubles it."""
    return devices > 1 and elements >= max(least, BLOCK * devices)


def padded(elements: float, devices: int) -> int:
    """Return the elements on the wire: whole blocks for each of the devices."""
    return -int(-elements // (BLOCK * devices)) * BLOCK * devices


def quantize(x: jax.Array, kind: Kind) -> Blocks:
    """x[... n] -> value[... b 128], scale[... b], with b = ceil(n / 128): the last block is padded with zeros.

    int8 errs by at most 1/254 of the largest magnitude of a block; float8 by 1/16 of each value, or 1/450,000 of the
    largest. Moves nothing.
    """
    blocks = _whole_blocks(x.astype(jnp.float32))
    blocks = blocks.reshape(*blocks.shape[:-1], -1, BLOCK)
    scale = jnp.maximum(jnp.abs(blocks).max(-1), SMALLEST) / LARGEST[kind]
    scaled = jnp.clip(blocks / scale[..., None], -LARGEST[kind], LARGEST[kind])
    return Blocks((jnp.round(scaled) if kind == "int8" else scaled).astype(DTYPES[kind]), scale)


def dequantize(blocks: Blocks) -> jax.Array:
    """value[... b 128], scale[... b] -> float32 [... 128 b]. Moves nothing."""
    x = blocks.value.astype(jnp.float32) * blocks.scale[..., None]
    return x.reshape(*x.shape[:-2], -1)


def reduce_scatter(xs: Sequence[jax.Array], axes: Axis, dims: Sequence[int], kind: Kind) -> list[jax.Array]:
    """x[...] {varying over axes} -> x[.../axes]: float32 sum over axes, scattered along x's dim.

    Quantized gradient communication of one hop (qgZ). N devices along axes must divide each dim. Wire bytes per device:
    (N-1)/N (1 + 4/128) of the padded elements of xs.
    """
    N = lax.axis_size(axes)
    rows = [jnp.moveaxis(x, dim, 0) for x, dim in zip(xs, dims, strict=True)]
    rows = [x.reshape(N, x.shape[0] // N, *x.shape[1:]) for x in rows]
    own = _sum_of_rows([x.reshape(N, -1) for x in rows], axes, kind)
    sums = (x.reshape(row.shape[1:]) for x, row in zip(_split(own, [x[0].size for x in rows]), rows, strict=True))
    return [jnp.moveaxis(x, 0, dim) for x, dim in zip(sums, dims, strict=True)]


def all_reduce(xs: Sequence[jax.Array], axes: Axis, kind: Kind) -> list[jax.Array]:
    """x {varying over axes} -> float32 sum over axes, invarying; the same on every device.

    Every device sums the N-th part of each flattened x (`reduce_scatter`) and gathers the others', quantized again.
    Wire bytes per device: 2 (N-1)/N (1 + 4/128) of the padded elements of xs.
    """
    N = lax.axis_size(axes)
    rows = [jnp.pad(x.ravel(), (0, padded(x.size, N) - x.size)).reshape(N, -1) for x in xs]
    own = _sum_of_rows(rows, axes, kind)
    message_1S = _as_bytes(quantize(own[None], kind))
    (gathered_NS,) = collectives.all_gather([message_1S], axes, [0], invarying=True)
    sums = _split(dequantize(_from_bytes(gathered_NS, kind)), [row.shape[1] for row in rows])
    return [s.ravel()[: x.size].reshape(x.shape) for s, x in zip(sums, xs, strict=True)]


def all_gather(xs: Sequence[jax.Array], axes: Axis, dims: Sequence[int], kind: Kind) -> list[jax.Array]:
    """x[.../axes] -> x[...] for each of xs, in its dtype: the rounded shards of all devices, this one's too (qwZ).

    Wire bytes per device: (N-1)/N (1 + 4/128) of the padded elements of the results.
    """
    shards = [jnp.moveaxis(x, dim, 0) for x, dim in zip(xs, dims, strict=True)]
    row_S = jnp.concatenate([_whole_blocks(x.ravel()) for x in shards])
    (gathered_NS,) = collectives.all_gather([_as_bytes(quantize(row_S[None], kind))], axes, [0])
    rows = _split(dequantize(_from_bytes(gathered_NS, kind)), [x.size for x in shards])
    full = (row.reshape(-1, *x.shape[1:]).astype(x.dtype) for row, x in zip(rows, shards, strict=True))
    return [jnp.moveaxis(x, 0, dim) for x, dim in zip(full, dims, strict=True)]


def all_gather_with_one_scale(xs: Sequence[jax.Array], axes: Axis, dims: Sequence[int]) -> list[jax.Array]:
    """x[.../axes] -> x[...] for each of xs, in its dtype: each shard in e4m3 with one power of two as its scale.

    Wire bytes per device: (N-1)/N of the elements of the results, and 4 N bytes of scales per array.
    """
    scaled = [float8.quantize(x, float8.E4M3) for x in xs]
    as_bytes = [lax.bitcast_convert_type(x.value, jnp.uint8) for x in scaled]
    values = [lax.bitcast_convert_type(x, float8.E4M3) for x in collectives.all_gather(as_bytes, axes, dims)]
    own_scales = jnp.stack([x.scale.astype(jnp.float32) for x in scaled])[None]
    (scales_Nn,) = collectives.all_gather([own_scales], axes, [0])
    return [_rescaled(*x, xs[0].dtype) for x in zip(values, scales_Nn.T, dims, strict=True)]


def _rescaled(values: jax.Array, scale_N: jax.Array, dim: int, dtype: jnp.dtype) -> jax.Array:
    """Multiply each of N shards of values along dim by its scale."""
    shards = values.reshape(*values.shape[:dim], len(scale_N), -1, *values.shape[dim + 1 :])
    scale = jnp.expand_dims(scale_N, [i for i in range(shards.ndim) if i != dim]).astype(dtype)
    return (shards.astype(dtype) * scale).reshape(values.shape)


def _sum_of_rows(rows: Sequence[jax.Array], axes: Axis, kind: Kind) -> jax.Array:
    """x[N n] for each of rows, row i for device i -> this device's rows of all devices, summed, padded, joined."""
    joined_NS = jnp.concatenate([_whole_blocks(x) for x in rows], axis=1)
    message_NS = _as_bytes(quantize(joined_NS, kind))
    received_NS = collectives.all_to_all(message_NS, axes, split=0, concatenate=0)
    return dequantize(_from_bytes(received_NS, kind)).sum(0)


def _whole_blocks(x: jax.Array) -> jax.Array:
    """x[... n] -> x[... 128 b], padded with zeros."""
    padding = -x.shape[-1] % BLOCK
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def _split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """x[... S] -> x[... n] for each of sizes, without the padding that follows each of them."""
    ends = np.cumsum([padded(size, 1) for size in sizes])
    return [part[..., :size] for part, size in zip(jnp.split(x, ends[:-1], axis=-1), sizes, strict=True)]


def _as_bytes(blocks: Blocks) -> jax.Array:
    """value[... b 128], scale[... b] -> uint8 [... 132 b]: values, then scales."""
    parts = (lax.bitcast_convert_type(x, jnp.uint8) for x in blocks)
    return jnp.concatenate([x.reshape(*x.shape[:-2], -1) for x in parts], axis=-1)


def _from_bytes(message: jax.Array, kind: Kind) -> Blocks:
    """uint8 [... 132 b] -> value[... b 128], scale[... b]"""
    count = message.shape[-1] // (BLOCK + 4)
    values, scales = jnp.split(message, [BLOCK * count], axis=-1)
    return Blocks(
        lax.bitcast_convert_type(values.reshape(*values.shape[:-1], count, BLOCK), DTYPES[kind]),
        lax.bitcast_convert_type(scales.reshape(*scales.shape[:-1], count, 4), jnp.float32),
    )
