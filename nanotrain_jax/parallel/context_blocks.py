"""The blocks of ring and gather attention: hops over the keys and values of other devices, and their backward.

parallel/context.py has the public functions, the order of tokens and the names. Tokens are in zig-zag order; arguments
vary over all axes that any of them varies over.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.parallel.attention_block import Kernel, Residuals, attend, attend_backward
from nanotrain_jax.parallel.collectives import all_gather, position, reduce_scatter, shift

OUT, LSE = "context_out", "context_lse"  # names for remat policies

Gradients = tuple[jax.Array, jax.Array]  # of q and of kv, float32


class Attended(NamedTuple):
    """Attention over the blocks so far: out / total is the output, top + log(total) the lse; float32.

    Merging the lse itself would round it at every hop.
    """

    out: jax.Array  # [Z B C N H], sum of the blocks' outputs, each times its weight exp(lse - top)
    total: jax.Array  # [Z B C N], sum of the weights
    top: jax.Array  # [Z B C N], largest lse of a block


# Ring: at hop r a device has the keys and values of the device r places before it. Hops 1 to c-2 are a loop, in which
# XLA:GPU overlaps every permute; unrolled, it starts them all first and waits. The last hop is apart: it sends nothing.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def ring(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str, kernel: Kernel) -> jax.Array:
    """`context.ring_attention`, of arguments that are checked."""
    return _ring_forward(q_BTNH, k_BTKH, v_BTKH, axis, kernel)[0]


def _ring_forward(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str, kernel: Kernel
) -> tuple[jax.Array, Residuals]:
    size = lax.axis_size(axis)
    q_ZBCNH = _chunks(q_BTNH)
    kv_PZBCKH = shift(_pack(k_BTKH, v_BTKH), axis, 1)  # leaves before the own block is computed

    def hop(carry: tuple[jax.Array, Attended], r: jax.Array) -> tuple[tuple[jax.Array, Attended], None]:
        kv_PZBCKH, attended = carry
        arriving = shift(kv_PZBCKH, axis, 1)
        return (arriving, _attend_hop(q_ZBCNH, kv_PZBCKH, attended, _is_later(axis, r), kernel)), None

    carry = kv_PZBCKH, _attend_own(q_BTNH, k_BTKH, v_BTKH, kernel)
    (kv_PZBCKH, attended), _ = lax.scan(hop, carry, jnp.arange(1, size - 1))
    attended = _attend_hop(q_ZBCNH, kv_PZBCKH, attended, _is_later(axis, size - 1), kernel)
    return _saved(q_BTNH, k_BTKH, v_BTKH, attended)


def _ring_backward(axis: str, kernel: Kernel, residuals: Residuals, g_BTNH: jax.Array) -> tuple[jax.Array, ...]:
    size = lax.axis_size(axis)
    residuals, g_BTNH = lax.optimization_barrier((residuals, g_BTNH))  # else XLA may keep what arrived in the forward
    kv_PZBCKH = shift(_pack(residuals.k, residuals.v), axis, 1)
    queries = [_chunks(x) for x in (residuals.q, residuals.out, residuals.lse, g_BTNH)]

    def hop(carry: tuple, r: jax.Array) -> tuple[tuple, None]:
        kv_PZBCKH, (dq_ZBCNH, dkv_PZBCKH) = carry
        arriving = shift(kv_PZBCKH, axis, 1)
        gradients = dq_ZBCNH, shift(dkv_PZBCKH, axis, 1)  # waits for the hop before only
        return (arriving, _pull_hop(queries, kv_PZBCKH, gradients, _is_later(axis, r), kernel)), None

    # The barrier keeps the first hop behind the own block, also where no loop follows.
    carry = lax.optimization_barrier((kv_PZBCKH, _pull_own(residuals, g_BTNH, kernel)))
    (kv_PZBCKH, (dq_ZBCNH, dkv_PZBCKH)), _ = lax.scan(hop, carry, jnp.arange(1, size - 1))
    gradients = dq_ZBCNH, shift(dkv_PZBCKH, axis, 1)
    dq_ZBCNH, dkv_PZBCKH = _pull_hop(queries, kv_PZBCKH, gradients, _is_later(axis, size - 1), kernel)
    return _unpack(dq_ZBCNH, shift(dkv_PZBCKH, axis, 1), residuals)


ring.defvjp(_ring_forward, _ring_backward)


# Gather: every device has the keys and values of all devices, in the order of the axis.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def gather(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str, kernel: Kernel) -> jax.Array:
    """`context.gather_attention`, of arguments that are checked."""
    return _gather_forward(q_BTNH, k_BTKH, v_BTKH, axis, kernel)[0]


def _gather_forward(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str, kernel: Kernel
) -> tuple[jax.Array, Residuals]:
    size = lax.axis_size(axis)
    q_ZBCNH = _chunks(q_BTNH)
    (gathered,) = all_gather([_pack(k_BTKH, v_BTKH)[None]], axis, [0])  # [c P Z B C K H]

    def hop(attended: Attended, r: jax.Array) -> tuple[Attended, None]:
        kv_PZBCKH = _take(gathered, (position(axis) - r) % size)
        return _attend_hop(q_ZBCNH, kv_PZBCKH, attended, _is_later(axis, r), kernel), None

    attended, _ = lax.scan(hop, _attend_own(q_BTNH, k_BTKH, v_BTKH, kernel), jnp.arange(1, size))
    return _saved(q_BTNH, k_BTKH, v_BTKH, attended)


def _gather_backward(axis: str, kernel: Kernel, residuals: Residuals, g_BTNH: jax.Array) -> tuple[jax.Array, ...]:
    size = lax.axis_size(axis)
    residuals, g_BTNH = lax.optimization_barrier((residuals, g_BTNH))  # else XLA may keep what arrived in the forward
    (gathered,) = all_gather([_pack(residuals.k, residuals.v)[None]], axis, [0])
    queries = [_chunks(x) for x in (residuals.q, residuals.out, residuals.lse, g_BTNH)]
    dq_ZBCNH, dkv_PZBCKH = _pull_own(residuals, g_BTNH, kernel)

    def hop(carry: Gradients, r: jax.Array) -> tuple[Gradients, None]:
        dq_ZBCNH, to_scatter = carry
        owner = (position(axis) - r) % size
        gradients = dq_ZBCNH, jnp.zeros_like(dkv_PZBCKH)
        dq_ZBCNH, own = _pull_hop(queries, _take(gathered, owner), gradients, _is_later(axis, r), kernel)
        return (dq_ZBCNH, _put(to_scatter, own, owner)), None

    to_scatter = _put(jnp.zeros_like(gathered, jnp.float32), dkv_PZBCKH, position(axis))
    (dq_ZBCNH, to_scatter), _ = lax.scan(hop, (dq_ZBCNH, to_scatter), jnp.arange(1, size))
    (dkv_1PZBCKH,) = reduce_scatter([to_scatter], axis, [0])
    return _unpack(dq_ZBCNH, dkv_1PZBCKH[0], residuals)


gather.defvjp(_gather_forward, _gather_backward)


# A hop: the two blocks that the queries of this device see of the keys of another one.


def _is_later(axis: str, r: jax.Array | int) -> jax.Array:
    """1 if the device r places before this one on the ring comes after it in the order of the axis, else 0."""
    return jnp.where(position(axis) >= r, 0, 1)


def _attend_own(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, kernel: Kernel) -> Attended:
    out_BTNH, lse_BTN = attend(q_BTNH, k_BTKH, v_BTKH, True, kernel)
    return Attended(_chunks(out_BTNH), _chunks(jnp.ones_like(lse_BTN)), _chunks(lse_BTN))


def _attend_hop(
    q_ZBCNH: jax.Array, kv_PZBCKH: jax.Array, attended: Attended, is_later: jax.Array, kernel: Kernel
) -> Attended:
    """attended, with the keys and values of another device merged in.

    Two blocks, as one batch: of queries the chunks is_later and 1 (late), of keys the chunks 0 (early) and is_later.
    """
    k_2BCKH, v_2BCKH = (_two(x_ZBCKH, 0, is_later) for x_ZBCKH in kv_PZBCKH)
    out_2BCNH, lse_2BCN = attend(_two(q_ZBCNH, is_later, 1), k_2BCKH, v_2BCKH, False, kernel)
    blocks = zip((is_later, 1), jnp.split(out_2BCNH, 2), jnp.split(lse_2BCN, 2), strict=True)
    for chunk, out_BCNH, lse_BCN in blocks:  # whole arrays, not slices of them: XLA makes one kernel of it
        lse_ZBCN = _placed(lse_BCN, chunk, -jnp.inf)
        top_ZBCN = jnp.maximum(attended.top, lse_ZBCN)
        old_ZBCN, new_ZBCN = jnp.exp(attended.top - top_ZBCN), jnp.exp(lse_ZBCN - top_ZBCN)
        out_ZBCNH = attended.out * old_ZBCN[..., None] + out_BCNH[None] * new_ZBCN[..., None]
        attended = Attended(out_ZBCNH, attended.total * old_ZBCN + new_ZBCN, top_ZBCN)
    return attended


def _pull_own(residuals: Residuals, g_BTNH: jax.Array, kernel: Kernel) -> Gradients:
    dq_BTNH, dk_BTKH, dv_BTKH = attend_backward(residuals, g_BTNH, True, kernel)
    return _chunks(dq_BTNH), _pack(dk_BTKH, dv_BTKH)


def _pull_hop(
    queries: list[jax.Array], kv_PZBCKH: jax.Array, gradients: Gradients, is_later: jax.Array, kernel: Kernel
) -> Gradients:
    """gradients, with those of the two blocks of `_attend_hop` added. queries: q, out, lse and g, [Z B C N ...]."""
    q, out, lse, g_2BCNH = (_two(x_ZBCN, is_later, 1) for x_ZBCN in queries)
    k, v = (_two(x_ZBCKH, 0, is_later) for x_ZBCKH in kv_PZBCKH)
    dq_2BCNH, dk_2BCKH, dv_2BCKH = attend_backward(Residuals(q, k, v, out, lse), g_2BCNH, False, kernel)
    dq_ZBCNH, dkv_PZBCKH = gradients
    dk_ZBCKH, dv_ZBCKH = dkv_PZBCKH
    dkv_PZBCKH = jnp.stack([_add(dk_ZBCKH, dk_2BCKH, 0, is_later), _add(dv_ZBCKH, dv_2BCKH, 0, is_later)])
    return _add(dq_ZBCNH, dq_2BCNH, is_later, 1), dkv_PZBCKH


def _saved(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, attended: Attended) -> tuple[jax.Array, Residuals]:
    out_ZBCNH = attended.out / attended.total[..., None]
    out_BTNH = checkpoint_name(_tokens(out_ZBCNH).astype(q_BTNH.dtype), OUT)
    lse_BTN = checkpoint_name(_tokens(attended.top + jnp.log(attended.total)), LSE)
    return out_BTNH, Residuals(q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BTN)


def _chunks(x_BT: jax.Array) -> jax.Array:
    """x[B T ...] -> x[Z B C ...]"""
    B, T, *rest = x_BT.shape
    return jnp.moveaxis(x_BT.reshape(B, 2, T // 2, *rest), 1, 0)


def _tokens(x_ZBC: jax.Array) -> jax.Array:
    """x[Z B C ...] -> x[B T ...]"""
    _, B, C, *rest = x_ZBC.shape
    return jnp.moveaxis(x_ZBC, 0, 1).reshape(B, 2 * C, *rest)


def _pack(k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    return jnp.stack([_chunks(k_BTKH), _chunks(v_BTKH)])


def _unpack(dq_ZBCNH: jax.Array, dkv_PZBCKH: jax.Array, residuals: Residuals) -> tuple[jax.Array, ...]:
    """The gradients of q, k and v, in their layouts and dtypes."""
    gradients = dq_ZBCNH, *dkv_PZBCKH
    return tuple(_tokens(g).astype(x.dtype) for g, x in zip(gradients, residuals[:3], strict=True))


def _take(x: jax.Array, index: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, value: jax.Array, index: jax.Array | int) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, value, index, 0)


def _two(x_ZB: jax.Array, first: jax.Array | int, second: jax.Array | int) -> jax.Array:
    """x[Z B ...] -> x[2B ...]: the chunks first and second."""
    return jnp.concatenate([_take(x_ZB, first), _take(x_ZB, second)])


def _add(x_ZB: jax.Array, two_2B: jax.Array, first: jax.Array | int, second: jax.Array | int) -> jax.Array:
    """x[Z B ...] + the transpose of `_two`."""
    one_B, other_B = jnp.split(two_2B, 2)
    return x_ZB + _placed(one_B, first, 0.0) + _placed(other_B, second, 0.0)


def _placed(x_B: jax.Array, chunk: jax.Array | int, fill: float) -> jax.Array:
    """x[B ...] -> x[Z B ...]: x where Z is chunk, else fill."""
    is_chunk = (jnp.arange(2) == chunk).reshape(2, *[1] * x_B.ndim)
    return jnp.where(is_chunk, x_B[None], fill)
