"""compare_mixture.py trains the dense model and both balances once, and reads what is there."""

import json
import sys

import pytest
import yaml
from command import TREE
from conftest import ROOT, exit_code

from nanotrain_jax.costs import counts

sys.path.insert(0, str(ROOT / "scripts" / "prove"))
import compare_mixture


def jobs(out, *arguments):
    asked = compare_mixture.parse(["--out", str(out), *arguments])
    return [compare_mixture.job(asked, name, seed=1) for name in compare_mixture.NAMES]


def test_the_models_have_equal_active_parameters_data_and_steps(tmp_path):
    dense, *mixtures = (
        job.config for job in jobs(tmp_path, "parallel.expert=2", "model.experts.shared=1", "model.vocab_size=61")
    )
    assert dense.model.experts is None
    weights = [(m.model.experts.balance, m.model.experts.weight) for m in mixtures]
    assert weights == [("loss", 0.1), ("bias", 0.0)]
    for mixture in mixtures:
        m = mixture.model
        router = m.num_layers * m.d_model * m.experts.num
        assert counts.matmul_parameters(m) == counts.matmul_parameters(dense.model) + router
        assert (mixture.data, mixture.optimizer, mixture.train) == (dense.data, dense.optimizer, dense.train)


@pytest.mark.long
def test_every_model_is_trained_once_and_compared(tmp_path, text_files, capsys):
    tree = TREE | {"data": TREE["data"] | {"source": f"text:{text_files}"}}
    tree["train"] = {"steps": 6, "eval_every": 3, "eval_steps": 1, "log_every": 1}
    tree["model"] = {"num_layers": 1, "d_model": 32, "num_heads": 2, "experts": {"num": 4, "top_k": 2, "d_ff": 32}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    request = ["--config", str(tmp_path / "x.yaml"), "--seeds", "1", "--out", str(tmp_path / "runs")]
    rows = []
    for _ in range(2):  # the second reads the runs of the first
        assert compare_mixture.main(request) == 0, capsys.readouterr().err
        rows.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert rows[0] == rows[1]
    dense, *mixtures = rows[0]
    assert (dense["model"], dense["loads"]) == ("dense", [])
    for mixture in mixtures:
        assert mixture["losses"] == pytest.approx(dense["losses"], rel=0.1)
        (load,) = mixture["loads"]
        assert 1 <= load <= 4
    assert (tmp_path / "runs" / "losses.png").exists()


@pytest.mark.parametrize(
    "wrong", [["--seeds", "0"], ["--config", "none.yaml"], ["--config", str(ROOT / "configs/quickstart.yaml")]]
)
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, capsys, wrong):
    assert exit_code(compare_mixture.main, ["--out", str(tmp_path), *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
