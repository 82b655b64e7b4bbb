"""Batches are made by a thread before they are asked for: so many, in the same order, and no longer than they are."""

import gc
import threading
import time
from itertools import chain, islice

import jax
import numpy as np
import pytest

from nanotrain_jax.data import batches as data

SIZE = 4
ROWS = 40  # in an epoch


class Source:
    """Rows that say which they are. bad: one that cannot be read."""

    def __init__(self, bad=None):
        self.bad, self.read = bad, []

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        if i == self.bad:
            raise OSError(f"row {i} is gone")
        self.read.append(i)
        return np.full(9, i, np.int32)


def of(source, position=0):
    mesh = jax.sharding.Mesh(jax.devices()[:SIZE], ["data"])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    shapes = {name: jax.ShapeDtypeStruct((SIZE, 8), np.int32, sharding=sharding) for name in ("inputs", "targets")}
    return data.batches(source, shapes, seed=1, position=position)


@pytest.fixture
def threads():
    """Return a function: how many threads there are that were not there before."""
    before = {*threading.enumerate()}
    return lambda: len({*threading.enumerate()} - before)


def rows(batch):
    return np.asarray(batch["inputs"])[:, 0].tolist()


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_as_many_batches_are_read_ahead_as_promised_and_a_resume_reads_from_those_that_were_taken():
    source = Source()
    found = of(source)
    taken = [rows(next(found)) for _ in range(3)]
    ahead = (3 + data.AHEAD) * SIZE
    assert wait_for(lambda: len(source.read) == ahead)
    time.sleep(0.1)
    assert len(source.read) == ahead
    assert [*chain(*taken)] == source.read[: 3 * SIZE]
    rest = [rows(batch) for batch in islice(of(source, position=3 * SIZE), 2)]
    assert rest == [rows(next(found)) for _ in range(2)]


def test_what_a_reader_raises_is_raised_when_that_batch_is_asked_for_and_the_thread_ends(threads):
    order = [*chain(*(rows(batch) for batch in islice(of(Source()), ROWS // SIZE)))]
    found = of(Source(bad=order[3 * SIZE + 1]))
    assert [rows(next(found)) for _ in range(3)] == [order[i * SIZE :][:SIZE] for i in range(3)]
    with pytest.raises(OSError, match=r"^row \d+ is gone$"):
        next(found)
    assert wait_for(lambda: not threads())


@pytest.mark.parametrize("end", ["close", "forget"])
def test_the_thread_ends_with_its_batches(end, threads):
    found = of(Source())
    next(found)
    assert threads() == 1
    if end == "close":
        found.close()
    del found
    gc.collect()
    assert not threads()
