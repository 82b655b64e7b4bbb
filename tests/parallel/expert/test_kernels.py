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
from nanotrain_jax.models import decoder, experts
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.expert import kernels
from nanotrain_jax.parallel.expert.grouped_matmul import grouped_matmul

__all__ = ["config_file"]  # a fixture

HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0")
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


def mixture(asked="auto", compute="bfloat16", d_ff=128, **parallel):
    tree = small(parallel={"data": 1} | parallel, precision={"compute": compute})
    tree["model"] |= {"grouped_matmul": asked, "d_model": 64, "experts": {"num": 8, "top_k": 2, "d_ff": d_ff}}
    tree["model"].pop("d_ff", None)
    return load.parse(tree)


@pytest.mark.parametrize(
    ("config", "device", "installed", "kernel"),
    [
        (mixture(), HOPPER, True, "tokamax"),
        (mixture("tokamax"), HOPPER, True, "tokamax"),
        (mixture("padded"), HOPPER, True, None),
        (mixture(), HOPPER, False, None),
        (mixture(), SimpleNamespace(platform="gpu", compute_capability="8.0"), True, None),
        (mixture(), SimpleNamespace(platform="gpu", compute_capability="10.0"), True, None),
        (mixture(), SimpleNamespace(platform="cpu"), True, None),
        (mixture(compute="float32"), HOPPER, True, None),
        (mixture(d_ff=96), HOPPER, True, None),
        (mixture(tensor=4), HOPPER, True, None),  # 32 columns on each
        (load.parse(small()), HOPPER, True, None),  # no experts
    ],
)
def test_a_kernel_is_chosen_where_it_is_installed_and_fits(config, device, installed, kernel, monkeypatch):
    monkeypatch.setattr(kernels, "is_installed", lambda: installed)
    assert experts.kernel_of(config, decoder.capability(device)) == kernel


def test_a_kernel_executes_no_padding(monkeypatch):
    config, executed = resolve(mixture(), {"data": 1}), {}
    for installed in (False, True):
        monkeypatch.setattr(kernels, "is_installed", lambda installed=installed: installed)
        executed[installed] = flops.local_flops(config)["layers"]
    of_experts = 2 * 3 * 64 * 128 * 2 * config.model.num_layers
    assert executed[False] - executed[True] == pytest.approx(0.25 * of_experts)


@pytest.mark.parametrize(
    ("installed", "capability", "message"),
    [
        (False, 9.0, "tokamax 0.0.17 or newer is not installed; pip install 'nanotrain_jax[kernels]' with Python 3.12"),
        (True, 8.0, "needs NVIDIA GPUs of the Hopper generation (compute capability 9), not 8; use auto or padded"),
    ],
)
def test_a_kernel_that_is_asked_for_and_missing_is_refused(installed, capability, message, monkeypatch):
    monkeypatch.setattr(kernels, "is_installed", lambda: installed)
    with pytest.raises(ValueError) as error:
        experts.kernel_of(mixture("tokamax"), capability)
    assert f"model.grouped_matmul=tokamax{':' if not installed else ''} {message}" in str(error.value)


def test_sizes_that_no_kernel_takes_are_refused():
    with pytest.raises(Misfit, match=r"model\.experts\.d_ff=96 over .*16 bits and widths that 64 divides; use"):
        resolve(mixture("tokamax", d_ff=96), {"data": 1})


def test_a_run_without_the_kernel_is_refused_in_one_line(config_file, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "is_installed", lambda: False)
    model = ["model.d_model=64", "model.d_ff=null", "model.experts={num: 4, top_k: 2, d_ff: 64}"]
    keys = "model.grouped_matmul=tokamax", "precision.compute=bfloat16", *model
    assert main(config_file, f"logging.dir={config_file.parent}/run", *keys) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: model.grouped_matmul=tokamax: tokamax 0.0.17 or newer") and err.count("\n") == 1
