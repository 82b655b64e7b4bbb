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

so a hop is one call on a batch of two blocks, the same program on every device. attention_block.py computes a block;
blocks are merged by their log-sum-exp (lse) in float32.

Rows of several documents: with starts[B T], the position in the row of the first token of each token's document,
attention does not leave a document. A window is such starts too (`starts_of_window`). starts are of the whole row, in
its natural order, the same along axis: nothing more is communicated. Each block takes a mask, to "cudnn" a bias of its
size; one device and ulysses compute in blocks then (packed_attention.py). Barriers tie starts to the queries: JAX moves
what depends on loop constants alone out of a loop over layers, here the masks of all blocks at once.

In suffixes, P is the pair of key and value, Z the two chunks of a device, early and late, and C the tokens of a chunk.

kernel computes a block: "cudnn", flash attention on NVIDIA GPUs (16-bit, memory O(T)); or "xla", matmuls in float32 on
any device, which hold the scores of a block in memory. axis=None stands for one device: no `shard_map` is needed.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.parallel.collectives import all_to_all, as_varying, position, varying_axes
from nanotrain_jax.parallel.context.attention_block import Kernel
from nanotrain_jax.parallel.context.context_blocks import Row, gather, ring
from nanotrain_jax.parallel.context.packed_attention import packed_attention
from nanotrain_jax.parallel.remat import ULYSSES

Kind = Literal["ring", "gather", "ulysses"]
ZIGZAG = ("ring", "gather")  # kinds of attention that take tokens in zig-zag order


def zigzag_order(tokens: int, size: int) -> np.ndarray:
    """Positions in the row of the tokens in zig-zag order, int32 [T]: x[:, order] is what to split over size devices.

    These are also the positions that rotary or learned positions take. Raises ValueError if 2 size does not divide T.
    """
    _check_chunks("context", tokens, size)
    chunks = np.arange(tokens, dtype=np.int32).reshape(2 * size, -1)
    return np.concatenate([chunks[i] for device in range(size) for i in (device, 2 * size - 1 - device)])


def own_positions(tokens: int, axis: str | None = "context", is_zigzag: bool = True) -> jax.Array:
    """Positions in the row of this device's tokens, int32 [T/context]. tokens: T/context. Moves nothing."""
    if axis is None:
        return jnp.arange(tokens)
    device, size = position(axis), lax.axis_size(axis)
    if not is_zigzag:
        return device * tokens + jnp.arange(tokens)
    chunk = tokens // 2
    starts = jnp.stack([device, 2 * size - 1 - device]) * chunk
    return (starts[:, None] + jnp.arange(chunk)[None]).reshape(-1)


def starts_of_window(window: int, shape: tuple[int, int], starts_BT: jax.Array | None = None) -> jax.Array:
    """Return starts[B T] with which attention sees `window` tokens at most, a token itself and those before it.

    shape: [B T] of whole rows. starts: of documents, which attention does not leave either. Moves nothing.
    """
    first_T = jnp.arange(shape[1]) - (window - 1)
    first_BT = jnp.broadcast_to(jnp.maximum(first_T, 0)[None], shape)
    return first_BT if starts_BT is None else jnp.maximum(first_BT, starts_BT)


def ring_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    axis: str | None = "context",
    kernel: Kernel = "xla",
    starts_BT: jax.Array | None = None,
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
    return _blockwise(ring, (q_BTNH, k_BTKH, v_BTKH), axis, kernel, starts_BT)


def gather_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    axis: str | None = "context",
    kernel: Kernel = "xla",
    starts_BT: jax.Array | None = None,
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
    return _blockwise(gather, (q_BTNH, k_BTKH, v_BTKH), axis, kernel, starts_BT)


def ulysses_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    axis: str | None = "context",
    kernel: Kernel = "xla",
    starts_BT: jax.Array | None = None,
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
        return one_device(q_BTNH, k_BTKH, v_BTKH, kernel, starts_BT)
    N, K = q_BTNH.shape[2], k_BTKH.shape[2]
    if N % size or (K % size and size % K):
        raise ValueError(
            f"{axis}={size} devices for {N} query and {K} key heads: must divide the query heads, and divide the key "
            "heads or be a multiple of them; use fewer devices, or ring_attention"
        )
    q_BTNH, k_BTKH, v_BTKH = _aligned((axis,), q_BTNH, k_BTKH, v_BTKH)
    kv_PBTKH = jnp.repeat(jnp.stack([k_BTKH, v_BTKH]), max(1, size // K), axis=3)
    q_BTNH = checkpoint_name(all_to_all(q_BTNH, axis, split=2, concatenate=1), ULYSSES[0])
    k_BTKH, v_BTKH = checkpoint_name(all_to_all(kv_PBTKH, axis, split=3, concatenate=2), ULYSSES[1])
    y_BTNH = one_device(q_BTNH, k_BTKH, v_BTKH, kernel, starts_BT)
    return checkpoint_name(all_to_all(y_BTNH, axis, split=1, concatenate=2), ULYSSES[2])


ATTENTION = {"ring": ring_attention, "gather": gather_attention, "ulysses": ulysses_attention}


def _blockwise(
    attention: Callable[..., jax.Array],
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    axis: str | None,
    kernel: Kernel,
    starts_BT: jax.Array | None,
) -> jax.Array:
    """attention in blocks, of arguments that are checked and aligned."""
    size = _check(*qkv, axis, kernel)
    if size == 1:
        return one_device(*qkv, kernel, starts_BT)
    tokens = qkv[0].shape[1]
    _check_chunks(axis, tokens * size, size)
    q_BTNH, *kv = _aligned((axis,), *qkv)
    if starts_BT is not None:
        q_BTNH, starts_BT = lax.optimization_barrier((q_BTNH, starts_BT[:, own_positions(tokens, axis)]))
    return attention(Row(q_BTNH, *kv, starts_BT), axis, kernel)


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


def _aligned(axes: tuple[str, ...], *arrays: jax.Array) -> list[jax.Array]:
    """arrays, each declared varying over axes and wherever another one varies: a custom_vjp does not sum gradients."""
    return as_varying(list(arrays), sorted(frozenset(axes).union(*map(varying_axes, arrays))))


def one_device(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, kernel: Kernel, starts_BT: jax.Array | None = None
) -> jax.Array:
    """q[B T N H], k[B T K H], v[B T K H] -> y[B T N H]: causal attention over all tokens of a row. Moves nothing."""
    dtype, mask_B1TT = q_BTNH.dtype, None
    if starts_BT is not None:
        if kernel == "cudnn":
            q_BTNH, *kv = _aligned((), q_BTNH, k_BSKH, v_BSKH)
            q_BTNH, starts_BT = lax.optimization_barrier((q_BTNH, starts_BT))
            return packed_attention(q_BTNH, *kv, starts_BT, kernel)
        mask_B1TT = starts_BT[:, None, :, None] <= jnp.arange(starts_BT.shape[1])[None, None, None]
    if kernel == "xla":
        q_BTNH, k_BSKH, v_BSKH = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    y_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask=mask_B1TT, is_causal=True, implementation=kernel)
    return y_BTNH.astype(dtype)
