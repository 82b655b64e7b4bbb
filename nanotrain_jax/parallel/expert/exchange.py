"""Rows travel to the devices of their experts, and back (GShard, arXiv 2006.16668, section 3.2).

N devices along a mesh axis share E experts, E/N each, in order. Each device has routes of its own T tokens.

    pack        routes of M = T k rows -> of N C places, C for each device: those it has room for
    arrivals    how the rows that a device receives are ordered by expert
    send        x[N C ...], places -> x[N C ...] on the devices of the experts, in the order of experts
    bring_back  y[N C ...], in the order of experts -> back in their places; the transpose of `send`

    packed = pack(routes, N, places(M, N, capacity))
    found  = arrivals(packed, axis)
    y      = by_token(bring_back(experts(send(by_expert(x, packed), found, axis), found.sizes_E), found, axis), packed)

Shapes are static, so C is: rows beyond it are dropped, of the experts that get most, and of these the last tokens'. A
dropped row adds nothing to its token and has no gradient: what is left is the residual stream. With C = M none can be.

Wire bytes per device, each of `send` and `bring_back` and of their backwards: (N-1)/N of the buffer, or with ragged
arrivals of the rows in it (`lax.ragged_all_to_all`, which XLA:GPU has and XLA:CPU has not); `arrivals`: of 4 E. Only
gathers of rows beside it, no scatter (`routing.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel.collectives import all_to_all, ragged_all_to_all
from nanotrain_jax.parallel.expert.routing import Routes, taken
from nanotrain_jax.parallel.loops import with_backward

MULTIPLE = 8  # of C


class Arrivals(NamedTuple):
    """Rows of N C places, as they arrive at a device, and sorted by its E/N experts; empty places come last."""

    order_S: jax.Array  # the place of each row, in the order of experts, int32
    place_S: jax.Array  # the inverse
    sizes_E: jax.Array  # rows of each of this device's experts, int32 [E/N]
    counts: Counts | None  # None: all places travel, empty ones too


class Counts(NamedTuple):
    """How many rows travel, int32 [N]."""

    sent: jax.Array  # to each device
    received: jax.Array  # from each device


def places(rows: int, devices: int, capacity: float) -> int:
    """Return C: for how many rows of each device another has room, capacity times those of balanced experts."""
    return min(rows, -(-int(capacity * rows) // (devices * MULTIPLE)) * MULTIPLE)


def pack(routes: Routes, devices: int, places: int) -> Routes:
    """Return routes whose rows are places, those of a device one after another; a place may be empty."""
    M, T = len(routes.order_M), len(routes.gates_Tk)
    sizes_NE = routes.sizes_E.reshape(devices, -1)  # E/N experts of each
    kept_NE = kept(sizes_NE, places)
    first_NE = (jnp.cumsum(routes.sizes_E) - routes.sizes_E).reshape(sizes_NE.shape)  # of M rows
    ends_NE = jnp.cumsum(kept_NE, 1)  # in the places of a device
    begins_NE = ends_NE - kept_NE

    expert_M = (jnp.arange(M)[:, None] >= jnp.cumsum(routes.sizes_E)[None]).sum(1)
    number_M = jnp.arange(M) - first_NE.reshape(-1)[expert_M]  # among the rows of its expert
    begins_E = (jnp.arange(devices)[:, None] * places + begins_NE).reshape(-1)
    is_kept_M = number_M < kept_NE.reshape(-1)[expert_M]
    place_M = jnp.where(is_kept_M, begins_E[expert_M] + number_M, devices * places)

    place_C = jnp.arange(places)
    expert_NC = (place_C[None, :, None] >= ends_NE[:, None]).sum(2)
    last = sizes_NE.shape[1] - 1
    offset_NC = jnp.take_along_axis(first_NE - begins_NE, jnp.minimum(expert_NC, last), axis=1)
    row_S = jnp.where(expert_NC <= last, offset_NC + place_C[None], M).reshape(-1)
    return Routes(
        gates_Tk=routes.gates_Tk,
        token_M=taken(routes.token_M, row_S, T),
        row_Tk=place_M[routes.row_Tk],
        order_M=taken(routes.order_M, row_S, M),
        sizes_E=kept_NE.reshape(-1),
    )


def kept(sizes_NE: jax.Array, places: int) -> jax.Array:
    """Return how many rows of each expert its device has room for, int32 [N E/N]: those with fewest keep all.

    At most `level` of each expert, the largest number with which all fit; sizes below it leave their room to others.
    """
    count = sizes_NE.shape[1]
    sorted_NE = jnp.sort(sizes_NE, axis=1)
    before_NE = jnp.cumsum(sorted_NE, 1) - sorted_NE
    level_N1 = ((places - before_NE) // (count - jnp.arange(count))[None]).max(1, keepdims=True)
    return jnp.minimum(sizes_NE, level_N1)


def dropped(routes: Routes, packed: Routes) -> jax.Array:
    """Return how many rows were dropped, an int32 scalar."""
    return len(routes.order_M) - packed.sizes_E.sum()


def arrivals(packed: Routes, axis: str, is_ragged: bool = False) -> Arrivals:
    """Return the order of the rows that arrive. Moves 4 E bytes. is_ragged: empty places do not travel (GPUs)."""
    to_NE = packed.sizes_E.reshape(lax.axis_size(axis), -1)
    from_NE = all_to_all(to_NE, axis, 0, 0)  # from each device, of each expert here
    devices = len(to_NE)
    place_C = jnp.arange(len(packed.token_M) // devices)
    expert_NC = (place_C[None, :, None] >= jnp.cumsum(from_NE, 1)[:, None]).sum(2)  # E/N: an empty place
    order_S = jnp.argsort(expert_NC.reshape(-1), stable=True)
    counts = Counts(to_NE.sum(1), from_NE.sum(1)) if is_ragged else None
    return Arrivals(order_S, jnp.argsort(order_S), from_NE.sum(0), counts)


def send(x_S: jax.Array, found: Arrivals, axis: str) -> jax.Array:
    """x[N C ...], places -> x[N C ...], rows of this device's experts, those of the first one first."""
    return _permuted(_exchanged(x_S, found.counts, axis), found.order_S, found.place_S)


def bring_back(y_S: jax.Array, found: Arrivals, axis: str) -> jax.Array:
    """y[N C ...], in the order of experts -> y[N C ...], in the places of the devices that sent the rows."""
    back = found.counts and Counts(found.counts.received, found.counts.sent)
    return _exchanged(_permuted(y_S, found.place_S, found.order_S), back, axis)


def _exchanged(x_S: jax.Array, counts: Counts | None, axis: str) -> jax.Array:
    if counts:
        return with_backward(_move_rows, _move_rows_back, (0,))(axis, x_S, counts)
    x_NC = x_S.reshape(lax.axis_size(axis), -1, *x_S.shape[1:])
    return all_to_all(x_NC, axis, 0, 0).reshape(x_S.shape)


def _move_rows(axis: str, x_S: jax.Array, counts: Counts) -> tuple[jax.Array, Counts]:
    return ragged_all_to_all(x_S, axis, *counts), counts


def _move_rows_back(axis: str, counts: Counts, g_S: jax.Array) -> tuple[jax.Array, None]:
    return ragged_all_to_all(g_S, axis, counts.received, counts.sent), None


def _permuted(x_S: jax.Array, order_S: jax.Array, inverse_S: jax.Array) -> jax.Array:
    return with_backward(_permute, _permute_back)(x_S, order_S, inverse_S)


def _permute(x_S: jax.Array, order_S: jax.Array, inverse_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_S[order_S], inverse_S


def _permute_back(inverse_S: jax.Array, g_S: jax.Array) -> tuple[jax.Array, None, None]:
    return g_S[inverse_S], None, None
