"""The plan of a run: all that is fixed before the first step. Mesh, model, layouts, placement, schedules, execution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import and_
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nanotrain_jax.config.execution import Execution, execution, gradients_on_host, reduces_per_layer, writes_layers_out
from nanotrain_jax.config.schema import EIGHT_BITS, Config
from nanotrain_jax.config.values import Compression
from nanotrain_jax.costs import counts
from nanotrain_jax.models import factory
from nanotrain_jax.models.contract import LAYERS, Model, join_layers, split_layers
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.gradients import local_steps, noise_scale
from nanotrain_jax.parallel.mesh import BATCH_AXES, ZERO_AXES
from nanotrain_jax.parallel.pipeline.schedule import row_order
from nanotrain_jax.parallel.sharding import path_name, specs
from nanotrain_jax.parallel.zero import muon
from nanotrain_jax.parallel.zero.communication import Communication
from nanotrain_jax.parallel.zero.cuts import UNSHARDED, Cut, choose_cuts
from nanotrain_jax.parallel.zero.optimizer_step import select
from nanotrain_jax.parallel.zero.zero import ZERO, Shards, Zero
from nanotrain_jax.step import frozen
from nanotrain_jax.step import optimizer as optim


class HostMemory(NamedTuple):
    """Arrays offloaded to host memory: trees of booleans like the parameters."""

    params: Tree
    optimizer: Tree  # master weights and moments
    gradients: Tree  # from their layer's backward to the update; only in hand-written layer loops


@dataclass(frozen=True, eq=False)
class Plan:
    """A resolved config on a mesh. Trees have the structure of the parameters.

    specs        PartitionSpecs over pipe, tensor and expert; ZeRO adds its axes (`zero.storage`)
    shards       how ZeRO shards each array, communication settings
    layer_order  the layer of each row of the stacked weights; None: model order. Rows of padding, where stages have
                 different numbers of layers, have numbers from main_layers on (`schedule.row_order`)
    outer_optimizer   of parallel.sync_every (DiLoCo, arXiv 2311.08105); None: replicas step together
    trainable    False for frozen arrays (train.freeze): they have neither gradients nor optimizer state
    in_step      True for arrays that the step updates
    compressed   True for arrays whose gradients are summed over replica compressed (`compressed.sum_over_replicas`)
    """

    config: Config
    mesh: Mesh
    model: Model
    execution: Execution
    optimizer: optax.GradientTransformation
    outer_optimizer: optax.GradientTransformation | None
    lr_schedule: optax.Schedule
    zero: Zero
    specs: Tree
    shards: Shards
    remat: remat.Policy
    layer_order: np.ndarray | None
    host_memory: HostMemory
    trainable: Tree
    in_step: Tree
    compressed: Tree

    def shards_of_layer(self, stack: str = LAYERS) -> Shards:
        """Return `shards` of one layer of a stack: without the leading dim."""

        def of_layer(cut: Cut) -> Cut:
            return cut if cut == UNSHARDED else replace(cut, dim=cut.dim - 1)

        gather = self.config.precision.gather
        communication = self.shards.communication._replace(gather=gather if gather in EIGHT_BITS else None)
        cuts = jax.tree.map(of_layer, self.shards.cuts[stack])
        return self.shards._replace(cuts=cuts, communication=communication)

    @property
    def noise_axes(self) -> tuple[str, ...] | None:
        """Mesh axes over which the squares of local gradients vary; None without train.noise_scale."""
        return ("pipe", *BATCH_AXES, "tensor") if self.config.train.noise_scale else None

    @property
    def measured(self) -> Tree:
        """True for the weights of layers whose gradients `noise_scale` measures: trained matrices, not those whose
        gradients on each device are partial sums over tensor, nor experts, whose tokens come from several devices."""

        def is_measured(
            path: tuple, x: jax.ShapeDtypeStruct, trains: bool, spec: PartitionSpec, has_experts: bool
        ) -> bool:
            is_replicated = self.mesh.shape["tensor"] > 1 and "tensor" not in spec
            is_partial = is_replicated and self.model.has_partial_gradient(path)
            return path[0].key == LAYERS and trains and x.ndim > 2 and not is_partial and not has_experts

        shapes = self.model.shapes
        experts = of_experts(self.model, self.mesh)
        return jax.tree_util.tree_map_with_path(is_measured, shapes, self.trainable, self.specs, experts)

    @property
    def small_batches(self) -> noise_scale.Batch:
        """The microbatches of all devices."""
        p = self.config.parallel
        count = p.replica * p.data * p.microbatches
        return noise_scale.Batch(count, self.config.data.batch_size // count)

    @property
    def pending(self) -> Tree:
        """True for arrays that nvme updates after the step, from state in files."""
        return jax.tree.map(lambda trainable, in_step: trainable and not in_step, self.trainable, self.in_step)

    @property
    def trainable_shards(self) -> Shards:
        """`shards` of a tree like the gradients: None for frozen arrays."""
        return self.shards._replace(cuts=select(self.shards.cuts, self.trainable))

    @property
    def gathered_bytes_of_a_layer(self) -> int:
        """Bytes of a row of `forward.layered` that a device gathers at ZeRO 3: a layer, or with block:N a block."""
        itemsize = jnp.dtype(self.config.precision.compute).itemsize
        block = self.remat.remat.block if self.remat.remat.policy == "block" else 1

        def size(shape: jax.ShapeDtypeStruct, spec: PartitionSpec, cut: Cut) -> int:
            local = NamedSharding(self.mesh, PartitionSpec(None, *spec[1:])).shard_shape(shape.shape)
            return 0 if cut == UNSHARDED else math.prod(local[1:]) * itemsize * block

        of_layers = self.model.shapes[LAYERS], self.specs[LAYERS], self.shards.cuts[LAYERS]
        return sum(jax.tree.leaves(jax.tree.map(size, *of_layers)))

    @property
    def compression(self) -> Compression:
        return self.config.parallel.compression

    @property
    def is_layer(self) -> np.ndarray | None:
        """False for rows of layers that are padding, of each stage [P n]; None: there are none."""
        p, L = self.config.parallel, self.config.model.main_layers
        if self.layer_order is None or len(self.layer_order) == L:
            return None
        return (self.layer_order < L).reshape(p.pipe, -1)

    def is_padded(self, path: str) -> bool:
        """True if the first dim of the array at a path ("params/ends/head_VD") may have rows of padding."""
        return self.model.is_padded(path) or LAYERS in path.split("/")

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the loss is summed: those of the batch; with a pipeline also the stages."""
        return ("pipe", *BATCH_AXES) if self.execution is Execution.PIPELINE else BATCH_AXES

    @property
    def axes_apart(self) -> tuple[str, ...]:
        """Mesh axes along which devices take steps of their own (parallel.sync_every)."""
        return (local_steps.AXIS,) if self.config.parallel.sync_every else ()

    def together(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return those of some mesh axes along which devices take each step together."""
        return tuple(axis for axis in axes if axis not in self.axes_apart)

    @property
    def targets(self) -> int:
        """Number of targets in the batch of a step (of one replica, if they step apart), if every token has one."""
        p, d = self.config.parallel, self.config.data
        return d.batch_size * d.seq_len // (p.replica if p.sync_every else 1)


def make(config: Config, mesh: Mesh, model: Model | None = None) -> Plan:
    """Make the plan of a resolved config. model: used instead of the config's model. Computes and allocates nothing."""
    p, o = config.parallel, config.optimizer
    is_decoder = model is None and config.is_decoder
    model = factory.with_objective(model, config) if model else factory.make(config, mesh)
    if not is_decoder:
        factory.check(model, config)
    order = layers_of_rows(config)
    shapes = with_rows(model.shapes, len(order))
    pipe_tensor_specs = specs_over_pipe_and_tensor(model, mesh)
    if not is_decoder:
        factory.check_tensor(pipe_tensor_specs, config)
    stacks = LAYERS, *model.stacks
    sizes = {axis: mesh.shape[axis] for axis in ZERO_AXES} if p.zero else {}
    cuts = choose_cuts(shapes, sizes, p.persist_below, stacks, pipe_tensor_specs)
    may_shard = frozen.trainable(model.constants, shapes, "Model.constants")
    cuts = jax.tree.map(lambda cut, may_shard: cut if may_shard else UNSHARDED, cuts, may_shard)
    reduce = config.precision.grad_reduce
    communication = Communication(
        dtype=jnp.dtype("float32" if reduce in EIGHT_BITS else reduce),
        bucket_bytes=p.bucket_mb * 2**20,
        weights=jnp.dtype(config.precision.compute),
        reduce=reduce if reduce in EIGHT_BITS else None,
        least=p.persist_below,
        kept=("replica",) if p.compression.kind != "none" and not p.sync_every else (),
    )
    is_large = large(shapes, p.persist_below, stacks)
    trainable = frozen.trainable((*model.constants, *config.train.freeze), shapes)
    in_files = jax.tree.map(lambda is_large: is_large and config.memory.offload_optimizer == "nvme", is_large)
    return Plan(
        config=config,
        mesh=mesh,
        model=model,
        execution=execution(config),
        optimizer=optimizer_of(config, mesh, model, shapes, ZERO[p.zero].storage(pipe_tensor_specs, cuts)[1]),
        outer_optimizer=optax.sgd(o.outer_lr, o.outer_momentum, nesterov=True) if p.sync_every else None,
        lr_schedule=optim.schedule(config.optimizer),
        zero=ZERO[p.zero],
        specs=pipe_tensor_specs,
        shards=Shards(cuts, communication),
        remat=remat.Policy(
            config.memory.rematerialization,
            regather=p.zero == 3,
            offload=config.memory.offload_activations == "host",
            written_out=writes_layers_out(config, mesh.devices.flat[0].platform),
            ahead=layers_ahead(config),
        ),
        layer_order=order if p.chunks > 1 or len(order) > config.model.main_layers else None,
        host_memory=host_memory(config, jax.tree.map(and_, is_large, may_shard)),
        trainable=trainable,
        in_step=jax.tree.map(lambda trainable, in_files: trainable and not in_files, trainable, in_files),
        compressed=compressed(p.compression, shapes, is_large, stacks),
    )


def layers_ahead(config: Config) -> int:
    """Return how far gradients may fall behind (`remat.Policy.ahead`), and what is recomputed run ahead: one layer
    hides as much communication as two, in less memory, but for layers of which nothing is recomputed. Of a mixture XLA
    else puts off the gradients of experts, and keeps the rows of several layers for them."""
    p = config.parallel
    if config.memory.rematerialization.policy != "none":
        return 1
    if p.tensor * p.context > 1 or p.zero >= 2 or reduces_per_layer(config):
        return 2
    return 1 if config.model.experts else 0


def optimizer_of(
    config: Config, mesh: Mesh, model: Model, shapes: Tree, opt_specs: Tree
) -> optax.GradientTransformation:
    """Return the optimizer. shapes, opt_specs: of the weights; PartitionSpecs of their momentum.

    Muon's matrices are the arrays of layers, and of further stacks, with two dims or more beside that of layers, except
    those without weight decay: biases [L N H]; of experts [L E D F] each one's.
    """

    def is_matrix(path: tuple, x: jax.ShapeDtypeStruct) -> bool:
        return path[0].key in (LAYERS, *model.stacks) and x.ndim > 2 and model.is_decayed(path)

    pairs = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(opt_specs), strict=True)
    experts = jax.tree.leaves(of_experts(model, mesh))
    stacks = {
        path: muon.stack_of(x.shape, spec, 1 + has_experts)
        for ((path, x), spec), has_experts in zip(pairs, experts, strict=True)
        if is_matrix(path, x)
    }
    optimizer = optim.build(config, model.is_decayed, stacks)
    if config.optimizer.factory:
        optim.check(optimizer, config.optimizer.factory, shapes)
    return optimizer


def specs_over_pipe_and_tensor(model: Model, mesh: Mesh) -> Tree:
    """Return PartitionSpecs by the rules of a model, with layers sharded over pipe. Omits axes of one device: JAX would
    type arrays sharded over them as varying."""

    def on_mesh(path: tuple, spec: PartitionSpec) -> PartitionSpec:
        is_stacked = path[0].key in (LAYERS, *model.stacks)
        allowed = {"tensor", "pipe"} if model.splits_vocab and not is_stacked else {"tensor", "expert"}
        if {*jax.tree.leaves(tuple(spec))} - allowed or (is_stacked and spec and spec[0]):
            raise ValueError(
                f"the model's rules lay out {path_name(path)} as {spec}: only "
                "tensor and expert may be used, not on the dim of layers; parallel.pipe and parallel.zero shard over "
                "other axes"
            )
        entries = [axes_of_several_devices(entry, mesh) for entry in spec]
        if path[0].key == LAYERS and mesh.shape["pipe"] > 1:
            entries = ["pipe", *entries[1:]]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    return jax.tree_util.tree_map_with_path(on_mesh, specs(model.rules, model.shapes, mesh))


def of_experts(model: Model, mesh: Mesh) -> Tree:
    """True for arrays of which a dim is that of experts: a model's rules shard it over expert, on any mesh."""
    return jax.tree.map(lambda spec: "expert" in spec, specs(model.rules, model.shapes, mesh))


def axes_of_several_devices(entry: str | tuple[str, ...] | None, mesh: Mesh) -> str | tuple[str, ...] | None:
    """Return an entry of a PartitionSpec without axes of one device."""
    axes = tuple(axis for axis in jax.tree.leaves(entry) if mesh.shape[axis] > 1)
    return axes if len(axes) > 1 else axes[0] if axes else None


def large(shapes: Tree, persist_below: int, stacks: Sequence[str]) -> Tree:
    """True for arrays of at least persist_below elements (per layer, if in a stack): ZeRO and offload apply to them."""

    def is_large(path: tuple, x: jax.ShapeDtypeStruct) -> bool:
        is_stacked = path[0].key in stacks
        return x.ndim > is_stacked and x.size // (x.shape[0] if is_stacked else 1) >= persist_below

    return jax.tree_util.tree_map_with_path(is_large, shapes)


def compressed(how: Compression, shapes: Tree, is_large: Tree, stacks: Sequence[str]) -> Tree:
    """True for arrays that are summed over replica compressed: large ones, and for powersgd matrices only."""
    least_dims = 2 if how.kind == "powersgd" else 0

    def is_compressed(path: tuple, x: jax.ShapeDtypeStruct, is_large: bool) -> bool:
        return how.has_residual and is_large and x.ndim - (path[0].key in stacks) >= least_dims

    return jax.tree_util.tree_map_with_path(is_compressed, shapes, is_large)


def host_memory(config: Config, is_large: Tree) -> HostMemory:
    """Return the placement of the config: only large arrays are offloaded, and no constants (Model.constants)."""
    nothing = jax.tree.map(lambda _: False, is_large)
    return HostMemory(
        params=is_large if config.memory.offload_params == "host" else nothing,
        optimizer=is_large if config.memory.offload_optimizer == "host" else nothing,
        gradients=is_large if gradients_on_host(config) else nothing,
    )


def layers_of_rows(config: Config) -> np.ndarray:
    """Return the layer of each row of the stacked weights: the chunks of a stage are adjacent."""
    p = config.parallel
    return row_order(p.pipe, p.chunks, config.model.main_layers, *counts.loads_of_ends(config))


def with_rows(shapes: Tree, rows: int) -> Tree:
    """Return shapes like those of a model's weights, with this number of layers."""
    ends, layers = split_layers(shapes)
    return join_layers(ends, jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), layers))
