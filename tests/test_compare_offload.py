"""The comparison of what rests in host memory runs on a laptop, and its rows fit each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import small

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_offload.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.long
def test_every_mode_is_timed_beside_the_plain_run_and_learns_the_same(tmp_path):
    parallel = {"data": 2, "persist_below": 0}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(small(runtime={"simulate": 2}, parallel=parallel)))
    done = run("--config", tmp_path / "x.yaml", "--steps", 2, "--modes", "all,nvme", "--nvme-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    plain, everything, files = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert plain["over_plain"] == 1
    assert plain["hidden"] is None
    assert everything["loss"] == plain["loss"]
    assert files["loss"] == pytest.approx(plain["loss"], rel=2e-6)
    for row in everything, files:
        assert row["over_plain"] == row["step_seconds"] / plain["step_seconds"]
    assert everything["copies_alone_seconds"] > 0
    assert everything["to_device_bytes"] > 0
    assert not list(tmp_path.glob("tmp*"))


def test_a_wrong_request_is_told_in_one_line(tmp_path):
    done = run("--config", tmp_path / "none.yaml", "--modes", "disk")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "disk" in done.stderr
