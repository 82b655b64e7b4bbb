"""Config -> optax: the learning-rate schedule and AdamW."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from nanotrain_jax.config import Optimizer


def schedule(config: Optimizer) -> optax.Schedule:
    """update number (from 0) -> learning rate: linear warm-up, then cosine, linear, wsd or constant.

    The first update already learns: lr / (warmup_steps + 1), as in nanoGPT. min_lr is reached at decay_steps and kept.
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
    """AdamW with decoupled decay (arXiv 1711.05101). Element-wise, so it runs unchanged on any shard of its arguments.

    is_decayed: tree path of a parameter -> whether weight decay applies to it. Clipping is not in here: it needs
    the global norm, which only the layout of the gradients can tell (parallel/zero.py).
    """
    adamw = optax.adamw(
        schedule(config),
        *config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(path), params),
    )
    return optax.GradientTransformation(adamw.init, _standard_promotion(adamw.update))


def _standard_promotion(function: Callable) -> Callable:
    """optax mixes integer counts with floats, which a user's strict dtype promotion would refuse."""

    def wrapped(*args):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return wrapped
