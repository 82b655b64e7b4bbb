"""Decoding with a cache: the logits and tokens of a float64 oracle without one, on any mesh."""

import generation_models
import numpy as np
import pytest
from conftest import cover
from generation_models import Oracle
from jax.sharding import PartitionSpec

from nanotrain_jax.evaluation.samples import fingerprint
from nanotrain_jax.generation.engine import ACTIVATIONS, Choice
from nanotrain_jax.generation.sampling import Sampling
from nanotrain_jax.generation.session import Session
from nanotrain_jax.parallel.transposed import is_transposed

GREEDY = Choice(Sampling(temperature=0.0), ())
TOKENS, SHORTER = 40, 7  # tokens of the rows; of the second one fewer
CHUNKS = 11, 16, *[1] * 13
YARN = {"type": "yarn", "factor": 3.0, "original_max_seq_len": 16, "beta_fast": 4.0, "beta_slow": 0.5}
CASES = {  # family, keys of model, devices
    "llama": ("llama", {"num_kv_heads": 2}, {}),
    "gpt2": ("gpt2", {}, {}),
    "mistral with a window": ("mistral", {"sliding_window": 7}, {}),
    "gemma3, local and global layers": (
        "gemma3",
        {"num_layers": 7, "sliding_window": 7, "rope_local_theta": 100.0},
        {},
    ),
    "qwen3, scaled positions": ("qwen3", {"num_kv_heads": 1, "rope_scaling": YARN}, {}),
    "data 2 tensor 2, experts": (
        "llama",
        {"d_ff": 96, "num_layers": 3, "experts": {"num": 6, "top_k": 2, "d_ff": 64, "shared": 1, "first_dense": 1}},
        {"data": 2, "tensor": 2},
    ),
    "data 2": ("llama", {}, {"data": 2}),
    "tensor 2, qwen2": ("qwen2", {}, {"tensor": 2}),
    "tensor 4, fewer key heads, gpt2": ("gpt2", {"num_kv_heads": 2, "num_heads": 4}, {"tensor": 4}),
    "data 2 tensor 2, gemma3": ("gemma3", {"num_layers": 2, "sliding_window": 7}, {"data": 2, "tensor": 2}),
}
# More texts of a llama and GPT-2 are below, and of the other cases each has more.
LATER = "llama", "gpt2", "data 2", "tensor 2, qwen2", "gemma3, local and global layers", "data 2 tensor 2, experts"


@pytest.mark.parametrize("name", cover([name for name in CASES if name not in LATER], LATER))
def test_logits_of_chunks_and_single_tokens_equal_those_of_the_whole_text(name):
    family, keys, devices = CASES[name]
    model, params = generation_models.weights(family, **keys)
    engine = generation_models.engine(model, params, **devices)
    tokens = np.random.default_rng(0).integers(1, model.vocab_size, (2, TOKENS))
    starts = [0, SHORTER]
    rows, found = engine.empty(starts, TOKENS), []
    last = engine._jit(engine.model.decode.last, (engine.end_specs, ACTIVATIONS), PartitionSpec("data"))
    ends = {key: tree for key, tree in engine.params.items() if key != "layers"}
    at = 0
    for size in CHUNKS:
        x, caches = engine.through_layers(rows, engine.embed(rows, tokens[:, at : at + size]))
        rows = rows._replace(caches=caches, place=rows.place.after(size))
        found.append(np.asarray(last(ends, x)))
        at += size
    found, oracle = np.concatenate(found, axis=1), Oracle(model, params)
    for row, start in enumerate(starts):
        exact = oracle.logits(tokens[row, start:])
        np.testing.assert_allclose(found[row, start:], exact, atol=1e-5 * np.abs(exact).max(), rtol=0)


@pytest.fixture(scope="module")
def llama():
    model, params = generation_models.weights(context=512)
    return generation_models.engine(model, params), Oracle(model, params)


def continued(session, count):
    return np.concatenate(list(session.tokens(count)), axis=1).tolist()


@pytest.mark.parametrize(("family", "is_looped"), [("llama", False), ("gpt2", True)])
def test_300_greedy_tokens_equal_those_without_a_cache(family, is_looped):
    model, params = generation_models.weights(family, context=512)
    engine, prompt = generation_models.engine(model, params), [3, 1, 4, 1, 5]
    engine.is_looped = is_looped  # as on GPUs: one program of all layers and many tokens
    session = Session(engine, GREEDY, 512)
    session.feed([prompt])
    (found,) = continued(session, 300)
    assert len(found) == 300
    Oracle(model, params).assert_greedy(prompt, found)
    assert len(set(found)) > 2
    assert (session.slots, session.shifted) == (512, False)


def test_one_cpu_stores_matrices_transposed_and_they_stay_the_same_weights():
    model, params = generation_models.weights()
    one, two = (generation_models.engine(model, params, data=data).params for data in (1, 2))
    found = [[is_transposed(layer["attention"]["out_NHD"]) for layer in tree["layers"]] for tree in (one, two)]
    assert found == [[True] * model.num_layers, [False] * model.num_layers]
    assert fingerprint(one) == fingerprint(two)


def test_a_text_that_fills_the_context_goes_on_with_its_last_half(llama):
    engine, oracle = llama
    session = Session(engine, GREEDY, 20)
    session.feed([[3, 1, 4, 1, 5]])
    assert continued(session, 50) == [oracle.greedy([3, 1, 4, 1, 5], 50, context=20)]
    assert session.shifted


@pytest.mark.parametrize("has_stop", [False, True])
def test_rows_go_on_beyond_the_context_as_each_alone(llama, has_stop):
    engine, oracle = llama
    prompts = [[3, 1, 4, 1, 5], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4]]
    expected = [oracle.greedy(prompt, 40, context=20) for prompt in prompts]
    stop = expected[2][10]  # in the longest alone, which it ends as it fills the context
    session = Session(engine, GREEDY._replace(stops=(stop,) if has_stop else ()), 20)
    session.feed(prompts)
    for found, whole in zip(continued(session, 40), expected, strict=True):
        end = whole.index(stop) + 1 if has_stop and stop in whole else len(whole)
        assert found == whole[:end] + [-1] * (len(found) - end)
    assert session.shifted


def test_rows_of_different_lengths_end_by_themselves(llama):
    engine, oracle = llama
    prompts = [[3, 1, 4, 1, 5], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4]]
    expected = [oracle.greedy(prompt, 24) for prompt in prompts]
    stop = expected[0][5]
    session = Session(engine, GREEDY._replace(stops=(stop,)), 512)
    session.feed(prompts)
    for found, whole in zip(continued(session, 24), expected, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert found == whole[:end] + [-1] * (len(found) - end)


def test_a_conversation_computes_only_what_is_new(llama):
    engine, oracle = llama
    session = Session(engine, GREEDY, 512)
    text, new = [3, 1, 4, 1, 5], 5
    for more in [9, 2, 6], [5, 3], [5]:
        before = session.speed.prefill[0]
        session.feed([text])
        assert session.speed.prefill[0] - before <= new
        (found,) = continued(session, 20)
        oracle.assert_greedy(text, found)
        text, new = [*text, *found, *more], len(more) + 1
    changed = [*text[:10], 1, 1]
    session.feed([changed])
    oracle.assert_greedy(changed, continued(session, 8)[0])


def test_a_seed_gives_a_prompt_the_same_text_in_any_batch_and_on_any_mesh():
    model, params = generation_models.weights(context=64, num_kv_heads=2)
    choice = Choice(Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=5), ())
    prompts = [[3, 1, 4, 1, 5], [2, 7], [1, 8, 2, 8, 1, 8]]

    one = generation_models.engine(model, params)

    def texts(rows, engine):
        session = Session(engine, choice, 64)
        session.feed(rows)
        return continued(session, 20)

    together = texts(prompts, one)
    assert [texts([prompt], one)[0] for prompt in prompts] == together
    assert texts(prompts, generation_models.engine(model, params, tensor=2)) == together
    assert texts(prompts[::-1], generation_models.engine(model, params, data=2)) == together[::-1]
    assert len({tuple(text) for text in together}) == 3
