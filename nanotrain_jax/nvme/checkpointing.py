"""Training with optimizer state in files: step, files and checkpoints together.

nvme/update.py says what a piece is and how it is updated, nvme/store.py has pieces in files. A checkpoint has whole
arrays in the order of layers, as those of every other run: each can resume from the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nanotrain_jax.config import Config
from nanotrain_jax.nvme import store as stores
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.nvme.update import Group, groups, lower
from nanotrain_jax.parallel.offload import HOST
from nanotrain_jax.parallel.update import merge, select
from nanotrain_jax.runtime import compatibility, restore
from nanotrain_jax.step.build import Step
from nanotrain_jax.step.optimizer import Pending
from nanotrain_jax.step.plan import layers_of_rows
from nanotrain_jax.step.state import State

Tree = Any  # a pytree of arrays


def store(config: Config, step: Step) -> Store:
    """The files of a resolved config, not yet made. Raises OSError or ValueError if they cannot be in their folder."""
    stacks = {name: stores.Stack(group.state, group.count) for name, group in groups(step.plan).items()}
    plain = config.to_dict()
    layout = {key: plain[key] for key in ("parallel", "precision")}
    return Store(config.memory.nvme_dir, stacks, compatibility.of_weights(config), layout)


def fill(files: Store, step: Step, config: Config, start: tuple[Path, int] | None, digest: str | None) -> str:
    """Bring the files to the state of a checkpoint (start: its folder and number; digest: what it knows of files), or
    to that of a run that begins. -> how that was done, in a few words. Raises OSError."""
    if start and files.holds(digest):
        return "as the checkpoint left it"
    damage = f" ({stores.MANIFEST} could not be used)" * files.damaged
    files.make()
    if start is None:
        _initialize(files, step)
    else:
        _rebuild(files, step, config, start)
    files.settle()
    return f"rebuilt from the checkpoint{damage}" if start else "new"


def _initialize(files: Store, step: Step) -> None:
    for name, group in groups(step.plan).items():
        for i in range(group.count):
            files.put(name, i, group.init(np.int32(i)))


def _rebuild(files: Store, step: Step, config: Config, start: tuple[Path, int]) -> None:
    for name, group in groups(step.plan).items():
        for number, abstract in enumerate(_one_by_one(step, group)):
            files.fill(name, number, _checkpointed(step, abstract, *start)[_rows(name, config)])


def train(files: Store, step: Step, first: jax.stages.Compiled) -> Callable[[State, Tree], tuple[State, dict, None]]:
    """-> a function like `Step.train` that leaves nothing to update. first: the compiled `Step.train`.

    It runs first, then the update of each piece, which it compiles. It returns before the last pieces are written.
    """
    left = first.out_info[2]
    outside = groups(step.plan)
    compiled = {name: lower(group, step.state.params, left).compile() for name, group in outside.items()}

    def run(state: State, batch: Tree) -> tuple[State, dict[str, jax.Array], None]:
        state, metrics, pending = first(state, batch)
        update = {name: partial(one, name, pending) for name in outside}
        return state._replace(params=files.update(update, state.params)), metrics, None

    def one(name: str, pending: Pending, params: Tree, state: Tree, i: int) -> tuple[Tree, Tree]:
        weights = select(params, outside[name].members)
        weights, state = compiled[name](weights, pending, state, np.int32(i))
        return merge(weights, params), state

    return run


def arrays(files: Store, step: Step, config: Config) -> Iterator[State]:
    """What the files hold, as `checkpoint.writing` takes it: one stacked array at a time, in the order of layers."""

    def one(name: str, number: int, abstract: State) -> State:
        x = files.stacked(name, number)
        ordered = np.empty_like(x)
        ordered[_rows(name, config)] = x
        return jax.tree.unflatten(jax.tree.structure(abstract), [ordered])

    for name, group in groups(step.plan).items():
        for number, abstract in enumerate(_one_by_one(step, group)):
            yield one(name, number, abstract)


def _rows(name: str, config: Config) -> np.ndarray | slice:
    """Which layer each row of a stacked array is."""
    return layers_of_rows(config) if name == "layers" else slice(None)


def _checkpointed(step: Step, abstract: State, folder: Path, number: int) -> np.ndarray:
    """The one array of abstract, from the checkpoint with this number in folder. Raises OSError."""
    try:
        (x,) = jax.tree.leaves(restore.read_state(folder, number, abstract, step.plan.model.is_padded))
    except ValueError as error:
        raise OSError(str(error)) from None
    return np.asarray(x)


def _one_by_one(step: Step, group: Group) -> Iterator[State]:
    """For each stacked array of a stack a tree like State, as checkpoints have it, with None for all others."""
    empty = jax.tree.map(lambda _: None, step.state)
    leaves, tree = jax.tree.flatten(empty._replace(opt=group.state))
    for k, x in enumerate(leaves):
        on_host = jax.sharding.SingleDeviceSharding(x.sharding.mesh.devices.flat[0], memory_kind=HOST)
        one = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host)
        yield tree.unflatten([one if j == k else None for j in range(len(leaves))])
