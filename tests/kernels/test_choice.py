"""Which devices run norms, GELU and softmax by our kernels."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import small

from nanotrain_jax.config import load
from nanotrain_jax.kernels import tiles
from nanotrain_jax.models import device_kernels


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
    assert device_kernels.has_ours(load.parse(tree).model, device) is are_used


@pytest.mark.parametrize("kernels", ["auto", "xla", "pallas"])
def test_a_jax_without_triton_runs_their_twins(monkeypatch, kernels):
    monkeypatch.setattr(tiles, "triton", None)
    tree = small()
    tree["model"]["kernels"] = kernels
    model, device = load.parse(tree).model, SimpleNamespace(platform="gpu", compute_capability="9.0")
    if kernels == "pallas":
        with pytest.raises(ValueError, match=r"model.kernels=pallas needs .*, which jax [\d.]+ lacks; use auto or xla"):
            device_kernels.has_ours(model, device)
    else:
        assert not device_kernels.has_ours(model, device)


def test_imports_with_a_jax_without_triton():
    lines = "import sys", "sys.modules['jax.experimental.pallas.triton'] = None", "import nanotrain_jax.models.decoder"
    subprocess.run([sys.executable, "-c", "; ".join(lines)], check=True)
