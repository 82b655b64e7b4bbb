"""The training step under plain `jax.jit`, with shardings annotated and communication left to XLA: for compare_jit.py.

Model, optimizer, accumulation, clipping, State and shardings of State are those of our step. Under `constrain` a
pipeline is GSPMD's (arXiv 2105.04663, section 3.3): stages are a dim of the activations, sharded over pipe; in each
tick all stages run under `vmap` and their outputs move on by one, a roll along that dim. Without it layers are sharded
over pipe, and each is gathered where it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.derived import padded_vocab
from nanotrain_jax.models import decoder, device_kernels
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.sharding import layout
from nanotrain_jax.parallel.xla_options import gpu_options
from nanotrain_jax.parallel.zero.optimizer_step import Opt
from nanotrain_jax.step import build as steps
from nanotrain_jax.step import optimizer as optim


@dataclass(frozen=True)
class JitPlan:
    """Static values of the training step under `jax.jit`."""

    config: configs.Config
    mesh: Mesh
    constrain: bool  # annotate activations as well
    graphs: decoder.Graphs
    shards: steps.Tree  # NamedSharding of each master weight
    optimizer: optax.GradientTransformation
    lr_schedule: Callable[[jax.Array], jax.Array]

    def pin(self, x: jax.Array, text: str) -> jax.Array:
        """Annotate x with a layout given as text, if `constrain`."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, layout(text))) if self.constrain else x

    def pin_tokens(self, x_BTD: jax.Array) -> jax.Array:
        tokens = "T/context,tensor" if self.config.parallel.sequence_parallel else "T/context"
        return self.pin(x_BTD, f"B/replica,data {tokens} D")

    def pin_stages(self, x_PBTD: jax.Array) -> jax.Array:
        tokens = "T/context,tensor" if self.config.parallel.sequence_parallel else "T/context"
        return self.pin(x_PBTD, f"P/pipe B/replica,data {tokens} D")

    def pin_sums(self, grads: steps.Tree) -> steps.Tree:
        """Annotate accumulated gradients: sharded from stage 2 on."""
        return jax.lax.with_sharding_constraint(grads, self.shards) if self.config.parallel.zero >= 2 else grads


def jit_plan(config: configs.Config, mesh: Mesh, constrain: bool) -> JitPlan:
    """Return the plan of a step. Shards are those of our optimizer state."""
    kernel = device_kernels.of_attention(config.model, jnp.dtype(config.precision.compute), mesh.devices.flat[0])
    graphs, _ = decoder.abstract(config.model.model_copy(update={"attention": kernel}))
    moments = steps.build(config, mesh).state.opt.moments
    return JitPlan(
        config=config,
        mesh=mesh,
        constrain=constrain,
        graphs=graphs,
        shards=jax.tree.map(lambda x: x.sharding, moments[0].mu),
        optimizer=optim.build(config, decoder.is_decayed),
        lr_schedule=optim.schedule(config.optimizer),
    )


def check_is_comparable(config: configs.Config) -> None:
    """Raise ValueError for features that the step under jit does not implement."""
    vocab_size = config.model.vocab_size
    rows = padded_vocab(vocab_size, config.parallel.tensor)
    if config.precision.loss_scale != "none":
        raise ValueError(f"precision.loss_scale={config.precision.loss_scale}: not implemented under jit; use none")
    p, layers = config.parallel, config.model.num_layers
    if p.pipe > 1 and (p.chunks > 1 or p.vocab_over_pipe or layers % p.pipe):
        raise ValueError(
            f"parallel.chunks={p.chunks} parallel.vocab_over_pipe={p.vocab_over_pipe} model.num_layers={layers}: a "
            f"pipeline under jit has one chunk per stage and {layers // p.pipe * p.pipe} layers, whole ends; set these"
        )
    if rows > vocab_size:
        raise ValueError(f"model.vocab_size={vocab_size}: padding is not implemented under jit; use {rows}")
    if config.optimizer.name != "adamw" or config.optimizer.factory:
        raise ValueError(f"optimizer.name={config.optimizer.name} under jit: only adamw is implemented; use it")
    if config.model.features.norms_after:
        raise ValueError(f"model.family={config.model.family}: norms after attention and MLP under jit; use another")
    if config.model.experts:
        raise ValueError("model.experts under jit: not implemented; leave it out")
    if config.model.loss_chunk:
        raise ValueError(f"model.loss_chunk={config.model.loss_chunk}: not implemented under jit; use 0")


def run_layer(plan: JitPlan, x_BTD: jax.Array, weights: steps.Tree) -> jax.Array:
    """Apply a layer."""
    layer = nnx.merge(plan.graphs.layer, weights)
    attended = layer.attention(plan.pin_tokens(layer.norm_attention(x_BTD)), len(x_BTD))
    x_BTD = plan.pin_tokens(x_BTD + plan.pin_tokens(attended))
    return plan.pin_tokens(x_BTD + plan.pin_tokens(layer.mlp(plan.pin_tokens(layer.norm_mlp(x_BTD)))[0]))


def ends_of(plan: JitPlan, params: steps.Tree) -> decoder.Ends:
    """Return embedding and loss, with what is annotated in them."""
    ends = nnx.merge(plan.graphs.ends, params["ends"])
    logits = ends.logits
    embedding_VD = ends.embedding_VD[...]

    def pinned_logits(x_BTD: jax.Array) -> jax.Array:
        return plan.pin(logits(x_BTD), "B/replica,data T/context V/tensor")

    def look_up(tokens_BT: jax.Array) -> jax.Array:
        return embedding_VD.astype(jnp.float32)[tokens_BT]

    ends.logits = pinned_logits  # called by ends.loss
    ends.look_up = look_up  # XLA's partitioner moves more for our look-up
    return ends


def embedded(plan: JitPlan, ends: decoder.Ends, params: steps.Tree, tokens_BT: jax.Array) -> jax.Array:
    """tokens[B T] -> x[B T D]"""
    return plan.pin_tokens(ends.embed(tokens_BT).astype(params["ends"]["embedding_VD"].dtype))


def objective(plan: JitPlan, params: steps.Tree, batch: steps.Tree) -> jax.Array:
    """Return the summed loss of a microbatch, divided by the tokens of the batch."""
    ends = ends_of(plan, params)
    x_BTD = embedded(plan, ends, params, batch["inputs"])
    policy = remat.Policy(plan.config.memory.rematerialization)
    x_BTD = remat.scan(partial(run_layer, plan), x_BTD, params["layers"], policy)
    tokens = plan.config.data.batch_size * plan.config.data.seq_len
    return ends.loss(x_BTD, batch["targets"])[0] / tokens


def pipelined_objective(plan: JitPlan, params: steps.Tree, microbatches: steps.Tree) -> jax.Array:
    """Return the mean loss of microbatches[M ...]: M + P - 1 ticks of all P stages, idle ones too."""
    P, tokens = plan.config.parallel.pipe, plan.config.data.batch_size * plan.config.data.seq_len
    ends, policy = ends_of(plan, params), remat.Policy(plan.config.memory.rematerialization)
    of_stages = jax.tree.map(lambda w: w.reshape(P, len(w) // P, *w.shape[1:]), params["layers"])
    x_MBTD = jax.lax.map(partial(embedded, plan, ends, params), microbatches["inputs"])

    def run_stage(x_BTD: jax.Array, weights: steps.Tree) -> jax.Array:
        return remat.scan(partial(run_layer, plan), x_BTD, weights, policy)

    def tick(x_PBTD: jax.Array, enters_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_PBTD = plan.pin_stages(jnp.roll(x_PBTD, 1, axis=0).at[0].set(enters_BTD))
        x_PBTD = plan.pin_stages(jax.vmap(run_stage, spmd_axis_name="pipe")(x_PBTD, of_stages))
        return x_PBTD, x_PBTD[-1]

    @jax.checkpoint  # without it the logits of all microbatches are kept
    def add_loss(total: jax.Array, microbatch: tuple) -> tuple[jax.Array, None]:
        x_BTD, targets_BT = microbatch
        return total + ends.loss(plan.pin_tokens(x_BTD), targets_BT)[0] / tokens, None

    idle = jnp.zeros((P - 1, *x_MBTD.shape[1:]), x_MBTD.dtype)
    start = plan.pin_stages(jnp.zeros((P, *x_MBTD.shape[1:]), x_MBTD.dtype))
    _, left = jax.lax.scan(tick, start, jnp.concatenate([x_MBTD, idle]))
    return jax.lax.scan(add_loss, jnp.zeros(()), (left[P - 1 :], microbatches["targets"]))[0]


def microbatched(plan: JitPlan, batch: steps.Tree) -> steps.Tree:
    """x[B T] -> x[M B/M T]. Row b goes to microbatch b mod M, so that each device keeps its rows."""
    M = plan.config.parallel.microbatches
    return jax.tree.map(lambda x: x.reshape(len(x) // M, M, -1).swapaxes(0, 1), batch)


def accumulate(plan: JitPlan, params: steps.Tree, batch: steps.Tree) -> tuple[jax.Array, steps.Tree]:
    """Return the mean loss of a batch and its gradients in float32."""
    if plan.constrain and plan.config.parallel.pipe > 1:
        loss, grads = jax.value_and_grad(partial(pipelined_objective, plan))(params, microbatched(plan, batch))
        return loss, plan.pin_sums(jax.tree.map(lambda g: g.astype(jnp.float32), grads))

    def add_microbatch(sums: tuple, microbatch: steps.Tree) -> tuple[tuple, None]:
        loss_and_grads = jax.value_and_grad(partial(objective, plan))(params, microbatch)
        loss, grads = jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, loss_and_grads)
        return (loss, plan.pin_sums(grads)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jax.lax.scan(add_microbatch, (jnp.zeros(()), plan.pin_sums(zeros)), microbatched(plan, batch))[0]


def jit_train(plan: JitPlan, state: steps.State, batch: steps.Tree) -> tuple[steps.State, dict[str, jax.Array]]:
    """Take one step, as ours: gradients clipped by the global norm; no update if the norm is not finite."""
    loss, grads = accumulate(plan, state.params, batch)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    finite = jnp.isfinite(norm)
    grad_clip = plan.config.optimizer.grad_clip
    if grad_clip:
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, grad_clip / (norm + 1e-6)), grads)
    master = state.params if state.opt.master is None else state.opt.master
    updates, moments = plan.optimizer.update(grads, state.opt.moments, master)
    new = optax.apply_updates(master, updates), moments
    old = master, state.opt.moments
    updated, moments = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
    params = jax.tree.map(lambda w, old: w.astype(old.dtype), updated, state.params)
    opt = Opt(None if state.opt.master is None else updated, moments)
    skipped = state.skipped + jnp.where(finite, 0, 1)
    lr = jnp.asarray(plan.lr_schedule(state.step - state.skipped), jnp.float32)
    metrics = {"loss": loss, "grad_norm": norm, "lr": lr, "skipped_steps": skipped}
    return state._replace(step=state.step + 1, skipped=skipped, params=params, opt=opt), metrics


def jit_step(config: configs.Config, mesh: Mesh, constrain: bool) -> Callable:
    """(State, batch) -> (State, metrics): `steps.build(config, mesh).train` without shard_map or collectives.

    State and batch are annotated, and activations if `constrain`. Sharded over data:
    stage 1      master weights and moments
    stage 2      also accumulated gradients, in every microbatch
    stage 3      also parameters; the compiler chooses where and how often to gather them
    Rows of the batch are in their natural order, also where ours are in `Step.token_order`.
    """
    ours = steps.build(config, mesh)
    check_is_comparable(config)
    state, batch = jax.tree.map(lambda x: x.sharding, (ours.state, ours.batch))
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    return jax.jit(
        partial(jit_train, jit_plan(config, mesh, constrain)),
        in_shardings=(state, batch),
        out_shardings=(state, NamedSharding(mesh, steps.REPLICATED)),
        donate_argnums=0,
        compiler_options=gpu_options(config.parallel.bucket_mb) if is_gpu else None,
    )
