"""bench.py runs on a laptop, and its figures are consistent."""

import json
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, small

SCRIPT = ROOT / "scripts" / "measure" / "bench.py"


@pytest.mark.long
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
    figures = json.loads(line)
    assert (figures["devices"], figures["steps"], figures["tokens_per_step"]) == (2, 3, 512)
    assert figures["tokens_per_second"] == pytest.approx(512 / figures["step_seconds"])
    assert figures["peak_bytes_compiled"] > 0
    assert figures["mfu_full"] is None  # unknown for a CPU


def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--config", tmp_path / "none.yaml"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
