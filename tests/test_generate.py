"""Text generation: equal to the oracle, reproducible, from a run of any layout."""

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
from conftest import exit_code, resolved, small

from nanotrain_jax import generate, load_params, train
from nanotrain_jax.data.tokenizer import of_bytes
from nanotrain_jax.generate import Sampling
from nanotrain_jax.models import decoder

GREEDY = {"temperature": 0.0, "top_k": 50, "seed": 0}
PROMPT = [3, 1, 4, 1, 5]


def weights(family, split=decoder.ONE_DEVICE):
    """A resolved config, and weights large enough that each token depends on the previous ones."""
    config, _ = resolved(small(family, model={"tie_embeddings": False}))  # tied ones repeat a token
    params = decoder.init(config.model, 0, split)
    return config, jax.tree.map(lambda w: np.asarray(w * 8 if w.ndim > 1 else w), params)


def generated(params, config, **how):
    return list(generate.generate(params, config, PROMPT, config.model.vocab_size, Sampling(**how)))


def oracle_tokens(params, prompt, count, length):
    """Greedy tokens of the oracle with a window of `length` tokens."""
    logits, ids = jax.jit(oracle.logits), list(prompt)
    for _ in range(count):
        seen = ids[-length:]
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(seen)] = seen
        ids.append(int(jnp.argmax(logits(params, tokens)[0, len(seen) - 1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_tokens_equal_the_oracle_also_beyond_max_seq_len(family):
    config, params = weights(family)
    assert config.model.max_seq_len == 16
    found = generated(params, config, tokens=24, **GREEDY)
    assert found == oracle_tokens(params, PROMPT, 24, 16)
    assert found[0] == int(jnp.argmax(oracle.logits(params, np.asarray([PROMPT]))[0, -1]))
    assert len(set(found)) > 4
    assert generated(params, config, tokens=24, temperature=1.0, top_k=1, seed=7) == found


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    config, params = weights("llama")
    first = generated(params, config, tokens=20, temperature=1.0, seed=1)
    assert generated(params, config, tokens=20, temperature=1.0, seed=1) == first
    assert generated(params, config, tokens=20, temperature=1.0, seed=2) != first


def test_ids_of_padding_and_beyond_the_tokenizer_are_never_chosen():
    config, params = weights("llama", decoder.Split(size=2, vocab_shards=2))
    head = params["ends"]["head_VD"] = np.array(params["ends"]["head_VD"])
    assert len(head) == 128
    head[50:] = 5.0 * head[:50].sum(0)
    params["ends"]["norm"]["gain_D"] = np.abs(head[60]) / head[60]  # so that their logits are the largest
    params["layers"]["mlp"]["down_FD"] = params["layers"]["mlp"]["down_FD"] * 0
    for temperature in 0.0, 5.0:
        how = Sampling(tokens=20, temperature=temperature, top_k=100)
        assert max(generate.generate(params, config, PROMPT, 50, how)) < 50


def test_sampling_follows_top_k_and_temperature():
    logits_V = jnp.asarray([0.0, 2.0, 1.0, -1.0, 0.5])
    how = Sampling(temperature=0.7, top_k=3, seed=3)
    drawn = jax.jit(jax.vmap(lambda draw: generate.choose(logits_V, how, draw)))(jnp.arange(20_000))
    found = np.bincount(drawn, minlength=5) / len(drawn)
    expected = np.exp(np.asarray([-np.inf, 2.0, 1.0, -np.inf, 0.5]) / 0.7)
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.015)


def test_only_complete_characters_are_printed_and_the_end_token_stops():
    tokenizer = of_bytes()
    ids = [*"aé€".encode(), 0xFF, *b"b", 0xE2, 256, *b"never"]
    pieces = list(generate.as_text(ids, b"x", tokenizer))
    assert pieces == ["a", "", "é", "", "", "€", "", "\ufffdb", "", "\ufffd"]
    assert list(generate.as_text(b"ab", b"x", tokenizer)) == ["a", "b", ""]


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


def test_checkpoints_elsewhere_win_over_older_ones_in_the_folder(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs(*ONE), folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["checkpoint"]["dir"] = str(tmp_path / "elsewhere")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="elsewhere holds no finished checkpoint"):
        generate.load(folder, None)
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    generate.load(folder, None)


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
