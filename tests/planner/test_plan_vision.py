"""Plans of vision-language models, and the FLOPs that their training reports."""

import json

import pytest
from planning import ROOT, run

from nanotrain_jax.config.load import load
from nanotrain_jax.costs import flops, hardware, vision
from nanotrain_jax.planner import training_stages
from nanotrain_jax.planner.compute_time import encoder_time
from nanotrain_jax.planner.estimate import on_gpus

CONFIG = ROOT / "configs" / "vision_language_74b.yaml"
H100 = hardware.find("h100")


def config_of(stage, *overrides):
    return on_gpus(training_stages.config_of(load(CONFIG, list(overrides)), stage), 0, "h100")


def test_a_plan_has_the_encoder_in_parameters_memory_traffic_and_time(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert run("--config", CONFIG, "--stage", "encoder", "--json", file, "--report", tmp_path) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "74,655,543,040 parameters, on 128 x h100" in out
    assert found["model"]["params"] == 74_655_543_040
    kinds = {row["why"]: row for row in found["collectives"]}
    of_pipe = [row for row in found["collectives"] if row["why"] == "encoded pictures and their gradients"]
    assert {(row["axis"], row["op"]) for row in of_pipe} == {
        ("tensor", "all_reduce"), ("pipe", "all_gather"), ("pipe", "reduce_scatter"),
    }  # fmt: skip
    K, E, L = 400, 1792, 48
    layers = 4 * 5 * L * K * E * 2  # 4 pictures, 5 all-reduces with remat=full, bfloat16
    assert kinds["activations of the encoder of pictures"]["bytes_per_device"] == 2 * 3 / 4 * layers
    assert found["estimate"]["seconds"]["encoder"] == pytest.approx(encoder_time(config_of("encoder"), H100))
    assert found["estimate"]["moments"]["encoder"]["activations"] > 4 * L * K * E * 2
    assert "pictures are encoded, forward and backward" in (tmp_path / "index.html").read_text()


def test_what_is_frozen_takes_less_time():
    adapter, encoder, everything = (encoder_time(config_of(name), H100) for name in ("adapter", "encoder", "all"))
    assert adapter < encoder == pytest.approx(everything, rel=0.05)
    forward = encoder_time(config_of(None, "train.stages=[]", "train.freeze=[^vision/, ^encoder/, ^ends/]"), H100)
    assert forward < 0.5 * adapter
    config = config_of("all")
    matrix_units = vision.step_flops(config) / (H100.matmul * H100.peak_flops)
    assert 2 * matrix_units < everything < 8 * matrix_units  # matmuls of few tokens, scores, norms, starts of kernels


@pytest.mark.parametrize("stage", ["adapter", "all"])
def test_training_reports_the_flops_of_the_pictures(stage):
    config = config_of(stage)
    text = flops.flops_per_token(config.model_copy(update={"vision": None}))["full"] * 128 * 4096
    found = flops.flops_per_token(config)["full"] * 128 * 4096
    assert found == pytest.approx(text + 128 * vision.model_flops(config))
    assert config.is_built_in
    assert not config.replace("model", factory="mine:build").is_built_in


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--choose"], "vision: layouts of an encoder of pictures are not searched; give the sizes of the mesh"),
        (["memory.offload_optimizer=host"], "vision with memory.offload_optimizer=host: offload with an encoder has"),
        (["--stage", "words"], "--stage=words is no stage of training; use adapter or encoder or all"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(arguments, message, capsys):
    assert run("--config", CONFIG, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
