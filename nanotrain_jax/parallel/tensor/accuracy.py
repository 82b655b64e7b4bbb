"""Accuracy over a vocabulary that mesh axes may split. A pure function for use inside any `shard_map`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel.collectives import all_max, position


def correct(
    x_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    axes: Sequence[str] = (),
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """x[B T D], head[V/axes D], targets[B T] -> number of targets whose token has the largest logit, int32 scalar

    Of equal logits the first token counts. Targets below 0 are ignored, as are rows of head from vocab_size on. For
    each chunk of tokens (None: all at once) its logits [c V/axes] exist, in float32, and two all-reduces over axes move

        top[c] = all_max(max l), token[c] = -all_max(-first row with l = top)      4 (t-1)/t c scalars

    axes: mesh axes that split the vocabulary, the last of them innermost; (): none. No gradient. Raises ValueError if
    chunk does not divide B T.
    """
    tokens = targets_BT.size
    if tokens % (chunk or tokens):
        raise ValueError(f"chunk={chunk} does not divide the {tokens} tokens of a device; use a divisor of {tokens}")
    V = head_VD.shape[0]
    row_V = jnp.arange(V, dtype=jnp.int32) + (position(tuple(axes)) * V if axes else 0)

    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_cD, targets_c = chunk
        logits_cV = jnp.einsum("cD,VD->cV", x_cD, head_VD, preferred_element_type=jnp.float32)
        if vocab_size is not None:
            logits_cV = jnp.where(row_V[None] < vocab_size, logits_cV, -jnp.inf)
        top_c = all_max(logits_cV.max(-1), axes)
        none = jnp.iinfo(jnp.int32).max
        first_c = jnp.where(logits_cV == top_c[:, None], row_V[None], none).min(-1)
        token_c = -all_max(-first_c, axes)
        return ((token_c == targets_c) & (targets_c >= 0)).sum(dtype=jnp.int32)

    size = chunk or tokens
    return jax.lax.map(of_chunk, (x_BTD.reshape(-1, size, x_BTD.shape[-1]), targets_BT.reshape(-1, size))).sum()
