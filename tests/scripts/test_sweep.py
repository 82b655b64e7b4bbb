"""sweep.py trains every combination once, ranks final validation losses, and says where the best is at an edge."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import yaml
from command import TREE
from conftest import ROOT, records

SCRIPT = ROOT / "scripts" / "sweep.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
sweep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sweep)


@pytest.fixture
def request_of(tmp_path, text_files):
    tree = TREE | {"data": TREE["data"] | {"source": f"text:{text_files}"}}
    tree["train"] = {"steps": 4, "eval_every": 2, "eval_steps": 1}
    tree["optimizer"] = {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 1}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    return ["--config", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "out")]


LRS = ["--over", "optimizer.lr=1e-3,1e-2"]


@pytest.mark.long
def test_every_combination_is_trained_once_and_an_interrupted_run_resumes(request_of, tmp_path, capsys):
    request = [*request_of, *LRS, "checkpoint.every=2"]
    assert sweep.main(request) == 0
    first = capsys.readouterr().out
    folders = [tmp_path / "out" / f"optimizer.lr={lr}_seed=0" for lr in ("1e-3", "1e-2")]
    for folder in folders:
        assert [record["step"] for record in records(folder)] == [1, 2, 3, 4]
        tree = yaml.safe_load((folder / "config.yaml").read_text())
        assert tree["optimizer"]["min_lr"] == pytest.approx(tree["optimizer"]["lr"] / 10)
    lines = (folders[0] / "metrics.jsonl").read_text().splitlines()
    (folders[0] / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # as if it had stopped before the last step
    newest = folders[0] / "checkpoints" / "4"
    newest.rename(tmp_path / "4")
    assert sweep.main(request) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == first.splitlines()[-6:]
    assert [len(records(folder)) for folder in folders] == [5, 4]  # step 3 ran twice


@pytest.mark.long
@pytest.mark.parametrize("keys", [["train.epochs=0.1", "train.steps=null"], ["data.exhausted=end", "train.steps=7"]])
def test_runs_whose_length_the_data_decide_are_ranked(keys, request_of, tmp_path, capsys):
    request = [*request_of, *LRS, *keys, "data.seq_len=256"]
    assert sweep.main(request) == 0
    first = capsys.readouterr().out
    assert "best" in first and "no final" not in first
    before = [len(records(folder)) for folder in sorted((tmp_path / "out").glob("*_seed=0"))]
    assert before[0] == before[1] > 0
    assert sweep.main(request) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == first.splitlines()[-6:]
    assert [len(records(folder)) for folder in sorted((tmp_path / "out").glob("*_seed=0"))] == before


@pytest.fixture
def instead_of_training(monkeypatch):
    """Return a function that replaces training by a final loss of the overrides (None: none); -> list of commands."""

    def replace(final_loss):
        commands = []

        def run(command):
            keys = dict(text.split("=", 1) for text in command if "=" in text)
            commands.append(keys)
            loss = final_loss(keys)
            folder = sweep.Path(json.loads(keys["logging.dir"]))
            folder.mkdir(parents=True)
            if loss is not None:
                record = {"step": 4, "loss": 1.0, "val_loss": loss if math.isfinite(loss) else None}
                (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            return int(loss is None)

        monkeypatch.setattr(sweep, "finished", run)
        return commands

    return replace


SAVES = """import signal, sys, time
def save(*_):
    time.sleep(0.6)
    print("saved", file=sys.stderr)
    sys.exit(7)
signal.signal(signal.SIGINT, save)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_after_ctrl_c_a_run_may_save():
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import sweep; "
    code += f"sweep.finished([sys.executable, '-c', {SAVES!r}])"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr.readline() == "ready\n"
        os.killpg(started.pid, signal.SIGINT)
        saved, *traceback = started.stderr.read().splitlines()
    assert saved == "saved"
    assert traceback[-1] == "KeyboardInterrupt"


def test_commas_in_brackets_do_not_separate():
    schedule = "[{steps: 1, batch_size: 4}, {steps: 2, batch_size: 8}]"
    grid = sweep.grid_of([f"train.batch_schedule={schedule},[]", "optimizer.lr=1e-3,3e-3"])
    assert grid == {"train.batch_schedule": [schedule, "[]"], "optimizer.lr": ["1e-3", "3e-3"]}


def test_only_numbers_have_edges():
    best = sweep.Result({"parallel.prefetch": "true", "train.steps": "8"}, [], [1.0])
    lines = sweep.at_edges(best, {"parallel.prefetch": ["true", "false"], "train.steps": ["4", "8"]})
    assert lines == ["train.steps=8 is the largest tried: the best may lie beyond; add values there"]


def test_the_best_is_marked_and_an_edge_is_told(request_of, instead_of_training, tmp_path, capsys):
    losses = {"1e-3": 2.0, "3e-3": 1.5, "1e-2": 1.0, "1e-1": math.nan}
    commands = instead_of_training(lambda keys: losses[keys["optimizer.lr"]] + int(keys["train.seed"]) / 10)
    request = [*request_of, "--over", f"optimizer.lr={','.join(losses)}", "--seeds", "2"]
    assert sweep.main(request) == 0
    shown = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in shown.splitlines() if line.startswith("│")]
    assert rows[0] == ["best", "1e-2", "1.0500", "1.0000", "1.1000"]
    assert rows[-1] == ["1e-1", "-", "nan", "nan"]
    assert "tried" not in shown  # 1e-1 is larger
    assert [keys["optimizer.min_lr"] for keys in commands[::2]] == ["0.0001", "0.0003", "0.001", "0.01"]
    drawn = shown.splitlines()[-1].removeprefix("draw them: python -m nanotrain_jax.compare ").split()
    assert drawn[:2] == [f"{tmp_path}/out/optimizer.lr=1e-2_seed={seed}" for seed in (0, 1)]

    assert sweep.main([*request_of, *LRS, "--seeds", "2"]) == 0  # reads what is there
    assert len(commands) == 8
    assert "optimizer.lr=1e-2 is the largest tried: the best may lie beyond" in capsys.readouterr().out


def test_a_grid_has_all_combinations_and_given_keys_stay(request_of, instead_of_training, capsys):
    commands = instead_of_training(lambda keys: 1.0)
    more = ["--over", "optimizer.betas=[0.9,0.95],[0.9,0.99]", "optimizer.min_lr=0"]
    assert sweep.main([*request_of, *LRS, *more]) == 0
    found = [(keys["optimizer.lr"], keys["optimizer.betas"], keys["optimizer.min_lr"]) for keys in commands]
    assert found == [(lr, betas, "0") for lr in ("1e-3", "1e-2") for betas in ("[0.9,0.95]", "[0.9,0.99]")]


def test_a_run_that_does_not_end_is_told_and_the_others_go_on(request_of, instead_of_training, capsys):
    commands = instead_of_training(lambda keys: None if keys["optimizer.lr"] == "1e-3" else 1.0)
    assert sweep.main([*request_of, *LRS]) == 1
    shown = capsys.readouterr().out
    assert "optimizer.lr=1e-3_seed=0: no final validation loss (exit code 1)" in shown
    assert len(commands) == 2 and "best" in shown


def test_runs_of_other_settings_are_not_compared(request_of, instead_of_training, capsys):
    instead_of_training(lambda keys: 1.0)
    assert sweep.main([*request_of, *LRS]) == 0
    assert sweep.main([*request_of, *LRS, "data.batch_size=16"]) == 2
    assert "its runs have other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--over", "lr=1e-3"],
        ["--over", "optimizer.lr="],
        ["--over", "optimizer.lr=1e-3,1e-3"],
        ["--over", "optimizer.lr=1e-3,fast"],
        ["--over", "optimizer.lrr=1e-3"],
        [*LRS, *LRS],
        [*LRS, "optimizer.lr=1e-3"],
        ["--over", "train.seed=1,2"],
        [*LRS, "logging.dir=here"],
        [*LRS, "--seeds", "0"],
        [*LRS, "train.eval_every=0"],
        [*LRS, "--config", "none.yaml"],
        ["--over", "data.source=text:a/*.txt,text:a-*.txt"],
        ["--over", f"data.source=text:{'a' * 300},stdlib"],
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(request_of, instead_of_training, tmp_path, capsys, wrong):
    commands = instead_of_training(lambda keys: 1.0)
    assert sweep.main([*request_of, *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not commands and not (tmp_path / "out").exists()
