"""Texts and multiple choice: what is computed of log-likelihoods, what is kept of samples, what is refused."""

import json
import math

import evaluation_models as models
import numpy as np
import pytest
from generation_models import weights

from nanotrain_jax.evaluation import samples, tasks, text
from nanotrain_jax.evaluation.samples import Kept

CONTEXT = 40


@pytest.fixture(scope="module")
def own():
    return weights("llama", CONTEXT)


@pytest.fixture(scope="module")
def loaded(own):
    return models.loaded(own)


def scored(loaded, asked, path=None, rows=8):
    """Records of samples, and how many were scored now."""
    kept, done = Kept(path, loaded), []
    known = len(kept.found)
    found = samples.run(loaded.engine, asked, kept, rows, lambda: done.append(1))
    assert len(done) == len(asked)
    return found, len(asked) - known


@pytest.mark.parametrize(("stride", "end"), [(None, "w3"), (7, None), (CONTEXT, "w3")])
def test_the_loss_of_texts_equals_the_oracle(stride, end, own, tmp_path):
    loaded, oracle = models.loaded(own, end=end), models.Oracle(*own)
    (tmp_path / "long.txt").write_text(models.text(100))
    (tmp_path / "short.txt").write_text(models.text(9, seed=1))
    found = text.summary(scored(loaded, text.samples(f"{tmp_path}/*.txt", loaded, stride, None))[0])
    logs, size = [], 0
    for path in tmp_path.iterdir():
        words = path.read_text()
        tokens = ([models.END] if end else []) + [int(word[1:]) for word in words.split()]
        for i in range(1, len(tokens)):
            step = stride or CONTEXT // 2
            last = CONTEXT + max(0, math.ceil((i - CONTEXT) / step)) * step  # of the window that scores it
            first = max(0, min(last, len(tokens) - 1) - CONTEXT)
            logs.append(oracle.log(tokens[first : i + 1])[0])
        size += len(words.encode())
    assert (found["files"], found["tokens"], found["bytes"]) == (2, len(logs), size)
    np.testing.assert_allclose(found["loss"], -np.mean(logs), rtol=1e-5)
    np.testing.assert_allclose(found["perplexity"], np.exp(-np.mean(logs)), rtol=1e-5)
    np.testing.assert_allclose(found["bits_per_byte"], -np.sum(logs) / np.log(2) / size, rtol=1e-5)


def questions(count):
    """Rows of a file: choices of different lengths, a context longer than the model's."""
    rng, rows = np.random.default_rng(3), []
    for i in range(count):
        choices = [models.text(rng.integers(1, 6), seed=rng.integers(1 << 30)) for _ in range(2 + i % 3)]
        choices[0] += "\u00e9\u00e9\u00e9" * (i % 2)  # an unknown word, of more bytes than characters
        row = {"question": models.text(4, seed=i)} if i % 3 else {"context": models.text(10 + 40 * (i == 3), seed=i)}
        answer = int(rng.integers(len(choices)))
        rows.append(row | {"choices": choices, "answer": answer if i % 2 else choices[answer]})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_choices_are_scored_as_the_harness_does(own, loaded, tmp_path):
    rows = questions(40)
    asked = tasks.samples(tasks.read(write(tmp_path / "t.jsonl", rows)), loaded)
    records, _ = scored(loaded, asked)
    assert [i for i, one in enumerate(asked) if any(request.is_cut for request in one.requests)] == [3]
    oracle, found = models.Oracle(*own), {"acc": [], "acc_norm": [], "acc_bytes": []}
    for row, record in zip(rows, records, strict=True):
        logs, choices = record["log_likelihoods"], row["choices"]
        if row in rows[:6]:
            before = row["context"] if "context" in row else f"Question: {row['question']}\nAnswer:"
            ids = [[own_id(word) for word in part.split()] for part in (before, *choices)]
            expected = [oracle.log((ids[0] + own)[-CONTEXT - 1 :], len(own))[0] for own in ids[1:]]
            np.testing.assert_allclose(logs, expected, rtol=1e-5)
        gold = choices.index(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
        found["acc"].append(float(np.argmax(logs) == gold))
        found["acc_norm"].append(float(np.argmax(logs / np.array([float(len(i)) for i in choices])) == gold))
        found["acc_bytes"].append(float(np.argmax(logs / np.array([float(len(i.encode())) for i in choices])) == gold))
    summary = tasks.summary(records)
    for name, values in found.items():
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
        np.testing.assert_allclose(summary[name], mean)
        np.testing.assert_allclose(summary[f"{name}_stderr"], deviation / math.sqrt(len(values)))
    assert len({tuple(values) for values in found.values()}) == 3


def own_id(word):
    return int(word[1:]) if word[1:].isdigit() else 0


def test_a_file_of_samples_is_resumed_by_the_same_model_alone(own, loaded, tmp_path):
    rows, kept = questions(8), tmp_path / "samples.jsonl"
    asked = tasks.samples(tasks.read(write(tmp_path / "t.jsonl", rows)), loaded)
    expected, scored_anew = scored(loaded, asked[:5], kept)
    assert scored_anew == 5
    lines = kept.read_text()
    kept.write_text(lines[: len(lines) - 20])  # of a killed command
    found, scored_anew = scored(loaded, asked, kept)
    kept_lines = [json.loads(line) for line in lines.splitlines()[:-1]]
    assert scored_anew == 4
    assert all(record in found for record in kept_lines)
    for a, b in zip(found, expected, strict=False):
        np.testing.assert_allclose(a["log_likelihoods"], b["log_likelihoods"], rtol=1e-5)
    assert len(kept.read_text().splitlines()) == 8
    on_two, scored_anew = scored(models.loaded(own, data=1, tensor=2), asked, kept)
    assert (on_two, scored_anew) == (found, 0)
    model, params = own
    params = params | {"ends": params["ends"] | {"head_VD": params["ends"]["head_VD"] * np.float32(1.5)}}
    others, _ = scored(models.loaded((model, params)), asked, kept)
    assert len(kept.read_text().splitlines()) == 16
    assert others[0]["log_likelihoods"] != found[0]["log_likelihoods"]


def test_samples_are_scored_again_where_the_model_or_its_dtype_is_another(loaded, tmp_path):
    (asked,) = tasks.samples(tasks.read(write(tmp_path / "t.jsonl", questions(1))), loaded)

    def key(config, sample=asked):
        return Kept(tmp_path / "samples.jsonl", loaded._replace(config=config)).key(sample)

    config, longer = loaded.config, asked.requests[0]._replace(tokens=[models.END, *asked.requests[0].tokens])
    others = [config.replace("model", **change) for change in (
        {"rope_theta": 777.0}, {"norm_eps": 3e-3}, {"sliding_window": 4}, {"num_kv_heads": 1}, {"max_seq_len": 39},
    )]  # fmt: skip
    others += [config.replace("precision", compute="bfloat16")]
    keys = [key(config), *map(key, others), key(config, asked._replace(requests=[longer, *asked.requests[1:]]))]
    assert len({*keys}) == len(keys)
    assert key(config.replace("model", attention="cudnn")) == key(config.replace("model", loss_chunk=7)) == keys[0]


def test_one_question_has_no_standard_error(loaded, tmp_path):
    asked = tasks.samples(tasks.read(write(tmp_path / "t.jsonl", questions(2)), limit=1), loaded)
    summary = tasks.summary(scored(loaded, asked)[0])
    assert (summary["questions"], summary["acc_stderr"]) == (1, None)
