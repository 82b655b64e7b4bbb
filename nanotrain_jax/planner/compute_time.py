"""Modelled seconds of what a device computes: a roofline (Williams et al. 2009). Nothing here is measured.

    one microbatch, one stage     F   forward of its layers: each matmul's 2 m k n FLOPs or its bytes, whichever takes
                                      longer; attention (flash: the causal half of the scores); norms, residual stream
                                      and activation function at memory bandwidth
                                  B   recomputation, gradients of inputs; attention 5/2 of its forward
                                  W   gradients of weights
    once per step                 the update, at memory bandwidth

For resolved configs, without communication (step_time.py).
"""

from __future__ import annotations

from nanotrain_jax.config.derived import fits_flash, padded_vocab
from nanotrain_jax.config.execution import execution, writes_layers_out
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import activations, counts, flops, hbm, mixture, muon, vision
from nanotrain_jax.costs.hardware import Gpu
from nanotrain_jax.models.parameters import ENCODER, ENDS, LAYERS

STREAM = 0.8  # of peak memory bandwidth, which good kernels reach; for matrix units see hardware.Gpu.matmul
KERNEL, COLLECTIVE = 3e-6, 15e-6  # latency in seconds; assumed, not measured

# Rate of FP8 matmuls over 16-bit ones, of a peak twice as high (assumed, not measured); and the bytes to quantize an
# element: read twice, written once.
FLOAT8, QUANTIZE = 1.6, 5


def attention_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds of the forward of attention of one layer and microbatch, without communication.

    Flash, and blocks over context: without the scores of later tokens.
    """
    m, p, T, S = config.model, config.parallel, config.data.seq_len, counts.computed_keys(config)
    n, b = counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    flash = fits_flash(m, config.precision.compute)
    scores = 4.0 * n * counts.query_width(m) / p.tensor * S
    seen = 1 - S / (2 * T) if flash or p.is_blockwise else 1
    seconds = scores * seen / (gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5))
    if not flash:  # write and read scores and probabilities
        seconds += 20.0 * n * T * m.num_heads / p.tensor / (STREAM * gpu.memory_bandwidth)
    return seconds


def layers_time(config: Config, gpu: Gpu) -> tuple[float, float, float]:
    """Return F, B and W of one microbatch through a stage's layers in seconds, without communication."""
    m, p = config.model, config.parallel
    t, n, b = p.tensor, counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    D, Q, L, K = m.d_model, counts.query_width(m), counts.stage_layers(config), _stored_kv_width(config)
    num_up, matmuls = 1 + m.features.gated_mlp, matmuls_time(config, gpu)
    inner, down = matmuls["attention"] + matmuls["up"], matmuls["down"]
    attention = attention_time(config, gpu)
    split_x = t if p.sequence_parallel else 1
    of_heads = ((not m.features.learned_positions) + m.features.qk_norm) * 2 * (Q + K) / t  # rotary, norms
    stream = b * n * ((10 + 4 * m.features.norms_after) * D / split_x + of_heads + (1 + num_up) * m.ffn_width / t)
    elementwise = stream / (STREAM * gpu.memory_bandwidth) + 6 * KERNEL
    forward = inner + down + attention + elementwise
    kept = attention if p.is_blockwise else 0.0  # `selective` and `full` keep the output of ring and gather
    if config.precision.matmul == "float8":  # inputs and weights; in the backward gradients and weights
        quantize = quantize_time(config, gpu)
        forward, elementwise = forward + quantize, elementwise + quantize
    recompute = {
        "none": 0.0,
        "selective": attention - kept + elementwise,
        "full": forward - down * (not m.features.norms_after) - kept,
    }
    recompute["block"] = forward
    B = recompute[config.memory.rematerialization.policy] + inner + down + 2.5 * attention + 2 * elementwise
    if t > 1 and p.overlap_tensor:
        blocks, plain = (1, 1) if m.experts else (2, 0)  # of attention and MLP
        columns = Q + 2 * K + (0 if m.experts else num_up * m.d_ff)
        written = b * n * (columns / t + blocks * D)  # a hop copies its block of rows into the whole
        hops = 2 * written / (STREAM * gpu.memory_bandwidth) + 2 * blocks * (t - 1) * 3 * KERNEL
        forward += hops + 2 * plain * COLLECTIVE
        B += hops / 2 + (2 * blocks + 3 * plain) * COLLECTIVE
    elif t > 1:
        forward, B = forward + 4 * COLLECTIVE, B + 6 * COLLECTIVE
    forward, B = (seconds + stacks_time(config, gpu) for seconds in (forward, B))
    return L * forward, L * B, L * (inner + down) * flops.trained_share(config, LAYERS)


def matmuls_time(config: Config, gpu: Gpu) -> dict[str, float]:
    """Return the seconds of the matmuls in the forward of a layer and microbatch: of attention, of up (with gate), and
    of down."""
    m, t, b = config.model, config.parallel.tensor, counts.BYTES[config.precision.compute]
    n = counts.tokens_per_device(config) / config.parallel.microbatches
    D, Q, K, F = m.d_model, counts.query_width(m), _stored_kv_width(config), mixture.computed_ffn_width(config)
    faster = FLOAT8 if config.precision.matmul == "float8" else 1.0

    def matmul(k: float, out: float) -> float:
        return _matmul((n, k, out), b, gpu) / faster

    attention = matmul(D, Q / t) + matmul(Q / t, D) + 2 * matmul(D, K / t)
    weights = D * m.mlp_width * _stored_mlps(config) / t  # of a mixture more than a token multiplies
    mlp = _matmul((n, D, F / t), b, gpu, weights) / faster
    return {"attention": attention, "up": (1 + m.features.gated_mlp) * mlp, "down": mlp}


def _stored_mlps(config: Config) -> int:
    """Return how many MLPs of a layer a device has: of a mixture its experts, and the shared ones."""
    experts = config.model.experts
    return experts.num // config.parallel.expert + experts.shared if experts else 1


def _stored_kv_width(config: Config) -> float:
    """Return the width of keys over all devices of tensor: with fewer heads than devices several store one."""
    return counts.kv_width(config.model) * max(1, config.parallel.tensor / config.model.num_kv_heads)


def first_time(config: Config, gpu: Gpu) -> tuple[float, float]:
    """Return F and B, with W, of one microbatch through the first, dense layers of a mixture, in seconds; the backward
    by hand recomputes F (`mixture.first_runs`)."""
    first = mixture.first_layers(config)
    if first is None:
        return 0.0, 0.0
    (F, B, W), (_, again) = layers_time(first, gpu), mixture.first_runs(config)
    return F, B + W + (F if again else 0.0)


def stacks_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds in which a loop over layers copies what a layer keeps to the stacks of all, or from them; in
    loops whose backward is written by hand it is not modelled."""
    if execution(config).is_by_hand or writes_layers_out(config, "cpu" if gpu.kind == "cpu" else "gpu"):
        return 0.0
    tokens = counts.tokens_per_device(config) / config.parallel.microbatches
    kept = tokens * activations.layer_activations(config, config.memory.rematerialization)
    return 2 * counts.BYTES[config.precision.compute] * kept / (STREAM * gpu.memory_bandwidth)


def encoder_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds in which a device encodes its pictures, forward and backward, without communication: layers as
    those of a decoder, the matmuls around them at the rate of the matrix units. Of textures only the matmul."""
    if config.vision is None:
        return 0.0
    trained = vision.trained(config)
    F, B, W = layers_time(vision.as_decoder(config), gpu)
    layers = F + vision.has_backward(config, vision.LAYERS) * (B + W * flops.trained_share(config, ENCODER))
    outside = sum(product.flops + product.backward(trained) for product in vision.outside_layers(config))
    rate = gpu.matmul * gpu.peak_flops * (1.0 if counts.BYTES[config.precision.compute] == 2 else 0.5)
    return counts.encodes(config) * layers + vision.pictures(config) * outside / rate


def quantize_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds to quantize the operands of a layer's seven matmuls to FP8; of experts, of all their rows."""
    m, t, D, Q = config.model, config.parallel.tensor, config.model.d_model, counts.query_width(config.model)
    K, matrices = _stored_kv_width(config), 2 + m.features.gated_mlp
    rows = mixture.rows_per_token(config) if m.experts else 1
    shared = m.experts.shared if m.experts else 0
    n = counts.tokens_per_device(config) / config.parallel.microbatches
    of_tokens = n * ((1 + rows + (shared > 0)) * D + (Q + mixture.kept_ffn_width(config)) / t)
    of_weights = (2 * D * (Q + K) + matrices * D * m.mlp_width * _stored_mlps(config)) / t
    return QUANTIZE * (of_tokens + of_weights) / (STREAM * gpu.memory_bandwidth) + 4 * 7 * KERNEL


def ends_time(config: Config, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds of forward and backward of head and loss for one microbatch. Beside the matmuls logits are
    read for their softmax and for their gradient, which is written.

    With model.loss_chunk each chunk reads and writes the float32 gradient of the head.
    """
    m, p = config.model, config.parallel
    n, b = counts.tokens_per_device(config) / p.microbatches, counts.BYTES[config.precision.compute]
    V = padded_vocab(m.vocab_size, p.vocab_shards) / p.vocab_shards
    head, element = _matmul((n, m.d_model, V), b, gpu), n * V / (STREAM * gpu.memory_bandwidth)
    logits = counts.logit_bytes(config) * element
    chunks = n / m.loss_chunk if m.loss_chunk else 0
    sums = chunks * 8.0 * V * m.d_model / (STREAM * gpu.memory_bandwidth)
    return head + logits, (1 + flops.trained_share(config, ENDS)) * head + logits + b * element + sums


def update_time(config: Config, gpu: Gpu) -> float:
    """Return the seconds of the update's least bytes (costs/hbm.py), and of Muon's Newton-Schulz iterations."""
    streamed = hbm.update_bytes(config) / (STREAM * gpu.memory_bandwidth)
    rate = gpu.matmul * gpu.peak_flops * (1.0 if muon.wire_bytes(config) == 2 else 0.5)
    return streamed + muon.flops(config) / rate


def _matmul(sizes: tuple[float, float, float], b: int, gpu: Gpu, weights: float | None = None) -> float:
    """Return the seconds of [m k] @ [k n]; in float32 (TF32) the matrix units run at half their rate. weights: elements
    that it reads of [k n]; None: all."""
    m, k, n = sizes
    weights = k * n if weights is None else weights
    flops = 2.0 * m * k * n / (gpu.matmul * gpu.peak_flops * (1.0 if b == 2 else 0.5))
    return KERNEL + max(flops, b * (m * k + weights + m * n) / (STREAM * gpu.memory_bandwidth))
