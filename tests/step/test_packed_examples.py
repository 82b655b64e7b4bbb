"""Examples packed in rows: the loss and gradients of one example to a row, in every kind of layout."""

import chex
import jax
import numpy as np
import oracle
import pytest
from conftest import built, cover, padded, resolved, small

from nanotrain_jax.data import batches as data
from nanotrain_jax.data.corpus import Corpus
from nanotrain_jax.data.examples import Examples
from nanotrain_jax.data.packing import Packed
from nanotrain_jax.step import build as steps

T, VOCAB, COUNT = 16, 61, 24


def examples(seed=0):
    """Random examples, of which some tokens are learned."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, T + 1, COUNT)
    tokens = rng.integers(VOCAB, size=sizes.sum()).astype(np.uint16)
    corpus = Corpus(tokens, np.cumsum(sizes), np.arange(COUNT, dtype=np.uint64), "none", VOCAB)
    return Examples(corpus, rng.random(len(tokens)) < 0.4, counts=None)


def batch_of(rows, step):
    """All rows as one batch, with rows of padding behind them."""
    found = [rows[i] for i in range(len(rows))]
    empty = {"inputs": np.zeros(T, np.int32), "targets": np.full(T, -1, np.int32), "starts": np.zeros(T, np.int32)}
    found += [empty] * (step.batch["inputs"].shape[0] - len(found))
    batch = data.rows_of(jax.tree.map(lambda *xs: np.stack(xs), *found), step.token_order)
    return jax.device_put(batch, jax.tree.map(lambda x: x.sharding, step.batch))


def tree(size, family, **parallel):
    return small(
        family,
        model={"vocab_size": VOCAB},
        data={"source": "chat:none", "seq_len": T, "batch_size": size},
        parallel=parallel,
    )


def trained(step, rows):
    """-> loss, gradients of a step, and the sum of losses and the count of targets of an evaluation."""
    state, batch = step.init(), batch_of(rows, step)
    total, count = step.evaluate(state.params, batch)
    state, metrics, _ = step.train(state, batch)
    moments = jax.device_get(step.in_layer_order(state).opt.moments[0].mu)
    return float(metrics["loss"]), jax.tree.map(lambda m: m / (1 - oracle.B1), moments), (float(total), int(count))


LAYOUTS = {
    "one device": ("llama", {"data": 1}),
    "data, pipe, context": ("llama", {"data": 2, "pipe": 2, "context": 2, "microbatches": 4, "idle": "mask"}),
    "data, microbatches": ("gpt2", {"data": 2, "microbatches": 4}),
    "data 8, ZeRO 3": ("llama", {"data": 8, "zero": 3}),
    "pipe": ("gpt2", {"pipe": 2, "microbatches": 4}),
    "ulysses": ("llama", {"context": 2, "context_attention": "ulysses"}),
    "gather, tensor": ("gpt2", {"context": 2, "context_attention": "gather", "tensor": 2}),
}
FIRST = ("data, pipe, context",)


@pytest.mark.parametrize("name", cover(FIRST, sorted(LAYOUTS.keys() - {*FIRST})))
def test_packed_rows_have_the_loss_and_gradients_of_one_example_to_a_row(name):
    family, parallel = LAYOUTS[name]
    given = examples()
    alone, packed = (Packed(given, np.arange(COUNT), T, packs) for packs in (False, True))
    assert len(packed) <= 16 < len(alone)
    reference = steps.build(*resolved(tree(COUNT, family, data=1)))
    loss, grads, (total, count) = trained(reference, alone)
    found, found_grads, sums = trained(built(tree(16, family, **parallel)), packed)
    firsts = np.concatenate([[0], given.corpus.ends[:-1]])
    assert sums[1] == count == given.learned.sum() - given.learned[firsts].sum()
    np.testing.assert_allclose([found, sums[0]], [loss, total], rtol=1e-6)
    np.testing.assert_allclose(loss, total / count, rtol=1e-6)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    chex.assert_trees_all_close(found_grads, padded(grads, found_grads), rtol=0, atol=1e-6 * float(largest))
