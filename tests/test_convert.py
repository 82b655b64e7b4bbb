"""Weights from and to model folders of Hugging Face: logits as of transformers, every bit there and back."""

import json

import hugging_face_folders as folders
import jax
import numpy as np
import pytest
from hugging_face_folders import GOLDEN

from nanotrain_jax import convert, generate
from nanotrain_jax.run import conversion, hugging_face


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_transformers(name, tmp_path):
    source = hugging_face.opened(folders.folder(tmp_path / "model", name))
    tokens, expected = folders.logits(name)
    found = conversion.logits(source.model, source.read, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gpt2", "float32")])
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
    assert len([*back.glob("*.safetensors")]) == (1 if dtype == "float32" else 3)  # of at most SHARD bytes
    assert {p.name: p.read_bytes() for p in back.glob("*token*")} == before
    written, given = (json.loads((path / "config.json").read_text()) for path in (back, model))
    assert hugging_face.hugging_face.section(written, "") == hugging_face.hugging_face.section(given, "")
    assert written["eos_token_id"] == [3, 7] and written["torch_dtype"] == dtype
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [3, 7]
    sampling = ["--tokens", "3", "--temperature", "0"]
    with jax.numpy_dtype_promotion("standard"):
        assert generate.main(["--run", str(run), "--prompt", "w5", *sampling]) == 0
