"""Compressed sums: error feedback loses nothing, all devices agree, random places are fair, layouts do not matter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nanotrain_jax.parallel.collectives import all_reduce
from nanotrain_jax.parallel.gradients import compression
from nanotrain_jax.parallel.gradients.compression import BLOCK, Matrices, Sum, matrices_of

KEY = jax.random.key(0)
WHOLE = Matrices(1, 2, (), ())
SHAPE = 3, 40, 70  # a stack of matrices; its size is not a multiple of 1,024


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return jax.sharding.Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def summing(kind, count, x, state):
    """The sum of one kind -> Sum, state for the next step."""
    if kind == "low_rank":
        return compression.low_rank(x, "replica", state, WHOLE)
    if kind == "random_k":
        key = jax.random.fold_in(KEY, state)
        return compression.random_k(x, "replica", count, key, jnp.float32), state + 1
    return compression.top_k(x, "replica", count, jnp.float32), state


def steps(kind, count, gradients):
    """Sum gradients[step R ...] with error feedback -> totals [step ...], residuals [R ...]."""

    def over_steps(gradients):
        def one(carry, g):
            residual, state = carry
            sums, state = summing(kind, count, g + residual, state)
            return (sums.kept, state), sums.total

        mine = gradients[:, 0]
        state = jax.random.normal(KEY, (3, 70, count)) if kind == "low_rank" else jnp.zeros((), jnp.int32)
        (residual, _), totals = jax.lax.scan(one, (jnp.zeros_like(mine[0]), state), mine)
        return totals, residual[None]

    specs = {"in_specs": P(None, "replica"), "out_specs": (P(), P("replica"))}
    mesh = mesh_of(replica=gradients.shape[1])
    return jax.jit(jax.shard_map(over_steps, mesh=mesh, check_vma=True, **specs))(gradients)


@pytest.mark.parametrize("R", [2, 3, 8])
@pytest.mark.parametrize(("kind", "count"), [("top_k", 20), ("random_k", 20), ("low_rank", 2)])
def test_what_was_sent_and_the_residuals_are_all_gradients(kind, count, R):
    gradients = jax.random.normal(jax.random.key(1), (10, R, *SHAPE))
    totals, residuals = steps(kind, count, gradients)
    assert float(jnp.abs(residuals).max()) > 1  # something was kept
    np.testing.assert_allclose(totals.sum(0) + residuals.sum(0), gradients.sum((0, 1)), rtol=0, atol=2e-4)


@pytest.mark.parametrize("R", [2, 4])
@pytest.mark.parametrize("kind", ["top_k", "random_k"])
def test_all_entries_are_the_sum_of_the_gradients_bitwise(kind, R):
    gradients = jax.random.normal(jax.random.key(1), (2, R, *SHAPE))
    totals, residuals = steps(kind, BLOCK, gradients)
    dense = jax.shard_map(
        lambda g: all_reduce(g[:, 0], ["replica"]), mesh=mesh_of(replica=R), in_specs=P(None, "replica"), out_specs=P()
    )(gradients)
    np.testing.assert_array_equal(totals, dense)
    np.testing.assert_array_equal(residuals, 0)


def test_top_k_sends_the_largest_of_each_block():
    x = jax.random.normal(jax.random.key(2), (2, 5 * BLOCK))
    sums = jax.shard_map(
        lambda x: Sum(*(part[None] for part in compression.top_k(x[0], "replica", 10, jnp.float32))),
        mesh=mesh_of(replica=2),
        in_specs=P("replica"),
        out_specs=Sum(P(None), P("replica")),
    )(x)
    for mine, kept in zip(np.asarray(x).reshape(10, BLOCK), np.asarray(sums.kept).reshape(10, BLOCK), strict=True):
        largest = np.argsort(-np.abs(mine))[:10]
        np.testing.assert_array_equal(np.flatnonzero(kept == 0), np.sort(largest))
        np.testing.assert_array_equal(kept[kept != 0], np.delete(mine, largest))


def test_every_place_is_as_likely_in_random_k():
    """E[C(x)] = count / 1024 x. 2,000 seeds and 1,024 places: a place's count is within 6 standard deviations but for
    one run in 10^6 (binomial, 1,024 two-sided tails of about 1e-9)."""
    seeds, count = 2000, 64
    chosen = jax.shard_map(
        lambda keys: jax.lax.map(
            lambda key: 1 - compression.random_k(jnp.ones(BLOCK), "replica", count, key, jnp.float32).kept, keys
        )[None],
        mesh=mesh_of(replica=2),
        in_specs=P(),
        out_specs=P("replica"),
    )(jax.random.split(KEY, seeds))
    np.testing.assert_array_equal(chosen[0], chosen[1])  # devices agree without sending places
    fraction = count / BLOCK
    deviation = np.sqrt(seeds * fraction * (1 - fraction))
    assert np.abs(np.asarray(chosen[0]).sum(0) - seeds * fraction).max() < 6 * deviation
    np.testing.assert_array_equal(np.asarray(chosen[0]).sum(1), count)


def test_low_rank_is_exact_for_a_sum_of_that_rank():
    """A common subspace: the projection is the matrix after one round, whatever the start."""
    left, right = jax.random.normal(KEY, (3, 40, 2)), jax.random.normal(KEY, (2, 3, 2, 70))
    gradients = jnp.einsum("sar,isrb->isab", left, right)[None]
    totals, residuals = steps("low_rank", 2, gradients)
    np.testing.assert_allclose(totals[0], gradients[0].sum(0), atol=2e-4)
    np.testing.assert_allclose(residuals, 0, atol=2e-4)


@pytest.mark.parametrize("spec", [P(None, "data"), P(None, None, "data"), P(None, "data", "tensor")], ids=str)
def test_low_rank_is_the_same_however_matrices_are_sharded(spec):
    x = jax.random.normal(KEY, (*SHAPE, 2))
    basis = jax.random.normal(jax.random.key(1), (3, 70, 4))
    found = []
    for entries in (P(), spec):
        matrices = matrices_of(SHAPE, entries, stacked=True)
        assert matrices[:2] == (1, 2)
        full = P(*entries, *[None] * (3 - len(entries)))
        of_basis = P(None, full[2])
        function = jax.shard_map(
            partial(low_rank_of_last_dim, matrices=matrices),
            mesh=mesh_of(replica=2, data=2, tensor=2),
            in_specs=(P(*full, "replica"), of_basis),
            out_specs=(Sum(full, P(*full, "replica")), of_basis),
        )
        found.append(jax.jit(function)(x, basis))
    for whole, sharded in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(sharded, whole, atol=2e-5)


def low_rank_of_last_dim(x, basis, matrices):
    sums, basis = compression.low_rank(x[..., 0], "replica", basis, matrices)
    return Sum(sums.total, sums.kept[..., None]), basis


@pytest.mark.parametrize(
    ("shape", "stacked", "columns"), [((4, 64, 8, 8), True, 2), ((4, 8, 8, 64), True, 3), ((100, 64), False, 1)]
)
def test_matrices_are_divided_where_they_are_nearly_square(shape, stacked, columns):
    assert matrices_of(shape, P(), stacked)[:2] == (int(stacked), columns)


@pytest.mark.parametrize("kind", ["top_k", "random_k", "low_rank"])
def test_zeros_stay_zeros(kind):
    totals, residuals = steps(kind, 2, jnp.zeros((3, 2, *SHAPE)))
    assert not np.asarray(totals).any()
    assert not np.asarray(residuals).any()
