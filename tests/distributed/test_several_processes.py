"""Training in several processes on this machine: parity with one process, hangs, failures, restarts."""

import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from command import main
from conftest import cover, records, small
from launching import FOREVER, ROOT, finished, free_port, launched, one, status_of

from nanotrain_jax.checkpoint import directory
from nanotrain_jax.distributed.exit_codes import ENDED, HUNG


@pytest.fixture
def config_file(tmp_path):
    tree = small(
        train={"steps": 5, "eval_every": 5, "eval_steps": 2},
        model={"num_layers": 4},
        checkpoint={"every": 5},
        runtime={"simulate": 8},
        logging={"tensorboard": False},
    )
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def losses(run):
    return [(record["loss"], record.get("val_loss")) for record in records(run)]


LAYOUTS = {  # each communicates across the boundaries of 2 and of 4 processes
    "data": ["parallel.data=8"],
    "zero3": ["parallel.data=8", "parallel.zero=3", "parallel.persist_below=0"],
    "context": ["parallel.data=1", "parallel.context=8", "parallel.zero=3", "parallel.persist_below=0"],
    "tensor": ["parallel.data=1", "parallel.tensor=8", "model.num_heads=8"],
    "pipe": ["parallel.pipe=4", "parallel.data=2", "parallel.schedule=zero_bubble", "parallel.microbatches=4"],
}


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory):
    """-> a function from layout to its losses in one process."""
    cached = {}

    def run(layout, config_file):
        if layout not in cached:
            folder = tmp_path_factory.mktemp("one")
            assert main(config_file, *LAYOUTS[layout], f"logging.dir={folder}") == 0
            cached[layout] = losses(folder)
        return cached[layout]

    return run


CASES = [
    ("zero3", 2),
    ("data", 2),
    ("pipe", 2),
    ("context", 4),
    ("zero3", 4),
    ("tensor", 2),
    ("tensor", 4),
    ("pipe", 4),
]


@pytest.mark.parametrize("case", cover([], CASES))
def test_several_processes_equal_one_process(case, config_file, losses_of_one_process, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # refuses; as on clusters, where processes need none
    layout, count = case
    expected = losses_of_one_process(layout, config_file)
    run = tmp_path / "run"
    out, _ = finished(launched(count, config_file, *LAYOUTS[layout], f"logging.dir={run}"))
    assert f"{count} processes on 1 hosts (from launcher)" in out
    np.testing.assert_allclose(np.array(losses(run), float), np.array(expected, float), rtol=1e-6)
    assert sorted(f.name for f in (run / "processes").iterdir()) == [f"{i}.log" for i in range(count)]
    for log in (run / "processes").iterdir():
        assert "step 5  loss" in log.read_text()
    sums = run / "checkpoints" / "checksums" / "5"
    assert {f.name for f in sums.iterdir()} == {"files.json", *(f"{i}-of-{count}.json" for i in range(count))}


def test_two_processes_equal_one_until_a_signal_to_one_makes_both_save_and_exit(
    config_file, losses_of_one_process, tmp_path
):
    expected = losses_of_one_process("zero3", config_file)
    run = tmp_path / "run"
    endless = *FOREVER, "train.eval_every=5", "runtime.hang_timeout=60"
    launcher = launched(2, config_file, *LAYOUTS["zero3"], *endless, f"logging.dir={run}")
    os.kill(status_of(run, 1, launcher, least=5)["pid"], signal.SIGTERM)
    out, _ = finished(launcher)
    assert "2 processes on 1 hosts (from launcher)" in out
    np.testing.assert_allclose(np.array(losses(run)[:5], float), np.array(expected, float), rtol=1e-6)
    last = records(run)[-1]["step"]
    assert f"stopped at step {last} of 100000" in out
    sums = run / "checkpoints" / "checksums" / str(last)
    assert {f.name for f in sums.iterdir()} == {"files.json", "0-of-2.json", "1-of-2.json"}
    assert (run / "checkpoints" / str(last)).is_dir()
    assert sorted(f.name for f in (run / "processes").iterdir()) == ["0.log", "1.log"]
    for log in (run / "processes").iterdir():
        assert "step 5  loss" in log.read_text()


@pytest.mark.long
def test_a_stopped_process_is_named_within_the_hang_timeout(config_file, tmp_path):
    run = tmp_path / "run"
    launcher = launched(
        2, config_file, *FOREVER, f"logging.dir={run}", "runtime.hang_timeout=8", options=["--max-restarts", "0"]
    )
    pid = status_of(run, 1, launcher, least=3)["pid"]
    os.kill(pid, signal.SIGSTOP)
    _, err = finished(launcher, 1)
    (seconds,) = re.findall(
        r"\[0\] error: hang timeout: no progress for (\d+) s \(limit 8 s: runtime.hang_timeout\)", err
    )
    assert int(seconds) <= 8 + 2
    assert re.search(rf"\[0\]   process 1 on \S+ \(pid {pid}\): no heartbeat for \d+ s .*, step \d+, phase \w+", err)
    assert re.search(r"\[0\]   process 0 on \S+ \(pid \d+\): reports this, step \d+, phase \w+", err)
    assert re.search(r"loop\.py\", line \d+ in \w+", err)
    assert f"process 1 on host 0 (pid {pid}) is stopped (SIGSTOP)" in err


@pytest.mark.long
def test_an_elastic_restart_on_fewer_processes_keeps_the_losses(config_file, tmp_path):
    options = ["train.steps=80", "train.eval_every=0", "checkpoint.every=5", "parallel.zero=3", "optimizer.lr=1e-4"]
    options += ["runtime.hang_timeout=20"]  # heartbeats every second
    finished(launched(1, config_file, *options, f"logging.dir={tmp_path}/one"))
    run = tmp_path / "run"
    launcher = launched(4, config_file, *options, f"logging.dir={run}", options=["--elastic"])
    os.kill(status_of(run, 3, launcher, least=8)["pid"], signal.SIGKILL)
    _, err = finished(launcher)
    assert "killed by SIGKILL; restart 1 of 3" in err
    assert "continuing with 2 of 4 processes: runtime.simulate=4 parallel.data=4 parallel.microbatches=2" in err
    elastic, single = ({r["step"]: r["loss"] for r in records(folder)} for folder in (run, tmp_path / "one"))
    assert elastic.keys() == single.keys()
    np.testing.assert_allclose([elastic[i] for i in single], list(single.values()), rtol=1e-6)


@pytest.mark.long
def test_a_host_that_returns_joins_at_a_checkpoint_and_the_losses_stay(config_file, tmp_path):
    run, keys = tmp_path / "run", ["parallel.zero=3", "optimizer.lr=1e-4", "train.eval_every=0"]
    address, env = f"127.0.0.1:{free_port()}", {"NANOTRAIN_TOKEN": "0123456789abcdef"}

    def host(index):
        place = ["--elastic", "--hosts", "2", "--host", str(index), "--leader", address, "--processes", "1", "--"]
        begin = ["-m", "nanotrain_jax.launch", *place]
        return one(config_file, env, f"logging.dir={run}", *FOREVER, *keys, "checkpoint.every=20", begin=begin)

    def next_process(rank, after):
        found = status_of(run, rank, first)
        while found["pid"] == after:
            time.sleep(0.1)
            found = status_of(run, rank, first)
        return found

    first, second = host(0), host(1)
    pid = status_of(run, 1, first, least=25)["pid"]
    alone = status_of(run, 0, first)["pid"]
    second.kill()
    os.kill(pid, signal.SIGKILL)
    alone = next_process(0, alone)["pid"]
    returned = host(1)
    step = next_process(1, pid)["step"]
    status_of(run, 0, first, least=step + 10)
    first.send_signal(signal.SIGTERM)
    _, err = finished(first, 75)
    assert "continuing with 1 of 2 processes: runtime.simulate=4 parallel.data=4 parallel.microbatches=2" in err
    assert "host 1 joins: all processes save and start again" in err
    assert "restart 2" not in err
    returned.wait(60)
    ours = {record["step"]: record["loss"] for record in records(run)}
    assert main(config_file, *keys, f"logging.dir={tmp_path}/one", f"train.steps={max(ours)}") == 0
    theirs = {record["step"]: record["loss"] for record in records(tmp_path / "one")}
    assert ours.keys() == theirs.keys()  # none is lost or taken twice
    np.testing.assert_allclose([ours[i] for i in theirs], [*theirs.values()], rtol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_timeout_is_one_line(rank, config_file, tmp_path):
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    _, err = finished(one(config_file, env, f"logging.dir={tmp_path}/run", "runtime.join_timeout=3"), HUNG)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, err
    assert f"process {rank} of 2 (from RANK): rendezvous timeout: not all processes reached 127.0.0.1:" in errors[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_killed_process_0_is_named_and_its_checkpoint_resumes(config_file, tmp_path):
    run, options = tmp_path / "run", ["--max-restarts", "0"]
    launcher = launched(2, config_file, *FOREVER, "checkpoint.every=5", f"logging.dir={run}", options=options)
    os.kill(status_of(run, 0, launcher, least=8)["pid"], signal.SIGKILL)
    _, err = finished(launcher, 1)
    assert re.search(r"process 0 on host 0 \(pid \d+\) killed by SIGKILL; giving up after 0 restarts", err)
    newest = directory.latest_step(run / "checkpoints")
    out, _ = finished(launched(1, config_file, f"logging.dir={run}", f"train.steps={newest + 1}"))
    assert f"resumed from step {newest}" in out


@pytest.mark.long
def test_a_full_disk_ends_all_processes_with_one_line_each_and_keeps_the_newest_checkpoint(config_file, tmp_path):
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    keys = [f"logging.dir={tmp_path}/run", f"checkpoint.dir={tmp_path}/disk/kept", "checkpoint.keep=99"]
    try:
        _, err = finished(launched(2, config_file, *keys, "train.steps=100", "checkpoint.every=5"), 2)
        errors = re.findall(
            r"^\[[01]\] error: no checkpoint .* bytes and .* are free; .* resumes from step (\d+)", err, re.M
        )
        assert len(errors) == 2, err
        saved = [int(f.name) for f in (tmp_path / "disk" / "kept").glob("[0-9]*")]
        assert max(saved) == int(errors[0]) == int(errors[1])
        out, _ = finished(launched(1, config_file, *keys, "train.steps=100", "checkpoint.every=0"))
        assert f"resumed from step {max(saved)}" in out
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.mark.long
def test_a_failed_write_on_one_process_ends_all_and_the_previous_checkpoint_resumes(config_file, tmp_path):
    run = tmp_path / "run"
    finished(launched(2, config_file, f"logging.dir={run}"))
    launcher = launched(2, config_file, f"logging.dir={run}", *FOREVER, "checkpoint.every=5", "runtime.hang_timeout=60")
    pid = status_of(run, 1, launcher, least=6)["pid"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (9_000, 9_000))  # larger writes fail as on a full disk
    _, err = finished(launcher, 2)
    assert re.search(
        r"^\[1\] error: no checkpoint can be written .*: the run resumes from step \d+", err, re.MULTILINE
    ), err
    newest = directory.latest_step(run / "checkpoints")
    keys = [f"logging.dir={run}", f"train.steps={newest + 1}", "checkpoint.every=0"]
    out, _ = finished(launched(1, config_file, *keys))
    assert f"resumed from step {newest}" in out


@pytest.mark.long
def test_a_run_that_diverges_ends_with_the_checkpoint_that_it_names_and_is_not_restarted(config_file, tmp_path):
    keys = [f"logging.dir={tmp_path}/run", "train.steps=20", "train.eval_every=0", "checkpoint.every=1"]
    keys += ["optimizer.lr=1.0e+30", "optimizer.min_lr=1.0e+30", "optimizer.warmup_steps=0", "optimizer.grad_clip=0"]
    _, err = finished(launched(2, config_file, *keys, "train.max_skipped=2"), ENDED)  # one may still be written then
    named = re.findall(r"^\[[01]\] error: diverged: .*; the last checkpoint is of step (\d+); lower", err, re.MULTILINE)
    assert named == [str(directory.latest_step(tmp_path / "run" / "checkpoints"))] * 2
    assert "restart" not in err


def test_a_port_in_use_is_one_line(config_file, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        _, err = finished(one(config_file, env, f"logging.dir={tmp_path}/run"), HUNG)
    assert (
        f"error: process 0 of 2 (from RANK): cannot listen at 127.0.0.1:{port} (Address already in use); "
        "choose another port" in err.splitlines()
    )


@pytest.mark.long
@pytest.mark.parametrize("resumed", [False, True])
def test_a_folder_that_is_not_shared_is_an_error_on_all_processes(resumed, config_file, tmp_path):
    if resumed:
        finished(launched(1, config_file, f"logging.dir={tmp_path}/0"))
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    short_lag = "import runpy; from nanotrain_jax.checkpoint import checksums; checksums.LAG = 5; "
    begin = ["-c", short_lag + "runpy.run_module('nanotrain_jax.train', run_name='__main__', alter_sys=True)"]
    run = [one(config_file, env | {"RANK": str(i)}, f"logging.dir={tmp_path}/{i}", begin=begin) for i in range(2)]
    for process in run:
        _, err = finished(process, 2)
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, err
        if resumed:
            assert f"process 0 sees is step 5 in {tmp_path}/0/checkpoints, and process 1 none" in errors[0]
        else:
            assert f"{tmp_path}/1 of process 1 is not the folder of process 0" in errors[0]
        assert "choose a logging.dir on a file system that all hosts share" in errors[0]


@pytest.mark.long
def test_the_slurm_script_starts_a_launcher_on_each_node(config_file, tmp_path):
    """Slurm is two small programs here: srun runs its command once for each of two nodes."""
    programs = {
        "scontrol": 'case "$*" in "show hostnames here[0-1]") echo 127.0.0.1; echo other;; *) echo "$*" >> queue; esac',
        "srun": 'shift 2; for i in 0 1; do SLURM_NODEID=$i "$@" & pids+=" $!"; done; for p in $pids; do '
        "wait $p; code=$?; [ $code -gt ${most:-0} ] && most=$code; done; exit ${most:-0}",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = (ROOT / "scripts" / "slurm.sbatch").read_text().replace(":29500", f":{free_port()}")
    (tmp_path / "slurm.sbatch").write_text(script)
    env |= {"SLURM_JOB_NODELIST": "here[0-1]", "SLURM_JOB_ID": "77", "SLURM_NNODES": "2"}

    def batch(*overrides):
        command = ["bash", str(tmp_path / "slurm.sbatch"), "--config", str(config_file), *overrides]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)}, **pipes)

    out, _ = finished(batch(f"logging.dir={tmp_path}/run"))
    assert "[0] 2 processes on 1 hosts (from launcher)" in out
    assert "[0] done at step 5 of 5" in out
    assert not (tmp_path / "queue").exists()
    job = batch(f"logging.dir={tmp_path}/long", *FOREVER)
    pid = status_of(tmp_path / "long", 1, job)["pid"]
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGTERM)  # its launcher
    finished(job, 75)
    assert (tmp_path / "queue").read_text() == "requeue 77\n"


@pytest.mark.long
def test_an_error_on_one_process_ends_all_with_the_same_line(config_file, tmp_path):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    keys = [f"logging.dir={tmp_path}/run"], [f"logging.dir={tmp_path}/run", "data.source=text:/nowhere"]
    run = [one(config_file, env | {"RANK": str(i)}, *keys[i]) for i in range(2)]
    errors = {finished(process, 2)[1] for process in run}
    assert len(errors) == 1
    assert re.fullmatch(r"error: .*/nowhere.*\n", errors.pop())
    first = launched(2, config_file, *FOREVER, f"logging.dir={tmp_path}/used")
    status_of(tmp_path / "used", 1, first)
    _, err = finished(launched(2, config_file, f"logging.dir={tmp_path}/used"), 2)
    assert len(re.findall(r"^\[[01]\] error: .* is in use by another run", err, re.MULTILINE)) == 2
    first.send_signal(signal.SIGTERM)
    finished(first, 75)


def script(name):
    """Import a script, and those beside it that it imports."""
    sys.path.insert(0, str(ROOT / "scripts" / "prove"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "prove" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_checkpoint_restores_bitwise_in_any_layout_and_number_of_processes(capsys):
    asked = "--first", "7"  # of a dense model and a mixture: every axis and ZeRO stage, NVMe; 1, 2, 4 processes
    assert script("compare_restores").main(asked) == 0
    assert "12 of 12 pairs" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_runs_end_with_the_losses_of_an_undisturbed_run(capsys, tmp_path):
    asked = "--trials", "4", "--only", "killed", "--out", str(tmp_path)
    assert script("kill_trials").main(asked) == 0
    assert "4 of 4 faults" in capsys.readouterr().out
