"""Configs: what is written is what is meant; what cannot be meant is told."""

from pathlib import Path

import pytest
import yaml

from nanotrain_jax import config as configs
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import request

AXES = {"pipe": 1, "replica": 1, "data": 1, "context": 1, "tensor": 1}


def load(tmp_path, text, *overrides):
    path = tmp_path / "name.yaml"
    path.write_text(text)
    return request.load(path, overrides)


def test_overrides_win_over_the_file_and_a_section_may_be_given_whole(tmp_path):
    text = "train: {steps: 7, seed: 3}\noptimizer: {lr: 1e-3}\n"
    found = load(
        tmp_path,
        text,
        "train.steps=9",
        "optimizer={lr: 5e-4, betas: [0.8, 0.9]}",
        "data.source=text:a=b*.txt",
    )
    assert (found.train.steps, found.train.seed) == (9, 3)
    assert (found.optimizer.lr, found.optimizer.betas) == (5e-4, (0.8, 0.9))
    assert found.data.source == "text:a=b*.txt"


@pytest.mark.parametrize("text", ["", "train:\n", "# nothing but a remark\n"])
def test_what_is_left_out_has_its_default(text, tmp_path):
    assert load(tmp_path, text).train == configs.Train()


def test_a_run_is_named_after_its_config_file(tmp_path):
    found = load(tmp_path, "")
    assert (found.logging.dir, found.checkpoint.dir) == ("runs/name", "runs/name/checkpoints")


def test_a_resolved_config_survives_yaml(tmp_path):
    found = resolve(load(tmp_path, "model: {family: gpt2}\n"), AXES, 257)
    again = request.parse(yaml.safe_load(yaml.safe_dump(found.to_dict())))
    assert again == found
    assert resolve(again, AXES, 257) == found


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_that_comes_along_can_run_on_the_mesh_that_it_names(path):
    found = request.load(path)
    assert min(found.parallel.axes.values()) >= 1
    resolve(found, found.parallel.axes, None if found.model.vocab_size else 257)


def test_a_config_cannot_be_changed(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path, "").train.steps = 5


@pytest.mark.parametrize(
    ("family", "d_ff", "tied"),
    [("llama", 512, False), ("gpt2", 768, True)],  # 8/3 x 192 = 512; 4 x 192
)
def test_sizes_left_out_follow_the_family(family, d_ff, tied, tmp_path):
    found = resolve(load(tmp_path, f"model: {{family: {family}, d_model: 192}}\n"), AXES, 257).model
    assert (found.d_ff, found.tie_embeddings, found.num_kv_heads, found.max_seq_len) == (d_ff, tied, 4, 256)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {layers: 3}", "unknown key model.layers; did you mean model.num_layers?"),
        ("modle: {}", "unknown key modle; did you mean model?"),
        ("steps: 3", "unknown key steps; did you mean train.steps?"),
        ("train: {steps: many}", "train.steps='many': input should be a valid integer"),
        ("train: {steps: 0}", "train.steps=0: input should be greater than 0"),
        ("train: {steps: 2.5}", "train.steps=2.5"),
        ("train: {steps: true}", "train.steps=True"),
        ("logging: {tensorboard: 1}", "logging.tensorboard=1: input should be a valid boolean"),
        ("data: {source: 7}", "data.source=7: input should be a valid string"),
        ("optimizer: {lr: .inf}", "optimizer.lr=inf"),
        ("optimizer: {betas: [0.9, 1.5]}", "optimizer.betas.1=1.5"),
        ("train: 3", "train=3"),
        ("runtime: {profile_steps: [3, 2]}", "runtime.profile_steps=[3, 2] is not [first, last]"),
        ("parallel: {zero: 4}", "parallel.zero=4: input should be 0, 1, 2 or 3"),
        ("parallel: {zero: 3, prefetch: true, microbatches: 2}", "it is for zero=3 with microbatches=1"),
        ("parallel: {zero: 1, prefetch: true}", "it is for zero=3"),
        ("memory: {remat: some}", "memory.remat='some' is unknown; use none, selective, full or block:N"),
        (
            "precision: {loss_scale: big}",
            "precision.loss_scale='big' is unknown; use none, dynamic or a number above 0",
        ),
        ("precision: {loss_scale: 0}", "precision.loss_scale=0"),
        ("- a\n- b", "a mapping of sections"),
        ("a: [", "not valid YAML"),
        ("train: {steps: 1}\ntrain: {seed: 2}", "key 'train' stands twice"),
        (
            "model: {d_model: 30, num_heads: 4}",
            "model.num_heads=4 does not divide model.d_model=30; use 3 or 5",
        ),
        ("model: {d_model: 12, num_heads: 4}", "odd"),
    ],
)
def test_what_cannot_be_meant_is_told_in_one_line(text, message, tmp_path):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_counted(tmp_path):
    with pytest.raises(ValueError, match=r"\(and 1 more\)"):
        load(tmp_path, "train: {steps: 0, seed: x}")
