"""Runs on pairs, from the command: what they learn, log and keep, how they resume, and what is refused."""

import json
import math

import jax
import numpy as np
import pytest
import yaml
from chat_data import write_rows
from command import same, saved_state
from conftest import exit_code, records
from test_adapters import model_of

from nanotrain_jax import train
from nanotrain_jax.data import batches as data
from nanotrain_jax.run import model_config

COLOURS = "red", "blue", "green", "grey"
OBJECTIVE = {"kind": "dpo", "beta": 0.5}


def rows(count=60):
    """Of two colours the one that comes first in COLOURS is preferred."""
    rng = np.random.default_rng(0)
    for i in range(count):
        better, worse = sorted(rng.permutation(4)[:2])
        yield {"prompt": f"{i}: which one? ", "chosen": COLOURS[better], "rejected": COLOURS[worse]}


def write(path, **sections):
    tree = {
        "model": {"num_layers": 1, "d_model": 32, "num_heads": 4, "d_ff": 64},
        "parallel": {"data": 2},
        "precision": {"compute": "float32"},
        "data": {"batch_size": 8, "seq_len": 96, "val_fraction": 0.1},
        "optimizer": {"schedule": "constant", "lr": 0.01},
        "train": {"steps": 24, "eval_every": 8, "objective": OBJECTIVE},
        "checkpoint": {"every": 12},
        "logging": {"tensorboard": False, "progress": "lines"},
        "runtime": {"simulate": 8, "compile_cache": False},
    }
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | keys
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.fixture
def config_file(tmp_path):
    source = write_rows(tmp_path / "pairs.jsonl", *rows()).replace("chat:", "pairs:")
    return write(tmp_path / "dpo.yaml", data={"source": source})


def main(config_file, folder, *overrides):
    return exit_code(train.main, ["--config", config_file, f"logging.dir={folder}", *overrides])


def of_training_pairs(config_file, folder):
    """Return what an evaluation of a finished run on the pairs that it was trained on sums."""
    run = train.prepare(model_config.load(config_file, [f"logging.dir={folder}"]))
    batches = data.evaluation(run.dataset.train, run.step.batch, 100)
    sums = [jax.device_get(run.step.evaluate(run.state.params, batch)) for batch in batches]
    return jax.tree.map(lambda *xs: float(sum(xs)), *sums)


@pytest.mark.long
def test_a_run_begins_at_log_2_ranks_pairs_right_and_resumes_bitwise(config_file, tmp_path, capsys):
    assert main(config_file, tmp_path / "whole") == 0
    told = capsys.readouterr().out
    assert "60 pairs read" in told and "before its first step: 60 pairs" in told and "of held-out pairs" in told
    log = {record["step"]: record for record in records(tmp_path / "whole")}
    np.testing.assert_allclose(log[1]["loss"], math.log(2), rtol=1e-6)
    assert log[24]["loss"] < 0.3 and log[24]["accuracy"] > 0.9 and log[24]["margin"] > 1
    assert log[8].keys() >= {"val_loss", "accuracy", "margin"}
    assert log[24]["train_accuracy"] > 0.9 and log[24]["train_margin"] > 1 and log[1]["train_margin"] == 0
    loss, count, sums = of_training_pairs(config_file, tmp_path / "whole")
    assert count == 54 and loss / count < 0.3 and sums["accuracy"] / count > 0.9

    assert main(config_file, tmp_path / "parts", "train.steps=12") == 0
    assert main(config_file, tmp_path / "parts") == 0
    told = capsys.readouterr().out
    assert "resumed from step 12" in told and told.count("computing the reference") == 1
    same(saved_state(tmp_path / "parts")[1], saved_state(tmp_path / "whole")[1])
    assert records(tmp_path / "parts")[-1]["margin"] == log[24]["margin"]
    refuses_another_reference(config_file, tmp_path / "parts", capsys)


def refuses_another_reference(config_file, run, capsys):
    """A finished run is not looked at again with a reference that is not its own."""
    kept = (run / "reference.npz").read_bytes()
    other = write_rows(run.parent / "other.jsonl", *rows(50)).replace("chat:", "pairs:")
    for content, overrides, named in (
        (None, [], "reference.npz is missing"),
        (kept, [f"data.source='{other}'"], "is of other pairs"),
    ):
        (run / "reference.npz").unlink(missing_ok=True)
        if content:
            (run / "reference.npz").write_bytes(content)
        assert main(config_file, run, *overrides) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert named in line


@pytest.fixture
def with_adapters(tmp_path):
    model = model_of(tmp_path)
    pairs = [{"prompt": "w5 ", "chosen": f"w{i}", "rejected": f"w{i + 1}"} for i in range(6, 50, 2)]
    source = write_rows(tmp_path / "pairs.jsonl", *pairs).replace("chat:", "pairs:")
    path = tmp_path / "lora.yaml"
    write(
        path,
        data={"source": source, "seq_len": 16, "val_fraction": 0.0},
        train={"lora": {"rank": 4}, "steps": 4, "eval_every": 0},
        checkpoint={"resume": f"hf:{model}", "every": 2},
    )
    tree = yaml.safe_load(path.read_text())
    del tree["model"]
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.mark.long
def test_adapters_learn_from_pairs_beside_their_frozen_reference(with_adapters, tmp_path):
    assert main(with_adapters, tmp_path / "whole") == 0
    log = records(tmp_path / "whole")
    np.testing.assert_allclose(log[0]["loss"], math.log(2), rtol=1e-6)
    assert log[-1]["loss"] < 0.69


@pytest.mark.long
def test_adapters_resume_with_their_reference_bitwise(with_adapters, tmp_path):
    assert main(with_adapters, tmp_path / "whole") == 0
    assert main(with_adapters, tmp_path / "parts", "train.steps=2") == 0
    assert main(with_adapters, tmp_path / "parts") == 0
    same(saved_state(tmp_path / "parts")[1][0]["params"], saved_state(tmp_path / "whole")[1][0]["params"])


def test_pairs_are_shown(config_file, tmp_path, capsys):
    assert main(config_file, tmp_path / "shown", "--show-data", "1", "data.pack=none") == 0
    told = capsys.readouterr().out
    assert "row 1: 1 pair, " in told and " chosen: " in told and " rejected: " in told
    assert not (tmp_path / "shown").exists()


WRONG = {
    "objective without pairs": (["data.source=synthetic", "model.vocab_size=257"], "which has no pairs"),
    "pairs without objective": (["train.objective=null"], "without an objective"),
    "stages": (["train.stages=[{name: a, steps: 2}]"], "with train.stages: the reference is the model before"),
    "cut": (["data.too_long=cut"], "whole completions are compared"),
    "too long": (["data.seq_len=32"], "each of the 60 pairs is longer than data.seq_len=32"),
    "another kind": (["train.objective={kind: ipo}"], "train.objective.kind='ipo'"),
    "a model that gives no losses of tokens": (
        ["model.factory=plain_model:build", "model.vocab_size=257"],
        "plain_model:build",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_requests_that_cannot_be_are_refused_in_one_line(wrong, config_file, tmp_path, capsys):
    overrides, named = WRONG[wrong]
    assert main(config_file, tmp_path / "run", *overrides) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert named in line
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_without_the_objective_is_not_mixed_with_it(config_file, tmp_path, capsys):
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"prompt": r["prompt"], "completion": r["chosen"]}) + "\n" for r in rows()))
    first = [f"data.source='chat:{chat}'", "train.objective=null", "train.steps=2"]
    assert main(config_file, tmp_path / "first", *first) == 0
    capsys.readouterr()
    assert main(config_file, tmp_path / "first") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "holds a run without train.objective" in line
    resumed = f"checkpoint.resume={tmp_path}/first/checkpoints"
    assert main(config_file, tmp_path / "second", resumed, "train.steps=1") == 0
    (record,) = records(tmp_path / "second")
    assert record["step"] == 1  # of the run before it takes the weights alone
    np.testing.assert_allclose(record["loss"], math.log(2), rtol=1e-6)
