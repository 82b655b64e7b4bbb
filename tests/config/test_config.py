"""Configs: parsing, defaults, validation and error messages."""

from pathlib import Path

import pytest
import yaml
from conftest import ROOT, resolved, small

from nanotrain_jax import plan
from nanotrain_jax.config import load as request
from nanotrain_jax.config import schema as configs
from nanotrain_jax.config import values
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.data import batches
from nanotrain_jax.run import banner, capacity

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
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
def test_omitted_keys_have_their_defaults(text, tmp_path):
    assert load(tmp_path, text).train == configs.Train()


def test_a_section_may_be_left_out_by_null(tmp_path):
    text = "vision: {image_size: 64}\n"
    assert load(tmp_path, text).vision.image_size == 64
    assert request.parse(request.nested(["vision=null"], yaml.safe_load(text))).vision is None
    assert load(tmp_path, "vision:\n").vision is None


def test_a_run_is_named_after_its_config_file(tmp_path):
    found = load(tmp_path, "")
    assert (found.logging.dir, found.checkpoint.dir) == ("runs/name", "runs/name/checkpoints")


def test_a_resolved_config_survives_yaml(tmp_path):
    found = resolve(load(tmp_path, "model: {family: gpt2}\n"), AXES, 257)
    again = request.parse(yaml.safe_load(yaml.safe_dump(found.to_dict())))
    assert again == found
    assert resolve(again, AXES, 257) == found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_in_the_repository_resolves_on_the_mesh_it_names(path):
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
        ("runtime: {profile_steps: [3, 2]}", "runtime.profile_steps=[3, 2] must be [first, last]"),
        ("parallel: {zero: 4}", "parallel.zero=4: input should be 0, 1, 2 or 3"),
        ("parallel: {zero: 1, prefetch: true}", "only zero=3 gathers weights layer by layer"),
        ("memory: {remat: some}", "memory.remat='some' must be none, selective, full or block:N"),
        (
            "precision: {loss_scale: big}",
            "precision.loss_scale='big' must be none, dynamic or a number above 0",
        ),
        ("precision: {loss_scale: 0}", "precision.loss_scale=0"),
        ("- a\n- b", "is a list; write a mapping"),
        ("a: [", "not valid YAML"),
        ("train: {steps: 1}\ntrain: {seed: 2}", "key 'train' is given twice"),
        (
            "model: {d_model: 30, num_heads: 4}",
            "model.num_heads=4 does not divide model.d_model=30; use 3 or 5, or set model.head_dim",
        ),
        ("model: {d_model: 12, num_heads: 4}", "head dim 3 (model.d_model / model.num_heads) is odd"),
        ("model: {rope_scaling: {type: llama3, factor: 8}}", "llama3 without original_max_seq_len"),
        ("model: {rope_scaling: {type: ntk, factor: 8}}", "model.rope_scaling.type='ntk'"),
        ("model: {rope_scaling: {factor: 8}}", "model.rope_scaling.type={'factor': 8}: field required"),
        ("model: {rope_scaling: {type: linear, factor: 0.5}}", "model.rope_scaling.factor=0.5"),
        (
            "model: {rope_scaling: {type: yarn, factor: 2, original_max_seq_len: 8, beta_slow: 64}}",
            "must be below high_freq_factor=4.0 and beta_fast=32.0",
        ),
        ("model: {family: gpt2, rope_scaling: {type: linear, factor: 2}}", "its positions are learned"),
        ("model: {sliding_window: 0}", "model.sliding_window=0"),
        ("model: {global_layers: 'first:2'}", "model.global_layers=first:2 without model.sliding_window"),
        ("model: {rope_local_theta: 5.0}", "model.rope_local_theta=5.0 with model.global_layers=none"),
        (
            "model: {rope_theta: 1.0, rope_scaling: {type: yarn, factor: 2, original_max_seq_len: 8}}",
            "model.rope_theta=1.0 with yarn: must be above 1",
        ),
        ("model: {global_layers: 'every:0'}", "model.global_layers='every:0'"),
        ("model: {head_dim: 5}", "head dim 5 (model.head_dim) is odd"),
        ("parallel: {zero: true}", "parallel.zero=True: input should be an integer"),
        ("parallel: {zero: 1.0}", "parallel.zero=1.0: input should be an integer"),
        ("model: {num_layers: 10000000}", "model.num_layers=10000000: input should be less than or equal to 1000000"),
        ("train: {steps: !!int many}", "'many' is not a valid int"),
        ("train: !!timestamp soon", "'soon' is not a valid timestamp"),
        ("train: {steps: " + "[" * 3000, "nested too deeply"),
        ("model: 5", "model=5: model is a section; write model.KEY=VALUE"),
        (
            "memory: {nvme_dir: ~nosuchuser/x}",
            "memory.nvme_dir='~nosuchuser/x': no home directory ~nosuchuser",
        ),
        ("base: &base {d_model: 64}", "unknown key base"),
    ],
)
def test_an_invalid_config_is_reported_in_one_line(text, message, tmp_path):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_merge_keys_copy_a_section(tmp_path):
    text = "_base: &base {num_layers: 3, d_model: 64}\nmodel: {<<: *base, d_model: 96}\n"
    found = load(tmp_path, text, "model.num_heads=2").model
    assert (found.num_layers, found.d_model, found.num_heads) == (3, 96, 2)
    with pytest.raises(ValueError, match="key 'd_model' is given twice"):
        load(tmp_path, text.replace("*base", "*base, d_model: 1"))


def test_nested_yaml_merges_stay_small(tmp_path):
    lines = ["_0: &a0 {steps: 5}"]
    lines += [f"_{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 30)]
    assert load(tmp_path, "\n".join([*lines, "train: {<<: *a29}"])).train.steps == 5


def test_no_key_accepts_a_bool_as_a_number_or_a_string():
    for section, keys in configs.Config.sections().items():
        for name, key in keys.model_fields.items():
            if "bool" not in str(key.annotation) and (section, name) != ("data", "verify"):  # YAML reads off as false
                with pytest.raises(ValueError, match=f"{section}.{key.alias or name}"):
                    request.parse({section: {key.alias or name: True}})


def test_a_tilde_is_the_home_directory_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "name.yaml").write_text("model: {vocab_size: 61}\ndata: {source: synthetic}\nparallel: {data: 1}\n")
    keys = "memory.nvme_dir", "data.tokenizer", "checkpoint.dir", "checkpoint.resume", "logging.dir"
    overrides = [*(f"{key}=~/x" for key in keys), "memory.offload_optimizer=nvme", "data.source=text:~/*.txt"]
    found = request.load("~/name.yaml", overrides)
    for section, name in (key.split(".") for key in keys):
        assert getattr(getattr(found, section), name) == f"{tmp_path}/x"
    assert found.data.source == f"text:{tmp_path}/*.txt"
    assert request.load("~/name.yaml", ["data.source=tokens:~/x"]).data.source == f"tokens:{tmp_path}/x"
    plan.main(["--config", "~/name.yaml", "--write", "~/w.yaml", "--json", "~/j.json", "--report", "~/report"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["j.json", "name.yaml", "report", "w.yaml"]


def test_a_path_travels_as_an_override_whatever_its_name():
    path = Path("~/runs/lr #2: é, 'x'")
    assert request.nested([request.path_override("logging.dir", path)]) == {"logging": {"dir": str(path)}}


def test_a_warm_up_longer_than_the_decay_is_refused(tmp_path):
    steps = ["optimizer.warmup_steps=30", "optimizer.decay_steps=20"]
    with pytest.raises(ValueError, match=r"optimizer.warmup_steps=30 exceeds optimizer.decay_steps=20"):
        resolve(load(tmp_path, "", *steps), AXES, 257)
    for remedy in "optimizer.decay_steps=30", "optimizer.warmup_steps=20", "optimizer.schedule=constant":
        resolve(load(tmp_path, "", *steps, remedy), AXES, 257)


def test_a_short_trial_may_end_during_warm_up_and_before_a_synchronization_with_warnings(text_files):
    changes = {"optimizer": {"warmup_steps": 30}, "train": {"steps": 3}, "data": {"source": f"text:{text_files}"}}
    config, mesh = resolved(small(parallel={"replica": 2, "data": 2, "sync_every": 4}, **changes))
    lines = banner.introduction(config, mesh, batches.load(config.data), [])
    assert "warning: the run ends during warm-up: optimizer.warmup_steps=30 > train.steps" in lines
    assert (
        "warning: the run ends before replicas are joined: parallel.sync_every=4, full_sync_steps=0, train.steps=3"
        in lines
    )


def test_near_divisors_are_the_nearest_and_fast_for_huge_numbers():
    for number in range(1, 200):
        plain = [d for d in range(1, number + 1) if number % d == 0]
        assert values.divisors(number) == plain
        for wanted in range(1, 200):
            near = [d for d in plain if d < wanted][-1:] + [d for d in plain if d > wanted][:1]
            assert values.near_divisors(number, wanted) == " or ".join(map(str, near))
    assert values.near_divisors(2**62, 1000) == "512 or 1024"


def test_a_model_larger_than_memory_is_refused_before_it_is_built():
    config, mesh = resolved(small())
    capacity.check(config, mesh)
    for section, changes, what in (
        ("model", {"num_layers": 10**6, "d_model": 2**15, "d_ff": 2**15}, "weights and optimizer state"),
        ("data", {"seq_len": 2**20}, "a step"),
    ):
        with pytest.raises(ValueError, match=f"{what} would take about .* GB on 8 simulated devices"):
            capacity.check(config.replace(section, **changes), mesh)


def test_a_missing_config_is_reported_with_the_available_ones(tmp_path, monkeypatch):
    for path, remedy in (("quikstart.yaml", "did you mean .*configs/quickstart.yaml"), ("x.yaml", "llama3_8b")):
        with pytest.raises(OSError, match=rf"--config {path} cannot be read \(No such file or directory\); .*{remedy}"):
            request.load(path)
    with pytest.raises(OSError, match="Is a directory"):
        request.load(tmp_path)


def test_config_comments_and_help_are_correct():
    assert not [path for path in CONFIGS if "to come" in path.read_text()]
    assert "may span documents" in request.describe()


def test_further_errors_are_counted(tmp_path):
    with pytest.raises(ValueError, match=r"\(and 1 more\)"):
        load(tmp_path, "train: {steps: 0, seed: x}")
