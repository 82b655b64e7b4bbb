"""converge.py: its verdict, which runs it trains, and the command itself."""

import importlib.util
import json
import math
from types import SimpleNamespace

import pytest
import yaml
from command import TREE
from conftest import ROOT, exit_code

SCRIPT = ROOT / "scripts" / "prove" / "converge.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
converge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(converge)

CONTROL = [2.0, 2.5, 2.25]  # spread 0.5


@pytest.mark.parametrize(
    ("losses", "verdict", "cells"),
    [
        ([2.25, 2.25, 2.25], "yes", ["2.2500", "0.0000", "+0.0000", "+0.2500"]),
        ([2.5, 3.0, 2.75], "yes", ["2.7500", "0.5000", "+0.5000", "+0.5000"]),  # exactly the spread
        ([1.5, 2.0, 1.5], "no", ["1.6667", "0.5000", "-0.5833", "-0.7500"]),  # lower is outside as well
        ([2.6, 3.1, 2.85], "no", ["2.8500", "0.5000", "+0.6000", "+0.6000"]),
        ([2.0, math.nan, 2.25], "no", None),
        (CONTROL, "control", ["2.2500", "0.5000", "+0.0000", "+0.0000"]),
    ],
)
def test_a_layout_is_within_the_spread_of_the_control_or_not(losses, verdict, cells):
    name, mean, spread, difference, said, largest = converge.Result("x", losses, CONTROL).row()
    assert (name, said) == ("x", verdict)
    assert cells in (None, [mean, spread, difference, largest])


def jobs(out, *arguments):
    asked = converge.parse(["--out", str(out), *arguments])
    return [converge.job(asked, layout, seed) for layout in asked.layouts for seed in range(asked.seeds)]


def test_layouts_share_tokens_per_step_model_and_data_and_each_seed_has_its_own(tmp_path):
    found = jobs(tmp_path, "--seeds", "2", "--steps", "40", "optimizer.lr=0.5")
    assert len(found) == 2 * len(converge.LAYOUTS) >= 2 * 13
    for seed in range(2):
        same = [(job.config.model, job.config.data, job.config.optimizer, job.config.train) for job in found[seed::2]]
        assert all(each == same[0] for each in same)
        assert (same[0][1].seed, same[0][3].seed, same[0][3].steps, same[0][2].lr) == (seed, seed, 40, 0.5)
    layouts = {job.layout: (job.config.parallel, job.config.precision, job.config.memory) for job in found}
    assert all(a != b for i, a in enumerate(layouts.values()) for b in list(layouts.values())[:i])
    assert {job.config.runtime.simulate for job in found} == {1, 2, 4, 8}


def test_a_base_config_for_gpus_trains_on_gpus(tmp_path):
    config = str(ROOT / "configs" / "gpt2_124m.yaml")
    (one, *_) = jobs(tmp_path, "--layouts", "3d", "--config", config, "data.source=synthetic")
    assert one.config.runtime.simulate == 0
    assert set(one.config.parallel.axes.values()) == {1}


@pytest.fixture
def training(monkeypatch):
    """Train by writing a last record; -> (layout, seed) of the runs, as they are trained, and losses by layout."""
    trained, losses = [], {"one": 2.0, "zero1": 2.05, "topk": 2.2}

    def run(command, **streams):
        folder = next(json.loads(text.partition("=")[2]) for text in command if text.startswith("logging.dir="))
        layout, seed = folder.rsplit("/", 1)[1].split("_")
        trained.append((layout, int(seed)))
        if losses[layout] is not None:
            record = {"step": 300, "loss": 1.0, "val_loss": losses[layout] + 0.1 * int(seed)}
            (converge.Path(folder) / "metrics.jsonl").write_text(json.dumps(record) + "\n")

    monkeypatch.setattr(converge.subprocess, "run", run)
    return SimpleNamespace(trained=trained, losses=losses)


def test_a_layout_outside_the_spread_is_called_so_and_complete_runs_are_read(training, tmp_path, capsys):
    request = ["--layouts", "zero1,topk", "--seeds", "2", "--out", str(tmp_path)]
    assert converge.main(request) == 0
    assert training.trained == [(layout, seed) for layout in ("one", "zero1", "topk") for seed in range(2)]
    assert "topk, seed 1: validation loss 2.3000\n" in capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / "table.txt").read_text().splitlines()
    ]
    assert [(row[0], row[4]) for row in rows[2:]] == [("one", "control"), ("zero1", "yes"), ("topk", "no")]
    assert json.loads((tmp_path / "losses.json").read_text())["topk"] == [2.2, 2.3000000000000003]
    assert (tmp_path / "losses.png").stat().st_size > 5_000
    assert converge.main(request) == 0
    assert len(training.trained) == 6
    (tmp_path / "topk_0" / "metrics.jsonl").write_text('{"step": 299, "loss": 1.0}\n')
    assert converge.main(request) == 0
    assert training.trained[6:] == [("topk", 0)]


def test_runs_of_another_config_are_not_read(training, tmp_path, capsys):
    request = ["--layouts", "zero1", "--seeds", "2", "--out", str(tmp_path)]
    assert converge.main(request) == 0
    assert converge.main([*request, "optimizer.lr=1e-3"]) == 2
    assert "one_0 has a run of another config; remove it" in capsys.readouterr().err
    assert len(training.trained) == 4


@pytest.mark.parametrize("layout", ["one", "zero1"])
def test_a_failed_run_is_reported_and_outside(layout, training, tmp_path, capsys):
    training.losses[layout] = None
    assert converge.main(["--layouts", "zero1,topk", "--seeds", "2", "--out", str(tmp_path)]) == 1
    assert f"{layout}, seed 0: failed; see {tmp_path}/{layout}_0/output.txt" in capsys.readouterr().out
    assert len(training.trained) == 6
    rows = [line.split(" | ") for line in (tmp_path / "table.txt").read_text().splitlines()[2:]]
    verdicts = {row[0].strip("| "): (row[1], row[4]) for row in rows}
    assert verdicts[layout][0] == "nan"
    assert verdicts["zero1"][1] == "no"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--layouts", "zero4"],
        ["--control", "two"],
        ["--seeds", "1"],
        ["--jobs", "0"],
        ["--config", "none.yaml"],
        ["train.eval_every=0"],
        ["data.batch_size=15"],
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, capsys, wrong):
    assert exit_code(converge.main, ["--out", str(tmp_path), *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_layouts_are_trained_and_compared(tmp_path, text_files, capsys):
    tree = TREE | {"data": TREE["data"] | {"source": f"text:{text_files}"}}
    tree["train"] = {"steps": 6, "eval_every": 3, "eval_steps": 1}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    out = tmp_path / "runs"
    request = ["--config", str(tmp_path / "x.yaml"), "--layouts", "zero3", "--seeds", "2", "--out", str(out)]
    assert converge.main([*request, "--jobs", "2", "--steps", "4", "parallel.persist_below=100"]) == 0
    assert "zero3, seed 1: validation loss" in capsys.readouterr().out
    losses = json.loads((out / "losses.json").read_text())
    assert losses["zero3"] == pytest.approx(losses["one"], rel=1e-5)
    assert abs(losses["one"][0] - losses["one"][1]) > 1e-3
    assert "| zero3 |" in (out / "table.txt").read_text()
    assert (out / "losses.png").exists()
