"""Text generation: equal to the oracle, reproducible, from a run of any layout."""

import io
import json
import shutil
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tokenizers
import yaml
from conftest import exit_code
from hugging_face_folders import folder, write_json

from nanotrain_jax import convert, generate, load_params, train
from nanotrain_jax.generation import load as models


def oracle_tokens(params, prompt, count, length):
    """Greedy tokens of the oracle; a text that fills the context continues with its last half."""
    logits, ids, start = jax.jit(oracle.logits), list(prompt), 0
    for _ in range(count):
        start = len(ids) - length // 2 if len(ids) - start > length else start
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(ids) - start] = ids[start:]
        ids.append(int(jnp.argmax(logits(params, tokens)[0, len(ids) - start - 1])))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> folder of a run, trained on first use."""
    folder = tmp_path_factory.mktemp("runs")
    text = Path(sysconfig.get_paths()["stdlib"], "heapq.py").read_text()
    (folder / "text.txt").write_text(text)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=300, special_tokens=["<|endoftext|>"])
    bpe.save(str(folder / "bpe.json"))
    tree = {
        "model": {"num_layers": 4, "d_model": 32, "num_heads": 2, "d_ff": 64}
        | {"rope_theta": oracle.THETA, "norm_eps": oracle.NORM_EPS},
        "precision": {"compute": "float32"},
        "data": {"source": f"text:{folder}/text.txt", "batch_size": 8, "seq_len": 32},
        "optimizer": {"lr": 3e-2, "schedule": "constant"},
        "train": {"steps": 3},
        "logging": {"tensorboard": False, "progress": "none"},
        "runtime": {"simulate": 8},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    made = {}

    def make(name, *overrides):
        if name not in made:
            made[name] = folder / name
            keys = [f"logging.dir={made[name]}", *overrides]
            assert train.main(["--config", str(folder / "run.yaml"), *keys]) == 0
        return made[name]

    return make


def printed(capsys, *arguments):
    """Output of the command."""
    capsys.readouterr()
    assert generate.main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


ONE = "one", "parallel.data=1"


def test_the_command_prints_prompt_and_text_of_the_oracle(runs, capsys):
    run = runs(*ONE)
    out = printed(capsys, "--run", run, "--prompt", "def ", "--tokens", 40, "--temperature", 0)
    params, _ = load_params(run)
    expected = bytes(oracle_tokens(params, b"def ", 40, 32)).decode("utf-8", "replace")
    assert out == f"def {expected}\n"
    again = "--run", run, "--prompt", "def ", "--tokens", 20, "--seed", 3
    assert printed(capsys, *again) == printed(capsys, *again)


@pytest.mark.long
def test_a_run_with_pipeline_tensor_and_zero_3_generates_the_same_text(runs, capsys):
    layout = ["parallel.data=2", "parallel.tensor=2", "parallel.pipe=2", "parallel.zero=3", "parallel.microbatches=2"]
    layout += ["parallel.schedule=interleaved", "parallel.chunks=2", "parallel.persist_below=0"]
    same = "--prompt", "import ", "--tokens", 60, "--temperature", 0
    expected = printed(capsys, "--run", runs(*ONE), *same)
    assert printed(capsys, "--run", runs("split", *layout), *same) == expected


@pytest.mark.long
def test_a_run_keeps_its_tokenizer_and_may_be_moved(runs, capsys, tmp_path):
    run = runs("bpe", "parallel.data=1", f"data.tokenizer={runs(*ONE).parent}/bpe.json", "train.steps=1")
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    (run.parent / "bpe.json").rename(run.parent / "bpe.gone")
    run.rename(run.parent / "gone")
    out = printed(capsys, "--run", moved, "--prompt", "def heap", "--tokens", 12, "--temperature", 0)
    params, _ = load_params(moved)
    bpe = tokenizers.Tokenizer.from_file(str(moved / "tokenizer.json"))
    prompt = bpe.encode("def heap").ids
    assert len(prompt) < 8
    assert out == bpe.decode(prompt + oracle_tokens(params, prompt, 12, 32)) + "\n"
    known = json.loads((moved / "tokenizer.json").read_text())
    (moved / "tokenizer.json").write_text(json.dumps(known, indent=1))
    assert generate.main(["--run", str(moved), "--prompt", "def heap"]) == 2
    assert "tokenizer.json with the files beside it is sha256:" in capsys.readouterr().err
    assert convert.main(["--run", str(moved), "--to", str(tmp_path / "model")]) == 2
    assert "it was modified; put the tokenizer of the run there" in capsys.readouterr().err


def test_checkpoints_elsewhere_win_over_older_ones_in_the_folder(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs(*ONE), folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["checkpoint"]["dir"] = str(tmp_path / "elsewhere")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="elsewhere holds no finished checkpoint"):
        models.of_run(folder, None, models.Placement())
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    models.of_run(folder, None, models.Placement())


BAD = [
    (["--run", "{run}/.."], "has no config.yaml; give the folder of a run"),
    (["--run", "{run}", "--step", "2"], "holds no checkpoint of step 2"),
    (["--prompt", ""], "--prompt='' gives no tokens"),
    (["--temperature", "-1"], "--temperature: '-1' must be a number from 0"),
    (["--temperature", "nan"], "--temperature: 'nan' must be a number"),
    (["--top-k", "0"], "--top-k: '0' must be a number from 1"),
    (["--tokens", "many"], "--tokens: 'many' must be a number from 1"),
    (["--seed", "-1"], "--seed: '-1' must be a number from 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_an_invalid_request_is_reported_in_one_line(arguments, message, runs, capsys):
    run = runs(*ONE)
    capsys.readouterr()
    given = ["--run", str(run), "--prompt", "def ", *(a.format(run=run) for a in arguments)]
    code = exit_code(generate.main, given)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_run_without_checkpoint_or_text_is_reported_in_one_line(runs, capsys, tmp_path):
    unsaved = runs("unsaved", "parallel.data=1", "train.steps=1", "checkpoint.every=0")
    synthetic = tmp_path / "synthetic"
    synthetic.mkdir()
    (synthetic / "config.yaml").write_text(json.dumps({"data": {"source": "synthetic"}}))
    for run, message in (
        (unsaved, "holds no finished checkpoint"),
        (synthetic, "data.source=synthetic, which is not text"),
    ):
        assert generate.main(["--run", str(run), "--prompt", "def "]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model folder with words as tokens, a chat template, and a generation_config.json."""
    path = folder(tmp_path_factory.mktemp("hf") / "llama")
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template += "w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(61)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"eos_token": "w3", "chat_template": template})
    write_json(path / "generation_config.json", {"do_sample": False, "eos_token_id": [3, 4]})
    return path


@pytest.mark.long
def test_prompts_of_a_file_are_answered_in_order_as_each_alone(model_folder, capsys, tmp_path):
    rows = [
        {"prompt": "w5 w6 w7 w8", "id": 7},
        {"prompt": "w9", "id": "a line\u2028of two"},
        {"messages": [{"role": "user", "content": "w9 w10"}]},
        {"prompt": "w9 w10 w11"},
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8-sig")
    same = "--hf", model_folder, "--tokens", 5, "--stop", "w33"
    out = printed(capsys, *same, "--prompts", tmp_path / "rows.jsonl", "--batch", 3)
    answers = list(map(json.loads, out.rstrip("\n").split("\n")))
    assert [{key: a[key] for key in row} for a, row in zip(answers, rows, strict=True)] == rows
    texts = ["w5 w6 w7 w8", "w9", "w1 w9 w10 w2", "w9 w10 w11"]
    alone = [json.loads(printed(capsys, *same, "--prompt", text, "--json")) for text in texts]
    keys = "text", "tokens", "is_ended"
    assert [[a[key] for key in keys] for a in answers] == [[a[key] for key in keys] for a in alone]
    assert {a["is_ended"] for a in answers} == {True, False}
    several = printed(capsys, *same, "--prompt", texts[0], "--prompt", texts[1]).splitlines()
    assert several == [texts[0] + alone[0]["text"], texts[1] + alone[1]["text"]]


def test_the_folder_says_where_texts_end_and_what_is_not_computed(model_folder, capsys, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    known = {"do_sample": False, "eos_token_id": 3, "num_beams": 1, "bad_words_ids": [], "typical_p": 1.0}
    same = "--hf", copy, "--tokens", 12, "--prompt", "w5 w6", "--json"
    write_json(copy / "generation_config.json", known)
    capsys.readouterr()
    assert generate.main([str(a) for a in same]) == 0
    out, err = capsys.readouterr()
    assert "not computed" not in err
    text = json.loads(out)["text"]
    first, second = text.split()[0], next(word for word in text.split() if word not in text.split()[0])
    write_json(copy / "generation_config.json", known | {"stop_strings": second, "no_repeat_ngram_size": 3})
    assert generate.main([str(a) for a in same]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == text[: text.index(second)]
    assert [line for line in err.splitlines() if "not computed" in line] == [
        f"not computed: no_repeat_ngram_size=3 of {copy}/generation_config.json"
    ]
    assert json.loads(printed(capsys, *same, "--stop", first))["text"] == text[: text.index(first)]
    write_json(copy / "generation_config.json", {"stop_strings": [5]})
    assert generate.main([str(a) for a in same]) == 2
    assert "says stop_strings=[5], not a list of texts" in capsys.readouterr().err


def test_a_conversation_lasts_until_the_end_of_input(model_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\n\nw7\n"))
    capsys.readouterr()
    how = "--hf", str(model_folder), "--chat", "--tokens", "6", "--temperature", "0", "--system", "w8"
    assert generate.main(how) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    alone = printed(capsys, *how[:2], "--prompt", "w1 w8 w1 w5 w6 w2", *how[3:7])
    assert "w1 w8 w1 w5 w6 w2" + first == alone.rstrip("\n")
    text = f"w1 w8 w1 w5 w6 w1 {first.strip()} w1 w7 w2"
    assert text.replace("  ", " ") + second == printed(capsys, *how[:2], "--prompt", text, *how[3:7]).rstrip("\n")
    assert "prefill" in err


BAD_OF_FOLDERS = [
    (["--prompt", "w5", "--top-p", "0"], "--top-p: '0' must be a number above 0, at most 1"),
    (["--prompt", "w5", "--min-p", "nan"], "--min-p: 'nan' must be a number above 0, at most 1"),
    (["--prompt", " ".join(["w5"] * 64)], "has 64 tokens, but the model's context is"),
    (["--prompts", "{tmp}/empty.jsonl"], "is empty; write rows"),
    (["--prompts", "{tmp}/gone.jsonl"], "gone.jsonl' cannot be read (No such file or directory); give a file"),
    (["--prompts", "{tmp}/half.jsonl"], "half.jsonl:2: half of a surrogate pair (\\ud800 to \\udfff) is no text"),
    (["--prompts", "{tmp}/odd.jsonl"], "refuses the conversation: no tools"),
    (["--prompts", "{tmp}/bad.jsonl"], "bad.jsonl:2: '[1]' is not a JSON object"),
    (["--prompts", "{tmp}/other.jsonl"], "has neither a text"),
    (["--prompts", "{tmp}/taken.jsonl"], "taken.jsonl:1: 'tokens' is a key of the answer, which would overwrite it"),
    (["--prompts", "{tmp}/latin.jsonl"], "is not UTF-8 text; give a file of JSON lines"),
    (["--prompt", "w5", "--system", "w6"], "--system is for --chat"),
    (["--prompt", "w5", "--step", "1"], "--step is for --run"),
    (["--prompt", "w5", "--run", "x"], "give one of --run DIR and --hf FOLDER"),
    (["--prompt", "w5", "--tensor", "3"], "3"),
    ([], "one of the arguments --prompt --prompts --chat is required"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_OF_FOLDERS, ids=[" ".join(a)[:40] for a, _ in BAD_OF_FOLDERS])
def test_an_invalid_request_of_a_model_folder_is_reported_in_one_line(
    arguments, message, model_folder, capsys, tmp_path
):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "w5"}\n[1]\n')
    (tmp_path / "half.jsonl").write_text('{"prompt": "w5"}\n{"prompt": "w5 \\ud800"}\n')
    (tmp_path / "odd.jsonl").write_text('{"messages": [{"role": "user", "content": "w5"}, {"role": "tool"}]}\n')
    (tmp_path / "other.jsonl").write_text('{"text": "w5"}\n')
    (tmp_path / "taken.jsonl").write_text('{"prompt": "w5", "tokens": 3}\n')
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    code = exit_code(generate.main, ["--hf", str(model_folder), *(a.format(tmp=tmp_path) for a in arguments)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert message in err


def test_a_folder_that_cannot_converse_or_has_another_tokenizer_is_refused(model_folder, capsys, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    write_json(copy / "tokenizer_config.json", {})
    assert generate.main(["--hf", str(copy), "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    write_json(copy / "generation_config.json", {"temperature": "hot"})
    assert generate.main(["--hf", str(copy), "--prompt", "w5"]) == 2
    assert "says temperature='hot'" in capsys.readouterr().err
    write_json(copy / "generation_config.json", {})
    large = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(99)}, "w0"))
    large.save(str(copy / "tokenizer.json"))
    assert generate.main(["--hf", str(copy), "--prompt", "w5"]) == 2
    assert "has 99 ids, but the model has 61" in capsys.readouterr().err
