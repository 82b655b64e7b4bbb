"""Compile-only devices of accelerators that this machine does not have."""

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_cuda_compiler

from nanotrain_jax.audit import topology
from nanotrain_jax.costs import hardware
from nanotrain_jax.parallel import mesh as meshes


def test_peak_flops_of_a_device_kind():
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert hardware.peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert hardware.peak_flops("cpu") is None
    assert hardware.peak_flops("NVIDIA H100 PCIe") is None
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    kinds = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    assert [hardware.name_of(kind) for kind in kinds] == ["a100-40", "a100-80", "h100", "h200"]


@pytest.mark.parametrize(
    ("gpu", "count", "message"),
    [
        ("h1000", 8, "gpu='h1000' is unknown; use a100-40, a100-80, h100, h200, b200, gb200, cpu"),
        ("h100", 12, "gpus=12: 1 to 8, or whole hosts of 8; use 16"),
        ("h100", 0, "gpus=0: 1 to 8, or whole hosts of 8; use 1"),
    ],
)
def test_unknown_gpus_and_partial_hosts_are_errors(gpu, count, message):
    with pytest.raises(ValueError, match=message):
        topology.compile_only(gpu, count)


@needs_cuda_compiler
@pytest.mark.parametrize("gpu", [gpu for gpu in hardware.GPUS if gpu != hardware.SIMULATED])
def test_every_known_gpu_can_be_compiled_for(gpu):
    mesh = meshes.make(devices=topology.compile_only(gpu, 16))
    assert mesh.size == 16
    device = mesh.devices.flat[0]
    assert device.platform == "gpu"
    assert hardware.peak_flops(device.device_kind) == hardware.GPUS[gpu].peak_flops
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
    compiled = jax.jit(lambda x: x @ x.T).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 4
