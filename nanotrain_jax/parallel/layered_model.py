"""A model cut into what comes before, in and after a stack of layers, for loops whose backward is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Tree = Any  # a pytree of arrays


class LayeredModel(NamedTuple):
    """Functions and weights. Differentiated are `ends`, and what `inputs` makes of the weights of a layer.

    first(ends, microbatch) -> x                 before the first layer
    layer(weights, inputs, x) -> x               one layer; layer(weights, x) where inputs is None
    last(ends, x, microbatch) -> loss            after the last layer; a scalar
    """

    first: Callable[[Tree, Tree], jax.Array]
    layer: Callable[..., jax.Array]
    last: Callable[[Tree, jax.Array, Tree], Any]
    ends: Tree
    layers: Tree  # stacked along a leading dim
    inputs: Callable[[Tree], Tree] | None = None
