"""Log-likelihoods of rows of tokens: equal to the oracle in float64, on any mesh."""

import json

import evaluation_models as models
import numpy as np
import pytest
from conftest import cover
from generation_models import weights

from nanotrain_jax.data.tokenizer import of_files
from nanotrain_jax.evaluation import samples, scoring, tasks, text
from nanotrain_jax.evaluation.samples import Kept
from nanotrain_jax.evaluation.scoring import Request

CONTEXT = 70  # no multiple of a chunk


def requests(oracle, count):
    """Rows of all lengths, of random tokens and of the most likely ones."""
    rng = np.random.default_rng(1)
    lengths = [2, 3, CONTEXT + 1, *rng.integers(4, CONTEXT, count)]
    rows = [rng.integers(0, models.WORDS, length).tolist() for length in lengths]
    found = [Request(row, int(rng.integers(1, len(row)))) for row in rows]
    prompt = rows[1]
    return [*found, Request(prompt + oracle.greedy(prompt, 4), 4)]


def scored(loaded, asked, rows=4):
    found = dict(scoring.scores(loaded.engine, asked, rows))
    return [found[i] for i in range(len(asked))]


@pytest.mark.parametrize("family", cover(["llama"], ["gpt2"]))
def test_scores_equal_the_oracle(family):
    own = weights(family, CONTEXT)
    oracle = models.Oracle(*own)
    asked = requests(oracle, 6)
    found = scored(models.loaded(own), asked)
    expected = [oracle.log(request.tokens, request.count) for request in asked]
    np.testing.assert_allclose([score.log for score in found], [log for log, _ in expected], rtol=1e-5)
    assert [score.is_greedy for score in found] == [is_greedy for _, is_greedy in expected]
    assert {score.is_greedy for score in found} == {True, False}


@pytest.mark.parametrize("mesh", cover([(2, 2)], [(2, 1), (1, 2)]))
def test_scores_on_several_devices_equal_those_on_one(mesh):
    own = weights("llama", CONTEXT)
    asked = requests(models.Oracle(*own), 4)
    one, several = (scored(models.loaded(own, *sizes), asked, rows=3) for sizes in ((1, 1), mesh))
    np.testing.assert_allclose([score.log for score in several], [score.log for score in one], rtol=1e-6)
    assert [score.is_greedy for score in several] == [score.is_greedy for score in one]


def test_a_row_longer_than_a_chunk_grows_its_cache():
    own = weights("llama", 600)
    tokens = np.random.default_rng(2).integers(0, models.WORDS, 580).tolist()
    (found,) = scored(models.loaded(own), [Request(tokens, 40)])
    np.testing.assert_allclose(found.log, models.Oracle(*own).log(tokens, 40)[0], rtol=1e-5)


@pytest.mark.parametrize(("count", "stride"), [(3, 16), (16, 16), (17, 16), (50, 16), (50, 5), (50, 1)])
def test_windows_score_each_token_once_with_as_much_before_it_as_the_context_gives(count, stride):
    context, tokens = 16, list(range(count + 1))
    scored, end = [], 0
    for request in text.windows(tokens, context, stride):
        scored += request.tokens[-request.count :]
        assert len(request.tokens) <= context + 1
        is_first = not end
        end = request.tokens[-1]
        assert request.tokens == tokens[max(0, end - context) : end + 1]
        assert is_first or request.count <= stride
        least = len(request.tokens) - request.count
        assert least == 1 if is_first else least >= min(context - stride + 1, end)
    assert scored == tokens[1:]


def test_an_encoded_pair_is_cut_where_its_context_ends():
    tokenizer = of_files(models.tokenizer_files(), "tokenizer.json")
    pairs = [("w5 w6 ", "w7"), ("w5", " w6 w7"), ("", "w8"), ("", "w3 w8"), ("  ", "w8")]
    assert scoring.encoded(tokenizer, pairs) == [
        ([5, 6], [7]),
        ([5], [6, 7]),
        ([models.END], [8]),
        ([models.END], [8]),
        ([models.END], [8]),
    ]


def test_texts_and_choices_behind_a_begin_token_equal_the_oracle(tmp_path):
    own = weights("llama", CONTEXT)
    oracle, loaded = models.Oracle(*own), models.loaded(own, begin="w1")
    (tmp_path / "a.txt").write_text(models.text(CONTEXT - 1))
    tokens = [1, *(int(word[1:]) for word in models.text(CONTEXT - 1).split())]
    choices = [models.text(3, seed) for seed in (1, 2)]
    rows = [{"context": context, "choices": choices, "answer": 0} for context in ("w7 w8", "")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = text.samples(f"{tmp_path}/a.txt", loaded, None, None)
    asked += tasks.samples(tasks.read(tmp_path / "rows.jsonl"), loaded)
    scored, with_context, without = samples.run(loaded.engine, asked, Kept(None, loaded), 4, list)
    assert scored["tokens"] == len(tokens) - 1
    np.testing.assert_allclose(scored["nats"], -oracle.log(tokens, len(tokens) - 1)[0], rtol=1e-5)
    for found, context in (with_context, [1, 7, 8]), (without, [1]):
        expected = [oracle.log([*context, *(int(w[1:]) for w in choice.split())], 3)[0] for choice in choices]
        np.testing.assert_allclose(found["log_likelihoods"], expected, rtol=1e-5)
