"""The law of collectives in programs for simulated devices: none is beside a loop or branch with others, unless one
depends on the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case
from conftest import cover, in_order, resolved
from jax import lax
from jax.sharding import PartitionSpec as P

from nanotrain_jax.audit import collective_order
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.cpu_order import in_order as ordered
from nanotrain_jax.step import build as steps

# A loop over (turn, x, kept) that sums x over devices and passes kept on, and two branches of which one sums.
CALLED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (carry: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %carry = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%carry), index=0
  %inner = f32[4]{0} get-tuple-element(%carry), index=1
  %kept = f32[4]{0} get-tuple-element(%carry), index=2
  %summed = f32[4]{0} all-reduce(%inner), replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (s32[], f32[4]{0}, f32[4]{0}) tuple(%turn, %summed, %kept)
}

%condition (carry: (s32[], f32[4], f32[4])) -> pred[] {
  %carry = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  ROOT %more = pred[] constant(false)
}

%sums (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %summed = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}

%nothing (x: f32[4]) -> f32[4] {
  ROOT %x = f32[4]{0} parameter(0)
}

%calls (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %called = f32[4]{0} call(%x), to_apply=%sums
}

ENTRY %main (x: f32[4], which: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %which = s32[] parameter(1)
"""
LOOP = [
    "start = (s32[], f32[4]{0}, f32[4]{0}) tuple(%which, %x, %x)",
    "loop = (s32[], f32[4]{0}, f32[4]{0}) while(%start), condition=%condition, body=%body",
    "result = f32[4]{0} get-tuple-element(%loop), index=1",
    "passed = f32[4]{0} get-tuple-element(%loop), index=2",
]


def found(*lines):
    """Names of the unordered pairs of a program whose entry computation has these instructions."""
    text = "HloModule m, is_scheduled=true\n" + CALLED + "".join(f"  %{line}\n" for line in lines) + "}\n"
    return [(pair.first.name, pair.second.name) for pair in collective_order.unordered(text)]


def branch(operand, computation="sums"):
    return f"branch = f32[4]{{0}} conditional(%which, %{operand}, %x), branch_computations={{%nothing, %{computation}}}"


def shift(operand, more=""):
    return f"shift = f32[4]{{0}} collective-permute(%{operand}), source_target_pairs={{{{0,1}},{{1,0}}}}{more}"


def test_a_collective_beside_a_loop_that_holds_one_is_found_in_either_order():
    assert found(*LOOP, shift("x")) == [("loop", "shift")]
    assert found(shift("x"), *LOOP) == [("shift", "loop")]
    assert found(*LOOP, shift("passed")) == [("loop", "shift")]  # the loop does not write what it passes on


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0},{1}}", 1),
        ("{{0,1}}", 2),
        ("[2,1]<=[2]", 1),
        ("[1,2]<=[2]", 2),
        ("mesh['data'=2,'tensor'=1] {'tensor'}", 1),
        ("mesh['data'=2,'tensor'=1] {'data','tensor'}", 2),
    ],
)
def test_a_collective_of_one_device_waits_for_no_other(groups, size):
    alone = f"total = f32[4]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    assert found(*LOOP, alone) == [("loop", "total")] * (size - 1)


def test_what_depends_on_the_loop_or_it_on_that_is_in_order():
    half = "half = f32[4]{0} multiply(%result, %x)"
    assert found(*LOOP, half, shift("half")) == []
    assert found(shift("x"), LOOP[0].replace("%x)", "%shift)"), *LOOP[1:]) == []
    assert found(*LOOP, shift("x", ", control-predecessors={%loop}")) == []


def test_branches_and_calls_are_as_loops_where_they_hold_a_collective():
    assert found(branch("x"), shift("x")) == [("branch", "shift")]
    assert found(branch("x", "calls"), shift("x")) == [("branch", "shift")]
    assert found("call = f32[4]{0} call(%x), to_apply=%calls", branch("x")) == [("call", "branch")]
    assert found(*LOOP, branch("x")) == [("loop", "branch")]
    assert found(*LOOP, branch("result"), shift("branch")) == []
    assert found(branch("x", "nothing"), shift("x")) == []
    assert found(shift("x"), "sum = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add") == []


def summed(x_N):
    return lax.pcast(lax.psum(x_N, "data"), "data", to="varying")


def beside(turns, x_N):
    """A loop that sums over data, and a shift that does not depend on it."""
    return lax.fori_loop(0, turns[0], lambda _, y_N: summed(y_N), x_N), lax.ppermute(x_N, "data", [(0, 1), (1, 0)])


def after_zeros(turns, x_N):
    """A shift of what a loop that sums only adds zeros to."""

    def turn(_, sums):
        return summed(sums[0]), sums[1] + jnp.zeros_like(sums[1])

    y_N, z_N = lax.fori_loop(0, turns[0], turn, (x_N, jnp.cos(x_N)))
    return y_N, lax.ppermute(z_N, "data", [(0, 1), (1, 0)])


def out_of_a_loop(turns, x_N):
    """Two loops, of which one sums the same in each turn."""

    def turn(_, y_N):
        return jnp.cos(y_N) + lax.all_gather(x_N, "data").sum(0)

    return lax.fori_loop(0, turns[0], turn, x_N), lax.fori_loop(0, turns[0], lambda _, y_N: summed(y_N), x_N)


def after_the_loop(turns, x_N):
    y_N = lax.fori_loop(0, turns[0], lambda _, y_N: summed(y_N), x_N)
    return summed(y_N), lax.pcast(lax.pmax(y_N, "data"), "data", to="varying")


def lowered(function):
    mapped = jax.shard_map(function, mesh=meshes.make(data=2), in_specs=P("data"), out_specs=P("data"))
    return jax.jit(mapped).lower(jnp.asarray([2, 2]), jnp.asarray([-0.0, jnp.nan, 3.0, jnp.inf]))


@pytest.mark.parametrize("function", [beside, after_zeros, out_of_a_loop])
def test_what_xla_would_run_in_either_order_is_ordered_and_no_bit_changes(function):
    plain, changed = lowered(function).compile(), lowered(ordered(function)).compile()
    assert collective_order.unordered(plain.as_text())
    assert collective_order.unordered(changed.as_text()) == []
    arguments = jnp.asarray([2, 2]), jnp.asarray([-0.0, jnp.nan, 3.0, jnp.inf])
    arguments = [jax.device_put(x, s) for x, s in zip(arguments, plain.input_shardings[0], strict=True)]
    for x, y in zip(plain(*arguments), changed(*arguments), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))


def test_a_program_in_order_is_not_changed():
    assert lowered(ordered(after_the_loop)).as_text() == lowered(after_the_loop).as_text()


LAYERS = {"num_layers": 8}
EACH = {"persist_below": 64, "bucket_mb": 0.0}  # a gather and a scatter for each array
COVER = [
    case("pipe 4 tensor 2", model={"num_layers": 6}, microbatches=8, vocab_over_pipe=True, schedule="zero_bubble"),
    case("pipe 2 data 2 tensor 2", model=LAYERS, remat="full", microbatches=4, zero=3, prefetch=True, **EACH),
    case("data 2 tensor 4", zero=3, overlap_tensor=True, **EACH),
    case("replica 2 data 2 tensor 2", zero=3, sync_every=5, **EACH),
]
MORE = [
    case("data 2 context 2 tensor 2", zero=2, microbatches=2, **EACH),
    case("pipe 4", model=LAYERS, microbatches=8, vocab_over_pipe=True),
    case("pipe 4 data 2", model=LAYERS, microbatches=8, vocab_over_pipe=True, schedule="interleaved", chunks=2, zero=1),
    case("pipe 4 data 2", model={"num_layers": 5}, microbatches=8, vocab_over_pipe=True, zero=3, **EACH),
    case("pipe 2 data 2 tensor 2", model=LAYERS, microbatches=4, vocab_over_pipe=True, zero=3, **EACH),
    case("pipe 2 data 2 tensor 2", model=LAYERS, remat="block:4", microbatches=4, schedule="zb_h1", zero=1, **EACH),
    case("pipe 2 data 2 tensor 2", model=LAYERS, microbatches=4, zero=1, grad_reduce="per_layer", **EACH),
    case("pipe 2 data 2 tensor 2", model=LAYERS, microbatches=4, zero=3, idle="mask", vocab_over_pipe=True, **EACH),
    case("pipe 2 data 2 tensor 2", model=LAYERS, microbatches=4, zero=3, idle="mask", prefetch=True, **EACH),
    case("pipe 2 data 2 context 2", model=LAYERS, microbatches=4, zero=3, idle="mask", **EACH),
    case("pipe 2 tensor 4", "gpt2", model=LAYERS, microbatches=4, idle="mask", overlap_tensor=True, **EACH),
    case("pipe 2 tensor 2", model=LAYERS, microbatches=8, schedule="interleaved", chunks=2, zero=2),
    case("replica 2 pipe 2 tensor 2", model=LAYERS, microbatches=4, sync_every=5, zero=1, **EACH),
    case("data 4 tensor 2", remat="full", microbatches=2, zero=3, **EACH),
    case("data 2 tensor 4", zero=1, **EACH),
    case("data 2 tensor 2", microbatches=2, zero=1, grad_reduce="per_layer", **EACH),
    case("data 2 tensor 2", remat="block:2", model={"num_layers": 4}, microbatches=2, zero=3, prefetch=True, **EACH),
    case("data 2 tensor 2", microbatches=2, zero=3, prefetch=True, overlap_tensor=True, **EACH),
    case("data 2 context 2 tensor 2", microbatches=2, zero=3, prefetch=True, **EACH),
    case("data 2 context 2 tensor 2", remat="full", zero=3, context_attention="ulysses", **EACH),
    case("data 2 context 2 tensor 2", zero=3, context_attention="gather", **EACH),
    case("replica 2 data 2 tensor 2", zero=2, compress="powersgd:2", **EACH),
]


@pytest.mark.parametrize("layout", cover(COVER[2:3], [*COVER[:2], *COVER[3:], *MORE], str))
@pytest.mark.parametrize("across", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_program_is_in_order(layout, across):
    config, mesh = resolved(layout.tree(data={"attend_across_documents": across}))  # False: a step counts its targets
    step = steps.build(config, mesh)
    programs = [step.train.lower(step.state, step.batch)]
    params = step.state.params
    if step.synchronize:
        programs += [step.synchronize.lower(step.state), step.average.lower(params)]
        params = jax.eval_shape(step.average, params)
    for program in (*programs, step.evaluate.lower(params, step.batch)):
        in_order(program.compile().as_text())
