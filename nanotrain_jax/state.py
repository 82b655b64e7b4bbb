"""What a run is made of between two steps: shapes, layouts, where it rests, and how it begins.

One layout is used by all: initialisation, the step, the optimizer, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax import model
from nanotrain_jax.config import Config, Model
from nanotrain_jax.parallel import offload
from nanotrain_jax.parallel.schedule import row_order
from nanotrain_jax.parallel.update import Opt, only
from nanotrain_jax.parallel.zero import WHOLE, ZERO, shard_dims
from nanotrain_jax.runtime import optim
from nanotrain_jax.sharding import specs

Tree = Any  # a pytree of arrays
REPLICATED = PartitionSpec()


class State(NamedTuple):
    """All that changes from step to step."""

    step: jax.Array  # int32, batches consumed
    skipped: jax.Array  # int32, how many of them had gradients that were not finite
    params: Tree  # in the compute dtype: {"ends": ..., "layers": stacked}
    opt: Opt  # float32 master weights and moments
    scale: optim.LossScale | None  # None without loss scaling


class Layout(NamedTuple):
    """How the parameters of a config lie on a mesh. Trees are like the parameters."""

    model: Model  # with the attention kernel that runs there
    split: model.Split
    graphs: model.Graphs
    shapes: Tree
    order: np.ndarray | None  # which layer each row of the stacked weights is; None: in order
    specs: Tree  # over pipe and tensor
    dims: Tree  # which dim ZeRO shards over data, or WHOLE
    layer_dims: Tree  # the same of one layer, without the leading L
    far_params: Tree  # whether an array rests on the host
    far_opt: Tree  # whether its master weights and moments do
    far_gradients: Tree  # whether its gradient does, where the layers' loop is written out
    inside: Tree  # whether the step updates it; else piecewise.py does, with state that rests in files


def lay_out(config: Config, mesh: Mesh) -> Layout:
    """The layout of a resolved config. Nothing is computed or allocated."""
    p, m = config.parallel, config.memory
    attention = model.attention_kernel(config.model, jnp.dtype(config.precision.compute), mesh.devices.flat[0])
    decoder = config.model.model_copy(update={"attention": attention})
    # Where a whole layer is computed again, it has just gathered what its backward needs.
    split = model.Split("tensor", p.tensor, p.sequence_parallel, m.rematerialization.policy != "full")
    split = split if p.tensor > 1 else model.ONE_DEVICE
    graphs, shapes = model.abstract(decoder, split)
    laid = specs(model.rules(decoder, split, "pipe" if p.pipe > 1 else None), shapes, mesh)
    dims = shard_dims(shapes, p.data if p.zero else 1, p.persist_below, specs=laid)

    def is_large(path: tuple, x: jax.ShapeDtypeStruct) -> bool:
        return x.size // (x.shape[0] if path[0].key == "layers" else 1) >= p.persist_below

    large = jax.tree_util.tree_map_with_path(is_large, shapes)
    near = jax.tree.map(lambda _: False, large)
    return Layout(
        model=decoder,
        split=split,
        graphs=graphs,
        shapes=shapes,
        order=layers_of_rows(config) if p.chunks > 1 else None,
        specs=laid,
        dims=dims,
        layer_dims=jax.tree.map(lambda d: d if d == WHOLE else d - 1, dims["layers"]),
        far_params=large if m.offload_params == "host" else near,
        far_opt=large if m.offload_optimizer == "host" else near,
        far_gradients=large if m.offload_optimizer != "none" and p.zero >= 2 else near,
        inside=jax.tree.map(lambda is_large: not (is_large and m.offload_optimizer == "nvme"), large),
    )


def layers_of_rows(config: Config) -> np.ndarray:
    """Which layer each row of the stacked weights is: the chunks of a stage lie side by side."""
    p = config.parallel
    return row_order(p.pipe, p.chunks, config.model.num_layers)


def init(config: Config, rest: Layout, optimizer: optax.GradientTransformation) -> State:
    """The state of a run that begins. The same seed gives the same weights on every mesh and layout.

    Of what rests on the host no more than a layer is on the device at a time, and of the ends an array.
    """
    dtype = jnp.dtype(config.precision.compute)
    lower = lambda weights: jax.tree.map(lambda w: w.astype(dtype), weights)
    zeros = lambda weights: jax.tree.map(jnp.zeros_like, weights)
    make = partial(model.init, rest.model, config.train.seed, rest.split, rest.order)
    if all(jax.tree.leaves(rest.inside)) and not any(jax.tree.leaves(rest.far_opt)):
        master = make()
        params, moments = lower(master), optimizer.init(master)
    else:

        def parts(weights: Tree, part: str) -> tuple[Tree, Tree, Tree]:
            send = lambda x, far: offload.to_host(x) if far else x
            places = (rest.far_params, rest.far_opt, rest.far_opt)
            made = (lower(weights), weights, zeros(weights))
            return tuple(jax.tree.map(send, x, far[part]) for x, far in zip(made, places, strict=True))

        made = make(lambda layer: parts(layer, "layers"))
        both = zip(parts(made["ends"], "ends"), made["layers"], strict=True)
        params, master, empty = ({"ends": ends, "layers": layers} for ends, layers in both)
        moments = moments_like(optimizer, rest.shapes, empty, lambda x: jnp.zeros(x.shape, x.dtype))
    opt = Opt(None if dtype == jnp.float32 else master, moments)
    return State(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), params, opt, optim.loss_scale(config.precision))


def abstract(config: Config, mesh: Mesh, rest: Layout, optimizer: optax.GradientTransformation) -> tuple[State, State]:
    """-> (PartitionSpecs, ShapeDtypeStructs with shardings) of the state."""
    shapes = jax.eval_shape(partial(init, config, rest, optimizer))

    def like(params: Tree, opt: Tree, other: Any) -> State:
        """A tree like State, with these for parameters, for master weights and moments, and for each scalar."""
        moments = moments_like(optimizer, rest.shapes, opt, lambda _: other)
        opt = Opt(None if shapes.opt.master is None else opt, moments)
        return State(other, other, params, opt, jax.tree.map(lambda _: other, shapes.scale))

    laid = like(*ZERO[config.parallel.zero].storage(rest.specs, rest.dims), REPLICATED)
    far = like(rest.far_params, rest.far_opt, False)
    return laid, jax.tree.map(partial(placed, mesh), shapes, laid, far)


def placed(mesh: Mesh, x: jax.ShapeDtypeStruct, spec: PartitionSpec, far: bool = False) -> jax.ShapeDtypeStruct:
    """x, so laid out, on the devices or (far) on their hosts."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=offload.placed(mesh, spec, far))


def part(optimizer: optax.GradientTransformation, opt: Opt, chosen: Tree, counts: bool = True) -> Opt:
    """What of opt belongs to the chosen parameters, None for the others; with its counts of steps, or without."""
    keep = (lambda x: x) if counts else lambda _: None
    moments = optax.tree_utils.tree_map_params(
        optimizer, lambda x, here: x if here else None, opt.moments, chosen, transform_non_params=keep
    )
    return Opt(only(opt.master, chosen), moments)


def moments_like(optimizer: optax.GradientTransformation, shapes: Tree, params: Tree, scalar: Callable) -> Any:
    """A tree like optax's state, with params in place of each tree of them, and scalar(x) in place of other leaves."""
    state = jax.eval_shape(optimizer.init, shapes)
    return optax.tree_utils.tree_map_params(optimizer, lambda _, x: x, state, params, transform_non_params=scalar)


def in_order(state: State, outer: int, inner: int, donate: tuple[int, ...] = ()) -> Callable[[State], State]:
    """-> State with its stacked layers [outer inner ...] -> the same as [inner outer ...], all of it where it was."""

    def move(path: tuple, x: jax.Array) -> jax.Array:
        if jax.tree_util.DictKey("layers") not in path:
            return x
        y = offload.to_device(x).reshape(outer, inner, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        return offload.to_host(y) if offload.on_host(x) else y

    shardings = jax.tree.map(lambda x: x.sharding, state)
    moved = partial(jax.tree_util.tree_map_with_path, move)
    return jax.jit(moved, out_shardings=shardings, donate_argnums=donate)
