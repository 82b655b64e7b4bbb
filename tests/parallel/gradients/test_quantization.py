"""Collectives in 8 bits: errors of a rounding, sums of exactly the rounded values, bytes, NaN and infinity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import wire
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.gradients import quantization
from nanotrain_jax.parallel.gradients.quantization import BLOCK, dequantize, quantize
from nanotrain_jax.parallel.zero.communication import Communication

KINDS = pytest.mark.parametrize("kind", ["int8", "float8"])
LAYOUTS = pytest.mark.parametrize(
    ("sizes", "axes"),
    [  # data, context: the axes reduced over
        pytest.param({"data": 2}, "data", id="2", marks=pytest.mark.long),
        pytest.param({"data": 3}, "data", id="3"),
        pytest.param({"data": 2, "context": 2}, ("data", "context"), id="2 x 2"),
        pytest.param({"data": 8}, ("data",), id="8", marks=pytest.mark.long),
        pytest.param({"data": 4, "replica": 2}, ("replica",), id="replica 2 of data 4"),
    ],
)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@partial(jax.jit, static_argnums=1)
def rounded(x, kind):
    """x[... n], as it arrives."""
    return dequantize(quantize(x, kind))[..., : x.shape[-1]]


def devices(sizes):
    mesh = meshes.make(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    return mesh, mesh.size


def several(mesh):
    """The axes of more than one device."""
    return tuple(axis for axis, size in mesh.shape.items() if size > 1)


def over_devices(function, mesh, arrays, out_specs):
    """Run function(*arrays of this device) -> compiled program, its results. arrays[devices ...]"""
    every = P(several(mesh))

    def of_device(*arrays):
        return function(*(x[0] for x in arrays))

    run = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=(every,) * len(arrays), out_specs=out_specs))
    compiled = run.lower(*arrays).compile()
    return compiled, compiled(*arrays)


def in_groups(x, mesh, axes):
    """x[devices ...] -> [groups, N, ...]: the devices along axes, for each place on the others."""
    axes = (axes,) if isinstance(axes, str) else axes
    names = mesh.axis_names
    grid = np.asarray(x).reshape(*mesh.shape.values(), *x.shape[1:])
    moved = np.moveaxis(grid, [names.index(a) for a in axes], range(len(names) - len(axes), len(names)))
    return moved.reshape(-1, np.prod([mesh.shape[a] for a in axes]), *x.shape[1:])


def wire_bytes(compiled, mesh):
    found = {}
    for c in wire.collectives(compiled.as_text(), mesh.shape):
        found[c.operation] = found.get(c.operation, 0) + c.bytes * c.count
    return found


@KINDS
@pytest.mark.parametrize("size", [1e-25, 3e-3, 1.0, 1e30])
@pytest.mark.parametrize("elements", [1, 128, 129, 1000])
def test_a_value_is_off_by_at_most_half_a_unit_of_its_block(kind, size, elements):
    x = size * normal(elements, 3, elements)
    blocks = jax.jit(quantize, static_argnums=1)(x, kind)
    count = -(-elements // BLOCK)
    assert (blocks.value.shape, blocks.scale.shape) == ((3, count, BLOCK), (3, count))
    padding = ((0, 0), (0, count * BLOCK - elements))
    exact = np.pad(np.asarray(x), padding).reshape(3, count, BLOCK)
    largest = np.abs(exact).max(-1, keepdims=True)
    error = np.abs(np.asarray(dequantize(blocks)).reshape(exact.shape) - exact)
    bound = largest / 254 if kind == "int8" else np.maximum(np.abs(exact) / 16, largest / 448 / 1024)
    assert (error <= 1.0001 * bound).all()
    assert (error[exact == 0] == 0).all()
    np.testing.assert_allclose(np.abs(dequantize(blocks)).max(), largest.max(), rtol=1e-6)


@KINDS
def test_zeros_and_the_smallest_and_largest_values_stay_finite(kind):
    for value in (0.0, 1e-40, 1e-30, 3.4e38):
        x = jnp.full((2, 130), value)
        np.testing.assert_allclose(rounded(x, kind), x, rtol=1e-6, atol=1e-30)


@KINDS
@LAYOUTS
def test_a_reduce_scatter_is_the_sum_of_the_rounded_values(kind, sizes, axes):
    mesh, count = devices(sizes)
    N = int(np.prod([mesh.shape[a] for a in ([axes] if isinstance(axes, str) else axes)]))
    arrays = normal(0, count, 5, 2 * N, 11), normal(1, count, 128 * N), normal(2, count, 3 * N, 130)
    dims = 1, 0, 0

    def reduce(*xs):
        return tuple(x[None] for x in quantization.reduce_scatter(xs, axes, dims, kind))

    compiled, sums = over_devices(reduce, mesh, arrays, P(several(mesh)))
    sent = 0
    for x, dim, found in zip(arrays, dims, sums, strict=True):
        assert found.dtype == jnp.float32
        rows = np.moveaxis(np.asarray(x), dim + 1, 1)
        rows = rows.reshape(count, N, -1)  # of each device, for each device along axes
        exact = in_groups(rounded(jnp.asarray(rows), kind), mesh, axes).sum(1)
        own = np.moveaxis(in_groups(found, mesh, axes), dim + 2, 2).reshape(exact.shape)
        np.testing.assert_allclose(own, exact, rtol=1e-6, atol=1e-6)
        sent += quantization.padded(x[0].size, N)
    assert wire_bytes(compiled, mesh) == {"all_to_all": pytest.approx((N - 1) / N * sent * (1 + 4 / 128))}


@KINDS
@LAYOUTS
def test_an_all_reduce_is_the_rounded_sum_of_the_rounded_values(kind, sizes, axes):
    mesh, count = devices(sizes)
    names = (axes,) if isinstance(axes, str) else axes
    N = int(np.prod([mesh.shape[a] for a in names]))
    arrays = normal(0, count, 7, 131), normal(1, count, 128 * N + 1)
    others = tuple(a for a in several(mesh) if a not in names)

    def reduce(*xs):
        return tuple(x[None] for x in quantization.all_reduce(xs, axes, kind))

    compiled, sums = over_devices(reduce, mesh, arrays, P(others))
    sent = 0
    for x, found in zip(arrays, sums, strict=True):
        size = x[0].size
        whole = quantization.padded(size, N)
        rows = np.pad(np.asarray(x).reshape(count, size), ((0, 0), (0, whole - size)))
        exact = in_groups(rounded(jnp.asarray(rows), kind), mesh, axes).sum(1)
        exact = np.asarray(rounded(jnp.asarray(exact), kind))[:, :size]
        one_rounding = np.abs(exact).max() / 100 if kind == "int8" else np.abs(exact) / 7  # a sum at the edge of two
        error = np.abs(np.asarray(found).reshape(exact.shape) - exact)
        assert (error <= 1e-6 * np.abs(exact) + one_rounding).all()
        assert (error <= 1e-5).mean() > 0.999
        sent += whole
    message = pytest.approx((N - 1) / N * sent * (1 + 4 / 128))
    assert wire_bytes(compiled, mesh) == {"all_to_all": message, "all_gather": message}


@KINDS
@LAYOUTS
def test_an_all_gather_is_the_rounded_shards(kind, sizes, axes):
    mesh, count = devices(sizes)
    N = int(np.prod([mesh.shape[a] for a in ([axes] if isinstance(axes, str) else axes)]))
    arrays = normal(0, count, 6, 33).astype(jnp.bfloat16), normal(1, count, 128).astype(jnp.bfloat16)
    dims = 1, 0

    def gather(*xs):
        return tuple(x[None] for x in quantization.all_gather(xs, axes, dims, kind))

    compiled, full = over_devices(gather, mesh, arrays, P(several(mesh)))
    sent = 0
    for x, dim, found in zip(arrays, dims, full, strict=True):
        shards = jnp.moveaxis(x, dim + 1, 1).reshape(count, -1)
        shards = in_groups(rounded(shards, kind).astype(jnp.bfloat16), mesh, axes)  # [groups N n]
        for device in range(N):
            own = np.moveaxis(in_groups(found, mesh, axes)[:, device], dim + 1, 1)
            np.testing.assert_array_equal(own.reshape(shards.shape), shards)
        sent += N * quantization.padded(x[0].size, 1)
    assert wire_bytes(compiled, mesh) == {"all_gather": pytest.approx((N - 1) / N * sent * (1 + 4 / 128))}


@KINDS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_device_is_not_finite_in_the_sum(kind, value):
    mesh, _ = devices({"data": 4})
    x = normal(0, 4, 8, 256).at[2, 5, 200].set(value)

    def reduce(x):
        (own,) = quantization.reduce_scatter([x], "data", [0], kind)
        return own, *quantization.all_reduce([x], "data", kind)

    _, (scattered, everywhere) = over_devices(reduce, mesh, (x,), (P("data"), P()))
    for found in scattered, everywhere:
        not_finite = ~np.isfinite(np.asarray(found)).reshape(-1, BLOCK)
        assert list(np.flatnonzero(not_finite.all(1))) == list(np.flatnonzero(not_finite.any(1))) == [11]


@KINDS
def test_small_arrays_travel_as_they_are(kind):
    mesh, _ = devices({"data": 4})
    arrays = normal(0, 4, 4, 256), normal(1, 4, 4, 127), normal(2, 4, 4, 128)
    communication = Communication(jnp.dtype("float32"), 2**20, reduce=kind, least=300)

    def reduce(*xs):
        return tuple(communication.reduce_scatter(xs, ("data",), [0, 0, 0]))

    compiled, sums = over_devices(reduce, mesh, arrays, P("data"))
    for x, found, is_exact in zip(arrays, sums, (False, True, False), strict=True):
        error = np.abs(found - np.asarray(x).sum(0)).max()
        assert error < 1e-5 if is_exact else 1e-4 < error < 0.5
    sent = {"all_to_all": 3 / 4 * (4 * 256 + 4 * 128) * (1 + 4 / 128), "reduce_scatter": 3 / 4 * 4 * 4 * 127}
    assert wire_bytes(compiled, mesh) == sent
