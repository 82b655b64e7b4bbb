"""A loop over layers whose turns fetch the next layer and send what the previous layer produced.

    for i in 0 .. n-1:   fetched[i + 1] = ahead(i + 1)          an all-gather, or a copy from host memory
                         behind(produced[i - 1])                a reduction of gradients
                         produced[i] = run_layer(i, fetched[i])

The three lines of a turn do not depend on each other, so the compiler can run both transfers behind the matmuls of the
layer. The first and last turns are outside the scan: nothing is fetched or sent that is not used.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import Tree


class LayerWork(NamedTuple):
    """What a loop does with layer i.

    run(carry, i, fetched) -> carry, produced
    ahead(i) -> fetched              a tree, which may be empty
    behind(carry, i, produced) -> carry     None: produced is discarded
    """

    run: Callable[[Tree, jax.Array, Tree], tuple[Tree, Tree]]
    ahead: Callable[[jax.Array], Tree]
    behind: Callable[[Tree, jax.Array, Tree], Tree] | None = None


class _State(NamedTuple):
    carry: Tree
    fetched: Tree  # for the next turn
    produced: tuple[jax.Array, Tree] | None  # layer and result of the turn before, to be sent


def over_layers(work: LayerWork, carry: Tree, count: int, reverse: bool = False) -> Tree:
    """Return the carry after all layers, 0 to count - 1 or in reverse."""
    layers = jnp.arange(count)
    order = layers[::-1] if reverse else layers
    state = _State(carry, work.ahead(order[0]), None)
    if work.behind is None and not jax.tree.leaves(state.fetched):
        return lax.scan(lambda carry, i: work.run(carry, i, state.fetched), carry, layers, reverse=reverse)[0]
    turns = order[:-1], order[1:]
    if work.behind and count > 1:
        state, _ = _turn(work, state, (order[0], order[1]))
        turns = order[1:-1], order[2:]
    if len(turns[0]):
        state, _ = lax.scan(partial(_turn, work), state, turns)
    return _last_turn(work, state, order[-1])


def _turn(work: LayerWork, state: _State, now: tuple[jax.Array, jax.Array]) -> tuple[_State, None]:
    """One turn. now: this layer and the next."""
    i, following = now
    fetched = work.ahead(following)
    carry = _send(work, state)
    carry, produced = work.run(carry, i, state.fetched)
    return _State(carry, fetched, (i, produced) if work.behind else None), None


def _last_turn(work: LayerWork, state: _State, i: jax.Array) -> Tree:
    carry, produced = work.run(_send(work, state), i, state.fetched)
    return work.behind(carry, i, produced) if work.behind else carry


def _send(work: LayerWork, state: _State) -> Tree:
    return state.carry if state.produced is None else work.behind(state.carry, *state.produced)
