"""data.source=text:GLOB reads files of every kind and folders; what it cannot read is one line."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data
from nanotrain_jax.data import corpus, text_files
from nanotrain_jax.data.tokenizer import of_bytes

TEXTS = [f"text {i} says {'la ' * (i % 7 + 3)}\u00e9\n" for i in range(40)]


def load(where, **keys):
    return data.load(request.parse({"data": {"source": f"text:{where}", "seq_len": 16} | keys}).data)


def write_zst(path, content):
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)


def write_kinds(folder):
    """Write the same texts in a folder of each kind, some of them in further folders."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    for kind in "txt", "py", "rst", "txt.gz", "jsonl", "jsonl.gz", "jsonl.zst", "parquet":
        (folder / kind / "inner").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        for kind in "txt", "py", "rst":
            (folder / kind / ("inner" if i % 2 else "") / f"{i:02}.{kind}").write_bytes(text.encode("utf-8-sig"))
        (folder / "txt.gz" / f"{i:02}.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "jsonl" / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (folder / "jsonl.gz" / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    write_zst(folder / "jsonl.zst" / "a.jsonl.zst", lines)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "parquet" / "inner" / "a.parquet")


def test_folders_of_every_kind_hold_out_the_same_texts(tmp_path):
    write_kinds(tmp_path)
    for hidden in ".git/x", ".hidden":
        (tmp_path / "txt" / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / "txt" / hidden).write_text("hidden")
    found = {}
    for folder in tmp_path.iterdir():
        files = text_files.matching(str(folder), "key")
        texts = list(text_files.documents(files.paths, text_files.Field("text", "data.field")))
        assert sorted(texts) == sorted(text.encode() for text in TEXTS), folder.name
        built = corpus.build(texts, of_bytes())
        found[folder.name] = set(built.keys[built.split(0.2)[1]])
        dataset = load(folder)
        assert len(dataset.val) and len(dataset.train)
    assert len(found) == 8
    assert all(keys == found["txt"] for keys in found.values())


def test_files_of_a_folder_that_are_no_text_are_left_out_and_told(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    whole = load(tmp_path)
    np.save(tmp_path / "x.npy", np.zeros(9))
    dataset = load(tmp_path)
    assert dataset.fingerprint == whole.fingerprint
    assert not whole.notes
    assert dataset.notes == (
        f"warning: 1 files of the folder are no text and are left out; the first is {tmp_path}/x.npy",
    )


def test_the_key_of_the_text_can_be_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    with pytest.raises(ValueError, match=r"a.jsonl:1: no text under 'text' .*'body'.*data\.field"):
        load(tmp_path / "a.jsonl")
    assert len(load(tmp_path / "a.jsonl", field="body").train)


def broken(folder):
    """Write files that cannot be read -> name, what is said of each."""
    (folder / "a.txt").write_text("text", "utf-16")
    (folder / "b.jsonl").write_text('{"text": "text"}', "utf-16")
    (folder / "c.rst").write_bytes(b"\xfe\xff\0t\0e")
    (folder / "d.txt").write_bytes(b"\0\0\xfe\xff\0\0\0t")
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(b'{"text": "text"}\n' * 99)[:-20])
    write_zst(folder / "f.jsonl.zst", b"".join(b'{"text": "%d"}\n' % x for x in np.random.default_rng(0).bytes(9999)))
    (folder / "f.jsonl.zst").write_bytes((folder / "f.jsonl.zst").read_bytes()[:-20])
    (folder / "g.txt.zst").write_bytes(b"no zstandard")
    (folder / "h.parquet").write_bytes(b"no parquet")
    (folder / "i.jsonl").write_text('{"text"')
    (folder / "empty").mkdir()
    return {
        "a.txt": "is UTF-16 text; write it as UTF-8 .iconv",
        "b.jsonl": "is UTF-16 text",
        "c.rst": "is UTF-16 text",
        "d.txt": "is UTF-32 text",
        "e.jsonl.gz": "damaged or truncated",
        "f.jsonl.zst": "damaged or truncated",
        "g.txt.zst": "damaged or truncated",
        "h.parquet": "not a parquet file",
        "i.jsonl": "i.jsonl:1: not valid JSON",
        "empty": "is a folder without a file of text",
    }


def test_what_cannot_be_read_is_one_line(tmp_path):
    for name, message in broken(tmp_path).items():
        with pytest.raises(ValueError, match=message) as raised:
            load(tmp_path / name)
        assert "\n" not in str(raised.value)
        assert name in str(raised.value)
