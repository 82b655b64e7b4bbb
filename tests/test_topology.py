"""Accelerators that are not here."""

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_cuda_compiler

from nanotrain_jax import mesh as meshes
from nanotrain_jax.audit import topology


def test_the_peak_of_a_device_is_found_by_its_name():
    assert topology.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert topology.peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert topology.peak_flops("cpu") is None


@pytest.mark.parametrize(
    ("gpu", "count", "message"),
    [
        ("h1000", 8, "gpu='h1000' is unknown; use a100, h100, h200, b200"),
        ("h100", 12, "gpus=12: 1 to 8, or whole hosts of 8; use 16"),
        ("h100", 0, "gpus=0: 1 to 8, or whole hosts of 8; use 1"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused(gpu, count, message):
    with pytest.raises(ValueError, match=message):
        topology.compile_only(gpu, count)


@needs_cuda_compiler
@pytest.mark.parametrize("gpu", topology.GPUS)
def test_every_kind_of_gpu_can_be_compiled_for(gpu):
    mesh = meshes.make(devices=topology.compile_only(gpu, 16))
    assert mesh.size == 16
    device = mesh.devices.flat[0]
    assert device.platform == "gpu"
    assert topology.peak_flops(device.device_kind) == topology.GPUS[gpu].peak_flops
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
    compiled = jax.jit(lambda x: x @ x.T).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 4
