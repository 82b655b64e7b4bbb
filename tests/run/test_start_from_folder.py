"""checkpoint.resume=hf:FOLDER: a run starts from the weights of a model folder in every layout, and gives them back."""

import hugging_face_folders as folders
import jax
import numpy as np
import pytest
import yaml
from conftest import cover
from launching import finished, launched

from nanotrain_jax import convert, plan, train
from nanotrain_jax.checkpoint import safetensors, write
from nanotrain_jax.run import conversion, model_config

B, T = 12, folders.golden.TOKENS
TREE = {
    "precision": {"compute": "float32"},
    "data": {"source": "synthetic", "batch_size": B, "seq_len": T},
    "train": {"steps": 1},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}
LAYOUTS = {
    "tensor 2, pipe 2 of uneven stages, vocabulary over pipe": {"tensor": 2, "pipe": 2, "vocab_over_pipe": True},
    "zero 3": {"data": 2, "zero": 3, "persist_below": 1},
    "context 2": {"context": 2, "context_attention": "ulysses"},
    "zero 1, pipe 3": {"data": 2, "zero": 1, "pipe": 3, "persist_below": 1},
    "ring": {"context": 2, "tensor": 2},
    "replicas apart": {"replica": 2, "data": 2, "zero": 2, "sync_every": 2},
}


FIRST = next(iter(LAYOUTS))


def started(tmp_path, source, parallel, **sections):
    """Prepare a run that starts from a folder."""
    tree = TREE | {"parallel": {"data": 1, "microbatches": 3} | parallel, "checkpoint": {"resume": f"hf:{source}"}}
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | keys
    tree["logging"] = tree["logging"] | {"dir": str(tmp_path / "run")}
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(tree))
    return train.prepare(model_config.load(str(file)))


def exported(tmp_path, run):
    """Write a checkpoint of the state of a run, and that as a model folder; -> its tensors."""
    checkpoints, back = tmp_path / "run" / "checkpoints", tmp_path / "back"
    checkpoints.mkdir(parents=True)
    meta = {"config": run.config.to_dict(), "tokenizer": None, "data": {"position": 0, "fingerprint": ""}}
    with write.writing(run.config.checkpoint.model_copy(update={"dir": str(checkpoints)})) as save:
        save(0, run.step.in_layer_order(run.state), meta)
    back.mkdir()
    conversion.Export(checkpoints, 0, tmp_path / "run").write(back)
    return folders.read(back)


def loss(logits_TV, targets_T):
    """Return the sum of cross-entropies."""
    largest = logits_TV.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits_TV - largest).sum(-1)) + largest[:, 0]
    return float((log_sum - logits_TV[np.arange(len(targets_T)), targets_T]).sum())


@pytest.mark.parametrize(
    "case",
    cover(
        [("gemma3_text", FIRST), ("gpt2", "zero 3"), ("llama_tied", "context 2")],
        [("llama", FIRST)]
        + [(name, layout) for name in ("llama", "gemma3_text") for layout in [*LAYOUTS][1:-1]]
        + [("llama", "replicas apart"), ("qwen2", FIRST), ("qwen3", FIRST)]
        + [("gpt2", name) for name in LAYOUTS if name != "zero 3"],
    ),
)
def test_a_run_starts_from_a_folder_and_gives_every_bit_back(case, tmp_path):
    name, layout = case
    model = folders.folder(tmp_path / "model", name)
    run = started(tmp_path, model, LAYOUTS[layout])
    tokens, logits = folders.logits(name)
    inputs, targets = np.tile(tokens, (B, 1)), np.tile(np.roll(tokens, -1), (B, 1))
    batch = {"inputs": inputs.astype(np.int32), "targets": targets.astype(np.int32)}
    order = run.step.token_order
    batch = {key: rows if order is None else rows[:, order] for key, rows in batch.items()}
    batch = jax.device_put(batch, jax.tree.map(lambda x: x.sharding, run.step.batch))
    losses, count = run.step.evaluate(run.step.average(run.state.params), batch)
    np.testing.assert_allclose(float(losses), B * loss(logits, targets[0]), rtol=2e-6)
    assert int(count) == B * T
    if not run.config.parallel.sync_every:
        folders.assert_same_bits(exported(tmp_path, run), folders.tensors(name))


def test_state_in_host_memory_starts_from_a_folder(tmp_path):
    model = folders.folder(tmp_path / "model", "llama", "bfloat16")
    host = {"offload_optimizer": "host", "offload_params": "host"}
    precision = {"compute": "bfloat16"}
    run = started(tmp_path, model, {"data": 2, "zero": 3, "persist_below": 1}, memory=host, precision=precision)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(run.state.opt.master)} == {"pinned_host"}
    folders.assert_same_bits(exported(tmp_path, run), folders.tensors("llama", "bfloat16"))


@pytest.mark.parametrize("by_way_of_a_run", cover([], [True, False], str))
def test_a_step_that_changes_nothing_gives_the_same_bits_of_bfloat16(by_way_of_a_run, tmp_path, capsys):
    """The command trains with float32 master weights; also from a converted run, and with its state in files."""
    model, run = folders.folder(tmp_path / "model", "gpt2", "bfloat16"), tmp_path / "run"
    source = f"hf:{model}"
    if by_way_of_a_run:
        assert convert.main(["--from", str(model), "--out", str(tmp_path / "converted")]) == 0
        source = str(tmp_path / "converted" / "checkpoints")
    tree = TREE | {"precision": {"compute": "bfloat16"}, "parallel": {"data": 2, "zero": 3, "persist_below": 1}}
    tree["optimizer"] = {"lr": 1e-37, "weight_decay": 0.0}
    tree["train"] = {"steps": 1, "save_hf": True}
    if by_way_of_a_run:
        tree["memory"] = {"offload_optimizer": "nvme", "nvme_dir": str(tmp_path / "nvme")}
        tree["model"] = yaml.safe_load((tmp_path / "converted" / "config.yaml").read_text())["model"]
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(tree))
    keys = [f"logging.dir={run}", f"checkpoint.resume={source}", f"data.tokenizer={model / 'tokenizer.json'}"]
    with jax.numpy_dtype_promotion("standard"):
        assert train.main(["--config", str(file), *keys[:2]]) == 0
    assert "starts from the weights" in capsys.readouterr().out
    folders.assert_same_bits(folders.read(run / "hf"), folders.tensors("gpt2", "bfloat16"))
    assert (run / "hf" / "tokenizer_config.json").read_bytes() == (model / "tokenizer_config.json").read_bytes()
    master = ["--to", str(tmp_path / "master"), "--dtype", "float32", "--no-check"]
    assert convert.main(["--run", str(run), *master]) == 0
    exact = {key: x.astype(np.float32) for key, x in folders.tensors("gpt2", "bfloat16").items()}
    folders.assert_same_bits(folders.read(tmp_path / "master"), exact)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"model": {"d_model": 64}}, r"model.d_model=64, but .*config.json says 32; leave model.d_model out"),
        ({"model": {"family": "gpt2"}}, "model.family=gpt2, but .* says llama"),
        ({"model": {"rope_scaling": {"factor": 4.0}}}, r"model.rope_scaling=\{'factor': 4.0\}, but .* says None"),
        ({"model": {"factory": "a.b:c"}}, "model.factory=a.b:c, but .* says None"),
        ({"memory": {"offload_optimizer": "nvme", "nvme_dir": "."}}, "convert the folder first"),
        ({"train": {"save_hf": True}, "checkpoint": {"every": 0}}, "use checkpoint.every above 0"),
        (
            {"train": {"save_hf": True}, "checkpoint": {"resume": "never"}}
            | {"model": {"family": "gpt2", "num_kv_heads": 1, "vocab_size": 61}},
            "cannot be a gpt2 of Hugging Face: transformer.h.N.attn.c_attn.weight holds arrays of one shape",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_folder_gives_one_line(sections, named, tmp_path):
    model = folders.folder(tmp_path / "model")
    with pytest.raises(ValueError, match=named) as error:
        started(tmp_path, model, {"data": 2, "zero": 3, "persist_below": 1}, **sections)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_what_balances_experts_may_be_given_beside_those_of_the_folder(tmp_path):
    model = folders.folder(tmp_path / "model", "mixtral")
    run = started(tmp_path, model, {}, model={"experts": {"balance_weight": 0.001, "capacity": 4.0}})
    experts = run.config.model.experts
    assert (experts.balance_weight, experts.capacity, experts.num) == (0.001, 4.0, 5)
    with pytest.raises(ValueError, match=r"model.experts=\{'num': 8\}, but .*config.json says .*'num': 5"):
        started(tmp_path, model, {}, model={"experts": {"num": 8}})


def test_keys_of_a_scaling_may_be_given_if_they_are_those_of_the_folder(tmp_path):
    model = folders.folder(tmp_path / "model", "llama_scaled")
    run = started(tmp_path, model, {}, model={"rope_scaling": {"factor": 8.0}})
    assert run.config.model.rope_scaling.low_freq_factor == 1.5
    with pytest.raises(ValueError, match=r"factor': 4\.0"):
        started(tmp_path, model, {}, model={"rope_scaling": {"factor": 4.0}})


def test_the_tokenizer_of_the_data_must_be_the_models(tmp_path):
    model, other = folders.folder(tmp_path / "model"), folders.folder(tmp_path / "other") / "tokenizer.json"
    (tmp_path / "a.txt").write_text("w1 w2 " * 5000)
    text = {"source": f"text:{tmp_path}/a.txt", "val_fraction": 0.0}
    run = started(tmp_path, model, {}, data=text)
    assert run.config.data.tokenizer == str(model / "tokenizer.json")
    other.write_text(other.read_text().replace("w60", "w61"))
    with pytest.raises(ValueError, match=r"tokenizer is sha256:.*, but the model's is .*; use data.tokenizer="):
        started(tmp_path, model, {}, data=text | {"tokenizer": str(other)})
    folders.write_json(model / "tokenizer_config.json", {"eos_token": "w3", "add_bos_token": True, "bos_token": "w1"})
    folders.write_json(other.parent / "tokenizer_config.json", {"eos_token": "w3"})
    other.write_text((model / "tokenizer.json").read_text())
    text |= {"tokenizer": str(other)}
    with pytest.raises(ValueError, match=r", but the model's is .* begin 1\); set data.begin_token: none, or prepare"):
        started(tmp_path, model, {}, data=text)
    for token in "none", "w1":
        started(tmp_path, model, {}, data=text | {"begin_token": token})


def test_a_sharded_folder_is_read_once_and_by_each_device_its_own(tmp_path, monkeypatch):
    """With ZeRO 3 over 4 devices every element of the large arrays is read once, by no device more than its quarter."""
    model = folders.in_shards(folders.folder(tmp_path / "model"))
    sizes = []
    read = safetensors.Tensors.read

    def counted(*arguments):
        sizes.append(read(*arguments).size)
        return read(*arguments)

    monkeypatch.setattr(safetensors.Tensors, "read", counted)
    started(tmp_path, model, {"data": 4, "zero": 3, "persist_below": 100})
    total = sum(x.size for x in folders.tensors("llama").values())
    assert sum(sizes) == total
    assert max(sizes) <= 64 * 32 // 4


def test_configs_and_plans_take_the_model_of_a_folder(tmp_path, capsys):
    model = folders.folder(tmp_path / "model")
    for path in (f"hf:{model}", str(model / "config.json")):
        config = model_config.load(path, ["data.seq_len=12"])
        assert (config.model.d_model, config.model.num_kv_heads, config.data.seq_len) == (32, 2, 12)
        assert config.checkpoint.resume == f"hf:{model}" and config.data.tokenizer == str(model / "tokenizer.json")
        assert plan.main(["--config", path, "--gpus", "1", "data.seq_len=12"]) == 0
        assert "fits: peak memory" in capsys.readouterr().out


@pytest.mark.long
def test_two_processes_start_from_a_folder_and_write_one(tmp_path):
    model = folders.in_shards(folders.folder(tmp_path / "model", "llama", "bfloat16"))
    tree = TREE | {"parallel": {"data": 2, "tensor": 2, "zero": 3, "persist_below": 1}}
    tree |= {"precision": {"compute": "bfloat16"}, "optimizer": {"lr": 1e-37, "weight_decay": 0.0}}
    tree |= {"train": {"steps": 1, "save_hf": True}, "runtime": {"simulate": 4, "compile_cache": False}}
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(tree | {"checkpoint": {"resume": f"hf:{model}"}}))
    finished(launched(2, file, f"logging.dir={tmp_path / 'run'}"))
    folders.assert_same_bits(folders.read(tmp_path / "run" / "hf"), folders.tensors("llama", "bfloat16"))
