"""XLA options that depend on the version of jax."""

import jax
import pytest

from nanotrain_jax.parallel.xla_options import gpu_options

FUSION = "xla_gpu_enable_dynamic_slice_fusion"


@pytest.mark.parametrize(("version", "is_off"), [((0, 10, 2), False), ((0, 11, 2), True), ((0, 12, 0), False)])
def test_matmuls_in_loops_are_not_repeated(version, is_off, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert (gpu_options(25.0, loops=True).get(FUSION) is False) is is_off
    assert FUSION not in gpu_options(25.0, loops=False)
