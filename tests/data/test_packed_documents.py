"""data.pack=best_fit: documents in rows, whole where they fit; each token but the first of a document a target once."""

import json

import numpy as np
import pytest

from nanotrain_jax import prepare, train
from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data
from nanotrain_jax.data import corpus, packed_documents, spans
from nanotrain_jax.data.packed_documents import PackedDocuments
from nanotrain_jax.data.packing import in_rows
from nanotrain_jax.data.tokenizer import of_bytes
from nanotrain_jax.data.windows import Windows

T, END = 64, 256


def texts(count, seed=0):
    """Documents of 1 to 600 random letters."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(3.4, 1.2, count).astype(int) + 1, 600)
    return ["".join(rng.choice([*"abcdefgh"], size)) for size in sizes]


def load(source, **keys):
    keys = {"source": source, "seq_len": T, "pack": "best_fit"} | keys
    return data.load(request.parse({"data": keys}).data)


@pytest.fixture(params=["in memory", "shards"])
def dataset(request, tmp_path, monkeypatch):
    """The same documents, of a file and of a folder of many shards."""
    monkeypatch.setattr(spans, "LEAST", 4096)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(900)))
    if request.param == "in memory":
        return load(f"text:{file}", val_fraction=0.2)
    folder = tmp_path / "tokens"
    assert prepare.main([str(file), "--out", str(folder), "--workers", "1", "--val-fraction", "0.2"]) == 0
    found = load(f"tokens:{folder}")
    assert found.train.windows.stretches > 10
    return found


def documents(windows):
    """The documents of a stream, token by token."""
    tokens = windows.slice(0, windows.total)
    return np.split(tokens, np.flatnonzero(tokens == END)[:-1] + 1)


def parts(row):
    """The documents of a row: inputs and targets of each, without padding."""
    for start in np.unique(row["starts"]):
        mine = row["starts"] == start
        if (row["targets"][mine] >= 0).any():
            yield row["inputs"][mine], row["targets"][mine]


def test_rows_have_whole_documents_and_each_token_is_a_target_once(dataset):
    for side in dataset.train, dataset.val:
        expected = documents(side.windows)
        found = []
        for i in range(len(side)):
            for inputs, targets in parts(side[i]):
                assert (targets >= 0).all()
                np.testing.assert_array_equal(inputs[1:], targets[:-1])
                found.append(np.append(inputs, targets[-1]).astype(np.int32).tobytes())
        pieces = [text[k : k + T + 1].tobytes() for text in expected for k in range(0, len(text) - 1, T)]
        assert sorted(found) == sorted(pieces)
        assert side.cut == sum(len(text) > T + 1 for text in expected) > 0
        assert side.documents == len(expected)


def test_rows_are_as_few_as_best_fit_gives_and_no_room_fits_another(dataset):
    side = dataset.train
    rests = np.array([(len(text) - 1) % T for text in documents(side.windows)])
    rows = sum((len(text) - 1) // T for text in documents(side.windows))
    _, ends = in_rows(rests[rests > 0], T)
    assert len(side) == rows + len(ends)
    assert side.fill == pytest.approx(1 - np.mean([(side[i]["targets"] < 0).mean() for i in range(len(side))]))
    assert side.fill > 0.97
    assert f"{side.documents:,} documents to train on; {side.cut:,} are longer than data.seq_len" in dataset.notes[-1]


def test_a_file_and_a_folder_of_shards_have_the_same_documents_in_rows(tmp_path):
    built = corpus.build([text.encode() for text in texts(300)], of_bytes())
    rows = PackedDocuments(Windows(built, np.arange(300), T))
    assert [len(PackedDocuments(Windows(built, np.arange(n), T))) for n in (0, 1)] == [0, 1]
    order = np.random.default_rng(0).permutation(300)
    assert len(PackedDocuments(Windows(built, order, T))) == len(rows)


def test_a_resume_reads_on_and_a_bigram_model_scores_the_same_targets(dataset):
    order = data.in_order(dataset.train, {"inputs": None, "targets": None, "starts": None}, seed=3)
    first = [order[i]["inputs"] for i in range(len(dataset.train))]
    assert len({row.tobytes() for row in first}) == len(first)
    resumed = data.Share(order, 8, 4, np.arange(4))[0]
    np.testing.assert_array_equal(resumed["inputs"], first[8:12])
    losses = [data.bigram_loss(dataset, 1000, across) for across in (False, True)]
    assert losses[0] == losses[1] == pytest.approx(np.log(8), rel=0.1)
    assert data.first_words(dataset, request.parse({"data": {"source": "stdlib"}}).data)


def test_a_mixture_and_further_sets_are_packed_and_the_fingerprint_tells(tmp_path):
    for name in "ab":
        lines = "".join(json.dumps({"text": name + text}) + "\n" for text in texts(200, ord(name)))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    source = [{"name": name, "source": f"text:{tmp_path}/{name}.jsonl", "weight": 1} for name in "ab"]
    mixed = load(source[:1], val_fraction=0.2, validation=source[1:] and [{"name": "b", "source": source[1]["source"]}])
    assert [type(found.rows) for found in mixed.validation] == [PackedDocuments] * 2
    both = load(source, val_fraction=0.2)
    assert {type(rows) for rows in both.train.rows.values()} == {PackedDocuments}
    assert len(both.notes) == 2
    plain = load(source, val_fraction=0.2, pack="concatenate")
    assert plain.fingerprint == load(source, val_fraction=0.2, pack=None).fingerprint != both.fingerprint


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attend_across_documents": True}, "data.pack=best_fit keeps documents apart; leave data.attend"),
        ({"pack": "none"}, "data.pack=none with data.source='stdlib', which has no such rows"),
        ({"source": "chat:x.jsonl", "pack": "concatenate"}, "data.pack=concatenate with data.source='chat:x.jsonl'"),
        ({"source": "synthetic"}, "data.pack=best_fit with data.source='synthetic', whose rows are given"),
        ({"pack": "bestfit"}, "data.pack='bestfit'"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_one_line(keys, message):
    with pytest.raises(ValueError, match=message) as raised:
        load(**({"source": "stdlib"} | keys))
    assert "\n" not in str(raised.value)


def test_lengths_that_take_too_much_memory_to_count_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_documents, "MOST_COUNTS", T - 1)
    (tmp_path / "a.txt").write_text("line\n" * 1000)
    with pytest.raises(ValueError, match=r"data.seq_len=64 counts the documents of 1 shards .*data.pack=concatenate"):
        load(f"text:{tmp_path}/a.txt")


@pytest.mark.long
def test_a_run_trains_and_resumes_bitwise(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(400)))
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {family: llama, num_layers: 1, d_model: 16, num_heads: 2, d_ff: 32}\n"
        f"data: {{source: 'text:{tmp_path}/a.jsonl', pack: best_fit, seq_len: {T}, batch_size: 8}}\n"
        "optimizer: {schedule: constant}\ntrain: {steps: 6, eval_every: 3, eval_steps: 2}\n"
        "parallel: {data: 2, pipe: 1}\ncheckpoint: {every: 3}\nruntime: {simulate: 8}\n"
    )

    def losses(folder, *keys):
        assert train.main(["--config", str(config), f"logging.dir={folder}", *keys]) == 0
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines)}

    whole = losses(tmp_path / "whole")
    losses(tmp_path / "parts", "train.steps=3")
    assert losses(tmp_path / "parts", "train.steps=6") == whole
    assert "data.pack=best_fit: data.source has" in capsys.readouterr().out
