"""Pipeline parallelism: one `lax.scan` over the ticks of a schedule, any schedule.

For use inside any `shard_map` (with check_vma=True). What a stage computes and sends in a tick: `tick.py`.

idle="skip": an idle stage computes nothing. All devices of a stage take the same branch, so a layer may use collectives
over other axes (on CPU no permutes). On GPU each branch synchronizes with the host.
idle="mask": an idle stage computes on zeros, both ends of the model included, and discards the result in a spare slot.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nanotrain_jax.parallel import loops
from nanotrain_jax.parallel.collectives import Tree, as_varying, position, varying_axes
from nanotrain_jax.parallel.layer_loop import LayerWork, over_layers
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.pipeline import both_ends, ring_buffers, schedule_text
from nanotrain_jax.parallel.pipeline.schedule import Schedule, make
from nanotrain_jax.parallel.pipeline.slots import EndUnits, arrivals, buffers, end_units, ticks_of
from nanotrain_jax.parallel.pipeline.stage import Carry, Residuals, Shared, Stage, Sums, Tick
from nanotrain_jax.parallel.pipeline.tick import begin_chunk, shifted, tick
from nanotrain_jax.parallel.split_vjp import split_vjp


def run_schedule(
    schedule: Schedule | str, model: LayeredModel, microbatches: Tree, axis: str = "pipe", idle: str = "skip"
) -> tuple[jax.Array, tuple[Tree, Tree]]:
    """Run a schedule -> loss, (gradients of ends, of layers), summed over microbatches[M ...]; local to a device.

    schedule: a table (`schedule.make`), or the name of a schedule with one chunk per stage: "1f1b".

    model.layers[chunks * layers per chunk, ...]: the weights of this stage, chunk by chunk. With several chunks these
    are not adjacent in the model: weights stacked in model order and sharded over pipe run in the wrong order, which no
    check can detect. Shard w[order] instead, with order = `schedule.layer_order(schedule, layers)`; gradients have the
    same order (scripts/examples/pipeline_your_model.py).

    axis: the mesh axis of stages. idle: skip or mask (see above). Sends 2 x per tick and device.

    Gradients are float32, or what model.reduce returns. Sum the loss and the gradients of ends over pipe: only the last
    stage has the loss, the first and the last stage have gradients of ends (with model.split_ends not those of ends
    that are sharded over pipe). Do not sum gradients over an axis that ends or layers do not vary over (data, if they
    are replicated over it): they arrive summed, since JAX sums them at each use. To sum once per step, cast ends and
    layers with `as_varying` before the call and sum after it.

    Raises ValueError if the schedule is out of order, or does not match axis, layers and microbatches.
    """
    stage = _stage(schedule, model, microbatches, axis, idle)
    schedule_text.validate(stage.schedule)
    vjp = split_vjp(stage.layer, *_first_arguments(stage), stage.x_type)
    stage = replace(stage, vjp=vjp)
    table = stage.schedule
    columns = (table.forward, table.backward, table.weight, *arrivals(table))
    ticks = Tick(*(_column(table, stage.index) for table in columns), _end_units(stage))
    carry, _ = lax.scan(partial(tick, stage), _initial_carry(stage), ticks)
    loss, of_ends = carry.sums.ends
    return loss, (of_ends, carry.sums.layers if model.reduce is None else carry.sums.reduced)


def run_forward(
    schedule: Schedule, model: LayeredModel, microbatches: Tree, axis: str = "pipe", idle: str = "skip"
) -> Tree:
    """-> what model.last returns, a tree of scalars, summed over microbatches; only the last stage has it.

    schedule: `forward_only`. Moves x once per tick and device. axis, idle, errors: as `run_schedule`.
    """
    stage = _stage(schedule, model, microbatches, axis, idle)
    ticks = tuple(_column(table, stage.index) for table in (schedule.forward, arrivals(schedule)[0]))
    zeros = partial(ring_buffers.zeros, axis=axis)
    carry = (
        zeros(stage.x_type),
        zeros(stage.x_type, count=stage.buffers["inputs"].count + 1),
        zeros(_type_of_last(stage)),
        _nothing_shared(stage),
    )
    return lax.scan(partial(_forward_tick, stage), carry, (*ticks, _end_units(stage)))[0][2]


def _forward_tick(stage: Stage, carry: tuple, now: tuple) -> tuple[tuple, None]:
    """One tick of a forward pass. carry: x, inputs[slots ...], sums of what model.last returns, shared; now: units."""
    x, inputs, sums, shared = carry
    unit, x_arrives, of_ends = now
    inputs = loops.put(inputs, stage.slot("inputs", x_arrives), x)
    if stage.model.split_ends:
        begins = jnp.where(stage.is_first(unit), unit, -1)
        inputs = loops.put(inputs, stage.slot("inputs", begins), shared.embedded)
        sums = _with_loss(stage, of_ends.loss, of_ends.loss >= 0, shared.output, sums)

    def run_layer(x: Tree, i: jax.Array, fetched: Tree | None) -> tuple[Tree, None]:
        def work(_: jax.Array, x: Tree, nothing: tuple) -> tuple[Tree, tuple]:
            return stage.layer(*stage.arguments(unit, i, fetched), x), nothing

        return stage.if_layer(stage.row(unit, i), work, x, ())[0], None

    def work(_: jax.Array, values: tuple, nothing: tuple) -> tuple[tuple, tuple]:
        x, sums = values
        layers = LayerWork(run_layer, partial(stage.fetch, unit))
        x = over_layers(layers, begin_chunk(stage, unit, x), stage.layers_per_chunk)
        if not stage.model.split_ends:
            sums = _with_loss(stage, unit, stage.is_last(unit), x, sums)
        return (x, sums), nothing

    (x, sums), _ = stage.when(
        stage.works(unit), "forward", work, (loops.get(inputs, stage.slot("inputs", unit)), sums), ()
    )
    if stage.model.split_ends:
        shared = both_ends.share_outputs(stage, of_ends.embedded, shared, x)
    return (shifted(stage, x, 1), inputs, sums, shared), None


def _with_loss(stage: Stage, unit: jax.Array, wanted: jax.Array, x: Tree, sums: Tree) -> Tree:
    """Add what `model.last` returns for a unit to sums, if wanted."""

    def work(turn: jax.Array, sums: Tree, nothing: tuple) -> tuple[Tree, tuple]:
        output = both_ends.sum_in_branch(stage, x)
        of_unit = stage.model.last(stage.model.ends, output, stage.microbatch_of_ends(unit + turn))
        return jax.tree.map(jnp.add, sums, both_ends.once(stage, of_unit)), nothing

    return stage.when(wanted, "last", work, sums, ())[0]


def _stage(schedule: Schedule | str, model: LayeredModel, microbatches: Tree, axis: str, idle: str) -> Stage:
    """Return the stage of this device, without the backward of its layers. Raises ValueError on a mismatch."""
    schedule, layers_per_chunk = _fitted(schedule, model, microbatches, axis, idle)
    ends, layers = as_varying((model.ends, model.layers), (axis,))
    index = position(axis)
    slots = {name: b._replace(slot=_column(b.slot, index)) for name, b in buffers(schedule).items()}
    return Stage(
        schedule=schedule,
        model=model._replace(ends=ends, layers=layers),
        microbatches=microbatches,
        axis=axis,
        idle=idle,
        index=index,
        buffers=slots,
        layers_per_chunk=layers_per_chunk,
        x_type=_type_of_x(model, microbatches, axis),
        final_units=_column(_final_units(schedule), index),
        is_layer=None if model.is_layer is None else _column(model.is_layer.T, index),
    )


def _end_units(stage: Stage) -> EndUnits | None:
    return EndUnits(*map(jnp.asarray, end_units(stage.schedule))) if stage.model.split_ends else None


def _nothing_shared(stage: Stage) -> Shared | None:
    """Zeros, before the first tick with split ends."""
    if not stage.model.split_ends:
        return None
    return Shared(*(ring_buffers.zeros(stage.x_type, stage.axis) for _ in Shared._fields))


def _final_units(schedule: Schedule) -> np.ndarray:
    """Return [C P], the unit of each chunk that computes its weight gradients last, on each stage."""
    C, M, P = schedule.chunks, schedule.microbatches, schedule.stages
    table = schedule.backward
    if schedule.weight.shape[-1]:  # [ticks P n]: n units in a tick, one after another
        table = schedule.weight.swapaxes(1, 2).reshape(-1, P)
    ticks = ticks_of(table, C * M).reshape(C, M, P)
    return ticks.argmax(1) + M * np.arange(C)[:, None]


def _fitted(
    schedule: Schedule | str, model: LayeredModel, microbatches: Tree, axis: str, idle: str
) -> tuple[Schedule, int]:
    """Return the schedule, made if given by name, and the layers per chunk (`schedule_text.fitted`)."""
    if idle == "mask" and model.reduce:
        raise ValueError("idle='mask' with model.reduce: idle stages would reduce as well; use idle='skip'")
    if idle not in ("skip", "mask"):
        raise ValueError(f"idle={idle!r} is unknown; use skip or mask")
    stages = lax.axis_size(axis)
    if stages > 1 and not all(axis in varying_axes(w) for w in jax.tree.leaves(model.layers)):
        raise ValueError(f"layers are the same on every stage; shard their leading dim over the stages: P({axis!r})")
    shapes = ([x.shape for x in jax.tree.leaves(tree)] for tree in (model.layers, microbatches))
    if isinstance(schedule, str) and model.split_ends and schedule != "interleaved":
        schedule = make(schedule, stages, len(jax.tree.leaves(microbatches)[0]), split_ends=True)
    schedule, layers_per_chunk = schedule_text.fitted(schedule, stages, *shapes)
    if schedule.split_ends != model.split_ends:
        raise ValueError(
            f"model.split_ends={model.split_ends} with a schedule of split_ends={schedule.split_ends}; make the "
            f"schedule with split_ends={model.split_ends}"
        )
    return schedule, layers_per_chunk


def _type_of_x(model: LayeredModel, microbatches: Tree, axis: str) -> Tree:
    """Return the types of x before and after every layer: each varies over every axis that it varies over anywhere."""
    stored, microbatch = (jax.tree.map(lambda x: x[0], tree) for tree in (model.layers, microbatches))

    def after_a_layer(x_type: Tree) -> Tree:
        def typed(x: Tree) -> Tree:
            return jax.tree.map(lambda x, t: as_varying(x, sorted(varying_axes(t) | {axis})), x, x_type)

        def run(x: Tree) -> Tree:
            weights = model.fetch(stored) if model.fetch else stored
            return typed(model.run_layer((weights, microbatch), model.inputs_of(weights), typed(x)))

        return jax.eval_shape(run, x_type)

    return after_a_layer(after_a_layer(jax.eval_shape(model.first, model.ends, microbatch)))


def _type_of_last(stage: Stage) -> Tree:
    last = stage.model.last
    return jax.eval_shape(lambda x: last(stage.model.ends, x, stage.microbatch_of_ends(_first_row())), stage.x_type)


def _initial_carry(stage: Stage) -> Carry:
    """Zeros: empty buffers and sums."""
    zeros, x_type = partial(ring_buffers.zeros, axis=stage.axis), stage.x_type

    def ring(buffer: str, types: list) -> list:
        slots = stage.buffers[buffer].count + (stage.idle == "mask")
        return zeros(types, count=slots * stage.layers_per_chunk)

    rows = stage.schedule.chunks * stage.layers_per_chunk
    loss = _type_of_last(stage)
    of_ends = zeros(stage.model.ends, dtype=jnp.float32)
    of_layer = _first_arguments(stage)[1]
    if stage.model.scatter:
        of_layer = jax.eval_shape(stage.model.scatter, of_layer)
    of_layers = zeros(of_layer, count=rows, dtype=jnp.float32)
    reduced = None
    if stage.model.reduce:
        of_row = jax.tree.map(lambda x: x[0], of_layers)
        reduced = zeros(jax.eval_shape(stage.model.reduce, of_row), count=rows)
    types = stage.vjp.residuals
    return Carry(
        x=zeros(x_type),
        g=zeros(x_type),
        inputs=zeros(x_type, count=stage.buffers["inputs"].count + 1),
        gradients=zeros(x_type, count=stage.buffers["gradients"].count + 1),
        residuals=Residuals(
            backward=ring("backward", [types[k] for k in stage.backward_residuals]),
            backward_weight=ring("backward_weight", [types[k] for k in stage.weight_residuals]),
        ),
        intermediates=ring("intermediates", stage.vjp.intermediates if stage.is_split else []),
        sums=Sums((zeros(loss, dtype=jnp.float32), of_ends), of_layers, reduced),
        shared=_nothing_shared(stage),
    )


def _first_row() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _first_arguments(stage: Stage) -> tuple[Tree, Tree]:
    """`Stage.arguments` of the first unit and layer, of the same types as all others."""
    return stage.arguments(_first_row(), _first_row(), stage.fetch(_first_row(), _first_row()))


def _column(table: Any, stage: jax.Array) -> jax.Array:
    """table[ticks P ...] -> the column of this stage [ticks ...]"""
    return loops.get(jnp.swapaxes(jnp.asarray(table), 0, 1), stage)
