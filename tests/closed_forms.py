"""The closed forms of FLOPs and bytes against a compiled step."""

from collections import Counter

import pytest
from conftest import compiled_text

from nanotrain_jax.audit import matmuls, wire
from nanotrain_jax.costs import communication, flops


def has_flops_and_bytes_of_the_closed_forms(step, scalars):
    """scalars: bytes of each axis and kind of collective that the closed forms leave out."""
    config, mesh = step.plan.config, step.plan.mesh
    text, rates = compiled_text(step), communication.conditional_rates(config)
    assert matmuls.flops(text, rates) == pytest.approx(flops.step_flops(config), rel=1e-9)
    theory, found = Counter(), Counter()
    for row in communication.communication(config):
        theory[row["axis"], row["op"]] += row["bytes_per_device"]
    for row in wire.summary(wire.collectives(text, mesh.shape, rates)):
        found[row["axis"], row["op"]] += row["bytes_per_device"]
    for key in theory.keys() | found.keys():
        assert found[key] == pytest.approx(theory[key], abs=scalars), key
