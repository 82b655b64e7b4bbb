"""The model of a plan on one device: ZeRO gathers, rematerialization, the loop over layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.config.execution import Execution, keeps_reduced, reduces_per_layer
from nanotrain_jax.models.contract import LAYERS, Model, split_layers
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes
from nanotrain_jax.parallel.gradients import noise_scale
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.mesh import BATCH_AXES
from nanotrain_jax.parallel.offload import host_offload
from nanotrain_jax.parallel.pipeline.schedule import SPLIT
from nanotrain_jax.parallel.zero.optimizer_step import merge, select
from nanotrain_jax.parallel.zero.zero import ZERO, Zero, gather_ahead, scatter_behind
from nanotrain_jax.step.plan import Plan, layers_of_rows

Read = Callable[[Model, Tree, Tree, Tree], Tree]  # model, ends, x, microbatch -> what is read after the last layer


def local(plan: Plan, params: Tree) -> Tree:
    """Cast params so that gradients which are partial sums over tensor stay local: `zero.reduce` sums them once."""

    def cast(path: tuple, w: jax.Array, spec: jax.sharding.PartitionSpec) -> jax.Array:
        is_local = "tensor" not in spec and plan.model.has_partial_gradient(path)
        return as_varying(w, ("tensor",)) if is_local else w

    return jax.tree_util.tree_map_with_path(cast, params, plan.specs)


def inputs(plan: Plan, zero: Zero, params: Tree) -> Tree:
    """Return what is differentiated: `zero.inputs` of trainable weights, None for frozen ones. Of these, gradients stay
    in the dtype in which ZeRO reduced them (`accumulate` adds in float32)."""
    dtype = plan.shards.communication.dtype if keeps_reduced(plan.config) else jnp.float32
    return select(zero.inputs(params, plan.shards, dtype), plan.trainable)


class Inputs(NamedTuple):
    """What is differentiated: all of `inputs`, or of a layer."""

    weights: Tree  # like the parameters
    tap: jax.Array | None  # [rows of layers], of a layer []: `noise_scale.tap`; None without train.noise_scale
    probes: Tree | None = None  # of a model with measures (`measures.probes`)


def tap(plan: Plan) -> jax.Array | None:
    """Return the tap of all rows of layers on this device."""
    rows = len(layers_of_rows(plan.config)) // plan.config.parallel.pipe
    return noise_scale.tap(plan.noise_axes, rows) if plan.noise_axes else None


class Weights(NamedTuple):
    """Arguments of `zero.gather`: trees like the parameters."""

    stored: Tree
    inputs: Tree  # what is differentiated (`inputs`)
    sums: Tree | None = None  # gradients of earlier microbatches
    tap: jax.Array | None = None  # of layers

    def under(self, key: str) -> Weights:
        tap = self.tap if key == LAYERS else None
        return Weights(self.stored[key], self.inputs[key], self.sums and self.sums[key], tap)


def loss(plan: Plan, zero: Zero, weights: Weights, batch: Tree) -> tuple:
    """Return what `Model.last` does of a microbatch: the sum of losses first. Autodiff of it is the backward."""
    return trained(plan.model, *outputs(plan, zero, weights, batch))


def trained(model: Model, ends: Tree, x: Tree, batch: Tree) -> tuple:
    """Return what `Model.last` does. The gradient of the sum of losses is that of its sum with `Model.penalty`."""
    loss, count, *measures = checked(model, model.last(ends, x, batch))
    if model.penalty:
        penalty = model.penalty(x, count)
        axes = sorted(varying_axes(loss) | varying_axes(penalty))
        loss = with_backward(lambda loss, _: (loss, None), lambda _, g: (g, g))(*as_varying((loss, penalty), axes))
    return loss, count, *measures


def scores(plan: Plan, read: Read, weights: Weights, batch: Tree) -> Tree:
    """Return what read returns of a microbatch. A forward alone gains nothing by layers written out."""
    plan = replace(plan, remat=plan.remat._replace(written_out=False))
    return read(plan.model, *outputs(plan, plan.zero, weights, batch))


def measure(model: Model, ends: Tree, x: Tree, batch: Tree) -> tuple:
    """Return the sum of losses and the number of targets; if the model has them, also how many are right, or further
    sums by name."""
    sums = checked(model, model.last(ends, x, batch))
    return (*sums, model.correct(ends, x, batch)) if model.correct else sums


def outputs(plan: Plan, zero: Zero, weights: Weights, batch: Tree) -> tuple[Tree, Tree, Tree]:
    """Run a microbatch through all layers -> what `last` takes: ends, x, the batch with what `encode` adds."""
    weights = weights._replace(stored=as_varying(weights.stored, BATCH_AXES))
    model = plan.model
    ends = gather_ends(plan, zero, weights)
    run = partial(run_stack, plan, zero, weights)
    if model.encode:
        batch = batch | model.encode(model.used_by_encode(ends), batch, run)
    x = as_varying(model.first(model.used_by_first(ends), batch, run), BATCH_AXES)
    return model.used_by_last(ends), run(LAYERS, partial(layer_of, model, batch), x), batch


@jax.named_scope("layer")
def layer_of(model: Model, batch: Tree, weights: Tree, x: Tree) -> Tree:
    """Run a layer of the model on a microbatch. Raises ValueError unless x keeps its structure, shapes and dtypes."""
    y = model.layer(weights, x, batch)
    before, after = (jax.tree.map(lambda leaf: f"{leaf.dtype}{[*leaf.shape]}", tree) for tree in (x, y))
    if before != after:
        raise ValueError(
            f"the model's layer returned {after} for x of {before}; return x with the same shapes and dtypes"
        )
    for name, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"x{jax.tree_util.keystr(name)} is {leaf.dtype}: layers take floats; put it into the batch"
            )
    differ = [jax.tree.map(lambda leaf: "tensor" in varying_axes(leaf), tree) for tree in (x, y)]
    if any(jax.tree.leaves(differ[1])) and not any(jax.tree.leaves(differ[0])):
        raise ValueError(
            "the model's layer returned x that differs along tensor, of x that does not; end with leave or row, and "
            "with sequence_parallel=False for an x of whole rows"
        )
    return y


def checked(model: Model, sums: tuple) -> tuple:
    """Return what `Model.last` returned. Raises ValueError unless it is what the step needs."""
    needed = "the sum of losses and the number of targets" + ", and measures" * bool(model.measures)
    if not isinstance(sums, tuple) or len(sums) != 2 + bool(model.measures):
        raise ValueError(f"the model's last returned {jax.tree.map(jax.typeof, sums)}; return {needed}")
    kind = jax.typeof(sums[0])
    if (kind.shape, kind.dtype) != ((), jnp.float32):
        raise ValueError(f"the model's last returned {kind} as sum of losses; make it a float32 scalar")
    shapes = {name: x.shape for name, x in sums[2].items()} if model.measures else {}
    if shapes != {name: tuple(shape) for name, shape in (model.measures or {}).items()}:
        raise ValueError(
            f"the model's last returned measures {shapes}; return those of Model.measures: {model.measures}"
        )
    return sums


def gather_ends(plan: Plan, zero: Zero, weights: Weights) -> Tree:
    """Gather the weights outside stacks of layers, as `first` and `last` take them."""
    trees = weights.stored, weights.inputs, weights.sums, plan.shards.cuts
    *weights, cuts = (outside_stacks(plan, tree) for tree in trees)
    return zero.gather(*weights, plan.shards._replace(cuts=cuts))


def outside_stacks(plan: Plan, tree: Tree | None) -> Tree | None:
    """Return the part of a tree like the parameters that is not in a stack of layers."""
    return tree and {key: part for key, part in tree.items() if key not in (LAYERS, *plan.model.stacks)}


def run_stack(plan: Plan, zero: Zero, weights: Weights, stack: str, layer: Callable, x: Tree) -> Tree:
    """Run x through all layers of a stack, gathering each before it runs. Models call it as run(stack, layer, x)."""
    of_stack = weights.under(stack)

    def run(x: Tree, inputs: Inputs, stored: Tree, sums: Tree) -> Tree:
        return run_layer(plan, stack, zero, layer, x, Weights(stored, inputs.weights, sums, inputs.tap))

    inputs = Inputs(of_stack.inputs, of_stack.tap)
    return remat.scan(run, x, inputs, plan.remat, (of_stack.stored, of_stack.sums))


def run_layer(plan: Plan, stack: str, zero: Zero, layer: Callable, x: Tree, weights: Weights) -> Tree:
    """Gather the weights of a layer and run x through it."""
    gathered = zero.gather(weights.stored, weights.inputs, weights.sums, plan.shards_of_layer(stack))
    if weights.tap is not None:
        chosen = select(gathered, plan.measured[stack])
        leaves, tree = jax.tree.flatten(chosen)
        gathered = merge(tree.unflatten(noise_scale.measured(leaves, weights.tap)), gathered)
    return layer(gathered, x)


def layered(plan: Plan, params: Tree, read: Read | None = None) -> LayeredModel:
    """Return the model for loops with an explicit backward. `last` returns what `Model.last` does, or what read
    returns.

    `first` and `last` each gather the ends they use. With prefetch layers are gathered ahead and their gradients
    scattered behind, by the loop.
    """
    stored_ends, layers = split_layers(as_varying(local(plan, params), plan.loss_axes))
    zero, model = plan.zero, plan.model
    fetch = prefetch_of_layers(plan)
    gathers = fetch is gather_ahead
    of_layers = ZERO[1] if gathers else zero  # gathers and scatters are outside of layers: they run as at stage 1
    per_layer = reduces_per_layer(plan.config)
    splits_backward = plan.execution is Execution.PIPELINE and plan.config.parallel.schedule in SPLIT
    policy = plan.remat._replace(regather=plan.remat.regather and not gathers, unroll=splits_backward)
    block = policy.remat.block if policy.remat.policy == "block" else None
    end_cuts, stacked_cuts = split_layers(plan.shards.cuts)
    gathered = partial(gather_used, plan, stored_ends)
    row_shards = plan.shards._replace(cuts=stacked_cuts) if block else plan.shards_of_layer()
    trained_ends, trained_layers = split_layers(plan.trainable)
    trained_shards = row_shards._replace(cuts=select(row_shards.cuts, trained_layers))
    stored_row = select(jax.tree.map(lambda w: w[0], remat.in_blocks(params[LAYERS], block)), trained_layers)

    reduce_row = partial(zero.reduce, stored=stored_row, shards=trained_shards)

    def layer(weights: Tree, inputs: Inputs, x: Tree, batch: Tree) -> Tree:
        run = partial(run_layer, plan, LAYERS, of_layers, partial(layer_of, model, batch))
        return remat.checkpointed(run, policy)[0](x, Weights(weights, inputs.weights, tap=inputs.tap))

    def inputs_of_row(weights: Tree) -> Inputs:
        tap_of_row = noise_scale.tap(plan.noise_axes, block or ()) if plan.noise_axes else None
        return Inputs(select(of_layers.inputs(weights, row_shards), trained_layers), tap_of_row)

    def first(inputs: Tree, batch: Tree) -> Tree:
        run = partial(run_stack, plan, zero, Weights(stored_ends, inputs))
        return as_varying(model.first(gathered(inputs, model.used_by_first), batch, run), plan.loss_axes)

    def last(inputs: Tree, x: Tree, batch: Tree) -> tuple:
        ends = gathered(inputs, model.used_by_last)
        return (read or trained)(model, ends, x, batch)

    return LayeredModel(
        first=first,
        layer=layer,
        last=last,
        ends=select(zero.inputs(stored_ends, plan.shards._replace(cuts=end_cuts)), trained_ends),
        layers=remat.in_blocks(layers, block),
        inputs=inputs_of_row,
        fetch=partial(gather_ahead, shards=row_shards) if gathers else fetch,
        scatter=partial(of_weights, partial(scatter_behind, shards=trained_shards)) if gathers else None,
        reduce=partial(of_weights, reduce_row) if per_layer else None,
        is_layer=plan.is_layer,
        split_ends=plan.model.splits_vocab,
    )


def of_weights(function: Callable[[Tree], Tree], inputs: Inputs) -> Inputs:
    """Apply a function to gradients of weights, not to that of the tap."""
    return inputs._replace(weights=function(inputs.weights))


def gather_used(plan: Plan, stored_ends: Tree, inputs: Tree, used: Callable[[Tree], Tree]) -> Tree:
    """Gather what used selects of the weights outside stacks of layers."""
    end_cuts, _ = split_layers(plan.shards.cuts)
    stored, inputs, cuts = (used(outside_stacks(plan, tree)) for tree in (stored_ends, inputs, end_cuts))
    return plan.zero.gather(stored, inputs, None, plan.shards._replace(cuts=cuts))


def encode(plan: Plan, params: Tree, inputs: Tree, batch: Tree) -> Tree:
    """Run `Model.encode` on a microbatch, for loops with an explicit backward. inputs: `LayeredModel.ends`."""
    stored_ends, _ = split_layers(as_varying(local(plan, params), plan.loss_axes))
    ends = gather_used(plan, stored_ends, inputs, plan.model.used_by_encode)
    return plan.model.encode(ends, batch, partial(run_stack, plan, plan.zero, Weights(stored_ends, inputs)))


def used_by_encoder(plan: Plan, tree: Tree) -> Tree:
    """Select what `Model.encode` uses from a tree like the parameters: with all further stacks."""
    stacks = {key: tree[key] for key in plan.model.stacks}
    return plan.model.used_by_encode(outside_stacks(plan, tree)) | stacks


def prefetch_of_layers(plan: Plan) -> Callable | None:
    """Return the function that prefetches the weights of a layer in a pipeline: all-gather, copy from host, or None."""
    if plan.execution is not Execution.PIPELINE:
        return None
    if plan.config.parallel.prefetch:
        return gather_ahead
    return host_offload.to_device if any(jax.tree.leaves(plan.host_memory.params[LAYERS])) else None


def ends_used(plan: Plan, ends: Tree) -> tuple[Tree, Tree]:
    """Split a tree like `ends` -> what `first` uses, with further stacks, and what `last` uses."""
    outside = outside_stacks(plan, ends)
    stacks = {key: ends[key] for key in plan.model.stacks}
    return plan.model.used_by_first(outside) | stacks, plan.model.used_by_last(outside)
