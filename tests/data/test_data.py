"""Text to batches: no document is lost, splits are disjoint, and a resume continues the order."""

import itertools
import json
import shutil
from itertools import islice

import first_format
import grain
import jax
import numpy as np
import pytest
import tokenizers
from conftest import resolved, small

from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data
from nanotrain_jax.data import corpus, text_files, text_sources
from nanotrain_jax.data.tokenizer import load as load_tokenizer
from nanotrain_jax.data.tokenizer import of_bytes, of_files
from nanotrain_jax.step import build as steps

DOCUMENTS = [f"document {i} says {'la ' * (i % 7 + 3)}\n".encode() for i in range(60)]


def documents(pattern):
    return text_files.documents(text_files.matching(pattern, "key").paths, text_files.Field("text", "data.field"))


def load(**keys):
    return data.load(request.parse({"data": keys}).data)


@pytest.fixture
def step():
    config, mesh = resolved(small(data={"batch_size": 8}, parallel={"data": 4}))
    return steps.build(config, mesh)


def test_the_standard_library_is_real_text_split_by_file():
    found = corpus.build(corpus.stdlib_documents(), of_bytes())
    train, val = found.split(0.05)
    assert len(found.tokens) > 2_000_000
    assert not set(found.keys[train]) & set(found.keys[val])
    sizes = np.diff(found.ends, prepend=0)
    assert 0.05 <= sizes[val].sum() / sizes.sum() < 0.08


def test_sequences_run_consecutively_through_the_documents_of_a_split():
    found = corpus.build(DOCUMENTS, of_bytes())
    side, _ = found.split(0.2)
    windows = data.Windows(found, side, 16)
    stream = np.concatenate([np.append(np.frombuffer(DOCUMENTS[i], np.uint8), 256) for i in side]).astype(np.int32)
    assert len(windows) == (len(stream) - 1) // 16
    for i in range(len(windows)):
        np.testing.assert_array_equal(windows[i], stream[i * 16 : i * 16 + 17])


def test_duplicate_texts_are_on_the_same_side_of_the_split():
    found = corpus.build(DOCUMENTS * 2, of_bytes())
    for fraction in 0.05, 0.1, 0.5, 0.9:
        train, val = found.split(fraction)
        assert not {DOCUMENTS[i % 60] for i in train} & {DOCUMENTS[i % 60] for i in val}
        assert sorted([*train, *val]) == list(range(120))


def test_the_split_does_not_depend_on_the_order_of_documents():
    sides = []
    for documents in DOCUMENTS, DOCUMENTS[::-1]:
        _, val = corpus.build(documents, of_bytes()).split(0.2)
        sides.append({documents[i] for i in val})
    assert sides[0] == sides[1]


def test_a_single_file_is_split_at_line_ends_for_validation(tmp_path):
    text = b"".join(b"line %d\n" % i for i in range(30_000))
    (tmp_path / "one.txt").write_bytes(text)
    pieces = list(documents(f"{tmp_path}/*.txt"))
    assert b"".join(pieces) == text
    assert len(pieces) > 3
    assert all(p.endswith(b"\n") for p in pieces)


def test_batches_after_a_resume_equal_those_without_interruption(step, text_files):
    dataset = load(source=f"text:{text_files}", seq_len=16)
    whole = list(islice(data.batches(dataset.train, step.batch, seed=1), 12))
    rest = list(islice(data.batches(dataset.train, step.batch, seed=1, position=7 * 8), 5))
    for a, b in zip(whole[7:], rest, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert whole[0]["inputs"].sharding == step.batch["inputs"].sharding


def test_each_epoch_visits_every_sequence_once_in_another_order(step):
    found = corpus.build(DOCUMENTS[:40], of_bytes())
    windows = data.Windows(found, np.arange(40), 16)
    epoch = len(windows)
    batches = islice(data.batches(windows, step.batch, seed=0), -(-2 * epoch // 8))
    seen = [tuple(row) for batch in batches for row in np.asarray(batch["inputs"])][: 2 * epoch]
    every = sorted(tuple(windows[i][:-1]) for i in range(epoch))
    assert sorted(seen[:epoch]) == every == sorted(seen[epoch:])
    assert seen[:epoch] != seen[epoch:]


def test_batches_of_one_sequence():
    config, mesh = resolved(small(data={"batch_size": 1}, parallel={"data": 1}))
    found = corpus.build(DOCUMENTS, of_bytes())
    windows = data.Windows(found, np.arange(60), 16)
    batches = list(islice(data.batches(windows, steps.build(config, mesh).batch, seed=0), 3))
    assert len({tuple(np.asarray(batch["inputs"])[0]) for batch in batches}) == 3


def test_inputs_and_targets_are_one_token_apart(step):
    dataset = load(source="stdlib", seq_len=16)
    batch = next(data.batches(dataset.train, step.batch, seed=0))
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_evaluation_uses_every_validation_sequence_once_and_pads_with_ignored_targets(step):
    found = corpus.build(DOCUMENTS, of_bytes())
    windows = data.Windows(found, np.arange(12), 16)
    assert len(windows) % 8
    batches = list(data.evaluation(windows, step.batch, max_batches=1000))
    targets = np.concatenate([b["targets"] for b in batches])
    assert (targets >= 0).sum() == 16 * len(windows)
    assert len(list(data.evaluation(windows, step.batch, max_batches=1))) == 1


def test_bigram_loss_equals_that_of_counted_pairs():
    tokens = np.frombuffer(b"abababac" * 50, np.uint8)
    found = corpus.build([tokens.tobytes(), b"abab" * 20], of_bytes())
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


def test_bigram_loss_without_the_first_tokens_of_documents():
    found = corpus.build([b"ab", b"abc", b"b"] * 30, of_bytes())
    windows = data.Windows(found, np.arange(90), 16)
    dataset = data.Dataset(windows, windows, "bytes", 257, "")
    stream = windows.slice(0, windows.total)
    table = np.full((257, 257), 0.1)
    np.add.at(table, (stream[:-1], stream[1:]), 1)
    first, second = (stream[i : len(windows) * 16 + i] for i in range(2))
    losses = -np.log(table[first, second] / table[first].sum(1))[first != 256]
    assert data.bigram_loss(dataset, 100, across_documents=False) == pytest.approx(losses.mean(), rel=1e-12)


def test_several_processes_read_the_same_batches_as_one():
    found = corpus.build(DOCUMENTS, of_bytes())
    order = grain.MapDataset.source(data.Windows(found, np.arange(60), 16)).seed(0).shuffle().repeat(None)
    whole = data.Share(order, position=24, size=8, rows=np.arange(8))
    for owners in [[0, 1, 2], [3, 4, 5, 6, 7]], [[0, 4], [1, 5], [2, 3, 6, 7]], [range(8), range(8)]:
        parts = [data.Share(order, position=24, size=8, rows=np.array(rows)) for rows in owners]
        for i in range(5):
            for rows, part in zip(owners, parts, strict=True):
                np.testing.assert_array_equal(part[i], whole[i][list(rows)])


def test_a_long_document_beside_short_ones_is_not_held_out():
    for documents in (
        [b"long " * 4000, b"short one", b"short two"],
        [b"x" * 500, b"y" * 300, *(b"%03d" % i for i in range(50))],
    ):
        found = corpus.build(documents, of_bytes())
        train, val = found.split(0.05)
        sizes = np.diff(found.ends, prepend=0)
        assert 0 < sizes[val].sum() <= 2 * 0.05 * sizes.sum()
        assert len(train) + len(val) == len(documents)


def test_truncation_and_padding_of_a_tokenizer_file_are_disabled(tmp_path):
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"la": 0, "says": 70_000, "?": 1}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.enable_truncation(4)
    model.enable_padding(length=50)
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.dtype) == (70_001, np.dtype("<u4"))
    found = corpus.build([b"la la says la la la says"], tokenizer)
    assert list(found.tokens) == [0, 0, 70_000, 0, 0, 0, 70_000]


def test_synthetic_tokens_depend_on_their_position_only():
    one, two = (data.Synthetic(100, 16, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one[5], two[5])
    assert not np.array_equal(one[5], one[6])
    assert one[5].dtype == np.int32


@pytest.fixture
def token_folder(tmp_path):
    first_format.write(tmp_path / "tokens", DOCUMENTS, of_bytes())
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
        (lambda f: (f / "tokens.bin").write_bytes((f / "tokens.bin").read_bytes()[:-2]), "truncated"),
        (lambda f: flip(f / "tokens.bin", 100), "modified"),
        (lambda f: flip(f / "documents.npy", -1), "modified"),
        (lambda f: (f / "header.json").write_text("{"), "damaged"),
        (lambda f: (f / "header.json").unlink(), "no header.json"),
        (lambda f: (f / "tokens.bin").unlink(), "damaged"),
        (lambda f: change(f, vocab_size=100), "has id 256, but its header says vocab_size=100"),
        (lambda f: change(f, dtype="<i2"), "damaged"),
        (lambda f: change(f, sha256={}), "damaged"),
        (lambda f: change(f, format="other"), "damaged"),
        (shutil.rmtree, "no header.json"),
    ],
)
def test_a_damaged_token_folder_is_refused(damage, message, token_folder):
    load(source=f"tokens:{token_folder}", seq_len=16, val_fraction=0.2)
    damage(token_folder)
    with pytest.raises(ValueError, match=message):
        load(source=f"tokens:{token_folder}", seq_len=16, val_fraction=0.2)


@pytest.mark.parametrize("content", [b"", b"no array"])
def test_damaged_documents_are_refused_also_unverified(content, token_folder):
    (token_folder / "documents.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"documents.npy is damaged .*; create it again"):
        load(source=f"tokens:{token_folder}", seq_len=16, val_fraction=0.2, verify="off")


HANDFULS = {
    "a short one": [9000, 8000, 20],
    "six of equal length": [2400] * 6,
    "four long": [9000, 8000, 7000, 6000],
    "two": [5000, 300],
    "one": [3000],
}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("sizes", HANDFULS.values(), ids=HANDFULS)
def test_a_handful_of_files_trains(sizes, tokenizer, tmp_path):
    words = np.random.default_rng(0).choice(["la", "mi", "so", "fa", "re\n"], size=(len(sizes), max(sizes)))
    texts = [" ".join(row)[:size] for row, size in zip(words, sizes, strict=True)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    keys = {"source": f"text:{tmp_path}/*.txt", "seq_len": 64}
    if tokenizer == "bpe":
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=30, special_tokens=["</s>"]))
        model.save(str(tmp_path / "tokenizer.json"))
        keys["tokenizer"] = str(tmp_path / "tokenizer.json")
    dataset = load(**keys)
    assert len(dataset.val) >= 1
    total = dataset.train.total + dataset.val.total
    assert max(0.05 * total, 65) <= dataset.val.total <= 2 * max(0.05 * total, 65)
    assert load(**keys).fingerprint == dataset.fingerprint
    rows = [{tuple(side[i]) for i in range(len(side))} for side in (dataset.train, dataset.val)]
    assert not rows[0] & rows[1]


def test_pieces_end_at_line_ends_and_lose_nothing():
    found = corpus.build([b"first line\nsecond\n" * 9, b"no line end " * 9], of_bytes())
    cut = found.cut(25, [ord("\n")])
    np.testing.assert_array_equal(cut.tokens, found.tokens)
    assert set(found.ends) <= set(cut.ends)
    assert np.diff(cut.ends, prepend=0).max() <= 25
    assert all(cut.tokens[end - 1] == ord("\n") for end in cut.ends if end < found.ends[0] - 1)


def test_documents_that_can_be_held_out_stay_whole():
    found = corpus.build(DOCUMENTS, of_bytes())
    dataset = text_sources.divided(found, request.parse({"data": {"seq_len": 16, "val_fraction": 0.05}}).data)
    assert dataset[0] is found


@pytest.mark.parametrize("pattern", ["books [2024]/*.txt", "books [2024]/a[1].txt", "books [[]2024]/*.txt"])
def test_brackets_in_names_that_exist_are_no_pattern(pattern, tmp_path):
    (tmp_path / "books [2024]").mkdir()
    (tmp_path / "books [2024]" / "a[1].txt").write_text("text " * 99)
    assert b"".join(documents(f"{tmp_path}/{pattern}")) == b"text " * 99


def test_the_fast_encoding_has_the_ids_of_the_other(tmp_path):
    """It leaves out offsets, which nobody reads here."""
    text = [doc.decode("utf-8", "replace") for doc in islice(corpus.stdlib_documents(), 20)]
    text += ["<|endoftext|> in the text, and twice <|endoftext|><|endoftext|>", "caf\u00e9 \U0001f600 \ufffd", ""]
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    model.train_from_iterator(text, tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"]))
    found = of_files({"tokenizer.json": model.to_str()}, "test").encode([doc.encode() for doc in text])
    for ids, expected in zip(found, model.encode_batch(text, add_special_tokens=False), strict=True):
        np.testing.assert_array_equal(ids, expected.ids)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "text:nowhere/*.txt"}, "matches no file"),
        ({"source": "text:nowhere[1]/*.txt"}, "matches no file; .* brackets are a pattern"),
        ({"source": "web"}, "must be stdlib, text:GLOB"),
        ({"source": "synthetic"}, "vocab_size"),
        ({"source": "text:{short}"}, "has 6 tokens"),
        ({"source": "text:{short}", "seq_len": 4, "val_fraction": 0.5}, "leaves 1 tokens to train on"),
        ({"source": "text:{many}", "seq_len": 40, "val_fraction": 0.05}, "to train on"),
    ],
)
def test_a_source_without_enough_text_is_refused(keys, message, tmp_path):
    (tmp_path / "short.txt").write_text("hello")
    for i in range(20):
        (tmp_path / f"many{i}.txt").write_text(f"{i:03}")
    keys["source"] = keys["source"].format(short=tmp_path / "short.txt", many=tmp_path / "many*.txt")
    with pytest.raises(ValueError, match=message):
        load(**keys)
