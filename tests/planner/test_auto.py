"""`parallel: auto`: the planner's first layout, written down, kept by a resume."""

import json
from types import SimpleNamespace

import pytest
import yaml
from command import config_file, losses, main
from conftest import ROOT

from nanotrain_jax import plan
from nanotrain_jax.config import load
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.planner import choice

__all__ = ["config_file"]  # a fixture
LLAMA = ROOT / "configs" / "llama3_8b.yaml"
H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
AUTO = "parallel=auto"


def chosen(*overrides, devices=8, kind=H100):
    return choice.for_devices(load.load(LLAMA, [AUTO, *overrides]), [kind] * devices)


def test_training_takes_the_layout_that_the_planner_shows_first(tmp_path):
    e = chosen()
    for arguments in (["--choose"], [AUTO]):
        command = ["--config", str(LLAMA), "--gpu", "h100", "--gpus", "8", *arguments, "--json", str(tmp_path / "plan")]
        assert plan.main(command) == 0
        found = json.loads((tmp_path / "plan").read_text())
        assert found["mesh"] == e.config.parallel.axes
        assert (found["zero"], found["microbatches"]) == (e.config.parallel.zero, e.config.parallel.microbatches)
        assert (found["remat"], found["loss_chunk"]) == (e.config.memory.remat, e.config.model.loss_chunk)


def test_the_line_of_yaml_stands_for_the_layout():
    e = chosen("parallel.tensor=4")
    assert e.config.parallel.tensor == 4
    requested = load.load(LLAMA, [AUTO])
    layout = choice.layout_of(e.config)
    adopted = choice.adopted(requested, layout)
    typed = requested.to_dict() | {"parallel": {}} | yaml.safe_load(choice.as_yaml(layout))
    typed["model"] = requested.to_dict()["model"] | typed.get("model", {})
    typed["memory"] = requested.to_dict()["memory"] | typed["memory"]
    axes, vocab = e.config.parallel.axes, e.config.model.vocab_size
    assert resolve(adopted, axes, vocab) == resolve(load.parse(typed), axes, vocab)


@pytest.mark.long
def test_a_run_writes_its_layout_and_a_resume_keeps_it_until_the_devices_change(config_file, tmp_path, capsys):
    def run(*overrides):
        assert (
            main(config_file, f"logging.dir={tmp_path}/run", "data.batch_size=16", "train.eval_every=0", *overrides)
            == 0
        )
        return yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["parallel"]

    first = run(AUTO, "parallel.tensor=2", "train.steps=5")
    assert (first["auto"], first["data"], first["tensor"]) == (False, 4, 2)
    assert "parallel: auto chose data 4 x tensor 2" in capsys.readouterr().out
    assert run(AUTO, "train.steps=10") == first
    assert "parallel: auto keeps the layout of the checkpoint: data 4 x tensor 2" in capsys.readouterr().out
    other = run(AUTO, "parallel.tensor=1", "train.steps=15")
    assert (other["data"], other["tensor"]) == (8, 1)
    assert "auto chose data 8" in capsys.readouterr().out
    assert max(losses(tmp_path / "run")) == 15


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        pytest.param(
            *(["model.num_layers=320"], H100, "no layout of 8 x h100 fits: .* would fit with"), marks=pytest.mark.long
        ),
        ([], SimpleNamespace(device_kind="NVIDIA L40S", platform="gpu"), "does not know NVIDIA L40S; give the sizes"),
        (["model.factory=a.b:c"], H100, "the planner supports only the built-in models"),
        (["parallel.zero=3", "parallel.prefetch=true"], H100, "parallel.prefetch is not searched"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(overrides, kind, message):
    with pytest.raises(ValueError, match=message) as error:
        chosen(*overrides, kind=kind)
    assert "\n" not in str(error.value)


def test_nothing_fits_the_simulated_devices(config_file, tmp_path, capsys):
    size = "model.d_model=16384", "model.num_layers=64", "model.num_heads=128", "model.d_ff=65536"
    assert main(config_file, AUTO, *size, f"logging.dir={tmp_path}/run") == 2
    error = capsys.readouterr().err
    assert "no layout of 8 x cpu fits" in error
    assert error.count("\n") == 1


def test_other_commands_ask_for_the_chosen_layout():
    config = load.load(LLAMA, [AUTO])
    with pytest.raises(Misfit, match="take the line of YAML"):
        resolve(config, dict.fromkeys(config.parallel.axes, 1))
