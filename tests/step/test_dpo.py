"""DPO: loss and gradients of a plain oracle in every kind of layout, the reference row by row, and what it learns."""

from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from closed_forms import has_flops_and_bytes_of_the_closed_forms
from conftest import GRADS, built, cover, padded, resolved, small, starting_from

from nanotrain_jax.data import batches as data
from nanotrain_jax.data.corpus import Corpus
from nanotrain_jax.data.examples import Examples
from nanotrain_jax.data.pairs import Pairs
from nanotrain_jax.models import decoder
from nanotrain_jax.run import reference

T, VOCAB, COUNT, B = 32, 61, 21, 16
BETA, SMOOTHING = 0.3, 0.1


def pairs(seed=0):
    """Random pairs: a prompt of some tokens, and two completions; what is learned has gaps."""
    rng = np.random.default_rng(seed)
    texts, learned = [], []
    for _ in range(COUNT):
        prompt = rng.integers(VOCAB, size=rng.integers(1, 5))
        for _ in range(2):
            answer = rng.integers(VOCAB, size=rng.integers(1, 9))
            texts.append(np.concatenate([prompt, answer]))
            learned.append(np.concatenate([np.zeros(len(prompt), bool), rng.random(len(answer)) < 0.8]))
            learned[-1][-1] = True
    tokens = np.concatenate(texts).astype(np.uint16)
    corpus = Corpus(tokens, np.cumsum([len(x) for x in texts]), np.arange(2 * COUNT, dtype=np.uint64), "none", VOCAB)
    return Examples(corpus, np.concatenate(learned), counts=None)


def rows_of(given, reference=None):
    rows = Pairs(given, np.arange(2 * COUNT), T, packs=True)
    return rows if reference is None else rows.with_reference(reference)


def batch_of(rows, step):
    """All rows as one batch, with rows of padding behind them."""
    (batch,) = data.evaluation(rows, step.batch, 1, step.token_order)
    return batch


EXPERTS = {"num": 8, "top_k": 2, "d_ff": 64, "balance": "none", "capacity": 8.0}  # room for all rows


def tree(family="llama", objective=None, memory=None, **parallel):
    model = {"vocab_size": VOCAB} | ({"experts": EXPERTS} if family == "mixture" else {})
    return small(
        "llama" if family == "mixture" else family,
        model=model | ({"loss_chunk": parallel.pop("loss_chunk")} if "loss_chunk" in parallel else {}),
        data={"source": "pairs:none", "seq_len": T, "batch_size": B},
        train={"seed": 3, "objective": {"kind": "dpo", "beta": BETA, "label_smoothing": SMOOTHING} | (objective or {})},
        memory=memory or {},
        parallel=parallel,
    )


def of_pairs(params, given):
    """Log-probability of what is learned of each example, plainly, [pairs 2]. given: tokens, learned [examples T]"""
    tokens, learned = given
    of_tokens = jax.nn.log_softmax(oracle.logits(params, tokens[:, :-1]))
    picked = jnp.take_along_axis(of_tokens, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(learned[:, 1:], picked, 0.0).sum(1).reshape(COUNT, 2)


def expected_loss(params, given, reference):
    """Equation 7 of the paper, with smoothed labels: (1 - e) L(w, l) + e L(l, w)."""
    ratio = of_pairs(params, given) - reference
    z = BETA * (ratio[:, 0] - ratio[:, 1])
    of_pair = (1 - SMOOTHING) * jnp.log(1 + jnp.exp(-z)) + SMOOTHING * jnp.log(1 + jnp.exp(z))
    return of_pair.mean(), z


@lru_cache(maxsize=3)
def of_the_oracle(family):
    """-> weights, log-probabilities of them and of the reference (other weights), loss, margins, gradients."""
    config, _ = resolved(tree(family, data=1))
    found, longest = pairs(), max(pairs().sizes)
    padded = [[np.pad(x, (0, longest - len(x))) for x in found[i]] for i in range(2 * COUNT)]
    given = [jnp.asarray(np.stack(x)) for x in zip(*padded, strict=True)]
    params, other = (jax.device_get(decoder.init(config.model, seed)) for seed in (3, 4))

    @jax.jit
    def run(params, other):
        of_other = of_pairs(other, given)
        with_gradients = jax.value_and_grad(lambda params: expected_loss(params, given, of_other), has_aux=True)
        return of_pairs(params, given), of_other, *with_gradients(params)

    own, of_other, (loss, margins), grads = jax.device_get(run(params, other))
    return params, own, of_other, loss, margins, grads


def is_reference(step, params, rows, values):
    """A model that is its own reference has a loss of log 2 and no margin."""
    own = np.zeros_like(rows.reference)
    reference.put(own, rows, 0, values)
    total, _, sums = step.evaluate(params, batch_of(rows.with_reference(own), step))
    np.testing.assert_allclose(float(total) / COUNT, np.log(2), rtol=1e-6)  # a sum of COUNT in float32
    assert abs(float(sums["margin"])) < 1e-5


HOST = {"offload_params": "host", "offload_optimizer": "host"}
LAYOUTS = {
    "one device": ("llama", {"data": 1, "loss_chunk": 64}),
    "data 2 tensor 2": ("gpt2", {"data": 2, "tensor": 2}),
    "tensor, ZeRO 3": ("llama", {"data": 2, "tensor": 2, "zero": 3, "microbatches": 2, "loss_chunk": 64}),
    "pipe, vocabulary over it": ("llama", {"pipe": 2, "tensor": 2, "microbatches": 4, "vocab_over_pipe": True}),
    "pipe": ("gpt2", {"pipe": 2, "data": 2, "microbatches": 4}),
    "zero bubble": ("llama", {"pipe": 2, "microbatches": 4, "schedule": "zero_bubble", "chunks": 1}),
    "ZeRO 3": ("llama", {"data": 4, "zero": 3, "microbatches": 2, "persist_below": 1}),
    "per layer": ("llama", {"data": 2, "microbatches": 4, "zero": 2, "grad_reduce": "per_layer"}),
    "offload": ("llama", {"data": 2, "microbatches": 2, "zero": 3, "memory": HOST}),
    "interleaved": ("llama", {"pipe": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 1, "idle": "mask"}),
    "ring": ("llama", {"data": 2, "context": 2, "microbatches": 2}),
    "ulysses": ("llama", {"context": 2, "tensor": 2, "context_attention": "ulysses"}),
    "experts": ("mixture", {"data": 1, "microbatches": 2}),
    "experts, tensor, ZeRO 3": ("mixture", {"data": 2, "expert": 2, "tensor": 2, "zero": 3, "microbatches": 2}),
    "experts, pipe": ("mixture", {"pipe": 2, "data": 2, "expert": 2, "microbatches": 4}),
    "experts, context": ("mixture", {"data": 2, "expert": 2, "context": 2}),
    "ulysses, microbatches": ("llama", {"data": 2, "context": 2, "context_attention": "ulysses", "microbatches": 2}),
}
FIRST = ("tensor, ZeRO 3",)


@pytest.mark.parametrize("name", cover(FIRST, sorted(LAYOUTS.keys() - {*FIRST})))
def test_loss_gradients_and_scores_are_those_of_the_paper(name):
    family, parallel = LAYOUTS[name]
    params, own, other, loss, margins, grads = of_the_oracle(family)
    step = built(tree(family, **parallel))
    state, rows = starting_from(step, params), rows_of(pairs(), other)
    assert len(rows) <= B and any(len(rows.pairs_of_row(i)) > 1 for i in range(len(rows)))
    batch = batch_of(rows, step)
    total, count, means = step.evaluate(state.params, batch)
    assert int(count) == COUNT
    np.testing.assert_allclose(float(total) / COUNT, loss, rtol=1e-6)
    np.testing.assert_allclose(float(means["margin"]) / COUNT, margins.mean(), rtol=1e-5)
    assert float(means["accuracy"]) == (margins > 0).sum()
    found = np.asarray(step.of_rows(state.params, batch))
    is_reference(step, state.params, rows, found)
    for i in range(len(rows)):
        mine = rows.pairs_of_row(i)
        np.testing.assert_allclose(found[i, : len(mine)], own[mine], rtol=1e-6)
        assert not found[i, len(mine) :].any()
    state, metrics, _ = step.train(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["train_margin"], margins.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["train_accuracy"], (margins > 0).mean(), rtol=1e-6)
    moments = jax.device_get(step.in_layer_order(state).opt.moments[0].mu)
    found = jax.tree.map(lambda m: m / (1 - oracle.B1), moments)
    chex.assert_trees_all_close(found, padded(grads, found), **GRADS)


PIPES = "pipe, vocabulary over it", "pipe", "zero bubble"
OF_EXPERTS = "experts", "experts, pipe"
SCALARS = 128  # bytes: losses, numbers of pairs, accuracies, margins, the norm of the gradients


MORE = "one device", "data 2 tensor 2", "ulysses", "ulysses, microbatches", *PIPES, *OF_EXPERTS


@pytest.mark.parametrize("name", cover(["tensor, ZeRO 3"], MORE))
def test_flops_and_bytes_equal_the_closed_forms(name):
    family, parallel = LAYOUTS[name]
    has_flops_and_bytes_of_the_closed_forms(built(tree(family, **parallel)), SCALARS)


@pytest.mark.long
def test_routers_are_balanced_as_beside_the_loss_of_tokens():
    """What `balance: loss` adds to gradients does not depend on the objective, nor on the layout."""
    params, _, other, *_ = of_the_oracle("mixture")

    def added(source, **parallel):
        batch, of_routers = batch_of(rows_of(pairs(), other), built(tree("mixture", **parallel))), []
        for weight in (0.0, 10.0):
            keys = tree("mixture", **parallel)
            keys["model"]["experts"] = EXPERTS | {"balance": "loss", "balance_weight": weight}
            if source == "chat:none":
                keys["data"]["source"] = source
                del keys["train"]["objective"]
            step = built(keys)
            state, metrics, _ = step.train(starting_from(step, params), {name: batch[name] for name in step.batch})
            assert float(metrics["train_load"]) >= 1
            moments = jax.device_get(step.in_layer_order(state).opt.moments[0].mu)
            of_routers.append(moments["layers"]["mlp"]["router_DE"])
        return of_routers[1] - of_routers[0]

    expected = added("chat:none", data=1)
    assert np.abs(expected).max() > 1e-3
    for layout in ({"data": 1}, {"data": 2, "expert": 2, "tensor": 2, "zero": 3}, {"data": 2, "context": 2}):
        np.testing.assert_allclose(added("pairs:none", **layout), expected, rtol=1e-4, atol=1e-6)
