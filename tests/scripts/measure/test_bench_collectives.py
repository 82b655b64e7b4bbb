"""bench_collectives.py: a row per operation and size, with the steps and bytes of the closed forms."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from nanotrain_jax.parallel.gradients import all_reduce

SCRIPT = ROOT / "scripts" / "measure" / "bench_collectives.py"


@pytest.mark.long
def test_the_benchmark_prints_a_table_and_one_json_line_and_draws(tmp_path):
    picture = tmp_path / "bandwidths.png"
    command = [sys.executable, SCRIPT, "--simulate", "4", "--sizes", "1K,4K", "--rounds", "1", "--picture", picture]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    rows = json.loads(line)
    assert "bus GB/s" in "\n".join(table)
    assert sorted({row["bytes"] for row in rows}) == [1024, 4096]
    assert picture.stat().st_size > 0
    for row in rows:
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
        factor = 3 / 4 if row["operation"] in ("reduce_scatter", "all_gather", "all_to_all") else 3 / 2
        assert row["bus_bandwidth"] == pytest.approx(factor * row["algorithm_bandwidth"])
        if row["operation"] in all_reduce.ALGORITHMS:
            cost = all_reduce.cost(row["operation"], 4)
            links = 2 if row["operation"] == "two_rings" else 1
            assert (row["steps"], row["wire_bytes"]) == (cost.steps, links * cost.in_turn * row["bytes"])


def test_a_wrong_request_is_one_line_and_exit_code_2():
    done = subprocess.run([sys.executable, SCRIPT, "--sizes", "4KB"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: --sizes=4KB: use a number of bytes, with K, M or G\n")
