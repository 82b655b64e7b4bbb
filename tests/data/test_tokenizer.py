"""End tokens: as the files beside tokenizer.json name them, in training data, copies and generated text."""

import json

import first_format
import pytest
import tokenizers
from conftest import small

from nanotrain_jax import train
from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches, corpus, tokenizer
from nanotrain_jax.generation import load as models
from nanotrain_jax.generation.text import Text

TOKENS = {"<pad>": 0, "<eos>": 1, "<turn>": 2, "<|endoftext|>": 3, "la": 4, "mi": 5}
USUAL, EOS, TURN = 3, 1, 2
CONFIG, GENERATION, MODEL = "tokenizer_config.json", "generation_config.json", "config.json"


@pytest.fixture
def folder(tmp_path):
    """Write tokenizer.json, and JSON files beside it -> the folder."""

    def write(tokens=TOKENS, **beside):
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="<pad>"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        model.add_special_tokens([token for token in tokens if token.startswith("<")])
        model.save(str(tmp_path / "tokenizer.json"))
        for name, content in beside.items():
            (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


FOUND = {
    "a usual name": ({}, None, USUAL, {USUAL}),
    "a string": ({"tokenizer_config": {"eos_token": "<eos>"}}, None, EOS, {EOS}),
    "an object": ({"tokenizer_config": {"eos_token": {"content": "<eos>", "lstrip": False}}}, None, EOS, {EOS}),
    "null": ({"tokenizer_config": {"eos_token": None}}, None, USUAL, {USUAL}),
    "a number": ({"config": {"eos_token_id": 2}}, None, TURN, {TURN}),
    "a list": ({"generation_config": {"eos_token_id": [2, 1]}}, None, TURN, {TURN, EOS}),
    "all": (
        {"tokenizer_config": {"eos_token": "<eos>"}, "generation_config": {"eos_token_id": [2]}, "config": {}},
        None,
        EOS,
        {TURN, EOS},
    ),
    "ours": ({"tokenizer_config": {"eos_token": "<eos>"}}, "<turn>", TURN, {TURN, EOS}),
    "ours instead of an unknown one": ({"tokenizer_config": {"eos_token": "<end>"}}, "<turn>", TURN, {TURN}),
}


@pytest.mark.parametrize("beside, end_token, end, stops", FOUND.values(), ids=FOUND)
def test_the_end_token_is_the_one_that_the_files_name(beside, end_token, end, stops, folder, tmp_path):
    path = folder(**beside)
    found = tokenizer.load(str(path), end_token)
    assert (found.end, found.stops) == (end, stops)
    assert found.name == tokenizer.load(str(path / "tokenizer.json"), end_token).name
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, text in found.files.items():
        (copy / name).write_text(text)
    again = tokenizer.load(str(copy))
    assert (again.name, again.end, again.stops) == (found.name, end, stops)
    assert "config.json" not in found.files
    for name in beside.keys() - {"config"} if end_token is None else ():
        assert found.files[f"{name}.json"] == json.dumps(beside[name])  # as it came


def test_documents_end_with_it_and_its_change_is_another_tokenizer(folder):
    path = str(folder())
    usual = tokenizer.load(path)
    assert list(corpus.build([b"la mi", b"mi"], usual).tokens) == [4, 5, USUAL, 5, USUAL]
    folder(tokenizer_config={"eos_token": "<eos>"})
    named = tokenizer.load(path)
    assert list(corpus.build([b"la mi", b"mi"], named).tokens) == [4, 5, EOS, 5, EOS]
    assert named.name != usual.name
    assert tokenizer.load(path, "<|endoftext|>").name == usual.name  # of older checkpoints


BAD = [
    ({"tokenizer_config": {"eos_token": "<end>"}}, None, "'<end>' is not a token of .*; set data.end_token"),
    ({}, "<end>", "'<end>' is not a token of"),
    ({"config": {"eos_token_id": 99}}, None, "99 is not a token of"),
    ({"config": {"eos_token_id": "<eos>"}}, None, "eos_token_id='<eos>' of config.json .* names no token"),
    ({"config": {"eos_token_id": [1, -2]}}, None, r"eos_token_id=\[1, -2\] of config.json .* names no token"),
    ({"tokenizer_config": "{"}, None, "tokenizer_config.json beside .* is damaged"),
    ({"tokenizer_config": "[]"}, None, "tokenizer_config.json beside .* is not a JSON object"),
]


@pytest.mark.parametrize("beside, end_token, message", BAD)
def test_files_that_name_no_token_are_refused(beside, end_token, message, folder):
    with pytest.raises(ValueError, match=message):
        tokenizer.load(str(folder(**beside)), end_token)


def test_bytes_have_their_own_end():
    with pytest.raises(ValueError, match="id 256 ends a document"):
        tokenizer.load("bytes", "<eos>")


def run(folder, **data):
    """Train one step on text of the folder -> the folder of the run."""
    (folder / "text.txt").write_text("\n".join("la " * (i % 7) + "mi " * (i % 5) for i in range(900)))
    keys = {"tokenizer": str(folder), "source": f"text:{folder}/text.txt", **data}
    tree = small(data=keys, train={"steps": 1}, logging={"dir": str(folder / "run")}, runtime={"simulate": 8})
    tree["parallel"] = {"data": 1}
    (folder / "run.yaml").write_text(json.dumps(tree))
    assert train.main(["--config", str(folder / "run.yaml")]) == 0
    return folder / "run"


def test_generated_text_stops_where_the_run_s_tokenizer_says(folder, capsys):
    path = folder(tokenizer_config={"eos_token": "<eos>"}, generation_config={"eos_token_id": [2]})
    found = models.tokenizer_of(run(path, end_token="<turn>"), request.load(path / "run" / "config.yaml"))
    assert (found.end, found.stops) == (TURN, {TURN, EOS})
    text = Text([5], found)
    assert (text.add([4, 1, 5]), text.is_ended) == (" la", True)
    assert "no end token" not in capsys.readouterr().out


def test_a_tokenizer_without_end_is_told_in_one_line(folder, capsys):
    path = folder({token: i for i, token in enumerate(["<pad>", "la", "mi"])})
    run(path)
    assert capsys.readouterr().out.count("names no end token: documents run into each other") == 1


def test_a_token_folder_keeps_its_end_token(folder):
    path = folder(tokenizer_config={"eos_token": "<eos>"})
    header = first_format.write(
        path / "tokens", [b"la " * i + b"mi" for i in range(40)], tokenizer.load(str(path), "<turn>")
    )
    assert header["end"] == TURN
    keys = {"source": f"tokens:{path}/tokens", "seq_len": 16}
    assert batches.tokenizer_of(request.parse({"data": keys}).data).end == TURN
    dataset = batches.load(request.parse({"data": keys | {"tokenizer": str(path), "end_token": "<turn>"}}).data)
    assert TURN in dataset.train[0]
    with pytest.raises(ValueError, match=r"data.end_token='<eos>' is not the tokenizer of .*; remove the keys"):
        batches.load(request.parse({"data": keys | {"tokenizer": str(path), "end_token": "<eos>"}}).data)
