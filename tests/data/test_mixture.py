"""Mixtures of sources: exact shares, the same rows wherever they are read, and no held-out text in a training row."""

import gzip
import json
from itertools import combinations

import first_format
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain_jax import prepare
from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data
from nanotrain_jax.data import corpus
from nanotrain_jax.data.dataset import ValidationSet
from nanotrain_jax.data.mixture import Mixture
from nanotrain_jax.data.tokenizer import of_bytes
from nanotrain_jax.data.windows import Windows
from nanotrain_jax.run import length

NAMES = {"inputs": None, "targets": None}


def texts(name, count, least=3):
    return [f"{name} {i} says {'la ' * (i % 7 + least)}\n" for i in range(count)]


def windows(name, count):
    found = corpus.build([text.encode() for text in texts(name, count)], of_bytes())
    return Windows(found, np.arange(count), 16)


def load(source, **keys):
    return data.load(request.parse({"data": {"source": source, "seq_len": 16} | keys}).data)


@pytest.fixture(scope="module")
def mixture():
    return Mixture({"prose": windows("prose", 50), "code": windows("code", 9)}, [0.7, 0.3])


def test_after_any_number_of_rows_two_sources_have_their_shares_to_within_a_row(mixture):
    rows = 12_345
    source, row = np.array([mixture.place(i) for i in range(rows)]).T
    after = np.arange(1, rows + 1)
    for number, share in enumerate((0.7, 0.3)):
        read = np.cumsum(source == number)
        assert np.abs(read - after * share).max() <= 0.5 + 1e-6
        np.testing.assert_array_equal(row[source == number], np.arange(read[-1]))  # each in turn, none twice
    far = 10**12
    assert mixture.counts(far) == [7 * far // 10, 3 * far // 10]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(0, 10**9))
@settings(deadline=None, max_examples=100)
def test_counts_of_any_weights_are_close_to_exact_and_one_row_adds_one(weights, count):
    found = Mixture({}, weights)
    before, after = found.counts(count), found.counts(count + 1)
    assert sum(before) == count
    assert sorted(np.subtract(after, before)) == [0] * (len(weights) - 1) + [1]
    exact = np.array(weights, float) * count / sum(weights)
    assert np.abs(before - exact).max() <= (len(weights) - 1) / 2 + 1e-3  # a half of each rounding


def test_rows_are_those_of_each_source_alone_on_any_number_of_processes_and_after_any_resume(mixture):
    order = data.in_order(mixture, NAMES, seed=3)
    alone = [data.in_order(rows, NAMES, seed=3) for rows in mixture.rows.values()]
    whole = [order[i] for i in range(200)]  # several epochs of the small source
    for i, row in enumerate(whole):
        source, number = mixture.place(i)
        np.testing.assert_array_equal(row, alone[source][number])
    for position in range(0, 160, 7):
        for processes in 1, 2, 4:
            of_process = np.split(np.arange(8), processes)
            parts = [data.Share(order, position, 8, rows)[1] for rows in of_process]  # the second batch
            np.testing.assert_array_equal(np.concatenate(parts), whole[position + 8 : position + 16])


def test_sources_end_after_the_rows_in_which_none_is_read_twice(mixture):
    once = mixture.rows_once
    counts = mixture.counts(once), mixture.counts(once + 1)
    sizes = [len(rows) for rows in mixture.rows.values()]
    assert np.less_equal(counts[0], sizes).all()
    assert not np.less_equal(counts[1], sizes).all()
    assert mixture.epochs(once)["code"] == 1.0 > mixture.epochs(once)["prose"]


def write_sources(folder):
    """Write sources of every format that share texts with each other -> name, source."""
    shared, own = texts("shared", 40), {name: texts(name, 40) for name in ("folder", "lines", "tokens")}
    (folder / "folder").mkdir()
    for i, text in enumerate(shared + own["folder"]):
        (folder / "folder" / f"{i}.txt").write_text(text)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in own["lines"] + shared[::-1])
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    first_format.write(folder / "tokens", [text.encode() for text in own["tokens"] + shared], of_bytes())
    (folder / "one.txt").write_text("".join(texts("one", 200)))  # is cut into about ten
    (folder / "handful").mkdir()
    long = ["".join(texts(f"long{i}", 60)) for i in range(4)]  # are cut into pieces
    for i, text in enumerate(long):
        (folder / "handful" / f"{i}.txt").write_text(text)
    (folder / "long.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*long[:2], *shared]))
    return {
        "folder": f"text:{folder}/folder",
        "lines": f"text:{folder}/lines.jsonl.gz",
        "tokens": f"tokens:{folder}/tokens",
        "one": f"text:{folder}/one.txt",
        "handful": f"text:{folder}/handful",
        "long": f"text:{folder}/long.jsonl",
    }


def documents(rows):
    """The texts of all documents of some windows."""
    tokens = rows.slice(0, rows.total)
    return [found[:-1].astype(np.uint8).tobytes() for found in np.split(tokens, np.flatnonzero(tokens == 256) + 1)][:-1]


def check_apart(dataset):
    """No held-out document, of whatever source, is a training document, part of one, or has one as a part."""
    trained = [text for rows in training(dataset).values() for text in documents(rows)]
    held_out = [text for found in dataset.validation for text in documents(found.rows)]
    everything = b"\0".join(trained)
    held = b"\0".join(held_out)
    assert trained and held_out
    assert not [text for text in held_out if text in everything]
    assert not [text for text in trained if text in held]


def training(dataset):
    return dataset.train.rows if isinstance(dataset.train, Mixture) else {"": dataset.train}


def test_no_held_out_document_is_in_a_training_row_of_any_mixture(tmp_path):
    sources = write_sources(tmp_path)
    for pair in [*combinations(sources, 2), tuple(sources)]:
        parts = [{"name": name, "source": sources[name], "weight": 1 + i} for i, name in enumerate(pair)]
        dataset = load(parts, val_fraction=0.2)
        assert list(training(dataset)) == list(pair)
        assert [found.name for found in dataset.validation] == list(pair)
        check_apart(dataset)


def test_documents_of_further_validation_sets_are_not_trained_on(tmp_path):
    sources = write_sources(tmp_path)
    for source, further, left_out in ("folder", "tokens", 40), ("one", "lines", 0), ("handful", "long", 1):
        alone = load(sources[source], val_fraction=0.2)
        dataset = load(sources[source], val_fraction=0.2, validation=[{"name": "further", "source": sources[further]}])
        check_apart(dataset)
        assert dataset.further[0][::2] == ("further", 0.0)
        assert len(dataset.notes) == bool(left_out)
        assert (dataset.fingerprint == alone.fingerprint) == (not left_out)
    a_file_of_the_source = load(
        sources["handful"], validation=[{"name": "last", "source": f"text:{tmp_path}/handful/3.txt"}], val_fraction=0
    )
    check_apart(a_file_of_the_source)
    assert [len(documents(rows)) for rows in training(a_file_of_the_source).values()] == [3]


def test_what_a_folder_of_shards_holds_out_is_trained_on_nowhere_and_its_own_rows_are_fixed(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts("shards", 90))
    (tmp_path / "shards.jsonl").write_text(lines)
    keys = ["--out", str(tmp_path / "shards"), "--workers", "1", "--val-fraction", "0.2"]
    assert prepare.main([str(tmp_path / "shards.jsonl"), *keys]) == 0
    folder = f"tokens:{tmp_path}/shards"
    held_out = documents(load(folder).val)
    for i, text in enumerate([*held_out, *(text.encode() for text in texts("other", 40))]):
        (tmp_path / f"{i}.txt").write_bytes(text)
    other = f"text:{tmp_path}/*.txt"

    def pair(**parts):
        return [{"name": name, "source": source} for name, source in parts.items()]

    mixed = load(pair(folder=folder, other=other))
    check_apart(mixed)
    assert documents(mixed.train.rows["folder"]) == documents(load(folder).train)
    left_out = len(documents(load(other).train)) - len(documents(mixed.train.rows["other"]))
    assert 0 < left_out <= len(held_out)
    check_apart(load(other, validation=pair(all=folder)))
    check_apart(load(pair(folder=folder, lines=f"text:{tmp_path}/shards.jsonl")))
    with pytest.raises(ValueError, match=r"the token folder data\.source trains on"):
        load(folder, validation=pair(lines=f"text:{tmp_path}/shards.jsonl"))


def test_a_text_that_two_readers_cut_apart_is_on_one_side(tmp_path):
    whole = ["".join(texts(f"whole{i}", 90)) for i in range(3)]
    for name, kept in ("few", whole), ("more", whole[:1]), ("last", whole[2:]):
        (tmp_path / name).mkdir()
        for i, text in enumerate(kept):
            (tmp_path / name / f"{i}.txt").write_text(text)
    for name in "more", "last":
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(name, 40))
        (tmp_path / name / "lines.jsonl").write_text(lines)
    few = [str(path) for path in sorted((tmp_path / "few").glob("*"))]
    assert prepare.main([*few, "--out", str(tmp_path / "tokens"), "--workers", "1", "--val-fraction", "0.2"]) == 0
    folder, text, more, last = (f"tokens:{tmp_path}/tokens", *(f"text:{tmp_path}/{n}" for n in ("few", "more", "last")))
    pieces = r"the token folder (data\.source|folder) trains on pieces of 3 texts"
    with pytest.raises(ValueError, match=pieces):
        load(folder, validation=[{"name": "text", "source": text}])
    with pytest.raises(ValueError, match=pieces):
        load([{"name": "folder", "source": folder}, {"name": "text", "source": text}], val_fraction=0.2)
    with pytest.raises(ValueError, match=r"of data\.source 0 tokens are left to train on"):
        load(text, validation=[{"name": "folder", "source": folder}])
    for source, other in (more, folder), (more, text), (text, more), (last, text):  # one text is in both
        check_apart(load(source, validation=[{"name": "other", "source": other}]))


def test_a_plain_dataset_has_one_validation_set_or_none():
    keys = {"seq_len": 16}
    dataset = data.load(request.parse({"data": {"source": "synthetic"} | keys}).data, 300)
    assert dataset.validation == [ValidationSet("", dataset.val, 1.0)]
    none = data.load(request.parse({"data": {"source": "synthetic", "val_fraction": 0} | keys}).data, 300)
    assert none.validation == []


def one(**keys):
    return {"name": "a", "source": "stdlib"} | keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": []}, r"data.source=\[\] has no source"),
        ({"source": [one(weight=0)]}, "data.source.0.weight=0: input should be greater than 0"),
        ({"source": [one(weigth=1)]}, r"unknown key data.source.0.weigth"),
        ({"source": [{"source": "stdlib"}]}, "data.source.0.name=.*: field required"),
        ({"source": ["stdlib"]}, "data.source.0='stdlib'"),
        ({"source": [one(name="a b")]}, "data.source.0.name='a b'"),
        ({"source": [one(), one()]}, "two sources are named 'a'"),
        ({"source": [one()], "validation": [one()]}, "two sources are named 'a'"),
        ({"source": [one(source="synthetic")]}, "'synthetic' of a cannot be mixed"),
        ({"validation": [one(source="chat:x.jsonl")]}, "'chat:x.jsonl' of a cannot be mixed"),
        ({"source": "chat:x.jsonl", "validation": [one()]}, "data.validation with data.source='chat:x.jsonl'"),
        ({"source": 5}, "data.source=5: input should be a valid string"),
        ({"exhausted": "stop"}, "data.exhausted='stop'"),
    ],
)
def test_a_wrong_mixture_is_refused(keys, message):
    with pytest.raises(ValueError, match=message) as raised:
        request.parse({"data": keys})
    assert "\n" not in str(raised.value)


def test_data_that_do_not_go_together_are_refused(tmp_path):
    sources = write_sources(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    short = {"name": "short", "source": f"text:{tmp_path}/short.txt"}
    with pytest.raises(ValueError, match="validation: short has 6 tokens"):
        load(sources["one"], validation=[short])
    with pytest.raises(ValueError, match=r"of data\.source 0 tokens are left to train on"):
        load(sources["one"], validation=[{"name": "same", "source": sources["one"]}])
    mixed = [{"name": name, "source": sources[name]} for name in ("folder", "lines")]
    config = request.parse({"data": {"source": mixed, "seq_len": 16, "batch_size": 4, "exhausted": "end"}})
    dataset = load(mixed)
    steps = length.steps(config.replace("train", steps=10**6), dataset, length.Progress())
    assert steps == dataset.train.rows_once // 4
    with pytest.raises(ValueError, match="epochs=1 with a mixture"):
        length.is_by_data(config.replace("data", exhausted="repeat").replace("train", epochs=1.0))
