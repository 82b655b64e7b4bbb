"""The blocks of ring and gather attention: hops over the keys and values of other devices, and their backward.

context.py has the public functions and the order of tokens. Tokens are in zig-zag order; arguments
vary over all axes that any of them varies over.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.parallel.collectives import all_gather, position, reduce_scatter, shift
from nanotrain_jax.parallel.context.attention_block import Kernel, Residuals, attend, attend_backward
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.remat import BLOCKWISE

Gradients = tuple[jax.Array, jax.Array]  # of q and of kv, float32


class Hop(NamedTuple):
    """The two blocks that a hop computes: (queries, keys) of the chunks (is_later, early) and (late, is_later)."""

    is_later: jax.Array  # 1 if the keys' device comes after that of the queries, else 0; one value, or [B]
    visible: jax.Array | None = None  # [2B C C] the keys in the document of a query; None: all


class Row(NamedTuple):
    """What attention takes: of the own tokens."""

    q: jax.Array  # [B T N H]
    k: jax.Array  # [B T K H]
    v: jax.Array  # [B T K H]
    starts: jax.Array | None  # [B T]; None: rows of one document


class Saved(NamedTuple):
    """What the backward needs."""

    residuals: Residuals
    starts: jax.Array | None


class Attended(NamedTuple):
    """Attention over the blocks so far: out / total is the output, top + log(total) the lse; float32.

    Merging the lse itself would round it at every hop.
    """

    out: jax.Array  # [Z B C N H], sum of the blocks' outputs, each times its weight exp(lse - top)
    total: jax.Array  # [Z B C N], sum of the weights
    top: jax.Array  # [Z B C N], largest lse of a block


# Ring: at hop r a device has the keys and values of the device r places before it. Hops 1 to c-2 are a loop, in which
# XLA:GPU overlaps every permute; unrolled, it starts them all first and waits. The last hop is apart: it sends nothing.


def _ring_forward(row: Row, axis: str, kernel: Kernel) -> tuple[jax.Array, Saved]:
    size = lax.axis_size(axis)
    q_ZBCNH = chunks(row.q)
    kv_PZBCKH = shift(pack(row.k, row.v), axis, 1)  # leaves before the own block is computed

    def hop(carry: tuple[jax.Array, Attended], r: jax.Array) -> tuple[tuple[jax.Array, Attended], None]:
        kv_PZBCKH, attended = carry
        arriving = shift(kv_PZBCKH, axis, 1)
        return (arriving, attend_hop(q_ZBCNH, kv_PZBCKH, attended, _hop(axis, r, row.starts), kernel)), None

    carry = kv_PZBCKH, attend_own(row, position(axis), size, kernel)
    (kv_PZBCKH, attended), _ = lax.scan(hop, carry, jnp.arange(1, size - 1))
    attended = attend_hop(q_ZBCNH, kv_PZBCKH, attended, _hop(axis, size - 1, row.starts), kernel)
    return finished(row, attended)


def _ring_backward(axis: str, kernel: Kernel, saved: Saved, g_BTNH: jax.Array) -> tuple[Row]:
    size = lax.axis_size(axis)
    residuals, starts_BT = saved
    residuals, g_BTNH = lax.optimization_barrier((residuals, g_BTNH))  # else XLA may keep what arrived in the forward
    kv_PZBCKH = shift(pack(residuals.k, residuals.v), axis, 1)
    queries = [chunks(x) for x in (residuals.q, residuals.out, residuals.lse, g_BTNH)]

    def hop(carry: tuple, r: jax.Array) -> tuple[tuple, None]:
        kv_PZBCKH, (dq_ZBCNH, dkv_PZBCKH) = carry
        arriving = shift(kv_PZBCKH, axis, 1)
        gradients = dq_ZBCNH, shift(dkv_PZBCKH, axis, 1)  # waits for the hop before only
        return (arriving, pull_hop(queries, kv_PZBCKH, gradients, _hop(axis, r, starts_BT), kernel)), None

    # The barrier keeps the first hop behind the own block, also where no loop follows.
    own = pull_own(Saved(residuals, starts_BT), g_BTNH, position(axis), size, kernel)
    carry = lax.optimization_barrier((kv_PZBCKH, own))
    (kv_PZBCKH, (dq_ZBCNH, dkv_PZBCKH)), _ = lax.scan(hop, carry, jnp.arange(1, size - 1))
    gradients = dq_ZBCNH, shift(dkv_PZBCKH, axis, 1)
    dq_ZBCNH, dkv_PZBCKH = pull_hop(queries, kv_PZBCKH, gradients, _hop(axis, size - 1, starts_BT), kernel)
    return unpack(dq_ZBCNH, shift(dkv_PZBCKH, axis, 1), residuals)


ring = with_backward(_ring_forward, _ring_backward, (1, 2))  # `context.ring_attention`, of checked arguments


# Gather: every device has the keys and values of all devices, in the order of the axis.


def _gather_forward(row: Row, axis: str, kernel: Kernel) -> tuple[jax.Array, Saved]:
    size = lax.axis_size(axis)
    q_ZBCNH = chunks(row.q)
    (gathered,) = all_gather([pack(row.k, row.v)[None]], axis, [0])  # [c P Z B C K H]

    def hop(attended: Attended, r: jax.Array) -> tuple[Attended, None]:
        kv_PZBCKH = _take(gathered, (position(axis) - r) % size)
        return attend_hop(q_ZBCNH, kv_PZBCKH, attended, _hop(axis, r, row.starts), kernel), None

    attended, _ = lax.scan(hop, attend_own(row, position(axis), size, kernel), jnp.arange(1, size))
    return finished(row, attended)


def _gather_backward(axis: str, kernel: Kernel, saved: Saved, g_BTNH: jax.Array) -> tuple[Row]:
    size = lax.axis_size(axis)
    residuals, starts_BT = saved
    residuals, g_BTNH = lax.optimization_barrier((residuals, g_BTNH))  # else XLA may keep what arrived in the forward
    (gathered,) = all_gather([pack(residuals.k, residuals.v)[None]], axis, [0])
    queries = [chunks(x) for x in (residuals.q, residuals.out, residuals.lse, g_BTNH)]
    dq_ZBCNH, dkv_PZBCKH = pull_own(Saved(residuals, starts_BT), g_BTNH, position(axis), size, kernel)

    def hop(carry: Gradients, r: jax.Array) -> tuple[Gradients, None]:
        dq_ZBCNH, to_scatter = carry
        owner = (position(axis) - r) % size
        gradients = dq_ZBCNH, jnp.zeros_like(dkv_PZBCKH)
        dq_ZBCNH, own = pull_hop(queries, _take(gathered, owner), gradients, _hop(axis, r, starts_BT), kernel)
        return (dq_ZBCNH, _put(to_scatter, own, owner)), None

    to_scatter = _put(jnp.zeros_like(gathered, jnp.float32), dkv_PZBCKH, position(axis))
    (dq_ZBCNH, to_scatter), _ = lax.scan(hop, (dq_ZBCNH, to_scatter), jnp.arange(1, size))
    (dkv_1PZBCKH,) = reduce_scatter([to_scatter], axis, [0])
    return unpack(dq_ZBCNH, dkv_1PZBCKH[0], residuals)


gather = with_backward(_gather_forward, _gather_backward, (1, 2))  # `context.gather_attention`, likewise


# A hop: the two blocks that the queries of this device see of the keys of another one.


def _hop(axis: str, r: jax.Array | int, starts_BT: jax.Array | None) -> Hop:
    """The hop to the keys of the device r places before this one on the ring."""
    size = lax.axis_size(axis)
    return hop_between(position(axis), (position(axis) - r) % size, size, starts_BT)


def hop_between(queries: jax.Array, keys: jax.Array, size: int, starts_BT: jax.Array | None) -> Hop:
    """The hop of devices with queries to keys of other devices. queries, keys: indices of devices, one or [B] each."""
    is_later = jnp.where(keys > queries, 1, 0)
    if starts_BT is None:
        return Hop(is_later)
    starts_ZBC = chunks(starts_BT)
    C = starts_ZBC.shape[2]
    of_is_later = _not_before(_take(starts_ZBC, is_later), keys, C)
    of_late = _not_before(starts_ZBC[1], jnp.where(is_later, 2 * size - 1 - keys, keys), C)
    return Hop(is_later, jnp.concatenate([of_is_later, of_late]))


def _own_visible(device: jax.Array, size: int, starts_BT: jax.Array | None) -> jax.Array | None:
    """visible[B T T]: the keys of a device that are not before the document of its query. device: one, or [B]."""
    if starts_BT is None:
        return None
    C = starts_BT.shape[1] // 2
    both = [_not_before(starts_BT, chunk, C) for chunk in (device, 2 * size - 1 - device)]
    return jnp.concatenate(both, axis=2)


def _not_before(starts_BT: jax.Array, chunk: jax.Array, C: int) -> jax.Array:
    """visible[B T C]: the keys of a chunk of the row that are not before the document of a query. chunk: one, or [B]"""
    keys_B1C = jnp.reshape(chunk, (-1, 1, 1)) * C + jnp.arange(C)[None, None]
    return starts_BT[..., None] <= keys_B1C


def attend_own(row: Row, device: jax.Array, size: int, kernel: Kernel) -> Attended:
    """Causal attention over a device's own keys: its two chunks as one block. device: one, or [B]."""
    out_BTNH, lse_BTN = attend(row.q, row.k, row.v, True, kernel, _own_visible(device, size, row.starts))
    return Attended(chunks(out_BTNH), chunks(jnp.ones_like(lse_BTN)), chunks(lse_BTN))


def attend_hop(q_ZBCNH: jax.Array, kv_PZBCKH: jax.Array, attended: Attended, hop: Hop, kernel: Kernel) -> Attended:
    """attended, with the keys and values of another device merged in: two blocks, as one batch."""
    is_later = hop.is_later
    k_2BCKH, v_2BCKH = (_two(x_ZBCKH, 0, is_later) for x_ZBCKH in kv_PZBCKH)
    out_2BCNH, lse_2BCN = attend(_two(q_ZBCNH, is_later, 1), k_2BCKH, v_2BCKH, False, kernel, hop.visible)
    blocks = zip((is_later, 1), jnp.split(out_2BCNH, 2), jnp.split(lse_2BCN, 2), strict=True)
    for chunk, out_BCNH, lse_BCN in blocks:  # whole arrays, not slices of them: XLA makes one kernel of it
        lse_ZBCN = _placed(lse_BCN, chunk, -jnp.inf)
        top_ZBCN = jnp.maximum(attended.top, lse_ZBCN)
        old_ZBCN, new_ZBCN = jnp.exp(attended.top - top_ZBCN), jnp.exp(lse_ZBCN - top_ZBCN)
        out_ZBCNH = attended.out * old_ZBCN[..., None] + out_BCNH[None] * new_ZBCN[..., None]
        attended = Attended(out_ZBCNH, attended.total * old_ZBCN + new_ZBCN, top_ZBCN)
    return attended


def pull_own(saved: Saved, g_BTNH: jax.Array, device: jax.Array, size: int, kernel: Kernel) -> Gradients:
    """The gradients of `attend_own`."""
    visible_BTT = _own_visible(device, size, saved.starts)
    dq_BTNH, dk_BTKH, dv_BTKH = attend_backward(saved.residuals, g_BTNH, True, kernel, visible_BTT)
    return chunks(dq_BTNH), pack(dk_BTKH, dv_BTKH)


def pull_hop(
    queries: list[jax.Array], kv_PZBCKH: jax.Array, gradients: Gradients, hop: Hop, kernel: Kernel
) -> Gradients:
    """gradients, with those of the two blocks of `attend_hop` added. queries: q, out, lse and g, [Z B C N ...]."""
    is_later = hop.is_later
    q, out, lse, g_2BCNH = (_two(x_ZBCN, is_later, 1) for x_ZBCN in queries)
    k, v = (_two(x_ZBCKH, 0, is_later) for x_ZBCKH in kv_PZBCKH)
    dq_2BCNH, dk_2BCKH, dv_2BCKH = attend_backward(Residuals(q, k, v, out, lse), g_2BCNH, False, kernel, hop.visible)
    dq_ZBCNH, dkv_PZBCKH = gradients
    dk_ZBCKH, dv_ZBCKH = dkv_PZBCKH
    dkv_PZBCKH = jnp.stack([_add(dk_ZBCKH, dk_2BCKH, 0, is_later), _add(dv_ZBCKH, dv_2BCKH, 0, is_later)])
    return _add(dq_ZBCNH, dq_2BCNH, is_later, 1), dkv_PZBCKH


def finished(row: Row, attended: Attended, names: tuple[str, str] = BLOCKWISE) -> tuple[jax.Array, Saved]:
    """The output over all keys, and what else the backward needs. names: of output and lse, for remat policies."""
    out_ZBCNH = attended.out / attended.total[..., None]
    lse_BTN = _tokens(attended.top + jnp.log(attended.total))
    out_BTNH = _tokens(out_ZBCNH).astype(row.q.dtype)
    out_BTNH, lse_BTN = map(checkpoint_name, (out_BTNH, lse_BTN), names)
    return out_BTNH, Saved(Residuals(row.q, row.k, row.v, out_BTNH, lse_BTN), row.starts)


def chunks(x_BT: jax.Array) -> jax.Array:
    """x[B T ...] -> x[Z B C ...]"""
    B, T, *rest = x_BT.shape
    return jnp.moveaxis(x_BT.reshape(B, 2, T // 2, *rest), 1, 0)


def _tokens(x_ZBC: jax.Array) -> jax.Array:
    """x[Z B C ...] -> x[B T ...]"""
    _, B, C, *rest = x_ZBC.shape
    return jnp.moveaxis(x_ZBC, 0, 1).reshape(B, 2 * C, *rest)


def pack(k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    """k[B T K H], v[B T K H] -> kv[P Z B C K H]"""
    return jnp.stack([chunks(k_BTKH), chunks(v_BTKH)])


def unpack(dq_ZBCNH: jax.Array, dkv_PZBCKH: jax.Array, residuals: Residuals) -> tuple[Row]:
    """The gradients of a row, in its layouts and dtypes; of starts None."""
    gradients = zip((dq_ZBCNH, *dkv_PZBCKH), residuals[:3], strict=True)
    return (Row(*(_tokens(g).astype(x.dtype) for g, x in gradients), None),)


def _take(x: jax.Array, index: jax.Array | int) -> jax.Array:
    """x[Z B ...] -> x[B ...]: the chunk index, one for all of B or one for each."""
    if jnp.ndim(index):
        return jnp.where(_expanded(index, x.ndim - 1) == 1, x[1], x[0])
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
    is_chunk = jnp.stack([_expanded(chunk, x_B.ndim) == z for z in range(2)])
    return jnp.where(is_chunk, x_B[None], fill)


def _expanded(index: jax.Array | int, ndim: int) -> jax.Array:
    """index[] or [B] -> index[B 1 1 ...], with ndim dims."""
    index = jnp.asarray(index)
    return index.reshape(*index.shape, *[1] * (ndim - index.ndim))
