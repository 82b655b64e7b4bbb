"""Jobs of a real Slurm with two nodes on this machine: a time limit, killed tasks, a lost node, another site."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from command import main, saved_state
from conftest import LOSS, STATE, records, small
from launching import ROOT, free_port

sys.path.insert(0, str(ROOT / "scripts" / "prove"))
import slurm_cluster

LACKS = slurm_cluster.missing()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(LACKS), reason=f"{', '.join(LACKS)} not installed: apt-get install slurm-wlm munge"),
]
ENDLESS = 100_000
ENDED = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
# What a site may have instead of our script: no launcher, ranks from srun, and its own signal to the batch shell.
OTHER_SITE = """#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
trap 'stopped=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
srun python -m nanotrain_jax.train "$@" &
wait
if [ "$stopped" ]; then
    wait
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.Cluster() as cluster:
        yield cluster


class Job:
    """A batch job of endless training on two nodes."""

    def __init__(self, cluster, folder, script, *options):
        self.cluster, self.run, self.out = cluster, folder / "run", folder / "out"
        self.tree = small(
            model={"num_layers": 4},
            data={"seq_len": 48},
            optimizer={"lr": 1e-4},
            parallel={"data": 8, "zero": 3, "persist_below": 0},
            checkpoint={"every": 5},
            runtime={"simulate": 8},
            logging={"tensorboard": False},
        )
        self.config = folder / "small.yaml"
        self.end_at(ENDLESS)
        (folder / "job.sbatch").write_text(script)
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.out}", f"--chdir={ROOT}", *options]
        command += [str(folder / "job.sbatch"), "--config", str(self.config), f"logging.dir={self.run}"]
        self.id = self.slurm(*command).strip()

    def slurm(self, *command):
        """Run a command of Slurm; -> what it prints."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | self.cluster.env | {"PATH": path, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    def end_at(self, step):
        """Set the last step of the next start."""
        self.tree["train"] = {"seed": 3, "eval_every": 0, "steps": step}
        self.config.write_text(yaml.safe_dump(self.tree))

    def shown(self):
        """-> what Slurm says of the job, e.g. {"JobState": "RUNNING", "Restarts": "0"}."""
        words = self.slurm("scontrol", "show", "job", self.id, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, holds, limit):
        """Wait until a condition holds, for some seconds, and no longer than the job lives."""
        deadline = time.monotonic() + limit
        while not holds():
            shown = self.shown()
            lives = shown["JobState"] not in ENDED and time.monotonic() < deadline
            assert lives, f"{shown}\n{self.out.exists() and self.out.read_text()[-5000:]}"
            time.sleep(0.2)

    def heartbeat(self, rank):
        try:
            return json.loads((self.run / "processes" / f"{rank}.json").read_text())
        except (OSError, ValueError):
            return {"pid": 0, "step": 0}

    def wait_for_step(self, least, other_than=0):
        """Wait for a step of rank 1, in another process than the given one; -> its process id."""

        def reached():
            found = self.heartbeat(1)
            return found["step"] >= least and found["pid"] != other_than

        self.wait_until(reached, 90)
        return self.heartbeat(1)["pid"]

    def wait_for_requeue(self, limit):
        """Wait until Slurm has requeued the job once, and let its next start end five steps after the newest."""
        self.wait_until(lambda: self.shown()["Restarts"] == "1", limit)
        newest = max(record["step"] for record in records(self.run))
        self.end_at(newest + 5)
        return newest

    def wait_for_end(self, restarts):
        """Wait until the job is completed; -> its output."""
        self.wait_until(lambda: self.shown()["JobState"] == "COMPLETED", 90)
        assert self.shown()["Restarts"] == str(restarts)
        return self.out.read_text()

    def check_parity(self, folder):
        """The losses and the state are those of one process that nothing interrupts."""
        assert main(self.config, f"logging.dir={folder}") == 0
        ours, theirs = ({r["step"]: r["loss"] for r in records(run)} for run in (self.run, folder))
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose([ours[i] for i in theirs], [*theirs.values()], **LOSS)
        step, (expected, _) = saved_state(folder)
        with ocp.StandardCheckpointer() as files:
            state = files.restore(self.run / "checkpoints" / str(step) / "state", expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **STATE), state, expected)


def our_script():
    return (ROOT / "scripts" / "slurm.sbatch").read_text().replace(":29500", f":{free_port()}")


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_job_that_nears_its_time_limit_saves_is_requeued_and_resumes(cluster, tmp_path):
    job = Job(cluster, tmp_path, our_script(), "--time=2", "--signal=TERM@60")
    newest = job.wait_for_requeue(150)
    out = job.wait_for_end(restarts=1)
    assert f"stopped at step {newest} of {ENDLESS}" in out
    assert out.count("Exited with exit code 75") == 2
    assert f"resumed from step {newest}" in out
    job.check_parity(tmp_path / "one")


def test_a_killed_process_and_a_killed_launcher_resume_on_the_same_nodes(cluster, tmp_path):
    job = Job(cluster, tmp_path, our_script())
    first = job.wait_for_step(8)
    os.kill(first, signal.SIGKILL)
    second = job.wait_for_step(13, other_than=first)
    job.end_at(job.heartbeat(1)["step"] + 20)
    os.kill(parent(second), signal.SIGKILL)
    out = job.wait_for_end(restarts=0)
    assert "killed by SIGKILL; restart 1 of 3" in out
    assert "host 1 is lost; restart 2 of 3" in out
    assert "task 1: Killed" in out
    assert not Path(f"/proc/{second}").exists()
    job.check_parity(tmp_path / "one")


def test_a_job_that_loses_a_node_is_requeued_and_resumes_when_the_node_returns(cluster, tmp_path):
    job, node = Job(cluster, tmp_path, our_script()), slurm_cluster.NODES[1]
    job.wait_for_step(8)
    cluster.kill_node(node)
    job.wait_for_requeue(60)
    cluster.start_node(node)
    out = job.wait_for_end(restarts=1)
    assert "resumed from step" in out
    job.check_parity(tmp_path / "one")


def test_a_script_of_another_site_that_sends_usr1_saves_and_resumes(cluster, tmp_path):
    job = Job(cluster, tmp_path, OTHER_SITE)
    job.wait_for_step(8)
    job.slurm("scancel", "--signal=USR1", "--batch", job.id)  # as Slurm does a minute before a time limit
    newest = job.wait_for_requeue(60)
    out = job.wait_for_end(restarts=1)
    assert "2 processes on 1 hosts (from slurm)" in out
    assert f"stopped at step {newest} of {ENDLESS}" in out
    assert f"resumed from step {newest}" in out
    job.check_parity(tmp_path / "one")
