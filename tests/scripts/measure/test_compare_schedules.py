"""compare_schedules.py: a table, one JSON line, modelled times, and errors of one line."""

import importlib.util
import json
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT, exit_code, small

from nanotrain_jax.config.schema import Parallel

SCRIPT = ROOT / "scripts" / "measure" / "compare_schedules.py"
sys.path.insert(0, str(SCRIPT.parent))  # scripts import each other
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
compare_schedules = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare_schedules)


@pytest.fixture
def compare(tmp_path, capsys):
    """compare(*arguments) -> exit code, lines of stdout, lines of stderr"""
    parallel = {"pipe": 2, "data": 1, "microbatches": 4}
    tree = small(parallel=parallel, data={"batch_size": 4}, runtime={"simulate": 8})
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))

    def run(*arguments):
        code = exit_code(compare_schedules.main, ["--config", f"{tmp_path}/x.yaml", "--rounds", "1", *arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


@pytest.mark.long
def test_the_script_prints_a_table_and_one_json_line(compare):
    code, (*table, line), _ = compare("--schedules", "gpipe,1f1b+vocab", "--idle", "skip,mask")
    assert code == 0
    assert all(word in "\n".join(table) for word in ("median ms", "modelled", "gpipe", "mask", "4 microbatches"))
    rows = json.loads(line)
    assert [(row["schedule"], row["idle"], row["ticks"]) for row in rows] == [
        ("gpipe", "skip", 10),
        ("1f1b+vocab", "skip", 9),  # with a tick to embed, one to delay B, and one for the embedding's gradients
        ("gpipe", "mask", 10),
        ("1f1b+vocab", "mask", 9),
    ]
    assert {key for row in rows for key in row} == {
        *("schedule", "idle", "ticks", "chunks", "microbatches", "model_time", "first_loss", "temp_bytes", "steps"),
        *("compile_seconds", "cpu_seconds", "step_seconds", "step_seconds_min", "ratio_to_first", "ratio_modelled"),
    }
    # F + B = 3: with fused ticks a stage waits as long as in gpipe; masked, each tick is a forward and a backward.
    assert [row["ratio_modelled"] for row in rows] == pytest.approx([1, 1, 30 / 15, 27 / 15])
    assert rows[0]["ratio_to_first"] == 1
    np.testing.assert_allclose([row["first_loss"] for row in rows], rows[0]["first_loss"], rtol=1e-5)
    assert all(row["temp_bytes"] > 0 and row["step_seconds"] >= row["step_seconds_min"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("schedule", "chunks", "idle", "modelled"),
    [
        ("interleaved", 2, "skip", (12, 3 * 4 + 3 / 2)),
        ("interleaved", 2, "mask", (12, 12 * 3 / 2)),
        ("zb_h1", 1, "mask", (13, 13 * 3)),
    ],
)
def test_modelled_time_is_that_of_the_schedule(schedule, chunks, idle, modelled):
    parallel = Parallel(pipe=2, microbatches=4, schedule=schedule, chunks=chunks, idle=idle)
    assert compare_schedules.modelled(parallel) == pytest.approx(modelled)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--schedules", "2f2b"], "2f2b"),
        (["--schedules", "1f1b+head"], "+head is unknown; use +vocab"),
        (["--schedules", "gpipe,interleaved:2"], "parallel.chunks = 2 x 2"),
        (["--schedules", "interleaved:0"], "parallel.chunks=0"),
        (["--schedules", "gpipe:2", "model.num_layers=4"], "gpipe: 2 chunks"),
        (["--schedules", "zb_h2", "parallel.microbatches=2"], "zb_h2: 2 microbatches are too few"),
        (["--idle", "sleep"], "sleep"),
        (["--rounds", "0"], "--rounds: '0' must be a number from 1"),
        (["parallel.pipe=1"], "parallel.pipe=1"),
        (["model.layers=3"], "model.layers"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(compare, wrong, message):
    code, out, (line,) = compare(*wrong)
    assert (code, out) == (2, [])
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("other", [4.001, float("nan")])
def test_schedules_with_different_losses_are_not_compared(compare, monkeypatch, other):
    losses = iter([4.0, 4.00001, other])

    def prepare(config, mesh):
        p = config.parallel
        return None, {"schedule": p.schedule, "idle": p.idle, "first_loss": next(losses)}

    monkeypatch.setattr(compare_schedules, "prepare", prepare)
    code, out, (line,) = compare("--schedules", "gpipe,1f1b,zb_h1")
    assert (code, out) == (1, [])
    assert "zb_h1 (skip)" in line
