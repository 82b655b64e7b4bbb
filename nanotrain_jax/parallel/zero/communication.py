"""How ZeRO's gradients and weights travel: their dtypes, in 8 bits or not, the size of buckets."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel import collectives
from nanotrain_jax.parallel.gradients import quantization
from nanotrain_jax.parallel.gradients.quantization import Kind


class Communication(NamedTuple):
    """Settings of the collectives, and those that depend on them.

    In 8 bits (quantization.py) travel arrays of at least `least` elements, and of a block per device; of weights only
    matrices. Bytes: (N-1)/N per element of what travels, times two in an all-reduce.
    """

    dtype: jnp.dtype  # of gradients on the wire, and of their sums; with `reduce` float32
    bucket_bytes: float  # largest bucket, in bytes as stored
    weights: jnp.dtype | None = None  # of gathered weights, on the wire and in the layer; None: as stored
    reduce: Kind | None = None  # 8 bits in which gradients travel
    gather: Kind | None = None  # 8 bits in which weights travel: float8 with one scale per shard, int8 with blocks
    least: int = 0  # elements
    kept: tuple[str, ...] = ()  # axes over which `Zero.reduce` does not reduce (compression.py does)

    def reduce_scatter(self, grads: Sequence[jax.Array], axes: tuple[str, ...], dims: Sequence[int]) -> list[jax.Array]:
        """g[...] {local} -> g[.../axes] for each of grads, all of dtype: sums over axes."""
        in_8_bits = partial(quantization.reduce_scatter, kind=self.reduce)
        chosen = self._are_reduced_in_8_bits(grads, axes)
        return _by_choice(chosen, in_8_bits, collectives.reduce_scatter, grads, axes, dims)

    def all_reduce(self, grads: Sequence[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
        """g {varying over axes} -> sum over axes, invarying, for each of grads, all of dtype. Without axes: grads."""
        in_8_bits = partial(quantization.all_reduce, kind=self.reduce)
        chosen = self._are_reduced_in_8_bits(grads, axes)
        return _by_choice(chosen, in_8_bits, collectives.all_reduce, grads, tuple(axes))

    def all_gather(self, weights: Sequence[jax.Array], axes: tuple[str, ...], dims: Sequence[int]) -> list[jax.Array]:
        """w[.../axes] -> w[...] for each of weights. Gradients pass as if weights were not rounded."""
        N = jax.lax.axis_size(axes)
        chosen = [bool(self.gather) and w.ndim >= 2 for w in weights]
        in_8_bits = quantization.all_gather_with_one_scale
        if self.gather == "int8":
            in_8_bits = partial(quantization.all_gather, kind=self.gather)
            large = (quantization.is_quantized(w.size * N, N, self.least) for w in weights)
            chosen = [is_matrix and is_large for is_matrix, is_large in zip(chosen, large, strict=True)]
        return _by_choice(chosen, in_8_bits, collectives.all_gather, weights, axes, dims)

    def _are_reduced_in_8_bits(self, grads: Sequence[jax.Array], axes: Sequence[str]) -> list[bool]:
        N = jax.lax.axis_size(tuple(axes)) if axes else 1
        return [bool(self.reduce) and quantization.is_quantized(g.size, N, self.least) for g in grads]


def _by_choice(
    chosen: list[bool], first: Callable, second: Callable, arrays: Sequence[jax.Array], axes: tuple, *dims: Sequence
) -> list[jax.Array]:
    """Call first(arrays, axes, *dims) with the chosen arrays and second with the others -> all results, in order."""
    results = {}
    for choice, move in ((True, first), (False, second)):
        indices = [i for i, is_chosen in enumerate(chosen) if is_chosen == choice]
        if indices:
            of_these = ([column[i] for i in indices] for column in dims)
            results |= zip(indices, move([arrays[i] for i in indices], axes, *of_these), strict=True)
    return [results[i] for i in range(len(arrays))]
