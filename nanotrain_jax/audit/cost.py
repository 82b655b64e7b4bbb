"""Closed forms: what a model must compute, with sources."""

from __future__ import annotations

from nanotrain_jax.config import Model


def parameters(model: Model) -> int:
    """Number of parameters of a resolved model (tied embeddings counted once)."""
    D, F, V, L = model.d_model, model.d_ff, model.vocab_size, model.num_layers
    K = D // model.num_heads * model.num_kv_heads  # width of keys, and of values
    if model.family == "llama":
        layer = 2 * D * D + 2 * D * K + 3 * D * F + 2 * D
        rest = V * D + D
    else:
        layer = 2 * D * D + 2 * D * K + 2 * D * F + (2 * D + 2 * K + F + D) + 4 * D
        rest = V * D + model.max_seq_len * D + 2 * D
    return L * layer + rest + (0 if model.tie_embeddings else V * D)


def matmul_parameters(model: Model) -> int:
    """Parameters that multiply every token: with the output head, without look-ups, biases and norms."""
    D, F, V, L = model.d_model, model.d_ff, model.vocab_size, model.num_layers
    K = D // model.num_heads * model.num_kv_heads
    return L * (2 * D * D + 2 * D * K + (3 if model.family == "llama" else 2) * D * F) + V * D


def flops_per_token(model: Model, seq_len: int) -> dict[str, float]:
    """FLOPs of forward and backward per token, N = matmul parameters, L layers, d model width, T sequence length.

    full    6 N + 12 L d T   attention counted in full (PaLM, arXiv 2204.02311, appendix B; what most published MFU use)
    causal  6 N +  6 L d T   only the half of attention that a causal mask leaves
    Recomputation is not counted.
    """
    N, attention = matmul_parameters(model), model.num_layers * model.d_model * seq_len
    return {"full": 6.0 * N + 12.0 * attention, "causal": 6.0 * N + 6.0 * attention}
