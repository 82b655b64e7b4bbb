"""Batches that keep documents apart: where each begins, what is predicted, in which order."""

from itertools import islice, pairwise

import numpy as np
import pytest
from conftest import resolved, small

from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data
from nanotrain_jax.data import corpus
from nanotrain_jax.data.tokenizer import of_bytes
from nanotrain_jax.step import build as steps

TEXTS = [bytes([65 + i]) * length for i, length in enumerate([3, 40, 1, 1, 16, 17, 15, 31, 7, 64])]
END = 256  # the byte tokenizer ends each document with it


@pytest.fixture(scope="module")
def windows():
    return data.Windows(corpus.build(TEXTS, of_bytes()), np.arange(len(TEXTS)), 16)


def step_of(**parallel):
    config, mesh = resolved(small(data={"batch_size": 4, "attend_across_documents": False}, parallel=parallel))
    return steps.build(config, mesh)


def starts_of(tokens):
    """A document begins after each end token."""
    begins = [t if t and tokens[t - 1] == END else 0 for t in range(len(tokens))]
    return np.maximum.accumulate(begins)


def test_documents_start_after_each_end_token(windows):
    for i in range(len(windows)):
        np.testing.assert_array_equal(windows.document_starts(i), starts_of(windows[i]))


def test_a_document_does_not_predict_the_next(windows):
    batch = next(data.batches(windows, step_of(data=4).batch, seed=0))
    inputs, targets, starts = (np.asarray(batch[name]) for name in ("inputs", "targets", "starts"))
    np.testing.assert_array_equal(targets < 0, inputs == END)
    np.testing.assert_array_equal(targets[:, :-1][targets[:, :-1] >= 0], inputs[:, 1:][targets[:, :-1] >= 0])
    for row, expected in zip(inputs, starts, strict=True):
        np.testing.assert_array_equal(starts_of(row), expected)


def test_tokens_are_reordered_and_starts_are_not(windows):
    plain, split = step_of(data=4), step_of(data=2, context=2)
    natural = next(data.batches(windows, plain.batch, seed=0))
    ordered = next(data.batches(windows, split.batch, seed=0, token_order=split.token_order))
    for name in "inputs", "targets":
        np.testing.assert_array_equal(np.asarray(natural[name])[:, split.token_order], ordered[name])
    np.testing.assert_array_equal(natural["starts"], ordered["starts"])


def test_evaluation_pads_with_rows_without_targets(windows):
    step = step_of(data=4)
    batches = list(data.evaluation(windows, step.batch, max_batches=100))
    found = [row for batch in batches for row in np.asarray(batch["targets"]) if (row >= 0).any()]
    assert len(batches) == -(-len(windows) // 4)
    for i, row in enumerate(found):
        np.testing.assert_array_equal(row, np.where(windows[i][:-1] == END, -1, windows[i][1:]))
    assert len(found) == len(windows)


def test_the_order_of_sequences_is_that_of_training_across_documents(windows):
    config, mesh = resolved(small(data={"batch_size": 4}, parallel={"data": 4}))
    across = islice(data.batches(windows, steps.build(config, mesh).batch, seed=3), 4)
    apart = islice(data.batches(windows, step_of(data=4).batch, seed=3), 4)
    for a, b in zip(across, apart, strict=True):
        np.testing.assert_array_equal(a["inputs"], b["inputs"])
        assert a.keys() == {"inputs", "targets"}


def test_sequences_of_random_tokens_are_one_document_each():
    source = data.load(request.parse({"data": {"source": "synthetic", "seq_len": 16}}).data, vocab_size=61).train
    batch = next(data.batches(source, step_of(data=4).batch, seed=0))
    assert not np.asarray(batch["starts"]).any()
    assert (np.asarray(batch["targets"]) >= 0).all()
    assert all(a != b for a, b in pairwise(map(tuple, np.asarray(batch["inputs"]))))
