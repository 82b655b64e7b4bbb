"""python -m nanotrain_jax.prepare: text files of every kind -> a token folder, atomically."""

import gzip
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import exit_code, resolved, small

from nanotrain_jax import prepare as command
from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data
from nanotrain_jax.data import corpus, token_folder
from nanotrain_jax.data.tokenizer import of_bytes
from nanotrain_jax.run import banner

DOCUMENTS = [f"document {i} says {'la ' * (i % 7 + 3)}\n".encode() for i in range(60)]


def load(**keys):
    return data.load(request.parse({"data": keys}).data)


def prepare(*arguments):
    """Run the command in this process -> what subprocess.run returns of it."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = exit_code(command.main, list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_the_command_starts_by_itself(tmp_path):
    (tmp_path / "x.txt").write_text("some text")
    run = [sys.executable, "-m", "nanotrain_jax.prepare", str(tmp_path / "x.txt"), "--out", str(tmp_path / "out")]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").is_dir()


def write_sources(folder):
    """The same documents as .txt files, .jsonl, .jsonl.gz and .parquet."""
    texts = [d.decode() for d in DOCUMENTS]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts)
    (folder / "a.jsonl").write_text(lines)
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "c.parquet")
    (folder / "d").mkdir()
    for i, text in enumerate(texts):
        (folder / "d" / f"{i:02}.txt").write_text(text)
    return [[folder / "a.jsonl"], [folder / "b.jsonl.gz"], [folder / "c.parquet"], sorted((folder / "d").glob("*.txt"))]


def test_all_file_kinds_give_the_same_token_folder(tmp_path):
    expected = corpus.build(DOCUMENTS, of_bytes())
    sides = expected.split(0.2)
    for i, files in enumerate(write_sources(tmp_path)):
        done = prepare(*files, "--out", tmp_path / f"out{i}", "--val-fraction", 0.2)
        assert done.returncode == 0, done.stderr
        header, (shard,) = token_folder.read(tmp_path / f"out{i}", "full")
        windows = [data.Windows(expected, side, 16) for side in sides]
        stream = np.concatenate([one.slice(0, one.total) for one in windows])
        np.testing.assert_array_equal(shard.tokens, stream)
        np.testing.assert_array_equal(shard.keys, expected.keys[np.concatenate(sides)])
        assert header.total("held_out_tokens") == windows[1].total
        assert isinstance(shard.tokens.base, np.memmap)


def test_a_split_far_from_the_asked_one_gives_a_warning(tmp_path):
    def lines(name, sizes):
        texts = (f"{name} {i} " + "word " * size for i, size in enumerate(sizes))
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return tmp_path / name

    many = lines("many.jsonl", [30] * 900)
    assert "warning" not in prepare(many, "--out", tmp_path / "out").stdout
    one = lines("one.jsonl", [30])
    assert "(0.0%)" in prepare(one, "--out", tmp_path / "one").stdout
    appended = prepare(many, "--out", tmp_path / "one", "--append").stdout
    assert "(0.0%)" in appended and "warning: that is far from --val-fraction=0.05: the first files" in appended
    assert "warning" not in prepare(one, "--out", tmp_path / "none", "--val-fraction", 0).stdout


def test_a_bpe_tokenizer_trained_by_the_command_is_reusable_and_lossless(tmp_path):
    import tokenizers

    files = write_sources(tmp_path)[0]
    assert prepare(*files, "--out", tmp_path / "one", "--tokenizer", "train-bpe:300").returncode == 0
    done = prepare(*files, "--out", tmp_path / "one", "--tokenizer", "train-bpe:300")
    assert "has these files already: nothing to do" in done.stdout
    assert "already exists" in prepare(*files, "--out", tmp_path / "one", "--tokenizer", "train-bpe:290").stderr
    again = prepare(*files, "--out", tmp_path / "two", "--tokenizer", tmp_path / "one" / "tokenizer.json")
    assert again.returncode == 0
    (one, (tokens,)), (two, (again,)) = (token_folder.read(tmp_path / name) for name in ("one", "two"))
    np.testing.assert_array_equal(tokens.tokens, again.tokens)
    assert one.tokenizer == two.tokenizer
    assert one.vocab_size <= 300
    assert len(tokens.tokens) < sum(map(len, DOCUMENTS))
    model = tokenizers.Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    texts = {corpus.text_key(document): document.decode() for document in DOCUMENTS}
    for key, ids in zip(tokens.keys, np.split(tokens.tokens, tokens.ends[:-1]), strict=True):
        assert model.decode(ids.tolist(), skip_special_tokens=True) == texts[int(key)]
    dataset = load(source=f"tokens:{tmp_path / 'one'}", seq_len=16)
    assert dataset.vocab_size == one.vocab_size
    with pytest.raises(ValueError, match="is not the tokenizer of"):
        load(source=f"tokens:{tmp_path / 'one'}", seq_len=16, tokenizer="bytes")


def test_preparing_is_atomic(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{"title": "no text"}\n')
    done = prepare(tmp_path / "x.jsonl", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "x.jsonl:2" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]
    with gzip.open(tmp_path / "y.jsonl.gz", "wt") as file:
        file.write('{"text": "fine"}\n' * 1000)
    (tmp_path / "y.jsonl.gz").write_bytes((tmp_path / "y.jsonl.gz").read_bytes()[:-20])
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "z.parquet")
    for name in "y.jsonl.gz", "z.parquet":
        done = prepare(tmp_path / name, "--out", tmp_path / "out")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.jsonl", "y.jsonl.gz", "z.parquet"]


BAD_LINES = [
    '{"text": "one"}',
    '{"text"',
    "",
    '{"title": 1}',
    '{"text": 5}',
    "[1]",
    '{"text": "two \\ud800"}',
    "[" * 9999,
]


def test_bad_lines_are_skipped_and_counted_by_kind(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n".join(BAD_LINES))
    for tokenizer in "bytes", "train-bpe:300":
        done = prepare(tmp_path / "x.jsonl", "--out", tmp_path / tokenizer, "--tokenizer", tokenizer, "--skip-bad")
        assert (done.returncode, done.stderr) == (0, "")
        assert "in 2 documents" in done.stdout
        assert "skipped 2 lines: not valid JSON\n" in done.stdout
        assert "skipped 3 lines: no text under 'text'\n" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text"', "not valid JSON (Expecting ':' delimiter); fix the line, or skip such lines with --skip-bad"),
        (
            '{"a": 1}',
            "no text under 'text' (the line is an object with the keys ['a']); "
            "name the key of the text with --field, or skip",
        ),
        ("[1]", "no text under 'text' (the line is not an object); name"),
    ],
)
def test_a_bad_line_is_reported_with_its_error(line, message, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line)
    done = prepare(tmp_path / "x.jsonl", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"x.jsonl:2: {message}" in done.stderr


def test_replaced_invalid_utf_8_is_counted(tmp_path):
    for name, text in (("a", b"caf\xe9 \xff\xfe"), ("b", "caf\u00e9 \ufffd".encode()), ("c", b"\xe2\x82")):
        (tmp_path / f"{name}.txt").write_bytes(text * 3)
    files = sorted(tmp_path.glob("*.txt"))
    done = prepare(*files, "--out", tmp_path / "bytes")
    assert "UTF-8" not in done.stdout
    done = prepare(*files, "--out", tmp_path / "bpe", "--tokenizer", "train-bpe:300")
    assert "replaced 12 invalid UTF-8 sequences by U+FFFD\n" in done.stdout
    source = {"source": f"text:{tmp_path}/*.txt", "seq_len": 4, "val_fraction": 0}
    dataset = load(**source, tokenizer=f"{tmp_path}/bpe/tokenizer.json")
    config, mesh = resolved(small())
    assert dataset.replaced == 12
    assert "12 invalid UTF-8 sequences" in banner.introduction(config, mesh, dataset, [])
    assert load(**source).replaced == 0


def test_texts_are_encoded_together_up_to_a_megabyte(monkeypatch):
    monkeypatch.setattr(corpus, "AT_ONCE", 100)
    texts = [b"x" * (i % 60) for i in range(1000)] + [b"y" * 5000, b"z"]
    found = list(corpus.at_once(texts))
    assert [text for together in found for text in together] == texts
    assert all(sum(map(len, together[:-1])) < 100 <= sum(map(len, together)) for together in found[:-1])


def test_a_missing_tokenizer_is_reported_with_the_valid_values():
    remedy = r"the path of a tokenizer.json or of its folder \(as in "
    with pytest.raises(
        OSError, match=rf"data.tokenizer='gpt2' cannot be read \(No such file .*; give bytes, or {remedy}"
    ):
        load(source="stdlib", tokenizer="gpt2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt cannot be read (No such file or directory); give files that are there"),
        (["book.pdf"], "must be one of .txt"),
        (["a.txt", "--tokenizer", "train-bpe:9"], "at least 257"),
        (
            ["a.txt", "--tokenizer", "gpt2"],
            "--tokenizer='gpt2' cannot be read (No such file or directory); give bytes, ",
        ),
        (["a.txt", "--tokenizer", "a.txt"], "not a tokenizer.json"),
        (["empty.txt"], "no text"),
        (["a.txt", "--out", "taken"], "already exists"),
        (["a.txt", "--out", "a.txt/out"], "--out=a.txt/out cannot be written (Not a directory); make room, or choose"),
    ],
)
def test_an_invalid_request_is_reported_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").touch()
    done = prepare(*arguments, *([] if "--out" in arguments else ["--out", "out"]))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
