"""Context parallelism: split over an axis, attention is the same, and moves exactly the bytes of the closed forms."""

import re
from functools import cache, partial

import imitated_cudnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cover, needs_cuda_compiler
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import hlo, topology, wire
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.context import attention_block, context
from nanotrain_jax.parallel.sharding import layout
from nanotrain_jax.parallel.tensor import tensor

B, T, N, H = 2, 32, 8, 4
ATTENTION = {
    "ring": context.ring_attention,
    "gather": context.gather_attention,
    "ulysses": context.ulysses_attention,
}
ROWS = layout("B T/context N H")
CASES = [("ring", 2, 1), ("ring", 4, 2), ("ring", 8, 8), ("gather", 4, 2), ("ulysses", 4, 2)]  # kind, devices, K
MORE = [(kind, size, K) for kind in ATTENTION for size in (2, 4, 8) for K in (1, 2, 8) if (kind, size, K) not in CASES]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def operands(K, dtype=jnp.float32):
    """q, k, v and the gradient of the output."""
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    return [normal(seed, *shape).astype(dtype) for seed, shape in enumerate(shapes)]


def mesh_of(size):
    return meshes.make(data=1, context=size, devices=jax.devices()[:size])


def on(mesh, function, in_specs=ROWS, out_specs=ROWS):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def with_gradients(attention):
    """-> function of q, k, v, g -> y, dq, dk, dv"""

    def run(q, k, v, g):
        y, pull = jax.vjp(attention, q, k, v)
        return y, *pull(g)

    return run


def one_device_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@cache
def one_device(K, starts=(0,) * T):
    """y, dq, dk, dv in float64, by numpy. starts: the first token that each one sees, in all rows."""
    q, k, v, g = (np.asarray(x, np.float64) for x in operands(K))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    visible = np.tri(T, dtype=bool) & (np.arange(T)[None] >= np.array(starts)[:, None])
    scores = np.where(visible, np.einsum("BTNH,BSNH->BNTS", q, k) / H**0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("BTNH,BSNH->BNTS", g, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / H**0.5
    dk, dv = np.einsum("BNTS,BTNH->BSNH", ds, q), np.einsum("BNTS,BTNH->BSNH", p, g)
    dk, dv = (x.reshape(B, T, K, N // K, H).sum(3) for x in (dk, dv))
    return np.einsum("BNTS,BSNH->BTNH", p, v), np.einsum("BNTS,BSNH->BTNH", ds, k), dk, dv


def orders(kind, tokens, size):
    """Order of the tokens for a kind of attention, and its inverse."""
    if kind == "ulysses":
        return np.arange(tokens), np.arange(tokens)
    order = context.zigzag_order(tokens, size)
    return order, np.argsort(order)


def compile_on(mesh, run, kind, arrays):
    attention = on(mesh, run(ATTENTION[kind]))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, ROWS)) for x in arrays]
    return jax.jit(attention).lower(*shapes).compile()


@cache
def compiled(kind, size, K, dtype=jnp.float32):
    return compile_on(mesh_of(size), with_gradients, kind, operands(K, dtype))


def results(kind, size, K, dtype=jnp.float32):
    """y, dq, dk, dv in the natural order of tokens."""
    order, inverse = orders(kind, T, size)
    sharding = jax.NamedSharding(mesh_of(size), ROWS)
    arguments = [jax.device_put(x[:, order], sharding) for x in operands(K, dtype)]
    found = compiled(kind, size, K, dtype)(*arguments)
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    return [np.asarray(x, np.float32)[:, inverse] for x in found]


def close(found, expected, tolerance=1e-6):
    for got, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, true, rtol=tolerance, atol=tolerance * max(1.0, np.abs(true).max()))


@pytest.mark.parametrize("case", cover(CASES, MORE))
def test_attention_and_its_gradients_equal_one_device(case):
    close(results(*case), one_device(case[2]))


@pytest.mark.parametrize("kind", ATTENTION)
def test_bfloat16_stays_near_float32(kind):
    for got, true in zip(results(kind, 2, 2, jnp.bfloat16), one_device(2), strict=True):
        assert np.linalg.norm(got - true) < 0.01 * np.linalg.norm(true)


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("axis", [None, "context"])
def test_one_device_needs_no_other_order_and_moves_nothing(kind, axis):
    attention = with_gradients(partial(ATTENTION[kind], axis=axis))
    run = jax.jit(attention if axis is None else on(mesh_of(1), attention))
    close(run(*operands(2)), one_device(2))
    assert not wire.collectives(run.lower(*operands(2)).compile().as_text(), mesh_of(1).shape)


def forward_bytes(kind, size, N, K, head):
    """Wire bytes of the forward; head: bytes of one head of one device."""
    if kind == "ulysses":
        return 2 * (size - 1) / size * (N + max(K, size)) * head
    return 2 * (size - 1) * K * head


def backward_bytes(kind, size, N, K, head, itemsize=4):
    """Wire bytes of the backward; ring and gather move gradients in float32, whatever the itemsize of q, k and v."""
    again = forward_bytes(kind, size, N, K, head)
    if kind == "ulysses":
        return again
    return again + 2 * (size if kind == "ring" else size - 1) * K * head * 4 / itemsize


def two_layers(attention):
    """Attention whose output is the query of another one: loops forward and backward, as in training."""

    def run(q, k, v, g):
        def total(q, k, v):
            return jax.lax.scan(lambda q, kv: (attention(q, *kv), None), q, (k, v))[0]

        y, pull = jax.vjp(total, q, *(jnp.stack([x, -x]) for x in (k, v)))
        dq, dk, dv = pull(g)
        return y, dq, dk.sum(0), dv.sum(0)

    return run


@pytest.mark.parametrize("case", cover([*CASES, ("ulysses", 8, 2)], [c for c in MORE if c != ("ulysses", 8, 2)]))
def test_the_wire_bytes_are_those_of_the_closed_forms(case):
    kind, size, K = case
    mesh, sizes = mesh_of(size), (kind, size, N, K, B * T // size * H * 4)
    forward = compile_on(mesh, lambda attention: attention, kind, operands(K)[:3])
    both = compile_on(mesh, two_layers, kind, operands(K))
    moved = [wire.collectives(program.as_text(), mesh.shape) for program in (forward, both)]
    totals = [sum(c.bytes * c.count for c in found) for found in moved]
    assert totals == [forward_bytes(*sizes), 2 * (forward_bytes(*sizes) + backward_bytes(*sizes))]
    operations = {"ring": {"permute"}, "gather": {"all_gather", "reduce_scatter"}, "ulysses": {"all_to_all"}}
    assert {c.operation for found in moved for c in found} == operations[kind]


def test_zigzag_order_gives_each_device_an_early_and_a_late_chunk():
    assert context.zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    for size in (1, 2, 3, 8):
        order = context.zigzag_order(48, size)
        assert sorted(order) == list(range(48))
        visible_keys = (order + 1).reshape(size, -1).sum(1)  # of all queries of a device
        assert len(set(visible_keys.tolist())) == 1


@pytest.mark.parametrize(
    ("kind", "size", "shapes", "message"),
    [
        ("ring", 4, [(1, 3, 4, 8), (1, 3, 2, 8)], "context=4 with rows of 12 tokens: .* multiple of 8, .* use 16"),
        ("gather", 2, [(1, 5, 4, 8), (1, 5, 2, 8)], "context=2 with rows of 10 tokens: .* multiple of 4, .* use 12"),
        ("ulysses", 4, [(1, 4, 6, 8), (1, 4, 2, 8)], "context=4 devices for 6 query and 2 key heads: .* use fewer"),
        ("ulysses", 8, [(1, 4, 24, 8), (1, 4, 3, 8)], "context=8 devices for 24 query and 3 key heads: .* use fewer"),
        ("ring", 2, [(1, 4, 5, 8), (1, 4, 2, 8)], r"q float32\[1,4,5,8\].*: must be .* K dividing N; pass"),
        ("ring", 2, [(1, 4, 4, 8), (1, 8, 2, 8)], r"k float32\[1,8,2,8\].*: must be"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(kind, size, shapes, message):
    blocks = [jax.ShapeDtypeStruct((b, t * size, *heads), jnp.float32) for b, t, *heads in [*shapes, shapes[1]]]
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(on(mesh_of(size), ATTENTION[kind]), *blocks)
    assert "\n" not in str(error.value)


def test_an_order_of_odd_chunks_an_unknown_kernel_and_missing_dims_are_refused():
    with pytest.raises(ValueError, match=r"context=4 with rows of 12 tokens: .* use 16"):
        context.zigzag_order(12, 4)
    with pytest.raises(ValueError, match="kernel='flash': must be cudnn or xla; use"):
        context.ring_attention(*operands(2)[:3], kernel="flash")
    with pytest.raises(ValueError, match=r"q float32\[32,8,4\], .*: must be \[B T N H\]"):
        context.ring_attention(*(x[0] for x in operands(2)[:3]))


D, L = 8, 2
WEIGHTS = {"q": "L D N/tensor H", "k": "L D K/tensor H", "v": "L D K/tensor H", "out": "L N/tensor H D"}
POLICIES = {
    "everything": None,
    "saved": jax.checkpoint_policies.save_only_these_names(*remat.BLOCKWISE, *remat.ULYSSES),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def weights(K):
    shapes = (L, D, N, H), (L, D, K, H), (L, D, K, H), (L, N, H, D)
    return {name: normal(seed, *shape) / 4 for seed, (name, shape) in enumerate(zip(WEIGHTS, shapes, strict=True))}


def layers(attention, policy, axes=()):
    """-> function of x[B T D], stacked weights -> sum of squares after L layers, and its gradients.

    axes: mesh axes of the batch; () on one device.
    """

    def layer(x, w):
        heads = [tensor.column(tensor.enter(x, "tensor" if axes else None, False), w[name]) for name in "qkv"]
        return x + tensor.row(attention(*heads), w["out"], "tensor" if axes else None, False)

    run = layer if POLICIES[policy] is None else jax.checkpoint(layer, policy=POLICIES[policy])

    def total(x, w):
        y = jax.lax.scan(lambda x, w: (run(x, w), None), x, w)[0]
        return jax.lax.psum((y**2).sum(), axes) if axes else (y**2).sum()

    return jax.value_and_grad(total, argnums=(0, 1))


@pytest.mark.parametrize(
    "case",
    cover(
        [("ring", "saved"), ("gather", "everything"), ("ulysses", "nothing")],
        [
            ("ring", "everything"),
            ("gather", "nothing"),
            ("ring", "nothing"),
            ("gather", "saved"),
            ("ulysses", "everything"),
        ],
    ),
)
def test_layers_with_remat_on_data_context_and_tensor_equal_one_device(case):
    kind, policy = case
    mesh = meshes.make(data=2, context=2, tensor=2)
    order, inverse = orders(kind, T, 2)
    x, w = normal(9, B, T, D), weights(2)
    specs = layout("B/data T/context D"), {name: layout(text) for name, text in WEIGHTS.items()}
    run = jax.jit(on(mesh, layers(ATTENTION[kind], policy, ("data", "context")), specs, (P(), specs)))
    program = run.lower(x[:, order], w).compile()
    placed = jax.device_put((x[:, order], w), jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))
    loss, (dx, dw) = program(*placed)
    expected_loss, (expected_dx, expected_dw) = jax.jit(layers(one_device_attention, "everything"))(x, w)
    close([loss, dx[:, inverse]], [expected_loss, expected_dx], 2e-6)
    close([dw[name] for name in WEIGHTS], [expected_dw[name] for name in WEIGHTS], 2e-6)
    sizes = kind, 2, N // 2, 2 // 2, B // 2 * T // 2 * H * 4  # devices, heads of a device, bytes of one
    again = policy == "nothing" or (policy == "saved" and kind == "ulysses")
    found = [c for c in wire.collectives(program.as_text(), mesh.shape) if c.operation != "all_reduce"]
    expected = (1 + again) * forward_bytes(*sizes) + backward_bytes(*sizes)
    assert sum(c.bytes * c.count for c in found) == L * expected


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_the_global_lse_and_output_take_the_place_of_those_of_a_block(kind, monkeypatch):
    imitated_cudnn.use(monkeypatch)
    order, inverse = orders(kind, T, 4)
    run = jax.jit(on(mesh_of(4), with_gradients(partial(ATTENTION[kind], kernel="cudnn"))))
    found = [x[:, inverse] for x in run(*(x[:, order] for x in operands(2)))]
    close(found, one_device(2))


def test_a_pullback_with_other_leaves_is_refused_in_one_line(monkeypatch):
    def plain(q, k, v, mask, is_causal, implementation):
        return jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k)) @ v.transpose(0, 2, 1, 3)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    arrays = [jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)] * 3
    with pytest.raises(RuntimeError, match=r"pullback of cuDNN attention holds .*: must be .*; use") as error:
        jax.eval_shape(partial(attention_block.attend, is_causal=True, kernel="cudnn"), *arrays)
    assert "\n" not in str(error.value)


LONG, HEADS, KEY_HEADS, WIDTH = 131_072, 32, 8, 128  # Llama-3-8B; no other dim is as long as a chunk
GPU_CASES = cover([("ring", 8), ("gather", 8), ("ulysses", 8)], [("ring", 2), ("ring", 4), ("gather", 2)])


@cache
def program_for_h100s(kind, size):
    mesh = meshes.make(data=1, context=size, devices=topology.compile_only("h100", size))

    def run(q, k, v):
        y, pull = jax.vjp(partial(ATTENTION[kind], kernel="cudnn"), q, k, v)
        return pull(y)  # a gradient that comes after the forward, as in training

    arrays = [
        jax.ShapeDtypeStruct((1, LONG, heads, WIDTH), jnp.bfloat16, sharding=jax.NamedSharding(mesh, ROWS))
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    options = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    return jax.jit(on(mesh, run)).lower(*arrays).compile(compiler_options=options)


def attention_kernels(text):
    """How often a program runs cuDNN attention: forward, backward."""
    program, counts = hlo.parse(text), [0, 0]
    for name, index, times in hlo.walk(program):
        target = re.search(r'custom_call_target="(__cudnn[^"]*)"', program.computations[name][index].attributes)
        if target:
            counts["Backward" in target[1]] += times
    return tuple(counts)


@needs_cuda_compiler
@pytest.mark.parametrize("case", GPU_CASES)
def test_on_h100s_a_hop_is_one_attention_kernel_and_scores_are_never_in_memory(case):
    kind, size = case
    compiled = program_for_h100s(*case)
    hops = 1 if kind == "ulysses" else size
    assert attention_kernels(compiled.as_text()) == (hops, hops)
    assert " conditional(" not in compiled.as_text()  # every device runs the same kernels
    chunk = LONG // size // 2
    shapes = [[int(n) for n in dims.split(",") if n] for _, dims in hlo.ARRAY.findall(compiled.as_text())]
    assert max(max(shape, default=0) for shape in shapes) >= chunk
    assert not [shape for shape in shapes if sum(dim >= chunk for dim in shape) > 1]
    assert compiled.memory_analysis().temp_size_in_bytes < HEADS * chunk**2 * 4 / 2


@needs_cuda_compiler
@pytest.mark.parametrize("case", GPU_CASES)
def test_on_h100s_all_travels_behind_attention_but_the_gradients_on_their_way_home(case):
    kind, size = case
    found = wire.collectives(program_for_h100s(*case).as_text(), {"context": size})
    head = LONG // size * WIDTH * 2
    sizes = kind, size, HEADS, KEY_HEADS, head
    assert sum(c.bytes * c.count for c in found) == forward_bytes(*sizes) + backward_bytes(*sizes, itemsize=2)
    home = {"ring": ("permute", 4), "gather": ("reduce_scatter", 4 * (size - 1))}
    if kind in home:  # flops: of matmuls, and attention is the only one
        operation, heads = home[kind]
        late = [(c.operation, c.bytes, c.count) for c in found if not c.flops]
        assert late == [(operation, heads * KEY_HEADS * head, 1)]


@needs_cuda_compiler
def test_the_pullback_of_cudnn_attention_holds_its_operands_and_the_backward_takes_others():
    (device,) = topology.compile_only("h100", 1)
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = {"q": (1, 64, 4, 64), "k": (1, 64, 2, 64), "v": (1, 64, 2, 64), "out": (1, 64, 4, 64), "lse": (1, 64, 4)}
    arrays = {
        name: jax.ShapeDtypeStruct(s, jnp.float32 if name == "lse" else jnp.bfloat16, sharding=sharding)
        for name, s in shapes.items()
    }

    def backward(arrays, g):
        inputs = arrays["q"], arrays["k"], arrays["v"]
        pullback = attention_block.cudnn_pullback(*inputs, True)
        wanted = *inputs, pullback.leaves[pullback.lse_at], pullback.out
        assert all(any(leaf is x for leaf in pullback.leaves) for x in wanted)
        assert sum(leaf.size > 0 for leaf in pullback.leaves) == len(wanted)
        return attention_block.attend_backward(attention_block.Residuals(**arrays), g, True, "cudnn")

    text = jax.jit(backward).lower(arrays, arrays["q"]).compile().as_text()
    assert attention_kernels(text) == (0, 1)  # its forward is dead code
    entry = hlo.parse(text)
    parameters = [i for i in entry.computations[entry.entry] if i.opcode == "parameter"]
    assert len(parameters) == 6  # the lse and output given are used: jit drops what is not
