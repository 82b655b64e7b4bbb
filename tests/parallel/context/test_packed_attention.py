"""Attention within documents: on one device and over context it is that of each document alone."""

from functools import partial

import imitated_cudnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cover, needs_cuda_compiler
from jax.sharding import PartitionSpec as P
from test_context import (
    ATTENTION,
    ROWS,
    B,
    H,
    N,
    T,
    attention_kernels,
    close,
    mesh_of,
    on,
    one_device,
    operands,
    orders,
)

from nanotrain_jax.audit import hlo, topology
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.context.context import starts_of_window
from nanotrain_jax.parallel.context.packed_attention import packed_attention

CUTS = 3, 4, 15, 16, 27  # where documents begin after the first, in and between chunks; one has a single token
STARTS = np.maximum.accumulate([t if t in CUTS else 0 for t in range(T)]).astype(np.int32)


def starts(rows=B):
    return jnp.broadcast_to(STARTS, (rows, T))


def gradients_with(attention):
    """-> function of q, k, v, g, starts -> y, dq, dk, dv"""

    def run(q, k, v, g, starts):
        y, pull = jax.vjp(lambda q, k, v: attention(q, k, v, starts), q, k, v)
        return y, *pull(g)

    return run


@pytest.mark.parametrize("kernel", ["xla", "cudnn"])
@pytest.mark.parametrize("chunk", cover([1, 4, 16], [2, 8, 100], str))
def test_a_packed_row_is_its_documents(chunk, kernel, monkeypatch):
    if kernel == "cudnn":
        imitated_cudnn.use(monkeypatch)
    run = gradients_with(partial(packed_attention, kernel=kernel, chunk=chunk))
    close(jax.jit(run)(*operands(2), starts()), one_device(2, tuple(STARTS)))


def test_rows_differ():
    """Each row of a batch has its own documents."""
    both = jnp.stack([starts(1)[0], jnp.zeros(T, jnp.int32)])
    run = jax.jit(gradients_with(partial(packed_attention, kernel="xla", chunk=4)))
    for found, packed, whole in zip(run(*operands(2), both), one_device(2, tuple(STARTS)), one_device(2), strict=True):
        close([found[0], found[1]], [packed[0], whole[1]])


@pytest.mark.parametrize("kernel", ["xla", "cudnn"])
@pytest.mark.parametrize(
    "case",
    cover([("ring", 4), ("gather", 2), ("ulysses", 4)], [("ring", 2), ("ring", 8), ("gather", 8), ("ulysses", 2)]),
)
def test_documents_over_context_are_those_of_one_device(case, kernel, monkeypatch):
    kind, size = case
    order, inverse = orders(kind, T, size)
    if kernel == "cudnn":
        imitated_cudnn.use(monkeypatch)

    def attention(q, k, v, starts):
        return ATTENTION[kind](q, k, v, kernel=kernel, starts_BT=starts)

    run = jax.jit(on(mesh_of(size), gradients_with(attention), (*[ROWS] * 4, P())))
    found = run(*(x[:, order] for x in operands(2)), starts())
    close([x[:, inverse] for x in found], one_device(2, tuple(STARTS)))


@pytest.mark.parametrize("case", [("ring", 4, "xla"), ("ulysses", 2, "cudnn")])
def test_a_window_within_documents_is_starts(case, monkeypatch):
    kind, size, kernel = case
    order, inverse = orders(kind, T, size)
    if kernel == "cudnn":
        imitated_cudnn.use(monkeypatch)

    def attention(q, k, v, starts):
        return ATTENTION[kind](q, k, v, kernel=kernel, starts_BT=starts_of_window(6, starts.shape, starts))

    run = jax.jit(on(mesh_of(size), gradients_with(attention), (*[ROWS] * 4, P())))
    found = run(*(x[:, order] for x in operands(2)), starts())
    seen = np.maximum(STARTS, np.arange(T) - 5)
    close([x[:, inverse] for x in found], one_device(2, tuple(seen)))


def test_odd_rows_are_one_line():
    arrays = [jax.ShapeDtypeStruct((1, 7, N, H), jnp.float32)] * 3
    with pytest.raises(ValueError, match=r"rows of 7 tokens: .* use an even number") as error:
        jax.eval_shape(partial(packed_attention, kernel="xla"), *arrays, jax.ShapeDtypeStruct((1, 7), jnp.int32))
    assert "\n" not in str(error.value)


@needs_cuda_compiler
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_on_h100s_memory_of_masks_is_that_of_blocks(kind):
    """ulysses, as one device: O(T). ring: of the tokens of a device. Exactly one kernel a hop, as without documents."""
    size, heads, width = 2, 8, 128
    mesh = meshes.make(data=1, context=size, devices=topology.compile_only("h100", size))

    def temporary(tokens):
        rows = jax.ShapeDtypeStruct((1, tokens, heads, width), jnp.bfloat16, sharding=jax.NamedSharding(mesh, ROWS))
        sequence = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=jax.NamedSharding(mesh, P()))

        def attention(q, k, v, starts):
            return ATTENTION[kind](q, k, v, kernel="cudnn", starts_BT=starts)

        run = on(mesh, gradients_with(attention), (*[ROWS] * 4, P()))
        return jax.jit(run).lower(*[rows] * 4, sequence).compile()

    small, large = temporary(8192), temporary(16384)
    assert attention_kernels(large.as_text()) == ((8, 8) if kind == "ulysses" else (2, 2))
    shapes = [[int(n) for n in dims.split(",") if n] for _, dims in hlo.ARRAY.findall(large.as_text())]
    limit = 4096 if kind == "ulysses" else 16384
    assert not [shape for shape in shapes if sum(dim >= limit for dim in shape) > 1]
    if kind == "ulysses":
        bytes_of = [program.memory_analysis().temp_size_in_bytes for program in (small, large)]
        assert bytes_of[1] == pytest.approx(2 * bytes_of[0], rel=0.05)
