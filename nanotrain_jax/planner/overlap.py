"""How much traffic between devices overlaps with compute, and when in a step it happens. For resolved configs."""

from typing import Literal

from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import communication, counts, tensor_traffic
from nanotrain_jax.costs.traffic import Traffic

When = Literal["microbatch", "step"]  # inside the loops; or once, after the backward

# Fractions of the wire bytes that overlap with matmuls, as the compiled programs schedule them (scripts/audit.py).
HIDDEN_TENSOR = 0.3  # with parallel.overlap_tensor all but that of the ends, and of experts (`_hidden_beside_hops`)
HIDDEN_LAYERS = 0.5  # ZeRO 2 and 3, in the loops over layers, if a layer exceeds one bucket; else 0
HIDDEN_PIPE = 1.0  # also hops of ring attention, but the last one of gradients


def overlap(config: Config, op: str, what: Traffic, exceeds_bucket: bool) -> tuple[float, When]:
    """Return the fraction of some traffic that overlaps with compute, and when it happens.

    exceeds_bucket: a layer's weights are larger than a bucket.
    """
    p = config.parallel
    if what in (Traffic.ACTIVATIONS, Traffic.REGATHERED_ACTIVATIONS, Traffic.LOSS):
        if not (p.overlap_tensor and p.sequence_parallel) or what is Traffic.LOSS:
            return HIDDEN_TENSOR, "microbatch"
        if op == "permute":
            return 1.0, "microbatch"
        return _hidden_beside_hops(config, op), "microbatch"
    if what is Traffic.ADAPTERS:
        return HIDDEN_TENSOR, "microbatch"
    if what is Traffic.ENCODER:
        return HIDDEN_TENSOR, "step"
    if what is Traffic.BETWEEN_STAGES or (what is Traffic.SHARED_BY_STAGES and p.chunks == 1):
        return HIDDEN_PIPE, "microbatch"
    if what is Traffic.SHARED_BY_STAGES:
        return 0.0, "microbatch"
    if what is Traffic.EXPERTS:
        return _hidden_exchange(config), "microbatch"
    if what in (Traffic.ATTENTION, Traffic.HEADS):
        return (HIDDEN_PIPE * (1 - last_hop(config)) if op == "permute" else 0.0), "microbatch"
    is_scattered_in_backward = what is Traffic.GRADIENTS and p.zero > 1 and op in ("reduce_scatter", "all_to_all")
    if what is Traffic.WEIGHTS or is_scattered_in_backward:
        return (HIDDEN_LAYERS if exceeds_bucket else 0.0), "microbatch"
    return 0.0, "step"


def _hidden_exchange(config: Config) -> float:
    """Return the fraction of the rows of experts that travels behind matmuls: those of shared experts and of attention,
    or of attention alone; in the branches of a pipeline, and ragged, XLA moves few of them."""
    p = config.parallel
    if p.pipe > 1 or p.expert_exchange == "ragged":
        return 0.2
    return 0.8 if config.model.experts.shared else 0.4


def _hidden_beside_hops(config: Config, op: str) -> float:
    """Return the fraction of gathers, or of scatters, over tensor that overlaps with compute beside permutes: in layers
    all, but those of experts as without parallel.overlap_tensor; of the ends none."""
    m, L = config.model, counts.stage_layers(config)
    each = 0 if op == "all_gather" and config.memory.rematerialization.policy == "full" else 1  # of attention, of MLP
    of_mlp = each + tensor_traffic.plain_passes(config)[op == "reduce_scatter"]
    of_first = 2 * each * m.dense_layers
    hidden = L * (each + of_mlp * (HIDDEN_TENSOR if m.experts else 1)) + of_first
    return hidden / (L * (each + of_mlp) + of_first + 2)


def last_hop(config: Config) -> float:
    """Return the share of ring attention's bytes in the last hop of the gradients of keys and values, home."""
    kv = 2 * counts.tokens_per_device(config) * counts.local_kv_width(config)
    ((_, size, _),) = communication.attention_buffers(config)
    return 4 * kv * counts.stage_layers(config) / size
