"""The least bytes that layers, loss and update read and write in device memory, in closed form. For resolved configs.

Kernels are the matmuls, attention and the norms; whatever else a layer computes is in the end of the kernel before it.
Each activation is written once and read once by every kernel that uses it, in the compute dtype; weights are read once
per use; gradients are written once, in float32. Per token, with D the model width, Q and K the widths of queries and of
keys, F the ffn width, g = 2 with a gate, else 1 (elements read and written):

    forward      norms 4 D;  q, k, v  3 D + Q + 2 K;  attention 2 Q + 2 K;  out Q + 2 D
                 up and gate  g D + g F + (g - 1) F + F;  down F + 2 D
    backward     norms 8 D;  q, k, v  Q + 2 K + D, 3 D + Q + 2 K;  attention 4 Q + 4 K;  out D + Q, Q + D
                 up and gate  g F + D, g D + g F;  down D + 2 g F, F + D
    qk_norm      2 (Q + K) more in the forward, 3 (Q + K) in the backward
    norms after attention and MLP (gemma3): as those before
    recompute    remat full and block:n: the forward again, without down unless a norm follows it

    loss         D + V;  gradients of x and head  V + D, V + D, with V the vocabulary; chunks read the head again

The log-sum-exp of attention is left out, as are collectives. The update reads gradients, again where they are clipped,
master weights and moments, and writes these and the weights in the compute dtype.
"""

from __future__ import annotations

from nanotrain_jax.config.execution import Execution, execution
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import memory, muon, offload
from nanotrain_jax.costs.counts import BYTES, gradient_bytes, kv_width, logit_bytes, query_width, tokens_per_device
from nanotrain_jax.models.decoder_table import DOWN, table
from nanotrain_jax.models.parameters import LAYERS

GRADIENT = 4  # bytes
LOSS, UPDATE, COMMUNICATION = "loss", "update", "communication"
PARTS = LAYERS, LOSS, UPDATE, COMMUNICATION  # of a step


def step_bytes(config: Config) -> dict[str, float]:
    """Return the least bytes of a step on a device, part -> bytes: of those parts that have a closed form here."""
    layer = layer_bytes(config)
    found = {LAYERS: config.model.num_layers * config.parallel.microbatches * sum(layer.values())} if layer else {}
    if config.parallel.vocab_shards == 1 and execution(config) is not Execution.PIPELINE:
        found[LOSS] = config.parallel.microbatches * loss_bytes(config)
    if config.memory.offload_optimizer == "none":
        found[UPDATE] = update_bytes(config)
    return found


def loss_bytes(config: Config) -> float:
    """Return the least bytes of the loss and its gradients of one microbatch. Its vocabulary is on one device."""
    m = config.model
    size, tokens = BYTES[config.precision.compute], tokens_per_device(config) / config.parallel.microbatches
    chunks = tokens / m.loss_chunk if m.loss_chunk else 1
    of_tokens = 3 * tokens * (size * m.d_model + logit_bytes(config) * m.vocab_size)
    return of_tokens + (2 * size * chunks + GRADIENT) * m.vocab_size * m.d_model


def update_bytes(config: Config) -> float:
    """Return the least bytes of the update. Stored float32 weights are the master."""
    optimizer, stored = memory.state(config)["optimizer"], offload.weight_bytes(config)
    elements = (optimizer + muon.spared_bytes(config)) / offload.optimizer_bytes(config)
    gradients = gradient_bytes(config) * (2 if config.optimizer.grad_clip else 1)
    return 2 * optimizer + elements * (gradients + (2 * stored if stored == GRADIENT else stored))


def layer_bytes(config: Config) -> dict[str, float] | None:
    """Return the least bytes of one layer and microbatch on a device: forward, backward, recompute, weights, gradients.

    None where this form does not hold: layers in stages or in host memory, split over tensor or context, beside an
    encoder, or with experts.
    """
    m, p = config.model, config.parallel
    if (
        config.vision
        or m.experts
        or p.tensor * p.context > 1
        or execution(config) not in (Execution.AUTODIFF, Execution.PER_LAYER)
    ):
        return None
    size, tokens = BYTES[config.precision.compute], tokens_per_device(config) / p.microbatches
    D, Q, K, F, g = m.d_model, query_width(m), kv_width(m), m.d_ff, 2 if m.features.gated_mlp else 1
    down, spared = F + 2 * D, 0 if m.features.norms_after else 1
    forward = 4 * D + (3 * D + Q + 2 * K) + (2 * Q + 2 * K) + (Q + 2 * D) + (g * D + 2 * g * F) + down
    backward = 8 * D + (4 * D + 2 * Q + 4 * K) + (4 * Q + 4 * K) + 2 * (D + Q) + (g + 1) * D + 2 * g * F
    backward += 2 * D + (2 * g + 1) * F
    if m.features.norms_after:
        forward, backward = forward + 4 * D, backward + 8 * D
    if m.features.qk_norm:
        forward, backward = forward + 2 * (Q + K), backward + 3 * (Q + K)
    weights = {name: row.size for name, row in table(m).items() if row.part == LAYERS and row.is_matmul}
    again = config.memory.rematerialization.policy in ("full", "block")
    read = 2 * sum(weights.values()) + again * (sum(weights.values()) - spared * weights[DOWN])
    return {
        "forward": tokens * size * forward,
        "backward": tokens * size * backward,
        "recompute": tokens * size * (forward - spared * down) * again,
        "weights": float(size * read),
        "gradients": float(GRADIENT * sum(weights.values())),
    }
