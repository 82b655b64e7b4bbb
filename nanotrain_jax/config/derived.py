"""What follows from keys of a config: rows of a padded vocabulary, whether flash attention runs. Needs no JAX."""

from math import lcm

from nanotrain_jax.config.schema import Model


def padded_vocab(vocab_size: int, shards: int) -> int:
    """Return the number of embedding rows: vocab_size; with shards > 1 rounded up to a multiple of lcm(128, shards).

    shards: `Parallel.vocab_shards`. Every device then holds the same number of rows.
    """
    return -(-vocab_size // lcm(128, shards)) * lcm(128, shards) if shards > 1 else vocab_size


def fits_flash(model: Model, compute: str) -> bool:
    """True if cuDNN flash attention supports this head dim and dtype and is not disabled; it stores no scores."""
    head = model.head_width
    return model.attention != "xla" and compute != "float32" and head <= 128 and head % 8 == 0
