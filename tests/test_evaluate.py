"""The command that scores models: what it prints and writes, what it refuses, and the tasks of a training run."""

import json
import sys

import evaluation_models as models
import numpy as np
import pytest
from conftest import exit_code, records
from hugging_face_folders import folder, write_json

from nanotrain_jax import evaluate, train

ROWS = [
    {"question": f"w{i} w{i + 1}", "choices": [f"w{i + 2}", f"w{i + 3} w{i}", "w9"], "answer": i % 3} for i in range(5)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder with a tokenizer of words, and files to score beside it."""
    path = folder(tmp_path_factory.mktemp("evaluate") / "model")
    for name, content in models.tokenizer_files().items():
        (path / name).write_text(content)
    (path.parent / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("a", "b"):
        (path.parent / f"{name}.txt").write_text(models.text(20, seed=ord(name)))
    return path


def run(*arguments):
    return exit_code(evaluate.main, [str(argument) for argument in arguments])


def test_the_command_prints_a_table_and_writes_json(model, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run("--hf", model, "--text", f"{model.parent}/*.txt", "--stride", 3, "--json", out) == 0
    found = json.loads(out.read_text())["text"]
    printed = capsys.readouterr()
    assert (found["files"], found["tokens"], printed.err) == (2, 40, "")
    assert f"{found['perplexity']:.4f}" in printed.out
    kept = tmp_path / "kept.jsonl"
    task = model.parent / "task.jsonl"
    assert run("--hf", model, "--tasks", task, "--samples", kept, "--limit", 3, "--tensor", 2) == 0
    assert run("--hf", model, "--tasks", task, "--samples", kept, "--json", out) == 0
    assert len(kept.read_text().splitlines()) == 5
    found = json.loads(out.read_text())["tasks"]["task"]
    own = [json.loads(line)["acc"] for line in kept.read_text().splitlines()]
    assert (found["questions"], found["acc"]) == (5, np.mean(own))
    assert f"{found['acc']:.4f} ± {found['acc_stderr']:.4f}" in capsys.readouterr().out


def task(**changes):
    return json.dumps(ROWS[0] | changes) + "\n"


BAD_FILES = [
    ("text", "", "is empty; give files with text"),
    ("text", "w5", "has fewer than two tokens"),
    ("text", b"\xff\xfe", "is not UTF-8 text (invalid start byte at byte 0)"),
    ("tasks", "", "is empty; write rows of"),
    ("tasks", task() + "{", ":2: '{' has not one text"),
    ("tasks", task(context="both"), ":1: "),
    ("tasks", task(choices=["w5", " "]), ":1: a choice is empty: ['w5', ' ']"),
    ("tasks", task(choices=["w5"]), ':1: "choices" must be two or more texts'),
    ("tasks", task(answer=3), ':1: "answer" is 3, not one of the 3 choices'),
    ("tasks", task(answer=-1), ':1: "answer" is -1, not one'),
    ("tasks", task(answer=True), ':1: "answer" is True, not one'),
    ("tasks", task(answer="w10"), ":1: \"answer\" is 'w10', not one"),
    ("tasks", task(choices=["w5 " * 70, "w6"]), "has 70 tokens, but the model's context is 64; shorten it"),
]


def refused(capsys, message, *arguments):
    capsys.readouterr()
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(("kind", "content", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_refused_in_one_line(kind, content, message, model, tmp_path, capsys):
    path = tmp_path / "bad"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if message == "has fewer than two tokens":
        model = without_end(model, tmp_path / "model")
    refused(capsys, message, "--hf", model, f"--{kind}", path)


def without_end(model, path):
    """A folder whose tokenizer has no token that ends documents."""
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", {key: value for key, value in config.items() if key != "eos_token_id"})
    (path / "tokenizer_config.json").unlink()
    return path


BAD_OPTIONS = [
    (["--text", "{folder}/none*.txt"], "matches no file"),
    (["--text", "{folder}/a.txt", "--stride", "65"], "--stride=65 is more than the model's context of 64"),
    (["--text", "{folder}/a.txt", "--stride", "0"], "--stride: '0' must be a number from 1"),
    (["--tasks", "{folder}/none.jsonl"], "none.jsonl"),
    (["--tasks", "{folder}/task.jsonl", "--stride", "2"], "--stride is for --text; remove it"),
    (["--tasks", "{folder}/task.jsonl", "--json", "{folder}/no/out.json"], "its folder does not exist"),
    (["--tasks", "{folder}/task.jsonl", "--samples", "{folder}/a.txt"], "is no record of a sample"),
    ([], "one of the arguments --text --tasks --harness is required"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS, ids=[message for _, message in BAD_OPTIONS])
def test_a_bad_option_is_refused_in_one_line(arguments, message, model, capsys):
    with open(model.parent / "a.txt", "a") as file:
        file.write("\n")
    refused(capsys, message, "--hf", model, *(argument.format(folder=model.parent) for argument in arguments))


def test_a_tokenizer_of_another_model_and_a_missing_harness_are_refused(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "nanotrain_jax.evaluation.harness", raising=False)
    refused(capsys, "pip install 'nanotrain_jax[eval]'", "--hf", model, "--harness", "arc_easy")
    other = without_end(model, tmp_path / "other")
    text = (model / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"w60":60', '"w60":99').replace('"w60": 60', '"w60": 99'))
    refused(capsys, "has 100 ids, but the model has 61", "--hf", other, "--text", f"{model.parent}/a.txt")
