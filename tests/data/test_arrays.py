"""Rows of named arrays: order, resume, processes, evaluation, and what is refused."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from nanotrain_jax.config.schema import Data
from nanotrain_jax.data import arrays
from nanotrain_jax.data import batches as data
from nanotrain_jax.parallel import mesh as meshes

ROWS, T = 21, 6


def side(count, first=0):
    """Rows whose every array tells the number of the row."""
    number = np.arange(first, first + count, dtype=np.int32)
    tokens = np.broadcast_to(number[:, None], (count, T)).copy()
    pictures = np.broadcast_to(number.astype(np.uint8)[:, None, None], (count, 2, 3)).copy()
    return {"inputs": tokens, "targets": tokens.copy(), "pictures": pictures, "unused": number}


@pytest.fixture
def folder(tmp_path):
    arrays.write(tmp_path / "rows", {"train": side(ROWS), "val": side(6, 50)}, 100, {"words": ["a"]})
    return tmp_path / "rows"


def load(folder, **keys):
    return data.load(Data(source=f"arrays:{folder}", seq_len=T, batch_size=4, **keys))


def shapes(**names):
    """Shapes and shardings of a batch over 2 devices; names: further arrays."""
    mesh = meshes.make(data=2, tensor=4)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    kinds = {"inputs": ((4, T), np.int32), "targets": ((4, T), np.int32)} | names
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, (shape, dtype) in kinds.items()}


BATCH = {"pictures": ((4, 2, 3), np.uint8)}


def take(dataset, count, position=0):
    found = data.batches(dataset.train, shapes(**BATCH), 0, position)
    return [jax.device_get(next(found)) for _ in range(count)]


def test_rows_stay_together_and_each_epoch_visits_all_in_another_order(folder):
    dataset = load(folder)
    batches = take(dataset, 2 * ROWS)
    for batch in batches:
        assert set(batch) == {"inputs", "targets", "pictures"}
        np.testing.assert_array_equal(batch["inputs"][:, 0], batch["pictures"][:, 0, 0])
        np.testing.assert_array_equal(batch["inputs"], batch["targets"])
    order = np.concatenate([batch["inputs"][:, 0] for batch in batches]).reshape(-1, ROWS)
    np.testing.assert_array_equal(np.sort(order, 1), np.broadcast_to(np.arange(ROWS), order.shape))
    assert len({tuple(epoch) for epoch in order.tolist()}) == len(order)
    assert (len(dataset.val), dataset.vocab_size, dataset.tokenizer) == (6, 100, None)


def test_a_resume_reads_on_where_it_stopped(folder):
    whole = take(load(folder), 12)
    jax.tree.map(np.testing.assert_array_equal, take(load(folder), 5, position=28), whole[7:])


def test_processes_read_their_rows_of_the_same_batches(folder):
    rows = load(folder).train.only(["inputs", "pictures"])
    whole = data.Share(rows, position=3, size=4, rows=np.arange(4))
    for owned in ([0, 1], [2, 3], [1]):
        part = data.Share(rows, position=3, size=4, rows=np.array(owned))
        for i in range(3):
            for name, array in part[i].items():
                np.testing.assert_array_equal(array, whole[i][name][owned])


def test_an_incomplete_batch_of_an_evaluation_has_no_targets_in_its_last_rows(folder):
    first, second = map(jax.device_get, data.evaluation(load(folder).val, shapes(**BATCH), 5))
    assert first["inputs"][:, 0].tolist() == [50, 51, 52, 53]
    assert second["targets"][:, 0].tolist() == [54, 55, -1, -1]


def test_the_fingerprint_tells_content_and_seed(folder, tmp_path):
    other = side(ROWS)
    other["pictures"][0] += 1
    arrays.write(tmp_path / "other", {"train": other, "val": side(6, 50)}, 100, {})
    arrays.write(tmp_path / "same", {"train": side(ROWS), "val": side(6, 50)}, 100, {})
    prints = [load(where).fingerprint for where in (folder, tmp_path / "same", tmp_path / "other")]
    assert prints[0] == prints[1] != prints[2]
    assert load(folder, seed=1).fingerprint != prints[0]
    with pytest.raises(ValueError, match="already exists"):
        arrays.write(folder, {"train": side(1), "val": side(1)}, 100, {})


def changed(name, make):
    """Return a damage: replace an array of the training side by make(array)."""

    def damage(folder):
        path = folder / "train" / f"{name}.npy"
        np.save(path, make(np.load(path)))

    return damage


def edited(**entries):
    """Return a damage: change entries of meta.json."""

    def damage(folder):
        path = folder / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return damage


@pytest.mark.parametrize(
    ("damage", "verify", "message"),
    [
        (lambda folder: (folder / "meta.json").unlink(), True, "has no meta.json"),
        (lambda folder: (folder / "meta.json").write_text("{"), True, "is damaged"),
        (edited(format="tokens"), True, "format 'tokens'"),
        (edited(vocab_size=50), True, "has tokens from vocab_size=50 on"),
        (changed("inputs", lambda x: x + 1), True, "was modified"),
        (lambda folder: (folder / "val" / "targets.npy").unlink(), True, "val/targets.npy is missing"),
        (lambda folder: (folder / "val" / "targets.npy").unlink(), False, "val/targets.npy is missing"),
        (changed("inputs", lambda x: x[:, 1:]), False, "has 5 tokens in a row, but data.seq_len=6; use data.seq_len=5"),
        (changed("targets", lambda x: x.astype(np.int64)), False, "must be int32"),
        (changed("unused", lambda x: x[1:]), False, "different numbers of rows"),
        (lambda folder: (folder / "train" / "unused.npy").write_bytes(b"x"), False, "unused.npy cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(folder, damage, verify, message):
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder, verify="full" if verify else "off")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"sounds": ((4, 2), np.uint8)}, "has no sounds.npy, which the model reads; it has inputs, pictures"),
        ({"pictures": ((4, 3, 3), np.uint8)}, "is uint8 .21 2 3., but the model reads uint8 .rows 3 3."),
        ({"pictures": ((4, 2, 3), np.float32)}, "but the model reads float32 .rows 2 3."),
    ],
)
def test_arrays_that_the_model_cannot_read_are_refused(folder, wanted, message):
    with pytest.raises(ValueError, match=message):
        data.check(load(folder), shapes(**wanted), f"arrays:{folder}")
