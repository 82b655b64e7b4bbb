"""Training with optimizer state on NVMe: connects the step, the files and checkpoints.

nvme/update.py defines subgroups and their update, nvme/store.py their files. Checkpoints hold full arrays in layer
order, as without NVMe: either kind of run resumes from the other's checkpoints.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np

from nanotrain_jax.checkpoint import compatibility, read
from nanotrain_jax.config.schema import Config
from nanotrain_jax.nvme import store as stores
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.nvme.update import Group, groups, lower
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.offload.host_offload import HOST
from nanotrain_jax.parallel.zero.optimizer_step import merge, select
from nanotrain_jax.step.build import Step
from nanotrain_jax.step.plan import layers_of_rows
from nanotrain_jax.step.state import State
from nanotrain_jax.step.update import Pending


def store(config: Config, step: Step) -> Store:
    """Return the store of a resolved config; creates no files. Raises OSError or ValueError (see `Store`)."""
    shapes = {name: stores.GroupShape(group.state, group.num_subgroups) for name, group in groups(step.plan).items()}
    if not shapes:
        raise ValueError(
            f"memory.offload_optimizer=nvme with parallel.persist_below={config.parallel.persist_below}: all arrays "
            "are smaller and stay on the device; use a smaller parallel.persist_below"
        )
    plain = config.to_dict()
    layout = {key: plain[key] for key in ("parallel", "precision")} | {"layers": layers_of_rows(config).tolist()}
    return Store(config.memory.nvme_dir, shapes, compatibility.of_weights(config), layout)


def restore(files: Store, step: Step, config: Config, start: tuple[Path, int] | None, digest: str | None) -> str:
    """Restore the files from a checkpoint, or initialize them; -> a phrase for the log. Raises OSError.

    start: folder and step of the checkpoint (None: initialize). digest: of the files, as in the checkpoint.
    """
    if start and files.matches(digest):
        return "reused (checksums match the checkpoint)"
    damage = f" ({stores.MANIFEST} is invalid)" * files.has_invalid_manifest
    files.allocate()
    if start is None:
        _initialize(files, step)
    else:
        _rebuild(files, step, config, start)
    files.flush()
    return f"rebuilt from the checkpoint{damage}" if start else "initialized"


def _initialize(files: Store, step: Step) -> None:
    for name, group in groups(step.plan).items():
        for i in range(group.num_subgroups):
            files.put(name, i, group.init(np.int32(i)))


def _rebuild(files: Store, step: Step, config: Config, start: tuple[Path, int]) -> None:
    for name, group in groups(step.plan).items():
        for leaf, abstract in enumerate(_one_leaf_each(step, group)):
            files.write_stacked(name, leaf, _read_checkpoint(step, abstract, *start)[_rows(name, config)])


def train(
    files: Store, step: Step, step_train: jax.stages.Compiled
) -> Callable[[State, Tree], tuple[State, dict, None]]:
    """Return a function like `Step.train` whose third result is None. step_train: the compiled `Step.train`.

    It runs step_train, then the update of each subgroup, compiled here. It returns before the last writes are done.
    """
    pending_shapes = step_train.out_info[2]
    all_groups = groups(step.plan)
    compiled = {name: lower(group, step.state.params, pending_shapes).compile() for name, group in all_groups.items()}

    def run(state: State, batch: Tree) -> tuple[State, dict[str, jax.Array], None]:
        state, metrics, pending = step_train(state, batch)
        update = {name: partial(update_subgroup, name, pending) for name in all_groups}
        return state._replace(params=files.update(update, state.params)), metrics, None

    def update_subgroup(name: str, pending: Pending, params: Tree, state: Tree, i: int) -> tuple[Tree, Tree]:
        weights = select(params, all_groups[name].members)
        weights, state = compiled[name](weights, pending, state, np.int32(i))
        return merge(weights, params), state

    return run


def arrays(files: Store, step: Step, config: Config) -> Iterator[State]:
    """Yield the arrays in the files for `checkpoint.write.writing`: one stacked array at a time, in layer order."""

    for name, group in groups(step.plan).items():
        for leaf, abstract in enumerate(_one_leaf_each(step, group)):
            x = files.read_stacked(name, leaf)
            ordered = np.empty_like(x)
            ordered[_rows(name, config)] = x
            yield jax.tree.unflatten(jax.tree.structure(abstract), [ordered])


def _rows(name: str, config: Config) -> np.ndarray | slice:
    """Return the layer of each row of a stacked array."""
    return layers_of_rows(config) if name == "layers" else slice(None)


def _read_checkpoint(step: Step, abstract: State, folder: Path, number: int) -> np.ndarray:
    """Read the single array of abstract from the checkpoint of step `number` in folder. Raises OSError."""
    try:
        (x,) = jax.tree.leaves(read.read_state(folder, number, abstract, step.plan.is_padded))
    except ValueError as error:
        raise OSError(str(error)) from None
    return np.asarray(x)


def _one_leaf_each(step: Step, group: Group) -> Iterator[State]:
    """Yield for each stacked array of a group a State as in checkpoints with this array only (others: None)."""
    empty = jax.tree.map(lambda _: None, step.state)
    leaves, tree = jax.tree.flatten(empty._replace(opt=group.state))
    for k, x in enumerate(leaves):
        on_host = jax.sharding.SingleDeviceSharding(x.sharding.mesh.devices.flat[0], memory_kind=HOST)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host)
        yield tree.unflatten([shape if j == k else None for j in range(len(leaves))])
