"""What the training step needs of a model. Our decoder is one instance, anybody's model is another.

A model is a stack of alike layers, with something before and something after it:

    x = first(weights["ends"], batch)                        embedding, an encoder, ...
    x = layer(weights["layers"][i], x)   for i in 0 .. L-1   each layer keeps the shape and dtype of x
    sum of losses, count = last(weights["ends"], x, batch)   norm, head, loss

Weights are a dict {"ends": ..., "layers": ...} of nested dicts of arrays; those under "layers" carry a leading dim L.
The functions run inside `shard_map` on the local shards that `rules` describe, on one microbatch of this device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from nanotrain_jax.sharding import Rules

Tree = Any  # a pytree of arrays


@dataclass(frozen=True, eq=False)
class Model:
    """A model as the step sees it.

    shapes           ShapeDtypeStructs of the weights, in float32
    rules            the layout of each weight over the mesh axes pipe (the dim L) and tensor
    init             init(seed, order, put) -> weights in float32; the same seed gives the same values on every mesh.
                     order: which layer each row of the stacked weights is; None: in order.
                     put: applied to one layer at a time, before layers are stacked; None: nothing
    used_by_first    of a tree like weights["ends"], what `first` uses, and
    used_by_last     what `last` does. Tied weights are in both
    is_decayed       tree path of a weight -> whether weight decay applies to it
    has_partial_gradient   tree path of a weight that every device along tensor stores -> whether its gradient on each
                     is a partial sum, because they see other tokens or other heads
    """

    shapes: Tree
    rules: Rules
    init: Callable[..., Tree]
    first: Callable[[Tree, Tree], jax.Array]
    layer: Callable[[Tree, jax.Array], jax.Array]
    last: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, jax.Array]]
    used_by_first: Callable[[Tree], Tree]
    used_by_last: Callable[[Tree], Tree]
    is_decayed: Callable[[tuple], bool]
    has_partial_gradient: Callable[[tuple], bool]
