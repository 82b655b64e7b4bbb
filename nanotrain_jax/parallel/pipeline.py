"""Pipeline parallelism: one `lax.scan` over the ticks of a schedule, whatever schedule it is.

For use inside anybody's `shard_map` (with check_vma=True). Each device along the axis, here called pipe, is a stage and
runs its column of the table (`schedule.py`). In a tick, with x[B T D] what goes from layer to layer:

    shift(g, -1)   the gradient that the next stage made in the last tick; it travels while F computes
    F              forward of a microbatch through the layers of a chunk; what its backward needs goes to a slot
    shift(x, +1)   its output; it travels while B computes
    B              a backward, from what a slot holds; gradients are added where they rest
    W              the rest of a backward that the schedule splits

Moved over pipe: two x per tick and device, of which a schedule uses M C each way; nothing inside a branch.

Autodiff through such a loop would keep every microbatch. Here each layer is run by `jax.vjp` and what its pullback
holds is kept: the layer's own rematerialisation decides (`pullback.py`). There are as many slots as the schedule has
microbatches in flight, and gradients are added in place: but for gpipe, memory does not grow with microbatches.

idle="skip": a stage without work in a tick does none. All devices of a stage agree on that, so collectives over other
axes may stand in a layer (on CPU no permutes). A GPU asks its host each time. "mask": it computes all the same, both
ends included, into a spare slot, and nobody is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel import chart, loops
from nanotrain_jax.parallel.collectives import as_varying, position, shift, varying_axes
from nanotrain_jax.parallel.pullback import split_vjp
from nanotrain_jax.parallel.schedule import Schedule, arrivals, buffers

Tree = Any  # a pytree of arrays


class Tick(NamedTuple):
    """What a stage does in a tick: units (chunk M + microbatch), or -1."""

    forward: jax.Array
    backward: jax.Array
    weight: jax.Array  # several
    x_comes: jax.Array  # the unit whose input has arrived
    g_comes: jax.Array  # the unit whose output's gradient has


class Rest(NamedTuple):
    """What rests on a stage between ticks. Slots: see `schedule.buffers`."""

    x: jax.Array  # what has come from the stage before
    g: jax.Array  # what is to go there
    inputs: jax.Array
    gradients: jax.Array
    backward: list[jax.Array]
    late: list[jax.Array]
    handed: list[jax.Array]
    sums: tuple[tuple[jax.Array, Tree], Tree]  # (loss, gradients of ends), gradients of layers


def run_schedule(
    schedule: Schedule | str,
    first: Callable[[Tree, Tree], jax.Array],
    layer: Callable[..., jax.Array],
    last: Callable[[Tree, jax.Array, Tree], jax.Array],
    ends: Tree,
    layers: Tree,
    microbatches: Tree,
    inputs: Callable[[Tree], Tree] | None = None,
    axis: str = "pipe",
    idle: str = "skip",
) -> tuple[jax.Array, tuple[Tree, Tree]]:
    """-> loss, (gradients of ends, of layers) in float32, summed over microbatches[M ...]; local to a device.

    first(ends, microbatch) -> x            before the first layer
    layer(weights, x) -> x                  one layer
    last(ends, x, microbatch) -> loss       after the last layer; a scalar

    schedule: a table (`schedule.make`), or the name of one with one chunk per stage: "1f1b".

    layers[chunks * layers of a chunk, ...]: the weights of this stage, one chunk after the other. With several chunks
    they are not neighbors in the model: weights stacked in its order and sharded over pipe would run in a wrong order,
    and no check can see that. Shard w[order] instead, with order = `schedule.layer_order(schedule, layers)`; the
    gradients have the same order (scripts/pipeline_your_model.py). Where something else is to be differentiated (the
    taps of ZeRO 2 and 3), inputs makes it of the weights of a layer, and layer takes it too: layer(weights, inputs, x).

    axis: the mesh axis of stages. idle: skip or mask (see the top of this file). Moves 2 x per tick and device.

    Sum loss and gradients of ends over pipe: only the last stage has the former, the first and the last the latter. Do
    not sum gradients over an axis over which ends or layers are invarying (data, if they are replicated over it): they
    arrive summed over it. JAX sums them at each use; to sum once per step, cast ends and layers with `as_varying`
    before the call and sum after it. Raises ValueError if the schedule is not in order, or does not fit axis, layers
    and microbatches.
    """
    schedule, n = _fitted(schedule, layers, microbatches, axis, idle)
    C, M, has_late = schedule.chunks, schedule.microbatches, schedule.weight.shape[-1] > 0
    chart.validate(schedule)
    count = n * C
    if inputs is None:
        plain, inputs = layer, lambda weights: weights
        layer = lambda weights, inputs, x: plain(inputs, x)
    ends, layers = as_varying((ends, layers), (axis,))
    stage, last_stage = position(axis), lax.axis_size(axis) - 1

    column = lambda table: _column(table, stage)
    plan = buffers(schedule)
    slots = {name: column(buffer.slot) for name, buffer in plan.items()}
    ticks = Tick(*map(column, (schedule.forward, schedule.backward, schedule.weight, *arrivals(schedule))))

    when = partial(loops.when, idle)

    def added(sums: Tree, grads: Tree, wanted: jax.Array) -> Tree:
        own = (lambda g: g) if idle == "skip" else (lambda g: jnp.where(wanted, g, jnp.zeros_like(g)))
        return jax.tree.map(lambda s, g: s + own(g).astype(s.dtype), sums, grads)

    def layer_of(unit: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.maximum(unit, 0) // M * n + i

    def weights_of(i: jax.Array) -> tuple[Tree, Tree]:
        weights = jax.tree.map(lambda w: loops.get(w, i), layers)
        return weights, inputs(weights)

    def microbatch_of(unit: jax.Array) -> Tree:
        return jax.tree.map(lambda x: loops.get(x, unit % M), microbatches)

    zeroth = jnp.zeros((), jnp.int32)
    x_like, alike = _type_of_x(first, layer, (ends, microbatch_of(zeroth)), weights_of(zeroth), axis)
    typed_layer = lambda weights, inputs, x: alike(layer(weights, inputs, x))
    vjp = split_vjp(typed_layer, *weights_of(zeroth), x_like)
    long = (
        vjp.residuals_for_weights if has_late else []
    )  # which of what a layer keeps waits for W, and which only for B
    short = [k for k in (vjp.residuals_for_x if has_late else range(len(vjp.residuals))) if k not in long]

    def place(name: str, unit: jax.Array, i: jax.Array) -> jax.Array:
        """Where in a ring the i-th layer of a chunk has its arrays."""
        return loops.get(slots[name], unit) * n + i

    def store(rings: list, at: jax.Array, arrays: list) -> list:
        return [loops.put(ring, at, array) for ring, array in zip(rings, arrays, strict=True)]

    def load(rings: list, at: jax.Array) -> list:
        return [loops.as_stored(loops.get(ring, at)) for ring in rings]

    def kept_by(rest: Rest, unit: jax.Array, i: jax.Array) -> list:
        """What a layer kept, None where it is not needed any more."""
        found = dict(zip(long, load(rest.late, place("late", unit, i)), strict=True))
        found |= zip(short, load(rest.backward, place("backward", unit, i)), strict=True)
        return [found.get(k) for k in range(len(vjp.residuals))]

    def forward(unit: jax.Array, rest: Rest) -> Rest:
        def work(_: jax.Array, x: jax.Array, rings: tuple) -> tuple[jax.Array, tuple]:
            begin = lambda turn, x, _: (alike(first(ends, microbatch_of(unit + turn))), ())
            x, _ = when((stage == 0) & (unit < M), "first", begin, x, ())

            def step(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
                x, (backward, late) = carry
                x, kept = vjp.forward(*weights_of(layer_of(unit, i)), x)
                backward = store(backward, place("backward", unit, i), [kept[k] for k in short])
                late = store(late, place("late", unit, i), [kept[k] for k in long])
                return (x, (backward, late)), None

            return lax.scan(step, (x, rings), jnp.arange(n))[0]

        came = loops.get(rest.inputs, loops.get(slots["inputs"], unit))
        x, (backward, late) = when(unit >= 0, "forward", work, came, (rest.backward, rest.late))
        return rest._replace(x=x, backward=backward, late=late)

    def backward(unit: jax.Array, rest: Rest) -> Rest:
        def work(_: jax.Array, g: jax.Array, changes: tuple) -> tuple[jax.Array, tuple]:
            of_ends, of_layers, handed = changes

            def begin(turn: jax.Array, x: jax.Array, sums: tuple) -> tuple[jax.Array, tuple]:
                microbatch = microbatch_of(unit + turn)
                loss, pull = jax.vjp(lambda ends, x: last(ends, x, microbatch), ends, x)
                grads, g = pull(jnp.ones_like(loss))
                return g, added(sums, (loss, grads), is_last)

            def end(turn: jax.Array, g: jax.Array, sums: tuple) -> tuple[jax.Array, tuple]:
                microbatch = microbatch_of(unit + turn)
                _, pull = jax.vjp(lambda ends: alike(first(ends, microbatch)), ends)
                return g, (sums[0], added(sums[1], *pull(g + jnp.asarray(turn, g.dtype)), is_first))

            def step(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
                g, of_layers, handed = carry
                at, kept = layer_of(unit, i), kept_by(rest, unit, i)
                if has_late:
                    g, parts = vjp.backward_x(kept, *weights_of(at), g)
                    return (g, of_layers, store(handed, place("handed", unit, i), parts)), None
                grads, g = vjp.backward(kept, *weights_of(at), g)
                return (g, _add_at(of_layers, at, grads, added, unit >= 0), handed), None

            is_last = (stage == last_stage) & (unit >= (C - 1) * M)
            is_first = (stage == 0) & (unit >= 0) & (unit < M)
            g, of_ends = when(is_last, "last", begin, g, of_ends)
            (g, of_layers, handed), _ = lax.scan(step, (g, of_layers, handed), jnp.arange(n), reverse=True)
            g, of_ends = when(is_first, "first", end, g, of_ends)
            return g, (of_ends, of_layers, handed)

        came = loops.get(rest.gradients, loops.get(slots["gradients"], unit))
        g, (of_ends, of_layers, handed) = when(unit >= 0, "backward", work, came, (*rest.sums, rest.handed))
        return rest._replace(g=g, sums=(of_ends, of_layers), handed=handed)

    def weight(unit: jax.Array, rest: Rest) -> Rest:
        def work(_: jax.Array, nothing: tuple, of_layers: Tree) -> tuple[tuple, Tree]:
            def step(of_layers: Tree, i: jax.Array) -> tuple[Tree, None]:
                at, handed = layer_of(unit, i), load(rest.handed, place("handed", unit, i))
                grads = vjp.backward_weights(kept_by(rest, unit, i), *weights_of(at), handed)
                return _add_at(of_layers, at, grads, added, unit >= 0), None

            return nothing, lax.scan(step, of_layers, jnp.arange(n))[0]

        _, of_layers = when(unit >= 0, "weight", work, (), rest.sums[1])
        return rest._replace(sums=(rest.sums[0], of_layers))

    def tick(rest: Rest, now: Tick) -> tuple[Rest, None]:
        g = shift(rest.g, axis, -1, ring=C > 1)
        rest = rest._replace(inputs=loops.put(rest.inputs, loops.get(slots["inputs"], now.x_comes), rest.x))
        rest = forward(now.forward, rest)
        # The output of the last piece waits, where a gradient would, for its loss.
        y_unit = jnp.where((stage == last_stage) & (now.forward >= (C - 1) * M), now.forward, -1)
        gradients = loops.put(rest.gradients, loops.get(slots["gradients"], y_unit), rest.x)
        gradients = loops.put(gradients, loops.get(slots["gradients"], now.g_comes), g)
        rest = rest._replace(x=shift(rest.x, axis, 1, ring=C > 1), gradients=gradients)
        rest = backward(now.backward, rest)
        for k in range(schedule.weight.shape[-1]):
            rest = weight(now.weight[k], rest)
        x, g = lax.optimization_barrier((rest.x, rest.g))  # or XLA lets x travel when the next tick waits for it
        return rest._replace(x=x, g=g), None

    def room(name: str, arrays: list) -> list:
        slots = plan[name].count + (idle == "mask")
        return [loops.zeros(a, axis, slots * n) for a in arrays]

    loss = jax.eval_shape(lambda x: last(ends, x, microbatch_of(zeroth)), x_like)
    of_ends = jax.tree.map(lambda w: loops.zeros(w, axis, dtype=jnp.float32), ends)
    of_layers = jax.tree.map(lambda w: loops.zeros(w, axis, count, dtype=jnp.float32), weights_of(zeroth)[1])
    rest = Rest(
        x=loops.zeros(x_like, axis),
        g=loops.zeros(x_like, axis),
        inputs=loops.zeros(x_like, axis, plan["inputs"].count + 1),
        gradients=loops.zeros(x_like, axis, plan["gradients"].count + 1),
        backward=room("backward", [vjp.residuals[k] for k in short]),
        late=room("late", [vjp.residuals[k] for k in long]),
        handed=room("handed", vjp.handed if has_late else []),
        sums=((loops.zeros(loss, axis, dtype=jnp.float32), of_ends), of_layers),
    )
    rest, _ = lax.scan(tick, rest, ticks)
    (loss, of_ends), of_layers = rest.sums
    return loss, (of_ends, of_layers)


def run_forward(
    schedule: Schedule,
    first: Callable[[Tree], jax.Array],
    layer: Callable[[Tree, jax.Array], jax.Array],
    last: Callable[[jax.Array, Tree], Tree],
    layers: Tree,
    microbatches: Tree,
    axis: str = "pipe",
    idle: str = "skip",
) -> Tree:
    """-> last(x, microbatch), a tree of scalars, summed over microbatches; only the last stage has it.

    first(microbatch) -> x, layer(weights, x) -> x. schedule: `forward_only`. Moves x once per tick and device. axis,
    idle, errors: as `run_schedule`.
    """
    C, M = schedule.chunks, schedule.microbatches
    n, when = _fitted(schedule, layers, microbatches, axis, idle)[1], partial(loops.when, idle)
    layers = as_varying(layers, (axis,))
    stage, last_stage, plan = position(axis), lax.axis_size(axis) - 1, buffers(schedule)["inputs"]
    slots, ticks, came = (_column(table, stage) for table in (plan.slot, schedule.forward, arrivals(schedule)[0]))
    microbatch_of = lambda unit: jax.tree.map(lambda x: loops.get(x, unit % M), microbatches)
    weights_of = lambda unit, i: jax.tree.map(lambda w: loops.get(w, jnp.maximum(unit, 0) // M * n + i), layers)
    zeroth = jnp.zeros((), jnp.int32)
    x_like, alike = _type_of_x(first, layer, (microbatch_of(zeroth),), (weights_of(zeroth, zeroth),), axis)

    def tick(rest: tuple, now: tuple) -> tuple[tuple, None]:
        (x, inputs, sums), (unit, comes) = rest, now
        inputs = loops.put(inputs, loops.get(slots, comes), x)

        def work(_: jax.Array, values: tuple, nothing: tuple) -> tuple[tuple, tuple]:
            x, sums = values
            begin = lambda turn, x, _: (alike(first(microbatch_of(unit + turn))), ())
            x, _ = when((stage == 0) & (unit < M), "first", begin, x, ())
            x, _ = lax.scan(lambda x, i: (alike(layer(weights_of(unit, i), x)), None), x, jnp.arange(n))
            end = lambda turn, sums, _: (jax.tree.map(jnp.add, sums, last(x, microbatch_of(unit + turn))), ())
            sums, _ = when((stage == last_stage) & (unit >= (C - 1) * M), "last", end, sums, ())
            return (x, sums), ()

        (x, sums), _ = when(unit >= 0, "forward", work, (loops.get(inputs, loops.get(slots, unit)), sums), ())
        return (shift(x, axis, 1, ring=C > 1), inputs, sums), None

    sums = jax.eval_shape(lambda x: last(x, microbatch_of(zeroth)), x_like)
    rest = (
        loops.zeros(x_like, axis),
        loops.zeros(x_like, axis, plan.count + 1),
        jax.tree.map(lambda s: loops.zeros(s, axis), sums),
    )
    return lax.scan(tick, rest, (ticks, came))[0][2]


def _fitted(schedule: Schedule | str, layers: Tree, microbatches: Tree, axis: str, idle: str) -> tuple[Schedule, int]:
    """-> the schedule, made if it was a name, and the number of layers of a chunk (`chart.fitted`)."""
    if idle not in ("skip", "mask"):
        raise ValueError(f"idle={idle!r} is unknown; use skip or mask")
    stages = lax.axis_size(axis)
    if stages > 1 and not all(axis in varying_axes(w) for w in jax.tree.leaves(layers)):
        raise ValueError(f"layers are the same on every stage; shard their leading dim over the stages: P({axis!r})")
    shapes = ([x.shape for x in jax.tree.leaves(tree)] for tree in (layers, microbatches))
    return chart.fitted(schedule, stages, *shapes)


def _type_of_x(
    first: Callable, layer: Callable, begin: tuple, weights: tuple, axis: str
) -> tuple[jax.ShapeDtypeStruct, Callable[[jax.Array], jax.Array]]:
    """-> what goes from layer to layer, and the function that casts to its type: varying over all that any x is."""

    def through(x: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, Callable]:
        axes = sorted(varying_axes(x) | {axis})
        alike = lambda x: as_varying(x, axes)
        return jax.eval_shape(lambda x: alike(layer(*weights, alike(x))), x), alike

    once, _ = through(jax.eval_shape(first, *begin))
    return through(once)


def _column(table: Any, stage: jax.Array) -> jax.Array:
    """table[ticks P ...] -> that of this stage [ticks ...]"""
    return loops.get(jnp.swapaxes(jnp.asarray(table), 0, 1), stage)


def _add_at(sums: Tree, i: jax.Array, grads: Tree, added: Callable, wanted: jax.Array) -> Tree:
    """sums[n ...] with grads added at i."""
    new = added(jax.tree.map(lambda s: loops.get(s, i), sums), grads, wanted)
    return jax.tree.map(lambda s, x: loops.put(s, i, x), sums, new)
