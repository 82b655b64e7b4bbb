"""Text to batches: documents are not lost, split apart, and come in an order that a resume continues."""

import gzip
import itertools
import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import grain
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import resolved, small

from nanotrain_jax import words
from nanotrain_jax.runtime import corpus, data, request
from nanotrain_jax.step import build as steps

SCRIPT = Path(__file__).parents[1] / "scripts" / "prepare_data.py"
DOCUMENTS = [f"document {i} says {'la ' * (i % 7 + 3)}\n".encode() for i in range(60)]


def load(**keys):
    return data.load(request.parse({"data": keys}).data)


def prepare(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def step():
    config, mesh = resolved(small(data={"batch_size": 8}, parallel={"data": 4}))
    return steps.build(config, mesh)


def test_the_standard_library_is_real_text_split_by_file():
    found = corpus.build(corpus.stdlib_documents(), corpus.byte_tokenizer())
    train, val = found.split(0.05)
    assert len(found.tokens) > 2_000_000
    assert not set(found.keys[train]) & set(found.keys[val])
    sizes = np.diff(found.ends, prepend=0)
    assert 0.05 <= sizes[val].sum() / sizes.sum() < 0.08


def test_sequences_follow_each_other_through_the_documents_of_one_side():
    found = corpus.build(DOCUMENTS, corpus.byte_tokenizer())
    side, _ = found.split(0.2)
    windows = data.Windows(found, side, 16)
    stream = np.concatenate([np.append(np.frombuffer(DOCUMENTS[i], np.uint8), 256) for i in side]).astype(np.int32)
    assert len(windows) == (len(stream) - 1) // 16
    for i in range(len(windows)):
        np.testing.assert_array_equal(windows[i], stream[i * 16 : i * 16 + 17])


def test_no_text_stands_on_both_sides_of_the_split_even_if_it_comes_twice():
    found = corpus.build(DOCUMENTS * 2, corpus.byte_tokenizer())
    for fraction in 0.05, 0.1, 0.5, 0.9:
        train, val = found.split(fraction)
        assert not {DOCUMENTS[i % 60] for i in train} & {DOCUMENTS[i % 60] for i in val}
        assert sorted([*train, *val]) == list(range(120))


def test_the_split_does_not_depend_on_the_order_of_documents():
    sides = []
    for documents in DOCUMENTS, DOCUMENTS[::-1]:
        _, val = corpus.build(documents, corpus.byte_tokenizer()).split(0.2)
        sides.append({documents[i] for i in val})
    assert sides[0] == sides[1]


def test_a_file_alone_is_cut_at_line_ends_so_that_some_of_it_can_be_held_out(tmp_path):
    text = b"".join(b"line %d\n" % i for i in range(30_000))
    (tmp_path / "one.txt").write_bytes(text)
    pieces = list(corpus.glob_documents(f"{tmp_path}/*.txt"))
    assert b"".join(pieces) == text
    assert len(pieces) > 3
    assert all(p.endswith(b"\n") for p in pieces)


def test_the_batch_after_a_resume_is_the_batch_that_would_have_come(step, text_files):
    dataset = load(source=f"text:{text_files}", seq_len=16)
    whole = list(islice(data.batches(dataset.train, step.batch, seed=1), 12))
    rest = list(islice(data.batches(dataset.train, step.batch, seed=1, position=7 * 8), 5))
    for a, b in zip(whole[7:], rest, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert whole[0]["inputs"].sharding == step.batch["inputs"].sharding


def test_an_epoch_visits_every_sequence_once_and_the_next_epoch_does_so_in_another_order(step):
    found = corpus.build(DOCUMENTS[:40], corpus.byte_tokenizer())
    windows = data.Windows(found, np.arange(40), 16)
    epoch = len(windows)
    batches = islice(data.batches(windows, step.batch, seed=0), -(-2 * epoch // 8))
    seen = [tuple(row) for batch in batches for row in np.asarray(batch["inputs"])][: 2 * epoch]
    every = sorted(tuple(windows[i][:-1]) for i in range(epoch))
    assert sorted(seen[:epoch]) == every == sorted(seen[epoch:])
    assert seen[:epoch] != seen[epoch:]


def test_a_batch_of_one_sequence_comes_too():
    config, mesh = resolved(small(data={"batch_size": 1}, parallel={"data": 1}))
    found = corpus.build(DOCUMENTS, corpus.byte_tokenizer())
    windows = data.Windows(found, np.arange(60), 16)
    batches = list(islice(data.batches(windows, steps.build(config, mesh).batch, seed=0), 3))
    assert len({tuple(np.asarray(batch["inputs"])[0]) for batch in batches}) == 3


def test_inputs_and_targets_are_one_token_apart(step):
    dataset = load(source="stdlib", seq_len=16)
    batch = next(data.batches(dataset.train, step.batch, seed=0))
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_evaluation_counts_every_held_out_sequence_once_and_fills_up_with_ignored_targets(step):
    found = corpus.build(DOCUMENTS, corpus.byte_tokenizer())
    windows = data.Windows(found, np.arange(12), 16)
    assert len(windows) % 8
    batches = list(data.evaluation(windows, step.batch, most=1000))
    targets = np.concatenate([b["targets"] for b in batches])
    assert (targets >= 0).sum() == 16 * len(windows)
    assert len(list(data.evaluation(windows, step.batch, most=1))) == 1


def test_the_bigram_figure_is_that_of_counted_pairs():
    tokens = np.frombuffer(b"abababac" * 50, np.uint8)
    found = corpus.build([tokens.tobytes(), b"abab" * 20], corpus.byte_tokenizer())
    sides = [data.Windows(found, np.arange(i, i + 1), 16) for i in range(2)]
    dataset = data.Dataset(*sides, "bytes", 257, "")
    stream = np.append(tokens, 256)
    losses = []
    for i in range(len(sides[1])):
        window = sides[1][i]
        for a, b in itertools.pairwise(window):
            pairs = np.sum((stream[:-1] == a) & (stream[1:] == b)) + 0.1
            losses.append(-np.log(pairs / (np.sum(stream[:-1] == a) + 0.1 * 257)))
    assert data.bigram_loss(dataset, 100) == pytest.approx(np.mean(losses), rel=1e-12)


def test_the_processes_of_a_run_read_their_rows_of_the_batches_that_one_would_read():
    found = corpus.build(DOCUMENTS, corpus.byte_tokenizer())
    order = grain.MapDataset.source(data.Windows(found, np.arange(60), 16)).seed(0).shuffle().repeat(None)
    whole = data.share(order, position=24, size=8, rows=np.arange(8))
    for owners in [[0, 1, 2], [3, 4, 5, 6, 7]], [[0, 4], [1, 5], [2, 3, 6, 7]], [range(8), range(8)]:
        parts = [data.share(order, position=24, size=8, rows=np.array(rows)) for rows in owners]
        for i in range(5):
            for rows, part in zip(owners, parts, strict=True):
                np.testing.assert_array_equal(part[i], whole[i][list(rows)])


def test_a_long_document_beside_short_ones_is_not_held_out():
    for documents in (
        [b"long " * 4000, b"short one", b"short two"],
        [b"x" * 500, b"y" * 300, *(b"%03d" % i for i in range(50))],
    ):
        found = corpus.build(documents, corpus.byte_tokenizer())
        train, val = found.split(0.05)
        sizes = np.diff(found.ends, prepend=0)
        assert 0 < sizes[val].sum() <= 2 * 0.05 * sizes.sum()
        assert len(train) + len(val) == len(documents)


def test_a_tokenizer_file_that_truncates_or_pads_is_not_let_to(tmp_path):
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"la": 0, "says": 70_000, "?": 1}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.enable_truncation(4)
    model.enable_padding(length=50)
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = corpus.tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.dtype) == (70_001, np.dtype("<u4"))
    found = corpus.build([b"la la says la la la says"], tokenizer)
    assert list(found.tokens) == [0, 0, 70_000, 0, 0, 0, 70_000]


def test_synthetic_tokens_are_the_same_at_the_same_place():
    one, two = (data.Synthetic(100, 16, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one[5], two[5])
    assert not np.array_equal(one[5], one[6])
    assert one[5].dtype == np.int32


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
    expected = corpus.build(DOCUMENTS, corpus.byte_tokenizer())
    for i, files in enumerate(write_sources(tmp_path)):
        done = prepare(*files, "--out", tmp_path / f"out{i}")
        assert done.returncode == 0, done.stderr
        found = corpus.read(tmp_path / f"out{i}")
        for a, b in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        assert found.fingerprint == expected.fingerprint
        assert isinstance(found.tokens, np.memmap)


def test_a_bpe_trained_on_the_spot_is_reused_and_loses_nothing(tmp_path):
    import tokenizers

    files = write_sources(tmp_path)[0]
    assert prepare(*files, "--out", tmp_path / "one", "--tokenizer", "train-bpe:300").returncode == 0
    again = prepare(*files, "--out", tmp_path / "two", "--tokenizer", tmp_path / "one" / "tokenizer.json")
    assert again.returncode == 0
    one, two = corpus.read(tmp_path / "one"), corpus.read(tmp_path / "two")
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert one.tokenizer == two.tokenizer
    assert one.vocab_size <= 300
    assert len(one.tokens) < sum(map(len, DOCUMENTS))
    model = tokenizers.Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    text = model.decode(list(map(int, one.tokens)), skip_special_tokens=True)
    assert text.encode() == b"".join(DOCUMENTS)
    dataset = load(source=f"tokens:{tmp_path / 'one'}", seq_len=16, val_fraction=0.2)
    assert dataset.vocab_size == one.vocab_size
    with pytest.raises(ValueError, match="did not make"):
        load(source=f"tokens:{tmp_path / 'one'}", seq_len=16, tokenizer="bytes")


def test_preparing_writes_all_or_nothing(tmp_path):
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


def test_bad_lines_are_left_out_and_counted_by_kind(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n".join(BAD_LINES))
    for tokenizer in "bytes", "train-bpe:300":
        done = prepare(tmp_path / "x.jsonl", "--out", tmp_path / tokenizer, "--tokenizer", tokenizer, "--skip-bad")
        assert (done.returncode, done.stderr) == (0, "")
        assert "in 2 documents" in done.stdout
        assert "left out 2 lines: not valid JSON\n" in done.stdout
        assert "left out 3 lines: no text under 'text'\n" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text"', "not valid JSON (Expecting ':' delimiter); mend the line, or leave out such lines with --skip-bad"),
        (
            '{"a": 1}',
            "no text under 'text' in a line with the keys ['a']; name the key of the text with --field, or leave",
        ),
        ("[1]", "no text under 'text' in a line that is no object; name"),
    ],
)
def test_a_bad_line_is_named_with_its_mistake(line, message, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line)
    done = prepare(tmp_path / "x.jsonl", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"x.jsonl:2: {message}" in done.stderr


def test_invalid_utf_8_that_a_tokenizer_sees_replaced_is_counted(tmp_path):
    for name, text in (("a", b"caf\xe9 \xff\xfe"), ("b", "caf\u00e9 \ufffd".encode()), ("c", b"\xe2\x82")):
        (tmp_path / f"{name}.txt").write_bytes(text * 3)
    files = sorted(tmp_path.glob("*.txt"))
    done = prepare(*files, "--out", tmp_path / "bytes")
    assert "UTF-8" not in done.stdout
    done = prepare(*files, "--out", tmp_path / "bpe", "--tokenizer", "train-bpe:300")
    assert "12 invalid pieces of UTF-8 became U+FFFD\n" in done.stdout
    source = {"source": f"text:{tmp_path}/*.txt", "seq_len": 4, "val_fraction": 0}
    dataset = load(**source, tokenizer=f"{tmp_path}/bpe/tokenizer.json")
    config, mesh = resolved(small())
    assert dataset.replaced == 12
    assert "12 invalid pieces of UTF-8" in words.introduction(config, mesh, dataset, [])
    assert load(**source).replaced == 0


def test_a_tokenizer_that_is_no_file_is_told_what_there_is():
    remedy = r"the path of a tokenizer.json \(a Hugging Face model repository has one\)"
    with pytest.raises(
        OSError, match=rf"data.tokenizer='gpt2' cannot be read \(No such file .*; give bytes, or {remedy}"
    ):
        load(source="stdlib", tokenizer="gpt2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt"),
        (["book.pdf"], "not one of .txt"),
        (["a.txt", "--tokenizer", "train-bpe:9"], "at least 257"),
        (
            ["a.txt", "--tokenizer", "gpt2"],
            "--tokenizer='gpt2' cannot be read (No such file or directory); give bytes, ",
        ),
        (["a.txt", "--tokenizer", "a.txt"], "not a tokenizer.json"),
        (["empty.txt"], "no text"),
        (["a.txt", "--out", "taken"], "exists already"),
    ],
)
def test_a_wrong_request_to_prepare_data_is_told_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "taken").mkdir()
    done = prepare(*arguments, *([] if "--out" in arguments else ["--out", "out"]))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def token_folder(tmp_path):
    corpus.write(tmp_path / "tokens", DOCUMENTS, corpus.byte_tokenizer())
    return tmp_path / "tokens"


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def change(folder, **values):
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokens.bin").write_bytes((f / "tokens.bin").read_bytes()[:-2]), "cut short"),
        (lambda f: flip(f / "tokens.bin", 100), "altered"),
        (lambda f: flip(f / "documents.npy", -1), "altered"),
        (lambda f: (f / "header.json").write_text("{"), "damaged"),
        (lambda f: (f / "header.json").unlink(), "no header.json"),
        (lambda f: (f / "tokens.bin").unlink(), "damaged"),
        (lambda f: change(f, vocab_size=100), "holds id 256, but its header says vocab_size=100"),
        (lambda f: change(f, dtype="<i2"), "damaged"),
        (lambda f: change(f, sha256={}), "damaged"),
        (lambda f: change(f, format="other"), "damaged"),
        (shutil.rmtree, "no header.json"),
    ],
)
def test_a_token_folder_that_is_not_whole_is_refused(damage, message, token_folder):
    load(source=f"tokens:{token_folder}", seq_len=16, val_fraction=0.2)
    damage(token_folder)
    with pytest.raises(ValueError, match=message):
        load(source=f"tokens:{token_folder}", seq_len=16, val_fraction=0.2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "text:nowhere/*.txt"}, "matches no file"),
        ({"source": "web"}, "is unknown"),
        ({"source": "synthetic"}, "vocab_size"),
        ({"source": "text:{short}"}, "holds 6 tokens"),
        ({"source": "text:{short}", "seq_len": 4, "val_fraction": 0.5}, "the shortest document has 6"),
        ({"source": "text:{many}", "seq_len": 16, "val_fraction": 0.05}, "to hold out"),
    ],
)
def test_a_source_without_enough_text_is_refused(keys, message, tmp_path):
    (tmp_path / "short.txt").write_text("hello")
    for i in range(20):
        (tmp_path / f"many{i}.txt").write_text(f"{i:03}")
    keys["source"] = keys["source"].format(short=tmp_path / "short.txt", many=tmp_path / "many*.txt")
    with pytest.raises(ValueError, match=message):
        load(**keys)
