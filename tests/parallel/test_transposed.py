"""Matrices stored as their transpose: the same products, with the matrix as first operand where rows are few."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanotrain_jax.parallel.transposed import FEW, multiplied, plain, tensordot, transposed


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("shape, inputs", [((6, 5), 1), ((6, 2, 5), 1), ((2, 3, 7), 2)])
def test_the_product_is_that_of_the_plain_matrix(shape, inputs, rows):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (shape, (rows, 1, *shape[:inputs])))
    stored = transposed(w, inputs)
    assert (stored.shape, stored.ndim) == (w.shape, w.ndim)
    np.testing.assert_array_equal(plain(stored), w)
    np.testing.assert_allclose(tensordot(x, stored, inputs), jnp.tensordot(x, w, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_are_the_second_operand_of_the_compiled_matmul(rows):
    x, w = jnp.ones((rows, 40)), jnp.ones((24, 40))
    text = jax.jit(multiplied).lower(x, w).compile().as_text()
    found = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", text)
    assert found == [("24", str(rows))]
