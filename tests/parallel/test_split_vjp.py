"""`split_vjp`: the backward of a layer with explicit residuals, in one part and in two."""

from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_layers import D, F, T, a_model, layer

from nanotrain_jax.parallel.loops import with_backward
from nanotrain_jax.parallel.split_vjp import split_vjp


def matmuls(f, *arguments):
    def count(jaxpr):
        own = Counter(e.primitive.name for e in jaxpr.eqns)["dot_general"]
        return own + sum(count(inner) for e in jaxpr.eqns for inner in jax.extend.core.jaxprs_in_params(e.params))

    return count(jax.make_jaxpr(f)(*arguments).jaxpr)


def of_inputs(weights, inputs, x):
    """The layer as a function of inputs and x, which are differentiated."""
    return layer(inputs, x, None)


@pytest.mark.parametrize(("policy", "again"), [(None, 0), ("full", 1)])
def test_a_split_backward_computes_nothing_twice(policy, again):
    """Two matmuls for the gradient of x, two for the weights; each part also recomputes only what it needs."""
    weights = jax.tree.map(lambda w: w[0], a_model(1)[1])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, D)), jnp.float32)
    vjp = split_vjp(jax.checkpoint(of_inputs) if policy else of_inputs, weights, weights, x)
    y, residuals = vjp.forward(weights, weights, x)
    g = jnp.cos(y)
    whole, whole_x = vjp.backward(residuals, weights, weights, g)
    split_x, intermediates = vjp.backward_x(residuals, weights, weights, g)
    saved = [k if i in vjp.residuals_for_weights else None for i, k in enumerate(residuals)]
    split = vjp.backward_weights(saved, weights, weights, intermediates)
    # The whole backward compiles a matmul with its transpose, the parts do not: the order of a sum depends on the CPU.
    chex.assert_trees_all_close((split_x, split), (whole_x, whole), rtol=1e-5, atol=1e-6)
    assert matmuls(vjp.backward_x, residuals, weights, weights, g) == 2 + again
    assert matmuls(lambda arrays: vjp.backward_weights(saved, weights, weights, arrays), intermediates) == 2 + again
    assert matmuls(vjp.backward, residuals, weights, weights, g) == 4 + 2 * again
    if not again:  # stored: each matmul's input and output gradient; the gain's gradient is computed in backward_x
        sizes = sorted(x.size for x in [*intermediates, *(residuals[i] for i in vjp.residuals_for_weights)])
        assert sizes == sorted([D, 2 * T * D, 2 * T * F, 2 * T * D, 2 * T * F])


def test_weights_are_not_residuals():
    weights = jax.tree.map(lambda w: w[0], a_model(1)[1])
    x = jnp.ones((2, T, D))
    for function, sizes in ((of_inputs, None), (jax.checkpoint(of_inputs), [x.size])):
        residuals = split_vjp(function, weights, weights, x).residuals
        assert not {k.shape for k in residuals} & {w.shape for w in weights.values()}
        assert sizes is None or [k.size for k in residuals] == sizes


def test_nothing_waits_for_the_gradient_of_a_frozen_weight():
    """As matmuls of the decoder have, `times` has a backward that computes both gradients, whoever needs them."""

    def backward(operands, g):
        x, w = operands
        return g @ w.T, jnp.einsum("BTD,BTF->DF", x, g)

    times = with_backward(lambda x, w: (x @ w, (x, w)), backward)
    x, w = jnp.ones((2, T, D)), jnp.ones((D, D))

    def run(constants, inputs, x):
        return times(jnp.sin(times(x, inputs)), constants)

    both = split_vjp(lambda _, inputs, x: run(inputs[1], inputs[0], x), w, (w, w), x)
    one = split_vjp(run, w, w, x)
    assert [k.shape for k in both.intermediates] == 2 * [x.shape] and len(both.residuals_for_weights) == 2
    assert [k.shape for k in one.intermediates] == [x.shape] and len(one.residuals_for_weights) == 1
    g, frozen = jnp.ones_like(x), 2 * w
    stored = [r if i in one.residuals_for_backward else None for i, r in enumerate(one.forward(frozen, w, x)[1])]
    assert None in stored  # what the frozen one multiplies
    whole = jax.vjp(lambda w, x: run(frozen, w, x), w, x)[1](g)
    chex.assert_trees_all_equal(one.backward(stored, frozen, w, g), whole)
    arrays = jax.tree.map(jnp.zeros_like, one.residuals), one.intermediates
    assert matmuls(lambda residuals, g: one.backward_weights(residuals, w, w, g), *arrays) == 1
