"""Runs with train.lora: from a folder or a run, resumed with their base, and written as PEFT and merged folders."""

import json
import re
import shutil

import hugging_face_folders as folders
import jax
import numpy as np
import pytest
import yaml
from command import losses, same, saved_state
from conftest import cover, exit_code
from launching import finished, launched
from test_start_from_folder import loss
from tokenizers import Tokenizer, pre_tokenizers

from nanotrain_jax import convert, evaluate, generate, train
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint.directory import path_name
from nanotrain_jax.run import conversion, model_config, sources

B, T = 12, folders.golden.TOKENS
LORA = {"rank": 3, "alpha": 7.5}
TREE = {
    "precision": {"compute": "float32"},
    "data": {"batch_size": B, "seq_len": T},
    "optimizer": {"lr": 0.05, "schedule": "constant", "warmup_steps": 0},
    "train": {"steps": 4, "lora": LORA, "eval_every": 2, "eval_steps": 1},
    "checkpoint": {"every": 2},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}


@pytest.fixture
def words(tmp_path):
    """A file of text of the words that the models know."""
    file = tmp_path / "words.txt"
    numbers = np.random.default_rng(0).integers(4, 61, size=4000)
    file.write_text("\n".join(" ".join(f"w{i}" for i in row) for row in numbers.reshape(-1, 20)))
    return f"text:{file}"


def config_file(tmp_path, words, resume, **sections):
    tree = TREE | {"parallel": {"data": 2}, "checkpoint": TREE["checkpoint"] | {"resume": str(resume)}}
    tree["data"] = tree["data"] | {"source": words}
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | keys
    file = tmp_path / "lora.yaml"
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def model_of(tmp_path, name="llama"):
    """Write a model folder whose tokenizer knows words, once."""
    model = tmp_path / "model"
    if not model.exists():
        tokenizer = Tokenizer.from_file(str(folders.folder(model, name) / "tokenizer.json"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(model / "tokenizer.json"))
    return model


def trained(tmp_path, words, name="llama", run="run", **sections):
    """Train adapters of a folder -> the folder, the run."""
    model = model_of(tmp_path, name)
    file = config_file(tmp_path, words, f"hf:{model}", **sections)
    assert train.main(["--config", file, f"logging.dir={tmp_path / run}"]) == 0
    return model, tmp_path / run


def merged_by_peft(base, adapter):
    """Add the adapters of a folder to the tensors of a model, by the rules of PEFT's LoraLayer: delta = B A scale."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, result = folders.read(adapter), dict(base)
    assert config["peft_type"] == "LORA" and config["bias"] == "none" and tensors.keys() >= {*tensors}
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    for module in modules:
        assert any(module == target or module.endswith(f".{target}") for target in config["target_modules"])
        a, b = (tensors[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")

        def pattern(key, default, module=module):
            found = [v for k, v in config[key].items() if re.match(rf".*\.{re.escape(k)}$", module)]
            return found[0] if found else default

        rank, alpha = pattern("rank_pattern", config["r"]), pattern("alpha_pattern", config["lora_alpha"])
        assert a.shape[0] == b.shape[1] == rank
        delta = b @ a * (alpha / (rank**0.5 if config["use_rslora"] else rank))
        result[f"{module}.weight"] = result[f"{module}.weight"] + (delta.T if config["fan_in_fan_out"] else delta)
    ends = tuple(f"{target}.weight" for target in config["target_modules"])
    targeted = [name for name in base if name.endswith(ends)]
    assert len(modules) == len(targeted)
    return result


@pytest.mark.long
def test_a_run_starts_with_the_adapters_of_another(words, tmp_path, capsys):
    _, run = trained(tmp_path, words)
    second = ["train.steps=1", "optimizer.lr=1e-37", "parallel.zero=3", "optimizer.weight_decay=0"]
    tree = yaml.safe_load((run / "config.yaml").read_text())
    file = config_file(tmp_path, words, f"weights:{run}", model=tree["model"], data=tree["data"])
    capsys.readouterr()
    assert train.main(["--config", file, f"logging.dir={tmp_path}/second", *second]) == 0
    assert f"starts from the weights of step 4 in {run}/checkpoints" in capsys.readouterr().out
    (_, (before, _)), (number, (state, _)) = saved_state(run), saved_state(tmp_path / "second")
    assert number == 1
    same(state["params"], before["params"])


@pytest.mark.long
def test_the_config_of_a_run_trains_other_adapters(words, tmp_path):
    _, run = trained(tmp_path, words)
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert kept["model"]["lora"] is None and kept["train"]["freeze"] == []
    wider = ["train.lora={rank: 5, alpha: 5}", "train.steps=1", f"logging.dir={tmp_path}/wider"]
    assert train.main(["--config", str(run / "config.yaml"), *wider]) == 0
    (_, (state, _)) = saved_state(tmp_path / "wider")
    assert 5 in state["params"]["layers"]["attention"]["q_A_DR"].shape


CASES = [("gpt2", {"targets": ["q", "v", "down"], "rslora": True})]  # a llama is merged in the test of commands below
MORE = [
    ("llama", {}),
    ("gemma3_text", {}),
    ("qwen2", {"targets": ["k", "up"]}),
    ("gpt2", {}),
    ("mistral_window", {"rslora": True}),
]


@pytest.mark.parametrize("case", cover(CASES, MORE, lambda case: f"{case[0]} {','.join(case[1])}"))
def test_adapters_are_written_as_peft_reads_them_and_merged(case, words, tmp_path, capsys):
    name, lora = case
    model, run = trained(tmp_path, words, name, train={"lora": LORA | lora, "save_hf": True})
    assert "parameters of adapters (rank 3) on the frozen weights" in capsys.readouterr().out
    assert convert.main(["--run", str(run), "--to", str(tmp_path / "peft")]) == 0
    assert convert.main(["--run", str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert "of the run and of the folder as read back, are equal" in capsys.readouterr().out
    folders.assert_same_bits(folders.read(run / "hf"), folders.read(tmp_path / "peft"))
    base, merged = folders.read(model), folders.read(tmp_path / "merged")
    by_rule = merged_by_peft(base, tmp_path / "peft")
    assert merged.keys() == base.keys()
    for tensor, x in merged.items():
        np.testing.assert_allclose(x, by_rule[tensor], rtol=1e-6, atol=1e-6)
    assert max(np.abs(merged[tensor] - base[tensor]).max() for tensor in base) > 0.01  # it has learned
    equals_the_run(tmp_path, config_file(tmp_path, words, f"hf:{model}", train={"lora": LORA | lora}), run)


def equals_the_run(tmp_path, file, run):
    """The merged model's logits give the loss of the run's step, which computes x W + scale (x A) B."""
    resumed = train.prepare(model_config.load(file, [f"logging.dir={run}"]))
    tokens = np.random.default_rng(1).integers(4, 61, size=T + 1)
    rows = np.tile(tokens, (B, 1)).astype(np.int32)
    batch = {"inputs": rows[:, :-1], "targets": rows[:, 1:]}
    batch = jax.device_put(batch, jax.tree.map(lambda x: x.sharding, resumed.step.batch))
    found, _ = resumed.step.evaluate(resumed.state.params, batch)
    source = sources.of_run(run / "checkpoints", 4, is_exact=True)
    logits = conversion.logits(source.model, source.read, tokens[:-1])
    np.testing.assert_allclose(float(found), B * loss(logits.astype(np.float64), tokens[1:]), rtol=1e-6)


@pytest.mark.parametrize(
    "layout",
    cover(
        [],
        [
            {"tensor": 2, "pipe": 3, "microbatches": 3},
            {"data": 4, "zero": 3, "persist_below": 1},
            {"pipe": 3, "schedule": "interleaved", "chunks": 1},
        ],
    ),
)
def test_a_run_resumes_adapters_with_their_base_on_any_layout(layout, words, tmp_path, capsys):
    model, whole = trained(tmp_path, words, "llama", "whole")
    _, run = trained(tmp_path, words, "llama", "run", train={"steps": 2}, optimizer={"decay_steps": 4})
    _, saved = saved_state(run)
    held = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(saved[0]["params"])}
    assert all("_A_" in path or "_B_" in path for path in held) and len(held) == 14
    assert sum(x.stat().st_size for x in (run / "checkpoints").rglob("*") if x.is_file()) < 300_000
    keys = config_file(tmp_path, words, "auto", parallel={"data": 1} | layout)
    with_model = [f"logging.dir={run}", f"data.tokenizer={model}"]
    known = yaml.safe_load((run / "config.yaml").read_text())["model"]
    file = tmp_path / "lora.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"model": known}))
    assert train.main(["--config", keys, *with_model]) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    for step, values in losses(whole).items():
        np.testing.assert_allclose(losses(run)[step][0], values[0], rtol=1e-5)
    same_up_to_rounding = saved_state(run)[1][0]["params"], saved_state(whole)[1][0]["params"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *same_up_to_rounding)


@pytest.mark.long
def test_the_weights_of_a_run_are_adapted_and_commands_read_base_and_adapters(words, tmp_path, capsys):
    model = model_of(tmp_path)
    base = tmp_path / "base"
    assert convert.main(["--from", str(model), "--out", str(base)]) == 0
    known = yaml.safe_load((base / "config.yaml").read_text())["model"]
    data = {"tokenizer": str(model / "tokenizer.json")}
    file = config_file(tmp_path, words, base / "checkpoints", model=known, data=data, train={"steps": 2})
    assert train.main(["--config", file, f"logging.dir={tmp_path / 'run'}"]) == 0
    _, other = trained(tmp_path, words, "llama", "other", train={"steps": 2})
    same(saved_state(tmp_path / "run")[1][0]["params"], saved_state(other)[1][0]["params"])  # of the same weights
    capsys.readouterr()
    for run, of_base in (("run", None), ("other", str(model))):
        assert convert.main(["--run", str(tmp_path / run), "--to", str(tmp_path / f"{run} peft")]) == 0
        assert ("PEFT cannot read their base" in capsys.readouterr().out) == (of_base is None)
        config = json.loads((tmp_path / f"{run} peft" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == of_base
    assert convert.main(["--run", str(other), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    answers = []
    for place in (["--run", str(other)], ["--hf", str(tmp_path / "merged")]):
        capsys.readouterr()
        with jax.numpy_dtype_promotion("standard"):
            assert generate.main([*place, "--prompt", "w5 w9", "--tokens", "8", "--temperature", "0"]) == 0
            text = capsys.readouterr().out
            (tmp_path / "held.txt").write_text("w7 w8 w9 w10 w11 w12")
            assert evaluate.main([*place, "--text", str(tmp_path / "held.txt")]) == 0
        answers.append((text, re.findall(r"\d+\.\d{4}", capsys.readouterr().out)))
    assert answers[0] == answers[1] and answers[0][1]


@pytest.mark.long
def test_two_processes_train_adapters_and_resume_them(words, tmp_path):
    deep = tmp_path.joinpath(*["d" * 200] * 6)  # what names the base is longer than a message between processes
    model = folders.in_shards(shutil.copytree(model_of(tmp_path), deep))
    layout = {"parallel": {"data": 2, "tensor": 2, "zero": 3, "persist_below": 1}, "runtime": {"simulate": 4}}
    file = config_file(tmp_path, words, f"hf:{model}", **layout)
    for steps in (2, 4):
        finished(
            launched(2, file, f"logging.dir={tmp_path / 'run'}", f"train.steps={steps}", "optimizer.decay_steps=4")
        )
    _, alone = trained(tmp_path, words, "llama", "alone")
    for step, values in losses(alone).items():
        np.testing.assert_allclose(losses(tmp_path / "run")[step][0], values[0], rtol=1e-5)


@pytest.mark.long
def test_where_the_base_has_moved_to_is_kept(words, tmp_path, capsys):
    model, run = trained(tmp_path, words, train={"steps": 2})
    new = model.rename(tmp_path / "moved")
    file = config_file(tmp_path, words, f"hf:{new}", train={"steps": 3, "save_hf": True}, checkpoint={"every": 1})
    assert train.main(["--config", file, f"logging.dir={run}"]) == 0
    for step in (2, 3):
        assert restore.read_meta(run / "checkpoints", step).base.folder == str({2: model, 3: new}[step])
    assert json.loads((run / "hf" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(new)
    assert convert.main(["--run", str(run), "--to", str(tmp_path / "merged"), "--merge", "--no-check"]) == 0
    shutil.rmtree(run / "hf")
    last = new.rename(tmp_path / "again")  # no step is left, and so no checkpoint is written
    file = config_file(tmp_path, words, f"hf:{last}", train={"steps": 3, "save_hf": True})
    assert train.main(["--config", file, f"logging.dir={run}"]) == 0
    assert json.loads((run / "hf" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(last)


def changed(model):
    tensors = folders.read(model)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    folders.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


WRONG = {
    "without a base": (lambda model: None, "auto", "new", "train.lora without weights to adapt"),
    "of other weights": (changed, None, "run", "model.safetensors is not as in"),
    "whose base is gone": (shutil.rmtree, "auto", "run", "is not there; put it back"),
}


@pytest.mark.long
def test_adapters_refuse_another_base_in_one_line(words, tmp_path, capsys):
    model, run = trained(tmp_path, words, train={"steps": 2})
    file = config_file(tmp_path, words, f"hf:{model}", train={"lora": None, "steps": 2})
    assert exit_code(train.main, ["--config", file, f"logging.dir={run}"]) == 2
    assert "train.lora" in capsys.readouterr().err
    known = yaml.safe_load((run / "config.yaml").read_text())["model"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    shutil.copytree(model, tmp_path / "tokenizer")
    data = {"tokenizer": str(tmp_path / "tokenizer")}
    for change, resume, folder, named in WRONG.values():
        change(model)
        file = config_file(tmp_path, words, resume or f"hf:{model}", data=data, model=known)
        capsys.readouterr()
        assert exit_code(train.main, ["--config", file, f"logging.dir={tmp_path / folder}"]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert named in line
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        assert not (tmp_path / "new").exists()
    assert exit_code(convert.main, ["--run", str(run), "--to", str(tmp_path / "out"), "--merge"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_run_without_adapters_is_not_mixed_with_them(words, tmp_path, capsys):
    _, run = trained(tmp_path, words, train={"steps": 2, "lora": None})
    for lora, named in ((LORA, "holds a run without train.lora"), (None, "")):
        file = config_file(tmp_path, words, f"hf:{tmp_path / 'model'}", train={"lora": lora, "steps": 2})
        capsys.readouterr()
        code = exit_code(train.main, ["--config", file, f"logging.dir={run}"])
        assert (code == 2) == bool(named) and named in capsys.readouterr().err
    _, adapted = trained(tmp_path, words, "llama", "adapted", train={"steps": 2})
    file = config_file(tmp_path, words, f"hf:{tmp_path / 'model'}", train={"lora": None, "steps": 2})
    capsys.readouterr()
    assert exit_code(train.main, ["--config", file, f"logging.dir={adapted}"]) == 2
    assert "train.lora" in capsys.readouterr().err
