"""Local copies of checkpoints in several processes: a lost host, moved shards, fewer processes."""

import os
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from command import config_file, losses, same
from launching import finished, free_port, launched, one, status_of
from local_copies import flip, remove_checkpoint

__all__ = ["config_file"]  # a fixture


def state_of(folder):
    """Return the state that several processes saved, as host arrays."""
    with ocp.PyTreeCheckpointer() as files:
        tree = files.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return files.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


class Hosts:
    """Two processes, each on a host with a disk; killed after step 15, with a shared checkpoint of step 10."""

    def __init__(self, folder, config_file, *keys):
        self.folder = folder
        self.common = config_file, *keys, "train.eval_every=0", "checkpoint.every=10", "checkpoint.local_every=3"
        self.train(folder / "whole", folder / "other_0", folder / "other_1", "train.steps=16")
        self.train(folder / "killed", folder / "disk_0", folder / "disk_1", "train.steps=16")
        remove_checkpoint(folder / "killed", 16)

    def train(self, run, *disks_and_keys):
        """Train -> what process 0 prints."""
        (*disks, last) = disks_and_keys
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        config_file, *keys = *self.common, f"logging.dir={run}", last
        started = [
            one(config_file, env | {"RANK": str(i)}, *keys, f"checkpoint.local_dir={disk}")
            for i, disk in enumerate(disks)
        ]
        printed = [finished(process)[0] for process in started]
        return printed[0]

    def resume(self, change, order=(0, 1)):
        """Resume a copy of the killed run until step 16, after change(disks) -> what process 0 prints."""
        disks = [self.folder / f"again_{i}" for i in range(2)]
        for path in [self.folder / "run", *disks]:
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.folder / "killed", self.folder / "run")
        for i, disk in enumerate(disks):
            shutil.copytree(self.folder / f"disk_{i}", disk)
        change(disks)
        out = self.train(self.folder / "run", *(disks[i] for i in order), "train.steps=16")
        same(*(state_of(self.folder / name / "checkpoints" / "16" / "state") for name in ("whole", "run")))
        assert losses(self.folder / "whole") == losses(self.folder / "run")
        return out


LOCAL, SHARED = "resumed from step 15 of local copies in", "resumed from step 10 in"


@pytest.mark.long
def test_of_a_lost_host_what_another_holds_is_restored_bitwise(config_file, tmp_path):
    keys = "parallel.replica=2", "parallel.zero=3", "parallel.persist_below=64", "precision.compute=bfloat16"
    hosts = Hosts(tmp_path, config_file, *keys)
    for lost in range(2):
        assert LOCAL in hosts.resume(lambda disks, lost=lost: shutil.rmtree(disks[lost]))
    out = hosts.resume(lambda disks: flip(disks[1] / "1", 15))
    assert f"skipped the local copy of step 15 in {tmp_path}/again_1/1: 15/model.safetensors is damaged" in out
    assert LOCAL in out
    out = hosts.resume(lambda disks: [shutil.rmtree(disk) for disk in disks])
    assert SHARED in out
    assert "skipped" not in out


@pytest.mark.long
def test_state_that_only_a_lost_host_had_is_restored_from_the_shared_checkpoint(config_file, tmp_path):
    keys = "parallel.data=8", "parallel.zero=3", "parallel.persist_below=64"
    hosts = Hosts(tmp_path, config_file, *keys)
    assert LOCAL in hosts.resume(lambda disks: None)
    assert LOCAL in hosts.resume(lambda disks: None, order=(1, 0))  # shards move to the other host
    out = hosts.resume(lambda disks: shutil.rmtree(disks[1]))
    assert "skipped local copies of step 15: no process has all shards of params/" in out
    assert "more arrays; a host is lost, or parallel differs" in out
    assert SHARED in out


@pytest.mark.long
def test_fewer_processes_resume_from_local_copies_of_state_that_is_whole_on_each_device(config_file, tmp_path):
    keys = "parallel.data=8", "optimizer.lr=1.0e-4"
    keys += "train.steps=200", "train.eval_every=0", "checkpoint.every=20", "checkpoint.local_every=3"
    keys += f"logging.dir={tmp_path}/run", f"checkpoint.local_dir={tmp_path}/local"
    launcher = launched(4, config_file, *keys, options=["--elastic"])
    os.kill(status_of(tmp_path / "run", 3, launcher, least=30)["pid"], signal.SIGKILL)
    out, err = finished(launcher)
    assert "continuing with 2 of 4 processes" in err
    assert "of local copies in" in out
