"""One tick of a pipeline stage: the forward, backward and weight gradients that the schedule assigns to it.

Each device along the pipe axis is a stage and runs its column of the schedule (`schedule.py`). In a tick, with x[B T D]
the activation between layers (an array or a tree of them) and g its gradient:

    shift(g, -1)   send the g of the last tick to the previous stage, while F computes
    F              forward of a microbatch through the layers of a chunk; store its residuals in a slot
    shift(x, +1)   send the x of F to the next stage, while B computes
    B              backward of a microbatch from its residuals; accumulate gradients in place
    W              if the schedule splits the backward: the weight gradients that B left out

Bytes over pipe: x and g once per tick, always both, never inside a branch; with split ends more (`both_ends.py`).

Autodiff of this loop would store the residuals of all microbatches. Here each layer runs under `jax.vjp`, and its
residuals stay in ring buffers (`ring_buffers.py`) with one slot per microbatch in flight: memory does not grow with the
number of microbatches (except gpipe's). The rematerialization policy of the layer decides what its residuals are.

The loop over the layers of a chunk (`layer_loop.py`) prefetches the weights of the next layer, and in the backward its
residuals in host memory. With `LayeredModel.scatter` the backward (or W) of a layer also scatters the gradients of the
layer before; with `LayeredModel.reduce` the last one of a chunk reduces the complete gradients likewise.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel import loops
from nanotrain_jax.parallel.collectives import Tree, shift, varying_axes
from nanotrain_jax.parallel.layer_loop import LayerWork, over_layers
from nanotrain_jax.parallel.pipeline import both_ends, ring_buffers
from nanotrain_jax.parallel.pipeline.both_ends import add
from nanotrain_jax.parallel.pipeline.stage import Carry, Residuals, Stage, Sums, Tick


def tick(stage: Stage, carry: Carry, now: Tick) -> tuple[Carry, None]:
    """Run one tick: shift g, F, shift x, B, W. A body for `lax.scan`."""
    g = shifted(stage, carry.g, -1)
    carry = carry._replace(inputs=loops.put(carry.inputs, stage.slot("inputs", now.x_arrives), carry.x))
    if stage.model.split_ends:
        carry, g, output = _forward_and_ends(stage, now, carry, g)
        output_unit = now.ends.loss
    else:
        carry = forward(stage, now.forward, carry)
        output, output_unit = carry.x, now.forward
    # The output of the last chunk of the model takes the slot of its gradient until B computes its loss; with split
    # ends it is the gradient.
    output_unit = jnp.where(stage.is_last(output_unit), output_unit, -1)
    gradients = loops.put(carry.gradients, stage.slot("gradients", output_unit), output)
    gradients = loops.put(gradients, stage.slot("gradients", now.g_arrives), g)
    carry = carry._replace(x=shifted(stage, carry.x, 1), gradients=gradients)
    carry = backward(stage, now.backward, carry)
    for k in range(stage.schedule.weight.shape[-1]):
        carry = weight(stage, now.weight[k], carry)
    # Else XLA communicates in the next tick, which needs the result.
    x, g, shared = lax.optimization_barrier((carry.x, carry.g, carry.shared))
    return carry._replace(x=x, g=g, shared=shared), None


def _forward_and_ends(stage: Stage, now: Tick, carry: Carry, g: Tree) -> tuple[Carry, Tree, Tree]:
    """F, and what all stages compute at split ends (`both_ends.py`) -> carry, g, gradient of the last layer's x."""
    begins = jnp.where(stage.is_first(now.forward), now.forward, -1)
    inputs = loops.put(carry.inputs, stage.slot("inputs", begins), carry.shared.embedded)
    carry, of_output = both_ends.share_gradients(stage, now.ends, carry)
    carry = forward(stage, now.forward, carry._replace(inputs=inputs))
    x, g, of_output = lax.optimization_barrier((carry.x, g, of_output))  # else XLA waits for both gradients before F
    shared = both_ends.share_outputs(stage, now.ends.embedded, carry.shared, x)
    return carry._replace(x=x, shared=shared), g, of_output


def shifted(stage: Stage, x: Tree, step: int) -> Tree:
    """Shift x by step stages; with several chunks the stages form a ring."""
    return jax.tree.map(lambda x: shift(x, stage.axis, step, ring=stage.schedule.chunks > 1), x)


def forward(stage: Stage, unit: jax.Array, carry: Carry) -> Carry:
    """F: run the layers of the unit's chunk on its input; store their residuals in its slots."""

    def run(carry: tuple[Tree, Residuals], i: jax.Array, fetched: Tree | None) -> tuple[tuple, None]:
        def layer(_: jax.Array, x: Tree, buffers: Residuals) -> tuple[Tree, Residuals]:
            x, residuals = stage.vjp.forward(*stage.arguments(unit, i, fetched), x)
            return x, ring_buffers.store(stage, buffers, residuals, unit, i)

        return stage.if_layer(stage.row(unit, i), layer, *carry), None

    def work(_: jax.Array, x: Tree, buffers: Residuals) -> tuple[Tree, Residuals]:
        x = begin_chunk(stage, unit, x)
        return over_layers(LayerWork(run, partial(stage.fetch, unit)), (x, buffers), stage.layers_per_chunk)

    x = loops.get(carry.inputs, stage.slot("inputs", unit))
    x, residuals = stage.when(stage.works(unit), "forward", work, x, carry.residuals)
    return carry._replace(x=x, residuals=residuals)


def begin_chunk(stage: Stage, unit: jax.Array, x: Tree) -> Tree:
    """Return the input of the unit's chunk: `model.first` for the first chunk of the model, else x."""
    return x if stage.model.split_ends else both_ends.embed(stage, unit, stage.is_first(unit), x)


def backward(stage: Stage, unit: jax.Array, carry: Carry) -> Carry:
    """B: propagate the unit's g through the layers of its chunk; accumulate gradients (of layers unless W does)."""

    def work(turn: jax.Array, g: Tree, store: tuple[Sums, list]) -> tuple[Tree, tuple]:
        sums, intermediates = store
        of_ends = sums.ends
        if not stage.model.split_ends:
            g, of_ends = both_ends.backward_last(stage, unit, stage.is_last(unit), g, of_ends)
        if stage.is_alone and stage.schedule.microbatches == 1:
            # Zeros that XLA cannot allocate before g is computed, that is before the loss.
            zeros = jax.tree.map(lambda x: loops.zeros_after(g, x.shape, x.dtype, varying_axes(x)), sums.layers)
            sums = sums._replace(layers=zeros)
        layers = partial(_backward_layers, stage, carry.residuals)
        through = g, sums._replace(ends=of_ends), intermediates
        # Depends on turn, or XLA hoists the recomputation of a single layer out of the branch: into every tick.
        g, sums, intermediates = _through_chunk(stage, unit + turn, layers, through, reverse=True)
        of_ends = sums.ends
        if not stage.model.split_ends:
            is_first = stage.is_first(unit) & stage.works(unit)  # masked, unit may be -1
            g, of_ends = both_ends.backward_first(stage, unit, is_first, g, of_ends)
        return g, (sums._replace(ends=of_ends), intermediates)

    g = loops.get(carry.gradients, stage.slot("gradients", unit))
    g, (sums, intermediates) = stage.when(stage.works(unit), "backward", work, g, (carry.sums, carry.intermediates))
    return carry._replace(g=g, sums=sums, intermediates=intermediates)


def _through_chunk(stage: Stage, unit: jax.Array, layers: Callable, carry: Tree, reverse: bool = False) -> Tree:
    """Return the carry after layers(unit, is_final), a `LayerWork`, over the layers of the unit's chunk.

    With `LayeredModel.reduce` there are two branches: the unit that completes the gradients of its chunk (is_final)
    reduces those of each layer while the next layer computes.
    """

    def work(is_final: bool, turn: jax.Array, carry: Tree, nothing: tuple) -> tuple[Tree, tuple]:
        of_layers = layers(unit + turn, is_final)  # depends on turn, or XLA hoists work out of the branch
        return over_layers(of_layers, carry, stage.layers_per_chunk, reverse), nothing

    if stage.model.reduce is None or (reverse and stage.is_split):
        return over_layers(layers(unit, False), carry, stage.layers_per_chunk, reverse)
    is_final = stage.is_final(unit)
    carry, _ = stage.when(~is_final, "accumulate", partial(work, False), carry, ())
    return stage.when(is_final, "reduce", partial(work, True), carry, ())[0]


def _backward_layers(stage: Stage, buffers: Residuals, unit: jax.Array, is_final: bool) -> LayerWork:
    """The backward of the layers of the unit's chunk. carry: g, sums, intermediates."""

    sends = _sends(stage, is_final) and not stage.is_split

    def ahead(i: jax.Array) -> tuple[Tree | None, dict]:
        return stage.fetch(unit, i), ring_buffers.prefetch(stage, buffers, unit, i)

    def run(carry: tuple[Tree, Sums, list], i: jax.Array, fetched: tuple) -> tuple[tuple, Tree]:
        g, sums, intermediates = carry
        weights, prefetched = fetched
        arguments = stage.arguments(unit, i, weights)

        def layer(_: jax.Array, values: tuple, store: tuple[Sums, list]) -> tuple[tuple, tuple]:
            g, produced = values
            sums, intermediates = store
            residuals = ring_buffers.residuals_of(stage, buffers, unit, i, prefetched)
            if stage.is_split:
                g, of_layer = stage.vjp.backward_x(residuals, *arguments, g)
                slot = ring_buffers.index(stage, "intermediates", unit, i)
                return (g, produced), (sums, loops.put(intermediates, slot, of_layer))
            gradients, g = stage.vjp.backward(residuals, *arguments, g)
            sums, produced = _accumulate(stage, unit, i, sums, gradients, is_final)
            return (g, produced), (sums, intermediates)

        values = g, _of_padding(stage, unit, i, sums, arguments[1]) if sends else None
        (g, produced), (sums, intermediates) = stage.if_layer(stage.row(unit, i), layer, values, (sums, intermediates))
        if stage.is_alone and stage.model.scatter:  # else XLA scatters gradients of the ends after all layers
            g = jax.tree.map(partial(_after, sums.ends), g)
        return (g, sums, intermediates), produced

    def behind(carry: tuple[Tree, Sums, list], i: jax.Array, produced: Tree) -> tuple:
        g, sums, intermediates = carry
        return g, _send(stage, unit, i, sums, produced), intermediates

    return LayerWork(run, ahead, behind if sends else None)


def _after(others: Tree, x: jax.Array) -> jax.Array:
    """Return x, computed after the others that vary over no further axes (a barrier joins the types of arrays)."""
    alike = [other for other in jax.tree.leaves(others) if varying_axes(other) <= varying_axes(x)]
    return lax.optimization_barrier((x, alike))[0]


def weight(stage: Stage, unit: jax.Array, carry: Carry) -> Carry:
    """W: accumulate the weight gradients of the unit's chunk, from residuals and the intermediates of B."""

    def work(turn: jax.Array, nothing: tuple, sums: Sums) -> tuple[tuple, Sums]:
        return nothing, _through_chunk(stage, unit + turn, partial(_weight_layers, stage, carry), sums)

    _, sums = stage.when(unit >= 0, "weight", work, (), carry.sums)
    return carry._replace(sums=sums)


def _weight_layers(stage: Stage, carry: Carry, unit: jax.Array, is_final: bool) -> LayerWork:
    """The weight gradients of the layers of the unit's chunk. carry of the loop: sums."""
    sends = _sends(stage, is_final)

    def ahead(i: jax.Array) -> tuple[Tree | None, dict]:
        return stage.fetch(unit, i), ring_buffers.prefetch(stage, carry.residuals, unit, i, ("backward_weight",))

    def run(sums: Sums, i: jax.Array, fetched: tuple) -> tuple[Sums, Tree]:
        weights, prefetched = fetched
        arguments = stage.arguments(unit, i, weights)

        def layer(_: jax.Array, produced: Tree, sums: Sums) -> tuple[Tree, Sums]:
            intermediates = ring_buffers.load(carry.intermediates, ring_buffers.index(stage, "intermediates", unit, i))
            residuals = ring_buffers.residuals_of(stage, carry.residuals, unit, i, prefetched)
            gradients = stage.vjp.backward_weights(residuals, *arguments, intermediates)
            sums, produced = _accumulate(stage, unit, i, sums, gradients, is_final)
            return produced, sums

        produced = _of_padding(stage, unit, i, sums, arguments[1]) if sends else None
        produced, sums = stage.if_layer(stage.row(unit, i), layer, produced, sums)
        return sums, produced

    def behind(sums: Sums, i: jax.Array, produced: Tree) -> Sums:
        return _send(stage, unit, i, sums, produced)

    return LayerWork(run, ahead, behind if sends else None)


def _sends(stage: Stage, is_final: bool) -> bool:
    """True if the loop that computes weight gradients sends those of a layer while the next layer computes."""
    return is_final or stage.model.scatter is not None


def _accumulate(
    stage: Stage, unit: jax.Array, i: jax.Array, sums: Sums, gradients: Tree, is_final: bool
) -> tuple[Sums, Tree | None]:
    """Add gradients of the i-th layer of the unit's chunk to its sums -> sums, None.

    What is sent in the next turn is returned instead: -> sums, gradients to scatter; is_final: -> sums, total.
    """
    if stage.model.scatter:
        return sums, gradients
    total = _total(stage, unit, i, sums, gradients)
    return (sums, total) if is_final else (_with_total(stage, unit, i, sums, total), None)


def _send(stage: Stage, unit: jax.Array, i: jax.Array, sums: Sums, produced: Tree) -> Sums:
    """Scatter the gradients of the i-th layer of the unit's chunk and add them to its sums; or reduce its total."""
    if stage.model.scatter:
        total = _total(stage, unit, i, sums, stage.model.scatter(produced))
        return _with_total(stage, unit, i, sums, total)
    return sums._replace(reduced=loops.put(sums.reduced, stage.row(unit, i), stage.model.reduce(produced)))


def _total(stage: Stage, unit: jax.Array, i: jax.Array, sums: Sums, gradients: Tree) -> Tree:
    """Sums of the i-th layer of the unit's chunk, plus gradients."""
    row = stage.row(unit, i)
    wanted = unit >= 0 if stage.is_layer is None else (unit >= 0) & loops.get(stage.is_layer, row)
    return add(stage, loops.get(sums.layers, row), gradients, wanted)


def _with_total(stage: Stage, unit: jax.Array, i: jax.Array, sums: Sums, total: Tree) -> Sums:
    return sums._replace(layers=loops.put(sums.layers, stage.row(unit, i), total))


def _of_padding(stage: Stage, unit: jax.Array, i: jax.Array, sums: Sums, inputs: Tree) -> Tree:
    """What a row that is no layer sends, of the types that a layer does."""
    if stage.model.scatter:
        return ring_buffers.zeros(inputs, stage.axis)
    return loops.get(sums.layers, stage.row(unit, i))
