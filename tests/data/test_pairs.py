"""Rows of pairs: what is learned of them, how they are packed and held out, and what is refused."""

import json

import numpy as np
import pytest
from chat_data import CHATML, MARKED, load, marked, talk, write_tokenizer

T = 128


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer", CHATML)


def source(tmp_path, *rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return f"pairs:{path}"


def halves(row):
    """A row of one pair -> a row of each of its examples."""
    second = int(row["starts"][row["starts"] > 0].min())
    stop = int(row["starts"].max())
    assert len(np.unique(row["starts"])) == 3
    for part in slice(0, second), slice(second, stop):
        inputs, targets = row["inputs"][part], row["targets"][part]
        padding = [(0, 1)]
        starts = np.append(np.zeros(len(inputs), np.int32), len(inputs)).astype(np.int32)
        yield {"inputs": np.pad(inputs, padding), "targets": np.pad(targets, padding, constant_values=-1)} | {
            "starts": starts
        }


ASKED = talk("system: Be brief.", "Hi", "Ho", "2+2?")
TEXT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
TEXT += "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": said("4"), "rejected": said("five")},
        {"chosen": ASKED + said("4"), "rejected": ASKED + said("five")},
        {"prompt": "2+2?", "chosen": ASKED + said("4"), "rejected": ASKED + said("five"), "score_chosen": 8.0},
    ],
)
def test_of_conversations_the_last_answers_are_compared(row, template, tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", template)
    (row,) = load(source(tmp_path, row), folder).train
    chosen, rejected = (marked(half, folder) for half in halves(row))
    assert chosen.rstrip("\n") == f"{TEXT}[[4<|im_end|>]]"
    assert rejected.rstrip("\n") == f"{TEXT}[[five<|im_end|>]]"


def test_texts_are_taken_as_they_are(tmp_path, tokenizer):
    (row,) = load(source(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "five"}), tokenizer).train
    assert [marked(half, tokenizer) for half in halves(row)] == ["2+2=[[4<|im_end|>]]", "2+2=[[five<|im_end|>]]"]


def plain(sizes):
    """Pairs of so many tokens; the prompt of pair i is the character of byte 35 + i."""
    return [{"prompt": chr(35 + i), "chosen": "a", "rejected": "b" * (size - 5)} for i, size in enumerate(sizes)]


def test_a_row_has_whole_pairs_and_the_reference_of_each(tmp_path, tokenizer):
    dataset = load(source(tmp_path, *plain([60, 10, 130, 30, 64, 20, 70])), tokenizer, seq_len=T)
    assert "7 pairs read" in dataset.notes[0] and "1 longer than data.seq_len dropped" in dataset.notes[0]
    reference = np.arange(12, dtype=np.float32).reshape(6, 2)  # of those that are left, in the order of the file
    rows = dataset.train.with_reference(reference)
    prompts = []
    for row in (rows[i] for i in range(len(rows))):
        starts = np.unique(row["starts"])
        examples = [row["inputs"][start] for start in starts if row["inputs"][start]]
        assert examples[::2] == examples[1::2]
        mine = [int(first) - 2 for first in examples[::2]]  # # is token 2
        mine = [i - (i > 2) for i in mine]
        np.testing.assert_array_equal(row["reference"][: len(mine)], reference[mine])
        assert row["reference"].shape == (T // 4, 2) and not row["reference"][len(mine) :].any()
        prompts += mine
    assert sorted(prompts) == list(range(6)) and len(rows) == 3


def test_pairs_of_one_prompt_are_held_out_together(tmp_path, tokenizer):
    rows = [{"prompt": chr(35 + i % 12), "chosen": "a" * (1 + i // 12), "rejected": "b"} for i in range(48)]
    dataset = load(source(tmp_path, *rows), tokenizer, seq_len=T, val_fraction=0.2, pack="none")
    train, val = ({int(row["inputs"][0]) for row in side} for side in (dataset.train, dataset.val))
    assert train | val == set(range(2, 14)) and not train & val and 2 <= len(val) <= 4
    assert len(dataset.val) == 4 * len(val)


ONE = {"prompt": "a", "chosen": "b", "rejected": "c"}
WRONG = {
    "no JSON": ("{", "not valid JSON"),
    "no object": ("[1]", 'is not an object; write {"prompt": ..., "chosen": ..., "rejected": ...}'),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "rejected is missing or empty"),
    "empty chosen": (ONE | {"chosen": " "}, "chosen is missing or empty"),
    "no prompt": ({"chosen": "b", "rejected": "c"}, "prompt, chosen and rejected must all be texts"),
    "mixed": (ONE | {"chosen": talk("a", "b")}, "prompt, chosen and rejected must all be texts"),
    "the same": (ONE | {"chosen": "c"}, "are the same text"),
    "the same messages": ({"chosen": talk("a", "b"), "rejected": talk("a", "b")}, "are the same"),
    "the same but for white space": (
        {"prompt": talk("a"), "chosen": said("b"), "rejected": [said("b")[0] | {"name": "c"}]},
        "are the same text",
    ),
    "no common prompt": ({"chosen": talk("a", "b"), "rejected": talk("c", "d")}, "have no common prompt"),
    "one goes on": (
        {"chosen": talk("a", "b"), "rejected": talk("a", "b", "c", "d")},
        "chosen says nothing of its own",
    ),
    "they part at a question": (
        {"chosen": talk("a", "b", "c", "d"), "rejected": talk("a", "b", "e", "d")},
        "chosen: they part at messages[2], where the assistant must speak, not user",
    ),
    "the prompt twice": (
        {"prompt": talk("a"), "chosen": talk("a", "b"), "rejected": talk("a", "c")},
        "chosen: the prompt is given apart, so the assistant must speak, not user",
    ),
    "no role": ({"chosen": [{"role": "bot", "content": "a"}], "rejected": talk("a", "b")}, 'role="bot" must be'),
    "an empty answer": ({"chosen": talk("a", "b"), "rejected": talk("a", "")}, "rejected[1]: the assistant says"),
    "half a surrogate": ('{"prompt": "a", "chosen": "b", "rejected": "\\ud800"}', "half of a surrogate pair"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_rows_are_refused_by_file_and_line(wrong, tmp_path, tokenizer):
    row, named = WRONG[wrong]
    with pytest.raises(ValueError) as error:
        load(source(tmp_path, ONE, row), tokenizer)
    assert f"{tmp_path}/pairs.jsonl:2: " in str(error.value) and named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "keys", "named"),
    [
        ([], {}, "has no rows"),
        (plain([150]), {"seq_len": T}, "each of the 1 pairs is longer than data.seq_len=128"),
        (plain([30]), {"val_fraction": 0.1}, "holds out all 1 prompts"),
        (plain([30]), {"loss_on": "all"}, "data.loss_on=all"),
        (plain([30]), {"attend_across_documents": True}, "examples stand alone"),
    ],
)
def test_pairs_that_cannot_be_trained_on_are_refused(rows, keys, named, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=named):
        load(source(tmp_path, *rows), tokenizer, **keys)
