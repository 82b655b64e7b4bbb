"""Candidate patches of a picture at several scales, and their embeddings. Nothing here communicates.

A candidate of scale s covers s p x s p pixels, averaged to p x p: coarse ones tile the picture with few tokens, fine
ones show detail. All scales tile the picture; `relevance` selects. Names: B batch, C candidates (scale by scale, each
row by row), p patch_size, P = 13 p^2 values of a patch, E width of the encoder, F features of a position.

Weights: embed_PE, bias_E, position_FE.
"""

import jax
import jax.numpy as jnp
import numpy as np

from nanotrain_jax.config.vision import Vision
from nanotrain_jax.models.vision.texture import CHANNELS, texture

Weights = dict[str, jax.Array]
FREQUENCIES = 4  # of position features: half a wave over the picture, one, two, four


def init(config: Vision, key: jax.Array) -> Weights:
    """Initialize: normal, so that embeddings of standardized values have std 1; biases zero."""
    P, F, E = CHANNELS * config.patch_size**2, num_features(config), config.width
    embed_key, position_key = jax.random.split(key)
    return {
        "embed_PE": jax.random.normal(embed_key, (P, E)) * np.sqrt(P) / E,
        "bias_E": jnp.zeros(E),
        "position_FE": jax.random.normal(position_key, (F, E)) / np.sqrt(F),
    }


def embed(config: Vision, weights: Weights, image_BHWc: jax.Array) -> jax.Array:
    """image uint8 [B H W 3] -> embeddings of its candidates [B C E], without their positions

    The P values are scaled by E / P: then an update of Adam, about as large for every weight, changes an embedding as
    much as it changes the output of a layer of E inputs (the rule of muP, arXiv 2203.03466).

    Rematerialized: the backward keeps the picture, B H W 3 bytes, instead of the candidates, B C P values.
    """

    @jax.checkpoint
    def run(image_BHWc: jax.Array, embed_PE: jax.Array) -> jax.Array:
        patches_BCP = candidates(standardized(texture(image_BHWc)), config.patch_size, config.scales)
        P, E = embed_PE.shape
        return (E / P * patches_BCP).astype(embed_PE.dtype) @ embed_PE

    return run(image_BHWc, weights["embed_PE"]) + weights["bias_E"][None, None]


def standardized(x_BHWc: jax.Array) -> jax.Array:
    """x[B H W c] -> x[B H W c], each channel of each picture with mean 0 and standard deviation 1 over its pixels"""
    mean, variance = x_BHWc.mean((1, 2), keepdims=True), x_BHWc.var((1, 2), keepdims=True)
    return (x_BHWc - mean) * jax.lax.rsqrt(variance + 1e-4)


def candidates(texture_BHWc: jax.Array, patch: int, scales: tuple[int, ...]) -> jax.Array:
    """texture[B H W c] -> candidates[B C P]"""
    return jnp.concatenate([tiles(averaged(texture_BHWc, scale), patch) for scale in scales], 1)


def averaged(x_BHWc: jax.Array, scale: int) -> jax.Array:
    """x[B H W c] -> means of squares of scale x scale pixels [B H/scale W/scale c]"""
    B, H, W, c = x_BHWc.shape
    return x_BHWc.reshape(B, H // scale, scale, W // scale, scale, c).mean((2, 4)) if scale > 1 else x_BHWc


def tiles(x_BHWc: jax.Array, patch: int) -> jax.Array:
    """x[B H W c] -> its tiles of patch x patch pixels, row by row [B HW/patch^2 P]"""
    B, H, W, c = x_BHWc.shape
    x = x_BHWc.reshape(B, H // patch, patch, W // patch, patch, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, H * W // patch**2, patch * patch * c)


def places(config: Vision) -> np.ndarray:
    """Return centre y, x (-1 to 1) and scale of each candidate [C 3]."""
    rows = []
    for scale in config.scales:
        count = config.image_size // (scale * config.patch_size)
        centres = (2 * np.arange(count) + 1) / count - 1
        y, x = np.meshgrid(centres, centres, indexing="ij")
        rows.append(np.stack([y, x, np.full_like(y, scale)], -1).reshape(-1, 3))
    return np.concatenate(rows)


def num_features(config: Vision) -> int:
    """Return F."""
    return 4 * FREQUENCIES + len(config.scales)


def position_features(config: Vision) -> np.ndarray:
    """Return features of the position and scale of each candidate: waves over y and x, one per scale [C F]."""
    y_x, scale = np.split(places(config), [2], -1)
    angle = y_x[:, None] * (np.pi / 2 * 2.0 ** np.arange(FREQUENCIES))[:, None]
    waves = np.concatenate([np.sin(angle), np.cos(angle)], 1).reshape(len(y_x), -1)
    return np.concatenate([waves, scale == np.array(config.scales)], 1).astype(np.float32)


def surroundings(config: Vision) -> np.ndarray:
    """Return the weights of a mean over the neighbours of each candidate: up to 8 of its scale [C C]."""
    place = places(config)
    side = 2 * place[:, 2] * config.patch_size / config.image_size
    distance = np.abs(place[:, None, :2] - place[None, :, :2]).max(-1)
    is_near = (place[:, None, 2] == place[None, :, 2]) & (distance < 1.5 * side[:, None])
    np.fill_diagonal(is_near, False)
    return (is_near / np.maximum(is_near.sum(1, keepdims=True), 1)).astype(np.float32)
