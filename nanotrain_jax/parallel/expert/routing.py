"""Which experts a token goes to, and the order of tokens by expert (Shazeer et al. 2017, arXiv 1701.06538).

    route     logits[T E] -> for each token its k experts, and what their results are multiplied by
    by_expert x[T D] -> x[M D], M = T k rows, those of expert 0 first
    by_token  y[M D] -> y[T D], the sum over the k experts of each token

The last two are each other's transposes. Both only gather rows, forward and backward: no scatter, whose order of
additions would not be fixed. Nothing here communicates, and no token is dropped. `exchange.pack` makes routes whose
rows are places that may be empty, of tokens that may be dropped: both are zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.parallel.loops import with_backward

SMALLEST = 1e-20  # beside a sum that is not to be 0


class Choice(NamedTuple):
    """How a router chooses."""

    top_k: int  # experts of a token
    scores: str = "softmax"  # over experts; or sigmoid, of each expert by itself
    normalize: bool = True  # the gates of a token sum to 1
    scale: float = 1.0  # multiplies them then


class Routes(NamedTuple):
    """Of T tokens to k of E experts each; M = T k rows."""

    gates_Tk: jax.Array  # float32: what multiplies the result of each of its experts
    token_M: jax.Array  # the token of each row, rows of one expert after another, int32; T: an empty place
    row_Tk: jax.Array  # the inverse: the row of each expert of a token; beyond the last: dropped
    order_M: jax.Array  # the same as token_M, as an index into gates; T k: an empty place
    sizes_E: jax.Array  # rows of each expert, int32


def route(logits_TE: jax.Array, choice: Choice, bias_E: jax.Array | None = None) -> Routes:
    """logits[T E], float32 -> routes. Gradients flow through the gates alone: which experts are chosen has none.

    bias[E], float32: added to scores to choose, not to weigh (DeepSeek-V3, arXiv 2412.19437, equation 16).

    softmax: Mixtral (arXiv 2401.04088, section 2.1), with normalize over the chosen ones. sigmoid: DeepSeek-V3 (arXiv
    2412.19437, equations 13 to 15). Ties go to the lower expert.
    """
    scores_TE = scores(logits_TE, choice)
    chosen_by_TE = jax.lax.stop_gradient(scores_TE if bias_E is None else scores_TE + bias_E[None])
    _, expert_Tk = jax.lax.top_k(chosen_by_TE, choice.top_k)
    gates_Tk = jnp.take_along_axis(scores_TE, expert_Tk, axis=-1)
    if choice.normalize:
        gates_Tk = gates_Tk / (gates_Tk.sum(-1, keepdims=True) + SMALLEST)
    gates_Tk = gates_Tk * choice.scale
    order_M = jnp.argsort(expert_Tk.reshape(-1), stable=True)
    row_Tk = jnp.argsort(order_M).reshape(expert_Tk.shape)
    sizes_E = (expert_Tk.reshape(-1, 1) == jnp.arange(logits_TE.shape[1])[None]).sum(0, dtype=jnp.int32)
    return Routes(gates_Tk, order_M // choice.top_k, row_Tk, order_M, sizes_E)


def scores(logits_TE: jax.Array, choice: Choice) -> jax.Array:
    """logits[T E] -> scores[T E], from 0 to 1"""
    return jax.nn.softmax(logits_TE) if choice.scores == "softmax" else jax.nn.sigmoid(logits_TE)


def by_expert(x_TD: jax.Array, routes: Routes) -> jax.Array:
    """x[T D] -> x[M D], in the order of experts. Reads and writes M D elements, also in the backward."""
    return with_backward(_spread, _collected)(x_TD, routes.token_M, routes.row_Tk)


def by_token(y_MD: jax.Array, routes: Routes) -> jax.Array:
    """y[M D] -> y[T D], the sum of the rows of each token, in float32 until it is complete."""
    return with_backward(_collect, _spread_back)(y_MD, routes.token_M, routes.row_Tk)


def gates_of_rows(routes: Routes) -> jax.Array:
    """Return what multiplies each row, float32 [M]."""
    return taken(routes.gates_Tk.reshape(-1), routes.order_M)


def taken(x: jax.Array, indices: jax.Array, beyond: int = 0) -> jax.Array:
    """x[n ...] -> x[indices], and `beyond` for an index of n or more."""
    return x.at[indices].get(mode="fill", fill_value=beyond)


def _spread(x_TD: jax.Array, token_M: jax.Array, row_Tk: jax.Array) -> tuple[jax.Array, tuple]:
    return taken(x_TD, token_M), (token_M, row_Tk)


def _collect(y_MD: jax.Array, token_M: jax.Array, row_Tk: jax.Array) -> tuple[jax.Array, tuple]:
    return taken(y_MD, row_Tk).sum(1), (token_M, row_Tk)


def _collected(rows: tuple, g_MD: jax.Array) -> tuple[jax.Array, None, None]:
    return _collect(g_MD, *rows)[0], None, None


def _spread_back(rows: tuple, g_TD: jax.Array) -> tuple[jax.Array, None, None]:
    return _spread(g_TD, *rows)[0], None, None
