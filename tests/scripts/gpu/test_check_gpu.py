"""check_gpu.py on simulated devices: stages run in processes of their own, and results outlive kills."""

import json
import subprocess
import sys
import time

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "gpu"))  # scripts import each other
import check_gpu
import gpu_stages

SCRIPT = ROOT / "scripts" / "gpu" / "check_gpu.py"
ABOUT = {"kind": "H", "count": 1, "platform": "gpu", "versions": {"jax": "1"}, "date": "2026-01-01"}


def command(folder, *arguments):
    return [sys.executable, SCRIPT, "--size", "tiny", "--out", folder, *arguments]


def saved(folder):
    """-> results by stage, and their table."""
    (path,) = folder.glob("*.json")
    (table,) = (other for other in folder.glob(f"{path.stem}.*") if other != path)
    return json.loads(path.read_text())["stages"], table.read_text()


def test_every_stage_runs_once_and_failures_and_hangs_do_not_end_the_rest(tmp_path, monkeypatch):
    stages = {name: gpu_stages.Stage(None, 30) for name in ("a", "crash", "far", "hang", "b")}
    stages["b"] = gpu_stages.Stage(None, 30, beside="a")
    stages["far"] = gpu_stages.Stage(None, 30, devices=2)
    monkeypatch.setattr(check_gpu, "STAGES", stages)
    scripts = {
        "a": 'print(\'{"result": "fast", "step_seconds": 2.0}\')',
        "crash": "raise MemoryError('RESOURCE_EXHAUSTED:\\nout of memory')",
        "hang": "import time; time.sleep(60)",
        "b": 'print(\'noise\\n{"result": "a | b", "step_seconds": 1.0}\')',
    }
    started = []

    class Runner(check_gpu.Runner):
        def run(self, name, flags, limit, devices=1):
            started.append(name)
            folder = tmp_path / "scripts"
            folder.mkdir(exist_ok=True)
            (folder / "gpu_stages.py").write_text(scripts[name])
            monkeypatch.setattr(check_gpu, "HERE", folder)
            return super().run(name, flags, 1.5 if name == "hang" else limit, devices)

    path, results = tmp_path / "r.json", {"about": ABOUT, "stages": {}}
    for _ in range(2):
        check_gpu.run_stages(Runner(0, ".", "."), results, list(stages), 30, path)
    assert started == ["a", "crash", "hang", "b"]
    assert json.loads(path.read_text()) == results
    found = results["stages"]
    assert found["crash"]["result"] == "MemoryError: RESOURCE_EXHAUSTED:"
    assert found["hang"]["result"].startswith("no end after")
    assert found["far"] == {"status": "skipped", "result": "needs 2 devices, this machine has 1"}
    assert "0.500 x a: a \\| b |" in saved(tmp_path)[1]


def test_what_does_not_fit_into_the_minutes_is_skipped_with_a_reason(tmp_path):
    results = {"about": ABOUT, "stages": {}}
    check_gpu.run_stages(None, results, list(gpu_stages.STAGES)[:3], 0.1, tmp_path / "r.json")
    assert all("of --minutes are left" in row["result"] for row in results["stages"].values())


@pytest.mark.long
def test_an_interrupt_keeps_the_results_and_the_same_command_goes_on(tmp_path):
    process = subprocess.Popen(command(tmp_path, "--only", "float32,tensor"), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "[2/" in line:
            break
    time.sleep(0.2)
    process.terminate()  # as Ctrl-C, which jobs in the background of a shell ignore
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command continues" in out
    stages, table = saved(tmp_path)
    assert list(stages) == ["float32"]
    assert stages["float32"]["error"] < 1e-5
    assert "| float32 | ok |" in table

    done = subprocess.run(
        command(tmp_path, "--only", "float32,zero 3", "--minutes", "1e-9"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "..." not in done.stdout  # no stage ran
    again, table = saved(tmp_path)
    assert again["float32"] == stages["float32"]
    assert again["zero 3"]["status"] == "skipped"
    assert table in done.stdout


def test_the_stages_fit_into_half_an_hour():
    """On a machine with one GPU; those of several devices need it alone with more."""
    one = [stage for stage in gpu_stages.STAGES.values() if stage.devices == 1]
    assert sum(stage.seconds for stage in one) <= 1800
    assert all(stage.beside in {"", *gpu_stages.STAGES} for stage in one)


@pytest.mark.parametrize("wrong", [["--minutes", "0"], ["--only", "nothing"]])
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, capsys, wrong):
    assert check_gpu.main(["--out", str(tmp_path), *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_stage_is_right_on_simulated_devices(tmp_path):
    done = subprocess.run(command(tmp_path), capture_output=True, text=True)
    stages, table = saved(tmp_path)
    assert done.returncode == 0, table
    assert set(stages) == set(gpu_stages.STAGES)
    assert {name for name, row in stages.items() if row["status"] != "ok"} <= {"float8"}
