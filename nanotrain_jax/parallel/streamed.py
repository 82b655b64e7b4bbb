"""Forward and backward through layers that rest in host memory, with the next layer on its way while one computes.

Autodiff would fetch a layer's weights where they are used, and keep its gradients on the device. Here each layer is run
by its pullback (`pullback.py`), as in the pipeline, so the loop can be written out (ZeRO-Infinity, arXiv 2104.07857,
section 6.2):

    forward     for i in 0 .. n-1:   next = to_device(weights[i + 1])   while x, kept[i] = layer(weights[i], x)
    backward    for i in n-1 .. 0:   next = to_device(weights[i - 1])   while grads, g = pull(kept[i], weights[i], g)
                                     grads[i] goes where gradients rest, while the layer before computes

Moved, where they rest on the host: the weights of each layer to the device twice per microbatch (and two layers once
more than is used), its gradients to the host once per microbatch and, from the second on, to the device before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.loops import get, put
from nanotrain_jax.parallel.offload import on_host, to_device, to_host
from nanotrain_jax.parallel.pullback import pullback

Tree = Any  # a pytree of arrays


def run_layers(
    first: Callable[[Tree, Tree], jax.Array],
    layer: Callable[[Tree, Tree, jax.Array], jax.Array],
    last: Callable[[Tree, jax.Array, Tree], jax.Array],
    ends: Tree,
    layers: Tree,
    microbatches: Tree,
    inputs: Callable[[Tree], Tree],
    settle: tuple[Callable[[Tree], Tree], Callable[[Tree], Tree]],
) -> tuple[jax.Array, tuple[Tree, Tree]]:
    """-> loss, (gradients of ends, of layers) in float32, summed over microbatches[M ...]; local to a device.

    first, layer, last, ends, layers, inputs: as `pipeline.run_schedule` takes them, for one stage. settle: functions
    of the gradients of ends, and of one of layers, that send to the host what is to rest there.
    """
    count, M = len(jax.tree.leaves(layers)[0]), len(jax.tree.leaves(microbatches)[0])
    of_ends, of_layers = settle

    def weights_of(i: jax.Array) -> Tree:
        return to_device(jax.tree.map(lambda w: get(w, i), layers))

    def microbatch(sums: Tree, batch: Tree) -> Tree:
        """sums plus what this microbatch adds; sums None: what it makes."""
        x = first(ends, batch)
        weights = weights_of(jnp.zeros((), jnp.int32))
        back = pullback(layer, weights, inputs(weights), x)

        def forward(carry: tuple, i: jax.Array) -> tuple[tuple, list]:
            x, weights = carry
            coming = weights_of(jnp.minimum(i + 1, count - 1))
            x, kept = back.forward(weights, inputs(weights), x)
            return (x, coming), kept

        (x, weights), kept = lax.scan(forward, (x, weights), jnp.arange(count))
        loss, pull = jax.vjp(lambda ends, x: last(ends, x, batch), ends, x)
        at_end, g = pull(jnp.ones_like(loss))
        at_end = of_ends(at_end)

        def backward(carry: tuple, now: tuple) -> tuple[tuple, Tree]:
            (g, weights, sums), (i, kept) = carry, now
            coming = weights_of(jnp.maximum(i - 1, 0))
            grads, g = back.whole(kept, weights, inputs(weights), g)
            if sums is None:
                return (g, coming, None), of_layers(grads)
            earlier = to_device(jax.tree.map(lambda s: get(s, i), sums))
            grads = of_layers(jax.tree.map(jnp.add, earlier, grads))
            return (g, coming, jax.tree.map(lambda s, grad: put(s, i, grad), sums, grads)), None

        begin = g, weights, sums and sums[2]
        (g, _, added), made = lax.scan(backward, begin, (jnp.arange(count), kept), reverse=True)
        _, pull = jax.vjp(lambda ends: first(ends, batch), ends)
        at_begin = of_ends(pull(g)[0])
        together = lambda *grads: to_host(sum(map(to_device, grads))) if on_host(grads[0]) else sum(grads)
        if sums is None:
            return loss, jax.tree.map(together, at_end, at_begin), made
        return sums[0] + loss, jax.tree.map(together, sums[1], at_end, at_begin), added

    sums = microbatch(None, jax.tree.map(lambda x: x[0], microbatches))
    if M > 1:
        others = jax.tree.map(lambda x: x[1:], microbatches)
        sums, _ = lax.scan(lambda sums, batch: (microbatch(sums, batch), None), sums, others)
    return sums[0], sums[1:]
