"""The benchmark script runs on a laptop and prints figures that fit each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import small

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench.py"


def test_the_benchmark_prints_a_table_and_one_json_line(tmp_path):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(small(runtime={"simulate": 2})))
    command = [
        sys.executable,
        SCRIPT,
        "--config",
        tmp_path / "x.yaml",
        "--steps",
        "3",
        "parallel.microbatches=2",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    assert "6 N + 12 L d T" in "\n".join(table)
    found = json.loads(line)
    assert (found["devices"], found["steps"], found["tokens_per_step"]) == (2, 3, 512)
    assert found["tokens_per_second"] == pytest.approx(512 / found["step_seconds"])
    assert found["peak_bytes_compiled"] > 0
    assert found["mfu_full"] is None  # of a CPU


def test_a_wrong_request_is_told_in_one_line(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--config", tmp_path / "none.yaml"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
