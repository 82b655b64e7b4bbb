"""What follows from keys of a config: rows of a padded vocabulary, what fits kernels. Needs no JAX."""

from math import lcm

from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.kernels.limits import GROUPED_TILE


def padded_vocab(vocab_size: int, shards: int) -> int:
    """Return the number of embedding rows: vocab_size; with shards > 1 rounded up to a multiple of lcm(128, shards).

    shards: `Parallel.vocab_shards`. Every device then holds the same number of rows.
    """
    return -(-vocab_size // lcm(128, shards)) * lcm(128, shards) if shards > 1 else vocab_size


def fits_flash(model: Model, compute: str) -> bool:
    """True if cuDNN flash attention supports this head dim and dtype and is not disabled; it stores no scores."""
    head = model.head_width
    return model.attention != "xla" and compute != "float32" and head <= 128 and head % 8 == 0


def fits_grouped_kernel(config: Config) -> bool:
    """True if tokamax's kernels for experts (parallel/expert/kernels.py) support these sizes and this dtype."""
    m = config.model
    widths, precision = (m.d_model, m.experts.d_ff // config.parallel.tensor), config.precision
    is_16_bit = precision.compute != "float32" and precision.matmul != "float8"
    return is_16_bit and not any(width % GROUPED_TILE for width in widths)
