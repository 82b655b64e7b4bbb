"""Training state: shapes, shardings, memory placement, initialization."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax.models.contract import LAYERS, join_layers, split_layers
from nanotrain_jax.parallel import offload
from nanotrain_jax.parallel.update import Opt, select
from nanotrain_jax.runtime import optim
from nanotrain_jax.step.plan import Plan

Tree = Any  # a pytree of arrays
REPLICATED = PartitionSpec()


class State(NamedTuple):
    """All that changes from step to step."""

    step: jax.Array  # int32, batches consumed
    skipped: jax.Array  # int32, how many of them had gradients that were not finite
    params: Tree  # in the compute dtype: a dict of `ends`, further stacks and layers (models/contract.py)
    opt: Opt  # float32 master weights and moments
    scale: optim.LossScale | None  # None without loss scaling


def init(plan: Plan) -> State:
    """The state before the first step. The same seed gives the same weights on every mesh and layout.

    What is kept in host memory is made there: the device holds at most one layer of it, one other array, and what
    `Model.init` makes whole (further stacks).
    """
    dtype = jnp.dtype(plan.config.precision.compute)
    make = partial(plan.model.init, plan.config.train.seed, plan.layer_order)
    if all(jax.tree.leaves(plan.in_step)) and not any(jax.tree.leaves(plan.host_memory.optimizer)):
        master = make()
        params = _cast(master, dtype)
        moments = plan.optimizer.init(master)
    else:
        params, master, zeros = _made_where_it_is_kept(plan, make)
        moments = moments_like(plan, zeros, lambda x: jnp.zeros(x.shape, x.dtype))
    opt = Opt(None if dtype == jnp.float32 else master, moments)
    counts = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return State(*counts, params, opt, optim.loss_scale(plan.config.precision))


def _made_where_it_is_kept(plan: Plan, make: Callable) -> tuple[Tree, Tree, Tree]:
    """-> parameters, master weights and zeros like them, layer by layer, each sent to the memory that keeps it."""
    dtype = jnp.dtype(plan.config.precision.compute)
    host = plan.host_memory

    def send(x: jax.Array, on_host: bool) -> jax.Array:
        return offload.to_host(x) if on_host else x

    def parts(weights: Tree, part: int) -> tuple[Tree, Tree, Tree]:
        zeros = jax.tree.map(jnp.zeros_like, weights)
        made = _cast(weights, dtype), weights, zeros
        places = (split_layers(tree)[part] for tree in (host.params, host.optimizer, host.optimizer))
        return tuple(jax.tree.map(send, x, place) for x, place in zip(made, places, strict=True))

    ends, layers = split_layers(make(lambda layer: parts(layer, 1)))
    params, master, zeros = map(join_layers, parts(ends, 0), layers)
    return params, master, zeros


def _cast(weights: Tree, dtype: jnp.dtype) -> Tree:
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def abstract(plan: Plan) -> tuple[State, State]:
    """-> (PartitionSpecs, ShapeDtypeStructs with shardings) of the whole state."""
    shapes = jax.eval_shape(partial(init, plan))

    def like(params: Tree, opt: Tree, other: Any) -> State:
        """A tree like State, with these for parameters, for master weights and moments, and for each scalar."""
        moments = moments_like(plan, opt, lambda _: other)
        opt = Opt(None if shapes.opt.master is None else opt, moments)
        return State(other, other, params, opt, jax.tree.map(lambda _: other, shapes.scale))

    specs = like(*plan.zero.storage(plan.specs, plan.shards.dims), REPLICATED)
    on_host = like(plan.host_memory.params, plan.host_memory.optimizer, False)
    return specs, jax.tree.map(partial(placed, plan.mesh), shapes, specs, on_host)


def placed(mesh: Mesh, x: jax.ShapeDtypeStruct, spec: PartitionSpec, on_host: bool = False) -> jax.ShapeDtypeStruct:
    """x with this sharding, in the memory of devices or of their hosts."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=offload.placed(mesh, spec, on_host))


def in_step(plan: Plan, state: State) -> State:
    """The state that the step keeps: without optimizer state in files."""
    return state if all(jax.tree.leaves(plan.in_step)) else state._replace(opt=select_opt(plan, state.opt))


def select_opt(plan: Plan, opt: Opt) -> Opt:
    """Optimizer state of the parameters that the step updates, with its counts of steps; None for the others."""
    moments = optax.tree_utils.tree_map_params(
        plan.optimizer, lambda x, here: x if here else None, opt.moments, plan.in_step
    )
    return Opt(select(opt.master, plan.in_step), moments)


def moments_like(plan: Plan, params: Tree, scalar: Callable) -> Any:
    """A tree like optax's state, with params in place of each tree of them, and scalar(x) in place of other leaves."""
    state = jax.eval_shape(plan.optimizer.init, plan.model.shapes)
    return optax.tree_utils.tree_map_params(plan.optimizer, lambda _, x: x, state, params, transform_non_params=scalar)


def in_order(state: State, outer: int, inner: int, donate: tuple[int, ...] = ()) -> Callable[[State], State]:
    """-> State with its stacked layers [outer inner ...] -> the same as [inner outer ...], in the same memory."""

    def move(path: tuple, x: jax.Array) -> jax.Array:
        if next((key.key for key in path if isinstance(key, jax.tree_util.DictKey)), None) != LAYERS:
            return x
        y = offload.to_device(x).reshape(outer, inner, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        return offload.to_host(y) if offload.on_host(x) else y

    shardings = jax.tree.map(lambda x: x.sharding, state)
    moved = partial(jax.tree_util.tree_map_with_path, move)
    return jax.jit(moved, out_shardings=shardings, donate_argnums=donate)
