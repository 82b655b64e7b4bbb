"""One stage of a pipeline: forward, backward and weight gradients of a microbatch, and the tick that runs them.

Each device along the pipe axis is a stage and runs its column of the schedule (`schedule.py`). In a tick, with x[B T D]
the activation between layers (an array or a tree of them) and g its gradient:

    shift(g, -1)   to the stage before: the g of the last tick; travels while F computes
    F              forward of a microbatch through the layers of a chunk; residuals go to a slot
    shift(x, +1)   to the next stage: the x of F; travels while B computes
    B              backward of a microbatch from its residuals; gradients are added in place
    W              where a schedule splits the backward: the gradients of weights that B left out

Moved over pipe: x and g once per tick, always both, never in a branch.

Autodiff of this loop would keep the residuals of all microbatches. Here each layer runs under `jax.vjp` and its
residuals wait in ring buffers (`pullback.py`), with as many slots as the schedule has microbatches in flight: memory
does not grow with the number of microbatches (gpipe's does). The layer's own rematerialisation decides what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel import loops
from nanotrain_jax.parallel.collectives import as_varying, shift, varying_axes
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.pullback import SplitVjp
from nanotrain_jax.parallel.schedule import Buffer, Schedule

Tree = Any  # a pytree of arrays


@dataclass(frozen=True)
class Stage:
    """What is constant on a stage from tick to tick.

    P stages with C chunks of n layers, M microbatches. A unit is one microbatch in one chunk: chunk M + microbatch; -1
    is none. A row is the place of a layer among those of the stage: chunk n + layer of the chunk.
    """

    schedule: Schedule
    model: LayeredModel  # layers[C n ...]: of this stage; ends and layers varying over axis
    microbatches: Tree  # [M ...]
    axis: str
    idle: str  # skip or mask
    index: jax.Array  # which stage this is, 0 to P - 1
    buffers: dict[str, Buffer]  # `schedule.buffers`, slot[units + 1] of this stage: unit -1 finds the spare slot
    layers_per_chunk: int
    x_type: Tree  # of ShapeDtypeStruct
    vjp: SplitVjp | None = None  # of a layer; None: forward only

    @property
    def is_split(self) -> bool:
        """Whether the schedule makes gradients of weights in W rather than in B."""
        return self.schedule.weight.shape[-1] > 0

    @property
    def kept_for_weight(self) -> list[int]:
        """Which residuals stay until W, in the buffer `late`."""
        return self.vjp.residuals_for_weights if self.is_split else []

    @property
    def kept_for_backward(self) -> list[int]:
        """Which residuals only B needs, in the buffer `backward`."""
        used = self.vjp.residuals_for_x if self.is_split else range(len(self.vjp.residuals))
        return sorted(set(used) - set(self.kept_for_weight))

    def is_first(self, unit: jax.Array) -> jax.Array:
        """Whether the unit's chunk begins the model, for units that are not -1."""
        return (self.index == 0) & (unit < self.schedule.microbatches)

    def is_last(self, unit: jax.Array) -> jax.Array:
        """Whether the unit's chunk ends the model."""
        C, M = self.schedule.chunks, self.schedule.microbatches
        return (self.index == lax.axis_size(self.axis) - 1) & (unit >= (C - 1) * M)

    def row(self, unit: jax.Array, layer: jax.Array) -> jax.Array:
        """The row of a layer of the unit's chunk."""
        return jnp.maximum(unit, 0) // self.schedule.microbatches * self.layers_per_chunk + layer

    def slot(self, buffer: str, unit: jax.Array) -> jax.Array:
        """Where a buffer has what belongs to the unit."""
        return loops.get(self.buffers[buffer].slot, unit)

    def microbatch(self, unit: jax.Array) -> Tree:
        """The microbatch of a unit."""
        return jax.tree.map(lambda x: loops.get(x, unit % self.schedule.microbatches), self.microbatches)

    def fetch(self, row: jax.Array) -> Tree | None:
        """The weights of a layer, if they are fetched ahead of its turn."""
        return self.model.fetch and self.model.fetch(loops.get(self.model.layers, row))

    def weights(self, row: jax.Array, fetched: Tree | None = None) -> tuple[Tree, Tree]:
        """-> the weights of a layer, what is differentiated in it"""
        weights = loops.get(self.model.layers, row) if fetched is None else fetched
        return weights, self.model.inputs_of(weights)

    def first(self, ends: Tree, microbatch: Tree) -> Tree:
        """`model.first`, x of the one type that it has everywhere."""
        return self.typed(self.model.first(ends, microbatch))

    def layer(self, weights: Tree, inputs: Tree, x: Tree) -> Tree:
        """`model.run_layer`, x of the one type that it has everywhere."""
        return self.typed(self.model.run_layer(weights, inputs, x))

    def typed(self, x: Tree) -> Tree:
        """x, varying over all axes that any activation varies over."""
        return jax.tree.map(lambda x, t: as_varying(x, sorted(varying_axes(t) | {self.axis})), x, self.x_type)

    def when(self, wanted: jax.Array, what: str, work: Callable, values: Tree, store: Tree) -> tuple[Tree, Tree]:
        """work(turn, values, store) where wanted; else both as they are (`loops.when`)."""
        return loops.when(self.idle, wanted, what, work, values, store)


class Tick(NamedTuple):
    """What a stage does in a tick: units, or -1."""

    forward: jax.Array
    backward: jax.Array
    weight: jax.Array  # [W per tick]
    x_arrives: jax.Array  # the unit whose input the stage before has sent
    g_arrives: jax.Array  # the unit whose gradient of the output the next stage has sent


class Residuals(NamedTuple):
    """Ring buffers, an array [slots n ...] for each residual of a layer."""

    backward: list[jax.Array]  # needed until B
    late: list[jax.Array]  # needed until W


class Sums(NamedTuple):
    """Loss and gradients so far, in float32."""

    ends: tuple[jax.Array, Tree]  # loss, gradients of ends
    layers: Tree


class Carry(NamedTuple):
    """What a stage keeps from tick to tick. Slots: see `schedule.buffers`."""

    x: Tree  # at the beginning of a tick what the stage before has sent; after F what goes to the next
    g: Tree  # what goes to the stage before
    inputs: Tree  # x[slots ...] waiting for F
    gradients: Tree  # g[slots ...] waiting for B
    residuals: Residuals
    handed: list[jax.Array]  # [slots n ...] from B to W
    sums: Sums


def tick(stage: Stage, carry: Carry, now: Tick) -> tuple[Carry, None]:
    """One tick: shift g, F, shift x, B, W. A body for `lax.scan`."""
    g = shifted(stage, carry.g, -1)
    carry = carry._replace(inputs=loops.put(carry.inputs, stage.slot("inputs", now.x_arrives), carry.x))
    carry = forward(stage, now.forward, carry)
    # The output of the model's last chunk waits for its loss in the slot of its gradient.
    output_unit = jnp.where(stage.is_last(now.forward), now.forward, -1)
    gradients = loops.put(carry.gradients, stage.slot("gradients", output_unit), carry.x)
    gradients = loops.put(gradients, stage.slot("gradients", now.g_arrives), g)
    carry = carry._replace(x=shifted(stage, carry.x, 1), gradients=gradients)
    carry = backward(stage, now.backward, carry)
    for k in range(stage.schedule.weight.shape[-1]):
        carry = weight(stage, now.weight[k], carry)
    x, g = lax.optimization_barrier((carry.x, carry.g))  # else XLA lets x travel when the next tick waits for it
    return carry._replace(x=x, g=g), None


def shifted(stage: Stage, x: Tree, step: int) -> Tree:
    """x of the stage that is step before this one; with several chunks the stages are a ring."""
    return jax.tree.map(lambda x: shift(x, stage.axis, step, ring=stage.schedule.chunks > 1), x)


def forward(stage: Stage, unit: jax.Array, carry: Carry) -> Carry:
    """F: x of a unit through the layers of its chunk; their residuals go to its slots."""

    def run_layer(carry: tuple[Tree, Residuals], i: jax.Array, fetched: Tree | None) -> tuple[Tree, Residuals]:
        x, buffers = carry
        x, residuals = stage.vjp.forward(*stage.weights(stage.row(unit, i), fetched), x)
        return x, _keep(stage, buffers, residuals, unit, i)

    def work(_: jax.Array, x: Tree, buffers: Residuals) -> tuple[Tree, Residuals]:
        x = begin_chunk(stage, unit, x)
        return over_layers(stage, unit, run_layer, (x, buffers))

    x = loops.get(carry.inputs, stage.slot("inputs", unit))
    x, residuals = stage.when(unit >= 0, "forward", work, x, carry.residuals)
    return carry._replace(x=x, residuals=residuals)


def over_layers(stage: Stage, unit: jax.Array, run_layer: Callable, carry: Tree, reverse: bool = False) -> Tree:
    """carry after carry = run_layer(carry, i, fetched) for each layer i of the unit's chunk.

    fetched: the layer's weights, fetched while the layer before it ran; None without `LayeredModel.fetch`. The last
    turn stands outside of the loop: it fetches nothing.
    """
    layers = jnp.arange(stage.layers_per_chunk)
    if stage.model.fetch is None:
        return lax.scan(lambda carry, i: (run_layer(carry, i, None), None), carry, layers, reverse=reverse)[0]
    order = layers[::-1] if reverse else layers

    def turn(state: tuple[Tree, Tree], pair: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        carry, fetched = state
        i, following = pair
        coming = stage.fetch(stage.row(unit, following))
        return (run_layer(carry, i, fetched), coming), None

    first = stage.fetch(stage.row(unit, order[0]))
    (carry, fetched), _ = lax.scan(turn, (carry, first), (order[:-1], order[1:]))
    return run_layer(carry, order[-1], fetched)


def begin_chunk(stage: Stage, unit: jax.Array, x: Tree) -> Tree:
    """The input of the unit's chunk: from `model.first` where the chunk begins the model, else x."""

    def work(turn: jax.Array, _: Tree, nothing: tuple) -> tuple[Tree, tuple]:
        return stage.first(stage.model.ends, stage.microbatch(unit + turn)), nothing

    return stage.when(stage.is_first(unit), "first", work, x, ())[0]


def backward(stage: Stage, unit: jax.Array, carry: Carry) -> Carry:
    """B: g of a unit back through the layers of its chunk. Adds gradients; those of layers unless W makes them."""

    def run_layer(carry_of_turn: tuple[Tree, Tree, list], i: jax.Array, fetched: Tree | None) -> tuple:
        g, sums, handed = carry_of_turn
        row = stage.row(unit, i)
        residuals = _kept(stage, carry.residuals, unit, i)
        if stage.is_split:
            g, parts = stage.vjp.backward_x(residuals, *stage.weights(row, fetched), g)
            return g, sums, loops.put(handed, _place(stage, "handed", unit, i), parts)
        gradients, g = stage.vjp.backward(residuals, *stage.weights(row, fetched), g)
        return g, _added_at(stage, sums, row, gradients, unit >= 0), handed

    def work(_: jax.Array, g: Tree, store: tuple[Sums, list]) -> tuple[Tree, tuple]:
        sums, handed = store
        is_last = stage.is_last(unit)
        is_first = (stage.index == 0) & (unit >= 0) & (unit < stage.schedule.microbatches)  # masked, unit may be -1
        g, ends = stage.when(is_last, "last", partial(_backward_last, stage, unit, is_last), g, sums.ends)
        g, of_layers, handed = over_layers(stage, unit, run_layer, (g, sums.layers, handed), reverse=True)
        g, ends = stage.when(is_first, "first", partial(_backward_first, stage, unit, is_first), g, ends)
        return g, (Sums(ends, of_layers), handed)

    g = loops.get(carry.gradients, stage.slot("gradients", unit))
    g, (sums, handed) = stage.when(unit >= 0, "backward", work, g, (carry.sums, carry.handed))
    return carry._replace(g=g, sums=sums, handed=handed)


def _backward_last(
    stage: Stage, unit: jax.Array, wanted: jax.Array, turn: jax.Array, x: Tree, sums: tuple
) -> tuple[Tree, tuple]:
    """The loss of a unit and its backward to the last layer's x -> gradient of x, sums (loss, gradients of ends)."""
    microbatch = stage.microbatch(unit + turn)
    loss, vjp = jax.vjp(lambda ends, x: stage.model.last(ends, x, microbatch), stage.model.ends, x)
    gradients, g = vjp(jnp.ones_like(loss))
    return g, _added(stage, sums, (loss, gradients), wanted)


def _backward_first(
    stage: Stage, unit: jax.Array, wanted: jax.Array, turn: jax.Array, g: Tree, sums: tuple
) -> tuple[Tree, tuple]:
    """The backward of a unit from the first layer's x to ends -> g, sums (loss, gradients of ends)."""
    microbatch = stage.microbatch(unit + turn)
    _, vjp = jax.vjp(lambda ends: stage.first(ends, microbatch), stage.model.ends)
    (gradients,) = vjp(jax.tree.map(lambda g: g + jnp.asarray(turn, g.dtype), g))
    loss, of_ends = sums
    return g, (loss, _added(stage, of_ends, gradients, wanted))


def weight(stage: Stage, unit: jax.Array, carry: Carry) -> Carry:
    """W: the gradients of the weights of a unit's chunk, from residuals and what B handed over."""

    def run_layer(sums: Tree, i: jax.Array) -> tuple[Tree, None]:
        row = stage.row(unit, i)
        handed = _load(carry.handed, _place(stage, "handed", unit, i))
        residuals = _kept(stage, carry.residuals, unit, i)
        gradients = stage.vjp.backward_weights(residuals, *stage.weights(row, stage.fetch(row)), handed)
        return _added_at(stage, sums, row, gradients, unit >= 0), None

    def work(_: jax.Array, nothing: tuple, sums: Tree) -> tuple[tuple, Tree]:
        return nothing, lax.scan(run_layer, sums, jnp.arange(stage.layers_per_chunk))[0]

    _, sums = stage.when(unit >= 0, "weight", work, (), carry.sums.layers)
    return carry._replace(sums=carry.sums._replace(layers=sums))


def _place(stage: Stage, buffer: str, unit: jax.Array, i: jax.Array) -> jax.Array:
    """Where in a ring buffer the i-th layer of the unit's chunk has its arrays."""
    return stage.slot(buffer, unit) * stage.layers_per_chunk + i


def _load(rings: list, place: jax.Array) -> list:
    return [loops.as_stored(loops.get(ring, place)) for ring in rings]


def _keep(stage: Stage, buffers: Residuals, residuals: list, unit: jax.Array, i: jax.Array) -> Residuals:
    """The buffers with the residuals of the i-th layer of the unit's chunk."""
    backward, late = ([residuals[k] for k in kept] for kept in (stage.kept_for_backward, stage.kept_for_weight))
    return Residuals(
        backward=loops.put(buffers.backward, _place(stage, "backward", unit, i), backward),
        late=loops.put(buffers.late, _place(stage, "late", unit, i), late),
    )


def _kept(stage: Stage, buffers: Residuals, unit: jax.Array, i: jax.Array) -> list:
    """The residuals of the i-th layer of the unit's chunk, None for those that are no longer needed."""
    late = _load(buffers.late, _place(stage, "late", unit, i))
    found = dict(zip(stage.kept_for_weight, late, strict=True))
    backward = _load(buffers.backward, _place(stage, "backward", unit, i))
    found |= zip(stage.kept_for_backward, backward, strict=True)
    return [found.get(k) for k in range(len(stage.vjp.residuals))]


def _added(stage: Stage, sums: Tree, gradients: Tree, wanted: jax.Array) -> Tree:
    """sums + gradients; idle work that is masked adds zeros."""

    def add(s: jax.Array, g: jax.Array) -> jax.Array:
        if stage.idle == "mask":
            g = jnp.where(wanted, g, jnp.zeros_like(g))
        return s + g.astype(s.dtype)

    return jax.tree.map(add, sums, gradients)


def _added_at(stage: Stage, sums: Tree, row: jax.Array, gradients: Tree, wanted: jax.Array) -> Tree:
    """sums[C n ...] with gradients added at a row."""
    return loops.put(sums, row, _added(stage, loops.get(sums, row), gradients, wanted))
