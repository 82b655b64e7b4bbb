"""The adapter for lm-evaluation-harness: its evaluator and its arithmetic say what ours say."""

import json

import evaluation_models as models
import numpy as np
import pytest
from generation_models import weights

from nanotrain_jax.evaluation import samples, tasks, text
from nanotrain_jax.evaluation.samples import Kept

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")
CONTEXT = 64
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: acc_bytes}}]
"""
ROLLING = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def begin(total):
    return list


@pytest.fixture(scope="module")
def own():
    return weights("llama", CONTEXT)


@pytest.fixture(scope="module")
def loaded(own):
    return models.loaded(own)


@pytest.fixture(scope="module")
def results(loaded, tmp_path_factory):
    """Folder of the tasks, and what the harness finds with our adapter."""
    from nanotrain_jax.evaluation import harness

    folder = tmp_path_factory.mktemp("harness")
    rng = np.random.default_rng(4)
    rows = [
        {
            "question": models.text(5, seed=i),
            "choices": [models.text(rng.integers(1, 5), seed=rng.integers(1 << 30)) for _ in range(3)],
            "answer": int(rng.integers(3)),
        }
        for i in range(40)
    ]
    texts = [{"text": models.text(count, seed=count)} for count in (5, 150)]
    for name, content, task in (("choice", rows, CHOICE), ("rolling", texts, ROLLING)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        (folder / f"{name}.yaml").write_text(task.format(name=name, data=folder / f"{name}.jsonl"))
    found = harness.evaluate(["choice", "rolling"], folder, harness.Adapter(loaded, 8, begin), None)
    return folder, {name: {key.partition(",")[0]: x for key, x in own.items()} for name, own in found.items()}


def test_multiple_choice_in_the_harness_equals_ours(loaded, results):
    folder, found = results
    asked = tasks.samples(tasks.read(folder / "choice.jsonl"), loaded)
    summary = tasks.summary(samples.run(loaded.engine, asked, Kept(None, loaded), 8, list))
    for name in ("acc", "acc_norm", "acc_bytes", "acc_stderr", "acc_norm_stderr", "acc_bytes_stderr"):
        np.testing.assert_allclose(found["choice"][name], summary[name], err_msg=name)
    assert len({summary[name] for name in tasks.METRICS}) > 1


def test_texts_in_the_harness_equal_ours(loaded, results):
    folder, found = results
    for i, line in enumerate((folder / "rolling.jsonl").read_text().splitlines()):
        (folder / f"{i}.txt").write_text(json.loads(line)["text"])
    asked = text.samples(f"{folder}/*.txt", loaded, CONTEXT, None)
    summary = text.summary(samples.run(loaded.engine, asked, Kept(None, loaded), 8, list))
    np.testing.assert_allclose(found["rolling"]["bits_per_byte"], summary["bits_per_byte"], rtol=1e-6)


def test_generation_in_the_harness_is_greedy_and_stops(own, loaded):
    from lm_eval.api.instance import Instance

    from nanotrain_jax.evaluation import harness

    prompts = [models.text(4, seed=1), models.text(60, seed=2)]
    oracle = models.Oracle(*own)
    ids = [[int(word[1:]) for word in prompt.split()][-(CONTEXT - 8) :] for prompt in prompts]
    greedy = [oracle.greedy(own_ids, 8) for own_ids in ids]
    stop = f"w{greedy[0][3]}"
    asked = [Instance("generate_until", {}, (prompts[i], how), i) for i, how in asked_of(stop)]
    found = harness.Adapter(loaded, 2, begin).generate_until(asked)
    assert [words(answer) for answer in found] == [until_end(greedy[0]), until_end(greedy[1]), until(greedy[0], stop)]


def asked_of(stop):
    return (0, {"until": [], "max_gen_toks": 8}), (1, {"max_gen_toks": 8}), (0, {"until": [stop], "max_gen_toks": 8})


def words(answer):
    return answer.split()


def until_end(ids):
    return [f"w{i}" for i in (ids[: ids.index(models.END)] if models.END in ids else ids)]


def until(ids, stop):
    found = until_end(ids)
    return found[: found.index(stop)] if stop in found else found


def test_requests_of_the_harness_begin_with_the_begin_token(own):
    from lm_eval.api.instance import Instance

    from nanotrain_jax.evaluation import harness

    oracle, adapter = models.Oracle(*own), harness.Adapter(models.loaded(own, begin="w1"), 2, begin)
    asked = {
        "loglikelihood": [("w7 w8", " w9"), ("", "w9"), ("w1 w7", " w9")],
        "loglikelihood_rolling": [("w7 w8 w9",)],
        "generate_until": [("w7 w8", {"max_gen_toks": 3}), ("", {"max_gen_toks": 3})],
    }
    of = {kind: [Instance(kind, {}, args, i) for i, args in enumerate(rows)] for kind, rows in asked.items()}
    found = [*(log for log, _ in adapter.loglikelihood(of["loglikelihood"]))]
    found += adapter.loglikelihood_rolling(of["loglikelihood_rolling"])
    expected = [oracle.log(tokens)[0] for tokens in ([1, 7, 8, 9], [1, 9], [1, 7, 9])]
    np.testing.assert_allclose(found, [*expected, oracle.log([1, 7, 8, 9], 3)[0]], rtol=1e-5)
    answers = adapter.generate_until(of["generate_until"])
    greedy = [until_end(oracle.greedy(prompt, 3)) for prompt in ([1, 7, 8], [1])]
    assert [words(answer) for answer in answers] == [[word for word in own if word != "w1"] for own in greedy]
