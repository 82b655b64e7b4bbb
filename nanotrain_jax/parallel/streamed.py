"""Forward and backward through layers that rest in host memory, with the next layer on its way while one computes.

Autodiff would fetch what a layer needs where it is used, and keep gradients on the device. Here each layer is run by
its vjp (`pullback.py`), as in the pipeline, so the loop can be written out (ZeRO-Infinity, arXiv 2104.07857,
section 6.2):

    forward     for i in 0 .. n-1:   next = to_device(weights[i + 1])
                                     x, kept[i] = layer(weights[i], x); kept[i] leaves while the next layer computes
    backward    for i in n-1 .. 0:   next = to_device(weights[i - 1], kept[i - 1])
                                     grads[i], g = pull(kept[i], weights[i], g); grads[i] leaves while the next computes

Moved, where they rest on the host: weights of each layer to the device twice per microbatch, what it kept there and
back, its gradients to the host and, from the second microbatch on, to the device before. Each loop fetches one layer
more than it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.loops import as_stored, get, put
from nanotrain_jax.parallel.offload import on_host, to_device
from nanotrain_jax.parallel.pullback import SplitVjp, split_vjp

Tree = Any  # a pytree of arrays


class Sums(NamedTuple):
    """What microbatches have added up to."""

    loss: jax.Array
    ends: tuple[Tree, Tree]
    layers: Tree


def run_layers(
    model: LayeredModel,
    microbatches: Tree,
    add_ends: Callable[[tuple, tuple | None], tuple],
    add_layer: Callable[[Tree], Tree],
) -> Sums:
    """-> loss, gradients of ends (of what first takes, of what last takes) and of layers: sums over microbatches[M ...]
    in float32; local to a device.

    model.ends: a pair, what first and what last take. add_ends(gradients, earlier ones or None), add_layer(gradients):
    put gradients into the memory where they wait for the update.
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
    """sums with what this microbatch adds; None: what it makes."""
    of_first, of_last = model.ends
    x = model.first(of_first, batch)
    vjp, x, kept, fetched = _forward(model, x)
    loss, pull = jax.vjp(lambda ends, x: model.last(ends, x, batch), of_last, x)
    last_grads, g = pull(jnp.ones_like(loss))
    earlier = sums and sums.layers

    def add(grads: Tree, earlier: Tree | None) -> Tree:
        grads = _exact(grads, in_float32)
        return add_layer(grads if earlier is None else jax.tree.map(jnp.add, earlier, grads))

    g, layers = _backward(model, vjp, (kept, fetched), g, (earlier, add))
    _, pull = jax.vjp(lambda ends: model.first(ends, batch), of_first)
    ends = _exact((pull(g)[0], last_grads), in_float32)
    if sums is None:
        return Sums(loss, add_ends(ends, None), layers)
    return Sums(sums.loss + loss, add_ends(ends, sums.ends), layers)


def _exact(grads: Tree, in_float32: bool) -> Tree:
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads) if in_float32 else grads


def _forward(model: LayeredModel, x: jax.Array) -> tuple[SplitVjp, jax.Array, list, list]:
    """-> the backward of a layer, x after all layers, what each kept, and the last layer's weights on the device."""
    count = len(jax.tree.leaves(model.layers)[0])
    zeroth = jnp.zeros((), jnp.int32)
    fetched = _fetched(model.layers, zeroth)
    weights = _row(model.layers, fetched, zeroth)
    vjp = split_vjp(model.layer, weights, model.inputs(weights), x)

    def turn(carry: tuple, i: jax.Array) -> tuple[tuple, list]:
        x, fetched = carry
        coming = _fetched(model.layers, jnp.minimum(i + 1, count - 1))
        weights = _row(model.layers, fetched, i)
        x, kept = vjp.forward(weights, model.inputs(weights), x)
        return (x, coming), kept

    (x, fetched), kept = lax.scan(turn, (x, fetched), jnp.arange(count))
    return vjp, x, kept, fetched


def _backward(model: LayeredModel, vjp: SplitVjp, stored: tuple, g: jax.Array, adding: tuple) -> tuple:
    """-> gradient of the first layer's input, gradients of all layers.

    stored: what layers kept, and the last layer's weights. adding: earlier gradients of layers, or None, and the
    function that adds those of a layer to them.
    """
    kept, fetched = stored
    earlier, add = adding
    count = len(jax.tree.leaves(model.layers)[0])

    def turn(carry: tuple, i: jax.Array) -> tuple[tuple, Tree]:
        g, fetched, sums = carry
        coming = _fetched((model.layers, kept), jnp.maximum(i - 1, 0))
        weights, kept_here = _row((model.layers, kept), fetched, i)
        grads, g = vjp.backward(kept_here, weights, model.inputs(weights), g)
        if sums is None:
            return (g, coming, None), add(grads, None)
        grads = add(grads, to_device(jax.tree.map(lambda s: get(s, i), sums)))
        return (g, coming, jax.tree.map(lambda s, grad: put(s, i, grad), sums, grads)), None

    begin = g, fetched + _fetched(kept, jnp.full((), count - 1, jnp.int32)), earlier
    (g, _, sums), made = lax.scan(turn, begin, jnp.arange(count), reverse=True)
    return g, made if earlier is None else sums


def _fetched(stacks: Tree, i: jax.Array) -> list:
    """The i-th row of each stack that rests on the host, on the device; None for the others."""
    return [to_device(get(x, i)) if on_host(x) else None for x in jax.tree.leaves(stacks)]


def _row(stacks: Tree, fetched: list, i: jax.Array) -> Tree:
    """The i-th row of each stack: what was fetched, or else from where it is."""
    leaves, tree = jax.tree.flatten(stacks)
    return tree.unflatten([as_stored(get(x, i)) if y is None else y for x, y in zip(leaves, fetched, strict=True)])
