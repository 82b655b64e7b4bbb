"""Context parallelism: causal attention over tokens that are split over one mesh axis.

Pure functions for use inside anybody's `shard_map` (with check_vma=True). B batch, T tokens, N query heads,
K key and value heads, H head dim; c devices along the axis, here called context; e bytes of an element of k and v.

    ring_attention      keys and values travel around a ring, behind the attention (Ring Attention, arXiv 2310.01889)
    gather_attention    the same blocks, over keys and values that are gathered first (Llama 3, arXiv 2407.21783)
    ulysses_attention   tokens are exchanged for heads (DeepSpeed-Ulysses, arXiv 2309.14509)

ring and gather want tokens in zig-zag order: the row is cut in 2c chunks, and device i holds chunks i (its early chunk)
and 2c-1-i (its late chunk). Reorder tokens, targets and positions once, on the host: x[:, zigzag_order(T, c)]. Then all
devices have the same work. A device's own keys need one causal block of 2C tokens, C tokens to a chunk. The keys of
another device j need exactly two blocks of C x C, without a mask:

    j < i   both chunks of queries see all of the early chunk of j, and nothing of the late one
    j > i   the late chunk of queries sees both chunks of j, the early one sees nothing

so a hop is one call on a batch of two blocks, the same program on every device. parallel/attention_block.py computes a
block; blocks are merged by their log-sum-exp (lse) in float32.

In suffixes, P is the pair of key and value, Z the two chunks of a device, early and late, and C the tokens of a chunk.

kernel computes a block: "cudnn", flash attention on NVIDIA GPUs (16-bit, memory O(T)); or "xla", matmuls in float32 on
any device, which hold the scores of a block in memory. axis=None stands for one device: no `shard_map` is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.parallel.attention_block import Kernel, Residuals, attend, attend_backward
from nanotrain_jax.parallel.collectives import (
    all_gather,
    all_to_all,
    as_varying,
    position,
    reduce_scatter,
    shift,
    varying_axes,
)

Gradients = tuple[jax.Array, jax.Array]  # of q and of kv, float32

# Names for remat policies, of ring and gather. A layer that saves both does not communicate again to recompute them.
SAVED = ("context_out", "context_lse")


class Attended(NamedTuple):
    """Attention over the blocks so far: out / total is the output, top + log(total) the lse; float32.

    Merging the lse itself would round it at every hop.
    """

    out: jax.Array  # [Z B C N H], sum of the blocks' outputs, each times its weight exp(lse - top)
    total: jax.Array  # [Z B C N], sum of the weights
    top: jax.Array  # [Z B C N], largest lse of a block


def zigzag_order(tokens: int, size: int) -> np.ndarray:
    """Positions in the row of the tokens in zig-zag order, int32 [T]: x[:, order] is what to split over size devices.

    These are also the positions that rotary or learned positions take. Raises ValueError if 2 size does not divide T.
    """
    _check_chunks("context", tokens, size)
    chunks = np.arange(tokens, dtype=np.int32).reshape(2 * size, -1)
    return np.concatenate([chunks[i] for device in range(size) for i in (device, 2 * size - 1 - device)])


def zigzag_inverse(tokens: int, size: int) -> np.ndarray:
    """The inverse of `zigzag_order`, int32 [T]: x[:, order][:, inverse] is x. Raises ValueError as that does."""
    return np.argsort(zigzag_order(tokens, size)).astype(np.int32)


def ring_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str | None = "context", kernel: Kernel = "xla"
) -> jax.Array:
    """q[B T/context N H], k[B T/context K H], v[B T/context K H] -> y[B T/context N H], tokens in zig-zag order.

    Causal attention; keys and values travel around the ring as one array, each hop during the attention before it.

        own block                                            moves nothing
        for r in 1 .. c-1: kv = shift(kv), two blocks        2 (c-1) e B T/c K H bytes
    Backward: kv again, and their float32 gradients, which travel with them and once more, home:
        2 (c-1) e B T/c K H + 8 c B T/c K H bytes
    All but the last hop home can hide behind attention; on GPUs that needs
    xla_gpu_experimental_parallel_collective_overlap_limit >= 2. Memory O(T/c). No forward mode, no second derivative.
    Raises ValueError if 2c does not divide T.
    """
    return _blockwise(_ring, q_BTNH, k_BTKH, v_BTKH, axis, kernel)


def gather_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str | None = "context", kernel: Kernel = "xla"
) -> jax.Array:
    """q[B T/context N H], k[B T/context K H], v[B T/context K H] -> y[B T/context N H], tokens in zig-zag order.

    Causal attention; no permutes, so it may stand in a branch that only some devices take (all along the axis must).

        kv[2 B T K H] = all_gather(kv)                       2 (c-1) e B T/c K H bytes; behind the own block
        c-1 times two blocks                                 moves nothing
    Backward: the all-gather again, and a reduce-scatter of float32 gradients:
        2 (c-1) e B T/c K H + 8 (c-1) B T/c K H bytes
    Memory: the keys and values of all T tokens, in the backward also their float32 gradients. No forward mode, no
    second derivative. Raises ValueError if 2c does not divide T.
    """
    return _blockwise(_gather, q_BTNH, k_BTKH, v_BTKH, axis, kernel)


def ulysses_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str | None = "context", kernel: Kernel = "xla"
) -> jax.Array:
    """q[B T/context N H], k[B T/context K H], v[B T/context K H] -> y[B T/context N H], tokens in their natural order.

        q[B T N/context H], kv[2 B T K/context H] = all_to_all(q), all_to_all(kv)
        y[B T N/context H] = causal attention of the own heads over all tokens                  moves nothing
        y[B T/context N H] = all_to_all(y)
    Together 2 (c-1)/c e B T/c (N + K) H bytes, and as many in the backward; none of it hides behind attention. Where
    there are fewer key heads than devices each travels to the c / K devices that need it: K counts as c. Fewer bytes
    than the ring's forward if c > 1 + N / K, for c <= K. Raises ValueError if c does not divide N, or neither of c and
    K divides the other.
    """
    size = _check(q_BTNH, k_BTKH, v_BTKH, axis, kernel)
    if size == 1:
        return _one_device(q_BTNH, k_BTKH, v_BTKH, kernel)
    N, K = q_BTNH.shape[2], k_BTKH.shape[2]
    if N % size or (K % size and size % K):
        raise ValueError(
            f"{axis}={size} devices for {N} query and {K} key heads: must divide the query heads, and divide the key "
            "heads or be a multiple of them; use fewer devices, or ring_attention"
        )
    q_BTNH, k_BTKH, v_BTKH = _aligned(axis, q_BTNH, k_BTKH, v_BTKH)
    kv_PBTKH = jnp.repeat(jnp.stack([k_BTKH, v_BTKH]), max(1, size // K), axis=3)
    q_BTNH = all_to_all(q_BTNH, axis, split=2, concatenate=1)
    k_BTKH, v_BTKH = all_to_all(kv_PBTKH, axis, split=3, concatenate=2)
    return all_to_all(_one_device(q_BTNH, k_BTKH, v_BTKH, kernel), axis, split=1, concatenate=2)


def _blockwise(
    attention: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    axis: str | None,
    kernel: Kernel,
) -> jax.Array:
    """attention in blocks, of arguments that are checked and aligned."""
    size = _check(q_BTNH, k_BTKH, v_BTKH, axis, kernel)
    if size == 1:
        return _one_device(q_BTNH, k_BTKH, v_BTKH, kernel)
    _check_chunks(axis, q_BTNH.shape[1] * size, size)
    return attention(*_aligned(axis, q_BTNH, k_BTKH, v_BTKH), axis, kernel)


def _check(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str | None, kernel: Kernel) -> int:
    """The number of devices along axis. Raises ValueError for an unknown kernel or arrays that do not fit together."""
    if kernel not in ("cudnn", "xla"):
        raise ValueError(f"kernel={kernel!r}: must be cudnn or xla; use cudnn on NVIDIA GPUs, xla elsewhere")
    is_rank_4 = q_BTNH.ndim == k_BTKH.ndim == v_BTKH.ndim == 4
    fits = is_rank_4 and k_BTKH.shape == v_BTKH.shape == (*q_BTNH.shape[:2], k_BTKH.shape[2], q_BTNH.shape[3])
    is_one_dtype = q_BTNH.dtype == k_BTKH.dtype == v_BTKH.dtype
    if not (fits and is_one_dtype and q_BTNH.shape[2] % k_BTKH.shape[2] == 0):
        q, k, v = (jax.typeof(x).str_short() for x in (q_BTNH, k_BTKH, v_BTKH))
        raise ValueError(
            f"q {q}, k {k}, v {v}: must be [B T N H] and twice [B T K H] of one dtype, K dividing N; "
            "pass the local block of each"
        )
    return 1 if axis is None else lax.axis_size(axis)


def _check_chunks(axis: str, tokens: int, size: int) -> None:
    if tokens % (2 * size):
        nearest = -(-tokens // (2 * size)) * 2 * size
        raise ValueError(
            f"{axis}={size} with rows of {tokens} tokens: zig-zag order needs a multiple of {2 * size}, two chunks "
            f"for each device; use {nearest} tokens, or ulysses_attention"
        )


def _aligned(axis: str, *arrays: jax.Array) -> list[jax.Array]:
    """arrays, each declared varying over axis and wherever another one varies: a custom_vjp does not sum gradients."""
    return as_varying(list(arrays), sorted(frozenset({axis}).union(*map(varying_axes, arrays))))


def _one_device(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, kernel: Kernel) -> jax.Array:
    """Causal attention over all tokens of a row. Moves nothing."""
    dtype = q_BTNH.dtype
    if kernel == "xla":
        q_BTNH, k_BSKH, v_BSKH = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    y_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation=kernel)
    return y_BTNH.astype(dtype)


# Ring: at hop r a device has the keys and values of the device r places before it. Hops 1 to c-2 are a loop, in which
# XLA:GPU overlaps every permute; unrolled, it starts them all first and waits. The last hop is apart: it sends nothing.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ring(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str, kernel: Kernel) -> jax.Array:
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


_ring.defvjp(_ring_forward, _ring_backward)


# Gather: every device has the keys and values of all devices, in the order of the axis.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gather(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, axis: str, kernel: Kernel) -> jax.Array:
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


_gather.defvjp(_gather_forward, _gather_backward)


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
    out_BTNH = checkpoint_name(_tokens(out_ZBCNH).astype(q_BTNH.dtype), SAVED[0])
    lse_BTN = checkpoint_name(_tokens(attended.top + jnp.log(attended.total)), SAVED[1])
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
