"""Slow devices: named in the log and the metrics by times that are measured on each device alone."""

import jax
import numpy as np
import pytest
from command import config_file, main
from conftest import records
from launching import finished, free_port, one

from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.run import device_speed

__all__ = ["config_file"]  # a fixture
KEYS = "runtime.time_devices_every=2", "train.steps=4", "train.log_every=1", "train.eval_every=0"
SLOW = "takes 1.50 times the median of {} devices for matmuls without communication (3 ms, median 2 ms)"


def slow_device(monkeypatch, number):
    """Let the device with this id take 3 ms, and all others 2 ms."""
    monkeypatch.setattr(device_speed, "measured", lambda device: 3e-3 if device.id == number else 2e-3)


def slow_process(monkeypatch, number):
    """Let the devices of this process take 3 ms."""
    monkeypatch.setattr(device_speed, "measured", lambda device: 3e-3 if device.process_index == number else 2e-3)


def test_a_slow_device_is_named_in_log_and_metrics(config_file, tmp_path, monkeypatch, capsys):
    slow_device(monkeypatch, 2)
    assert main(config_file, f"logging.dir={tmp_path}/run", *KEYS) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("slow device")]
    where = "process 0, local device 2 (data 2)"
    assert lines == [f"slow device after step {step}: {where} {SLOW.format(4)}" for step in (2, 4)]
    found = {record["step"]: record.get("slow_device") for record in records(tmp_path / "run")}
    assert found == {1: None, 2: 2, 3: None, 4: 2}
    assert records(tmp_path / "run")[-1]["slow_device_ratio"] == pytest.approx(1.5)


@pytest.mark.long
def test_the_process_of_a_slow_device_is_named(config_file, tmp_path):
    env = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    slow = "import runpy, sys, pytest; sys.path[:0] = ['tests', 'tests/run']; import test_device_speed as t; "
    slow += "t.slow_process(pytest.MonkeyPatch(), 2); "
    begin = ["-c", slow + "runpy.run_module('nanotrain_jax.train', run_name='__main__', alter_sys=True)"]
    keys = [*KEYS, "parallel.data=8", f"logging.dir={tmp_path}/run"]
    processes = [one(config_file, env | {"RANK": str(rank)}, *keys, begin=begin) for rank in range(4)]
    out, *_ = [finished(process)[0] for process in processes]
    assert f"slow device after step 2: process 2, local device 0 (data 4) {SLOW.format(8)}" in out
    assert records(tmp_path / "run")[-1]["slow_device"] == 4


def test_only_a_device_far_above_the_median_is_slow():
    assert device_speed.slowest(np.float32([2, 2.3, 2, 2])) is None
    assert device_speed.slowest(np.float32([1, 2, 2, 2])) is None  # a fast one makes no other slow
    assert device_speed.slowest(np.float32([2, 2, 2, 4])) == (3, 4.0, 2.0)


def test_each_device_computes_alone():
    mesh = meshes.make(data=4, tensor=2)
    assert (device_speed.of_all(mesh) > 0).all()
    for device in mesh.devices.flat:
        product = device_speed.matmuls(jax.device_put(np.float32(1), device), 256)
        assert product.devices() == {device}
        np.testing.assert_allclose(product @ product, np.eye(256), atol=1e-3)  # it is its own inverse
    text = device_speed.matmuls.lower(np.float32(1), 256).compile().as_text()
    assert "dot" in text
    assert not any(name in text for name in ("all-reduce", "all-gather", "permute", "all-to-all"))
