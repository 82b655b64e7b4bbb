"""scaling.py models scaling for a GPU, and measures it on the devices here; a wrong request is one line."""

import importlib.util
import json
import sys

import pytest
import yaml
from conftest import ROOT, exit_code, small

SCRIPT = ROOT / "scripts" / "measure" / "scaling.py"
sys.path.insert(0, str(SCRIPT.parent))  # scripts import each other
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
scaling = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scaling)


@pytest.fixture
def request_of(tmp_path):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(small(runtime={"simulate": 8})))
    return ["--config", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "out")]


def found(tmp_path, way):
    assert (tmp_path / "out" / "scaling.png").stat().st_size > 5_000
    written = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert written["way"] == way
    return written


def sizes(rows):
    return [(row["devices"], row["batch"]) for row in rows]


def test_modelled_scaling_has_efficiencies_and_assumptions(request_of, tmp_path, capsys):
    options = ["--gpu", "h100", "--devices", "8,4", "--per-device", "2", "--batch", "64"]
    assert scaling.main([*request_of, *options]) == 0
    shown, written = capsys.readouterr().out, found(tmp_path, "modelled")
    assert sizes(written["weak"]) == [(4, 8), (8, 16)] and sizes(written["strong"]) == [(4, 64), (8, 64)]
    for (first, second), ideal in (written["weak"], 1), (written["strong"], 1 / 2):
        ratio = ideal * first["step_seconds"] / second["step_seconds"]
        assert second["efficiency"] == pytest.approx(ratio)
        assert sum(second["losses"].values()) == pytest.approx(1 - ratio)
    assert all(what in shown for what, _, _ in written["assumptions"])
    assert "989 TFLOP/s, of it 55%" in shown


@pytest.mark.long
def test_work_on_simulated_devices_is_measured_as_such(request_of, tmp_path, capsys):
    assert scaling.main([*request_of, "--devices", "1,2", "--rounds", "1", "--batch", "8", "--per-device", "8"]) == 0
    shown, written = capsys.readouterr().out, found(tmp_path, "measured on simulated devices")
    assert "total work only" in shown and "sequences/s" not in shown
    assert sizes(written["weak"]) == [(1, 8), (2, 16)] and sizes(written["strong"]) == [(1, 8), (2, 8)]
    for first, second in written["weak"], written["strong"]:
        ratio = first["cpu_seconds"] / first["batch"] * second["batch"] / second["cpu_seconds"]
        assert second["efficiency"] == pytest.approx(ratio)


def test_without_several_gpus_nothing_is_measured_and_one_line_says_so(request_of, tmp_path, capsys):
    assert scaling.main([*request_of, "runtime.simulate=0"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1 and "this machine has 0 GPUs" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--devices", "x"],
        ["--devices", "0,8"],
        ["--rounds", "0"],
        ["parallel.tensor=-1", "parallel.data=4"],
        ["--devices", "3", "parallel.tensor=2", "parallel.data=4"],
        ["--gpu", "h1000"],
        ["--gpu", "h100", "--devices", "12"],
        ["--gpu", "h100", "optimizer.factory=optax:adam"],
        ["--config", "none.yaml"],
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(request_of, capsys, wrong):
    assert exit_code(scaling.main, [*request_of, *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
