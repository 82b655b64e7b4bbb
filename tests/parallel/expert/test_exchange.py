"""The exchange of rows alone: equal to every expert computed and masked, also where rows are dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cover
from jax.sharding import PartitionSpec as P

from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.collectives import as_varying
from nanotrain_jax.parallel.expert import exchange, routing
from nanotrain_jax.parallel.expert.grouped_matmul import grouped_matmul

T, D, F, E, K = 24, 12, 20, 8, 3
SKEWS = {  # added to the logits of each expert
    "balanced": [0.0] * E,
    "skewed": [0.0, 3.0, 0.0, 1.0, -2.0, 5.0, 0.0, 0.5],
    "empty experts": [9.0, 0.0, 9.0, 9.0, 9.0, 0.0, 0.0, 9.0],
    "all to few": [9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 9.0],
}


def random(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def exchanged(x_TD, logits_TE, w_EDF, capacity, is_ragged=False):
    """What a model does, with one matmul as expert -> y[T F], how many choices this device dropped."""
    routes = routing.route(logits_TE, routing.Choice(K))
    devices, M = jax.lax.axis_size("expert"), len(routes.order_M)
    packed = exchange.pack(routes, devices, exchange.places(M, devices, capacity))
    found = exchange.arrivals(packed, "expert", is_ragged)
    x_SD = exchange.send(routing.by_expert(x_TD, packed), found, "expert")
    gates_S = exchange.send(routing.gates_of_rows(packed), found, "expert")
    y_SF = grouped_matmul(x_SD, w_EDF, found.sizes_E, M) * gates_S[:, None]
    y_TF = routing.by_token(exchange.bring_back(y_SF, found, "expert"), packed)
    return y_TF, exchange.dropped(routes, packed)[None]


def with_room(chosen_TE, devices, places):
    """Of the choices of a device's tokens, those with room: all experts of a device have at most so many that all fit,
    those of the first tokens."""
    kept_TE = chosen_TE.copy()
    for experts in np.split(np.arange(E), devices):
        sizes = chosen_TE[:, experts].sum(0)
        most = max(n for n in range(T + 1) if np.minimum(sizes, n).sum() <= places)
        for e in experts:
            kept_TE[np.nonzero(chosen_TE[:, e])[0][most:], e] = False
    return kept_TE


@pytest.mark.parametrize("case", cover([(4, 1.25)], [(2, 1.0), (2, 2.0), (4, 1.0), (8, 1.25), (8, 8.0)]))
def test_it_equals_every_expert_masked(case):
    devices, capacity = case
    x, w, g = random(devices * T, D), random(E, D, F), random(devices * T, F)
    mesh, specs = meshes.make(data=1, expert=devices), (P("expert"), P("expert"), P("expert"))
    run = jax.shard_map(lambda *a: exchanged(*a, capacity), mesh=mesh, in_specs=specs, out_specs=specs[:2])
    places = exchange.places(T * K, devices, capacity)

    def masked(x, logits, w, chosen, kept):
        gates = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
        return jnp.einsum("td,edf,te->tf", x, w, jnp.where(kept, gates, 0.0))

    @jax.jit
    def both(logits, chosen, kept):
        y, vjp, lost = jax.vjp(run, x, logits, w, has_aux=True)
        exact, exact_vjp = jax.vjp(lambda *a: masked(*a, chosen, kept), x, logits, w)
        return (y, *vjp(g)), (exact, *exact_vjp(g)), lost.sum()

    for skew, of_experts in SKEWS.items():
        logits = random(devices * T, E) + jnp.asarray(of_experts)[None]
        chosen = np.asarray(logits >= jax.lax.top_k(logits, K)[0][:, -1:])
        kept = np.concatenate([with_room(part, devices, places) for part in np.split(chosen, devices)])
        *results, lost = both(logits, chosen, kept)
        for found, expected in zip(*results, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)
        assert int(lost) == (chosen & ~kept).sum()
        assert not lost if capacity >= devices else lost or skew != "all to few"  # others may be even over devices


def ragged_all_to_all(operand, output, *offsets_and_sizes, axis_name):
    """What `jax.lax.ragged_all_to_all` documents, for XLA:CPU, which lacks it."""
    input_offsets, send_sizes, output_offsets, recv_sizes = offsets_and_sizes
    sent = operand, input_offsets, send_sizes, output_offsets
    of_all = [jax.lax.all_gather(x, axis_name) for x in as_varying(sent, [axis_name])]
    me, row = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    for device, (rows, begins, sizes, places) in enumerate(zip(*of_all, strict=True)):
        size = sizes[me]
        is_here = (row >= places[me]) & (row < places[me] + size)
        source = jnp.clip(begins[me] + row - places[me], 0, len(rows) - 1)
        is_here = is_here & (size == recv_sizes[device])  # else nothing is said
        output = jnp.where(is_here.reshape(-1, *[1] * (rows.ndim - 1)), rows[source], output)
    return output


@pytest.mark.parametrize("capacity", [1.0, 4.0])
def test_only_rows_travel_and_nothing_else_changes(capacity, monkeypatch):
    moved = []

    def counted(*arguments, axis_name):
        moved.append(arguments[3])
        return ragged_all_to_all(*arguments, axis_name=axis_name)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", counted)
    mesh, specs = meshes.make(data=1, expert=4), (P("expert"), P("expert"), P("expert"))
    x, w, g = random(4 * T, D), random(E, D, F), random(4 * T, F)

    def results(is_ragged):
        run = jax.shard_map(
            lambda *a: exchanged(*a, capacity, is_ragged), mesh=mesh, in_specs=specs, out_specs=specs[:2]
        )

        @jax.jit
        def all_of(logits):
            y, vjp, lost = jax.vjp(run, x, logits, w, has_aux=True)
            return y, *vjp(g), lost

        return all_of

    padded, ragged = results(False), results(True)
    for of_experts in SKEWS.values():
        logits = random(4 * T, E) + jnp.asarray(of_experts)[None]
        jax.tree.map(np.testing.assert_array_equal, ragged(logits), padded(logits))
    assert len(moved) == 6  # rows there, their gates, results back; and the gradient of each


def test_a_buffer_has_room_for_all_rows_where_it_could_have_to():
    assert exchange.places(72, 4, 4.0) == 72
    assert exchange.places(4096 * 2, 8, 1.25) == 1280
    assert exchange.places(10, 4, 1.0) == 8  # a multiple of 8, at most all
