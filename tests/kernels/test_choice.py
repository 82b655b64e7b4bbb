"""Which devices run norms, GELU and softmax by our kernels."""

from types import SimpleNamespace

import pytest
from conftest import small

from nanotrain_jax.config import load
from nanotrain_jax.models.decoder import uses_kernels


@pytest.mark.parametrize(
    ("platform", "capability", "kernels", "are_used"),
    [
        ("gpu", "9.0", "auto", True),
        ("gpu", "8.0", "auto", True),
        ("gpu", "7.5", "auto", False),  # Triton needs Ampere
        ("cpu", None, "auto", False),
        ("gpu", "9.0", "xla", False),
        ("cpu", None, "pallas", True),  # there their twins run
    ],
)
def test_kernels_are_for_gpus_that_triton_compiles_for(platform, capability, kernels, are_used):
    tree = small()
    tree["model"]["kernels"] = kernels
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert uses_kernels(load.parse(tree).model, device) is are_used
