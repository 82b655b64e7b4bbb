"""Both ends of a model in a pipeline: `LayeredModel.first` and `last`, and their backward.

Without split ends the first stage runs `first` and the last stage `last`, each within its F or B: every tick lasts as
long as the last stage, and all stages store both ends.

With split ends (vocabulary parallelism, Yeung et al. 2024, arXiv 2411.05288) all P stages run both together. Each has
1/P of the vocabulary: rows of embedding and head, their gradients and optimizer state. For a unit with its first F in
tick f, its last F in tick l and its last B in tick b:

    tick f-1   x = all_reduce(first(part of the ends))                          while B computes
    tick l     x = all_reduce(x on the last stage, zeros on others)             while B computes
    tick l+1   loss, g = last(part of the ends, x);   g = all_reduce(g)         while F computes
    tick b+1   g = all_reduce(g on the first stage, zeros on others)            while F computes;
               then the backward of first

Bytes over pipe: each all-reduce 2 (P-1)/P B T D; `last` communicates scalars. With one chunk per stage they happen in
every tick, outside of branches, so that matmuls hide them; with several chunks, where few ticks have such a unit, in
the branches of first and last, M times each. All stages have these units in the same ticks (`slots.end_units`), so no
branch diverges.
"""

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel.collectives import Tree, all_reduce
from nanotrain_jax.parallel.pipeline.slots import EndUnits
from nanotrain_jax.parallel.pipeline.stage import Carry, Shared, Stage


def embed(stage: Stage, unit: jax.Array, wanted: jax.Array, x: Tree) -> Tree:
    """`model.first` of a unit if wanted, else x."""

    def work(turn: jax.Array, _: Tree, nothing: tuple) -> tuple[Tree, tuple]:
        x = stage.first(stage.model.ends, stage.microbatch_of_ends(unit + turn))
        return sum_in_branch(stage, x), nothing

    return stage.when(wanted, "first", work, x, ())[0]


def backward_last(stage: Stage, unit: jax.Array, wanted: jax.Array, x: Tree, sums: tuple) -> tuple[Tree, tuple]:
    """If wanted, loss of a unit and its gradients -> gradient of the last layer's x, sums (loss, gradients of ends).

    Else x and sums unchanged.
    """

    def work(turn: jax.Array, x: Tree, sums: tuple) -> tuple[Tree, tuple]:
        microbatch = stage.microbatch_of_ends(unit + turn)
        x = sum_in_branch(stage, x)
        loss, vjp = jax.vjp(lambda ends, x: stage.model.last(ends, x, microbatch), stage.model.ends, x)
        gradients, g = vjp(jnp.ones_like(loss))
        return sum_in_branch(stage, g), add(stage, sums, (once(stage, loss), gradients), wanted)

    return stage.when(wanted, "last", work, x, sums)


def backward_first(stage: Stage, unit: jax.Array, wanted: jax.Array, g: Tree, sums: tuple) -> tuple[Tree, tuple]:
    """If wanted, backward of a unit through `model.first` -> g, sums (loss, gradients of ends); else both unchanged."""

    def work(turn: jax.Array, g: Tree, sums: tuple) -> tuple[Tree, tuple]:
        microbatch = stage.microbatch_of_ends(unit + turn)
        g = sum_in_branch(stage, g)
        _, vjp = jax.vjp(lambda ends: stage.first(ends, microbatch), stage.model.ends)
        (gradients,) = vjp(jax.tree.map(lambda g: g + jnp.asarray(turn, g.dtype), g))
        loss, of_ends = sums
        return g, (loss, add(stage, of_ends, gradients, wanted))

    return stage.when(wanted, "first", work, g, sums)


def once(stage: Stage, loss: Tree) -> Tree:
    """Return what `model.last` returned, on one stage only: with split ends all stages have it."""
    return on_stage(stage, stage.schedule.stages - 1, loss) if stage.model.split_ends else loss


def add(stage: Stage, sums: Tree, gradients: Tree, wanted: jax.Array) -> Tree:
    """sums + gradients; masked idle work adds zeros."""

    def add_one(s: jax.Array, g: jax.Array) -> jax.Array:
        if stage.idle == "mask":
            g = jnp.where(wanted, g, jnp.zeros_like(g))
        return s + g.astype(s.dtype)

    return jax.tree.map(add_one, sums, gradients)


def share_outputs(stage: Stage, next_unit: jax.Array, shared: Shared, x: Tree) -> Shared:
    """Split ends, after F: embed the unit that begins in the next tick; share it, and x of the last stage."""
    embedded = embed(stage, next_unit, next_unit >= 0, shared.embedded)
    return Shared(*sum_in_tick(stage, [embedded, on_stage(stage, stage.schedule.stages - 1, x)]))


def share_gradients(stage: Stage, now: EndUnits, carry: Carry) -> tuple[Carry, Tree]:
    """Split ends, before F: loss of a unit, backward of `first` of another -> carry, gradient of the last layer's x."""
    g, of_ends = backward_last(stage, now.loss, now.loss >= 0, carry.shared.output, carry.sums.ends)
    g, g_of_first = sum_in_tick(stage, [g, on_stage(stage, 0, carry.g)])
    _, of_ends = backward_first(stage, now.of_first, now.of_first >= 0, g_of_first, of_ends)
    return carry._replace(sums=carry.sums._replace(ends=of_ends)), g


def on_stage(stage: Stage, index: int, x: Tree) -> Tree:
    """x on one stage, zeros on the others."""
    return jax.tree.map(lambda x: jnp.where(stage.index == index, x, jnp.zeros_like(x)), x)


def sum_in_tick(stage: Stage, parts: list[Tree]) -> list[Tree]:
    """Split ends with one chunk: sum each x over stages."""
    if stage.schedule.chunks > 1:
        return parts
    return [stage.typed(x) for x in all_reduce(parts, (stage.axis,))]


def sum_in_branch(stage: Stage, x: Tree) -> Tree:
    """Split ends with several chunks: sum x over stages."""
    if stage.schedule.chunks == 1 or not stage.model.split_ends:
        return x
    return stage.typed(all_reduce(x, (stage.axis,)))
