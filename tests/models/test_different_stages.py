"""Different modules as pipeline stages, trained by the command: scripts/examples/pipeline_different_stages.py."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from command import main
from conftest import cover, records, resolved, small
from planning import ROOT

from nanotrain_jax.models.different_stages import model_of_stages
from nanotrain_jax.parallel.pipeline.heterogeneous import StageModule
from nanotrain_jax.step import build as steps

pytestmark = pytest.mark.usefixtures("no_cache_of_programs")
FACTORY = "scripts.examples.pipeline_different_stages:build"
TREE = {
    "model": {"num_layers": 4, "factory": FACTORY},
    "precision": {"compute": "float32"},
    "data": {"batch_size": 16, "seq_len": 16, "val_fraction": 0.02},
    "optimizer": {"lr": 1e-2, "eps": 1e-4, "schedule": "constant", "weight_decay": 0.2},
    "train": {"steps": 4, "eval_every": 4},
    "checkpoint": {"every": 0, "async": False},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}
PIPE_4 = ["parallel.pipe=4", "parallel.data=2", "parallel.microbatches=8", "parallel.persist_below=100"]
PIPE_2 = [*PIPE_4, "parallel.pipe=2", "parallel.chunks=2", "parallel.microbatches=4"]
ZERO_BUBBLE = "parallel.schedule=zero_bubble"
HOST = [f"memory.offload_{what}=host" for what in ("optimizer", "params", "activations")]
LAYOUTS = {
    "zero bubble, ZeRO 2": [*PIPE_4, ZERO_BUBBLE, "parallel.zero=2"],
    "1F1B": PIPE_4,
    "1F1B, per layer": [*PIPE_4, "parallel.zero=1", "parallel.grad_reduce=per_layer"],
    "zero bubble, prefetch": [*PIPE_4, ZERO_BUBBLE, "parallel.zero=3", "parallel.prefetch=true"],
    "zero bubble, mask": [*PIPE_4, ZERO_BUBBLE, "parallel.idle=mask", "memory.remat=full"],
    "interleaved": [*PIPE_2, "parallel.schedule=interleaved", "parallel.zero=2", "memory.remat=selective"],
    "zero bubble, chunks": [*PIPE_2, ZERO_BUBBLE, "parallel.zero=3"],
    "three stages": [*PIPE_4, "parallel.pipe=3", "parallel.zero=1"],
    "host": [*PIPE_4, *HOST, "parallel.zero=3", "memory.remat=full"],
    "data": ["parallel.data=8", "parallel.zero=3", "parallel.persist_below=100"],
}


@pytest.fixture
def config_file(tmp_path, monkeypatch, text_files):
    monkeypatch.syspath_prepend(ROOT)
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump({**TREE, "data": TREE["data"] | {"source": f"text:{text_files}"}}))
    return path


@pytest.fixture(scope="module")
def on_one_device():
    """Records of the run on one device, filled by the first test that needs them."""
    return []


def run(config_file, name, *overrides):
    folder = config_file.parent / name
    assert main(config_file, f"logging.dir={folder}", *overrides) == 0
    return records(folder)


def equals_one_device(config_file, on_one_device, found):
    if not on_one_device:
        on_one_device += run(config_file, "one", "parallel.data=1")
    for one, many in zip(on_one_device, found, strict=True):
        for key in {"loss", "grad_norm", "val_loss"} & one.keys():
            np.testing.assert_allclose(many[key], one[key], rtol=1e-5)
    assert one["loss"] < on_one_device[0]["loss"]


@pytest.mark.parametrize("name", cover([], LAYOUTS))
def test_training_equals_one_device(config_file, on_one_device, name):
    equals_one_device(config_file, on_one_device, run(config_file, "many", *LAYOUTS[name]))


@pytest.mark.long
def test_a_checkpoint_of_four_stages_resumes_on_one(config_file, on_one_device):
    keys = "checkpoint.every=2", "optimizer.decay_steps=4"
    run(config_file, "cut", *PIPE_4, ZERO_BUBBLE, "parallel.zero=3", "train.steps=2", *keys)
    equals_one_device(config_file, on_one_device, run(config_file, "cut", "parallel.data=1", *keys))


@pytest.mark.parametrize("zero", cover([], [0, 1, 3], name=str))
def test_a_stage_stores_the_longest_rows(monkeypatch, zero):
    """Two rows: weights that decay, and biases and scales, which do not. ZeRO 3 divides both, ZeRO 1 their moments."""
    monkeypatch.syspath_prepend(ROOT)
    parallel = {"pipe": 4, "data": 2, "microbatches": 8, "zero": zero, "persist_below": 100}
    tree = small(model={"num_layers": 4, "factory": FACTORY}, parallel=parallel)
    step = steps.build(*resolved(tree))
    of_modules = [jax.eval_shape(m.init, jax.random.key(0)) for m in example().modules(61)]
    rows = {}
    for key, is_decayed in (("decayed", True), ("not_decayed", False)):
        longest = max(size(weights, is_decayed) for weights in of_modules)
        rows[key] = math.ceil(longest / 1024) * 1024
    layers = step.state.params["layers"]
    assert {key: x.shape for key, x in layers.items()} == {key: (4, n) for key, n in rows.items()}
    n = 4 * sum(rows.values())
    held = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in layers.values())
    assert held == (n // 2 if zero == 3 else n)
    state = held + 2 * (n // 2 if zero else n)
    batch = 2 * 4 * tree["data"]["batch_size"] * tree["data"]["seq_len"] // 2
    arguments = step.train.lower(step.state, step.batch).compile().memory_analysis().argument_size_in_bytes
    assert state + batch <= arguments < state + batch + 100  # counters


def size(weights, is_decayed):
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return sum(x.size for path, x in leaves if (path[-1].key not in ("bias", "scale")) == is_decayed)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.num_layers=3"], "it has 4 layers, model.num_layers=3; make them agree"),
        (["parallel.pipe=8"], "parallel.pipe=8 exceeds model.num_layers=4"),
        (["parallel.pipe=2", "parallel.tensor=2"], "different stages are not split over tensor; use parallel.tensor=1"),
        (["parallel.data=3", "data.batch_size=3", "parallel.zero=1"], "parallel.data=3 does not divide the"),
        (["model.factory=test_different_stages:misfits"], "module Mlp does not take the output of module Bytes"),
        (["model.factory=test_different_stages:integers"], "module words returns int32[16, 16]: only floats travel"),
    ],
)
def test_an_invalid_request_is_one_line(config_file, capsys, keys, message):
    assert main(config_file, "parallel.data=1", "parallel.persist_below=100", *keys) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def example():
    spec = importlib.util.spec_from_file_location(
        "example", ROOT / "scripts" / "examples" / "pipeline_different_stages.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def misfits(config, mesh):
    bytes_, _, mlp, head = example().modules(256)
    return model_of_stages(config, mesh, [bytes_, mlp, mlp, head], lambda y, batch: (y.sum(), 1))


def integers(config, mesh):
    words = StageModule("words", lambda key: {"w": jnp.ones(1)}, lambda w, x, batch: batch["inputs"])
    return model_of_stages(config, mesh, [words] * 4, lambda y, batch: (y.sum(), 1))


@pytest.mark.long
def test_the_example_equals_one_device(capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        example().main()
    _, loss, *rows = capsys.readouterr().out.splitlines()
    alone, staged, difference = np.array([row.split()[-3:] for row in (loss, *rows)], float).T
    assert len(rows) == 4
    np.testing.assert_allclose(staged, alone, rtol=1e-5)
    assert difference.max() < 1e-5
