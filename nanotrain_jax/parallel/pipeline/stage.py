"""What a pipeline stage holds: its constants from tick to tick, and what it carries from one tick to the next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel import loops
from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.pipeline.schedule import Schedule
from nanotrain_jax.parallel.pipeline.slots import Buffer, EndUnits
from nanotrain_jax.parallel.split_vjp import SplitVjp


@dataclass(frozen=True)
class Stage:
    """The constants of a stage.

    P stages with C chunks of n layers each, M microbatches. A unit is one microbatch in one chunk (Megatron-LM: a
    virtual microbatch), numbered chunk M + microbatch; -1 is no unit. A row is the index of a layer in the stage:
    chunk n + layer.
    """

    schedule: Schedule
    model: LayeredModel  # layers[C n ...]: of this stage; ends and layers varying over axis
    microbatches: Tree  # [M ...]
    axis: str
    idle: str  # skip or mask
    index: jax.Array  # of the stage, 0 to P - 1
    buffers: dict[str, Buffer]  # `slots.buffers`: slot[units + 1] of this stage; unit -1 has the spare slot
    layers_per_chunk: int
    x_type: Tree  # of ShapeDtypeStruct
    final_units: jax.Array  # [C] the unit of each chunk that computes its weight gradients last
    is_layer: jax.Array | None  # [C n] False for rows that are padding; None: none is
    vjp: SplitVjp | None = None  # of one layer; None: forward only

    @property
    def is_split(self) -> bool:
        """True if the schedule computes weight gradients in W, not in B."""
        return self.schedule.weight.shape[-1] > 0

    @property
    def weight_residuals(self) -> list[int]:
        """Indices of the residuals stored until W, in the buffer `backward_weight`."""
        return self.vjp.residuals_for_weights if self.is_split else []

    @property
    def backward_residuals(self) -> list[int]:
        """Indices of the residuals that only B uses, in the buffer `backward`."""
        used = self.vjp.residuals_for_x if self.is_split else self.vjp.residuals_for_backward
        return sorted(set(used) - set(self.weight_residuals))

    @property
    def is_alone(self) -> bool:
        """True if there is one stage, never idle: the schedule is a loop over microbatches, without branches."""
        tables = self.schedule.forward, self.schedule.backward
        return self.schedule.stages == self.schedule.chunks == 1 and all((table >= 0).all() for table in tables)

    def works(self, unit: jax.Array) -> jax.Array | bool:
        """True if the unit is one: False for unit -1."""
        return self.is_alone or unit >= 0

    def is_first(self, unit: jax.Array) -> jax.Array | bool:
        """True if the unit's chunk is the first of the model; not for unit -1."""
        return self.is_alone or (self.index == 0) & (unit < self.schedule.microbatches)

    def is_last(self, unit: jax.Array) -> jax.Array | bool:
        """True if the unit's chunk is the last of the model."""
        if self.is_alone:
            return True
        C, M = self.schedule.chunks, self.schedule.microbatches
        return (self.index == lax.axis_size(self.axis) - 1) & (unit >= (C - 1) * M)

    def is_final(self, unit: jax.Array) -> jax.Array:
        """True if the unit completes the weight gradients of its chunk."""
        chunk = jnp.maximum(unit, 0) // self.schedule.microbatches
        return (unit >= 0) & (unit == loops.get(self.final_units, chunk))

    def row(self, unit: jax.Array, layer: jax.Array) -> jax.Array:
        """Row of a layer of the unit's chunk."""
        return jnp.maximum(unit, 0) // self.schedule.microbatches * self.layers_per_chunk + layer

    def slot(self, buffer: str, unit: jax.Array) -> jax.Array:
        """Slot of the unit in a buffer."""
        return loops.get(self.buffers[buffer].slot, unit)

    def microbatch(self, unit: jax.Array) -> Tree:
        """The microbatch of a unit, varying over axis."""
        return as_varying(self._same_microbatch(unit), self.axis)

    def microbatch_of_ends(self, unit: jax.Array) -> Tree:
        """The microbatch of a unit for `model.first` and `last`: with split ends the same on all stages."""
        return self._same_microbatch(unit) if self.model.split_ends else self.microbatch(unit)

    def _same_microbatch(self, unit: jax.Array) -> Tree:
        return jax.tree.map(lambda x: loops.get(x, unit % self.schedule.microbatches), self.microbatches)

    def fetch(self, unit: jax.Array, layer: jax.Array) -> Tree | None:
        """Weights of a layer of the unit's chunk, prefetched; None without `LayeredModel.fetch`."""
        return self.model.fetch and self.model.fetch(loops.get(self.model.layers, self.row(unit, layer)))

    def arguments(self, unit: jax.Array, layer: jax.Array, fetched: Tree | None = None) -> tuple[Tree, Tree]:
        """-> constants of a layer of the unit's chunk (weights, microbatch), what is differentiated in it."""
        weights = loops.get(self.model.layers, self.row(unit, layer)) if fetched is None else fetched
        return (weights, self.microbatch(unit)), self.model.inputs_of(weights)

    def first(self, ends: Tree, microbatch: Tree) -> Tree:
        """`model.first`, with x of type x_type."""
        return self.typed(self.model.first(ends, microbatch))

    def layer(self, constants: Tree, inputs: Tree, x: Tree) -> Tree:
        """`model.run_layer`, with x of type x_type."""
        return self.typed(self.model.run_layer(constants, inputs, x))

    def typed(self, x: Tree) -> Tree:
        """x, varying over every axis that an activation varies over."""
        return jax.tree.map(lambda x, t: as_varying(x, sorted(varying_axes(t) | {self.axis})), x, self.x_type)

    def if_layer(self, row: jax.Array, work: Callable, values: Tree, store: Tree) -> tuple[Tree, Tree]:
        """work(turn, values, store) for a row that is a layer, else both unchanged."""
        if self.is_layer is None:
            return work(0, values, store)
        return self.when(loops.get(self.is_layer, row), "layer", work, values, store)

    def when(self, wanted: jax.Array | bool, what: str, work: Callable, values: Tree, store: Tree) -> tuple[Tree, Tree]:
        """work(turn, values, store) where wanted, else both unchanged (`loops.skip_or_mask`). True: no branch."""
        if wanted is True:
            with jax.named_scope(what):
                return work(0, values, store)
        return loops.skip_or_mask(self.idle, wanted, what, work, values, store)


class Tick(NamedTuple):
    """The units of a stage in one tick, or -1."""

    forward: jax.Array
    backward: jax.Array
    weight: jax.Array  # [W per tick]
    x_arrives: jax.Array  # the unit whose input arrives from the previous stage
    g_arrives: jax.Array  # the unit whose output gradient arrives from the next stage
    ends: EndUnits | None  # with split ends: of all stages


class Residuals(NamedTuple):
    """Ring buffers: one array [slots n ...] per residual of a layer."""

    backward: list[jax.Array]  # until B
    backward_weight: list[jax.Array]  # until W


class Sums(NamedTuple):
    """Loss and gradients accumulated so far, in float32."""

    ends: tuple[jax.Array, Tree]  # loss, gradients of ends
    layers: Tree
    reduced: Tree | None  # `LayeredModel.reduce` of the complete gradients; None without it


class Shared(NamedTuple):
    """With split ends: summed over stages in a tick, for the next one."""

    embedded: Tree  # x of `EndUnits.embedded`
    output: Tree  # x of the last stage after the last layer of the model


class Carry(NamedTuple):
    """What a stage carries from tick to tick. Slots: `slots.buffers`."""

    x: Tree  # received from the previous stage; after F, sent to the next
    g: Tree  # sent to the previous stage
    inputs: Tree  # x[slots ...] until F
    gradients: Tree  # g[slots ...] until B
    residuals: Residuals
    intermediates: list[jax.Array]  # [slots n ...] from B to W
    sums: Sums
    shared: Shared | None  # None unless ends are split
