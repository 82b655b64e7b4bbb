"""Right targets over a vocabulary split over mesh axes, against NumPy's argmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.tensor import accuracy

B, T, D, V, WORDS = 4, 6, 8, 64, 61


def arrays_with_ties():
    """x[B T D], head[V D] with repeated rows, targets: half of them the right ones, some ignored."""
    rng = np.random.default_rng(0)
    x, head = rng.integers(-2, 3, (B, T, D)).astype(np.float32), rng.integers(-2, 3, (V, D)).astype(np.float32)
    head[32:40] = head[8:16]  # on other devices
    best = (x @ head[:WORDS].T).argmax(-1)
    targets = np.where(rng.random((B, T)) < 0.5, best, rng.integers(-1, WORDS, (B, T))).astype(np.int32)
    return x, head, targets, int((best == targets).sum())


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("axes", [(), ("tensor",), ("pipe", "tensor")])
def test_right_targets_are_those_of_argmax(axes, chunk):
    x, head, targets, right = arrays_with_ties()
    mesh = meshes.make(data=2, pipe=2, tensor=2)

    def count(x, head, targets):
        own = accuracy.correct(x, head, targets, axes, WORDS, chunk)
        return jax.lax.psum(own, "data")

    specs = P("data"), P(axes or None), P("data")
    found = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True))(x, head, targets)
    assert int(found) == right > 4


def test_a_chunk_that_does_not_divide_is_refused():
    x, head, targets, _ = map(jnp.asarray, arrays_with_ties())
    with pytest.raises(ValueError, match="chunk=5 does not divide the 24 tokens"):
        accuracy.correct(x, head, targets, chunk=5)
