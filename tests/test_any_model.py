"""Models that this package does not know, trained by the command: Flax NNX, Flax Linen, plain functions."""

import numpy as np
import pytest
import yaml
from command import main
from conftest import cover, records
from planning import ROOT

from nanotrain_jax import generate, plan

TREE = {
    "model": {"num_layers": 4, "d_model": 32, "num_heads": 4, "vocab_size": 61},
    "precision": {"compute": "float32"},
    "data": {"source": "synthetic", "batch_size": 16, "seq_len": 16},
    "optimizer": {"lr": 1e-2, "eps": 1e-4, "schedule": "constant", "weight_decay": 0.2},
    "train": {"steps": 4},
    "checkpoint": {"every": 0},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}
EVERY_AXIS = ["parallel.data=2", "parallel.tensor=2", "parallel.pipe=2", "parallel.microbatches=4", "memory.remat=full"]
EVERY_AXIS += ["parallel.zero=3", "parallel.persist_below=100"]
HOST = [f"memory.offload_{what}=host" for what in ("optimizer", "params", "activations")]
LAYOUTS = {
    "every axis": EVERY_AXIS,
    "host": [*EVERY_AXIS, "parallel.pipe=1", "parallel.data=4", *HOST],
    "per layer": ["parallel.data=8", "parallel.zero=1", "parallel.grad_reduce=per_layer", "parallel.microbatches=2"],
    "interleaved": [*EVERY_AXIS, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.zero=2"],
    "zero bubble": [*EVERY_AXIS, "parallel.schedule=zero_bubble", "parallel.idle=mask", "memory.remat=none"],
}
FACTORIES = {"NNX": "scripts.your_model:build", "Linen": "linen_model:build", "plain": "plain_model:build"}


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return path


@pytest.fixture(scope="module")
def on_one_device():
    """Factory -> the records of its run on one device, filled by the first test that needs them."""
    return {}


def run(config_file, kind, name, *overrides):
    folder = config_file.parent / name
    assert main(config_file, f"model.factory={FACTORIES[kind]}", f"logging.dir={folder}", *overrides) == 0
    return records(folder)


@pytest.mark.parametrize(
    "case",
    cover(
        [("NNX", "every axis"), ("Linen", "every axis"), ("plain", "every axis"), ("Linen", "host")],
        [(kind, "interleaved") for kind in FACTORIES]
        + [("NNX", "zero bubble"), ("Linen", "per layer"), ("Linen", "zero bubble"), ("plain", "host")],
    ),
)
def test_a_model_that_is_not_ours_gives_the_numbers_of_one_device(config_file, on_one_device, case):
    kind, layout = case
    if kind not in on_one_device:
        on_one_device[kind] = run(config_file, kind, "one", "parallel.data=1")
    for one, many in zip(on_one_device[kind], run(config_file, kind, "many", *LAYOUTS[layout]), strict=True):
        for key in ("loss", "grad_norm"):
            np.testing.assert_allclose(many[key], one[key], rtol=1e-5)
    assert one["loss"] < on_one_device[kind][0]["loss"]
    assert one["mfu"] is None


def test_its_checkpoints_resume_on_another_layout(config_file, on_one_device):
    keys = "checkpoint.every=2", "checkpoint.async=false"
    whole = run(config_file, "Linen", "whole", "parallel.data=2", *keys)
    run(config_file, "Linen", "cut", "parallel.data=2", "train.steps=2", "optimizer.decay_steps=4", *keys)
    resumed = run(config_file, "Linen", "cut", *EVERY_AXIS, *keys)
    np.testing.assert_allclose([r["loss"] for r in resumed], [r["loss"] for r in whole], rtol=1e-5)


@pytest.mark.parametrize(
    ("factory", "overrides", "message"),
    [
        ("nowhere.at_all:build", [], "No module named 'nowhere'; install its package"),
        ("plain_model:builds", [], "plain_model has no builds"),
        ("json:dumps", [], "model.factory=json:dumps"),
        ("plain_model", [], "is not package.module:function"),
        ("plain_model:build", ["model.num_layers=4", "parallel.pipe=3"], "does not divide model.num_layers=4"),
        ("test_any_model:three_layers", [], "makes 3 layers, model.num_layers=4; make them agree"),
        ("test_any_model:no_model", [], "returned NoneType; return a nanotrain_jax.Model"),
        ("test_any_model:over_data", [], "only tensor may be named"),
    ],
)
def test_a_factory_that_is_wrong_is_told_in_one_line(config_file, capsys, factory, overrides, message):
    assert main(config_file, f"model.factory={factory}", "parallel.data=1", *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(config_file.parent.glob("runs"))


def three_layers(config, mesh):
    import plain_model

    return plain_model.build(config.replace("model", num_layers=3), mesh)


def no_model(config, mesh):
    return None


def over_data(config, mesh):
    import dataclasses

    import plain_model

    return dataclasses.replace(plain_model.build(config, mesh), rules=[(".*_..", "D F/data"), (".*", "L D F/data")])


def test_what_needs_our_decoder_says_so(config_file, capsys):
    assert plan.main(["--config", str(config_file), "model.factory=plain_model:build"]) == 2
    assert "the planner knows memory and FLOPs of the decoder only" in capsys.readouterr().err
    run(config_file, "plain", "run", "parallel.data=1", "data.source=stdlib", "data.val_fraction=0.01", "train.steps=1")
    assert generate.main(["--run", str(config_file.parent / "run"), "--prompt", "a"]) == 2
    assert "only the decoder can generate" in capsys.readouterr().err
