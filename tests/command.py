"""Run the train command, in this process or in its own, and read its outputs."""

import os
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from conftest import records

from nanotrain_jax import train

TREE = {
    "model": {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 64},
    "parallel": {"data": 4},
    "precision": {"compute": "float32"},
    "data": {"batch_size": 8, "seq_len": 32, "val_fraction": 0.1},
    "optimizer": {"warmup_steps": 2, "decay_steps": 20},
    "train": {"steps": 20, "eval_every": 10, "eval_steps": 2},
    "checkpoint": {"every": 5},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}


@pytest.fixture
def config_file(tmp_path, text_files):
    tree = {**TREE, "data": TREE["data"] | {"source": f"text:{text_files}"}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def main(config_file, *overrides):
    return train.main(["--config", str(config_file), *overrides])


def start(config_file, *overrides, **how):
    """Start the command as a subprocess."""
    command = [sys.executable, "-m", "nanotrain_jax.train", "--config", str(config_file), *overrides]
    environment = os.environ | {"HOME": str(config_file.parent), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def losses(folder):
    """Return step -> (loss, val_loss) of the last time each step ran."""
    return {r["step"]: (r["loss"], r.get("val_loss")) for r in records(folder)}


def saved_state(folder):
    """Return step and state of the newest checkpoint of a run, as host arrays."""
    with ocp.CheckpointManager(folder / "checkpoints", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        number = manager.latest_step()
        state = manager.restore(number, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    apart = sorted((folder / "checkpoints" / "arrays" / str(number)).glob("*"))  # what was written array by array
    with ocp.StandardCheckpointer() as files:
        more = {path.name: files.restore(path) for path in apart}
    return number, jax.tree.map(np.asarray, (state, more))


def arrays_of(shapes, device):
    """Map a tree of shapes to abstract float32 arrays with a sharding."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=device),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def wait_for_lines(run, more_than, process, limit=120):
    """Wait until metrics.jsonl has more lines than given."""
    path, end = run / "metrics.jsonl", time.monotonic() + limit
    while time.monotonic() < end:
        if path.exists() and path.read_text().count("\n") > more_than:
            return
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        time.sleep(0.01)
    raise AssertionError("no progress")


def flip(folder, rng, by_size=True):
    """Flip a random bit of a checkpoint or its checksums, uniform over bits or over files."""
    files = [*folder.rglob("*"), *(folder.parent / "checksums" / folder.name).iterdir()]
    files = [f for f in files if f.is_file() and f.stat().st_size]
    file = rng.choices(files, [f.stat().st_size if by_size else 1 for f in files])[0]
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
