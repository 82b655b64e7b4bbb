"""Memory of gradients in closed form, in bytes per device. For resolved configs."""

from __future__ import annotations

from nanotrain_jax.config.execution import execution, head_gradient, keeps_reduced, reduces_per_layer, writes_layers_out
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs.counts import BYTES, gradient_bytes, rows, zero_devices
from nanotrain_jax.costs.stored_parameters import trained_parameters, vocab_elements
from nanotrain_jax.models.decoder_table import EMBEDDING, HEAD
from nanotrain_jax.models.parameters import DENSE, ENDS, LAYERS, VISION


def sums_gradients(config: Config) -> bool:
    """Return True if a step sums gradients in float32: over microbatches, in a pipeline, or with prefetch."""
    p = config.parallel
    return p.microbatches > 1 or p.pipe > 1 or p.prefetch


def sums(config: Config) -> tuple[float, float]:
    """Return the bytes of the gradients accumulated over microbatches, in the backward and in the update.

    float32 sums, in both; where a pipeline reduces them per layer, the backward also holds the reduced gradients of
    layers, in the dtype on the wire, and the update only those.
    """
    p = config.parallel
    if not sums_gradients(config):
        return 0.0, 0.0
    psi, shard = trained_parameters(config)
    added_up = 4 * sum((shard if p.zero > 1 else psi).values())
    if p.pipe == 1 or not reduces_per_layer(config):
        return added_up, added_up
    reduced = gradient_bytes(config) * (shard if p.zero else psi)[LAYERS]
    return added_up + reduced, 4 * _outside(config, psi) + reduced


def earlier(config: Config) -> float:
    """Return the bytes of the sums of gradients that are there before the first backward of the last microbatch."""
    p = config.parallel
    return 0.0 if p.pipe == p.microbatches == 1 else sums(config)[0]


def current(config: Config) -> float:
    """Return the bytes of the gradients of layers of the current microbatch, before they are added to the sums."""
    p = config.parallel
    psi, shard = trained_parameters(config)
    if p.pipe > 1 or p.prefetch:
        return 0.0
    size = shard if p.zero > 1 else psi
    return _bytes(config) * (size[LAYERS] + size[DENSE])


def _bytes(config: Config) -> int:
    """Return the bytes per element of a gradient of one microbatch."""
    if keeps_reduced(config):
        return gradient_bytes(config)
    return 4 if config.parallel.zero > 1 else BYTES[config.precision.compute]


def of_ends(config: Config) -> float:
    """Return the bytes of the gradients of embedding, head and encoder of the current microbatch (`_outside`)."""
    psi, shard = trained_parameters(config)
    return _bytes(config) * _outside(config, shard if config.parallel.zero > 1 else psi)


def _outside(config: Config, sizes: dict[str, float]) -> float:
    """Return the elements outside the loop over layers; where that is written by hand the first, dense ones are too."""
    return sizes[ENDS] + sizes[VISION] + sizes[DENSE] * execution(config).is_by_hand


def of_head(config: Config) -> float:
    """Return the bytes of the head's gradient, as the loss computes it."""
    is_frozen = rows(config).get(HEAD, rows(config)[EMBEDDING]).is_frozen
    return 0.0 if is_frozen else BYTES[head_gradient(config)] * vocab_elements(config)


def stacked(config: Config, largest: float) -> float:
    """Return the bytes of the largest gradient of layers written out, while XLA concatenates those of its layers."""
    if sums_gradients(config) or not writes_layers_out(config, "gpu"):
        return 0.0
    return _bytes(config) * largest / (zero_devices(config) if config.parallel.zero > 1 else 1)
