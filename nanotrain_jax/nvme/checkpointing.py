"""Training with optimizer state on NVMe: connects the step, the files and checkpoints.

nvme/update.py defines subgroups and their update, nvme/store.py the files of a process. Checkpoints hold full arrays in
layer order, as without NVMe: either kind of run resumes from the other's checkpoints, with any number of processes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from nanotrain_jax.checkpoint import compatibility, read
from nanotrain_jax.config.schema import Config
from nanotrain_jax.distributed.processes import all_gather_text, on_all_processes
from nanotrain_jax.nvme import folders
from nanotrain_jax.nvme import store as stores
from nanotrain_jax.nvme.store import Store
from nanotrain_jax.nvme.update import groups, lower
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.offload.host_offload import HOST, named_sharding
from nanotrain_jax.parallel.zero.optimizer_step import merge, select
from nanotrain_jax.step.build import Step
from nanotrain_jax.step.plan import layers_of_rows
from nanotrain_jax.step.state import State, orders
from nanotrain_jax.step.update import Pending


def store(config: Config, step: Step) -> Store:
    """Return this process's store of a resolved config; creates no files. Raises OSError or ValueError (`Store`)."""
    shapes = {name: stores.GroupShape(group.state, group.num_subgroups) for name, group in groups(step.plan).items()}
    if not shapes:
        raise ValueError(
            f"memory.offload_optimizer=nvme with parallel.persist_below={config.parallel.persist_below}: all arrays "
            "are smaller and stay on the device; use a smaller parallel.persist_below"
        )
    plain = config.to_dict()
    layout = {key: plain[key] for key in ("parallel", "precision")} | {"layers": layers_of_rows(config).tolist()}
    folder, others = folders.of_process(config.memory.nvme_dir), folders.others(config.memory.nvme_dir)
    return Store(folder, shapes, compatibility.of_weights(config), layout, others)


def restore(files: Store, step: Step, start: read.Saved | None, digests: Sequence[str]) -> str:
    """Restore the files from a checkpoint, or initialize them; -> a phrase for the log. Raises OSError, on all
    processes, each of which restores its own.

    start: the checkpoint (None: initialize). digests: of the files of each process, as in the
    checkpoint.
    """
    is_reused = bool(start and files.matches(digests))
    damage = f" ({stores.MANIFEST} is invalid)" * files.has_invalid_manifest
    on_all_processes(unchanged if is_reused else files.allocate)
    if start is None:
        _initialize(files, step)
    on_all_processes(partial(_rebuild, files, step, start) if start and not is_reused else files.flush)
    if is_reused:
        return "reused (checksums match the checkpoint)"
    return f"rebuilt from the checkpoint{damage}" if start else "initialized"


def unchanged() -> None:
    """Leave the files as they are."""


def seal(files: Store) -> list[str]:
    """Seal the files of all processes; -> the digest of each, for the checkpoint. Raises OSError, on all processes."""
    return all_gather_text(on_all_processes(files.seal))


def _initialize(files: Store, step: Step) -> None:
    for name, group in groups(step.plan).items():
        for i in range(group.num_subgroups):
            files.put(name, i, group.init(np.int32(i)))


def _rebuild(files: Store, step: Step, start: read.Saved) -> None:
    """Write the files of this process from a checkpoint, without waiting for others: reads what it needs."""
    for name, group in groups(step.plan).items():
        for leaf, x in enumerate(jax.tree.leaves(group.state)):
            _rebuild_array(files, step, (name, leaf), x.sharding, start)
    files.flush()


def _rebuild_array(
    files: Store, step: Step, array: tuple[str, int], sharding: NamedSharding, start: read.Saved
) -> None:
    """Write a stacked array, a leaf of a group: read one copy of each shard at a time, of all layers if the rows of a
    shard are not adjacent in the checkpoint."""
    name, leaf = array
    order = step.plan.layer_order if name == "layers" else None
    dims = slice(order is not None, None)  # those of which this process reads its part only
    blocks = files.blocks(name, leaf)
    left = {block.device for block in blocks.values()}
    while left:
        first = min(left, key=lambda device: device.id)
        x = _read_checkpoint(step, _abstract(step, name, leaf, one_copy(sharding, first, order is not None)), start)
        places = sharding.addressable_devices_indices_map(x.shape)
        shards = {str(shard.index[dims]): shard.data for shard in x.addressable_shards}
        found = {device for device in left if str(places[device][dims]) in shards}
        for device in found:
            values = np.asarray(shards[str(places[device][dims])])
            rows = slice(None) if order is None else order[places[device][0]]
            files.write_rows(name, blocks[device], values[rows])
        left -= found


def one_copy(sharding: NamedSharding, device: jax.Device, has_all_rows: bool = False) -> NamedSharding:
    """Return a sharding like this one, in host memory, but with one copy of each shard; `device` has its own.

    has_all_rows: the first dim is not sharded.
    """
    mesh = sharding.mesh
    spec = PartitionSpec(None, *sharding.spec[1:]) if has_all_rows else sharding.spec
    used = {axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)}
    (place,) = np.argwhere(mesh.devices == device)
    index = [slice(None) if axis in used else slice(i, i + 1) for axis, i in zip(mesh.axis_names, place, strict=True)]
    mesh = Mesh(mesh.devices[tuple(index)], mesh.axis_names, axis_types=mesh.axis_types)
    return named_sharding(mesh, spec, True)


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


def arrays(files: Store, step: Step) -> Iterator[State]:
    """Yield the arrays in the files for `checkpoint.write.writing`: one stacked array at a time, in layer order.

    They are in host memory, each shard once if all processes then have one (orbax asks for that) and layers stay in
    their places; else each device has its own. All processes call this together.
    """
    for name, group in groups(step.plan).items():
        for leaf, like in enumerate(jax.tree.leaves(group.state)):
            moves = name == "layers" and step.plan.layer_order is not None
            mesh, spec = like.sharding.mesh, like.sharding.spec
            whole, once = named_sharding(mesh, spec, True), one_copy(like.sharding, mesh.devices.flat[0])
            is_on_all = len({device.process_index for device in once.device_set}) == jax.process_count()
            sharding = once if is_on_all and not moves else whole
            x = _in_files(files, name, leaf, jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding))
            abstract = _abstract(step, name, leaf, sharding)
            state = jax.tree.unflatten(jax.tree.structure(abstract), [x])
            yield orders(step.plan, abstract)[0](state) if moves else state


def nbytes(files: Store) -> int:
    """Return the bytes of all arrays in the files of all processes, each once."""
    return sum(x.size * x.dtype.itemsize for group in files.groups.values() for x in jax.tree.leaves(group.state))


def _in_files(files: Store, name: str, leaf: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a stacked array. like: its sharding, in host memory."""
    blocks = files.blocks(name, leaf)
    shards = [
        jax.device_put(files.read_rows(name, blocks[device]), SingleDeviceSharding(device, memory_kind=HOST))
        for device in like.sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards, dtype=like.dtype)


def _read_checkpoint(step: Step, abstract: State, start: read.Saved) -> jax.Array:
    """Read the single array of abstract from a checkpoint. Raises OSError."""
    try:
        (x,) = jax.tree.leaves(start.state(abstract, step.plan.is_padded))
    except ValueError as error:
        raise OSError(str(error)) from None
    return x


def _abstract(step: Step, name: str, leaf: int, sharding: NamedSharding) -> State:
    """Return a State as in checkpoints with this leaf of a group, in this layout, only (others: None)."""
    empty = jax.tree.map(lambda _: None, step.state)
    leaves, tree = jax.tree.flatten(empty._replace(opt=groups(step.plan)[name].state))
    x = jax.ShapeDtypeStruct(leaves[leaf].shape, leaves[leaf].dtype, sharding=sharding)
    return tree.unflatten([x if i == leaf else None for i in range(len(leaves))])
