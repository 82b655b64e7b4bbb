"""Choose the next token of each row from its logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MIN_TEMPERATURE = 1e-6  # below: greedy


class Sampling(NamedTuple):
    """How tokens are chosen, in this order, as Hugging Face's `generate` does.

    temperature  0: the most likely token; else logits are divided by it
    top_k        only the k most likely; None: all
    top_p        only the most likely whose probabilities sum to p (nucleus sampling, arXiv 1904.09751)
    min_p        only those at least p times as likely as the most likely (arXiv 2407.01082)
    seed         a row's draw depends on it and on the position in the row alone, not on the other rows
    """

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def choose(logits_BV: jax.Array, sampling: Sampling, positions_B: jax.Array) -> jax.Array:
    """logits[B V], position of each chosen token -> token ids, int32 [B]"""
    if sampling.temperature < MIN_TEMPERATURE:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    V = logits_BV.shape[1]
    top_BK, ids_BK = lax.top_k(logits_BV / sampling.temperature, min(sampling.top_k or V, V))
    top_BK = jnp.where(_is_kept(top_BK, sampling), top_BK, -jnp.inf)
    seed = jax.random.key(sampling.seed)
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(seed, positions_B)
    rank_B = jax.vmap(jax.random.categorical)(keys_B, top_BK)
    return jnp.take_along_axis(ids_BK, rank_B[:, None], axis=1)[:, 0].astype(jnp.int32)


def _is_kept(top_BK: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits in descending order -> which of them top_p and min_p keep, bool [B K]."""
    share_BK = jax.nn.softmax(top_BK, axis=-1)
    before_BK = jnp.cumsum(share_BK, axis=-1) - share_BK
    is_kept_BK = before_BK < sampling.top_p
    if sampling.min_p:
        is_kept_BK &= top_BK >= top_BK[:, :1] + jnp.log(sampling.min_p)
    return is_kept_BK.at[:, 0].set(True)
