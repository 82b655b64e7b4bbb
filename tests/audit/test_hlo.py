"""The HLO parser, on programs with known collectives and FLOPs."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_cuda_compiler
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import hlo, matmuls, topology, traffic, wire
from nanotrain_jax.parallel import mesh as meshes

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def compiled(function, in_specs, out_specs, *shapes, **sizes):
    """Return HLO text and mesh axes of a function of local blocks, compiled for simulated devices."""
    mesh = meshes.make(**sizes)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    return mapped.lower(*shapes).compile().as_text(), mesh.shape


def only(text, axes):
    (found,) = wire.collectives(text, axes)
    return found


@pytest.mark.parametrize(
    ("name", "function", "out", "operation", "bytes_sent"),
    [
        ("psum", lambda x: jax.lax.psum(x, "data"), P(None, "tensor"), "all_reduce", 2 * 3 / 4 * 2 * 64 * 4),
        (
            "all_gather",
            lambda x: jax.lax.all_gather(x, "data", tiled=True),
            P("data", "tensor"),
            "all_gather",
            3 / 4 * 8 * 64 * 4,
        ),
        (
            "reduce_scatter",
            lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
            P("data", "tensor"),
            "reduce_scatter",
            3 / 4 * 2 * 64 * 4,
        ),
        (
            "all_to_all",
            lambda x: jax.lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True),
            P("data", "tensor"),
            "all_to_all",
            3 / 4 * 2 * 64 * 4,
        ),
        (
            "ppermute",
            lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
            P("data", "tensor"),
            "permute",
            2 * 64 * 4,
        ),
    ],
)
def test_each_collective_is_parsed_with_its_axis_and_wire_bytes(name, function, out, operation, bytes_sent):
    found = only(*compiled(function, P("data", "tensor"), out, X, data=4, tensor=2))
    assert (found.operation, found.axes, found.bytes, found.count) == (operation, ("data",), bytes_sent, 1)
    assert name in found.source


def test_an_all_reduce_over_several_axes_names_all_but_those_of_size_one():
    text, axes = compiled(
        lambda x: jax.lax.psum(x, ("replica", "tensor", "context")),
        P(("replica", "data"), ("context", "tensor")),
        P("data"),
        X,
        replica=2,
        data=2,
        tensor=2,
    )
    assert only(text, axes).axes == ("replica", "tensor")


def test_instructions_in_loops_count_once_per_iteration():
    def nested(x, w):
        def inner(x, _):
            return jax.lax.psum_scatter(x @ w, "data", scatter_dimension=1, tiled=True) @ w[:32], None

        def outer(x, _):
            return jax.lax.scan(inner, x, length=5)[0] @ w, None

        return jax.lax.scan(outer, x, length=3)[0]

    shapes = X, jax.ShapeDtypeStruct((128, 128), jnp.float32)
    text, axes = compiled(nested, (P("data"), P()), P("data"), *shapes, data=4)
    assert only(text, axes).count == 15
    assert matmuls.flops(text) == 2 * 2 * 128 * (15 * 128 + 15 * 32 + 3 * 128)


def test_a_loop_without_a_known_trip_count_is_an_error_if_it_communicates():
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jax.lax.psum(x, "data") / 3, x)

    text, axes = compiled(until, P(), P(), X, data=2)
    with pytest.raises(ValueError, match=r"no known trip count"):
        wire.collectives(text, axes)


MESH = {"pipe": 1, "replica": 2, "data": 4, "context": 1, "tensor": 2}
GROUPS = {
    "{{0,2,4,6},{1,3,5,7},{8,10,12,14},{9,11,13,15}}": ("data",),
    "{{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}": ("tensor",),
    "[2,8]<=[16]": ("data", "tensor"),
    "[8,2]<=[2,8]T(1,0)": ("replica",),
    "[1,16]<=[16]": ("replica", "data", "tensor"),
    "mesh['pipe'=1,'replica'=2,'data'=4,'context'=1,'tensor'=2] {'replica','context'}": ("replica",),
}


def module(groups, attributes="", between=""):
    """A GPU program around one asynchronous all-reduce, as XLA prints it."""
    return f"""HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[8,16], y: bf16[4]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  %y = bf16[4]{{0}} parameter(1)
  %ar = (f32[8,16]{{1,0}}, /*index=1*/bf16[4]{{0}}) all-reduce-start(%x, %y), replica_groups={groups}{attributes}
  {between}
  %done = (f32[8,16]{{1,0}}, bf16[4]{{0}}) all-reduce-done(%ar)
  ROOT %out = f32[8,16]{{1,0}} get-tuple-element(%done), index=0
}}
"""


@pytest.mark.parametrize(("groups", "axes"), GROUPS.items())
def test_replica_groups_are_parsed_in_every_form_of_xla(groups, axes):
    found = only(module(groups), MESH)
    size = {"replica": 2, "data": 4, "tensor": 2}
    group = 1
    for axis in axes:
        group *= size[axis]
    assert (found.axes, found.bytes) == (axes, 2 * (group - 1) / group * (8 * 16 * 4 + 4 * 2))


def test_a_replica_group_that_spans_no_mesh_axes_is_an_error():
    with pytest.raises(ValueError, match=r"\[0, 5\]: must span whole axes"):
        wire.collectives(module("{{0,5},{1,4}}"), MESH)


WORK = "%f = f32[8,16]{1,0} fusion(%x), kind=kLoop, calls=%add"
MATMUL = "%f = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


def test_matmuls_between_start_and_done_are_counted():
    assert only(module("{{0,1}}", between=MATMUL), {"data": 2}).flops == 2 * 8 * 8 * 16
    assert only(module("{{0,1}}", between=WORK), {"data": 2}).flops == 0


@pytest.mark.parametrize(
    ("between", "attributes", "exposed"),
    [
        ("", "", True),
        (WORK, "", False),
        ("%f = f32[128]{0} bitcast(%x)", "", True),
        (WORK, ', backend_config={"collective_backend_config":{"is_sync":true}}', True),
    ],
)
def test_a_collective_is_exposed_without_compute_between_its_start_and_done(between, attributes, exposed):
    assert only(module("{{0,1}}", attributes=attributes, between=between), {"data": 2}).exposed is exposed


def test_the_summary_groups_by_axis_and_operation():
    found = [
        wire.Collective("all_gather", ("data",), 10.0, 3, True, 0.0, ""),
        wire.Collective("all_gather", ("data",), 5.0, 2, False, 7.0, ""),
        wire.Collective("all_reduce", ("data",), 100.0, 1, False, 0.0, ""),
    ]
    columns = "axis", "op", "bytes_per_device", "count", "exposed_bytes", "behind_matmuls_bytes"
    assert [tuple(row[c] for c in columns) for row in wire.summary(found)] == [
        ("data", "all_reduce", 100.0, 1, 0.0, 0.0),
        ("data", "all_gather", 40.0, 5, 30.0, 10.0),
    ]


def test_bytes_of_hlo_types():
    assert hlo.size("bf16[8,128]{1,0:T(8,128)}") == 2048
    assert hlo.size("(f32[2]{0}, (s8[3], pred[5]), f8e4m3fn[7], token[], u32[])") == 8 + 3 + 5 + 7 + 0 + 4


@needs_cuda_compiler
@pytest.mark.parametrize(("window", "keys"), [(None, 1024), (256, 256)])
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
def test_cudnn_attention_counts_the_keys_of_its_window(window, keys):
    mesh = meshes.make(data=1, devices=topology.compile_only("h100", 1))
    x = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16, sharding=jax.NamedSharding(mesh, P()))

    def run(q, k, v):
        reach = (window - 1, 0) if window else None
        attention = partial(
            jax.nn.dot_product_attention, is_causal=True, local_window_size=reach, implementation="cudnn"
        )
        y, pull = jax.vjp(attention, q, k, v)
        return pull(y)

    text = jax.jit(run).lower(x, x, x).compile().as_text()
    assert matmuls.flops(text) == (2 + 4) * 2 * 2 * 4 * 1024 * keys * 64


KERNELS = """HloModule m

%nothing () -> s32[] {
  ROOT %zero = s32[] constant(0)
}

ENTRY %main (x: bf16[128,64], w: bf16[8,64,32], g: bf16[128,32], sizes: s32[8]) -> bf16[8,64,32] {
  %x = bf16[128,64]{1,0} parameter(0)
  %w = bf16[8,64,32]{2,1,0} parameter(1)
  %g = bf16[128,32]{1,0} parameter(2)
  %sizes = s32[8]{0} parameter(3)
  %t = bf16[64,128]{1,0} transpose(%x), dimensions={1,0}
  %y = bf16[128,32]{1,0} custom-call(%x, %w, %sizes), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jvp(as_needed_rows)/eval_jaxpr/ragged_dot_sm90/mpmd_map"}
  %other = bf16[128,32]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/softmax"}
  ROOT %d = bf16[8,64,32]{2,1,0} custom-call(%sizes, %sizes, %t, %g), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/transpose(jvp(as_needed_rows))/ragged_contracting_dim_dot_sm90/mpmd_map"}
}
"""  # noqa: E501


def test_a_kernel_for_groups_counts_the_rows_that_groups_have():
    one = 2 * 128 * 64 * 32
    assert matmuls.flops(KERNELS) == 2 * one
    assert matmuls.flops(KERNELS, {"rows": Fraction(3, 4)}) == 1.5 * one
    moved = {kernel.name: kernel.bytes for kernel in traffic.kernels(KERNELS)}
    assert moved["y"] == 2 * (128 * 64 + 8 * 64 * 32 + 128 * 32) + 4 * 8
