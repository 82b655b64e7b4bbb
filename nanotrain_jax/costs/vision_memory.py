"""Memory of the encoder of pictures in closed form, beside that of the decoder. For resolved configs.

Symbols as in costs/vision.py; bytes per device.
"""

from __future__ import annotations

from nanotrain_jax.config.execution import execution
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import vision
from nanotrain_jax.costs.activations import activations, working_set
from nanotrain_jax.costs.counts import BYTES, encodes, layers_of, local_elements, rows, rows_per_device, zero_devices
from nanotrain_jax.models.parameters import ENCODER

Parts = dict[str, float]


def added(config: Config, found: dict[str, Parts]) -> dict[str, Parts]:
    """Return the moments of `memory.moments` with the encoder's activations, and one more:

    encoder     the decoder's activations are freed; the encoder's, the encoded pictures with their gradients, and the
                working set of one of its layers
    """
    alive = kept(config)
    for moment in ("loss", "backward"):
        found[moment]["activations"] += alive + encoded(config)
    if not vision.has_backward(config):
        return found
    parts = {"activations": alive + encoded(config), "loss": 0.0, "layer": 0.0, "buffers": 0.0}
    if vision.has_backward(config, vision.LAYERS):
        parts |= {"layer": working_set(vision.as_decoder(config)), "buffers": _in_flight(config)}
    return found | {"encoder": {"gradients": found["embedding"]["gradients"]} | parts}


def kept(config: Config) -> float:
    """Return the bytes that the encoder keeps for its backward: of ceil(M / P) microbatches where it runs before a
    schedule, else of one.

    layers    as those of a decoder (`activations`)
    others    C (6 E + 4 S) elements, if the kept patches have a backward: candidates, their surroundings, the scorers;
              K (2 E + 2 D) of the adapter
    """
    if not vision.has_backward(config):
        return 0.0
    v, D, p = config.vision, config.model.d_model, config.parallel
    of_picture = v.max_tokens * (2 * v.width + 2 * D)
    if vision.has_backward(config, vision.KEPT):
        of_picture += v.num_candidates * (6 * v.width + 4 * v.scorer_width)
    if vision.has_backward(config, vision.LAYERS):
        of_picture += v.max_tokens * activations(vision.as_decoder(config))
    microbatches = encodes(config) if execution(config).is_by_hand else 1
    return microbatches * BYTES[config.precision.compute] * rows_per_device(config) / p.microbatches * of_picture


def encoded(config: Config) -> float:
    """Return the bytes of encoded pictures, K D each: of one microbatch; before a schedule of all M, with their
    gradients in float32."""
    of_row = config.vision.max_tokens * config.model.d_model * rows_per_device(config)
    if not execution(config).is_by_hand:
        return BYTES[config.precision.compute] * of_row / config.parallel.microbatches
    return (BYTES[config.precision.compute] + 4 * vision.has_backward(config)) * of_row


def _in_flight(config: Config) -> float:
    """Return the bytes of a layer that ZeRO gathers, and of its gradients that it scatters."""
    p = config.parallel
    if p.zero < 2 or zero_devices(config) == 1:
        return 0.0
    of_encoder = [row for row in rows(config).values() if row.part == ENCODER]
    layer = sum(local_elements(row, config) / layers_of(row, config) for row in of_encoder)
    return (4 + BYTES[config.precision.compute] * (p.zero == 3)) * layer
