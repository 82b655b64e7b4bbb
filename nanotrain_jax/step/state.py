"""Training state: shapes, shardings, memory placement, initialization."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nanotrain_jax.config.execution import casts_at_use
from nanotrain_jax.models.contract import LAYERS, join_layers, split_layers
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.gradients import local_steps, noise_scale
from nanotrain_jax.parallel.offload import host_offload
from nanotrain_jax.parallel.zero.optimizer_step import Opt, map_moments, merge, select
from nanotrain_jax.step import compressed, optimizer
from nanotrain_jax.step.compressed import Feedback
from nanotrain_jax.step.plan import Plan, with_rows

REPLICATED = PartitionSpec()


class State(NamedTuple):
    """Training state.

    With parallel.sync_every each array but `step` and those of `outer` has a last dim of size R, sharded over replica.
    """

    step: jax.Array  # int32, batches consumed
    skipped: jax.Array  # int32, steps skipped because of gradients that were not finite
    params: Tree  # a dict of `ends`, further stacks and layers (models/contract.py); in the compute dtype, or float32
    opt: Opt  # float32 master weights (None: params are float32) and moments; None for frozen arrays
    scale: optimizer.LossScale | None  # None without loss scaling
    outer: local_steps.Outer | None = None  # laid out as the master weights; None without parallel.sync_every
    feedback: Feedback | None = None  # of compressed gradients; None without compression
    noise: noise_scale.Noise | None = None  # averages of the gradient noise scale; None without train.noise_scale


def init(plan: Plan) -> State:
    """Initialize the state. The same seed gives the same weights on every mesh and layout.

    Offloaded state is moved to host memory layer by layer: the device holds at most one layer of it, one other array,
    and what `Model.init` creates at once (further stacks).
    """
    order = plan.layer_order
    if order is not None:  # rows of padding have the weights of the last layer, which nothing uses
        order = np.minimum(order, plan.config.model.main_layers - 1)
    return with_weights(plan, partial(plan.model.init, plan.config.train.seed, order))


def with_weights(plan: Plan, make: Callable[..., Tree]) -> State:
    """Return a state before its first step. make(put=None) -> float32 weights, layers in stage order (`Model.init`)."""
    if not any(jax.tree.leaves(plan.pending)) and not any(jax.tree.leaves(plan.host_memory.optimizer)):
        master = make()
        params = _stored(plan, master, plan.trainable)
        master = select(master, plan.trainable)
        moments = plan.optimizer.init(master)
    else:
        params, *of_optimizer = _init_layer_by_layer(plan, make)
        master, zeros = (select(tree, plan.trainable) for tree in of_optimizer)
        moments = moments_like(plan, zeros, lambda x: jnp.zeros(x.shape, x.dtype))
    opt = Opt(None if stored_dtype(plan) == jnp.float32 else master, moments)
    counts = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    noise = noise_scale.start() if plan.noise_axes else None
    state = State(*counts, params, opt, optimizer.loss_scale(plan.config.precision), noise=noise)
    return with_synchronization(plan, state)


def from_weights(plan: Plan, weights: Tree) -> State:
    """Return the state before the first step with given weights, layers in stage order."""

    def make(put: Callable | None = None) -> Tree:
        if put is None:
            return _cast(weights, jnp.float32)
        ends, layers = split_layers(weights)
        place = partial(_cast, dtype=jnp.float32)
        layers = jax.lax.map(lambda layer: put(place(host_offload.to_device(layer))), layers)
        return join_layers(place(host_offload.to_device(ends)), layers)

    return with_weights(plan, make)


def continued(plan: Plan, before: State) -> State:
    """Return the state with which a stage of training begins: weights and counters of the state before it.

    plan: that of the new stage. Master weights and moments begin as in a new run; float32 weights stay exact.
    """
    weights = before.params if before.opt.master is None else merge(before.opt.master, before.params)
    return from_weights(plan, weights)._replace(step=before.step, skipped=before.skipped)


def weights_like(plan: Plan) -> Tree:
    """Return the shapes and shardings of float32 weights for `from_weights`: those of the state that it makes of them,
    so that it needs no memory beside it."""
    rows = plan.config.model.main_layers if plan.layer_order is None else len(plan.layer_order)
    params, master = plan.zero.storage(plan.specs, plan.shards.cuts)
    is_stored = stored_dtype(plan) == jnp.float32
    specs, on_host = (params, plan.host_memory.params) if is_stored else (master, plan.host_memory.optimizer)
    return jax.tree.map(partial(with_sharding, plan.mesh), with_rows(plan.model.shapes, rows), specs, on_host)


def with_synchronization(plan: Plan, state: State) -> State:
    """Return the state of equal replicas (parallel.sync_every), with residuals of zeros (parallel.compress), from one
    without either. The rest of it stays."""
    feedback = compressed.init(plan, state.params)
    if plan.outer_optimizer:
        theta = state.params if state.opt.master is None else state.opt.master
        outer = local_steps.Outer(theta, plan.outer_optimizer.init(theta))
        state = map_replicas(partial(local_steps.copies, count=plan.config.parallel.replica), state)
        state = state._replace(outer=outer)
    return state._replace(feedback=feedback)


def map_replicas(function: Callable, state: State, *more: State) -> State:
    """Apply function to the arrays of a state (and of others like it) that differ between replicas."""
    shared = {"step": state.step, "outer": state.outer, "feedback": state.feedback}
    trees = (tree._replace(**dict.fromkeys(shared)) for tree in (state, *more))
    return jax.tree.map(function, *trees)._replace(**shared)


def stored_dtype(plan: Plan) -> jnp.dtype:
    """Return the dtype of `State.params`, of weights that are not frozen."""
    return jnp.dtype("float32" if casts_at_use(plan.config) else plan.config.precision.compute)


def _stored(plan: Plan, weights: Tree, trainable: Tree) -> Tree:
    """Return weights as `State.params` stores them: frozen ones in the compute dtype."""
    compute, dtype = jnp.dtype(plan.config.precision.compute), stored_dtype(plan)
    return jax.tree.map(lambda w, trains: w.astype(dtype if trains else compute), weights, trainable)


def _init_layer_by_layer(plan: Plan, make: Callable) -> tuple[Tree, Tree, Tree]:
    """-> parameters, master weights, zeros like these; each layer is moved to its memory before the next is created."""
    host = plan.host_memory

    def send(x: jax.Array, on_host: bool) -> jax.Array:
        return host_offload.to_host(x) if on_host else x

    def place(weights: Tree, index: int) -> tuple[Tree, Tree, Tree]:
        """index: 0 for the ends, 1 for a layer (`split_layers`)."""
        zeros = jax.tree.map(jnp.zeros_like, weights)
        arrays = _stored(plan, weights, split_layers(plan.trainable)[index]), weights, zeros
        on_host = (split_layers(tree)[index] for tree in (host.params, host.optimizer, host.optimizer))
        return tuple(jax.tree.map(send, x, is_on_host) for x, is_on_host in zip(arrays, on_host, strict=True))

    ends, layers = split_layers(make(lambda layer: place(layer, 1)))
    params, master, zeros = map(join_layers, place(ends, 0), layers)
    return params, master, zeros


def _cast(weights: Tree, dtype: jnp.dtype) -> Tree:
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def abstract(plan: Plan) -> tuple[State, State]:
    """-> (PartitionSpecs, ShapeDtypeStructs with shardings) of the whole state."""
    shapes = jax.eval_shape(partial(init, plan))

    def like(params: Tree, opt: Tree, other: Any) -> State:
        """Return a tree like State. opt: for master weights and moments; other: for each scalar."""
        opt = select(opt, plan.trainable)
        moments = moments_like(plan, opt, lambda _: other)
        outer = shapes.outer and local_steps.Outer(
            opt, optax.tree_utils.tree_map_params(plan.outer_optimizer, lambda _, x: x, shapes.outer.moments, opt)
        )
        opt = Opt(None if shapes.opt.master is None else opt, moments)
        scale, noise = (jax.tree.map(lambda _: other, tree) for tree in (shapes.scale, shapes.noise))
        return State(other, other, params, opt, scale, outer, noise=noise)

    params_specs, opt_specs = plan.zero.storage(plan.specs, plan.shards.cuts)
    specs = like(params_specs, opt_specs, REPLICATED)
    if plan.outer_optimizer:
        specs = map_replicas(lambda spec, x: local_steps.with_replicas(spec, x.ndim - 1), specs, shapes)
    specs = specs._replace(feedback=compressed.specs(plan, opt_specs))
    on_host = like(plan.host_memory.params, plan.host_memory.optimizer, False)
    on_host = on_host._replace(feedback=jax.tree.map(lambda _: False, shapes.feedback))
    return specs, jax.tree.map(partial(with_sharding, plan.mesh), shapes, specs, on_host)


def with_sharding(
    mesh: Mesh, x: jax.ShapeDtypeStruct, spec: PartitionSpec, on_host: bool = False
) -> jax.ShapeDtypeStruct:
    """Return x with a sharding, in device or host memory."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host_offload.named_sharding(mesh, spec, on_host))


def without_nvme_state(plan: Plan, state: State) -> State:
    """Return the state without the optimizer state that NVMe files hold; it keeps the step counts."""
    if not any(jax.tree.leaves(plan.pending)):
        return state
    moments = map_moments(
        plan.optimizer, lambda x, in_step: x if in_step else None, state.opt.moments, plan.in_step, other=lambda x: x
    )
    return state._replace(opt=Opt(select(state.opt.master, plan.in_step), moments))


def moments_like(plan: Plan, params: Tree, scalar: Callable) -> Any:
    """Return a tree like optax state, with params for each tree of parameters and scalar(x) for other leaves."""
    state = jax.eval_shape(plan.optimizer.init, plan.model.shapes)
    return map_moments(plan.optimizer, lambda _, x: x, state, params, other=scalar)


def as_saved(plan: Plan, state: State) -> State:
    """Return the shapes of what a run needs of a checkpoint: where weights are cast at use, the master weights, and no
    other weights but frozen ones."""
    is_lora = plan.config.train.lora is not None
    if not casts_at_use(plan.config):
        return adapters_alone(plan, state)
    master = select(state.params, plan.trainable)
    frozen = jax.tree.map(lambda x, trains: None if trains or is_lora else x, state.params, plan.trainable)
    return state._replace(params=frozen, opt=Opt(master, state.opt.moments))


def adapters_alone(plan: Plan, state: State) -> State:
    """Return the state without the frozen base of adapters (train.lora), which checkpoints do not hold."""
    return state if plan.config.train.lora is None else state._replace(params=select(state.params, plan.trainable))


def forms(plan: Plan, state: State) -> tuple[Callable[[State], State], Callable[[State], State]]:
    """Return functions: a State of the step -> as in checkpoints, and back; the second donates its argument.

    In checkpoints layers are in model order (`orders`), and weights in the compute dtype beside float32 master weights,
    whatever the step stores. The second takes `adapters_alone`.
    """
    in_layer_order, _ = orders(plan, state)
    _, in_stage_order = orders(plan, adapters_alone(plan, state))
    if not casts_at_use(plan.config):
        return in_layer_order, in_stage_order
    cast = jax.jit(partial(_cast, dtype=jnp.dtype(plan.config.precision.compute)))

    def with_master(state: State) -> State:
        state = in_layer_order(state)
        master = select(state.params, plan.trainable)
        return state._replace(params=cast(state.params), opt=Opt(master, state.opt.moments))

    def without_master(state: State) -> State:
        params = merge(state.opt.master, state.params)
        return in_stage_order(state._replace(params=params, opt=Opt(None, state.opt.moments)))

    return with_master, without_master


def orders(plan: Plan, state: State) -> tuple[Callable[[State], State], Callable[[State], State]]:
    """Return compiled functions: a State in stage order -> in layer order, and back; the second donates its argument.

    In layer order, rows of padding come last.
    """
    order, p = plan.layer_order, plan.config.parallel
    if order is None:
        return unchanged, unchanged
    if plan.is_layer is None:  # chunks: a transposition, which communicates less than a gather of rows
        return (
            reordered(state, partial(swapped, outer=p.pipe, inner=p.chunks)),
            reordered(state, partial(swapped, outer=p.chunks, inner=p.pipe), donate=(0,)),
        )
    to_layers, to_stages = (partial(jnp.take, indices=rows, axis=0) for rows in (np.argsort(order), order))
    # Rows are gathered over pipe: array by array, so that a device never holds all layers of the state.
    return one_by_one(state, to_layers), one_by_one(state, to_stages, donate=(0,))


def unchanged(tree: Tree) -> Tree:
    """Return the tree: a state whose layers are in model order; weights without replicas."""
    return tree


def swapped(x: jax.Array, outer: int, inner: int) -> jax.Array:
    """x[outer inner ...] -> x[inner outer ...], as one leading dim."""
    return x.reshape(outer, inner, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def reordered(
    state: State, reorder: Callable[[jax.Array], jax.Array], donate: tuple[int, ...] = ()
) -> Callable[[State], State]:
    """Return a compiled function of a State that applies reorder to stacked layers, in the same memory."""

    def of_leaf(path: tuple, x: jax.Array) -> jax.Array:
        return in_same_memory(reorder, x) if is_of_layers(path) else x

    shardings = jax.tree.map(lambda x: x.sharding, state)
    of_state = partial(jax.tree_util.tree_map_with_path, of_leaf)
    return jax.jit(of_state, out_shardings=shardings, donate_argnums=donate)


def one_by_one(
    state: State, reorder: Callable[[jax.Array], jax.Array], donate: tuple[int, ...] = ()
) -> Callable[[State], State]:
    """As `reordered`, but one array after another: at most one is gathered at a time."""

    def of_leaf(path: tuple, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        return jax.block_until_ready(compiled_for(sharding)(x)) if is_of_layers(path) else x

    @lru_cache
    def compiled_for(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(partial(in_same_memory, reorder), out_shardings=sharding, donate_argnums=donate)

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return lambda state: jax.tree_util.tree_map_with_path(of_leaf, state, shardings)


def is_of_layers(path: tuple) -> bool:
    """True if an array at this path of a State has a leading dim of layers."""
    return next((key.key for key in path if isinstance(key, jax.tree_util.DictKey)), None) == LAYERS


def in_same_memory(change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return change(x), computed on the device, in host memory if x is."""
    y = change(host_offload.to_device(x))
    return host_offload.to_host(y) if host_offload.on_host(x) else y
