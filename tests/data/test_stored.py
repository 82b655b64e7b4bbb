"""Token folders in an object store: the rows of the folder on disk, few bytes, and one line where it cannot be read."""

import json
import os
import shutil
import sys
from itertools import islice

import jax
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from nanotrain_jax import prepare, train
from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data
from nanotrain_jax.data import spans, stored

T = 64


class Refused(Exception):
    """As stores raise them: no OSError."""


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """s3://bucket, a folder of this machine; -> what was read of it: (name, bytes)."""
    read, root = [], tmp_path / "s3"

    class Bucket(LocalFileSystem):
        protocol = "s3"
        cachable = False

        @classmethod
        def _strip_protocol(cls, path):
            return f"{root}/{path.removeprefix('s3://')}" if str(path).startswith("s3://") else str(path)

        def cat_file(self, path, start=None, end=None, **options):
            if "forbidden" in path:
                raise Refused("Access Denied")
            found = super().cat_file(path, start=start, end=end, **options)
            read.append((path.rpartition("/")[2], len(found)))
            return found

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Bucket)
    return read


@pytest.fixture
def folder(tmp_path, monkeypatch, bucket):
    """A folder of many shards, with a tokenizer, here and in the bucket."""
    monkeypatch.setattr(spans, "LEAST", 4096)
    file, rng = tmp_path / "a.jsonl", np.random.default_rng(0)
    texts = ("".join(rng.choice([*"abcdefgh "], size)) for size in rng.integers(1, 300, 600))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    keys = "--workers", "1", "--val-fraction", "0.2", "--tokenizer", "train-bpe:300"
    assert prepare.main([str(file), "--out", str(tmp_path / "web"), *keys]) == 0
    shutil.copytree(tmp_path / "web", tmp_path / "s3" / "bucket" / "web")
    return tmp_path / "web"


def load(where, **keys):
    return data.load(request.parse({"data": {"source": f"tokens:{where}", "seq_len": T} | keys}).data)


@pytest.mark.parametrize("keys", [{}, {"attend_across_documents": False}, {"pack": "best_fit"}])
def test_batches_are_those_of_the_folder_on_disk(keys, folder):
    found = []
    for where in folder, "s3://bucket/web":
        dataset = load(where, verify="full", **keys)
        mesh = jax.sharding.Mesh(jax.devices()[:2], ["data"])
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        names = ["inputs", "targets"] + ["starts"] * bool(keys)
        shapes = {name: jax.ShapeDtypeStruct((4, T), np.int32, sharding=sharding) for name in names}
        assert data.readers_of(dataset.train) == (1 if where == folder else 16)
        found.append((dataset.fingerprint, jax.device_get(list(islice(data.batches(dataset.train, shapes, 1), 30)))))
    assert found[0][0] == found[1][0]
    jax.tree.map(np.testing.assert_array_equal, found[0][1], found[1][1])
    config = request.parse({"data": {"source": "tokens:s3://bucket/web"}}).data
    assert (
        data.tokenizer_of(config).files
        == data.tokenizer_of(config.model_copy(update={"source": f"tokens:{folder}"})).files
    )


def test_a_row_reads_its_bytes_and_opening_the_beginnings_of_files(folder, bucket):
    dataset = load("s3://bucket/web", verify="off")
    opened = {name: size for name, size in bucket if name not in ("header.json", "tokenizer.json")}
    assert max(opened.values()) <= 200
    bucket.clear()
    assert dataset.train[0].dtype == np.int32
    assert bucket == [("00000.tokens", 2 * (T + 1))]


def test_what_cannot_be_read_is_one_line(folder, tmp_path):
    remote = tmp_path / "s3" / "bucket"
    for name in "truncated", "missing", "forbidden", "gone":
        shutil.copytree(remote / "web", remote / name)
    os.truncate(remote / "truncated" / "00003.tokens", 300)
    (remote / "missing" / "00003.documents").unlink()
    shutil.rmtree(remote / "gone")
    for name, message in {
        "truncated": "00003.tokens has 300 bytes, but must have",
        "missing": "s3://bucket/missing/00003.documents is missing",
        "forbidden": r"s3://bucket/forbidden/.* cannot be read \(Refused: Access Denied\)",
        "gone": r"'tokens:s3://bucket/gone' has no header.json; copy there what prepare wrote",
    }.items():
        with pytest.raises((ValueError, OSError), match=message) as raised:
            load(f"s3://bucket/{name}")
        assert "\n" not in str(raised.value)
    assert prepare.main(["--verify", "s3://bucket/web"]) == 0
    assert prepare.main(["--verify", "s3://bucket/truncated"]) == 1
    assert prepare.main(["--verify", "s3://bucket/gone"]) == 2
    dataset = load("s3://bucket/web", verify="off")
    os.truncate(remote / "web" / "00000.tokens", 200)
    with pytest.raises(OSError, match="ends within its numbers"):
        dataset.train[0]


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"s3://bucket/web is in an object store, .*nanotrain_jax\[remote\].*or mount"):
        stored.folder_at("s3://bucket/web")


@pytest.mark.long
def test_a_run_on_a_remote_folder_has_the_losses_of_one_on_disk(folder, tmp_path):
    found = []
    for name, where in ("disk", folder), ("store", "s3://bucket/web"):
        keys = [f"data.source=tokens:{where}", f"data.seq_len={T}", "train.steps=3", f"logging.dir={tmp_path}/{name}"]
        keys += ["runtime.simulate=8", "parallel.data=8"]
        model = ["model.num_layers=1", "model.d_model=16", "model.num_heads=2", "model.num_kv_heads=2", "model.d_ff=32"]
        assert train.main(["--config", "configs/quickstart.yaml", "data.batch_size=8", *keys, *model]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append([(line["step"], line["loss"], line.get("val_loss")) for line in map(json.loads, lines)])
    assert found[0] == found[1]
    assert (tmp_path / "store" / "tokenizer.json").exists()
