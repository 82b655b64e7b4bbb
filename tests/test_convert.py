"""Weights from and to model folders of Hugging Face: logits as of transformers, every bit there and back."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import hugging_face_folders as folders
import jax
import numpy as np
import pytest
import tokenizers
from conftest import exit_code
from hugging_face_folders import GOLDEN
from safetensors.numpy import save_file

from nanotrain_jax import convert, generate
from nanotrain_jax.checkpoint import checksums
from nanotrain_jax.models import hugging_face_config
from nanotrain_jax.run import conversion, hugging_face


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_transformers(name, tmp_path):
    source = hugging_face.opened(folders.folder(tmp_path / "model", name))
    tokens, expected = folders.logits(name)
    found = conversion.logits(source.model, source.read, tokens)
    atol = 4e-5 if name == "gemma3_text" else 1e-5  # where values are twice as large
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param("llama", "bfloat16", marks=pytest.mark.long), ("gpt2", "float16")]
)
def test_a_folder_comes_back_bit_for_bit_and_its_run_generates(name, dtype, tmp_path, capsys, monkeypatch):
    model = folders.folder(tmp_path / "model", name, dtype, eos_token_id=[3, 7])
    if dtype == "bfloat16":
        folders.in_shards(model)
        monkeypatch.setattr("nanotrain_jax.checkpoint.safetensors.SHARD", 20_000)
    before = {p.name: p.read_bytes() for p in model.glob("*token*")}
    run, back = tmp_path / "run", tmp_path / "back"
    assert convert.main(["--from", str(model), "--out", str(run)]) == 0
    assert "read back equal" in capsys.readouterr().out
    assert convert.main(["--run", str(run), "--to", str(back)]) == 0
    assert "of the run and of the folder as read back, are equal" in capsys.readouterr().out
    folders.assert_same_bits(folders.read(back), folders.read(model))
    assert len([*back.glob("*.safetensors")]) == (1 if dtype == "float16" else 3)  # of at most SHARD bytes
    assert {p.name: p.read_bytes() for p in back.glob("*token*")} == before
    written, given = (json.loads((path / "config.json").read_text()) for path in (back, model))
    assert hugging_face_config.section(written, "") == hugging_face_config.section(given, "")
    assert written["eos_token_id"] == [3, 7] and written["torch_dtype"] == dtype
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [3, 7]
    sampling = ["--tokens", "3", "--temperature", "0"]
    with jax.numpy_dtype_promotion("standard"):
        assert generate.main(["--run", str(run), "--prompt", "w5", *sampling]) == 0


DIFFERENT = {"max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id"}  # those of a tokenizer alone


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in ("llama", "gpt2", "mistral")])
def test_every_kind_comes_back_with_and_without_its_config(name, tmp_path, capsys):
    """What transformers 5 wrote is read, and written as transformers 4 reads it."""
    model, run = folders.folder(tmp_path / "model", name, "bfloat16"), tmp_path / "run"
    given = json.loads((model / "config.json").read_text())
    assert convert.main(["--from", str(model), "--out", str(run)]) == 0
    assert f"{sum(x.size for x in folders.read(model).values()):,} parameters" in capsys.readouterr().out
    for back in (tmp_path / "back", tmp_path / "without"):
        assert convert.main(["--run", str(run), "--to", str(back), "--no-check"]) == 0
        folders.assert_same_bits(folders.read(back), folders.read(model))
        written = json.loads((back / "config.json").read_text())
        assert hugging_face_config.section(written, "") == hugging_face_config.section(given, "")
        unused = {"intermediate_size"} if name.startswith("qwen3_moe") else set()
        compared = given.keys() & written.keys() - DIFFERENT - unused
        same = {key: given[key] for key in compared if given[key] is not None}
        assert same == {key: written[key] for key in same} and "rope_parameters" not in written
        (run / "config.json").unlink(missing_ok=True)


def with_first_dense(folder):
    """Give the first layer of a Qwen3-MoE an MLP in place of its experts."""
    tensors = folders.read(folder)
    prefix, experts = "model.layers.0.mlp.", [name for name in tensors if name.startswith("model.layers.0.mlp.")]
    width = tensors[f"{prefix}experts.0.up_proj.weight"].shape[1]
    numbers, dtype = np.random.default_rng(0), tensors[experts[0]].dtype
    for name in experts:
        del tensors[name]
    for name, shape in {"gate_proj": (96, width), "up_proj": (96, width), "down_proj": (width, 96)}.items():
        tensors[f"{prefix}{name}.weight"] = (0.1 * numbers.standard_normal(shape)).astype(dtype)
    for path in folder.glob("model*safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    config(mlp_only_layers=[0], intermediate_size=96)(folder)


def test_a_first_layer_without_experts_comes_back(tmp_path):
    model, run, back = folders.folder(tmp_path / "model", "qwen3_moe", "bfloat16"), tmp_path / "run", tmp_path / "back"
    with_first_dense(model)
    assert convert.main(["--from", str(model), "--out", str(run)]) == 0
    assert convert.main(["--run", str(run), "--to", str(back)]) == 0  # which compares logits
    folders.assert_same_bits(folders.read(back), folders.read(model))
    read = hugging_face_config.section(json.loads((back / "config.json").read_text()), "")
    assert (read["d_ff"], read["experts"]["first_dense"]) == (96, 1)


def header(path):
    """Return the header of a safetensors file, and its data."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(path, change):
    """Change the header of a safetensors file."""
    entries, data = header(path)
    change(entries)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def overlapping(entries):
    first, second = entries["model.norm.weight"], entries["model.layers.0.input_layernorm.weight"]
    second["data_offsets"] = first["data_offsets"]


def change_tensors(path, change):
    found = folders.read(path)
    change(found)
    save_file(found, path / "model.safetensors")


def config(**keys):
    """Return a function that changes keys of the config.json of a folder; None: it removes them."""

    def change(folder):
        content = json.loads((folder / "config.json").read_text()) | keys
        folders.write_json(folder / "config.json", {key: value for key, value in content.items() if value is not None})

    return change


def index(file):
    """Return a function that changes the file of a tensor in an index."""

    def change(folder):
        content = json.loads((folder / INDEX).read_text())
        content["weight_map"][NORM] = file
        folders.write_json(folder / INDEX, content)

    return change


def two_dtypes(folder):
    config(dtype=None)(folder)
    change_tensors(folder, lambda t: t.update({NORM: t[NORM].astype(np.float16)}))


NORM, FILE, INDEX = "model.norm.weight", "model.safetensors", "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
LONG = bytes([255, 255, 255, 0, 0, 0, 0, 0, 123])
BROKEN = {  # what -> (how to break a folder, what the line names)
    "truncated": (lambda p: os.truncate(p / FILE, 5000), "model.safetensors is no whole safetensors file"),
    "long header": (lambda p: (p / FILE).write_bytes(LONG), "model.safetensors is no whole safetensors file"),
    "overlap": (lambda p: with_header(p / FILE, overlapping), "model.safetensors is no whole safetensors file"),
    "shape": (config(hidden_size=16, head_dim=4), "model.embed_tokens.weight [61, 32], not [61, 16]"),
    "dtype": (config(dtype="float16"), "is float32, but config.json says torch_dtype float16"),
    "two dtypes": (two_dtypes, "save the model again in one dtype"),
    "kind": (config(model_type="mamba"), "model_type='mamba' is not supported; give a model of llama, mistral"),
    "family": (config(**GOLDEN["gpt2"]["config"]), "lacks transformer.wte.weight [61, 32]"),
    "no size": (config(num_hidden_layers=None), "config.json has no num_hidden_layers"),
    "lacking": (lambda p: change_tensors(p, lambda t: t.pop(NORM)), "lacks model.norm.weight [32]"),
    "left over": (lambda p: change_tensors(p, lambda t: t.update({"model.x": t[NORM]})), "model.x [32]"),
    "feature": (config(attention_bias=True), "attention_bias=True"),
    "head": (config(head_dim=4), "q_proj.weight [32, 32], not [16, 32]"),
    "rope": (config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling.rope_type='dynamic'"),
    "not a copy": (config(tie_word_embeddings=True), "lm_head.weight is not model.embed_tokens.weight"),
    "shard": (lambda p: (folders.in_shards(p) / SECOND).unlink(), f"{SECOND} is missing"),
    "path": (
        lambda p: index("../x.safetensors")(folders.in_shards(p)),
        "'../x.safetensors' must be the name of a file",
    ),
    "index": (lambda p: index("model-00001-of-00002.safetensors")(folders.in_shards(p)), "has no tensor model.norm"),
    "pickle": (lambda p: (p / FILE).rename(p / "pytorch_model.bin"), "is a pickle, which can run code"),
    "json": (lambda p: (p / "config.json").write_text("{"), "config.json is not JSON"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json cannot be read"),
    "tokenizer": (lambda p: (p / "tokenizer.json").write_text("{}"), "is not a tokenizer.json"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_gives_one_line_and_writes_nothing(what, tmp_path, capsys):
    spoil, named = BROKEN[what]
    model = folders.folder(tmp_path / "model")
    spoil(model)
    assert convert.main(["--from", str(model), "--out", str(tmp_path / "out" / "run")]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and named in line
    assert not [*tmp_path.glob("out/*")]


def test_a_full_disk_gives_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    model, run = folders.folder(tmp_path / "model"), tmp_path / "run"
    assert convert.main(["--from", str(model), "--out", str(run)]) == 0
    arguments = [["--from", str(model), "--out", str(tmp_path / "a")], ["--run", str(run), "--to", str(tmp_path / "b")]]
    before = sorted(tmp_path.iterdir())

    def is_refused(text):
        for command in arguments:
            capsys.readouterr()
            assert convert.main(command) == 2
            line = capsys.readouterr().err
            assert line.startswith("error: ") and line.count("\n") == 1 and text in line
            assert sorted(tmp_path.iterdir()) == before

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("nanotrain_jax.run.conversion.copy_files", full)  # fills up while it writes
        is_refused("No space left on device")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    is_refused("1,000 are free")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--from", "a"], "give --from FOLDER --out RUN, or --run RUN --to FOLDER"),
        (["--from", "a", "--out", "b", "--dtype", "float32"], "only with --run"),
        (["--run", "nowhere", "--to", "b"], "nowhere holds no finished checkpoint"),
        (["--from", "nowhere", "--out", "b"], "config.json cannot be read"),
    ],
)
def test_a_wrong_request_gives_one_line(arguments, named, capsys):
    assert exit_code(convert.main, arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and named in line


def test_a_folder_may_have_no_tokenizer_buffers_and_a_copy_of_the_embedding(tmp_path, capsys):
    model = folders.folder(tmp_path / "model", "llama_tied")
    (model / "tokenizer.json").unlink()
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    change_tensors(model, lambda t: t.update(inv_freq | {"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert convert.main(["--from", str(model), "--out", str(tmp_path / "run"), "--no-check"]) == 0
    out = capsys.readouterr().out
    assert "has no tokenizer.json: the run has none" in out and "checked" not in out
    assert convert.main(["--run", str(tmp_path / "run"), "--to", str(tmp_path / "back")]) == 0
    assert "has no tokenizer.json: the folder has none" in capsys.readouterr().out
    folders.assert_same_bits(folders.read(tmp_path / "back"), folders.tensors("llama_tied"))
    assert convert.main(["--run", str(tmp_path / "run"), "--to", str(tmp_path / "merged"), "--merge"]) == 2
    assert f"--merge: {tmp_path}/run trained no adapters (train.lora); leave it out\n" in capsys.readouterr().err


def test_a_tied_head_that_is_no_copy_is_refused_wherever_its_folder_is_opened(tmp_path, capsys):
    model = folders.folder(tmp_path / "model", "llama_tied")
    change_tensors(model, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    hugging_face.opened(model)
    change_tensors(model, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + np.eye(61, 1)[::-1]}))
    assert generate.main(["--hf", str(model), "--prompt", "w5"]) == 2
    assert f"{model}: lm_head.weight is not model.embed_tokens.weight, but config.json" in capsys.readouterr().err
    change_tensors(model, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:-1]}))
    with pytest.raises(ValueError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        hugging_face.opened(model)


def test_a_written_folder_is_refused_once_a_bit_of_it_changed(tmp_path, capsys):
    model = folders.folder(tmp_path / "model", "llama")
    assert convert.main(["--from", str(model), "--out", str(tmp_path / "run"), "--no-check"]) == 0
    back = tmp_path / "back"
    assert convert.main(["--run", str(tmp_path / "run"), "--to", str(back), "--no-check"]) == 0
    hugging_face.opened(back)
    content = bytearray((back / FILE).read_bytes())
    content[-3] ^= 16  # of a weight
    (back / FILE).write_bytes(content)
    assert convert.main(["--from", str(back), "--out", str(tmp_path / "again")]) == 2
    damage = f"{back / FILE} is not as it was written, by its checksum in {checksums.OF_FOLDER}; copy the folder"
    assert f"error: {damage}" in capsys.readouterr().err
    (back / checksums.OF_FOLDER).unlink()  # as of a folder that others wrote
    hugging_face.opened(back)


def test_the_model_without_its_head_has_names_without_a_prefix(tmp_path):
    model = folders.folder(tmp_path / "model", "gpt2")
    change_tensors(model, lambda t: [t.update({key.removeprefix("transformer."): t.pop(key)}) for key in [*t]])
    change_tensors(model, lambda t: t.update({"h.0.attn.bias": np.ones((1, 1, 24, 24), np.float32)}))  # a buffer
    source = hugging_face.opened(model)
    tokens, expected = folders.logits("gpt2")
    np.testing.assert_allclose(conversion.logits(source.model, source.read, tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("begin", [None, 1])
def test_a_run_that_did_not_start_from_a_folder_says_where_its_text_begins_and_ends(begin, tmp_path):
    model, run, back = (tmp_path / name for name in ("model", "run", "back"))
    folders.folder(model)
    tokenizer = tokenizers.Tokenizer.from_str((model / "tokenizer.json").read_text().replace('w3"', '</s>"'))
    if begin:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("w1 $A", special_tokens=[("w1", begin)])
    tokenizer.save(str(model / "tokenizer.json"))
    folders.write_json(model / "tokenizer_config.json", {"eos_token": "</s>"})
    assert convert.main(["--from", str(model), "--out", str(run), "--no-check"]) == 0
    (run / "config.json").unlink()
    (run / "tokenizer_config.json").unlink()
    assert convert.main(["--run", str(run), "--to", str(back), "--no-check"]) == 0
    for name in ("config.json", "generation_config.json"):
        written = json.loads((back / name).read_text())
        assert (written["eos_token_id"], written["bos_token_id"], written["pad_token_id"]) == (3, begin, None)
    written = json.loads((back / "tokenizer_config.json").read_text())
    assert (written["eos_token"], written.get("bos_token", "none")) == ("</s>", "w1" if begin else "none")
    assert hugging_face.opened(back).model == hugging_face.opened(model).model
    folders.assert_same_bits(folders.read(back), folders.tensors("llama"))
