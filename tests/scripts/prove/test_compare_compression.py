"""compare_compression.py trains every way once, and reads what is there."""

import json
import sys

import pytest
import yaml
from command import TREE
from conftest import ROOT, exit_code

sys.path.insert(0, str(ROOT / "scripts" / "prove"))
import compare_compression


@pytest.mark.long
def test_every_way_is_trained_once_and_compared(tmp_path, text_files, capsys):
    tree = TREE | {"data": TREE["data"] | {"source": f"text:{text_files}"}}
    tree["train"] = {"steps": 6, "eval_every": 3, "eval_steps": 1}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    request = ["--config", str(tmp_path / "x.yaml"), "--seeds", "1", "--out", str(tmp_path / "runs")]
    request += ["--ways", "int8,sync:2+topk:0.5,int8+after:2", "parallel.persist_below=100", "optimizer.warmup_steps=2"]
    rows = []
    for _ in range(2):  # the second reads the runs of the first
        assert compare_compression.main(request) == 0, capsys.readouterr().err
        rows.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert rows[0] == rows[1]
    plain, int8, local, later = rows[0]
    assert [row["way"] for row in rows[0]] == ["none", "int8", "sync:2+topk:0.5", "int8+after:2"]
    assert later["megabytes"] == pytest.approx((2 * plain["megabytes"] + 4 * int8["megabytes"]) / 6)
    assert int8["megabytes"] < 0.5 * plain["megabytes"]
    assert local["megabytes"] < plain["megabytes"]
    for row in rows[0]:
        assert row["losses"] == pytest.approx(plain["losses"], rel=0.1)
    assert (tmp_path / "runs" / "losses.png").exists()


@pytest.mark.parametrize("wrong", [["--ways", "topk"], ["--seeds", "0"], ["--config", "none.yaml"]])
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, capsys, wrong):
    assert exit_code(compare_compression.main, ["--out", str(tmp_path), *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
