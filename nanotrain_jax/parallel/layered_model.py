"""A model split for explicit loops over layers: before, in and after a stack of layers."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nanotrain_jax.parallel.collectives import Tree


class LayeredModel(NamedTuple):
    """A model split at its layers, and the weights to differentiate.

    first(ends, microbatch) -> x            before the first layer: the embedding
    layer(weights, x, microbatch) -> x      one layer; weights: layers without their leading dim
    last(ends, x, microbatch) -> loss       after the last layer: a scalar, or for a forward alone a tree of scalars

    x[B T D], or any float array or tree of them; every layer keeps its structure, shapes and dtypes (in pipelines a
    router's auxiliary loss can be part of it). microbatch: any tree of arrays.

    ends: the weights of first and last, a tree. A weight that both use (tied embeddings) occurs once.
    layers[n ...]: the stacked weights of n layers.

    Gradients are with respect to ends and layers. To differentiate something else in a layer (taps of ZeRO 2 and 3),
    give inputs: it maps the weights of one layer to what is differentiated, and the layer takes both,

    layer(weights, inputs, x, microbatch) -> x          with inputs = model.inputs(weights)

    fetch: maps the stored weights of one layer to those that layer and inputs take, prefetched while the previous layer
    computes: an all-gather, or a copy from host memory. None: layers are used as stored.

    is_layer: in pipelines whose stages have different numbers of layers, False for rows of layers that are padding, a
    bool for each row of each stage [P n]. None: all rows are layers.

    split_ends: in pipelines all stages run first and last together, each with its part of the ends (vocabulary
    parallelism, arXiv 2411.05288): x is the sum over stages of what first returns; last gets the x of the last stage on
    every stage, communicates over the stages to return the same loss on all, and its gradients of x are summed.

    scatter: maps the gradients of one layer from one microbatch to those that are summed over microbatches, while the
    backward of the next layer computes: a reduce-scatter. None: gradients are summed as they are.

    reduce: the same once per step. It maps the complete float32 gradients of one layer to those that are returned, an
    all-reduce or reduce-scatter over data. None: the sums are returned. Not with scatter.
    """

    first: Callable[[Tree, Tree], Tree]
    layer: Callable[..., Tree]
    last: Callable[[Tree, Tree, Tree], Tree]
    ends: Tree
    layers: Tree
    inputs: Callable[[Tree], Tree] | None = None
    fetch: Callable[[Tree], Tree] | None = None
    scatter: Callable[[Tree], Tree] | None = None
    reduce: Callable[[Tree], Tree] | None = None
    is_layer: np.ndarray | None = None
    split_ends: bool = False

    def inputs_of(self, weights: Tree) -> Tree:
        """Return what is differentiated in a layer with these weights."""
        return weights if self.inputs is None else self.inputs(weights)

    def run_layer(self, constants: tuple[Tree, Tree], inputs: Tree, x: Tree) -> Tree:
        """Run one layer, a function of inputs and x. constants: weights, microbatch."""
        weights, microbatch = constants
        if self.inputs is None:
            return self.layer(inputs, x, microbatch)
        return self.layer(weights, inputs, x, microbatch)
