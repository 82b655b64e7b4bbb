"""The training step: composes model, layout and optimizer into pure functions under the package's one `shard_map`.

The body of `train` is the order of the papers: gather, run, reduce, update. What each of them moves is told where it
is defined; besides them only the loss does, one scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax import model, piecewise
from nanotrain_jax import state as states
from nanotrain_jax.config import Config
from nanotrain_jax.mesh import BATCH_AXES
from nanotrain_jax.parallel import offload, pipeline, remat, streamed
from nanotrain_jax.parallel import schedule as schedules
from nanotrain_jax.parallel.collectives import all_reduce, as_varying, gpu_options, varying_axes
from nanotrain_jax.parallel.update import clipped, merged, only
from nanotrain_jax.parallel.zero import PER_LAYER, ZERO, Wire, Zero, settled
from nanotrain_jax.runtime import optim
from nanotrain_jax.sharding import layout
from nanotrain_jax.state import REPLICATED, State

Tree = Any  # a pytree of arrays
BATCH = layout("B/replica,data T/context")


class Step(NamedTuple):
    """Compiled functions, and the shapes and shardings of their arguments (ShapeDtypeStructs).

    init() -> State
    train(State, batch) -> State, metrics; consumes (donates) its State. With pieces (memory.offload_optimizer=nvme)
        also Pending: what their `update` is to be called with, before the next step
    evaluate(params, batch) -> sum of losses in nats, number of targets
    in_layer_order(State) -> State, its stacked layers in the order of the model, as checkpoints have them
    in_stage_order(State) -> State, as the others take it; consumes (donates) its State
    The two orders differ only with several chunks on a stage: then the former is a second State, else the same one.

    batch: {"inputs", "targets"}, both int32 [B/replica,data T/context]; evaluate ignores targets below 0.
    metrics: float32 scalars loss (mean over the batch, in nats per token), grad_norm (before clipping) and lr, and the
    int32 skipped_steps so far; with loss scaling also loss_scale, by which this step's loss was multiplied.
    """

    init: Callable[[], State]
    train: Callable[[State, Tree], tuple]
    evaluate: Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]
    state: State
    batch: Tree
    in_layer_order: Callable[[State], State]
    in_stage_order: Callable[[State], State]
    pieces: dict[str, piecewise.Pieces]


class Stages(NamedTuple):
    """The decoder as `pipeline.run_schedule` takes it; ends and inputs are what is differentiated."""

    first: Callable[..., jax.Array]
    layer: Callable[..., jax.Array]
    last: Callable[..., tuple[jax.Array, jax.Array]]  # sum of losses, number of targets
    ends: Tree
    layers: Tree
    inputs: Callable[[Tree], Tree]


def accumulate(
    objective: Callable[[Tree, Tree], jax.Array], inputs: Tree, microbatches: Tree
) -> tuple[jax.Array, Tree]:
    """-> (loss, gradients), summed in float32 over microbatches[M ...], which are run one after the other.

    objective(inputs, microbatch) is this device's contribution to the loss. Moves nothing that its backward does not:
    gradients with respect to what is varying over the batch axes stay local. Only one microbatch's activations are
    alive at a time.
    """

    def one(sums, microbatch):
        loss, grads = jax.value_and_grad(objective)(inputs, microbatch)
        return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, (loss, grads)), None

    if len(jax.tree.leaves(microbatches)[0]) == 1:
        return jax.value_and_grad(objective)(inputs, jax.tree.map(lambda x: x[0], microbatches))
    zero = as_varying(jnp.zeros(()), BATCH_AXES)
    zeros = zero, jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), inputs)
    return lax.scan(one, zeros, microbatches)[0]


def after(first: Tree, second: Tree) -> Tree:
    """second, of which no leaf can be used before the same leaf of first is there."""
    wait = lambda x, y: lax.optimization_barrier((x, as_varying(y, sorted(varying_axes(x)))))[1]
    return jax.tree.map(wait, first, second)


def summed(first: dict, second: dict) -> dict:
    """The trees of both, added where both have one (tied embeddings)."""
    return first | {
        name: jax.tree.map(offload.add, first[name], y) if name in first else y for name, y in second.items()
    }


def split(batch: Tree, pieces: int) -> Tree:
    """x[B ...] -> x[pieces B/pieces ...] for each leaf."""
    return jax.tree.map(lambda x: x.reshape(pieces, x.shape[0] // pieces, *x.shape[1:]), batch)


def build(config: Config, mesh: Mesh) -> Step:
    """The step of a resolved config on a mesh. Nothing is computed or allocated before its functions are called."""
    zero = ZERO[config.parallel.zero]
    last = PER_LAYER.get(config.parallel.zero) if config.parallel.grad_reduce == "per_layer" else None
    wire = Wire(jnp.dtype(config.precision.grad_reduce), config.parallel.bucket_mb * 2**20)
    pieces = config.parallel.microbatches
    B, T = config.data.batch_size, config.data.seq_len
    pipe, C = mesh.shape["pipe"], config.parallel.chunks
    loss_axes = ("pipe", *BATCH_AXES) if pipe > 1 else BATCH_AXES
    memory, rest = config.memory, states.lay_out(config, mesh)
    graphs, dims, layer_dims = rest.graphs, rest.dims, rest.layer_dims
    schedule = optim.schedule(config.optimizer)
    optimizer = optim.build(config.optimizer, model.is_decayed)
    host_activations = memory.offload_activations == "host"
    policy = remat.Policy(memory.rematerialization, config.parallel.zero == 3, offload=host_activations)
    far_gradients = config.parallel.zero >= 2 and memory.offload_optimizer != "none"
    is_streamed = pipe == 1 and last is None and (far_gradients or host_activations)

    def local(params: Tree) -> Tree:
        """params, such that gradients which are partial sums over tensor stay local: `zero.reduce` sums them once."""

        def cast(path: tuple, w: jax.Array, spec: PartitionSpec) -> jax.Array:
            is_local = "tensor" not in spec and model.has_partial_gradient(path, rest.split)
            return as_varying(w, ("tensor",)) if is_local else w

        return jax.tree_util.tree_map_with_path(cast, params, rest.specs)

    def loss(zero: Zero, params: Tree, inputs: Tree, batch: Tree, sums: Tree = None) -> tuple[jax.Array, jax.Array]:
        params, sums = as_varying(params, BATCH_AXES), sums or {"ends": None, "layers": None}
        weights = zero.gather(params["ends"], inputs["ends"], sums["ends"], dims["ends"], wire)
        ends = nnx.merge(graphs.ends, weights)
        layers = params["layers"], inputs["layers"], sums["layers"]
        x_BTD = ends.embed(batch["inputs"])
        x_BTD = remat.scan(
            partial(layer, zero, len(batch["inputs"])),
            x_BTD,
            layers,
            policy._replace(prefetch=config.parallel.prefetch),
        )
        return ends.loss(x_BTD, batch["targets"])

    def layer(zero: Zero, sequences: int, x_BTD: jax.Array, layer: tuple[Tree, Tree, Tree]) -> jax.Array:
        return nnx.merge(graphs.layer, zero.gather(*layer, layer_dims, wire))(x_BTD, sequences)

    def staged(params: Tree, microbatches: Tree) -> Stages:
        """The decoder, cut for loops by hand. Each end takes its own share of the parameters of both."""
        params, sequences = as_varying(params, ("pipe", *BATCH_AXES)[pipe == 1 :]), microbatches["inputs"].shape[1]
        run, size = remat.unit(partial(layer, zero, sequences), policy)

        def ends(inputs: Tree, used: Callable[[Tree], Tree]) -> nnx.Module:
            stored, inputs, ends_dims = map(used, (params["ends"], inputs, dims["ends"]))
            return nnx.merge(graphs.ends, params["ends"] | zero.gather(stored, inputs, None, ends_dims, wire))

        return Stages(
            first=lambda inputs, batch: ends(inputs, model.used_by_embed).embed(batch["inputs"]),
            layer=lambda weights, inputs, x_BTD: run(x_BTD, (weights, inputs, None)),
            last=lambda inputs, x_BTD, batch: ends(inputs, model.used_by_loss).loss(x_BTD, batch["targets"]),
            ends=zero.inputs(params["ends"], dims["ends"]),
            layers=remat.stacked(params["layers"], size),
            inputs=lambda weights: zero.inputs(weights, dims["layers"] if size else layer_dims),
        )

    def run_by_hand(stored: Tree, microbatches: Tree, factor: jax.Array) -> tuple[jax.Array, Tree]:
        """-> (loss, gradients in float32) of all microbatches, times factor: what `accumulate` gives, by a loop that is
        written out: a schedule's, or that of layers whose weights or gradients rest on the host."""
        s = staged(local(stored), microbatches)
        scaled = lambda inputs, x_BTD, batch: s.last(inputs, x_BTD, batch)[0] * factor
        if pipe > 1:
            table = schedules.make(config.parallel.schedule, pipe, pieces, C)
            mean_loss, (of_ends, of_layers) = pipeline.run_schedule(
                table, s.first, s.layer, scaled, s.ends, s.layers, microbatches, s.inputs, idle=config.parallel.idle
            )
        else:
            uses = model.used_by_embed, model.used_by_loss
            far = rest.far_gradients
            ends = [[use(tree["ends"]) for use in uses] for tree in (stored, dims, far)]
            mean_loss, both, of_layers = streamed.run_layers(
                s.first,
                s.layer,
                scaled,
                tuple(use(s.ends) for use in uses),
                s.layers,
                microbatches,
                s.inputs,
                lambda grads, earlier=(None, None): tuple(map(settled, grads, *ends, earlier)),
                lambda grads: settled(grads, stored["layers"], layer_dims, far["layers"]),
            )
            of_ends = summed(*both)
        like = zero.inputs(stored["layers"], dims["layers"])
        of_layers = jax.tree.map(lambda g, w: g.reshape(w.shape), of_layers, like)  # blocks of layers become layers
        return mean_loss, {"ends": of_ends, "layers": of_layers}

    def train(state: State, batch: Tree) -> tuple:
        factor = state.scale.value if state.scale else 1.0
        params = local(state.params)

        def run(zero: Zero, weights: Tree, microbatches: Tree, sums: Tree = None) -> tuple[jax.Array, Tree]:
            # Inputs are made of what is stored: their types say where gradients are to be summed.
            objective = lambda inputs, batch: loss(zero, weights, inputs, batch, sums)[0] * (factor / (B * T))
            return accumulate(objective, zero.inputs(params, dims), microbatches)

        microbatches = split(batch, pieces)
        if pipe > 1 or is_streamed:
            mean_loss, grads = run_by_hand(state.params, microbatches, factor / (B * T))
            grads = zero.reduce(grads, state.params, dims, wire)
        elif last is None:
            mean_loss, grads = run(zero, params, microbatches)
            grads = zero.reduce(grads, state.params, dims, wire)
        else:  # the backward of the last microbatch also sends what the others left on this device
            mean_loss, sums, weights = 0.0, None, params
            if pieces > 1:
                mean_loss, sums = run(zero, params, jax.tree.map(lambda x: x[:-1], microbatches))
                weights = after(sums, params)  # not both at a time
            final_loss, grads = run(last, weights, jax.tree.map(lambda x: x[-1:], microbatches), sums)
            mean_loss, grads = mean_loss + final_loss, last.reduce(grads, state.params, dims, wire)
        mean_loss = all_reduce(mean_loss, loss_axes)
        if state.scale:
            mean_loss /= factor
        norm, finite, times = clipped(grads, config.optimizer.grad_clip, factor)
        mine = [only(tree, rest.inside) for tree in (state.params, grads, dims, rest.far_opt)]
        params, opt = zero.update(optimizer, *mine[:2], state.opt, mine[2], wire, times, finite, mine[3])
        params = merged(params, state.params)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        metrics = {
            "loss": mean_loss,
            "grad_norm": norm,
            "lr": jnp.asarray(schedule(state.step - state.skipped), jnp.float32),
            "skipped_steps": skipped,
        }
        scale = state.scale
        if scale:
            metrics["loss_scale"] = scale.value
            scale = optim.adjust(scale, finite, config.precision)
        new = State(state.step + 1, skipped, params, opt, scale)
        if not cut:
            return new, metrics
        pending = only(grads, outside), piecewise.counts(optimizer, state.opt), times, finite
        return new, metrics, piecewise.Pending(*pending)

    def evaluate(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        params, microbatches = local(params), split(batch, pieces)
        if pipe > 1:
            s, table = staged(params, microbatches), schedules.forward_only(pipe, pieces, C)
            sums = pipeline.run_forward(
                table,
                lambda batch: s.first(s.ends, batch),
                lambda weights, x_BTD: s.layer(weights, s.inputs(weights), x_BTD),
                lambda x_BTD, batch: s.last(s.ends, x_BTD, batch),
                s.layers,
                microbatches,
                idle=config.parallel.idle,
            )
        else:
            inputs = zero.inputs(params, dims)
            sums = lax.map(lambda microbatch: loss(zero, params, inputs, microbatch), microbatches)
            sums = jax.tree.map(lambda x: x.sum(0), sums)
        return all_reduce(sums, loss_axes)

    state_specs, state = states.abstract(config, mesh, rest, optimizer)
    outside = jax.tree.map(lambda inside: not inside, rest.inside)
    cut = piecewise.cut(config, rest, optimizer, state)
    prefetch, on_gpu = config.parallel.prefetch, mesh.devices.flat[0].platform == "gpu"
    is_offloaded = memory.offload_optimizer != "none" or memory.offload_activations == "host"
    options = gpu_options(config.parallel.bucket_mb, prefetch, pipe > 1, is_offloaded) if on_gpu else None
    batch = {name: jax.ShapeDtypeStruct((B, T), jnp.int32) for name in ("inputs", "targets")}
    batch_specs = {name: BATCH for name in batch}

    def on_mesh(function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    batch = jax.tree.map(partial(states.placed, mesh), batch, batch_specs)
    own = lambda state: state._replace(opt=states.part(optimizer, state.opt, rest.inside)) if cut else state
    state, state_specs = own(state), own(state_specs)
    # Of what is updated piece by piece: gradients lie as its state does.
    far_specs = only(zero.storage(rest.specs, dims)[1], outside)
    pending_specs = piecewise.Pending(far_specs, *[REPLICATED] * 3) if cut else None

    def pieces_of(mine: Tree, stacked: piecewise.Opt, count: int) -> piecewise.Pieces:
        weights_specs = only(state_specs.params, mine)
        opt_specs = jax.tree.map(lambda x: x.sharding.spec, stacked)
        update = on_mesh(
            piecewise.update(zero, optimizer, wire, dims, mine, count),
            (weights_specs, pending_specs, opt_specs, REPLICATED),
            (weights_specs, opt_specs),
        )
        begin = piecewise.begin(config, rest, optimizer, mine, stacked, count)
        return piecewise.Pieces(mine, stacked, count, begin, jax.jit(update, donate_argnums=0))

    init = lambda: own(states.init(config, rest, optimizer))
    in_order = partial(states.in_order, state) if C > 1 else lambda *_, **__: lambda state: state
    return Step(
        init=jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, state)),
        train=jax.jit(
            on_mesh(train, (state_specs, batch_specs), (state_specs, REPLICATED, pending_specs)[: 3 if cut else 2]),
            donate_argnums=0,
            compiler_options=options,
        ),
        evaluate=jax.jit(
            on_mesh(evaluate, (state_specs.params, batch_specs), REPLICATED),
            compiler_options=options if is_offloaded else None,
        ),
        state=state,
        batch=batch,
        in_layer_order=in_order(pipe, C),
        in_stage_order=in_order(C, pipe, donate=(0,)),
        pieces={name: pieces_of(*group) for name, group in cut.items()},
    )
