"""Named scopes: each part of a layer, each collective and each phase is named in the compiled program."""

import re

import pytest
from conftest import resolved, small

from nanotrain_jax.audit import wire
from nanotrain_jax.step import build as steps

PARTS = "embed", "layer", "norm", "attention", "kernel", "rotary", "mlp", "loss", "clip", "update"


def compiled_text(**sections):
    config, mesh = resolved(small("llama", **sections))
    step = steps.build(config, mesh)
    return step.train.lower(step.state, step.batch).compile().as_text(), mesh


@pytest.fixture(scope="module")
def sharded():
    return compiled_text(parallel={"data": 2, "tensor": 2, "context": 2, "zero": 3, "persist_below": 16})


def scopes(text):
    """Every word of every op_name."""
    return {word for name in re.findall(r'op_name="([^"]*)"', text) for word in re.findall(r"\w+", name)}


def test_every_part_and_phase_of_a_step_has_its_name(sharded):
    text, _ = sharded
    assert not set(PARTS) - scopes(text)
    of_attention = [name for name in re.findall(r'op_name="([^"]*)"', text) if "/attention/" in name]
    assert any("transpose(jvp(" in name for name in of_attention)  # its backward
    assert any("transpose(jvp(" not in name for name in of_attention)


def test_every_collective_is_named_after_its_axes(sharded):
    """Also the transposes that autodiff makes: those have the name of what they are the transpose of."""
    text, mesh = sharded
    found = wire.collectives(text, mesh.shape)
    assert {"tensor", "data", "context"} <= {axis for c in found for axis in c.axes}
    for c in found:
        named = re.findall(r"(?:all_reduce|all_gather|reduce_scatter|all_to_all|all_max|shift)((?:_[a-z]+)+)", c.source)
        assert named and set(c.axes) <= {axis for axes in named for axis in axes.split("_")}, c


@pytest.mark.long
def test_a_pipeline_names_its_units_with_and_without_idle_branches():
    sizes = {"pipe": 2, "data": 2, "microbatches": 2}
    for idle, prefix in (("skip", "at_most_once_"), ("mask", "")):
        names = scopes(compiled_text(parallel=sizes | {"idle": idle})[0])
        assert {prefix + "forward", prefix + "backward", "shift_pipe"} <= names
