"""Learning-rate schedule and optimizer from a config, with optax; loss scaling for float16."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanotrain_jax.config.schema import Config, Optimizer, Precision
from nanotrain_jax.models.factory import load_function
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.zero import muon
from nanotrain_jax.parallel.zero.optimizer_step import map_moments

FIRST_SCALE, GROW_AFTER = 2.0**16, 2000  # dynamic loss scale, as in PyTorch's GradScaler


class LossScale(NamedTuple):
    """A loss scale: multiplies the loss before the backward, divides the gradients after it."""

    value: jax.Array  # float32
    clean: jax.Array  # int32: steps since the last overflow or growth


def loss_scale(config: Precision) -> LossScale | None:
    """Return the initial loss scale; None without loss scaling."""
    if config.loss_scale == "none":
        return None
    first = FIRST_SCALE if config.loss_scale == "dynamic" else config.loss_scale
    return LossScale(jnp.asarray(first, jnp.float32), jnp.zeros((), jnp.int32))


def adjust(scale: LossScale, finite: jax.Array, config: Precision) -> LossScale:
    """Return the scale of the next step (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    dynamic: halve after gradients that are not finite, double after GROW_AFTER finite steps. A NUMBER is constant.
    """
    if config.loss_scale != "dynamic":
        return scale
    clean = jnp.where(finite, scale.clean + 1, 0)
    grown = clean == GROW_AFTER
    value = jnp.where(finite, jnp.where(grown, scale.value * 2, scale.value), jnp.maximum(scale.value / 2, 1))
    return LossScale(value, jnp.where(grown, 0, clean))


def schedule(config: Optimizer) -> optax.Schedule:
    """update number (from 0) -> learning rate: linear warm-up, then cosine, linear, wsd or constant.

    The first update has lr / (warmup_steps + 1), as in nanoGPT. From decay_steps on the rate is min_lr.
    wsd (warm-up, stable, decay): MiniCPM, arXiv 2404.06395. Takes a resolved config.
    """
    lr, end, warmup = config.lr, config.min_lr, config.warmup_steps
    steps = max(config.decay_steps - warmup, 1)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(lr, steps, alpha=end / lr)
    elif config.schedule == "linear":
        main = optax.linear_schedule(lr, end, steps)
    elif config.schedule == "wsd":
        decay = min(max(round(config.decay_fraction * config.decay_steps), 1), steps)
        main = optax.linear_schedule(lr, end, decay, transition_begin=steps - decay)
    else:
        main = optax.constant_schedule(lr)
    warm = optax.linear_schedule(lr / (warmup + 1), lr, warmup)
    return _standard_promotion(optax.join_schedules([warm, main], [warmup]) if warmup else main)


def build(
    config: Config, is_decayed: Callable[[tuple], bool], stacks: Mapping[tuple, muon.Stack] | None = None
) -> optax.GradientTransformation:
    """Return the optimizer of a config, with decoupled weight decay (arXiv 1711.05101).

    is_decayed: tree path of a parameter -> True if weight decay applies. stacks: what Muon orthogonalizes
    (parallel/zero/muon.py). AdamW is element-wise and runs unchanged on shards, as that of optimizer.factory must. Does
    not clip: the global norm depends on the sharding of the gradients (parallel/zero/optimizer_step.py).
    """
    o, rate = config.optimizer, schedule(config.optimizer)

    def mask(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(path), params)

    if o.factory:
        optimizer = _of_factory(config, rate, mask)
    elif o.name == "muon":
        dtype = jnp.dtype("float32" if config.precision.compute == "float32" else "bfloat16")
        optimizer = optax.chain(
            muon.scale_by_muon(stacks, o.momentum, optax.scale_by_adam(*o.betas, o.eps), dtype),
            optax.add_decayed_weights(o.weight_decay, mask),
            optax.scale_by_learning_rate(rate),
        )
    else:
        optimizer = optax.adamw(rate, *o.betas, eps=o.eps, weight_decay=o.weight_decay, mask=mask)
    return optax.GradientTransformation(optimizer.init, _standard_promotion(optimizer.update))


def _of_factory(config: Config, rate: optax.Schedule, mask: Callable[[Tree], Tree]) -> optax.GradientTransformation:
    """Return function(config, schedule, is_decayed) of optimizer.factory: an optax transformation. Raises ValueError.

    Element-wise, e.g. optax.lion, adan, nadamw, sgd: it runs on shards, slices and state in host memory. schedule:
    update number -> learning rate, of the config's keys; is_decayed: parameters -> tree of booleans, as optax's `mask`.
    """
    name = config.optimizer.factory
    optimizer = load_function(name, "optimizer.factory")(config, rate, mask)
    if not isinstance(optimizer, optax.GradientTransformation):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer.factory={name} returned {kind}; return an optax.GradientTransformation")
    return optimizer


def check(optimizer: optax.GradientTransformation, name: str, shapes: Tree) -> None:
    """Raise ValueError if the state of an optimizer shows that it is not element-wise: arrays unlike the parameters.

    shapes: ShapeDtypeStructs of the parameters. Not seen: one without such state (norms of whole arrays: lamb, lars).
    """

    def problem(x: jax.ShapeDtypeStruct, like: jax.ShapeDtypeStruct | None = None) -> str | None:
        expected = like.shape if like else ()
        return None if x.shape == expected else f"{x.shape} beside a parameter of {expected}" if like else f"{x.shape}"

    state = jax.eval_shape(optimizer.init, shapes)
    found = jax.tree.leaves(map_moments(optimizer, problem, state, shapes, other=problem))
    for text in found:
        raise ValueError(
            f"optimizer.factory={name} is not element-wise: its state has an array {text}; use one whose state has "
            "arrays like the parameters and scalars, e.g. optax.lion"
        )


def num_updates(state: Any) -> jax.Array:
    """Return the number of updates that the optimizer of a training state has applied: steps not skipped, of this stage
    of training. An optimizer without a count (optimizer.factory): of all stages."""
    counts = optax.tree_utils.tree_get_all_with_path(state.opt.moments, "count")
    return counts[0][1] if counts else state.step - state.skipped


def _standard_promotion(function: Callable) -> Callable:
    """Run function with standard dtype promotion: optax mixes integers with floats, an error under strict promotion."""

    def wrapped(*args):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return wrapped
