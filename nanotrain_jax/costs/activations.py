"""Activations that a device stores for the backward, in closed form, with sources. For resolved configs.

Elements per token of a microbatch. Symbols as in costs/counts.py.
"""

from __future__ import annotations

from nanotrain_jax.config.derived import fits_flash
from nanotrain_jax.config.execution import Execution, execution
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import Remat
from nanotrain_jax.costs.communication import ulysses_copies
from nanotrain_jax.costs.counts import (
    BYTES,
    adapted,
    kv_width,
    local_kv_width,
    outline,
    query_width,
    stage_layers,
    tokens_per_device,
    trained_matrices,
)
from nanotrain_jax.costs.mixture import copied_rows, first_layers, kept_ffn_width, rows_per_token

NO_REMAT = Remat("none")


def activations(config: Config) -> float:
    """Return the peak elements, per token of a microbatch, that a device stores from forward to backward."""
    m, p, remat = config.model, config.parallel, config.memory.rematerialization
    per_layer = layer_activations(config, remat)
    if p.pipe == 1:
        first = None if execution(config).is_by_hand else first_layers(config)  # by hand they are recomputed at once
        return m.main_layers * per_layer + (activations(first) if first else 0.0)
    spare = p.idle == "mask"
    slots, (late, handed) = outline(config).slots, weight_grad_residuals(config, remat)
    in_slots = (slots["backward"] + spare) * (per_layer - late)
    in_slots += (slots["backward_weight"] + spare) * late + (slots["intermediates"] + spare) * handed
    return stage_layers(config) / p.chunks * in_slots + stage_buffers(config)


def stage_buffers(config: Config) -> float:
    """Return the elements per token in the slots between stages: inputs before their F, gradients before their B."""
    m, p = config.model, config.parallel
    if p.pipe == 1:
        return 0.0
    slots = outline(config).slots
    return (
        (slots["inputs"] + slots["gradients"] + 2 * (p.idle == "mask"))
        * m.d_model
        / (p.tensor if p.sequence_parallel else 1)
    )


def layer_activations(config: Config, remat: Remat) -> float:
    """Return the elements per token that one layer stores for its backward (Korthikanti et al. 2022, arXiv 2205.05198,
    section 4, recounted: no dropout, flash attention). With d_ff = 4 d and as many key heads as query heads, d wide:

                gpt2            llama
    none        4 d + 12 d / t  4 d + 16 d / t   inputs of norms, matmuls, attention and the activation function
    none        2 d +  8 d / t  2 d + 12 d / t   at ZeRO-3: outputs of matmuls and attention; the rest is recomputed
                                                 from them
    selective   2 d +  7 d / t  2 d + 11 d / t   outputs of matmuls
    full          d               d              the layer's input (block:n: of each block's first layer)
    with ring or gather attention selective and full keep d / t more: the output of attention

    over t tensor-parallel devices; with sequence parallelism all of it over t (table 2 of the paper). `none` also keeps
    a float32 softmax statistic per head, or without flash attention the scores: in bytes (4 + b) T + 8 per head, 4 T at
    ZeRO-3 without prefetch, (9 + b) T with pipeline stages (b bytes of the compute dtype). With grouped-query attention
    XLA keeps about 4 T (8 T) more than the program asks for. With model.qk_norm `none` keeps queries and keys also
    before their norm, but not at ZeRO-3 without prefetch. Norms after attention and MLP keep their inputs. A mixture of
    experts keeps the logits of its router in float32 where it keeps gate and up of the experts of a token. `none` and
    selective keep x A of adapters (train.lora); `none` no inputs of matmuls that neither train nor have an adapter. At
    2 bytes and t = 1 the first row is 32 d: the paper's 34 d without its two dropout masks.
    """
    like_x, inner = layer_widths(config, remat)
    split_x = config.parallel.tensor if config.parallel.sequence_parallel else 1
    beside = adapter_width(config, remat) + router_width(config, remat)
    return like_x / split_x + inner / config.parallel.tensor + beside


def adapter_width(config: Config, remat: Remat) -> float:
    """Return the elements per token that adapters store: x A, of a column-parallel matrix of all tokens."""
    if remat.recomputes_layers or not config.model.lora:
        return 0.0
    p, (columns, rows) = config.parallel, adapted(config)
    return config.model.lora.rank * (columns + rows / (p.tensor if p.sequence_parallel else 1))


def router_width(config: Config, remat: Remat) -> float:
    """Return the elements per token of the logits of a router, float32, of all tokens on each device of tensor."""
    experts = config.model.experts
    return 0.0 if remat.recomputes_layers or not experts else experts.num * 4 / BYTES[config.precision.compute]


def layer_widths(config: Config, remat: Remat, scores: bool = True) -> tuple[float, float]:
    """Return the two terms of `layer_activations` before division by t: as wide as x (split by sequence parallelism
    only), and inner (split by tensor); with or without attention scores."""
    m, p, b, t = config.model, config.parallel, BYTES[config.precision.compute], config.parallel.tensor
    ffn = kept_ffn_width(config)
    up = (1 + m.features.gated_mlp) * ffn
    matmuls = query_width(m) + 2 * kv_width(m) * max(1, t / m.num_kv_heads) + up  # at least one key head per device
    T, per_head = config.data.seq_len, 4
    if scores and not p.is_blockwise and not fits_flash(m, config.precision.compute):
        per_head = 4 * T if recomputes_from_matmuls(config) else (9 + b) * T if p.pipe > 1 else (4 + b) * T + 8
        if m.num_kv_heads < m.num_heads:
            per_head += (8 if p.pipe > 1 else 4) * T
    attention = query_width(m) + m.num_heads / b * per_head
    if remat.recomputes_layers:
        like_x, inner = 1 / remat.block, (_communicated_widths(config) if remat.policy == "full" else 0)
    elif remat.policy == "selective":
        like_x, inner = 2 + m.features.norms_after, matmuls + _communicated_widths(config)
    elif recomputes_from_matmuls(config):
        like_x, inner = 2 + m.features.norms_after, matmuls + attention
    elif m.experts:  # which compute what they multiply with w_down again
        like_x, inner = 4 + 2 * m.features.norms_after, matmuls + attention + normed_width(config)
    else:
        names = trained_matrices(config)
        like_x = 2 + inputs_kept(names) + 2 * m.features.norms_after
        inner = matmuls + attention + kept_ffn_width(config) * ("down" in names) + normed_width(config)
    return like_x * m.d_model, inner


def recomputes_from_matmuls(config: Config) -> bool:
    """True if `none` keeps the outputs of matmuls and attention alone: at ZeRO-3 where layers gather their weights
    again, not where a loop gathers them ahead."""
    return config.parallel.zero == 3 and not config.parallel.prefetch


def normed_width(config: Config) -> float:
    """Return the elements per token, before division by t, of queries and keys before model.qk_norm normalizes them."""
    m, t = config.model, config.parallel.tensor
    return query_width(m) + t * local_kv_width(config) if m.features.qk_norm else 0.0


def _communicated_widths(config: Config) -> float:
    """Return the elements per token, before division by t, that attention over context keeps besides q, k and v.

    Ring and gather with `selective` and `full`: output and lse. Ulysses with `selective`: output, more copies of k, v.
    """
    m, p, policy = config.model, config.parallel, config.memory.rematerialization.policy
    if p.context == 1 or (policy == "full" and not p.is_blockwise):
        return 0.0
    if p.is_blockwise:
        return query_width(m) + 4 * m.num_heads / BYTES[config.precision.compute]
    return query_width(m) + 2 * p.tensor * local_kv_width(config) * (ulysses_copies(config) - 1)


def weight_grad_residuals(config: Config, remat: Remat) -> tuple[float, float]:
    """Return the elements per token that a layer stores until W, if the schedule has it: from its forward, and from B.

    W needs the input of each matmul and the gradient of its output (arXiv 2401.10241, section 2.1); the inputs are
    stored by the forward where the remat policy keeps them, else by B; with `selective` W computes GELU again, where
    our kernel takes the forward's sum of matmul and bias. Of matrices that train, or their adapters. Without W: 0, 0.
    """
    m, p, names = config.model, config.parallel, trained_matrices(config)
    if not outline(config).weights:
        return 0.0, 0.0
    t, Q, K = p.tensor, query_width(m), kv_width(m) * max(1, p.tensor / m.num_kv_heads)
    widths = {"q": Q, "k": K, "v": K, "up": kept_ffn_width(config), "gate": kept_ffn_width(config)}
    entered = m.d_model * inputs_kept(names) / (t if p.sequence_parallel and remat.policy != "full" else 1)
    inputs = entered + kept_ffn_width(config) / t * ("down" in names)
    out_input = Q / t * ("out" in names)
    grads = m.d_model * len(names & {"out", "down"}) + sum(widths[name] for name in names & set(widths)) / t
    from_forward = 0.0
    if remat == NO_REMAT:
        from_forward = out_input if recomputes_from_matmuls(config) else inputs + out_input
    elif remat.policy == "selective" and gelu_by_kernel(config):
        from_forward = kept_ffn_width(config) / t * ("down" in names)
    return from_forward, inputs + out_input - from_forward + grads


def inputs_kept(names: frozenset[str]) -> int:
    """Return how many inputs of matmuls, as wide as x, gradients of weights need. names: `trained_matrices`."""
    return bool(names & {"q", "k", "v"}) + bool(names & {"up", "gate", "router"})


def gelu_by_kernel(config: Config) -> bool:
    """True if GPUs run the backward of GELU by our kernel (`ops.gelu_of_sum`)."""
    features = config.model.features
    is_gelu = features.activation == "gelu_tanh" and features.biases and not features.gated_mlp
    return is_gelu and config.model.kernels != "xla"


def score_bytes(config: Config) -> float:
    """Return the bytes per token of attention scores in a layer's backward; 0 with flash attention."""
    m = config.model
    if fits_flash(m, config.precision.compute):
        return 0.0
    p = config.parallel
    keys = config.data.seq_len / (p.context if p.is_blockwise else 1)
    per_score = 4 if config.memory.rematerialization == NO_REMAT else 10  # the others recompute what `none` keeps
    return per_score * keys * m.num_heads / p.tensor


def working_set(config: Config) -> float:
    """Return the bytes of one layer's backward: what `none` would keep of it, four float32 copies of x (norms and the
    residual stream), and attention scores; block:n: of n layers."""
    p, b, block = config.parallel, BYTES[config.precision.compute], config.memory.rematerialization.block
    tokens, split_x = tokens_per_device(config) / p.microbatches, p.tensor if p.sequence_parallel else 1
    like_x, inner = layer_widths(config.replace("parallel", zero=0), NO_REMAT, scores=False)
    size = b * tokens * ((like_x + 8 * config.model.d_model) / split_x + inner / p.tensor)
    if config.model.experts:  # rows of the experts of a token, their gradients, and both padded; of an exchange twice
        wide = rows_per_token(config) + copied_rows(config)
        size += 2 * (1 + (p.expert > 1)) * b * tokens * config.model.d_model * wide
    kept = block_by_hand(config) or block - 1
    return size + tokens * (score_bytes(config) + kept * b * layer_activations(config, NO_REMAT))


def block_by_hand(config: Config) -> int:
    """Return n of block:n in a pipeline's loop, whose backward has the activations of all n layers beside those of the
    one that it differentiates; else 0."""
    remat = config.memory.rematerialization
    return remat.block if remat.policy == "block" and execution(config) is Execution.PIPELINE else 0
