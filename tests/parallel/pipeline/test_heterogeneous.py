"""Pipelines of different modules: equal to their plain composition, and what they store."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cover
from different_modules import CLASSES, head, images, init_head, init_patches, modules, one_device
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nanotrain_jax import as_varying, layer_order, run_schedule
from nanotrain_jax.parallel import remat
from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline.heterogeneous import DifferentStages, StageModule
from nanotrain_jax.parallel.pipeline.schedule import SPLIT
from nanotrain_jax.parallel.split_vjp import split_vjp

M, ROWS = 6, 8


def pipelined(stages, schedule, mesh, idle):
    """(rows in model order, images) -> loss, gradients of rows."""

    def body(rows, batch):
        model = stages.layered(as_varying(rows, "data"), lambda losses, batch: losses.sum())
        loss, (_, grads) = run_schedule(schedule, model, batch, idle=idle)
        return lax.psum(loss, ("pipe", "data")), lax.psum(grads, "data")

    run = jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P(None, "data")), out_specs=(P(), P("pipe")))

    def in_order(rows, batch):
        order = layer_order(schedule, len(rows["weights"]))
        loss, grads = jax.jit(run)(jax.tree.map(lambda x: x[order], rows), batch)
        return loss, jax.tree.map(lambda g: g[np.argsort(order)], grads)

    return in_order


def a_mesh(pipe):
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((pipe, 2), ("pipe", "data"), axis_types=types, devices=jax.devices()[: 2 * pipe])


@pytest.fixture(scope="module")
def expected():
    """Loss and gradients of each module's weights, of the plain composition on one device."""
    stages = DifferentStages(modules())
    weights = stages.unpack(stages.init(jax.random.key(0)))
    return jax.jit(jax.value_and_grad(one_device))(weights, images(M, ROWS))


@pytest.mark.parametrize(
    "case",
    cover(
        [],
        [
            ("zero_bubble", 4, 1, "skip"),
            ("1f1b", 4, 1, "skip"),
            *[("gpipe", 4, 1, "skip"), ("1f1b", 2, 1, "skip"), ("1f1b", 1, 1, "skip"), ("zero_bubble", 4, 1, "mask")],
            *[("interleaved", 2, 2, "skip"), ("zero_bubble", 2, 2, "mask"), ("zb_h1", 4, 1, "skip")],
        ],
    ),
)
def test_loss_and_gradients_equal_the_plain_composition(expected, case):
    """One module all-reduces over data, in its branch."""
    name, pipe, chunks, idle = case
    stages = DifferentStages(modules("data"), is_split=name in SPLIT)
    run = pipelined(stages, schedules.make(name, pipe, M, chunks), a_mesh(pipe), idle)
    loss, grads = run(stages.init(jax.random.key(0)), images(M, ROWS))
    true_loss, true_grads = expected
    np.testing.assert_allclose(loss, true_loss, rtol=1e-6)
    for found, true, row in zip(stages.unpack(grads), true_grads, grads["weights"], strict=True):
        errors = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), found, true)
        assert max(jax.tree.leaves(errors)) < 1e-6, errors
        assert not row[sum(g.size for g in jax.tree.leaves(true)) :].any()  # gradients of padding


def matmuls(equations):
    """The number of matmuls in each branch of equations with switches."""
    total = Counter()
    for equation in equations:
        for i, branch in enumerate(equation.params.get("branches", ())):
            total[i] += sum(e.primitive.name in ("dot_general", "conv_general_dilated") for e in branch.jaxpr.eqns)
    return [total[i] for i in range(4)]


PLAIN, REGATHER, FULL = remat.Policy(), remat.Policy(regather=True), remat.Policy(remat.Remat("full"))


def a_backward(is_split, policy=PLAIN):
    """The backward of the layer -> it, its stages."""
    stages = DifferentStages(modules(), is_split=is_split)
    batch = jax.tree.map(lambda x: x[0], images(1, ROWS))
    rows = jax.tree.map(lambda x: x[0], stages.init(jax.random.key(0)))

    def layer(batch, rows, x):
        return remat.checkpointed(lambda x, rows: stages.layer(rows, x, batch), policy)[0](x, rows)

    return split_vjp(layer, batch, rows, stages.first(batch)), stages


def test_each_part_of_a_split_backward_has_its_matmuls():
    """B: gradients of activations (none for images); W: one for each matrix. Not split, one switch has all."""
    parts = a_backward(is_split=True)[0].parts
    assert matmuls(parts.for_x) == [0, 5, 3, 1]
    assert matmuls(parts.for_weights) == [1, 3, 3, 1]
    assert matmuls(a_backward(is_split=False)[0].parts.for_x) == [1, 8, 6, 2]


@pytest.mark.parametrize("policy", cover([], ["regather", "plain"]))
def test_a_slot_holds_the_largest_residuals_not_those_of_all_modules(policy):
    vjp, stages = a_backward(False, REGATHER if policy == "regather" else PLAIN)
    batch = jax.tree.map(lambda x: x[0], images(1, ROWS))
    of_each, x = [], None
    for module, weights in zip(stages.modules, stages.unpack(stages.init(jax.random.key(0))), strict=True):
        of_module = split_vjp(lambda batch, w, x, apply=module.apply: apply(w, x, batch), batch, weights, x)
        of_each.append(sum(r.size for r in of_module.residuals if r.dtype == jnp.float32))
        x = module.apply(weights, x, batch)
    stored = sum(r.size for r in vjp.residuals if r.dtype == jnp.float32)
    assert stored == max(of_each) + 1  # and the number of the module
    assert stored < sum(of_each) / 2


def test_with_full_rematerialization_a_slot_holds_the_largest_activation():
    vjp, _ = a_backward(True, FULL)
    assert sorted(r.size for r in vjp.residuals) == [1, ROWS * 16 * 16]


def test_rows_are_as_long_as_the_longest_and_hold_the_weights_of_each_module():
    stages = DifferentStages(modules(), multiple_of=96)
    rows = stages.init(jax.random.key(0))
    longest = 24 + 24 * 80 + 80 * 24 + 16 * 24
    assert rows["weights"].shape == (4, -(-longest // 96) * 96)
    key = jax.random.split(jax.random.key(0), 4)[3]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), stages.unpack(rows)[3], init_head(key))


def in_integers(w, x, batch):
    return jnp.ones((2, 3), jnp.int32)


def too_wide(w, x, batch):
    return {"tokens": jnp.ones((2, 7)), "mean": jnp.ones((2, 3))}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (in_integers, r"module second returns int32\[2, 3\]: only floats travel between stages"),
        (too_wide, r"module head does not take the output of module second, float32\[2, 3\], float32\[2, 7\]: "),
    ],
)
def test_modules_that_do_not_fit_say_so_in_one_line(second, message):
    stages = DifferentStages([StageModule("second", init_patches, second), StageModule("head", init_head, head)])
    with pytest.raises(ValueError, match=message) as error:
        stages.check({"label": jax.ShapeDtypeStruct((2,), jnp.int32)})
    assert "\n" not in str(error.value)


def test_a_wrong_number_of_stages_or_type_of_weights_says_so_in_one_line():
    stages = DifferentStages(modules()[:3])
    run = pipelined(stages, schedules.make("1f1b", 2, M), a_mesh(2), "skip")
    rows = {"weights": jnp.zeros((4, 5120))}
    with pytest.raises(ValueError, match="3 modules, but 2 stages x 2 rows = 4; use a number of stages that divides 3"):
        jax.eval_shape(run, rows, images(M, ROWS))
    stages = DifferentStages([StageModule("half", lambda key: {"w": jnp.ones(CLASSES, jnp.float16)}, head)])
    with pytest.raises(ValueError, match="module half: the weight w is float16; use float32"):
        stages.init(jax.random.key(0))
