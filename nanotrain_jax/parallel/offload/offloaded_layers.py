"""Forward and backward through layers in host memory, double-buffered: the next layer is copied while one computes.

Autodiff would copy weights where they are used, and leave gradients on the device. Here each layer runs under its vjp
(`split_vjp.py`), as in the pipeline, and the loop is explicit (ZeRO-Infinity, arXiv 2104.07857, section 6.2):

    forward     for i in 0 .. n-1:   next = to_device(weights[i + 1])
                                     x, residuals[i] = forward(weights[i], x)
    backward    for i in n-1 .. 0:   next = to_device(weights[i - 1], residuals[i - 1])
                                     grads[i], g = backward(residuals[i], weights[i], g)

Copies of residuals and gradients to the host overlap with the next layer's compute. Bytes, of what is in host memory:
weights to the device twice per microbatch; residuals to the host and back; gradients to the host, from the second
microbatch on also to the device first. Each loop fetches one layer more than it uses.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.loops import as_stored, get, put
from nanotrain_jax.parallel.offload.host_offload import on_host, to_device
from nanotrain_jax.parallel.split_vjp import SplitVjp, split_vjp


class Sums(NamedTuple):
    """Sums over microbatches: loss, and gradients of ends and layers."""

    loss: jax.Array
    ends: tuple[Tree, Tree]
    layers: Tree


def run_layers(
    model: LayeredModel,
    microbatches: Tree,
    add_ends: Callable[[tuple, tuple | None], tuple],
    add_layer: Callable[[Tree], Tree],
) -> Sums:
    """-> loss, gradients of ends and of layers: sums over microbatches[M ...] in float32; local to a device.

    model.ends: a pair, the weights of first and of last. add_ends(gradients, earlier gradients or None) and
    add_layer(gradients) move gradients to the memory that stores them until the update.
    """
    count = len(jax.tree.leaves(microbatches)[0])
    run = partial(_microbatch, model, add_ends, add_layer, count > 1)
    sums = run(None, jax.tree.map(lambda x: x[0], microbatches))
    if count > 1:
        others = jax.tree.map(lambda x: x[1:], microbatches)
        sums, _ = lax.scan(lambda sums, batch: (run(sums, batch), None), sums, others)
    return sums


def _microbatch(
    model: LayeredModel, add_ends: Callable, add_layer: Callable, in_float32: bool, sums: Sums | None, batch: Tree
) -> Sums:
    """Forward and backward of one microbatch -> sums plus its loss and gradients. sums=None: the first microbatch."""
    of_first, of_last = model.ends
    x = model.first(of_first, batch)
    vjp, x, residuals, fetched = _forward(model, x, batch)
    loss, last_vjp = jax.vjp(lambda ends, x: model.last(ends, x, batch), of_last, x)
    last_grads, g = last_vjp(jnp.ones_like(loss))
    earlier = sums and sums.layers

    def add(grads: Tree, earlier: Tree | None) -> Tree:
        grads = _cast(grads, in_float32)
        return add_layer(grads if earlier is None else jax.tree.map(jnp.add, earlier, grads))

    g, layers = _backward(model, vjp, (residuals, fetched), batch, g, (earlier, add))
    _, first_vjp = jax.vjp(lambda ends: model.first(ends, batch), of_first)
    ends = _cast((first_vjp(g)[0], last_grads), in_float32)
    if sums is None:
        return Sums(loss, add_ends(ends, None), layers)
    return Sums(sums.loss + loss, add_ends(ends, sums.ends), layers)


def _cast(grads: Tree, in_float32: bool) -> Tree:
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads) if in_float32 else grads


@jax.named_scope("forward")
def _forward(model: LayeredModel, x: jax.Array, batch: Tree) -> tuple[SplitVjp, jax.Array, list, list]:
    """-> vjp of a layer, x after all layers, residuals of each layer, the last layer's weights on the device."""
    count = len(jax.tree.leaves(model.layers)[0])
    first_row = jnp.zeros((), jnp.int32)
    fetched = _fetch(model.layers, first_row)
    weights = _row(model.layers, fetched, first_row)
    vjp = split_vjp(model.run_layer, (weights, batch), model.inputs(weights), x)

    def body(carry: tuple, i: jax.Array) -> tuple[tuple, list]:
        x, fetched = carry
        prefetched = _fetch(model.layers, jnp.minimum(i + 1, count - 1))
        weights = _row(model.layers, fetched, i)
        x, residuals = vjp.forward((weights, batch), model.inputs(weights), x)
        return (x, prefetched), residuals

    (x, fetched), residuals = lax.scan(body, (x, fetched), jnp.arange(count))
    return vjp, x, residuals, fetched


@jax.named_scope("backward")
def _backward(
    model: LayeredModel, vjp: SplitVjp, saved: tuple, batch: Tree, g: jax.Array, accumulation: tuple
) -> tuple:
    """-> gradient of the first layer's input, gradients of all layers.

    saved: residuals of the layers, and the last layer's weights on the device. accumulation: gradients of earlier
    microbatches or None, and the function that adds a layer's gradients to them.
    """
    residuals, fetched = saved
    earlier, add = accumulation
    count = len(jax.tree.leaves(model.layers)[0])

    def body(carry: tuple, i: jax.Array) -> tuple[tuple, Tree]:
        g, fetched, sums = carry
        prefetched = _fetch((model.layers, residuals), jnp.maximum(i - 1, 0))
        weights, layer_residuals = _row((model.layers, residuals), fetched, i)
        grads, g = vjp.backward(layer_residuals, (weights, batch), model.inputs(weights), g)
        if sums is None:
            return (g, prefetched, None), add(grads, None)
        grads = add(grads, to_device(jax.tree.map(lambda s: get(s, i), sums)))
        return (g, prefetched, jax.tree.map(lambda s, grad: put(s, i, grad), sums, grads)), None

    initial = g, fetched + _fetch(residuals, jnp.full((), count - 1, jnp.int32)), earlier
    (g, _, sums), new_grads = lax.scan(body, initial, jnp.arange(count), reverse=True)
    return g, new_grads if earlier is None else sums


def _fetch(stacks: Tree, i: jax.Array) -> list:
    """Copy the i-th row of each stack in host memory to the device; None for the other stacks."""
    return [to_device(get(x, i)) if on_host(x) else None for x in jax.tree.leaves(stacks)]


def _row(stacks: Tree, fetched: list, i: jax.Array) -> Tree:
    """Return the i-th row of each stack: the fetched one, else a slice of the stack on the device."""
    leaves, tree = jax.tree.flatten(stacks)
    return tree.unflatten([as_stored(get(x, i)) if y is None else y for x, y in zip(leaves, fetched, strict=True)])
