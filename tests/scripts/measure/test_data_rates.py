"""scripts/measure/tokenize_text.py and read_rows.py: small runs print their tables."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "keys", "lines"),
    [
        ("tokenize_text", ["--megabytes", "1", "--rounds", "1", "--only", "encode_batch", "prepare"], 2),
        (
            "read_rows",
            ["--megatokens", "1", "--rounds", "1", "--rows", "128", "--seq-len", "1024", "--seconds", "0.2"],
            4,
        ),
    ],
)
def test_a_small_run_prints_a_table(script, keys, lines, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "measure" / f"{script}.py"),
        *keys,
        "--dir",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    header, _, *rows = table
    assert len(rows) == lines
    assert all(len(row) == len(header) for row in rows)
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)
