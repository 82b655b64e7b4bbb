"""A run whose master weights and moments rest in files: what the step, the files and the checkpoints have to do with
each other.

The step (piecewise.py) says what a piece is and how it is updated, the store (runtime/nvme.py) has them in files, a
checkpoint has whole arrays, in the order of layers, as those of every other run: each can go on from the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nanotrain_jax import model
from nanotrain_jax.config import Config
from nanotrain_jax.parallel.offload import HOST
from nanotrain_jax.parallel.update import merged, only
from nanotrain_jax.piecewise import Pending, Pieces, lower
from nanotrain_jax.runtime import compatibility, nvme, restore
from nanotrain_jax.state import State, layers_of_rows
from nanotrain_jax.step import Step

Tree = Any  # a pytree of arrays


def store(config: Config, step: Step) -> nvme.Store:
    """The files of a resolved config, not yet made. Raises OSError or ValueError if they cannot be in their folder."""
    stacks = {name: nvme.Stack(p.state, p.count) for name, p in step.pieces.items()}
    plain = config.to_dict()
    layout = {key: plain[key] for key in ("parallel", "precision")}
    return nvme.Store(config.memory.nvme_dir, stacks, compatibility.of_weights(config), layout)


def fill(files: nvme.Store, step: Step, config: Config, start: tuple[Path, int] | None, digest: str | None) -> str:
    """Bring the files to the state of a checkpoint (start: its folder and number; digest: what it knows of files), or
    to that of a run that begins. -> how that was done, in a few words. Raises OSError."""
    if start and files.holds(digest):
        return "as the checkpoint left it"
    damage = f" ({nvme.MANIFEST} could not be used)" * files.damaged
    files.make()
    for name, p in step.pieces.items():
        if start is None:
            for i in range(p.count):
                files.put(name, i, p.begin(np.int32(i)))
            continue
        for number, abstract in enumerate(_one_by_one(step, p)):
            try:
                (x,) = jax.tree.leaves(restore.read_state(*start, abstract, model.is_padded))
            except ValueError as error:
                raise OSError(str(error)) from None
            files.fill(name, number, np.asarray(x)[_rows(name, config)])
            del x  # before the next one is read
    files.settle()
    return f"rebuilt from the checkpoint{damage}" if start else "new"


def train(files: nvme.Store, step: Step, first: jax.stages.Compiled) -> Callable[[State, Tree], tuple[State, dict]]:
    """-> a function like `Step.train` without pieces: first, which is that with pieces, then the update of each.

    Compiles the updates. It returns before the last pieces are written.
    """
    pending = first.out_info[2]
    compiled = {name: lower(p, step.state.params, pending).compile() for name, p in step.pieces.items()}

    def run(state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        state, metrics, pending = first(state, batch)
        update = {name: partial(one, name, pending) for name in step.pieces}
        return state._replace(params=files.update(update, state.params)), metrics

    def one(name: str, pending: Pending, params: Tree, state: Tree, i: int) -> tuple[Tree, Tree]:
        weights, state = compiled[name](only(params, step.pieces[name].mine), pending, state, np.int32(i))
        return merged(weights, params), state

    return run


def arrays(files: nvme.Store, step: Step, config: Config) -> Iterator[State]:
    """What the files hold, as `checkpoint.writing` takes it: one stacked array at a time, in the order of layers."""

    def one(name: str, number: int, abstract: State) -> State:
        x = files.stacked(name, number)
        ordered = np.empty_like(x)
        ordered[_rows(name, config)] = x
        return jax.tree.unflatten(jax.tree.structure(abstract), [ordered])

    for name, p in step.pieces.items():
        for number, abstract in enumerate(_one_by_one(step, p)):
            yield one(name, number, abstract)


def _rows(name: str, config: Config) -> np.ndarray | slice:
    """Which layer each row of a stacked array is."""
    return layers_of_rows(config) if name == "layers" else slice(None)


def _one_by_one(step: Step, pieces: Pieces) -> Iterator[State]:
    """For each stacked array of a stack a tree like State, as checkpoints have it, with None for all others."""
    empty = jax.tree.map(lambda _: None, step.state)
    leaves, tree = jax.tree.flatten(empty._replace(opt=pieces.state))
    for k, x in enumerate(leaves):
        on_host = jax.sharding.SingleDeviceSharding(x.sharding.mesh.devices.flat[0], memory_kind=HOST)
        one = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host)
        yield tree.unflatten([one if j == k else None for j in range(len(leaves))])
