"""A model as loops over its layers take it: what comes before, in and after a stack of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Tree = Any  # a pytree of arrays


class LayeredModel(NamedTuple):
    """A model cut at its layers, and the weights it is differentiated at.

    first(ends, microbatch) -> x            before the first layer: the embedding
    layer(weights, x) -> x                  one layer; weights: layers without their leading dim
    last(ends, x, microbatch) -> loss       after the last layer: a scalar, or for a forward alone a tree of scalars

    x[B T D], or any other array or tree of arrays of floats, of which every layer keeps structure, shapes and dtypes (a
    router's auxiliary loss can travel with the activation, in pipelines). microbatch: any tree of arrays.

    ends: the weights of first and last, a tree. A weight that both use (tied embeddings) is in it once.
    layers[n ...]: the weights of the layers, stacked: each array has a leading dim of n layers.

    Gradients are those of ends and layers. To differentiate something else in a layer (the taps of ZeRO 2 and 3), give
    inputs: it makes of one layer's weights what is differentiated, and the layer takes both,

    layer(weights, inputs, x) -> x          with inputs = model.inputs(weights)

    fetch: makes of one layer's stored weights those that layer and inputs take, one layer ahead of its turn (an
    all-gather, which travels while the layer before it computes). None: the stored ones.
    """

    first: Callable[[Tree, Tree], Tree]
    layer: Callable[..., Tree]
    last: Callable[[Tree, Tree, Tree], Tree]
    ends: Tree
    layers: Tree
    inputs: Callable[[Tree], Tree] | None = None
    fetch: Callable[[Tree], Tree] | None = None

    def inputs_of(self, weights: Tree) -> Tree:
        """What is differentiated in a layer with these weights."""
        return weights if self.inputs is None else self.inputs(weights)

    def run_layer(self, weights: Tree, inputs: Tree, x: Tree) -> Tree:
        """One layer as a function of what is differentiated: inputs and x."""
        return self.layer(inputs, x) if self.inputs is None else self.layer(weights, inputs, x)
