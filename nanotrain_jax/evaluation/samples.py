"""Samples that are scored once: each is a few requests and a record of their scores, which a file keeps.

A record is found again by its key, a hash of the model's weights, its config and dtype, its tokenizer, what the sample
asks, and the tokens that are scored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nanotrain_jax.checkpoint.compatibility import SAME_RESULT
from nanotrain_jax.config.values import naming
from nanotrain_jax.evaluation.scoring import Request, Score, scores
from nanotrain_jax.generation.engine import Engine
from nanotrain_jax.generation.load import Loaded
from nanotrain_jax.parallel.transposed import is_transposed, plain
from nanotrain_jax.run import sinks

Record = dict[str, Any]
BEGINS = b'{"key": "'  # a record
PRIMES = 2654435761, 2246822519, 3266489917, 668265263  # of the places of a weight, one for each dim


class Sample(NamedTuple):
    """What is scored together. name: for people; asks: what it asks, for its key; record(scores) -> what is kept."""

    name: str
    asks: str
    requests: list[Request]
    record: Callable[[list[Score]], Record]


class Kept:
    """Records in a file of JSON lines, or nowhere. Raises ValueError or OSError if the file is something else."""

    def __init__(self, path: Path | None, loaded: Loaded):
        self.path, self.found, self.model = path, {}, ""
        if path is None:
            return
        section = loaded.config.model.model_dump(mode="json", exclude=SAME_RESULT)
        known = loaded.tokenizer.name, json.dumps(section, sort_keys=True), loaded.config.precision.compute
        self.model = "\n".join([*known, fingerprint(loaded.engine.params)])
        with naming(f"--samples={str(path)!r} cannot be read and written", "give a file in a folder that exists"):
            path.touch()
            self.found = {record["key"]: record for record in _records(path)}
            sinks.trim(path)

    def key(self, sample: Sample) -> str:
        """Return the key of a sample."""
        tokens = [(request.count, *request.tokens) for request in sample.requests]
        return hashlib.sha256(f"{self.model}\n{sample.asks}\n{tokens}".encode("utf-8", "replace")).hexdigest()[:32]

    def add(self, sample: Sample, record: Record) -> Record:
        """Keep a record -> as it is kept."""
        record = {"key": self.key(sample), "sample": sample.name} | record
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
        return record


def _records(path: Path) -> list[Record]:
    """Read the records of a file; of a killed command the last line may be incomplete. Raises ValueError or OSError."""
    found, (*lines, rest) = [], path.read_bytes().split(b"\n")
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append(None)
    wrong = next((i for i, record in enumerate(found, 1) if not isinstance(record, dict) or "key" not in record), None)
    if wrong is None and not rest.startswith(BEGINS[: len(rest)]):
        wrong = len(found) + 1
    if wrong:
        raise ValueError(f"--samples={str(path)!r}: line {wrong} is no record of a sample; give another file")
    return found


def run(engine: Engine, samples: Sequence[Sample], kept: Kept, rows: int, done: Callable[[], None]) -> list[Record]:
    """Score the samples that are not kept yet, `rows` requests together -> a record of each, in order.

    done: called for each sample.
    """
    records: dict[int, Record] = {}
    queue: list[tuple[int, int]] = []  # sample, request
    for i, sample in enumerate(samples):
        if (key := kept.key(sample)) in kept.found:
            records[i] = kept.found[key]
            done()
        else:
            queue += [(i, j) for j in range(len(sample.requests))]
    got: dict[int, dict[int, Score]] = {}
    for at, score in scores(engine, [samples[i].requests[j] for i, j in queue], rows):
        i, j = queue[at]
        own = got.setdefault(i, {})
        own[j] = score
        if len(own) == len(samples[i].requests):
            records[i] = kept.add(samples[i], samples[i].record([own[j] for j in range(len(own))]))
            done()
    return [records[i] for i in range(len(samples))]


def fingerprint(params: Any) -> str:
    """Return a hash of weights that no layout, and no padding with zeros, changes."""
    arrays = (plain(x) if is_transposed(x) else x for x in jax.tree.leaves(params, is_leaf=is_transposed))
    found = [np.asarray(digest(x)) for x in arrays]
    return hashlib.sha256(np.asarray(found, "<u4").tobytes()).hexdigest()[:16]


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """x -> the sum of its bits times a number of each place, modulo 2^32: whole numbers, so in any order."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    places = (lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(PRIMES[dim]) for dim in range(x.ndim))
    return jnp.sum(bits * (2 * sum(places, jnp.uint32(0)) + 1), dtype=jnp.uint32)
