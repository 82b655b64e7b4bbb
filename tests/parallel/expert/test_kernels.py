"""Grouped matmuls by a kernel: the rows, results and gradients of padded ones; which is chosen, refusals."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import config_file, main
from conftest import small
from jax.sharding import PartitionSpec as P
from test_grouped_matmul import D, E, F, random

from nanotrain_jax.config import load
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.costs import flops
from nanotrain_jax.models import device_kernels
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.expert import kernels
from nanotrain_jax.parallel.expert.grouped_matmul import grouped_matmul

__all__ = ["config_file"]  # a fixture

ROWS = 120  # of each of two devices
SIZES = {  # rows of each expert
    "balanced": [[15] * 8, [15] * 8],
    "skewed": [[50, 3, 20, 1, 0, 6, 39, 1], [0, 0, 0, 0, 0, 120, 0, 0]],
    "rows after the last group": [[50, 3, 0, 1, 0, 6, 3, 1], [0, 0, 0, 0, 0, 0, 0, 0]],
}
needs_tokamax = pytest.mark.skipif(
    not kernels.is_installed(), reason="tokamax is not installed: pip install '.[kernels]', with Python 3.12 or newer"
)


def imitated(x, w, sizes, numbers=None, implementation=None):
    """Multiply as tokamax does: whole tiles of rows, and what memory has after the last group."""
    assert implementation == "mosaic" and len(x) % 64 == 0
    if numbers is not None:
        return jax.lax.ragged_dot_general(x, w, sizes, numbers)
    is_row_M1 = (jnp.arange(len(x)) < sizes.sum())[:, None]
    return jnp.where(is_row_M1, jax.lax.ragged_dot(x, w, sizes), jnp.nan)


def gradients(sizes, kernel):
    """Return y, and the gradients of rows of each of two devices, and of matrices that both have."""
    x, w, g = random(2 * ROWS, D), random(E, D, F), random(2 * ROWS, F)

    def of_device(x, w, sizes, g):
        y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, kernel=kernel), x, w)
        return y, *vjp(g)

    specs = P("data"), P(), P("data"), P("data")
    both = jax.shard_map(of_device, mesh=meshes.make(data=2), in_specs=specs, out_specs=(P("data"), P("data"), P()))
    return jax.jit(both)(x, w, jnp.asarray(sizes, jnp.int32).reshape(-1), g)


def equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_kernel_of_whole_tiles_equals_padded_matmuls(sizes, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(ragged_dot=imitated, ragged_dot_general=imitated))
    equal(gradients(sizes, kernels.Tokamax(jax.devices()[0])), gradients(sizes, None))


@needs_tokamax
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_tokamax_equals_padded_matmuls(sizes):
    equal(gradients(sizes, kernels.Tokamax(jax.devices()[0], "xla")), gradients(sizes, None))


def mixture(asked="tokamax", compute="bfloat16", d_ff=128, **parallel):
    tree = small(parallel={"data": 1} | parallel, precision={"compute": compute})
    tree["model"] |= {"grouped_matmul": asked, "d_model": 64, "experts": {"num": 8, "top_k": 2, "d_ff": d_ff}}
    tree["model"].pop("d_ff", None)
    return load.parse(tree)


def test_a_kernel_executes_no_padding():
    executed = {asked: flops.local_flops(resolve(mixture(asked), {"data": 1})) for asked in ("padded", "tokamax")}
    of_experts = 2 * 3 * 64 * 128 * 2 * mixture().model.num_layers
    assert executed["padded"]["layers"] - executed["tokamax"]["layers"] == pytest.approx(0.25 * of_experts)


@pytest.mark.parametrize(
    ("installed", "capability", "message"),
    [
        (False, "9.0", ": tokamax 0.0.17 or newer is not installed; pip install 'nanotrain_jax[kernels]' with Python"),
        (True, "8.0", " needs NVIDIA GPUs of the Hopper generation (compute capability 9), not 8; use padded"),
    ],
)
def test_a_kernel_that_is_missing_is_refused(installed, capability, message, monkeypatch):
    monkeypatch.setattr(kernels, "is_installed", lambda: installed)
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    with pytest.raises(ValueError) as error:
        device_kernels.of_experts(mixture(), device)
    assert f"model.grouped_matmul=tokamax{message}" in str(error.value)
    assert device_kernels.of_experts(mixture("padded"), device) is None


@pytest.mark.parametrize("changed", [{"d_ff": 96}, {"compute": "float32"}, {"tensor": 4}], ids=str)
def test_what_no_kernel_takes_is_refused(changed):
    with pytest.raises(Misfit, match=r"model\.grouped_matmul=tokamax with .*16 bits and widths that 64 divides; use"):
        resolve(mixture(**changed), {"data": 1})


def test_a_run_on_another_device_is_refused_in_one_line(config_file, capsys):
    model = ["model.d_model=64", "model.d_ff=null", "model.experts={num: 4, top_k: 2, d_ff: 64}"]
    keys = "model.grouped_matmul=tokamax", "precision.compute=bfloat16", *model
    assert main(config_file, f"logging.dir={config_file.parent}/run", *keys) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: model.grouped_matmul=tokamax needs NVIDIA GPUs") and err.count("\n") == 1
