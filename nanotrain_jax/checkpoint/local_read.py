"""Restore from local copies of checkpoints (local.py): each process its own shards, and of a lost host those of peers.

Processes agree: of the newest step first, all say which shards they hold intact. If together they hold every shard of
the state in the layout of this run, the step is restored: what a process lacks, the first that has it sends to all.
Else an older step is next. State that is on the devices of one host only is lost with its disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from nanotrain_jax.checkpoint import checksums, directory, local, safetensors
from nanotrain_jax.checkpoint.compatibility import Meta
from nanotrain_jax.checkpoint.read import unread
from nanotrain_jax.config.run_sections import Checkpoint
from nanotrain_jax.distributed.processes import all_gather_rows, all_gather_text, bytes_of

T = TypeVar("T")


class Unusable(ValueError):
    """The local copies of a step do not give the state. Raised on all processes."""


def newest(config: Checkpoint, after: int, use: Callable[[Copies], T]) -> tuple[T | None, list[str]]:
    """Return use(copies) of the newest step beyond `after` that does not raise Unusable, and warnings about others.

    None if there is no such step. All processes call it, and return the same.
    """
    warnings: list[str] = []
    run = local.run_of(config) if config.local_dir and config.resume != "never" else ""
    if not run:
        return None, warnings
    mine = [local.of_process(config.local_dir), *local.others(config.local_dir)]
    steps = {step for folder in mine for step in local.complete(folder, run)[-2:] if step > after}
    seen = {step for text in all_gather_text(json.dumps(sorted(steps)[-50:])) for step in json.loads(text)}
    for step in sorted(seen, reverse=True):
        copies = Copies(config, run, step)
        result, problem = None, []
        try:
            result = use(copies)
        except Unusable as error:
            problem = [f"warning: skipped local copies of step {step}: {error}"]
        warnings += copies.problems() + problem
        if result is not None:
            return result, warnings
    return None, warnings


class Copies:
    """The copies of a step that all processes together see on their hosts."""

    def __init__(self, config: Checkpoint, run: str, step: int):
        """Open the copy of this process, or if there is none those of others that it sees."""
        self.config, self.run, self.step = config, run, step
        self.text = b""  # of META
        self.start = ""  # of the run, which saved the copies
        self.arrays: dict[str, tuple[int, ...]] = {}  # path -> shape
        self.opened: dict[str, safetensors.Tensors] = {}  # by name of the shard
        self.problem = ""  # with a copy that is not intact
        self._open([local.of_process(config.local_dir)])
        if not self.opened:
            self._open(local.others(config.local_dir))

    def meta(self) -> Meta:
        """Return the metadata, as the first process that has a copy says. Raises Unusable."""
        sizes = all_gather_rows(np.array([len(self.text)]))[:, 0]
        if not sizes.any():
            raise Unusable("none is intact")
        first = int(np.flatnonzero(sizes)[0])
        text = bytes_of(first, np.frombuffer(self.text, np.uint8), int(sizes[first])).tobytes()
        try:
            content = json.loads(text)
            if content["start"] != self.start:
                self.start, self.opened = content["start"], {}  # mine have the same step, perhaps not the same state
            self.arrays = {path: tuple(shape) for path, shape in content["arrays"].items()}
            return Meta.model_validate(content["meta"])
        except (ValueError, KeyError, TypeError, AttributeError):  # only without checkpoint.verify
            raise Unusable(f"{local.META} cannot be read") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the path and shape of each array of the state, after `meta`."""
        return self.arrays

    def state(self, abstract: Any, _: Callable[[str], bool]) -> Any:
        """Restore the arrays onto the shardings of abstract, as `read.read_state` does, but without a conversion: its
        shards must be those that were saved. Call `meta` before. Raises Unusable."""
        wanted = {directory.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(abstract)}
        self._check_all_are_read([*wanted, *unread(abstract)])
        users = {name: devices for path, x in wanted.items() for name, devices in devices_of(path, x).items()}
        held = self._held(users)
        if not held.any(0).all():
            self._open(local.others(self.config.local_dir))
            held = self._held(users)
        lost = dict.fromkeys(name.split(" ")[0] for name, of in zip(users, held.T, strict=True) if not of.any())
        if lost:
            more = f" and {len(lost) - 1} more arrays" * (len(lost) > 1)
            raise Unusable(
                f"no process has all shards of {next(iter(lost))}{more}; a host is lost, or parallel differs"
            )
        sources = {
            name: None if of[[device.process_index for device in devices]].all() else int(np.flatnonzero(of)[0])
            for (name, devices), of in zip(users.items(), held.T, strict=True)
        }
        return jax.tree_util.tree_map_with_path(lambda path, x: self._array(path, x, sources), abstract)

    def problems(self) -> list[str]:
        """Return a line for each process that found a copy which is not intact."""
        found = [text for text in all_gather_text(self.problem) if text]
        return [f"warning: skipped the local copy of step {self.step} in {text}" for text in dict.fromkeys(found)]

    def _open(self, folders: list[Path]) -> None:
        """Add the shards that folders of processes have of this step, if they are intact."""
        for folder in folders:
            is_there = self.step in local.complete(folder, self.run)
            problem = self._add(folder / self.run) if is_there else ""
            self.problem = self.problem or (f"{folder}: {problem}" if problem else "")

    def _add(self, root: Path) -> str:
        """Add the shards of a copy, unless another start of the run saved it; -> what is wrong with it, or ""."""
        damage = checksums.damage(root, root / directory.SUMS / str(self.step)) if self.config.verify else ""
        if damage:
            return damage
        folder = root / str(self.step)
        try:
            tensors, text = safetensors.Tensors(folder), (folder / local.META).read_bytes()
            start = json.loads(text)["start"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            return f"it cannot be read ({type(error).__name__}: {error})"
        if self.start in ("", start):
            self.text, self.start = text, start
            self.opened = dict.fromkeys(tensors.shapes, tensors) | self.opened
        return ""

    def _check_all_are_read(self, paths: list[str]) -> None:
        """Raise Unusable if there are arrays that are neither at nor below some paths."""
        inside = tuple(f"{path}/" for path in paths)
        extra = next((path for path in self.arrays if path not in paths and not path.startswith(inside)), None)
        if extra:
            raise Unusable(f"this run has no array {extra}")

    def _held(self, names: Iterable[str]) -> np.ndarray:
        """Return which process has which of these shards, bool [processes, shards]."""
        return all_gather_rows(np.array([name in self.opened for name in names], bool))

    def _array(self, path: tuple, x: jax.ShapeDtypeStruct, sources: dict[str, int | None]) -> jax.Array:
        """Restore an array. sources: the process that sends a shard to all; None: those that need it have it."""
        owners, shards = devices_of(directory.path_name(path), x), []
        for name, devices in owners.items():
            own = [device for device in devices if device.process_index == jax.process_index()]
            data = self.opened[name].read(name) if name in self.opened and (own or sources[name] is not None) else None
            index = x.sharding.devices_indices_map(x.shape)[devices[0]]
            shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, x.shape, strict=True))
            if sources[name] is not None:
                data = bytes_of(sources[name], data, int(np.prod(shape)) * x.dtype.itemsize)
            for device in own:
                place = SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind)
                shards.append(jax.device_put(data.view(x.dtype).reshape(shape), place))
            jax.block_until_ready(shards)
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def devices_of(path: str, x: jax.ShapeDtypeStruct) -> dict[str, list[jax.Device]]:
    """Return the devices of all processes that have each distinct shard of an array, by the name of the shard."""
    found: dict[str, list[jax.Device]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        found.setdefault(local.piece(path, x, index), []).append(device)
    return found
