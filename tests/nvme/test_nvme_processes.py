"""Optimizer state on NVMe in several processes: folders, parity, restarts with fewer processes, one-line errors.

scripts/prove/compare_restores.py compares states of layouts with and without NVMe, bitwise, in 1, 2 and 4 processes.
"""

import os
import re
import resource
import signal

import numpy as np
import pytest
import yaml
from command import main
from conftest import records, small
from jax.sharding import NamedSharding, PartitionSpec
from launching import finished, free_port, launched, one, status_of

from nanotrain_jax.checkpoint import lock, read
from nanotrain_jax.nvme import checkpointing, folders, store
from nanotrain_jax.parallel import mesh as meshes

MODEL = {"family": "llama"}


def left_in(folder, model):
    """Leave files of a model in a folder."""
    folder.mkdir(parents=True)
    (folder / "layers-00000.00000").write_text("x")
    manifest = store.Manifest(model=model, layout={}, files=["layers-00000.00000"], digest=None, checksums=None)
    (folder / store.MANIFEST).write_bytes(manifest.encode())


def test_folders_that_no_process_uses_are_emptied_unless_another_model_is_in_them(tmp_path):
    for name in "1", "2", "3":
        left_in(tmp_path / name, MODEL if name != "2" else {"family": "gpt2"})
    (tmp_path / "notes").mkdir()
    assert folders.of_process(tmp_path) == tmp_path
    assert {folder.name for folder in folders.others(tmp_path)} == {"1", "2", "3"}
    with lock.held(folders.KEY, tmp_path / "3"), folders.locked(tmp_path, MODEL):  # by another process
        assert {folder.name for folder in folders.others(tmp_path)} == {"2", "3"}
        assert not (tmp_path / "1" / "layers-00000.00000").exists()
        assert (tmp_path / "2" / "layers-00000.00000").exists()
        with pytest.raises(OSError, match="in use by another run"), folders.locked(tmp_path, MODEL):
            raise AssertionError


def test_one_copy_of_each_shard_is_that_of_the_device():
    mesh = meshes.make(replica=2, data=2, pipe=2)
    sharding = NamedSharding(mesh, PartitionSpec("pipe", None, "data"))
    device = mesh.devices[1, ..., 0].flat[-1]
    once = checkpointing.one_copy(sharding, device)
    assert len(once.device_set) == 4
    assert device in once.device_set
    shape = 4, 3, 6
    theirs, ours = (of.devices_indices_map(shape) for of in (sharding, once))
    assert {d: str(index) for d, index in ours.items()} == {d: str(theirs[d]) for d in ours}
    rows = checkpointing.one_copy(sharding, device, has_all_rows=True).devices_indices_map(shape)
    assert len(rows) == 2
    assert rows[device] == (slice(None), *theirs[device][1:])


@pytest.fixture
def config_file(tmp_path):
    tree = small(
        train={"steps": 4, "eval_every": 0, "log_every": 1},
        model={"num_layers": 2},
        checkpoint={"every": 2},
        runtime={"simulate": 8},
        logging={"tensorboard": False},
        parallel={"data": 8, "zero": 3, "persist_below": 0},
    )
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def on_nvme(tmp_path, name="run"):
    return [
        "memory.offload_optimizer=nvme",
        f"memory.nvme_dir={tmp_path}/{name}_disk",
        f"logging.dir={tmp_path}/{name}",
    ]


def losses(run):
    return {record["step"]: record["loss"] for record in records(run)}


def origins(run):
    """Return by process where its files last came from."""
    texts = [(run / "processes" / f"{i}.log").read_text() for i in range(len([*run.glob("processes/*.log")]))]
    return [re.findall(r"master weights and moments: .* in .*, (.*)", text)[-1] for text in texts]


def test_two_processes_equal_one_without_nvme_and_each_has_its_folder(config_file, tmp_path):
    finished(launched(2, config_file, *on_nvme(tmp_path)))
    assert main(config_file, f"logging.dir={tmp_path}/one") == 0
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=1e-6)
    manifests = [store.read_manifest(tmp_path / "run_disk" / name) for name in "01"]
    assert read.read_meta(tmp_path / "run" / "checkpoints", 4).nvme == [found.digest for found in manifests]
    devices = [{name.rpartition(".")[2] for name in found.files} for found in manifests]
    assert [len(names) for names in devices] == [4, 4]
    assert not devices[0] & devices[1]


@pytest.mark.long
def test_each_process_reuses_or_rebuilds_its_own_files_bitwise(config_file, tmp_path):
    finished(launched(2, config_file, *on_nvme(tmp_path, "whole"), "train.steps=6"))
    run = tmp_path / "run"
    finished(launched(2, config_file, *on_nvme(tmp_path), "train.steps=2"))
    assert origins(run) == ["initialized"] * 2
    with open(tmp_path / "run_disk" / "1" / store.MANIFEST, "r+b") as file:
        file.truncate(20)
    finished(launched(2, config_file, *on_nvme(tmp_path), "train.steps=4"))
    rebuilt = "rebuilt from the checkpoint (manifest.json is invalid)"
    assert origins(run) == ["reused (checksums match the checkpoint)", rebuilt]
    finished(launched(2, config_file, *on_nvme(tmp_path), "train.steps=6"))
    assert origins(run) == ["reused (checksums match the checkpoint)"] * 2
    assert losses(run) == losses(tmp_path / "whole")
    digests = [read.read_meta(folder / "checkpoints", 6).nvme for folder in (run, tmp_path / "whole")]
    assert digests[0] == digests[1]


@pytest.mark.long
def test_an_elastic_restart_on_fewer_processes_keeps_the_losses_and_empties_folders(config_file, tmp_path):
    options = ["train.steps=40", "checkpoint.every=5", "optimizer.lr=1e-4", "runtime.hang_timeout=20"]
    assert main(config_file, *options, f"logging.dir={tmp_path}/one") == 0
    run = tmp_path / "run"
    launcher = launched(4, config_file, *on_nvme(tmp_path), *options, options=["--elastic"])
    os.kill(status_of(run, 3, launcher, least=8)["pid"], signal.SIGKILL)
    _, err = finished(launcher)
    assert "continuing with 2 of 4 processes: runtime.simulate=4 parallel.data=4 parallel.microbatches=2" in err
    assert origins(run)[:2] == ["rebuilt from the checkpoint"] * 2
    ours, theirs = losses(run), losses(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose([ours[i] for i in theirs], [*theirs.values()], rtol=1e-6)
    assert sorted(path.parent.name for path in (tmp_path / "run_disk").rglob(store.MANIFEST)) == ["0", "1"]
    assert not [*(tmp_path / "run_disk" / "3").glob("layers-*")]


def errors_of(processes):
    """Return the last line that each process says on stderr, which it ends with code 2."""
    return [finished(process, 2)[1].splitlines()[-1] for process in processes]


@pytest.mark.long
def test_a_folder_in_use_or_a_full_disk_of_one_process_is_one_line_of_each(config_file, tmp_path):
    def two():
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [one(config_file, env | {"RANK": str(rank)}, *on_nvme(tmp_path)) for rank in range(2)]

    (tmp_path / "run_disk" / "1").mkdir(parents=True)
    with lock.held(folders.KEY, tmp_path / "run_disk" / "1"):
        found = errors_of(two())
    expected = rf"error: {tmp_path}/run_disk/1 is in use by another run; stop it, or choose another memory.nvme_dir"
    assert found == [expected] * 2
    processes = two()
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (8192, 8192))  # larger writes fail as on a full disk
    expected = rf"error: memory.nvme_dir='{tmp_path}/run_disk/1': File too large; make room and start again"
    assert errors_of(processes) == [expected] * 2
