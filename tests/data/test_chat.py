"""Rows of conversations: packing, validation, order, epochs, and what is refused."""

import json
import re
from itertools import pairwise

import jax
import numpy as np
import pytest
from chat_data import CHATML, load, talk, write_rows, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from nanotrain_jax import train
from nanotrain_jax.config import load as request
from nanotrain_jax.config.training_stages import of_run, of_span, spans
from nanotrain_jax.data import batches as data
from nanotrain_jax.data.packing import in_rows
from nanotrain_jax.parallel import mesh as meshes

T = 64


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer", CHATML)


def completions(sizes):
    """Rows of so many tokens each, the end token included. The first token of row i is 1 + i: \" is token 1."""
    return [{"prompt": chr(34 + i) + "?", "completion": "a" * (size - 3)} for i, size in enumerate(sizes)]


def parts(row):
    """-> (tokens, targets) of each example of a row, and of its padding."""
    starts = [*np.unique(row["starts"]), len(row["starts"])]
    return [(row["inputs"][a:b], row["targets"][a:b]) for a, b in pairwise(starts)]


SIZES = [60, 10, 30, 34, 20, 64, 4, 4, 17]


def test_a_row_has_whole_examples_each_to_itself(tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.jsonl", *completions(SIZES))
    dataset = load(source, tokenizer, seq_len=T)
    alone = load(source, tokenizer, seq_len=T, pack="none").train
    expected = [parts(alone[i])[0] for i in range(len(alone))]
    rows = [parts(dataset.train[i]) for i in range(len(dataset.train))]
    padding = [row.pop() for row in rows[1:] if not row[-1][0].any()]
    assert all((targets < 0).all() for _, targets in padding)
    assert [[len(tokens) for tokens, _ in row] for row in rows] == [[64], [34, 30], [60, 4], [20, 17, 10, 4]]
    found = sorted((example for row in rows for example in row), key=lambda example: example[0][0])
    for (tokens, targets), (inputs, learned) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tokens, inputs)
        np.testing.assert_array_equal(targets, learned)
        np.testing.assert_array_equal(targets, [-1, *tokens[2:], -1])  # two tokens of prompt
    assert "rows are 95% full (data.pack=best_fit)" in dataset.notes[0]
    assert f"{sum(SIZES) - 2 * len(SIZES)} of {sum(SIZES)} tokens are learned" in dataset.notes[0]


@settings(deadline=None, derandomize=True, max_examples=60, database=None)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_best_fit_puts_each_item_in_the_fullest_row_that_has_room(sizes):
    members, ends = in_rows(np.array(sizes, np.int64), 40)
    assert sorted(members.tolist()) == list(range(len(sizes)))
    rows = np.split(members, ends[:-1]) if len(ends) else []
    filled = []  # plainly, O(n^2)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        room = [(40 - sum(sizes[i] for i in row), n) for n, row in enumerate(filled)]
        best = min((left for left, _ in room if left >= sizes[item]), default=None)
        if best is None:
            filled.append([item])
        else:
            filled[next(n for left, n in reversed(room) if left == best)].append(item)
    assert sorted(sum(sizes[i] for i in row) for row in rows) == sorted(sum(sizes[i] for i in row) for row in filled)


def test_a_hundred_thousand_examples_fill_their_rows():
    sizes = np.random.default_rng(0).integers(1, 2049, 100_000)
    _, ends = in_rows(sizes, 2048)
    assert len(ends) <= 1.01 * sizes.sum() / 2048


def batch_shapes(size):
    sharding = NamedSharding(meshes.make(data=2, tensor=4), PartitionSpec("data"))
    shape = jax.ShapeDtypeStruct((size, T), np.int32, sharding=sharding)
    return dict.fromkeys(("inputs", "targets", "starts"), shape)


def test_a_resume_in_mid_epoch_reads_on_and_each_epoch_has_all_rows(tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.jsonl", *completions([40] * 21))
    one, two = (load(source, tokenizer, seq_len=T) for _ in range(2))
    assert one.fingerprint == two.fingerprint
    whole = data.batches(one.train, batch_shapes(4), seed=1)
    whole = [jax.device_get(next(whole)) for _ in range(21)]
    rest = data.batches(two.train, batch_shapes(4), seed=1, position=7 * 4)
    for batch in whole[7:12]:
        jax.tree.map(np.testing.assert_array_equal, batch, jax.device_get(next(rest)))
    order = np.concatenate([batch["inputs"][:, 0] for batch in whole]).reshape(4, 21)
    np.testing.assert_array_equal(np.sort(order, 1), np.broadcast_to(np.arange(1, 22), order.shape))
    assert len({tuple(epoch) for epoch in order.tolist()}) == 4


@pytest.mark.parametrize("keys", [{"loss_on": "all"}, {"pack": "none"}, {"seq_len": 128}, {"val_fraction": 0.1}])
def test_other_rows_have_another_fingerprint(keys, tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.jsonl", *completions([40] * 21))
    one, other = (load(source, tokenizer, **{"seq_len": T} | more) for more in ({}, keys))
    assert one.fingerprint != other.fingerprint


def first_bytes(rows):
    return {int(tokens[0]) for i in range(len(rows)) for tokens, _ in parts(rows[i]) if tokens[0]}


def test_whole_examples_are_held_out_and_the_same_text_is_on_one_side(tmp_path, tokenizer):
    rows = completions([20] * 60)
    dataset = load(write_rows(tmp_path / "a.jsonl", *rows, *rows), tokenizer, seq_len=T, val_fraction=0.1)
    train, val = map(first_bytes, (dataset.train, dataset.val))
    assert train | val == set(range(1, 61)) and not train & val
    assert 0.1 * 60 <= len(val) <= 0.1 * 60 + 1
    turned = load(write_rows(tmp_path / "b.jsonl", *rows[::-1]), tokenizer, seq_len=T, val_fraction=0.1, seed=5)
    assert first_bytes(turned.val) == val
    few = load(write_rows(tmp_path / "c.jsonl", *completions([9, 40, 12])), tokenizer, seq_len=T, val_fraction=0.01)
    assert len(few.val) == 1 and len(few.train) >= 1


def test_long_examples_are_dropped_or_cut_and_counted(tmp_path, tokenizer):
    source = write_rows(
        tmp_path / "rows.jsonl", *completions([20, 65, 64, 90]), {"prompt": "b" * 70, "completion": "c"}
    )
    dropped, cut = (load(source, tokenizer, seq_len=T, too_long=what) for what in ("drop", "cut"))
    assert first_bytes(dropped.train) == {1, 3}
    assert "3 longer than data.seq_len dropped (data.too_long)" in dropped.notes[0]
    assert first_bytes(cut.train) == {1, 2, 3, 4}
    assert "3 longer than data.seq_len cut (data.too_long); 1 with nothing to learn dropped" in cut.notes[0]


def test_line_ends_a_mark_at_the_start_and_line_separators_in_texts_are_read(tmp_path, tokenizer):
    rows = [{"messages": talk("Hi", "a\u2028b")}, {"messages": talk("Ho", "c\r\nd")}]
    lines = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    other = load(write_rows(tmp_path / "plain.jsonl", *rows), tokenizer)
    assert load(f"chat:{tmp_path}/rows.jsonl", tokenizer).fingerprint == other.fingerprint


def test_the_template_of_a_file_comes_before_the_tokenizer_s(tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.jsonl", {"messages": talk("Hi", "Ho")})
    (tmp_path / "mine.jinja").write_text(CHATML.replace("<|im_start|>", "<|user|>"))
    mine = load(source, tokenizer, chat_template=str(tmp_path / "mine.jinja"))
    (tokenizer / "chat_template.jinja").write_text((tmp_path / "mine.jinja").read_text())
    assert load(source, tokenizer).fingerprint == mine.fingerprint
    (tokenizer / "chat_template.jinja").unlink()
    assert load(source, tokenizer).fingerprint != mine.fingerprint


HI = {"role": "user", "content": "Hi"}
BAD = {
    "no JSON": ('{"text": "a"}\n{"text"', r":2: not valid JSON \(Expecting ':' delimiter\); mend the line"),
    "too deep": ("[" * 100_000, r":1: not valid JSON"),
    "no object": ('["a"]', r':1: \["a"\] is not an object; write {"messages"'),
    "no UTF-8": (b'{"text": "a"}\n\n{"text": "\xe9"}', r":3: not UTF-8 \(invalid continuation byte at byte 10\)"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), r":1: not UTF-8"),
    "half a pair": ('{"text": "\\ud800"}', r":1: half of a surrogate pair"),
    "no character": ('{"text": "\\ufdd0"}', r":1: text has U\+FDD0 or U\+FDD1, which are no characters"),
    "other keys": ({"conversations": []}, r":1: a row with the keys 'conversations'; write {"),
    "no keys": ({}, r":1: a row with the keys of no name; write {"),
    "no messages": ({"messages": []}, r":1: messages must be a list of messages"),
    "null": ({"messages": None}, r":1: messages must be a list of messages"),
    "no message": ({"messages": ["Hi"]}, r":1: messages\[0\] is not an object"),
    "unknown role": ({"messages": [HI, {"role": "gpt", "content": "a"}]}, r':1: messages\[1\]: role="gpt" must be'),
    "no role": ({"messages": [{"content": "a"}]}, r":1: messages\[0\]: role=null must be one of"),
    "parts": ({"messages": [{"role": "user", "content": [{}]}]}, r":1: messages\[0\]: content is a list of parts"),
    "no content": ({"messages": [{"role": "user"}]}, r":1: messages\[0\]: content is missing or null; write it as one"),
    "assistant first": ({"messages": talk("Hi", "a")[1:]}, r":1: messages: the assistant speaks first"),
    "assistant says nothing": ({"messages": talk("Hi", " ")}, r":1: messages\[1\]: the assistant says nothing"),
    "empty completion": ({"prompt": "a", "completion": " \n"}, r":1: completion is empty: there is nothing to learn"),
    "empty text": ({"text": ""}, r":1: text is empty"),
    "no completion": ({"prompt": "a"}, r":1: prompt and completion must both be texts, or both lists"),
    "text and list": ({"prompt": "a", "completion": [HI]}, r":1: prompt and completion must both be texts, or both"),
    "tools": ({"messages": talk("a", "b"), "tools": [{}]}, r":1: tools are not read"),
    "refused by the template": ({"messages": talk("no!", "b")}, r":1: the chat template of .*: roles must not shout"),
    "template error": ({"messages": talk("1/0", "b")}, r":1: the chat template of .*: division by zero"),
    "too long": ({"text": "a" * 99}, r"each of the 1 examples is longer than .*=64 \(the shortest has 100 tokens"),
    "nothing to learn": ({"messages": [HI]}, r"1 of 1 examples have nothing to learn .* \(the first is .*jsonl:1\)"),
    "empty": ("\n \n", r"has no rows; write one to a line"),
    "all held out": ({"text": "a"}, r"holds out all 1 examples"),
}  # fmt: skip
CAREFUL = (
    "{% if messages[0].content == 'no!' %}{{ raise_exception('roles must not shout') }}{% endif %}"
    "{% if messages[0].content == '1/0' %}{{ 1 / 0 }}{% endif %}" + CHATML
)


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """-> what the command says of a request that it refuses; it writes nothing."""
    monkeypatch.setattr(train.meshes, "configure", lambda *settings: [])
    folder = write_tokenizer(tmp_path / "tokenizer", CAREFUL)
    tree = {
        "model": {"num_layers": 1, "d_model": 32, "num_heads": 2, "vocab_size": 300},
        "parallel": {"data": 1},
        "data": {"source": f"chat:{tmp_path}/rows.jsonl", "tokenizer": str(folder), "seq_len": 64, "batch_size": 2},
        "logging": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "chat.yaml").write_text(json.dumps(tree))

    def refused(*overrides):
        capsys.readouterr()
        assert train.main(["--config", str(tmp_path / "chat.yaml"), *overrides]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.endswith("\n") and told[:-1].isprintable() and len(told) < 1000
        assert not (tmp_path / "run").exists()
        return told

    return refused


@pytest.mark.parametrize("content, message", BAD.values(), ids=BAD)
def test_bad_rows_are_refused_in_one_line_that_names_file_and_line(content, message, ask, tmp_path):
    content = json.dumps(content) if isinstance(content, dict) else content
    (tmp_path / "rows.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    told = ask()
    assert "rows.jsonl" in told
    assert re.search(message, told), told


REQUESTS = [
    (["data.source=chat:nowhere/*.jsonl"], "data.source='chat:nowhere/*.jsonl' matches no file"),
    (["data.source='chat:'"], "must be stdlib, text:GLOB"),
    (["data.tokenizer=bytes"], "rows.jsonl:1: messages need a chat template, and the tokenizer has none"),
    (["data.chat_template=nowhere.jinja"], "data.chat_template='nowhere.jinja' cannot be read"),
    (["data.chat_template=chat.yaml/x"], "cannot be read"),
    (["data.attend_across_documents=true"], "examples stand alone; leave data.attend_across_documents out"),
    (["train.epochs=2", "train.steps=3"], "train.epochs=2 with train.steps: both say how long"),
    (["train.epochs=2", "train.batch_schedule=[{steps: 1, batch_size: 1}]"], "with train.batch_schedule"),
    (["train.epochs=2", "data.source=synthetic"], "train.epochs=2 with data.source=synthetic, which never ends"),
    (["train.epochs=0"], "train.epochs=0: input should be greater than 0"),
    (["train.epochs=2", "train.stages=[{name: a, steps: 1}]"], "train.epochs=2 with train.stages"),
    (["vision={}"], "rows.jsonl' with vision: its rows have no pictures"),
    (["data.loss_on=user"], "data.loss_on='user': input should be 'assistant', 'completion' or 'all'"),
]  # fmt: skip


@pytest.mark.parametrize("overrides, message", REQUESTS)
def test_wrong_requests_are_refused(overrides, message, ask, tmp_path):
    write_rows(tmp_path / "rows.jsonl", {"messages": talk("Hi", "Ho")}, {"messages": talk("Hu", "Ha")})
    assert message in ask(*overrides)


def test_examples_stand_alone_in_the_stage_that_reads_them():
    stages = [{"name": "text", "steps": 1}, {"name": "chat", "steps": 1, "data": "chat:rows.jsonl"}]
    config = request.parse({"train": {"stages": stages}})
    text, chat = (of_span(config, span) for span in spans(config))
    assert (text.data.attend_across_documents, chat.data.attend_across_documents) == (True, False)
    assert of_run(chat, config).data == config.data


def test_epochs_stand_for_the_steps_that_a_config_keeps():
    config = request.parse({"train": {"epochs": 2}})
    again = request.parse(config.replace("train", steps=7).to_dict())  # as config.yaml keeps it
    assert again.train == config.train and "steps" not in again.train.model_fields_set
    assert request.parse({"train": {"epochs": 1, "steps": None}}).train.epochs == 1  # an override of a file's steps
