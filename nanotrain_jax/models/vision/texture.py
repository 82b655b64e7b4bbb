"""Texture of a picture: what a pixel shows beside its colour. Pure functions on global arrays or local shards.

image uint8 [B H W 3] -> texture float32 [B H W 13]:

    0-2    red, green, blue, 0 to 1                      sRGB
    3-5    lightness / 100, a / 128, b / 128             CIE 1976 L*a*b*, white D65 (CIE 15:2004)
    6-9    gradient over x, over y, its length, its direction / pi      Sobel on luma (ITU-R BT.601), edges repeated
    10-11  position y, x, -1 to 1
    12     eccentricity: distance from the centre, 1 in the corners

None has weights and none communicates. Each group is rematerialized by itself: a caller's backward keeps none of the
intermediates of a group, only its input. `patches.embed` keeps of all this only the picture.
"""

import jax
import jax.numpy as jnp
import numpy as np

CHANNELS = 13
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]], np.float32)
WHITE = XYZ.sum(1)
BINOMIAL, DIFFERENCE = (1.0, 2.0, 1.0), (-1.0, 0.0, 1.0)


def texture(image_BHWc: jax.Array) -> jax.Array:
    """image uint8 [B H W 3] -> texture float32 [B H W 13]"""
    rgb_BHWc = image_BHWc.astype(jnp.float32) / 255
    groups = [jax.checkpoint(group)(rgb_BHWc) for group in (lab, sobel, position, eccentricity)]
    return jnp.concatenate([rgb_BHWc, *groups], -1)


def lab(rgb_BHWc: jax.Array) -> jax.Array:
    """rgb[B H W 3] -> lightness / 100, a / 128, b / 128 [B H W 3]"""
    linear = jnp.where(rgb_BHWc <= 0.04045, rgb_BHWc / 12.92, ((rgb_BHWc + 0.055) / 1.055) ** 2.4)
    xyz = jnp.einsum("BHWc,xc->BHWx", linear, XYZ / WHITE[:, None], precision="highest")
    root = jnp.where(xyz > (6 / 29) ** 3, jnp.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = jnp.split(root, 3, -1)
    return jnp.concatenate([1.16 * y - 0.16, 500 / 128 * (x - y), 200 / 128 * (y - z)], -1)


def sobel(rgb_BHWc: jax.Array) -> jax.Array:
    """rgb[B H W 3] -> gradient of luma over x, over y, its length, its direction / pi [B H W 4]"""
    luma = jnp.einsum("BHWc,c->BHW", rgb_BHWc, LUMA, precision="highest")
    over_x = filtered(filtered(luma, BINOMIAL, 1), DIFFERENCE, 2)
    over_y = filtered(filtered(luma, DIFFERENCE, 1), BINOMIAL, 2)
    length = jnp.sqrt(over_x**2 + over_y**2)
    return jnp.stack([over_x, over_y, length, jnp.atan2(over_y, over_x) / np.pi], -1)


def filtered(x_BHW: jax.Array, weights: tuple[float, float, float], dim: int) -> jax.Array:
    """x[B H W] -> its correlation with three weights along a dim; pixels at the edge are repeated [B H W]"""
    size = x_BHW.shape[dim]
    padded = jnp.pad(x_BHW, [(int(d == dim),) * 2 for d in range(3)], mode="edge")
    return sum(w * jax.lax.slice_in_dim(padded, i, i + size, axis=dim) for i, w in enumerate(weights) if w)


def position(rgb_BHWc: jax.Array) -> jax.Array:
    """rgb[B H W 3] -> y, x of each pixel, -1 to 1 [B H W 2]"""
    B, H, W, _ = rgb_BHWc.shape
    y, x = jnp.meshgrid(_centres(H), _centres(W), indexing="ij")
    return jnp.broadcast_to(jnp.stack([y, x], -1)[None], (B, H, W, 2))


def eccentricity(rgb_BHWc: jax.Array) -> jax.Array:
    """rgb[B H W 3] -> distance of each pixel from the centre, 1 in the corners of the picture [B H W 1]"""
    return jnp.sqrt(jnp.square(position(rgb_BHWc)).mean(-1, keepdims=True))


def _centres(size: int) -> jax.Array:
    """Centres of pixels along a side, -1 to 1 from edge to edge."""
    return (2 * jnp.arange(size, dtype=jnp.float32) + 1) / size - 1
