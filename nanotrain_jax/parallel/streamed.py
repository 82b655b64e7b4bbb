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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.loops import as_stored, get, put
from nanotrain_jax.parallel.offload import on_host, to_device
from nanotrain_jax.parallel.pullback import split_vjp

Tree = Any  # a pytree of arrays


def run_layers(
    first: Callable[[Tree, Tree], jax.Array],
    layer: Callable[[Tree, Tree, jax.Array], jax.Array],
    last: Callable[[Tree, jax.Array, Tree], jax.Array],
    ends: tuple[Tree, Tree],
    layers: Tree,
    microbatches: Tree,
    inputs: Callable[[Tree], Tree],
    settle: Callable[..., tuple[Tree, Tree]],
    settle_layer: Callable[[Tree], Tree],
) -> tuple[jax.Array, tuple[Tree, Tree], Tree]:
    """-> loss, gradients (of what first takes, of what last takes), of layers: over microbatches[M ...], summed in
    float32; local to a device.

    first, layer, last, layers, inputs: as in `LayeredModel`, layer with inputs. ends: what first and what
    last take. settle, settle_layer: functions of the gradients of ends (and what there is of them already), of a layer,
    that send to the host what is to rest there.
    """
    count, M = len(jax.tree.leaves(layers)[0]), len(jax.tree.leaves(microbatches)[0])
    exact = (lambda grads: jax.tree.map(lambda g: g.astype(jnp.float32), grads)) if M > 1 else lambda grads: grads

    def microbatch(sums: Tree, batch: Tree) -> tuple:
        """sums (loss, gradients of ends, of layers) with what this microbatch adds; None: what it makes."""
        earlier_loss, earlier_ends, earlier_layers = sums or (None, None, None)
        x, coming = first(ends[0], batch), _fetched(layers, jnp.zeros((), jnp.int32))
        weights = _row(layers, coming, jnp.zeros((), jnp.int32))
        vjp = split_vjp(layer, weights, inputs(weights), x)

        def forward(carry: tuple, i: jax.Array) -> tuple[tuple, list]:
            x, here = carry
            coming, weights = _fetched(layers, jnp.minimum(i + 1, count - 1)), _row(layers, here, i)
            x, kept = vjp.forward(weights, inputs(weights), x)
            return (x, coming), kept

        (x, coming), kept = lax.scan(forward, (x, coming), jnp.arange(count))
        loss, pull = jax.vjp(lambda end, x: last(end, x, batch), ends[1], x)
        of_end, g = pull(jnp.ones_like(loss))

        def backward(carry: tuple, i: jax.Array) -> tuple[tuple, Tree]:
            g, here, sums = carry
            coming = _fetched((layers, kept), jnp.maximum(i - 1, 0))
            weights, kept_here = _row((layers, kept), here, i)
            grads, g = vjp.backward(kept_here, weights, inputs(weights), g)
            if sums is None:
                return (g, coming, None), settle_layer(exact(grads))
            earlier = to_device(jax.tree.map(lambda s: get(s, i), sums))
            grads = settle_layer(jax.tree.map(jnp.add, earlier, exact(grads)))
            return (g, coming, jax.tree.map(lambda s, grad: put(s, i, grad), sums, grads)), None

        begin = g, coming + _fetched(kept, jnp.full((), count - 1, jnp.int32)), earlier_layers
        (g, _, of_layers), made = lax.scan(backward, begin, jnp.arange(count), reverse=True)
        _, pull = jax.vjp(lambda begin: first(begin, batch), ends[0])
        of_ends = exact((pull(g)[0], of_end))
        if sums is None:
            return loss, settle(of_ends), made
        return earlier_loss + loss, settle(of_ends, earlier_ends), of_layers

    sums = microbatch(None, jax.tree.map(lambda x: x[0], microbatches))
    if M > 1:
        others = jax.tree.map(lambda x: x[1:], microbatches)
        sums, _ = lax.scan(lambda sums, batch: (microbatch(sums, batch), None), sums, others)
    return sums


def _fetched(stacks: Tree, i: jax.Array) -> list:
    """The i-th row of each stack that rests on the host, on the device; None for the others."""
    return [to_device(get(x, i)) if on_host(x) else None for x in jax.tree.leaves(stacks)]


def _row(stacks: Tree, fetched: list, i: jax.Array) -> Tree:
    """The i-th row of each stack: what was fetched, or else from where it is."""
    leaves, tree = jax.tree.flatten(stacks)
    return tree.unflatten([as_stored(get(x, i)) if y is None else y for x, y in zip(leaves, fetched, strict=True)])
