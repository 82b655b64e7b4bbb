"""cuDNN attention for tests without a GPU: the public call, whose pullback holds the same arrays."""

from functools import partial

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel.context import attention_block


def use(monkeypatch):
    """Have `jax.nn.dot_product_attention` imitate cuDNN."""

    def attention(q, k, v, mask, is_causal, implementation):
        assert implementation == "cudnn"
        return imitated(q, k, v, None if mask is None else jnp.where(mask, 0.0, -1.0), is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def imitated(q, k, v, bias, is_causal):
    """Attention; its pullback holds what cuDNN's does: q, k, v, lse[B N T], the output, the bias of a mask."""
    return imitated_forward(q, k, v, bias, is_causal)[0]


def imitated_forward(q, k, v, bias, is_causal):
    out, lse = attention_block.attend(q, k, v, is_causal, "xla", None if bias is None else bias[:, 0] == 0)
    undefined = jnp.isinf(lse)  # where a query sees no key
    out, lse = jnp.where(undefined[..., None], jnp.nan, out), jnp.where(undefined, jnp.nan, lse)
    return out, (q, k, v, bias, lse.transpose(0, 2, 1), out)


def imitated_backward(is_causal, kept, g):
    q, k, v, bias, lse, out = kept
    residuals = attention_block.Residuals(q, k, v, out, lse.transpose(0, 2, 1))
    visible = None if bias is None else bias[:, 0] == 0
    return *attention_block.attend_backward(residuals, g, is_causal, "xla", visible), None


imitated.defvjp(imitated_forward, imitated_backward)
