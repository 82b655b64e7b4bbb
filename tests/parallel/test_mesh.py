"""The mesh: six axes, one of which may be -1; errors for sizes that do not fit."""

import os
import subprocess
import sys

import jax
import pytest
from conftest import small

from nanotrain_jax import train
from nanotrain_jax.config import load
from nanotrain_jax.parallel import mesh as meshes


def test_all_six_axes_exist_with_tensor_innermost():
    mesh = meshes.make(replica=2, data=2, tensor=2)
    assert mesh.axis_names == ("pipe", "replica", "data", "expert", "context", "tensor")
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.parametrize("axis", meshes.AXES)
def test_minus_one_fills_any_axis(axis):
    sizes = {"data": 1, axis: -1}
    if axis != "replica":
        sizes["replica"] = 2
    assert meshes.make(**sizes).shape[axis] == (8 if axis == "replica" else 4)


def test_a_smaller_mesh_uses_the_first_devices():
    assert list(meshes.make(data=4).devices.flat) == jax.devices()[:4]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 16}, "needs 16 devices but there are 8; use a smaller mesh, or runtime.simulate=16"),
        ({"data": -1, "tensor": -1}, "only one axis can be -1"),
        ({"data": -1, "replica": 3}, "8 devices cannot be split into groups of 3"),
        ({"data": 0}, "parallel.data=0"),
        ({"data": -2}, "parallel.data=-2"),
    ],
)
def test_a_mesh_that_does_not_fit_raises(sizes, message):
    with pytest.raises(ValueError, match=message):
        meshes.make(**sizes)


def test_deterministic_sets_the_xla_flag(monkeypatch):
    flag = "--xla_gpu_deterministic_ops=true"
    seen = []
    for deterministic in False, True:
        monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        config = load.parse(small(runtime={"simulate": 8, "deterministic": deterministic}))
        train.configure(config, 1)
        seen.append(flag in os.environ["XLA_FLAGS"].split())
    assert seen == [False, True]


def test_simulated_devices_need_no_environment_variables_and_must_be_configured_first():
    code = (
        "import jax; from nanotrain_jax.parallel import mesh\n"
        "mesh.configure(simulate=3); assert len(jax.devices()) == 3\n"
        "mesh.configure(simulate=3)\n"
        "try: mesh.configure(simulate=5)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("runtime.simulate=5")
    assert "JAX already runs with 3 devices" in done.stdout


def test_settings_of_jax_in_the_environment_do_not_change_numbers():
    code = (
        "import jax, jax.numpy as jnp; from nanotrain_jax.parallel import mesh\n"
        "for line in mesh.configure(simulate=2): print(line)\n"
        "values = jax.random.normal(jax.random.key(0), (7,)) @ jnp.ones((7, 2))\n"
        "print(values.dtype, values.tolist())"
    )
    others = "1", "bfloat16", "rbg", "0", "strict", "raise", "1"
    found = []
    for env in {}, dict(zip(map(str.upper, meshes.PINNED), others, strict=True)):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    assert found[1][-1:] == found[0]
    assert found[1][0] == "JAX_ENABLE_X64=True has no effect: a run has False"
    assert len(found[1]) == len(others) + 1
