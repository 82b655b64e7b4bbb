"""Routing and grouped matmuls alone: equal to every expert computed and masked, however tokens are spread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanotrain_jax.audit import matmuls
from nanotrain_jax.parallel.expert import grouped_matmul, routing
from nanotrain_jax.parallel.tensor import float8

T, D, F, E, K = 40, 12, 20, 8, 3
SIZES = {  # rows of each expert
    "balanced": [15] * 8,
    "skewed": [50, 3, 20, 1, 0, 6, 39, 1],
    "empty experts": [60, 0, 0, 60, 0, 0, 0, 0],
    "all to one": [0, 0, 0, 0, 0, 120, 0, 0],
}


def random(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups_equal_a_matmul_of_each_row_with_its_matrix(sizes):
    x, w, g, sizes = random(T * K, D), random(E, D, F), random(T * K, F), jnp.asarray(sizes)
    group = np.repeat(np.arange(E), sizes)

    def masked(x, w):
        return jnp.einsum("md,edf,me->mf", x, w, jnp.asarray(group[:, None] == np.arange(E)[None], jnp.float32))

    y, vjp = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes), x, w)
    exact, exact_vjp = jax.vjp(masked, x, w)
    for found, expected in zip((y, *vjp(g)), (exact, *exact_vjp(g)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    C = grouped_matmul.rows_of_a_round(T * K, E)
    assert int(grouped_matmul.rounds(sizes, C)) == max(1, -(-max(map(int, sizes)) // C))


def test_few_rows_are_multiplied_one_by_one():
    x, w, sizes, group = random(4, D), random(E, D, F), jnp.asarray([0, 1, 0, 0, 2, 0, 0, 0]), [1, 4, 4]
    y, vjp = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes), x, w)
    np.testing.assert_allclose(y[:3], jnp.einsum("md,mdf->mf", x[:3], w[np.asarray(group)]), rtol=1e-5, atol=1e-5)
    assert not y[3].any()
    of_x, of_w = vjp(jnp.ones_like(y))
    np.testing.assert_allclose(of_x[:3], w[np.asarray(group)].sum(2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_w[4], jnp.outer(x[1] + x[2], jnp.ones(F)), rtol=1e-5, atol=1e-5)
    text = jax.jit(grouped_matmul.grouped_matmul).lower(x, w, sizes).compile().as_text()
    assert matmuls.flops(text) == 0  # all matrices would be read


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_in_float8_results_and_gradients_are_those_of_the_rounded_operands(sizes):
    x, w, g, sizes = random(T * K, D), random(E, D, F), random(T * K, F), jnp.asarray(sizes)

    def rounded(x, dtype):
        return float8.dequantize(float8.quantize(x, dtype))

    def found(x, w):
        return grouped_matmul.grouped_matmul(x, w, sizes, matmul=float8.FLOAT8)

    plain, vjp = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes), x, w)
    exact, exact_vjp = jax.vjp(
        lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes), rounded(x, float8.E4M3), rounded(w, float8.E4M3)
    )
    y, vjp_of_rounded = jax.vjp(found, x, w)
    expected = exact, *exact_vjp(rounded(g, float8.E5M2))
    for a, b, unrounded in zip((y, *vjp_of_rounded(g)), expected, (plain, *vjp(g)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert 0.005 < np.linalg.norm(a - unrounded) / np.linalg.norm(unrounded) < 0.08


def test_a_round_has_at_most_a_quarter_more_rows_than_balanced_experts():
    for rows, groups in ((4096 * 2, 8), (4096 * 6, 64), (8192 * 8, 256)):
        assert rows < grouped_matmul.rows_of_a_round(rows, groups) * groups <= 1.30 * rows
    assert grouped_matmul.rows_of_a_round(3, 8) == 3  # all rows of one expert


def test_scores_that_are_all_zero_leave_finite_gates():
    routes = routing.route(jnp.full((2, E), -1e4), routing.Choice(K, "sigmoid"))
    assert not routes.gates_Tk.any()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_reaches_its_experts_and_returns(scores, normalize):
    choice = routing.Choice(K, scores, normalize)
    x, logits = random(T, D), 3 * random(T, E)

    def dispatched(x, logits):
        routes = routing.route(logits, choice)
        return routing.by_token(routing.by_expert(x, routes) * routing.gates_of_rows(routes)[:, None], routes)

    s = np.asarray(logits)
    chosen = jnp.asarray(s >= np.sort(s)[:, E - K : E - K + 1], jnp.float32)

    def exact(x, logits):
        gates = routing.scores(logits, choice) * chosen
        gates = gates / gates.sum(-1, keepdims=True) if normalize else gates
        return x * gates.sum(-1, keepdims=True)

    y, vjp = jax.vjp(dispatched, x, logits)
    expected, exact_vjp = jax.vjp(exact, x, logits)
    g = random(T, D)
    for a, b in zip((y, *vjp(g)), (expected, *exact_vjp(g)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    routes = routing.route(logits, choice)
    assert int(routes.sizes_E.sum()) == T * K
    rows = np.sort(np.asarray(routes.row_Tk).reshape(-1))
    np.testing.assert_array_equal(rows, np.arange(T * K))
