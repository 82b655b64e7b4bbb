"""Runs on mixtures, from the command: shares, validation sets in every sink, resumed bitwise, in several processes."""

from itertools import accumulate

import pytest
import yaml
from command import TREE, losses, main, same, saved_state
from conftest import records
from launching import finished, launched

from nanotrain_jax import generate

NAMED = "val_loss/prose", "val_loss/code", "val_loss/further"


@pytest.fixture
def config_file(tmp_path):
    for name, word in ("prose", "la"), ("code", "def"), ("further", "mi"):
        (tmp_path / name).mkdir()
        for i in range(30 if name == "prose" else 9):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i}: {f'{word} ' * 30}\n")
    source = [
        {"name": "prose", "source": f"text:{tmp_path}/prose", "weight": 7},
        {"name": "code", "source": f"text:{tmp_path}/code", "weight": 3},
    ]
    further = [{"name": "further", "source": f"text:{tmp_path}/further"}]
    sections = {"data": TREE["data"] | {"source": source, "validation": further}}
    sections |= {"train": TREE["train"] | {"steps": 6, "eval_every": 3, "log_every": 1}, "checkpoint": {"every": 1}}
    path = tmp_path / "mixture.yaml"
    path.write_text(yaml.safe_dump(TREE | sections))
    return path


@pytest.mark.long
def test_a_mixture_logs_its_validation_sets_and_resumes_bitwise(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/whole", "logging.tensorboard=true") == 0
    told = capsys.readouterr().out
    assert "mixture of prose 0.7, code 0.3: " in told and "70.000% of tokens" in told and "read  " in told
    for record in records(tmp_path / "whole"):
        assert (record["step"] % 3 == 0) == ("val_loss" in record) == all(name in record for name in NAMED)
        if "val_loss" in record:
            assert record["val_loss"] == pytest.approx(0.7 * record[NAMED[0]] + 0.3 * record[NAMED[1]], rel=1e-12)
    (board,) = (tmp_path / "whole" / "tensorboard").iterdir()
    assert all(name.encode() in board.read_bytes() for name in (*NAMED, "epochs/prose", "epochs/code"))
    rows = 6 * 8
    assert records(tmp_path / "whole")[-1]["epochs/code"] * code_rows(told) == pytest.approx(0.3 * rows, abs=0.5)

    for steps in 4, 6:
        assert main(config_file, f"logging.dir={tmp_path}/parts", f"train.steps={steps}") == 0
    assert "may repeat" not in capsys.readouterr().out
    assert losses(tmp_path / "parts")[6] == losses(tmp_path / "whole")[6]
    same(saved_state(tmp_path / "parts")[1], saved_state(tmp_path / "whole")[1])
    assert generate.main(["--run", f"{tmp_path}/whole", "--prompt", "la", "--tokens", "2"]) == 0


def code_rows(told):
    (line,) = [line for line in told.splitlines() if line.startswith("  code ") and "of tokens" in line]
    return int(line.split("of tokens; ")[1].split()[0].replace(",", ""))


@pytest.mark.long
def test_stages_have_mixtures_of_their_own_and_a_run_ends_with_a_source(config_file, tmp_path, capsys):
    swapped = f"[{{name: prose, source: 'text:{tmp_path}/prose'}}, {{name: code, source: 'text:{tmp_path}/code'}}]"
    stages = f"train.stages=[{{name: first, steps: 2}}, {{name: even, steps: 2, data: {swapped}}}]"
    assert main(config_file, f"logging.dir={tmp_path}/stages", "train.steps=4", "train.eval_every=0", stages) == 0
    told = capsys.readouterr().out
    assert "lr 0.001, mixture of prose 0.7, code 0.3" in told and "lr 0.001, mixture of prose 0.5, code 0.5" in told
    assert told.count("50.000% of tokens") == 2
    kept = yaml.safe_load((tmp_path / "stages" / "config.yaml").read_text())
    assert [part["weight"] for part in kept["train"]["stages"][1]["data"]] == [1.0, 1.0]

    ends = ["data.exhausted=end", "data.batch_size=4", "train.steps=1000", "train.eval_every=0"]
    assert main(config_file, f"logging.dir={tmp_path}/ends", *ends) == 0
    assert "no source is read twice" in capsys.readouterr().out
    last = records(tmp_path / "ends")[-1]
    assert last["step"] < 1000
    assert 0.8 < max(last["epochs/prose"], last["epochs/code"]) <= 1
    assert main(config_file, f"logging.dir={tmp_path}/stages", *ends, stages) == 2
    assert "exhausted=end with train.stages" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_a_mixture_is_the_same_in_several_processes_and_resumes_in_others(processes, config_file, tmp_path):
    keys = ["runtime.simulate=4"]
    finished(launched(1, config_file, *keys, f"logging.dir={tmp_path}/one"))
    for count, steps in zip((processes, 1, processes), accumulate([2, 1, 3]), strict=True):
        finished(launched(count, config_file, *keys, f"logging.dir={tmp_path}/run", f"train.steps={steps}"))
    of_one, found = losses(tmp_path / "one"), losses(tmp_path / "run")
    assert found.keys() == of_one.keys()
    for step, values in of_one.items():
        assert found[step][0] == pytest.approx(values[0], rel=1e-6)
    assert found[6][1] == pytest.approx(of_one[6][1], rel=1e-6)
