"""Tensor parallelism: the same numbers as on one device, and exactly the bytes of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import wire
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.sharding import layout
from nanotrain_jax.parallel.tensor import embedding, tensor, vocabulary

B, T, D, F, V = 4, 16, 8, 32, 64


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def on(mesh, function, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))


def block(x_BTD, gain_D, w_DF, w_FD, parallel=None, options=None):
    """A norm's gain and the matmuls of a gated MLP; parallel: None on one device, else sequence_parallel."""
    x_BTD = x_BTD * gain_D[None, None]
    if parallel is None:
        return jnp.tanh(x_BTD @ w_DF) @ w_FD
    if options is None:
        h_BTF = tensor.column(tensor.enter(x_BTD, "tensor", parallel), w_DF)
    else:  # two halves of each device's columns
        h_BTF = jnp.concatenate(tensor.columns(x_BTD, jnp.split(w_DF, 2, 1), "tensor", parallel, options), -1)
    return tensor.row(jnp.tanh(h_BTF), w_FD, "tensor", parallel, options or tensor.PLAIN_MATMULS)


ARGUMENTS = normal(0, B, T, D), normal(1, D), normal(2, D, F) / D**0.5, normal(3, F, D) / F**0.5


def gradients(parallel=None, options=None):
    def run(*arguments):
        weigh = normal(4, B, T, D)
        if parallel:
            size = T // jax.lax.axis_size("tensor")
            weigh = jax.lax.dynamic_slice_in_dim(weigh, jax.lax.axis_index("tensor") * size, size, 1)

        def total(*arguments):
            y = (weigh * block(*arguments, parallel=parallel, options=options)).sum()
            return jax.lax.psum(y, "tensor") if parallel else y

        return jax.value_and_grad(total, argnums=range(4))(*arguments)

    return run


def specs(sequence_parallel):
    x = layout("B T/tensor D" if sequence_parallel else "B T D")
    return x, P(), layout("D F/tensor"), layout("F/tensor D")


STORED, REGATHERED = tensor.MatmulOptions(regather=False), tensor.MatmulOptions()
OVERLAPPED = tensor.MatmulOptions(overlap=True), tensor.MatmulOptions(regather=False, overlap=True)


@pytest.mark.parametrize(
    ("size", "options", "sequence_parallel"),
    [(size, None, sequence_parallel) for size in (1, 2, 8) for sequence_parallel in (True, False)]
    + [(8, STORED, True), (8, STORED, False), (2, REGATHERED, True), (8, REGATHERED, True), (8, REGATHERED, False)]
    + [(size, options, True) for size in (2, 8) for options in OVERLAPPED],
)
def test_column_and_row_equal_two_matmuls_and_their_gradients(size, options, sequence_parallel):
    mesh, spec = meshes.make(data=1, tensor=size, devices=jax.devices()[:size]), specs(sequence_parallel)
    found = on(mesh, gradients(sequence_parallel, options), spec, (P(), spec))(*ARGUMENTS)
    expected = jax.jit(gradients())(*ARGUMENTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_what_would_give_wrong_sums_is_refused():
    mesh, x_BTD = meshes.make(data=1, tensor=2, devices=jax.devices()[:2]), ARGUMENTS[0]
    for sequence_parallel in (True, False):
        with pytest.raises(
            ValueError, match="y is the same on all devices along tensor, so its sum would be 2 y; shard"
        ):
            on(mesh, lambda x, kind=sequence_parallel: tensor.leave(x, "tensor", kind), P(), P())(x_BTD)
    for function in (tensor.enter, tensor.leave):
        unchecked = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        with pytest.raises(ValueError, match=r"shard_map without check_vma: .*; use check_vma=True"):
            jax.jit(unchecked)(x_BTD)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_gradients_have_the_dtypes_of_their_arrays(x_dtype, w_dtype):
    mesh, spec = (
        meshes.make(data=1, tensor=2, devices=jax.devices()[:2]),
        (layout("B T/tensor D"), layout("D F/tensor")),
    )

    def run(x_BTD, w_DF):
        def total(x, w):
            return tensor.columns(x, [w])[0].sum().astype(jnp.float32) + x.sum().astype(jnp.float32)

        with jax.numpy_dtype_promotion("standard"):
            return jax.grad(total, argnums=(0, 1))(x_BTD, w_DF)

    found = on(mesh, run, spec, spec)(ARGUMENTS[0].astype(x_dtype), ARGUMENTS[2].astype(w_dtype))
    assert [g.dtype for g in found] == [x_dtype, w_dtype]


@pytest.mark.parametrize(
    ("sequence_parallel", "options", "operations"),
    [
        (False, None, {"all_reduce"}),
        (False, STORED, {"all_reduce"}),
        (True, None, {"all_gather", "reduce_scatter"}),
        (True, STORED, {"all_gather", "reduce_scatter"}),
        (True, OVERLAPPED[1], {"permute", "reduce_scatter"}),  # the last is behind the gradients of weights
    ],
)
def test_a_block_moves_the_bytes_of_the_papers(sequence_parallel, options, operations):
    mesh, spec = meshes.make(data=1, tensor=8), specs(sequence_parallel)
    text = on(mesh, gradients(sequence_parallel, options), spec, (P(), spec)).lower(*ARGUMENTS).compile().as_text()
    found = [
        c for c in wire.collectives(text, mesh.shape) if c.bytes * c.count > 8 * D * 4
    ]  # smaller ones: the gain's gradient, the loss
    size = B * T * D * 4 * 7 / 8
    # Enter and leave, and the backward of each (XLA:CPU may combine two all-reduces).
    assert sum(c.bytes * c.count for c in found) == 4 * size
    assert {c.operation for c in found} == operations
    assert {c.axes for c in found} == {("tensor",)}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_embedding_is_looked_up_on_the_devices_that_store_its_rows(sequence_parallel):
    mesh = meshes.make(data=2, tensor=4)
    tokens, table = jax.random.randint(jax.random.key(0), (B, T), 0, V), normal(1, V, D)

    def run(table, tokens):
        def total(table):
            x = embedding.look_up(table, tokens, "tensor", sequence_parallel)
            return jax.lax.psum((x**2).sum(), ("data", *(["tensor"] * sequence_parallel))), x

        (_, x), g = jax.value_and_grad(total, has_aux=True)(table)
        return x, g

    x_spec = layout("B/data T/tensor D" if sequence_parallel else "B/data T D")
    in_specs = layout("V/tensor D"), layout("B/data T")
    x, g = on(mesh, run, in_specs, (x_spec, in_specs[0]))(table, tokens)
    np.testing.assert_array_equal(x, table[tokens])
    np.testing.assert_allclose(g, jnp.zeros((V, D)).at[tokens].add(2 * table[tokens]), rtol=1e-6)


def reference(x_BTD, head_VD, targets_BT, vocab_size, z_loss):
    """In float64, by numpy: -> sum of losses, gradients of x and head."""
    x, head = np.asarray(x_BTD, np.float64).reshape(-1, D), np.asarray(head_VD, np.float64)
    targets = np.asarray(targets_BT).reshape(-1)
    logits = x @ head[:vocab_size].T
    log_z = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    counted = targets >= 0
    onehot = np.eye(vocab_size)[np.where(counted, targets, 0)]
    loss = ((log_z - (logits * onehot).sum(1) + z_loss * log_z**2) * counted).sum()
    g = (np.exp(logits - log_z[:, None]) * (1 + 2 * z_loss * log_z)[:, None] - onehot) * counted[:, None]
    grad_head = np.zeros_like(head)
    grad_head[:vocab_size] = g.T @ x
    return loss, (g @ head[:vocab_size]).reshape(x_BTD.shape), grad_head


@pytest.mark.parametrize(
    ("data", "size", "chunk", "vocab_size", "z_loss"),
    [(1, 1, None, V, 0.0), (2, 2, None, V, 1e-2), (2, 4, 8, 50, 0.0), (1, 8, 4, 57, 1e-2), (4, 2, 16, 33, 0.0)],
)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_loss_and_its_gradients_equal_float64(data, size, chunk, vocab_size, z_loss, sequence_parallel):
    mesh = meshes.make(data=data, tensor=size, devices=jax.devices()[: data * size])
    x, head = normal(0, B, T, D), normal(1, V, D)
    targets = jax.random.randint(jax.random.key(2), (B, T), 0, vocab_size).at[1, :5].set(-1)

    def run(x, head, targets):
        def total(x, head):
            x = tensor.enter(x, "tensor", sequence_parallel)
            options = vocabulary.LossOptions(vocab_size, chunk, z_loss)
            loss, count = vocabulary.cross_entropy(x, head, targets, "tensor", options)
            return jax.lax.psum(loss, "data"), jax.lax.psum(count, "data")

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(x, head)

    x_spec = layout("B/data T/tensor D" if sequence_parallel else "B/data T D")
    in_specs = x_spec, layout("V/tensor D"), layout("B/data T")
    with jax.default_matmul_precision("highest"):
        (loss, count), (grad_x, grad_head) = on(mesh, run, in_specs, ((P(), P()), in_specs[:2]))(x, head, targets)
    expected = reference(x, head, targets, vocab_size, z_loss)
    assert count == B * T - 5
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for found, true in zip((grad_x, grad_head), expected[1:], strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-6, atol=1e-6 * np.abs(true).max())


@pytest.mark.parametrize("around", ["jit", "checkpoint", "scan", "outside"])
def test_the_loss_is_differentiable_under_jit_checkpoint_scan_and_outside_shard_map(around):
    mesh = meshes.make(data=2, tensor=4)
    x, head = normal(0, B, T, D), normal(1, V, D)
    targets = jax.random.randint(jax.random.key(2), (B, T), 0, V)
    x_spec, head_spec, t_spec = layout("B/data T/tensor D"), layout("V/tensor D"), layout("B/data T")

    def loss(x, head, targets):
        options = vocabulary.LossOptions(chunk=8)
        return jax.lax.psum(vocabulary.cross_entropy(tensor.enter(x), head, targets, options=options)[0], "data")

    def scanned(x, head, targets):
        def halves(x):
            return x.reshape(2, x.shape[0] // 2, *x.shape[1:])

        return jax.lax.map(lambda xs: loss(xs[0], head, xs[1]), (halves(x), halves(targets))).sum()

    run = {"jit": jax.jit(loss), "checkpoint": jax.checkpoint(loss), "scan": scanned, "outside": loss}[around]
    if around == "outside":
        found = jax.grad(on(mesh, run, (x_spec, head_spec, t_spec), P()), argnums=(0, 1))(x, head, targets)
    else:
        grads = jax.grad(run, argnums=(0, 1))
        found = on(mesh, grads, (x_spec, head_spec, t_spec), (x_spec, head_spec))(x, head, targets)
    for got, true in zip(found, reference(x, head, targets, V, 0.0)[1:], strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-5 * np.abs(true).max())


def test_on_one_device_the_same_functions_need_no_mesh():
    x, gain, w_DF, w_FD = ARGUMENTS
    tokens, targets = jax.random.randint(jax.random.key(0), (2, B, T), 0, V)
    table = normal(1, V, D)

    def run(x, gain, w_DF, w_FD, table):
        (h_BTF,) = tensor.columns(x * gain[None, None] + embedding.look_up(table, tokens, None), [w_DF], None, False)
        y_BTD = tensor.row(jnp.tanh(h_BTF), w_FD, None, False)
        return vocabulary.cross_entropy(y_BTD, table, targets, None, vocabulary.LossOptions(chunk=16))[0]

    def plain(x, gain, w_DF, w_FD, table):
        y_BTD = jnp.tanh((x * gain[None, None] + table[tokens]) @ w_DF) @ w_FD
        log_p = jax.nn.log_softmax(y_BTD @ table.T)
        return -jnp.take_along_axis(log_p, targets[..., None], -1).sum()

    found, expected = (jax.value_and_grad(f, argnums=range(5))(x, gain, w_DF, w_FD, table) for f in (run, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_gradients_added_in_matmuls_are_those_added_after_them():
    x, _, w_DF, _ = ARGUMENTS

    def gradients_of(together):
        def total(x, weights):
            options = tensor.MatmulOptions(together=together)
            return sum(jnp.sin(y_BTF).sum() for y_BTF in tensor.columns(x, weights, None, options=options))

        return jax.jit(jax.grad(total, argnums=(0, 1)))(x, [w_DF, 2 * w_DF, 3 * w_DF])

    jax.tree.map(np.testing.assert_array_equal, gradients_of(together=True), gradients_of(together=False))


def test_the_gradient_of_the_head_leaves_its_matmul_rounded_if_asked():
    x, head = (a.astype(jnp.bfloat16) for a in (normal(0, B, T, D), normal(1, V, D)))
    targets = jax.random.randint(jax.random.key(2), (B, T), 0, V)

    def gradient(dtype):
        options = vocabulary.LossOptions(gradient=jnp.dtype(dtype))
        return jax.jit(jax.grad(lambda head: vocabulary.cross_entropy(x, head, targets, None, options)[0]))

    found, expected = (gradient(dtype)(head) for dtype in ("bfloat16", "float32"))
    np.testing.assert_array_equal(found, expected)
    computed = {dtype: str(gradient(dtype).trace(head).jaxpr) for dtype in ("bfloat16", "float32")}
    assert {dtype for dtype, text in computed.items() if f"f32[{V},{D}]" in text} == {"float32"}


def test_targets_outside_the_vocabulary_are_ignored():
    mesh, vocab_size = meshes.make(data=1, tensor=8), 50
    x, head = normal(0, B, T, D), normal(1, V, D)
    targets = jax.random.randint(jax.random.key(2), (B, T), 0, vocab_size)

    def run(x, head, targets):
        def total(x, head):
            return vocabulary.cross_entropy(x, head, targets, "tensor", vocabulary.LossOptions(vocab_size))

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(x, head)

    specs = P(), layout("V/tensor D"), P()
    run = on(mesh, run, specs, ((P(), P()), specs[:2]))
    found, expected = (run(x, head, targets.at[0].set(jnp.asarray(bad))) for bad in ([55, 64, 9999, 50] * 4, [-1] * 16))
    assert int(found[0][1]) == (B - 1) * T
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-9)])
def test_small_gradients_do_not_underflow_in_16_bit(dtype, tolerance):
    mesh = meshes.make(data=1, tensor=2, devices=jax.devices()[:2])
    x, head = 4 * normal(0, 1, T, D), normal(1, V, D)
    targets = jnp.einsum("BTD,VD->BTV", x, head).argmax(-1)  # predicted well: gradients are small
    x, head, scale = x.astype(dtype), head.astype(dtype), 2.0**12

    def run(x, head, targets):
        def total(x, head):
            options = vocabulary.LossOptions(logits=jnp.float32)  # rounded ones would hide what is tested
            return scale * vocabulary.cross_entropy(x, head, targets, options=options)[0]

        return jax.grad(total, argnums=(0, 1))(x, head)

    specs = P(), layout("V/tensor D"), P()
    found = on(mesh, run, specs, specs[:2])(x, head, targets)
    assert [g.dtype for g in found] == [dtype, dtype]
    for got, true in zip(found, reference(x, head, targets, V, 0.0)[1:], strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - scale * true, axis=-1)
        size = np.linalg.norm(scale * true, axis=-1)
        assert (error <= tolerance * size + 1e-3).all()


@pytest.mark.parametrize(("dtype", "rounding"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_logits_are_rounded_to_the_compute_dtype_unless_asked(dtype, rounding):
    """The loss of a token then differs by what two logits of this size are rounded by."""
    x, head = (8 * normal(0, 1, T, D)).astype(dtype), normal(1, V, D).astype(dtype)
    targets = jnp.arange(T)[None] % V
    wide = vocabulary.losses_of_tokens(x, head, targets, None, vocabulary.LossOptions(logits=jnp.float32))
    error = np.abs(vocabulary.losses_of_tokens(x, head, targets, None) - wide)
    largest = np.abs(np.einsum("BTD,VD->BTV", np.float64(x), np.float64(head))).max(-1)
    assert (error <= 2 * rounding * largest).all()
    assert error.max() > 0 or dtype == jnp.bfloat16  # XLA:CPU may leave bfloat16 out


def compiled_loss(mesh, chunk, vocab, tokens, with_gradients):
    def run(x, head, targets):
        def total(x, head):
            return vocabulary.cross_entropy(x, head, targets, options=vocabulary.LossOptions(chunk=chunk))[0]

        return jax.value_and_grad(total, argnums=(0, 1))(x, head) if with_gradients else total(x, head)

    specs = P(), layout("V/tensor D"), P()
    shapes = (1, tokens, D), (vocab, D), (1, tokens)
    arguments = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.float32, jnp.float32, jnp.int32), strict=True)]
    return on(mesh, run, specs, (P(), specs[:2]) if with_gradients else P()).lower(*arguments).compile()


def test_the_loss_moves_three_scalars_per_token_and_no_logits():
    mesh = meshes.make(data=1, tensor=8)
    for chunk in (None, 16):
        found = wire.collectives(compiled_loss(mesh, chunk, 256, 64, False).as_text(), mesh.shape)
        assert {(c.operation, c.axes) for c in found} == {("all_reduce", ("tensor",))}
        assert sum(c.bytes * c.count for c in found) == 2 * 7 / 8 * 3 * 64 * 4
        assert {c.count for c in found} == {64 // (chunk or 64)}


def test_only_one_chunk_of_logits_exists_at_a_time():
    mesh = meshes.make(data=1, tensor=2)
    T, V = 8192, 128_256
    memory = {chunk: compiled_loss(mesh, chunk, V, T, True).memory_analysis() for chunk in (None, 1024, 128)}
    temp = {chunk: found.temp_size_in_bytes for chunk, found in memory.items()}
    logits, head = T * V // 2 * 4, V // 2 * D * 4
    assert temp[None] > logits
    for chunk in (1024, 128):  # logits and their derivatives, and the gradient of the head
        assert temp[chunk] < 4 * chunk / T * logits + 6 * head
    assert temp[128] < logits / 20
