"""The command that scores models: what it prints and writes, what it refuses, and the tasks of a training run."""

import json
import operator
import sys

import evaluation_models as models
import numpy as np
import pytest
from conftest import cover, exit_code, records
from hugging_face_folders import folder, write_json

from nanotrain_jax import evaluate, train
from nanotrain_jax.evaluation import samples

ROWS = [
    {"question": f"w{i} w{i + 1}", "choices": [f"w{i + 2}", f"w{i + 3} w{i}", "w9"], "answer": i % 3} for i in range(5)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder with a tokenizer of words, and files to score beside it."""
    path = folder(tmp_path_factory.mktemp("evaluate") / "model")
    for name, content in models.tokenizer_files().items():
        (path / name).write_text(content)
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    (path.parent / "task.jsonl").write_text(rows, encoding="utf-8-sig")  # with a byte order mark
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
    ("text", b"\xff\xff", "is not UTF-8 text (invalid start byte at byte 0)"),
    ("tasks", "", "is empty; write rows of"),
    ("tasks", task() + "{", ":2: '{' has not one text"),
    ("tasks", task(context="both"), ":1: "),
    ("tasks", task(choices=["w5", " "]), ":1: a choice is empty: ['w5', ' ']"),
    ("tasks", task(choices=["w5"]), ':1: "choices" must be two or more texts'),
    ("tasks", task(question="w5 \ud800"), ":1: half of a surrogate pair (\\ud800 to \\udfff) is no text"),
    ("tasks", task(answer=3), ':1: "answer" is 3, not one of the 3 choices'),
    ("tasks", task(answer=-1), ':1: "answer" is -1, not one'),
    ("tasks", task(answer=True), ':1: "answer" is True, not one'),
    ("tasks", task(answer="w10"), ":1: \"answer\" is 'w10', not one"),
    ("tasks", task(choices=["w5 " * 70, "w6"]), "has 70 tokens, but the model's context is 24; shorten it"),
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
    (["--text", "{folder}/a.txt", "--stride", "25"], "--stride=25 is more than the model's context of 24"),
    (["--text", "{folder}/a.txt", "--stride", "0"], "--stride: '0' must be a number from 1"),
    (["--tasks", "{folder}/none.jsonl"], "none.jsonl' cannot be read (No such file or directory); give a file with"),
    (["--tasks", "{folder}/task.jsonl", "--tasks", "{folder}/task.jsonl"], "two files have one name, of task, task"),
    (["--tasks", "{folder}/task.jsonl", "--stride", "2"], "--stride is for --text; remove it"),
    (["--tasks", "{folder}/task.jsonl", "--json", "{folder}/no/out.json"], "its folder does not exist"),
    (["--tasks", "{folder}/task.jsonl", "--samples", "{folder}/a.txt"], "line 1 is no record of a sample"),
    (["--tasks", "{folder}/task.jsonl", "--samples", "{folder}/no/kept"], "no/kept' cannot be read and written"),
    (["--tasks", "{folder}/task.jsonl", "--json", "{folder}"], "is a folder; give a file"),
    (["--harness", "arc_easy", "--include", "{folder}/a.txt"], "a.txt' is no folder; give one with tasks"),
    ([], "one of the arguments --text --tasks --harness is required"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS, ids=[message for _, message in BAD_OPTIONS])
def test_a_bad_option_is_refused_in_one_line(arguments, message, model, capsys):
    refused(capsys, message, "--hf", model, *(argument.format(folder=model.parent) for argument in arguments))


def test_a_tokenizer_of_another_model_and_a_missing_harness_are_refused(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "nanotrain_jax.evaluation.harness", raising=False)
    refused(capsys, "pip install 'nanotrain_jax[eval]'", "--hf", model, "--harness", "arc_easy")
    other = without_end(model, tmp_path / "other")
    text = (model / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"w60":60', '"w60":99').replace('"w60": 60', '"w60": 99'))
    refused(capsys, "has 100 ids, but the model has 61", "--hf", other, "--text", f"{model.parent}/a.txt")


RUN = {
    "model": {"num_layers": 4, "d_model": 32, "num_heads": 2, "d_ff": 64, "vocab_size": 259},
    "precision": {"compute": "float32"},
    "data": {"batch_size": 8, "seq_len": 32},
    "optimizer": {"lr": 3e-2, "schedule": "constant"},
    "train": {"steps": 2, "eval_every": 1},
    "parallel": {"data": 2, "tensor": 2, "pipe": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2},
    "logging": {"progress": "none"},
    "runtime": {"simulate": 8},
}

SYNC = ["parallel.data=2", "parallel.replica=2", "parallel.sync_every=2"]


def trained(tmp_path, text_files, *keys):
    """The exit code of a run."""
    tasks = tmp_path / "letters.jsonl"
    rows = [{"context": "de", "choices": ["f", "x y", "q"], "answer": i % 3} for i in range(4)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(tmp_path / "run.yaml", RUN | {"data": RUN["data"] | {"source": f"text:{text_files}"}})
    arguments = [f"logging.dir={tmp_path}/run", f"train.tasks=[{tasks}]", *keys]
    return exit_code(train.main, ["--config", str(tmp_path / "run.yaml"), *arguments])


LAYOUTS = cover(
    [],
    [("pipe", []), ("sync", ["parallel.pipe=1", "parallel.chunks=1", "parallel.schedule=1f1b", *SYNC])],
    name=operator.itemgetter(0),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_scores_tasks_with_its_weights_at_each_evaluation(layout, tmp_path, text_files, monkeypatch):
    scored, run_samples = [], samples.run
    monkeypatch.setattr(samples, "run", lambda *args: scored.append(run_samples(*args)) or scored[-1])
    assert trained(tmp_path, text_files, *layout[1]) == 0
    found = [record for record in records(tmp_path / "run") if "task/letters" in record]
    assert [record["step"] for record in found] == [1, 2]
    out, kept = tmp_path / "out.json", tmp_path / "kept.jsonl"
    assert run("--run", tmp_path / "run", "--tasks", tmp_path / "letters.jsonl", "--json", out, "--samples", kept) == 0
    command = json.loads(out.read_text())
    scores = command["tasks"]["letters"]
    assert command["model"]["step"] == 2
    assert (found[-1]["task/letters"], found[-1]["task/letters_norm"]) == (scores["acc"], scores["acc_norm"])
    in_training, expected, by_command = ([record["log_likelihoods"] for record in own] for own in scored)
    np.testing.assert_allclose(expected, by_command, rtol=1e-5)
    assert abs(np.subtract(in_training, expected)).min() > 1e-3


OFFLOAD = ["memory.offload_params=host", "memory.offload_optimizer=host"]
BAD_RUNS = [
    (["data.source=synthetic"], "train.tasks with data.source=synthetic, which has no tokenizer"),
    (["train.eval_every=0"], "train.tasks without evaluations; set train.eval_every"),
    (["train.tasks=[none.jsonl]"], "train.tasks='none.jsonl' cannot be read (No such file or directory); give a file"),
    (["parallel.zero=3", *OFFLOAD], "train.tasks with memory.offload_params=host"),
    (["model.factory=plain_model:build"], "gives a model without decode"),
]


@pytest.mark.parametrize(("keys", "message"), BAD_RUNS, ids=[message for _, message in BAD_RUNS])
def test_a_run_that_cannot_score_tasks_is_refused_at_the_start(keys, message, tmp_path, text_files, capsys):
    assert trained(tmp_path, text_files, *keys) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
