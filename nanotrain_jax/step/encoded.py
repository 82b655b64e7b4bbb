"""Encoders in pipelines: run before the schedule, shared over the stages.

In one program a tick lasts as long as its busiest stage, so an encoder inside the first stage would hold up all others.
With P stages and M microbatches:

    each stage     encodes M/P of the microbatches               moves nothing
    once           all-gathers what is encoded over pipe         (P-1)/P of its bytes
    schedule       `first` takes microbatch m's part; its gradients are summed in place
    once           reduce-scatters them over pipe                (P-1)/P; nothing if no weight of the encoder is trained
    each stage     the backward of its microbatches

What memory.remat stores of M/P microbatches lives through the schedule: with full, the inputs of the encoder's layers.
Integers that an encoder returns reach `layer` and `last` too, floats only `first`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel import loops
from nanotrain_jax.parallel.collectives import Tree, all_gather, position
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.step import forward
from nanotrain_jax.step.plan import Plan

NUMBER = "number of microbatch"  # key in a microbatch


class Ends(NamedTuple):
    """`LayeredModel.ends` of a model with an encoder."""

    weights: Tree
    floats: Tree  # encoded, of all microbatches[M ...]; the schedule sums their gradients


def before_schedule(
    plan: Plan, params: Tree, model: LayeredModel, microbatches: Tree
) -> tuple[LayeredModel, Tree, Callable[[Tree], Tree]]:
    """Encode all microbatches[M ...] -> model and microbatches for a schedule; function: gradients of that model's ends
    -> of the ends. Without `Model.encode` nothing changes.
    """
    if plan.model.encode is None:
        return model, microbatches, lambda of_ends: of_ends
    encode = partial(encode_all, plan, params, microbatches)
    if not any(jax.tree.leaves(forward.used_by_encoder(plan, plan.trainable))):
        return model, microbatches | encode(model.ends), lambda of_ends: of_ends
    encoded, vjp = jax.vjp(encode, model.ends)
    floats = {key: x for key, x in encoded.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    integers = {key: x for key, x in encoded.items() if key not in floats}
    count = len(jax.tree.leaves(microbatches)[0])

    def first(ends: Ends, microbatch: Tree) -> Tree:
        return model.first(ends.weights, microbatch | loops.get(ends.floats, microbatch[NUMBER]))

    def last(ends: Ends, x: Tree, microbatch: Tree) -> Tree:
        return model.last(ends.weights, x, microbatch)

    def backward(of_ends: Ends) -> Tree:
        of_floats = jax.tree.map(lambda g, x: g.astype(x.dtype), of_ends.floats, floats)
        of_integers = {key: jnp.zeros(x.shape, jax.dtypes.float0) for key, x in integers.items()}
        (of_encoder,) = vjp(of_floats | of_integers)
        return jax.tree.map(lambda g, more: g + more.astype(g.dtype), of_ends.weights, of_encoder)

    numbered = microbatches | integers | {NUMBER: jnp.arange(count, dtype=jnp.int32)}
    return model._replace(first=first, last=last, ends=Ends(model.ends, floats)), numbered, backward


def encode_all(plan: Plan, params: Tree, microbatches: Tree, inputs: Tree) -> dict[str, jax.Array]:
    """-> what `Model.encode` returns for all microbatches[M ...]; each stage computes M/P of them."""
    stages, count = lax.axis_size("pipe"), len(jax.tree.leaves(microbatches)[0])
    share = -(-count // stages)
    own = jnp.minimum(position("pipe") * share + jnp.arange(share), count - 1)  # the last may encode one twice

    def encode(number: jax.Array) -> Tree:
        microbatch = jax.tree.map(lambda x: loops.get(x, number), microbatches)
        return forward.encode(plan, params, inputs, microbatch)

    encoded = lax.map(encode, own)
    return {key: all_gather([x], "pipe", [0])[0][:count] for key, x in encoded.items()}
