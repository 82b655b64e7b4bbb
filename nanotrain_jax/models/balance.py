"""What the routers of a mixture of experts bring out beside x: loads, entropy, and the losses that balance them.

Layers pass x on as {"x", "router"}. "router" is a queue of L rows, float32: a layer drops the first row and appends its
own, so that the last layer hands on those of all layers, in order, whatever loop, stages or rematerialization run them;
no layer needs to know its number. A row has the sums over this device's tokens of

    probs[E]   the probability of each expert     load[E]   how many tokens chose it     z   logsumexp(logits)^2
    entropy    of the probabilities, in nats      dropped   choices for which there was no room (parallel.expert)

Only probs and z have gradients, which come back through the queue. With f[e] the share of the batch's choices that are
expert e, and P[e] its mean probability, each layer adds to the loss of a token

    balance_weight E sum f[e] P[e]    1 where balanced (Switch Transformer, arXiv 2101.03961, equations 4 to 6)
    z_loss z                          (ST-MoE, arXiv 2202.08906, equation 5)

With balance=bias what chooses experts has a bias, which each step moves by bias_rate, down for experts with more than
the mean load of the step's batch, up for those with less (arXiv 2408.15664); balance_weight is 0 then by default.

f is that of a microbatch on all devices (arXiv 2501.11873): it all-reduces L E float32 for each microbatch, with the
number of targets, over the axes of the batch. The logged loss is the cross-entropy alone; gradients are of the sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.config.schema import Config
from nanotrain_jax.models.contract import Model
from nanotrain_jax.models.decoder_table import BIAS
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.parallel.collectives import Tree, all_reduce, as_varying, varying_axes
from nanotrain_jax.parallel.expert.routing import Choice, Routes
from nanotrain_jax.parallel.mesh import BATCH_AXES

X, ROUTER = "x", "router"  # keys of what layers pass on


class Statistics(NamedTuple):
    """Of one router or, with a leading dim, of all: sums over tokens, float32."""

    probs_E: jax.Array
    load_E: jax.Array
    z: jax.Array
    entropy: jax.Array
    dropped: jax.Array


def width(experts: int) -> int:
    """Return the size of a row of the queue."""
    return 2 * experts + 3


def row(logits_TE: jax.Array, routes: Routes, choice: Choice, dropped: jax.Array | int = 0) -> jax.Array:
    """logits[T E], float32 -> a row of the queue."""
    with jax.named_scope("balance"):
        if choice.scores == "softmax":
            log_probs_TE = jax.nn.log_softmax(logits_TE)
        else:  # of sigmoids (DeepSeek-V3, arXiv 2412.19437, equation 19)
            log_scores_TE = jax.nn.log_sigmoid(logits_TE)
            log_probs_TE = log_scores_TE - jax.nn.logsumexp(log_scores_TE, axis=-1, keepdims=True)
        probs_TE = jnp.exp(log_probs_TE)
        entropy = -jax.lax.stop_gradient(probs_TE * log_probs_TE).sum()
        z = jnp.square(jax.nn.logsumexp(logits_TE, axis=-1)).sum()
        load_E = jax.lax.stop_gradient(routes.sizes_E.astype(jnp.float32))
        dropped = as_varying(jnp.float32(dropped), sorted(varying_axes(z)))
        return jnp.concatenate([probs_TE.sum(0), load_E, jnp.stack([z, entropy, dropped])])


def statistics(queue_LS: jax.Array) -> Statistics:
    """queue[L S] -> statistics [L ...]"""
    E = (queue_LS.shape[1] - 3) // 2
    return Statistics(queue_LS[:, :E], queue_LS[:, E : 2 * E], *(queue_LS[:, i] for i in (-3, -2, -1)))


def largest_loads(load_LE: jax.Array) -> jax.Array:
    """load[L E] -> of the largest expert of each layer over the mean, [L]"""
    return load_LE.max(1) / load_LE.mean(1)


def report(top_k: int, means: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return what is logged of the means of sums over tokens, and others as they are. top_k: experts of a token."""
    load_LE = means["load"]
    tokens = load_LE.sum() / top_k  # of all layers
    found = {
        "load": largest_loads(load_LE).max(),
        "router_z": means["z"] / tokens,
        "router_entropy": means["entropy"] / tokens,
    }
    found |= {name: x / load_LE.sum() for name, x in means.items() if name == "dropped"}
    return found | {name: x for name, x in means.items() if name not in ("load", "z", "entropy", "dropped")}


def loads_by_layer(first: int, means: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the largest load of each layer by name, load/0 and so on. first: number of the first with experts."""
    return {f"load/{layer}": x for layer, x in enumerate(largest_loads(means["load"]), first)}


def bias(bias_2E: jax.Array) -> jax.Array:
    """bias[2 E], as stored -> bias[E], float32"""
    return bias_2E.astype(jnp.float32).sum(0)


def adjusted(bias_L2E: jax.Array, load_LE: jax.Array, rate: float) -> jax.Array:
    """bias[L 2 E] as stored -> after a step with these loads. The first of two numbers has 8 bits, in any dtype."""
    bias_LE = jax.vmap(bias)(bias_L2E) + rate * jnp.sign(load_LE.mean(1, keepdims=True) - load_LE)
    high_LE = jax.lax.reduce_precision(bias_LE, 8, 7)  # XLA may leave out a conversion to bfloat16 and back
    return jnp.stack([high_LE, bias_LE - high_LE], axis=1).astype(bias_L2E.dtype)


def build(model: Model, config: Config, layer: Callable) -> Model:
    """Return a decoder whose layers are layer(weights, x, batch) -> x, row. model: of x alone, with its
    objective."""
    experts, L, p = config.model.experts, config.model.main_layers, config.parallel
    batch_axes = [axis for axis in BATCH_AXES if axis != "replica" or not p.sync_every]  # of what steps together
    same_axes = [axis for axis in p.vocab_axes if axis == "pipe" or p.sequence_parallel]  # devices have the same rows
    is_frozen = any(re.search(pattern, f"{LAYERS}/mlp/{BIAS}") for pattern in config.train.freeze)
    measures = {"load": (L, experts.num), "z": (), "entropy": ()} | ({"dropped": ()} if p.expert > 1 else {})

    def first(ends: Tree, batch: Tree, run: Callable) -> Tree:
        x_BTD = model.first(ends, batch, run)
        queue_LS = jnp.zeros((L, width(experts.num)))
        return {X: x_BTD, ROUTER: as_varying(queue_LS, sorted(varying_axes(x_BTD)))}

    def run_layer(weights: Tree, carried: Tree, batch: Tree) -> Tree:
        x_BTD, row_S = layer(weights, carried[X], batch)
        row_S = as_varying(row_S, sorted(varying_axes(carried[ROUTER])))
        return {X: x_BTD, ROUTER: jnp.concatenate([carried[ROUTER][1:], row_S[None]])}

    def mean(x: Tree) -> Tree:
        """x, the same on all devices of same_axes -> x, invarying over them."""
        return jax.tree.map(lambda x: x / math.prod(p.axes[axis] for axis in same_axes), all_reduce(x, same_axes))

    def last(ends: Tree, carried: Tree, batch: Tree) -> tuple:
        loss, count, *further = model.last(ends, carried[X], batch)
        found = statistics(jax.lax.stop_gradient(carried[ROUTER]))
        sums = {"load": found.load_E} | {name: getattr(found, name).sum() for name in measures if name != "load"}
        return loss, count, mean(sums) | (further[0] if further else {})

    def penalty(carried: Tree, count: jax.Array) -> jax.Array:
        found = statistics(carried[ROUTER])
        loads, targets = all_reduce((jax.lax.stop_gradient(found.load_E), count.astype(jnp.float32)), batch_axes)
        choices = loads.sum(1, keepdims=True)
        tokens = choices[0, 0] / experts.top_k
        balance = experts.num * (loads / choices * found.probs_E).sum()
        return mean((experts.weight * balance + experts.z_loss * found.z.sum()) * targets / tokens)

    def adjust(layers: Tree, measures: dict[str, jax.Array]) -> Tree:
        moved = adjusted(layers["mlp"][BIAS], measures["load"], experts.bias_rate)
        return layers | {"mlp": layers["mlp"] | {BIAS: moved}}

    def of_x(function: Callable | None) -> Callable | None:
        return function and (lambda ends, carried, batch: function(ends, carried[X], batch))

    return replace(
        model,
        first=first,
        layer=run_layer,
        last=last,
        penalty=penalty if experts.adds_loss else None,
        measures={**measures, **model.measures},
        report=partial(report, experts.top_k),
        details=partial(loads_by_layer, experts.first_dense),
        adjust=adjust if experts.balance == "bias" and not is_frozen else None,
        correct=None,
        token_losses=of_x(model.token_losses),
        of_rows=of_x(model.of_rows),
    )
