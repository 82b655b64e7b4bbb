"""Closed forms: what a run must compute, move and store, with sources. Takes resolved configs.

Psi is the number of parameters, N the devices along `data`, R those along `replica`, M the microbatches. Vectors that
ZeRO leaves whole (norm gains and biases under parallel.persist_below) count as that: stored by all, all-reduced.
"""

from __future__ import annotations

from typing import Any

from nanotrain_jax.config import Config, Model

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameters(model: Model) -> int:
    """Number of parameters (tied embeddings counted once)."""
    return layer_parameters(model) + end_parameters(model)


def layer_parameters(model: Model) -> int:
    """Parameters of all layers together."""
    D, F, K = model.d_model, model.d_ff, _kv_width(model)
    if model.family == "llama":
        layer = 2 * D * D + 2 * D * K + 3 * D * F + 2 * D
    else:
        layer = 2 * D * D + 2 * D * K + 2 * D * F + (2 * D + 2 * K + F + D) + 4 * D
    return model.num_layers * layer


def end_parameters(model: Model) -> int:
    """Parameters before and after the layers: embedding, positions, last norm, head."""
    V, D = model.vocab_size, model.d_model
    ends = V * D + (D if model.family == "llama" else model.max_seq_len * D + 2 * D)
    return ends + (0 if model.tie_embeddings else V * D)


def whole_parameters(config: Config) -> tuple[int, int]:
    """Parameters that no device holds less than all of (in layers, in ends), from ZeRO stage 1."""
    m, few = config.model, config.parallel.persist_below
    D, F, K = m.d_model, m.d_ff, _kv_width(m)
    layer, ends = ([D, D], [D]) if m.family == "llama" else ([D] * 4 + [D, K, K, D, F, D], [D, D])
    return m.num_layers * sum(n for n in layer if n < few), sum(n for n in ends if n < few)


def _kv_width(model: Model) -> int:
    return model.d_model // model.num_heads * model.num_kv_heads


def matmul_parameters(model: Model) -> int:
    """Parameters that multiply every token: with the output head, without look-ups, biases and norms."""
    D, F, V, L = model.d_model, model.d_ff, model.vocab_size, model.num_layers
    K = _kv_width(model)
    return L * (2 * D * D + 2 * D * K + (3 if model.family == "llama" else 2) * D * F) + V * D


def flops_per_token(model: Model, seq_len: int) -> dict[str, float]:
    """FLOPs of forward and backward per token, N = matmul parameters, L layers, d model width, T sequence length.

    full    6 N + 12 L d T   attention counted in full (PaLM, arXiv 2204.02311, appendix B; what most published MFU use)
    causal  6 N +  6 L d T   only the half of attention that a causal mask leaves
    Recomputation is not counted.
    """
    N, attention = matmul_parameters(model), model.num_layers * model.d_model * seq_len
    return {"full": 6.0 * N + 12.0 * attention, "causal": 6.0 * N + 6.0 * attention}


def step_flops(config: Config) -> float:
    """Matmul FLOPs that one device executes in one step, attention counted in full, recomputation included.

    Per token, besides 6 N + 12 L d T:
        selective   4 L d T                          attention's forward again
        full        2 N_layers + 4 L d T - 2 L d F   the forward again, but for the last matmul
        block:n     2 N_layers + 4 L d T             the whole forward again
    """
    m, T, remat = config.model, config.data.seq_len, config.memory.remat
    attention = 4.0 * m.num_layers * m.d_model * T
    layers = 2.0 * (matmul_parameters(m) - m.vocab_size * m.d_model)
    last = 2.0 * m.num_layers * m.d_model * m.d_ff
    again = {"none": 0.0, "selective": attention, "full": layers + attention - last}.get(remat, layers + attention)
    return (flops_per_token(m, T)["full"] + again) * _tokens_per_device(config)


def communication(config: Config) -> list[dict[str, Any]]:
    """Wire bytes per device and step, by mesh axis and operation (ring; see audit/hlo.py), and why.

    ZeRO (arXiv 1910.02054, section 7), with gradients in precision.grad_reduce (g bytes) and weights in
    precision.compute (w bytes):
        stage 0   all-reduce               2 g Psi        over replica and data
        stage 1   reduce-scatter             g Psi        all-gather         w Psi
        stage 2   reduce-scatter           M g Psi        all-gather         w Psi
        stage 3   reduce-scatter           M g Psi        all-gather       M w (2 Psi_layers + Psi_ends)
    each times (N-1)/N; block:n gathers layers once more, to compute a block again. From stage 1, shards are
    all-reduced over replica: 2 (R-1)/R g Psi / N.
    """
    p, m = config.parallel, config.model
    psi, layers, ends = parameters(m), layer_parameters(m), end_parameters(m)
    g, w = BYTES[config.precision.grad_reduce], BYTES[config.precision.compute]
    devices, axes = p.replica * p.data, ",".join(axis for axis in ("replica", "data") if getattr(p, axis) > 1)
    everywhere = lambda count: (axes, "all_reduce", 2 * (devices - 1) / devices * g * count, "gradients")
    if p.zero == 0 or p.data == 1:
        rows = [everywhere(psi)]
    else:
        whole_layers, whole_ends = whole_parameters(config)
        psi, layers, ends = psi - whole_layers - whole_ends, layers - whole_layers, ends - whole_ends
        times = p.microbatches if p.zero > 1 else 1
        passes = 3 if config.memory.remat.startswith("block:") else 2
        share = (p.data - 1) / p.data
        gathered = p.microbatches * (passes * layers + ends) if p.zero == 3 else psi
        why = "weights of each layer, forward and backward" if p.zero == 3 else "updated weights"
        rows = [
            ("data", "reduce_scatter", times * share * g * psi, "gradients"),
            ("data", "all_gather", share * w * gathered, why),
            ("replica", "all_reduce", 2 * (p.replica - 1) / p.replica * g * psi / p.data, "gradients between groups"),
            everywhere(whole_layers + whole_ends),
        ]
    return [dict(zip(("axis", "op", "bytes_per_device", "why"), row, strict=True)) for row in rows if row[2]]


def memory(config: Config) -> dict[str, float]:
    """Bytes per device: params, optimizer (which rest between steps), gradients, activations, logits (which do not).

    params, optimizer   2 + 12 per parameter with 16-bit weights, 4 + 8 in float32 (ZeRO paper, section 3.1), over N
                        where the stage shards them
    gradients           the paper's 2 per parameter with one microbatch, else 4 (float32 sums); over N from stage 2: 4
    activations         of one microbatch, see layer_activations; block:n keeps the input of each block and one block
    logits              float32 logits and their 16-bit gradient, of all tokens; or of model.loss_chunk, and the head's
                        gradient in float32
    Left out: the working set of the layer at hand, weights gathered at stage 3, kernels' workspaces.
    """
    m, p = config.model, config.parallel
    b, psi = BYTES[config.precision.compute], parameters(m)
    whole = sum(whole_parameters(config))
    shard = whole + (psi - whole) / p.data
    tokens, remat = _tokens_per_device(config) / p.microbatches, config.memory.remat
    if remat.startswith("block:"):
        size = int(remat.removeprefix("block:"))
        kept = m.num_layers // size * m.d_model + size * layer_activations(m, "none", p.zero)
    else:
        kept = m.num_layers * layer_activations(m, remat, p.zero)
    logits = (4 + b) * (m.loss_chunk or tokens) * m.vocab_size
    return {
        "params": b * (shard if p.zero == 3 else psi),
        "optimizer": (8 if b == 4 else 12) * (shard if p.zero else psi),
        "gradients": 4 * shard if p.zero > 1 else (4 if p.microbatches > 1 else b) * psi,
        "activations": b * tokens * kept,
        "logits": logits + (4 * m.vocab_size * m.d_model if m.loss_chunk else 0),
    }


def layer_activations(model: Model, remat: str, zero: int) -> int:
    """Elements that one layer keeps per token for its backward (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1,
    recounted: no dropout, flash attention). With d_ff = 4 d and as many heads for keys as for queries:

                gpt2   llama
    none        16 d   20 d   inputs of norms, of matmuls, of attention and of the activation
    none        10 d   14 d   at ZeRO-3: what matmuls and attention returned; the rest is computed from it
    selective    9 d   13 d   what matmuls returned
    full           d      d   the layer's input

    At 2 bytes the first is 32 d: the paper's 34 d without its two dropout masks.
    """
    D, K, F, gates = model.d_model, _kv_width(model), model.d_ff, 2 if model.family == "llama" else 1
    if remat == "full":
        return D
    if remat == "selective":
        return 3 * D + 2 * K + gates * F
    return 4 * D + 2 * K + gates * F if zero == 3 else 6 * D + 2 * K + (gates + 1) * F


def _tokens_per_device(config: Config) -> float:
    return config.data.batch_size * config.data.seq_len / (config.parallel.replica * config.parallel.data)
