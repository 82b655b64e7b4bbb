"""Attention of one block of queries over one block of keys, in parts that can be merged.

A row of attention may be computed block by block: each block gives its output, normalized over its own keys, and the
log-sum-exp (lse) of its scores, by which outputs are weighed. The backward of a block needs the output and lse over
*all* keys: P = exp(scores - lse), dS = P (dP - rowsum(dO O)) (FlashAttention-2, arXiv 2307.08691).

B batch, T query tokens, S key tokens, N query heads, K key and value heads, G = N / K, H head dim. Scores are scaled by
1 / sqrt(H); is_causal: query t sees keys 0 to t. visible[B T S]: the keys that a query may see, also with is_causal;
None: all; a query may see none of a block. Nothing here communicates.

    cudnn   flash attention on NVIDIA GPUs, bfloat16 or float16, no scores in memory; of visible a bias, B T S elements
    xla     matmuls in float32 on any device; the scores of the block, B N T S, are in memory

cuDNN has no public call that returns a float32 lse, with a backward that takes the global one
(`jax.nn.dot_product_attention(return_residual=True)` rounds it to bfloat16 and drops its gradient). But the pullback
that `jax.vjp` returns is a pytree, and its leaves are the operands of the backward kernel: lse and output among them.
The forward reads them; the backward replaces them by the global ones. The forward kernel of that pullback is dead code,
which XLA removes.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Kernel = Literal["cudnn", "xla"]


class Residuals(NamedTuple):
    """What the backward of a block needs."""

    q: jax.Array  # [B T N H]
    k: jax.Array  # [B S K H]
    v: jax.Array  # [B S K H]
    out: jax.Array  # [B T N H], over all keys
    lse: jax.Array  # [B T N], over all keys, float32


class Pullback(NamedTuple):
    """`jax.vjp` of cuDNN attention, taken apart."""

    out: jax.Array  # [B T N H]
    leaves: list[jax.Array]
    tree: jax.tree_util.PyTreeDef
    lse_at: int  # index in leaves of lse[B N T], float32
    out_at: int  # and of out


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    is_causal: bool,
    kernel: Kernel,
    visible_BTS: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """q[B T N H], k[B S K H], v[B S K H] -> out[B T N H], lse[B T N], both float32. Moves nothing.

    Of a query that sees no key of the block, out is 0 and lse is -inf.
    """
    if kernel == "cudnn":
        pullback = cudnn_pullback(q_BTNH, k_BSKH, v_BSKH, is_causal, visible_BTS)
        out_BTNH, lse_BTN = pullback.out.astype(jnp.float32), pullback.leaves[pullback.lse_at].transpose(0, 2, 1)
        if visible_BTS is None:
            return out_BTNH, lse_BTN
        sees_BT = visible_BTS.any(-1)  # of no key, the kernel's results are undefined
        return jnp.where(sees_BT[..., None, None], out_BTNH, 0), jnp.where(sees_BT[..., None], lse_BTN, -jnp.inf)
    scores_BKGTS = _scores(q_BTNH, k_BSKH, is_causal, visible_BTS)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    finite_BKGT = jnp.maximum(lse_BKGT, jnp.finfo(jnp.float32).min)  # exp(-inf - -inf) is no weight
    weights_BKGTS = jnp.exp(scores_BKGTS - finite_BKGT[..., None])
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH.astype(jnp.float32))
    return out_BTKGH.reshape(q_BTNH.shape), jnp.moveaxis(lse_BKGT, 3, 1).reshape(q_BTNH.shape[:3])


def attend_backward(
    residuals: Residuals, g_BTNH: jax.Array, is_causal: bool, kernel: Kernel, visible_BTS: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """g[B T N H], the gradient of the whole output -> dq[B T N H], dk[B S K H], dv[B S K H] of this block, float32.

    cuDNN makes them in the dtype of q. Moves nothing.
    """
    if kernel == "cudnn":
        pullback = cudnn_pullback(*residuals[:3], is_causal, visible_BTS)
        leaves = list(pullback.leaves)
        leaves[pullback.lse_at] = residuals.lse.transpose(0, 2, 1)
        leaves[pullback.out_at] = residuals.out
        gradients = jax.tree.unflatten(pullback.tree, leaves)(g_BTNH)
        return tuple(g.astype(jnp.float32) for g in gradients)
    return _xla_backward(residuals, g_BTNH, is_causal, visible_BTS)


def _xla_backward(
    residuals: Residuals, g_BTNH: jax.Array, is_causal: bool, visible_BTS: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_BTNH, k_BSKH, v_BSKH, out_BTNH, g_BTNH = (x.astype(jnp.float32) for x in (*residuals[:4], g_BTNH))
    K = k_BSKH.shape[2]
    q_BTKGH, out_BTKGH, g_BTKGH = (_grouped(x, K) for x in (q_BTNH, out_BTNH, g_BTNH))
    lse_BKGT = jnp.moveaxis(_grouped(residuals.lse, K), 1, 3)
    weights_BKGTS = jnp.exp(_scores(q_BTNH, k_BSKH, is_causal, visible_BTS) - lse_BKGT[..., None])
    correction_BKGT = jnp.einsum("BTKGH,BTKGH->BKGT", g_BTKGH, out_BTKGH)
    dweights_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", g_BTKGH, v_BSKH)
    dscores_BKGTS = weights_BKGTS * (dweights_BKGTS - correction_BKGT[..., None]) / math.sqrt(q_BTNH.shape[3])
    dq_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", dscores_BKGTS, k_BSKH)
    dk_BSKH = jnp.einsum("BKGTS,BTKGH->BSKH", dscores_BKGTS, q_BTKGH)
    dv_BSKH = jnp.einsum("BKGTS,BTKGH->BSKH", weights_BKGTS, g_BTKGH)
    return dq_BTKGH.reshape(q_BTNH.shape), dk_BSKH, dv_BSKH


def _grouped(x_BTN: jax.Array, K: int) -> jax.Array:
    """x[B T N ...] -> x[B T K G ...]"""
    B, T, N, *rest = x_BTN.shape
    return x_BTN.reshape(B, T, K, N // K, *rest)


def _scores(q_BTNH: jax.Array, k_BSKH: jax.Array, is_causal: bool, visible_BTS: jax.Array | None) -> jax.Array:
    """Scaled scores [B K G T S] in float32, -inf where a key is hidden."""
    q_BTKGH = _grouped(q_BTNH.astype(jnp.float32), k_BSKH.shape[2])
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH.astype(jnp.float32)) / math.sqrt(q_BTNH.shape[3])
    if visible_BTS is not None:
        scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    if is_causal:
        causal_TS = np.tri(*scores_BKGTS.shape[-2:], dtype=bool)
        scores_BKGTS = jnp.where(causal_TS[None, None, None], scores_BKGTS, -jnp.inf)
    return scores_BKGTS


def cudnn_pullback(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, is_causal: bool, visible_BTS: jax.Array | None = None
) -> Pullback:
    """The pullback of cuDNN attention, with lse and output located among its leaves. Moves nothing.

    Raises RuntimeError if the leaves are not q, k, v, one float32 lse[B N T], the output, of visible a bias, and
    arrays without elements.
    """

    def run(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        mask_B1TS = None if visible_BTS is None else visible_BTS[:, None]
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKH, mask=mask_B1TS, is_causal=is_causal, implementation="cudnn"
        )

    B, T, N, _ = q_BTNH.shape
    out_BTNH, pull = jax.vjp(run, q_BTNH, k_BSKH, v_BSKH)
    leaves, tree = jax.tree.flatten(pull)
    kinds = ["out" if x is out_BTNH else _kind(x, (B, N, T)) for x in leaves]
    inputs = sorted((x.shape, x.dtype.name) for x, kind in zip(leaves, kinds, strict=True) if kind == "input")
    bias = [] if visible_BTS is None else [((B, 1, *visible_BTS.shape[1:]), q_BTNH.dtype.name)]
    expected = sorted([(x.shape, x.dtype.name) for x in (q_BTNH, k_BSKH, v_BSKH)] + bias)
    if (kinds.count("out"), kinds.count("lse")) != (1, 1) or inputs != expected:
        found = ", ".join(f"{kind} {jax.typeof(x).str_short()}" for x, kind in zip(leaves, kinds, strict=True))
        raise RuntimeError(
            f"jax {jax.__version__}, whose pullback of cuDNN attention holds {found}: must be q, k, v, one float32 "
            "log-sum-exp [B N T] and the output; use kernel='xla', or a jax of 0.10 to 0.12"
        )
    return Pullback(out_BTNH, leaves, tree, kinds.index("lse"), kinds.index("out"))


def _kind(leaf: jax.Array, lse_shape: tuple[int, ...]) -> str:
    """What a leaf of the pullback is, by its type."""
    if leaf.shape == lse_shape and leaf.dtype == jnp.float32:
        return "lse"
    return "input" if leaf.size else "empty"
