"""All-reduce algorithms: the sums of `psum`, in the steps and bytes of their closed forms."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cover
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import hlo, wire
from nanotrain_jax.parallel.gradients import all_reduce
from nanotrain_jax.parallel.gradients.all_reduce import ALGORITHMS

of_every_size = pytest.mark.parametrize("N", cover([3, 8], [1, 2, 4, 6], str))


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return jax.sharding.Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def values(N, integers=False):
    """A tree of odd sizes and two dtypes, with one row per device."""
    a, b, c = (jax.random.normal(jax.random.key(k), (N, *shape)) for k, shape in enumerate([(5, 7), (), (13,)]))
    tree = {"a": a, "b": [b, c.astype(jnp.bfloat16)]}
    return jax.tree.map(lambda x: jnp.round(8 * x), tree) if integers else tree


def run(mesh, function, tree, axes=("data",)):
    """Compile function on each device's row of the tree; the result has a row per device."""
    over = partial(jax.shard_map, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=True)
    on_row = over(lambda tree: jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda x: x[0], tree))))
    return jax.jit(on_row).lower(tree).compile()


@cache  # two tests share a program
def program(name, N):
    function = partial(ALGORITHMS[name], axis="data") if name in ALGORITHMS else partial(jax.lax.psum, axis_name="data")
    return run(mesh_of(data=N), function, values(N))


@of_every_size
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_device_has_the_sum(name, N):
    found = program(name, N)(values(N))
    for x, original in zip(jax.tree.leaves(found), jax.tree.leaves(values(N)), strict=True):
        exact = np.asarray(original, np.float64).sum(0)
        tolerance = 1e-6 if x.dtype == jnp.float32 else 0.02
        assert x.shape == original.shape
        assert x.dtype == original.dtype
        np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(np.asarray(x[:1]), x.shape))  # the same everywhere
        np.testing.assert_allclose(np.asarray(x[0], np.float64), exact, rtol=tolerance, atol=N * tolerance)


@of_every_size
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums_of_integers_equal_psum_bitwise(name, N):
    tree = values(N, integers=True)
    found, expected = program(name, N)(tree), program("psum", N)(tree)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), found, expected)


@of_every_size
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_compiled_program_has_the_steps_and_bytes_of_the_closed_form(name, N):
    x = jnp.ones((N, 8 * 6 * 16))  # whole parts for every N
    text = run(mesh_of(data=N), partial(ALGORITHMS[name], axis="data"), x).as_text()
    found, cost = wire.collectives(text, {"data": N}), all_reduce.cost(name, N)
    links = 2 if name == "two_rings" else 1
    assert {c.operation for c in found} <= {"permute"}
    assert sum(c.count for c in found) == links * cost.steps
    assert sum(c.count * c.bytes for c in found) == pytest.approx(links * cost.in_turn * x[0].nbytes)


@pytest.mark.parametrize("N", cover([3, 8], [2, 4, 6], str))
@pytest.mark.parametrize("name", ["halving", "doubling", "binomial_tree"])
def test_the_busiest_device_sends_the_bytes_of_the_closed_form(name, N):
    x = jnp.ones((N, 8 * 6 * 16))
    text = run(mesh_of(data=N), partial(ALGORITHMS[name], axis="data"), x).as_text()
    sent = np.zeros(N)
    for kind, pairs in re.findall(
        r"= (f32\[\d+(?:,\d+)*\]).* collective-permute\(.*source_target_pairs={(.*?)}}", text
    ):
        for sender in re.findall(r"{(\d+),", pairs):
            sent[int(sender)] += hlo.size(kind)
    assert max(sent) == pytest.approx(all_reduce.cost(name, N).sent * x[0].nbytes)


@pytest.mark.parametrize(("inner", "outer"), [(4, 2), (2, 3), (2, 4), (1, 4), (3, 1)])
def test_two_levels_send_a_shard_between_hosts(inner, outer):
    N, mesh = inner * outer, mesh_of(replica=outer, data=inner)
    tree = values(N)
    function = partial(all_reduce.two_level, inner="data", outer="replica")
    found = run(mesh, function, tree, ("replica", "data"))(tree)
    for x, original in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        tolerance = 1e-6 if x.dtype == jnp.float32 else 0.02
        exact = np.broadcast_to(np.asarray(original, np.float64).sum(0), x.shape)
        np.testing.assert_allclose(np.asarray(x, np.float64), exact, rtol=tolerance, atol=N * tolerance)
    x = jnp.ones((N, 48))
    text = run(mesh, function, x, ("replica", "data")).as_text()
    moved = {"data": 0.0, "replica": 0.0}
    for c in wire.collectives(text, {"replica": outer, "data": inner}):
        moved[c.axes[0]] += c.count * c.bytes
    assert moved["data"] == pytest.approx(2 * (inner - 1) / inner * x[0].nbytes)
    assert moved["replica"] == pytest.approx(2 * (outer - 1) / outer * x[0].nbytes / inner)


def test_rings_are_best_for_large_arrays_and_doubling_for_small_ones():
    def best(size, N):
        return min(ALGORITHMS, key=lambda name: all_reduce.cost(name, N).seconds(size, alpha=5e-6, beta=1 / 50e9))

    assert [best(size, 64) for size in (1e3, 1e6, 1e9)] == ["doubling", "halving", "two_rings"]
    with pytest.raises(ValueError, match="algorithm='star' is unknown; use one of ring"):
        all_reduce.cost("star", 4)


def test_compiled_size_does_not_grow_with_the_devices_of_a_ring():
    sizes = [
        len(run(mesh_of(data=N), partial(all_reduce.ring, axis="data"), jnp.ones((N, 96))).as_text()) for N in (3, 8)
    ]
    assert sizes[1] < 1.2 * sizes[0]
