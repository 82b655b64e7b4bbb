"""Every reader of a file: whatever its bytes are, it returns, or refuses in one line; never a traceback."""

import json
import os
from functools import partial

import first_format
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from nanotrain_jax import prepare
from nanotrain_jax.checkpoint.safetensors import SINGLE, Tensors
from nanotrain_jax.config import load
from nanotrain_jax.data import arrays, conversations, corpus, token_folder, tokenizer
from nanotrain_jax.data.chat_template import of_folder
from nanotrain_jax.distributed import watchdog
from nanotrain_jax.evaluation import tasks
from nanotrain_jax.run import curves, goodput

CONFIG = """\
model: {family: llama, num_layers: 2, d_model: 32, rope_scaling: {type: linear, factor: 2.0}}
train: {steps: 20, stages: [{name: a, steps: 3, freeze: ["^ends/"]}], rollback: {window: 9}}
data:
  source: [{name: web, source: "tokens:web", weight: 0.7}, {name: code, source: "tokens:code", weight: 0.3}]
optimizer: {lr: 1.0e-3, betas: [0.9, 0.95]}
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
COMPLETION = {"prompt": "two and two are", "completion": " four"}
QUESTION = {"question": "one?", "choices": ["a", "b"], "answer": 0}
LINE = {"began": 1.0, "time": 2.0, "first": 0, "step": 3, "skipped": 0, "undone": 1, "seconds": {"step": 0.5}}
HEARTBEAT = watchdog.Heartbeat(0, "node0", 1, 2, "data", 0.5, 0.1, 0.01)
PIECES = (
    b"-1",
    b"1e999",
    b"null",
    b"[]",
    b"{}",
    b"true",
    b"9" * 30,
    b"\0",
    b"\xff",
    b'"',
    b"[" * 5000,
    b"\\u0000",
    b"*a",
)
TOKENS = [
    "{%",
    "%}",
    "{{",
    "}}",
    " for m in messages ",
    " if ",
    " endfor ",
    " endif ",
    "m.content",
    "|tojson",
    "[0]",
    "'",
    "-",
]


def write_tokens(folder):
    first_format.write(folder, [b"one document", b"two"], tokenizer.of_bytes())


def write_shards(folder):
    texts = folder.with_suffix(".jsonl")
    texts.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(40)))
    assert prepare.main(["--workers", "1", str(texts), "--out", str(folder)]) == 0


def write_arrays(folder):
    side = dict.fromkeys(("inputs", "targets"), np.zeros((2, 4), np.int32))
    arrays.write(folder, {"train": side, "val": side}, 100, {})


def write_tensors(folder):
    folder.mkdir()
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, folder / SINGLE)


def write_text(name, text, folder):
    folder.mkdir()
    (folder / name).write_text(text)


def read_chat(folder):
    of_row = partial(conversations.of_row, template=None, loss_on="assistant")
    return list(conversations.read([str(folder / "chat.jsonl")], of_row))


def rendered(folder):
    return of_folder(folder).render(CHAT["messages"])


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim }}{% endfor %}"
READERS = {  # name -> writes a good folder, reads it
    "config": (partial(write_text, "x.yaml", CONFIG), lambda folder: load.load(folder / "x.yaml")),
    "first tokens": (write_tokens, partial(corpus.read, verify=False)),
    "shards": (write_shards, partial(token_folder.read, verify="off")),
    "arrays": (write_arrays, partial(arrays.read, seq_len=4, verify=False)),
    "safetensors": (write_tensors, Tensors),
    "chat": (partial(write_text, "chat.jsonl", json.dumps(COMPLETION)), read_chat),
    "template": (partial(write_text, "chat_template.jinja", TEMPLATE), rendered),
    "template of a tokenizer": (
        partial(write_text, "tokenizer_config.json", json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"})),
        rendered,
    ),
    "tasks": (partial(write_text, "t.jsonl", json.dumps(QUESTION)), lambda folder: tasks.read(folder / "t.jsonl")),
    "goodput": (partial(write_text, goodput.FILE, json.dumps(LINE)), goodput.read),
    "metrics": (
        partial(write_text, "metrics.jsonl", json.dumps({"step": 1, "loss": 2.0})),
        lambda folder: curves.read(folder / "metrics.jsonl"),
    ),
    "heartbeats": (
        partial(write_text, "0.json", json.dumps(HEARTBEAT._asdict())),
        lambda folder: watchdog.read_heartbeats(watchdog.Member(folder, 0, 1, None)),
    ),
}
NEVER_REFUSE = {"goodput", "metrics", "heartbeats"}  # a line that cannot be read is left out

edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from(PIECES) | st.binary(max_size=4)),
    min_size=1,
    max_size=4,
)


def edited(content, changes):
    """Replace some bytes of a file by others. changes: place from 0 to 1, how many bytes, by what."""
    for place, count, piece in changes:
        at = int(place * len(content))
        content = content[:at] + piece + content[at + count :]
    return content


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """-> a function from the name of a reader to a folder that it reads."""
    root, made = tmp_path_factory.mktemp("good"), {}

    def folder(name):
        if name not in made:
            made[name] = root / name.replace(" ", "_")
            READERS[name][0](made[name])
            READERS[name][1](made[name])
        return made[name]

    return folder


def returns_or_refuses(name, folder):
    try:
        READERS[name][1](folder)
    except (ValueError, OSError) as error:
        assert name not in NEVER_REFUSE
        assert str(error) and "\n" not in str(error)


def fuzzed(name, folder, which, changes):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = files[int(which * (len(files) - 1) + 0.5)]
    content, mode = file.read_bytes(), file.stat().st_mode
    os.chmod(file, 0o644)
    try:
        file.write_bytes(edited(content, changes))
        returns_or_refuses(name, folder)
    finally:
        file.write_bytes(content)
        os.chmod(file, mode)


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=8, deadline=None, suppress_health_check=CHECKS, derandomize=True)
@given(which=st.floats(0, 1), changes=edits)
@example(which=0.0, changes=[(0.0, 10**6, b"[" * 1200)])
@example(which=0.0, changes=[(0.0, 10**6, b"[]")])
@example(which=0.0, changes=[(0.0, 10**6, b"")])
@example(which=0.0, changes=[(0.0, 10**6, b'{"a": ' + b"9" * 5000 + b"}")])
def test_a_reader_returns_or_refuses_in_one_line(name, good, which, changes):
    fuzzed(name, good(name), which, changes)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=1000, deadline=None, suppress_health_check=CHECKS)
@given(which=st.floats(0, 1), changes=edits)
def test_readers_withstand_many_files(name, good, which, changes):
    fuzzed(name, good(name), which, changes)


@pytest.mark.long
@settings(max_examples=1000, deadline=None, suppress_health_check=CHECKS)
@given(words=st.lists(st.sampled_from(TOKENS) | st.text(max_size=3), max_size=12))
def test_templates_of_random_words_return_or_refuse_in_one_line(good, words):
    folder = good("template")
    (folder / "chat_template.jinja").write_text("".join(words), encoding="utf-8", errors="replace")
    returns_or_refuses("template", folder)
