"""The reference of train.objective: what the model before the first step says of all completions of the data.

It is computed once, in the layout of the run, and kept in <logging.dir>/reference.npz, which a resume reads: float32
[pairs 2], the log-probabilities of the chosen and the rejected completion of each pair, in the order of the files.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from zipfile import BadZipFile

import jax
import numpy as np
from jax.experimental import multihost_utils

from nanotrain_jax.checkpoint import durable
from nanotrain_jax.data import batches as data
from nanotrain_jax.data.pairs import Pairs
from nanotrain_jax.distributed.processes import on_all_processes
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.run.phases import Phase
from nanotrain_jax.run.resume import Resumed
from nanotrain_jax.step.build import State, Step

FILE = "reference.npz"


def attach(phases: list[Phase], state: State, resumed: Resumed | None = None) -> tuple[list[Phase], list[str]]:
    """Return phases whose data have the reference, and lines for the banner; without an objective nothing changes.

    state: with which the run continues; if what came before had no objective, it is the reference. Raises ValueError or
    OSError, on all processes.
    """
    config, dataset, step = phases[-1].config, phases[-1].dataset, phases[-1].step
    if config.train.objective is None:
        return phases, []
    continues = resumed is not None and not resumed.meta.weights_only
    has_one = continues and resumed.meta.config["train"].get("objective")
    if continues and not has_one:
        raise ValueError(
            f"checkpoint.dir={config.checkpoint.dir!r} holds a run without train.objective; to go on from its weights "
            f"use another logging.dir, and checkpoint.resume={config.checkpoint.dir}"
        )
    if has_one:
        folders = Path(config.logging.dir), resumed.start[0].parent
        reference = on_all_processes(lambda: read(folders, dataset))
        notes = []
    else:
        started = time.perf_counter()
        if jax.process_index() == 0:
            print(f"computing the reference of {len(dataset.train.reference):,} pairs ...", flush=True)
        reference = computed(dataset, step, step.average(state.params))
        seconds = time.perf_counter() - started
        notes = [f"the reference is this model before its first step: {len(reference):,} pairs in {seconds:.1f} s"]
    train, val = (side.with_reference(reference) for side in (dataset.train, dataset.val))
    dataset = dataset._replace(train=train, val=val)
    return [phase._replace(dataset=dataset) for phase in phases], notes


def computed(dataset: data.Dataset, step: Step, params: Tree) -> np.ndarray:
    """Return the log-probabilities of all pairs, float32 [pairs 2]. params: as `Step.evaluate` takes them."""
    found = np.zeros_like(dataset.train.reference)
    for side in (dataset.train, dataset.val):
        size = step.batch["inputs"].shape[0]
        batches = data.evaluation(side, step.batch, -(-len(side) // size), step.token_order)
        for number, batch in enumerate(batches):
            values = multihost_utils.process_allgather(step.of_rows(params, batch), tiled=True)
            put(found, side, number * size, values)
    return found


def put(found: np.ndarray, side: Pairs, first: int, values: np.ndarray) -> None:
    """Write the values of rows from `first` on, [rows P 2], to those of their pairs. Behind the last row is padding."""
    for row, of_row in zip(range(first, len(side)), values, strict=False):
        pairs = side.pairs_of_row(row)
        found[pairs] = of_row[: len(pairs)]


def keep(dataset: data.Dataset, folder: Path) -> None:
    """Write the reference of a dataset to the folder of a run. Raises OSError."""
    content = io.BytesIO()
    pairs = dataset.train
    np.savez(content, reference=pairs.reference, fingerprint=pairs.examples.fingerprint)
    durable.write(folder / FILE, content.getvalue())


def read(folders: tuple[Path, ...], dataset: data.Dataset) -> np.ndarray:
    """Return the reference that the first of some folders of runs has. Raises ValueError or OSError."""
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), folders[0] / FILE)
    remedy = "or start again in another logging.dir"
    if not path.is_file():
        raise ValueError(f"{path} is missing: only the weights of before step 1 give it again; put it back, {remedy}")
    try:
        with np.load(path, allow_pickle=False) as stored:
            reference, fingerprint = stored["reference"], str(stored["fingerprint"])
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); put a copy back, {remedy}") from None
    pairs = dataset.train
    if fingerprint != pairs.examples.fingerprint or reference.shape != pairs.reference.shape:
        raise ValueError(
            f"{path} is of other pairs than data.source has now; use the same files, tokenizer, chat template and "
            f"data.seq_len, {remedy}"
        )
    return reference
