"""The training step on one page, and the package's only `shard_map`.

`train`: gather and run (`gradients.py`), reduce (over replica perhaps compressed, `compressed.py`), clip, update. Each
function documents its communication; in addition only the loss is all-reduced, one scalar, with the measures of an
objective, and where targets may be ignored their number.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from nanotrain_jax.config.execution import Execution, reduces_per_layer
from nanotrain_jax.config.schema import Config
from nanotrain_jax.models.contract import Model
from nanotrain_jax.parallel.collectives import Tree, all_reduce
from nanotrain_jax.parallel.context import context
from nanotrain_jax.parallel.cpu_order import in_order
from nanotrain_jax.parallel.gradients import local_steps
from nanotrain_jax.parallel.mesh import BATCH_AXES
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline.executor import run_forward
from nanotrain_jax.parallel.sharding import layout
from nanotrain_jax.parallel.xla_options import gpu_options
from nanotrain_jax.parallel.zero.optimizer_step import clip_by_global_norm, select
from nanotrain_jax.step import digest, forward
from nanotrain_jax.step import plan as plans
from nanotrain_jax.step import state as states
from nanotrain_jax.step.compressed import sum_kept
from nanotrain_jax.step.encoded import NUMBER, encode_all
from nanotrain_jax.step.gradients import GRADIENTS, Gradients
from nanotrain_jax.step.measures import TRAIN, report
from nanotrain_jax.step.plan import Plan
from nanotrain_jax.step.state import REPLICATED, State
from nanotrain_jax.step.update import Pending, adjusted, apply_update, metrics, next_noise, next_state, synchronize

BATCH = layout("B/replica,data,expert T/context")
PER_REPLICA = layout("R/replica")
ROWS = layout("B/replica,data,expert")
STARTS = layout("B/replica,data,expert T")  # a device needs those of whole rows


class Digests(NamedTuple):
    """Compiled functions that change nothing; of each array they return the digests of all devices (`digest.py`).

    gradients(State, batch) -> {"loss", "gradients", "sums"}: this device's part of the loss and of the gradients, and
        the reduced gradients. Computes the gradients of a step; needs no more memory than it
    copies(State) -> State: of arrays of which several devices have a copy, None for others
    """

    gradients: Callable[[State, Tree], Tree]
    copies: Callable[[State], State]


class Step(NamedTuple):
    """Compiled functions, and the shapes and shardings of their arguments (ShapeDtypeStructs).

    init() -> State
    train(State, batch) -> State, metrics, Pending; donates its State. Pending: the gradients whose update `nvme` must
        apply before the next step (memory.offload_optimizer=nvme), else None
    synchronize(State) -> State after an outer step, which joins the replicas; donates its State. Call it after every
        parallel.sync_every-th step. None without parallel.sync_every
    average(State.params) -> params as evaluate takes them: with parallel.sync_every the mean over replicas, else the
        same arrays
    evaluate(params, batch) -> sum of losses in nats, number of targets; with Model.correct also the number of targets
        whose most likely token is right, with Model.measures its sums by name
    of_rows(params, batch) -> what Model.of_rows returns of each row, [B/replica,data,expert ...]. None without it
    in_layer_order(State) -> State as in checkpoints: stacked layers in model order, weights in the compute dtype and
        float32 master weights
    in_stage_order(State) -> State as the other functions take it; donates its State. saved: what it needs of a
        checkpoint
    digests: functions for checks of the hardware
    The orders differ only with several chunks per stage, or different numbers of layers: then in_layer_order returns a
    copy, else the same arrays.

    batch: {"inputs", "targets"}, both int32 [B/replica,data,expert T/context]; evaluate ignores targets below 0. The
    tokens of a row are in the order token_order: their positions, int32 [T]; None: as they are. With
    data.attend_across_documents=false also {"starts"}, int32 [B/replica,data,expert T]: the position in the row of the
    first token of each token's document, in natural order; then train ignores targets below 0, too.
    metrics: float32 scalars loss (mean over the batch, nats per token), grad_norm (before clipping) and lr, and the
    int32 skipped_steps so far; with loss scaling also loss_scale, the scale of this step; with train.noise_scale also
    noise_scale, in tokens, nan while the gradient is lost in noise; with Model.measures also their means over what
    Model.last counts, as train_NAME. With parallel.sync_every
    [R/replica]: one of each for every replica, of its part of the batch.
    """

    init: Callable[[], State]
    train: Callable[[State, Tree], tuple[State, dict[str, jax.Array], Pending | None]]
    evaluate: Callable[[Tree, Tree], tuple]
    of_rows: Callable[[Tree, Tree], jax.Array] | None
    state: State
    saved: State
    batch: Tree
    in_layer_order: Callable[[State], State]
    in_stage_order: Callable[[State], State]
    token_order: np.ndarray | None
    synchronize: Callable[[State], State] | None
    average: Callable[[Tree], Tree]
    digests: Digests
    plan: Plan


def train(plan: Plan, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array], Pending | None]:
    """Run one step on this device's shards of state and batch."""
    scale = scale_of(state)
    loss, grads, squares, measures = gradients(plan, state, batch)
    grads = plan.zero.reduce(grads, select(state.params, plan.trainable), plan.trainable_shards)
    grads, feedback = sum_kept(plan, grads, state.feedback, state.step)
    sums = all_reduce((loss, measures or {}), plan.together(plan.loss_axes))
    loss, measures = jax.tree.map(lambda x: x / scale, sums)
    means = {"loss": loss} | {f"{TRAIN}{name}": x for name, x in report(plan, measures).items()}
    clip = clip_by_global_norm(grads, plan.config.optimizer.grad_clip, scale, plan.axes_apart)
    params, opt, pending = apply_update(plan, state, grads, clip)
    params = adjusted(plan, params, measures, clip.is_finite)
    after = next_state(plan, state, params, opt, feedback, clip.is_finite)
    if state.noise:
        after = after._replace(noise=next_noise(plan, state, squares, grads, clip.is_finite))
    return after, metrics(plan, state, after, means, clip), pending


def scale_of(state: State) -> jax.Array | float:
    """Return the loss scale of a step."""
    return state.scale.value if state.scale else 1.0


def gradients(plan: Plan, state: State, batch: Tree) -> Gradients:
    """Return loss and gradients on this device's shards, times the loss scale (`gradients.py`)."""
    scale = scale_of(state) / count_targets(plan, batch)
    return GRADIENTS[plan.execution](plan, state.params, microbatched(plan, batch), scale)


def digest_gradients(plan: Plan, state: State, batch: Tree) -> Tree:
    """-> what `Digests.gradients` returns. Communicates what the gradients of `train` do, and the digests."""
    if plan.outer_optimizer:
        state = states.map_replicas(local_steps.own, state)
    found = gradients(plan, state, batch)
    sums = plan.zero.reduce(found.grads, select(state.params, plan.trainable), plan.trainable_shards)
    return digest.of_devices({"loss": found.loss, "gradients": found.grads, "sums": sums})


def digest_copies(mesh: Mesh, specs: State, state: State) -> State:
    """-> what `Digests.copies` returns. Reads each array once. specs: of the state."""
    return digest.of_devices(digest.shared(mesh, specs, state))


def count_targets(plan: Plan, batch: Tree) -> jax.Array | int:
    """Return the number of targets in the batch of a step, as `Plan.targets`, or what the model counts instead.

    Where rows may have targets to ignore, or the model counts: all-reduces one scalar.
    """
    if not (plan.config.data.has_ignored_targets or plan.model.count):
        return plan.targets
    own = (plan.model.count or number_of_targets)(batch)
    return jnp.maximum(all_reduce(own, plan.together(BATCH_AXES)), 1)


def number_of_targets(batch: Tree) -> jax.Array:
    """Return the number of targets that are not ignored, on this device."""
    return (batch["targets"] >= 0).astype(jnp.float32).sum()


def train_apart(plan: Plan, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array], None]:
    """Run one step of this device's replica, on its own rows of the batch: `train`, on arrays [... R/replica]."""
    after, values, pending = train(plan, states.map_replicas(local_steps.own, state), batch)
    return states.map_replicas(local_steps.as_column, after), jax.tree.map(local_steps.as_column, values), pending


def synchronize_replicas(plan: Plan, state: State) -> State:
    """Join the replicas (`update.synchronize`): a state of arrays [... R/replica] -> with equal weights."""
    return states.map_replicas(local_steps.as_column, synchronize(plan, states.map_replicas(local_steps.own, state)))


def average_replicas(params: Tree) -> Tree:
    """w[... R/replica] -> w[...], the mean over replicas (`local_steps.mean`)."""
    return local_steps.mean(jax.tree.map(local_steps.own, params))


def evaluate(plan: Plan, params: Tree, batch: Tree) -> tuple:
    """-> sum of losses, number of targets of a batch, and what else `forward.measure` returns."""
    return all_reduce(run_forward_only(plan, params, microbatched(plan, batch), forward.measure), plan.loss_axes)


def of_rows(plan: Plan, params: Tree, batch: Tree) -> jax.Array:
    """-> what `Model.of_rows` returns of this device's rows, [B ...]"""
    microbatches = microbatched(plan, batch)
    M = plan.config.parallel.microbatches

    def read(model: Model, ends: Tree, x: Tree, microbatch: Tree) -> jax.Array:
        values = model.of_rows(ends, x, microbatch)
        is_own_M = jnp.arange(M) == microbatch[NUMBER]
        return jnp.where(is_own_M.reshape(M, *[1] * values.ndim), values[None], 0.0)

    numbered = microbatches | {NUMBER: jnp.arange(M, dtype=jnp.int32)}
    values = run_forward_only(plan, params, numbered, read)
    axes = [axis for axis in plan.loss_axes if axis not in BATCH_AXES]
    return all_reduce(values, axes).reshape(-1, *values.shape[2:])


def run_forward_only(plan: Plan, params: Tree, microbatches: Tree, read: forward.Read) -> Tree:
    """-> what read returns, a tree of arrays, summed over microbatches[M ...]; with a pipeline only the last stage has
    it."""
    params = forward.local(plan, params)
    p = plan.config.parallel
    if plan.execution is Execution.PIPELINE:
        schedule = schedules.forward_only(p.pipe, p.microbatches, p.chunks, plan.model.splits_vocab)
        model = forward.layered(plan, params, read)
        if plan.model.encode:
            microbatches |= encode_all(plan, params, microbatches, model.ends)
        return run_forward(schedule, model, microbatches, idle=p.idle)
    weights = forward.Weights(params, forward.inputs(plan, plan.zero, params))
    return jax.tree.map(lambda x: x.sum(0), lax.map(partial(forward.scores, plan, read, weights), microbatches))


def microbatched(plan: Plan, batch: Tree) -> Tree:
    """x[B ...] -> x[M B/M ...] for each leaf."""
    M = plan.config.parallel.microbatches
    return jax.tree.map(lambda x: x.reshape(M, x.shape[0] // M, *x.shape[1:]), batch)


def build(config: Config, mesh: Mesh, model: Model | None = None) -> Step:
    """Build the step of a resolved config on a mesh. model: used instead of the config's model.

    Computes and allocates nothing until its functions are called.
    """
    plan = plans.make(config, mesh, model)
    state_specs, state = (states.without_nvme_state(plan, tree) for tree in states.abstract(plan))
    batch_shapes, batch_specs = batch_of(plan)
    is_apart = plan.outer_optimizer is not None
    outputs = state_specs, PER_REPLICA if is_apart else REPLICATED, pending_specs(plan)
    run_train = on_mesh(mesh, partial(train_apart if is_apart else train, plan), (state_specs, batch_specs), outputs)
    param_specs, _ = plan.zero.storage(plan.specs, plan.shards.cuts)
    run_evaluate = on_mesh(mesh, partial(evaluate, plan), (param_specs, batch_specs), REPLICATED)
    run_of_rows = on_mesh(mesh, partial(of_rows, plan), (param_specs, batch_specs), ROWS)
    run_synchronize = on_mesh(mesh, partial(synchronize_replicas, plan), (state_specs,), state_specs)
    run_digest = on_mesh(mesh, partial(digest_gradients, plan), (state_specs, batch_specs), REPLICATED)
    run_digest_copies = on_mesh(mesh, partial(digest_copies, mesh, state_specs), (state_specs,), REPLICATED)
    run_average = on_mesh(mesh, average_replicas, (state_specs.params,), param_specs)
    options = compiler_options(plan)
    of_forward = options if is_offloaded(config) else None
    in_layer_order, in_stage_order = states.forms(plan, state)
    return Step(
        init=jax.jit(lambda: states.without_nvme_state(plan, states.init(plan)), out_shardings=shardings(state)),
        train=jax.jit(run_train, donate_argnums=0, compiler_options=options),
        evaluate=jax.jit(run_evaluate, compiler_options=of_forward),
        of_rows=jax.jit(run_of_rows, compiler_options=of_forward) if plan.model.of_rows else None,
        state=state,
        saved=states.as_saved(plan, state),
        batch=jax.tree.map(partial(states.with_sharding, mesh), batch_shapes, batch_specs),
        in_layer_order=in_layer_order,
        in_stage_order=in_stage_order,
        token_order=token_order(config),
        synchronize=jax.jit(run_synchronize, donate_argnums=0) if is_apart else None,
        average=jax.jit(run_average) if is_apart else states.unchanged,
        digests=Digests(jax.jit(run_digest, compiler_options=options), jax.jit(run_digest_copies)),
        plan=plan,
    )


def batch_of(plan: Plan) -> tuple[Tree, Tree]:
    """Return shapes and PartitionSpecs of the arrays of a batch, by name."""
    d = plan.config.data
    specs = {"inputs": BATCH, "targets": BATCH} | ({} if d.attend_across_documents else {"starts": STARTS})
    shapes = dict.fromkeys(specs, jax.ShapeDtypeStruct((d.batch_size, d.seq_len), jnp.int32))
    for name, row in plan.model.further_inputs.items():
        shapes[name] = jax.ShapeDtypeStruct((d.batch_size, *row.shape), row.dtype)
        specs[name] = ROWS
    return shapes, specs


def token_order(config: Config) -> np.ndarray | None:
    """Return the positions of a row's tokens, in the order in which devices along context hold them, int32 [T].

    None: in the order of the row.
    """
    p = config.parallel
    return context.zigzag_order(config.data.seq_len, p.context) if p.is_blockwise else None


def on_mesh(mesh: Mesh, function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
    """Wrap a function of local shards -> a function of global arrays."""
    if mesh.devices.flat[0].platform == "cpu":
        function = in_order(function)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def pending_specs(plan: Plan) -> Pending | None:
    """Return PartitionSpecs of Pending: gradients are laid out as their optimizer state. None if nothing is pending."""
    if not any(jax.tree.leaves(plan.pending)):
        return None
    _, opt_specs = plan.zero.storage(plan.specs, plan.shards.cuts)
    return Pending(select(opt_specs, plan.pending), REPLICATED, REPLICATED)


def compiler_options(plan: Plan) -> dict | None:
    """Return XLA options for the training program; None except on GPU."""
    if plan.mesh.devices.flat[0].platform != "gpu":
        return None
    p = plan.config.parallel
    in_flight = 32 if reduces_per_layer(plan.config) else 8  # a send, and one or all buckets of a layer
    sends = p.pipe > 1 or p.context > 1 or (p.tensor > 1 and p.overlap_tensor)
    if not sends:
        in_flight = 2 if p.prefetch else 0  # a gather and a scatter
    if p.prefetch and plan.shards.communication.reduce:
        in_flight = max(in_flight, 8)  # XLA combines no all-to-alls: one for each large array of a layer
    ahead = plan.gathered_bytes_of_a_layer if p.prefetch else 0
    has_loops = not plan.remat.written_out
    return gpu_options(p.bucket_mb, ahead, in_flight, is_offloaded(plan.config), has_loops)


def is_offloaded(config: Config) -> bool:
    """True if optimizer state or activations are offloaded."""
    return config.memory.offload_optimizer != "none" or config.memory.offload_activations == "host"


def shardings(tree: Tree) -> Tree:
    """Return the shardings of ShapeDtypeStructs."""
    return jax.tree.map(lambda x: x.sharding, tree)
