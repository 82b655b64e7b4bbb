"""Learning-rate schedule and AdamW from a config, with optax; loss scaling for float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanotrain_jax.config.schema import Optimizer, Precision

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


def build(config: Optimizer, is_decayed: Callable[[tuple], bool]) -> optax.GradientTransformation:
    """Return AdamW with decoupled weight decay (arXiv 1711.05101). Element-wise: runs unchanged on shards.

    is_decayed: tree path of a parameter -> True if weight decay applies. Does not clip: the global norm depends on the
    sharding of the gradients (parallel/optimizer_step.py).
    """
    adamw = optax.adamw(
        schedule(config),
        *config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(path), params),
    )
    return optax.GradientTransformation(adamw.init, _standard_promotion(adamw.update))


def num_updates(moments: optax.OptState) -> jax.Array:
    """Return the number of updates that an optimizer has applied: steps not skipped, of this stage of training."""
    return optax.tree_utils.tree_get_all_with_path(moments, "count")[0][1]


def build_outer(config: Optimizer) -> optax.GradientTransformation:
    """Return the outer optimizer of parallel.sync_every: SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105)."""
    return optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)


def _standard_promotion(function: Callable) -> Callable:
    """Run function with standard dtype promotion: optax mixes integers with floats, an error under strict promotion."""

    def wrapped(*args):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return wrapped
