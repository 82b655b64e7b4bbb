"""compare_offload.py runs on a laptop, and its figures are consistent."""

import json
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, small

SCRIPT = ROOT / "scripts" / "gpu" / "compare_offload.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.long
def test_every_mode_is_timed_and_has_the_loss_of_the_step_without_offload(tmp_path):
    parallel = {"data": 2, "persist_below": 0}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(small(runtime={"simulate": 2}, parallel=parallel)))
    done = run("--config", tmp_path / "x.yaml", "--steps", 2, "--modes", "all,nvme", "--nvme-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    plain, all_offloaded, nvme = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert plain["over_plain"] == 1
    assert plain["hidden"] is None
    assert all_offloaded["loss"] == plain["loss"]
    assert nvme["loss"] == pytest.approx(plain["loss"], rel=2e-6)
    for row in all_offloaded, nvme:
        assert row["over_plain"] == row["step_seconds"] / plain["step_seconds"]
    assert all_offloaded["copies_alone_seconds"] > 0
    assert all_offloaded["to_device_bytes"] > 0
    assert not list(tmp_path.glob("tmp*"))


def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path):
    done = run("--config", tmp_path / "none.yaml", "--modes", "disk")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "disk" in done.stderr
