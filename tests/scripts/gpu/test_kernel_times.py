"""kernel_times.py finds what a step runs, and the bytes that the audit counts for it."""

import json
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, small

SCRIPT = ROOT / "scripts" / "gpu" / "kernel_times.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.long
def test_times_and_bytes_of_a_step(tmp_path):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(small(runtime={"simulate": 1}, parallel={"data": 1})))
    done = run("--config", tmp_path / "x.yaml", "--steps", 2, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    kernels = json.loads((tmp_path / "out" / "step.json").read_text())
    assert figures["kernels"] == sum(kernel["count"] for kernel in kernels.values()) > 0
    assert figures["bytes"] == pytest.approx(sum(kernel["bytes"] for kernel in kernels.values()))
    in_program = [kernel for kernel in kernels.values() if kernel["source"] != "not in the program"]
    assert sum(kernel["bytes"] > 0 for kernel in in_program) > len(kernels) / 2
    assert 0 <= figures["idle_seconds"] < figures["step_seconds"]
    assert (tmp_path / "out" / "step.hlo.gz").stat().st_size > 0


def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path):
    done = run("--config", tmp_path / "none.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
