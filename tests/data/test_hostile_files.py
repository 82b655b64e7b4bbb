"""Files from strangers: none runs code, reads outside its folder or takes memory; each is refused in one line."""

import json
import struct
from itertools import pairwise

import first_format
import numpy as np
import pytest
from conftest import cover

from nanotrain_jax.checkpoint.safetensors import INDEX, SINGLE, Tensors
from nanotrain_jax.config import load
from nanotrain_jax.data import arrays, chat_template, corpus, tokenizer
from nanotrain_jax.data.chat_template import Template

MARK = "ran"  # a file that code would make


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def refused(read, *arguments, **options):
    """Return the one line with which a reader refuses."""
    with pytest.raises(ValueError, match=r"\A.+\Z") as raised:
        read(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("tag", ["python/object/apply:open", "python/name:os.system", "python/module:os"])
def test_a_config_makes_no_python_objects(tag, tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text(f"train: !!{tag} [{tmp_path / MARK}, w]\n" if "apply" in tag else f"train: !!{tag} ''\n")
    assert "not valid YAML" in refused(load.load, config)
    assert not (tmp_path / MARK).exists()


def test_a_config_does_not_grow_by_aliases(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{after}: &{after} [{', '.join([f'*{name}'] * 9)}]" for name, after in pairwise("abcdefghij")]
    (tmp_path / "x.yaml").write_text("\n".join([*lines, "train: {freeze: *j}"]))
    assert len(refused(load.load, tmp_path / "x.yaml")) < 1000


def huge(path):
    """Write the header of an array of 8 petabytes, and no array."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**15,)})


@pytest.fixture
def token_folder(tmp_path):
    first_format.write(tmp_path / "tokens", [b"one", b"two"], tokenizer.of_bytes())
    return tmp_path / "tokens"


def test_a_token_folder_is_no_pickle_and_claims_no_more_than_it_has(token_folder, tmp_path):
    documents = token_folder / "documents.npy"
    np.save(documents, np.array([Code(tmp_path / MARK)], object), allow_pickle=True)
    assert "documents.npy is damaged" in refused(corpus.read, token_folder, verify=False)
    assert not (tmp_path / MARK).exists()
    huge(documents)
    assert "documents.npy is damaged" in refused(corpus.read, token_folder, verify=False)
    header = json.loads((token_folder / "header.json").read_text())
    (token_folder / "header.json").write_text(json.dumps(header | {"tokens": 10**18}))
    assert "it is truncated" in refused(corpus.read, token_folder, verify=False)


def test_a_folder_of_arrays_is_no_pickle_and_claims_no_more_than_it_has(tmp_path):
    rows = np.zeros((2, 4), np.int32)
    side = {"inputs": rows, "targets": rows}
    arrays.write(tmp_path / "rows", {"train": side, "val": side}, 100, {})
    array = tmp_path / "rows" / "train" / "inputs.npy"
    np.save(array, np.array([Code(tmp_path / MARK)], object), allow_pickle=True)
    assert "cannot be read" in refused(arrays.read, tmp_path / "rows", 4, verify=False)
    assert not (tmp_path / MARK).exists()
    huge(array)
    assert "cannot be read" in refused(arrays.read, tmp_path / "rows", 4, verify=False)


def test_safetensors_stay_in_their_folder_and_claim_no_more_than_they_have(tmp_path):
    for name in "../secret.safetensors", "/etc/secret.safetensors", "a/../../secret.safetensors":
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
        assert "must be the name of a file in the same folder" in refused(Tensors, tmp_path)
    file = tmp_path / SINGLE
    file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "no whole safetensors file" in refused(Tensors, tmp_path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert "no whole safetensors file" in refused(Tensors, tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['__builtins__']['open'](PLACE, 'w') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_chat_template_runs_no_python_and_reads_no_files(source, tmp_path):
    template = Template(source, {"PLACE": str(tmp_path / MARK)}, "a stranger")
    assert "the chat template of a stranger refuses" in refused(template.render, [{"role": "user", "content": "x"}])
    assert not (tmp_path / MARK).exists()


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
RECURSION = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
GREEDY = {  # takes too much: template -> what the line says
    "{{ 'a' * 10 ** 10 }}": "it takes too much memory",
    "{{ [0] * 10 ** 10 }}": "it takes too much memory",
    DOUBLED: "it takes too much memory",
    "{{ '%9999999999d' % 1 }}": "refuses",
    "{{ '{:9999999999}'.format(1) }}": "it takes too much memory",
    "{{ 'a' | center(10 ** 10) }}": "it takes too much memory",
    "{{ [1] | batch(10 ** 10, 0) | list }}": "it takes too much memory",
    "{{ 'a' * 2 ** 25 }}": "its text has 33,554,432 characters, of at most 16,777,216",
    "{{ raise_exception('a\n' * 10 ** 6) }}": "refuses the conversation: a a",
    LOOPS: "it takes more than 2 s",
    RECURSION: "it takes more than 2 s",
    "{{ 7 ** (10 ** 9) }}": "it takes more than 2 s",
}


FAST = [DOUBLED, LOOPS]


@pytest.mark.parametrize("source", cover(FAST, [source for source in GREEDY if source not in FAST]))
def test_a_chat_template_that_takes_too_much_is_refused_and_the_next_is_not(source, monkeypatch):
    monkeypatch.setattr(chat_template, "RENDERER", chat_template.Renderer(megabytes=256, seconds=2))
    said = refused(Template(source, {}, "a stranger").render, [])
    assert "the chat template of a stranger refuses" in said
    assert GREEDY[source] in said
    assert len(said) < 1000
    assert Template("{{ messages[0] }}", {}, "a friend").render(["x"]) == "x"
