"""FP8 matmuls: scales, errors of a rounding, the operands of each gradient; gathers in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import on_devices, random_tokens, resolved, small
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import wire
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.tensor import float8, tensor
from nanotrain_jax.parallel.zero import zero
from nanotrain_jax.parallel.zero.communication import Communication
from nanotrain_jax.step import build as steps


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("dtype", [float8.E4M3, float8.E5M2])
@pytest.mark.parametrize("size", [1e-25, 3e-3, 1.0, 1e20])
def test_a_tensor_keeps_the_precision_of_its_dtype_whatever_its_size(dtype, size):
    x = size * normal(0, 1000)
    scaled = float8.quantize(x, dtype)
    assert np.frexp(np.asarray(scaled.scale))[0] == 0.5  # a power of two
    top = float(jnp.abs(scaled.value.astype(jnp.float32)).max())
    assert top <= float(jnp.finfo(dtype).max)
    assert top > float(jnp.finfo(dtype).max) / 2.1
    error = np.abs(float8.dequantize(scaled) - x)
    assert (error <= np.abs(x) * 2.0 ** -(jnp.finfo(dtype).nmant + 1) + float(jnp.abs(x).max()) * 2.0**-15).all()


def test_zeros_and_the_largest_values_stay_finite():
    for x in (jnp.zeros(4), jnp.full(4, 3e38), jnp.array([448.0, -448.0, 449.0, 0.0])):
        assert np.isfinite(float8.dequantize(float8.quantize(x, float8.E4M3))).all()


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "contracted"), [((2, 8, 16), (16, 4, 8), 1), ((2, 8, 4, 8), (4, 8, 16), 2)]
)
def test_gradients_are_products_of_the_rounded_operands(x_shape, w_shape, contracted):
    x, w = normal(0, *x_shape), normal(1, *w_shape)
    y, pull = jax.vjp(lambda x, w: float8.multiply(float8.FLOAT8, x, w, contracted), x, w)
    g = normal(2, *y.shape)
    exact, exact_pull = jax.vjp(
        lambda x, w: jnp.tensordot(x, w, contracted),
        *(float8.dequantize(float8.quantize(a, float8.E4M3)) for a in (x, w)),
    )
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    rounded = exact_pull(float8.dequantize(float8.quantize(g, float8.E5M2)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), pull(g), rounded)
    plain, plain_pull = jax.vjp(lambda x, w: jnp.tensordot(x, w, contracted), x, w)
    for found, true in zip((y, *pull(g)), (plain, *plain_pull(g)), strict=True):
        assert 0.005 < np.linalg.norm(found - true) / np.linalg.norm(true) < 0.08


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tensor_parallel_block_is_near_one_device(overlap):
    x, w_DF, w_FD = normal(0, 2, 32, 16), normal(1, 16, 64) / 4, normal(2, 64, 16) / 8
    options = tensor.MatmulOptions(overlap=overlap, matmul=float8.FLOAT8)

    def block(x, w_DF, w_FD):
        (h_BTF,) = tensor.columns(x, [w_DF], options=options)
        return jax.lax.psum((tensor.row(jnp.tanh(h_BTF), w_FD, options=options) ** 2).sum(), "tensor")

    def plain(x, w_DF, w_FD):
        return ((jnp.tanh(x @ w_DF) @ w_FD) ** 2).sum()

    specs = P(None, "tensor"), P(None, "tensor"), P("tensor")
    run = jax.shard_map(
        jax.grad(block, argnums=(0, 1, 2)), mesh=meshes.make(data=1, tensor=4, devices=jax.devices()[:4]),
        in_specs=specs, out_specs=specs,
    )  # fmt: skip
    for found, true in zip(jax.jit(run)(x, w_DF, w_FD), jax.grad(plain, argnums=(0, 1, 2))(x, w_DF, w_FD), strict=True):
        assert 0.005 < np.linalg.norm(found - true) / np.linalg.norm(true) < 0.1


def test_matrices_are_gathered_in_bytes_and_vectors_as_they_are():
    communication = Communication(jnp.dtype("float32"), 2**20, jnp.dtype("bfloat16"), gather="float8")
    weights = {"w": normal(0, 64, 32), "v": normal(1, 32, 128), "gain": 1 + normal(2, 64)}
    dims = {"w": 0, "v": 1, "gain": 0}
    cuts = {name: zero.Cut(dim, ("data",)) for name, dim in dims.items()}
    mesh = meshes.make(data=8)

    def run(stored):
        shards = zero.Shards(cuts, communication)
        full = zero.gather_ahead(stored, shards)
        return jax.tree.map(lambda x: x[None], full)

    specs = {"w": P("data"), "v": P(None, "data"), "gain": P("data")}
    compiled = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P("data"))).lower(weights).compile()
    for name, full in compiled(weights).items():
        shards = np.split(np.asarray(weights[name]), 8, dims[name])
        if name != "gain":
            shards = [float8.dequantize(float8.quantize(jnp.asarray(x, jnp.bfloat16), float8.E4M3)) for x in shards]
        expected = np.concatenate(shards, dims[name]).astype(jnp.bfloat16)
        for device in range(8):
            np.testing.assert_array_equal(full[device], expected)
    found = wire.collectives(compiled.as_text(), mesh.shape)
    scales, gain = 4 * 2 * 8, 4 * 64  # XLA:CPU sends 16 bit as float32
    assert sum(c.bytes for c in found) == 7 / 8 * (64 * 32 + 32 * 128 + scales + gain)


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize(
    ("parallel", "remat"),
    [
        ({"data": 4, "zero": 3}, "none"),
        pytest.param({"data": 2, "tensor": 2, "zero": 3}, "full", marks=pytest.mark.long),
        pytest.param({"data": 2, "pipe": 2, "zero": 3, "microbatches": 2}, "selective", marks=pytest.mark.long),
        ({"data": 4, "expert": 2, "zero": 3}, "none"),
    ],
)
def test_losses_of_a_decoder_are_near_those_in_bfloat16(parallel, remat):
    losses = []
    for eighth in (None, "float8"):
        precision = {"compute": "bfloat16", "matmul": eighth, "gather": eighth}
        tree = small(parallel=parallel | {"persist_below": 64}, precision=precision, memory={"remat": remat})
        tree["model"] |= {"d_ff": 64, "num_heads": 4, "num_kv_heads": 4, "d_model": 64}
        if "expert" in parallel:
            tree["model"] |= {"d_ff": None, "experts": {"num": 4, "top_k": 2, "d_ff": 32, "shared": 1}}
        config, mesh = resolved(tree)
        step = steps.build(config, mesh)
        state, log = step.init(), []
        for tokens in random_tokens(config, count=3):
            state, metrics, _ = step.train(state, on_devices(tokens, step))
            log.append(float(metrics["loss"]))
        losses.append(log)
    plain, found = np.array(losses)
    assert 0 < np.abs(found / plain - 1).max() < 0.02
