"""The plan of a run: everything that is decided before anything is computed, and stays the same in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax.config import Config
from nanotrain_jax.execution import Execution, execution, gradients_on_host
from nanotrain_jax.mesh import BATCH_AXES
from nanotrain_jax.models import factory
from nanotrain_jax.models.contract import LAYERS, Model
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.schedule import row_order
from nanotrain_jax.parallel.zero import WHOLE, ZERO, Communication, Shards, Zero, shard_dims
from nanotrain_jax.runtime import optim
from nanotrain_jax.sharding import specs

Tree = Any  # a pytree of arrays


class HostMemory(NamedTuple):
    """Which arrays are kept in host memory: trees of booleans like the parameters."""

    params: Tree
    optimizer: Tree  # master weights and moments
    gradients: Tree  # from their layer's backward to the update; used where that loop is written by hand


@dataclass(frozen=True, eq=False)
class Plan:
    """A resolved config on a mesh. Trees are like the parameters.

    specs        PartitionSpecs over pipe and tensor; ZeRO adds data (`zero.storage`)
    shards       the dim that ZeRO shards over data of each array, and how shards travel
    layer_order  which layer each row of the stacked weights is; None: they are in order
    in_step      whether the step updates an array; else nvme does after the step, from state in files
    """

    config: Config
    mesh: Mesh
    model: Model
    execution: Execution
    optimizer: optax.GradientTransformation
    lr_schedule: optax.Schedule
    zero: Zero
    specs: Tree
    shards: Shards
    remat: remat.Policy
    layer_order: np.ndarray | None
    host_memory: HostMemory
    in_step: Tree

    def shards_of_layer(self, stack: str = LAYERS) -> Shards:
        """`shards` of one layer of a stack, without its leading dim."""
        dims = jax.tree.map(lambda d: d if d == WHOLE else d - 1, self.shards.dims[stack])
        return self.shards._replace(dims=dims)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The mesh axes over which a loss is summed: devices along them have other sequences, or other stages."""
        return ("pipe", *BATCH_AXES) if self.execution is Execution.PIPELINE else BATCH_AXES

    @property
    def targets(self) -> int:
        """Targets of a whole batch."""
        return self.config.data.batch_size * self.config.data.seq_len


def make(config: Config, mesh: Mesh, model: Model | None = None) -> Plan:
    """The plan of a resolved config, and of its model or another one. Nothing is computed or allocated."""
    p = config.parallel
    is_decoder = model is None and config.model.factory is None
    model = model or factory.make(config, mesh)
    if not is_decoder:
        factory.check(model, config)
    over_mesh = specs_over_pipe_and_tensor(model, mesh)
    stacks = LAYERS, *model.stacks
    dims = shard_dims(model.shapes, p.data if p.zero else 1, p.persist_below, stacks, over_mesh)
    communication = Communication(jnp.dtype(config.precision.grad_reduce), p.bucket_mb * 2**20)
    is_large = large(model.shapes, p.persist_below, stacks)
    return Plan(
        config=config,
        mesh=mesh,
        model=model,
        execution=execution(config),
        optimizer=optim.build(config.optimizer, model.is_decayed),
        lr_schedule=optim.schedule(config.optimizer),
        zero=ZERO[p.zero],
        specs=over_mesh,
        shards=Shards(dims, communication),
        remat=remat.Policy(
            config.memory.rematerialization, p.zero == 3, p.prefetch, config.memory.offload_activations == "host"
        ),
        layer_order=layers_of_rows(config) if p.chunks > 1 else None,
        host_memory=host_memory(config, is_large),
        in_step=jax.tree.map(lambda is_large: not (is_large and config.memory.offload_optimizer == "nvme"), is_large),
    )


def specs_over_pipe_and_tensor(model: Model, mesh: Mesh) -> Tree:
    """PartitionSpecs by the rules of a model; layers are split over stages. Axes of one device are left out: what is
    split over them would count as varying."""

    def one(path: tuple, spec: PartitionSpec) -> PartitionSpec:
        is_stacked = path[0].key in (LAYERS, *model.stacks)
        if {*spec} - {None, "tensor"} or (is_stacked and spec and spec[0]):
            raise ValueError(
                f"the model's rules lay out {jax.tree_util.keystr(path, simple=True, separator='/')} as {spec}: only "
                "tensor may be named, and not for the dim of layers; leave the rest to parallel.pipe and parallel.zero"
            )
        entries = [axis if axis and mesh.shape[axis] > 1 else None for axis in spec]
        if path[0].key == LAYERS and mesh.shape["pipe"] > 1:
            entries = ["pipe", *entries[1:]]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    return jax.tree_util.tree_map_with_path(one, specs(model.rules, model.shapes, mesh))


def large(shapes: Tree, persist_below: int, stacks: Sequence[str]) -> Tree:
    """Whether an array is worth moving: from persist_below elements on, of one layer if it is in a stack."""

    def is_large(path: tuple, x: jax.ShapeDtypeStruct) -> bool:
        is_stacked = path[0].key in stacks
        return x.ndim > is_stacked and x.size // (x.shape[0] if is_stacked else 1) >= persist_below

    return jax.tree_util.tree_map_with_path(is_large, shapes)


def host_memory(config: Config, is_large: Tree) -> HostMemory:
    """What is kept in host memory: of large arrays what the config says."""
    nothing = jax.tree.map(lambda _: False, is_large)
    return HostMemory(
        params=is_large if config.memory.offload_params == "host" else nothing,
        optimizer=is_large if config.memory.offload_optimizer == "host" else nothing,
        gradients=is_large if gradients_on_host(config) else nothing,
    )


def layers_of_rows(config: Config) -> np.ndarray:
    """Which layer each row of the stacked weights is: the chunks of a stage lie side by side."""
    p = config.parallel
    return row_order(p.pipe, p.chunks, config.model.num_layers)
