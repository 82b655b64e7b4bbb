"""Attention of rows that hold several documents, each to itself, on one device: memory O(T) with flash attention.

To a flash kernel a mask is a bias, an array of T x T. Here the row is cut in chunks of C tokens, and attention computed
block by block as `context.ring_attention` computes it over devices: c = T / 2C parts of the row take the place of the
devices, as rows of one batch, and keys and values move from row to row. Masks exist for the blocks computed at once,
at most 2 B T C elements. FLOPs are those of causal attention over the whole row.

Names: as in context.py, and R = B c rows of 2C tokens. Nothing here communicates.
"""

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.context import context_blocks as blocks
from nanotrain_jax.parallel.context.attention_block import Kernel
from nanotrain_jax.parallel.context.context_blocks import Attended, Gradients, Hop, Row, Saved, chunks
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.remat import PACKED

CHUNK = 1024  # tokens of a chunk, at most


def packed_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, starts_BT: jax.Array, kernel: Kernel, chunk: int = CHUNK
) -> jax.Array:
    """q[B T N H], k[B T K H], v[B T K H] -> y[B T N H]: causal attention of each document to itself.

    starts[B T]: position in the row of the first token of a token's document. chunk: tokens of a chunk, at most. Moves
    nothing. No forward mode, no second derivative. Raises ValueError for an odd T.
    """
    B, T = q_BTNH.shape[:2]
    if T % 2:
        raise ValueError(f"rows of {T} tokens: attention within documents cuts them in two; use an even number")
    size = num_parts(T, chunk)
    parts = Row(*(_parts(x, size) for x in (q_BTNH, k_BTKH, v_BTKH, starts_BT)))
    y_RTNH = with_backward(_forward, _backward, (1, 2))(parts, size, kernel)
    early_BcCNH, late_BcCNH = jnp.split(y_RTNH.reshape(B, size, -1, *y_RTNH.shape[2:]), 2, axis=2)
    return jnp.stack([early_BcCNH, late_BcCNH[:, ::-1]], axis=1).reshape(q_BTNH.shape)


def num_parts(tokens: int, chunk: int = CHUNK) -> int:
    """Return c for rows of an even number of tokens: the fewest equal parts of at most two chunks."""
    return next(size for size in range(1, tokens) if tokens % (2 * size) == 0 and 2 * size * chunk >= tokens)


def _forward(row: Row, size: int, kernel: Kernel) -> tuple[jax.Array, Saved]:
    """Attention of rows that are parts of longer ones: row r holds the chunks r % c and 2c-1 - r % c."""
    q_ZRCNH = chunks(row.q)

    def body(carry: tuple[jax.Array, Attended], r: jax.Array) -> tuple[tuple[jax.Array, Attended], None]:
        kv_PZRCKH, attended = carry
        kv_PZRCKH = _next(kv_PZRCKH, size)
        return (kv_PZRCKH, blocks.attend_hop(q_ZRCNH, kv_PZRCKH, attended, _hop(r, size, row.starts), kernel)), None

    own = blocks.attend_own(row, _part(size, row.starts), size, kernel)
    (_, attended), _ = lax.scan(body, (blocks.pack(row.k, row.v), own), jnp.arange(1, size))
    return blocks.finished(row, attended, PACKED)


def _backward(size: int, kernel: Kernel, saved: Saved, g_RTNH: jax.Array) -> tuple[Row]:
    residuals, starts_RT = saved
    queries = [chunks(x) for x in (residuals.q, residuals.out, residuals.lse, g_RTNH)]

    def body(carry: tuple[jax.Array, Gradients], r: jax.Array) -> tuple[tuple[jax.Array, Gradients], None]:
        kv_PZRCKH, (dq_ZRCNH, dkv_PZRCKH) = carry
        kv_PZRCKH, dkv_PZRCKH = _next(kv_PZRCKH, size), _next(dkv_PZRCKH, size)
        hop = _hop(r, size, starts_RT)
        return (kv_PZRCKH, blocks.pull_hop(queries, kv_PZRCKH, (dq_ZRCNH, dkv_PZRCKH), hop, kernel)), None

    own = blocks.pull_own(saved, g_RTNH, _part(size, starts_RT), size, kernel)
    carry = blocks.pack(residuals.k, residuals.v), own
    (_, (dq_ZRCNH, dkv_PZRCKH)), _ = lax.scan(body, carry, jnp.arange(1, size))
    return blocks.unpack(dq_ZRCNH, _next(dkv_PZRCKH, size), residuals)


def _parts(x_BT: jax.Array, size: int) -> jax.Array:
    """x[B T ...] -> x[R 2C ...]: each row has its early chunk, then its late one."""
    B, T, *rest = x_BT.shape
    x_BZcC = x_BT.reshape(B, 2, size, T // (2 * size), *rest)
    parts_BcC = jnp.concatenate([x_BZcC[:, 0], x_BZcC[:, 1, ::-1]], axis=2)
    return parts_BcC.reshape(B * size, -1, *rest)


def _next(x_PZR: jax.Array, size: int) -> jax.Array:
    """x[P Z R ...] with each row's values in the next row of its sequence, the last one's in the first."""
    P, Z, R, *rest = x_PZR.shape
    return jnp.roll(x_PZR.reshape(P, Z, R // size, size, *rest), 1, axis=3).reshape(x_PZR.shape)


def _part(size: int, starts_RT: jax.Array) -> jax.Array:
    """The part of the sequence that each row holds, int32 [R]."""
    return jnp.arange(len(starts_RT)) % size


def _hop(r: jax.Array, size: int, starts_RT: jax.Array) -> Hop:
    queries_R = _part(size, starts_RT)
    return blocks.hop_between(queries_R, (queries_R - r) % size, size, starts_RT)
