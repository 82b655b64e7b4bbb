"""Optimizer state on NVMe: memory-mapped files, one per subgroup and device, streamed through the device in each step.

After ZeRO-Infinity (arXiv 2104.07857, sections 5.2.2 and 6.3). A subgroup is one layer, or a slice of another large
array (nvme/update.py). While the device updates a subgroup, one thread reads ahead and another writes behind:

    reader    read(subgroup + 1) -> device
    device    weights[subgroup], state[subgroup] = update(weights[subgroup], gradients[subgroup], state[subgroup])
    writer    device -> write(subgroup - 1)

so memory holds a few subgroups, whatever the size of the model.

A manifest holds the checksums of the files; its digest is part of the checkpoint of the same step. The files are dirty
(the manifest has no digest) from before the first write of an update until they are sealed. On resume, files are reused
only if their checksums match the checkpoint, which reads them once; otherwise they are rebuilt from the checkpoint.
Neither files that a killed process left half written nor a manifest with a flipped bit are used.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from nanotrain_jax.checkpoint import durable
from nanotrain_jax.parallel.collectives import Tree

Update = Callable[[Any, Tree, int], tuple[Any, Tree]]  # (carry, state of a subgroup, its index) -> carry, state

MAX_PENDING_WRITES = 2  # subgroups
ALIGN = 4096  # bytes
MANIFEST = "manifest.json"


class GroupShape(NamedTuple):
    """The stacked state of a group (ShapeDtypeStructs), and into how many subgroups each device's rows are split."""

    state: Tree
    num_subgroups: int


class Block(NamedTuple):
    """A device's shard of an array in the file of a subgroup."""

    device: jax.Device  # the owner of the file: the first device of this process with this shard
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def padded_stop(self) -> int:
        """Where the next block of the file begins."""
        stop = self.start + int(np.prod(self.shape)) * self.dtype.itemsize
        return -(-stop // ALIGN) * ALIGN


class Array(NamedTuple):
    """An array of a subgroup, and the block of each device of this process."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    blocks: dict[jax.Device, Block]


class Manifest(BaseModel):
    """The manifest of a folder.

    model, layout: see `Store`. checksums: CRC-32 of each file; digest: of all checksums; both None while the files are
    dirty.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    model: dict[str, Any]
    layout: dict[str, Any]
    files: list[str]
    digest: str | None
    checksums: dict[str, int | None] | None

    def encode(self) -> bytes:
        """Return a line of JSON, and a line with its SHA-256."""
        body = self.model_dump_json().encode()
        return body + b"\n" + _sha256(body).encode() + b"\n"


def decode(content: bytes) -> Manifest | None:
    """Return the manifest encoded by `Manifest.encode`; None if its checksum or its fields are wrong."""
    body, _, checksum = content.partition(b"\n")
    if checksum != _sha256(body).encode() + b"\n":
        return None
    try:
        return Manifest.model_validate_json(body)
    except ValidationError:
        return None


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None if there is none, or it is invalid."""
    try:
        return decode((folder / MANIFEST).read_bytes())
    except OSError:  # an unusable folder raises where it is created
        return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Store:
    """The files of this process, and the threads that read and write them; use within `opened`."""

    def __init__(
        self,
        folder: str | Path,
        groups: dict[str, GroupShape],
        model: dict[str, Any],
        layout: dict[str, Any],
        others: Sequence[Path] = (),
    ):
        """Check the folder, which is of this process alone; write nothing.

        model, layout: plain data that identify the model, and all that determines the contents of each file. others:
        folders whose files of this model may be removed.

        Raises ValueError if the folder has files of another model; OSError if the disk is too small.
        """
        self.folder, self.groups, self.model, self.layout = Path(folder), groups, model, layout
        self.subgroups = [(name, i) for name, group in groups.items() for i in range(group.num_subgroups)]
        self._arrays = {name: _arrays(group) for name, group in groups.items()}
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._last_writes: dict[tuple[str, int], Future] = {}
        self._pending_writes: deque[Future] = deque()
        self._digest: str | None = None
        self.files = {
            self._path(subgroup, device): size
            for subgroup in self.subgroups
            for device, size in _sizes(self._arrays[subgroup[0]]).items()
        }
        self.nbytes = sum(self.files.values())
        self._check(others)

    def _check(self, others: Sequence[Path]) -> None:
        manifest = read_manifest(self.folder)
        keys = [key for key in self.model if manifest and self.model[key] != manifest.model.get(key)]
        if keys:
            raise ValueError(
                f"memory.nvme_dir={str(self.folder)!r}: holds the state of another model (different {', '.join(keys)});"
                " choose another folder, or remove it"
            )
        of_others = [(folder, found) for folder in others if (found := read_manifest(folder))]
        paths = {folder / name for folder, found in of_others if found.model == self.model for name in found.files}
        paths |= {*self.files, *(self.folder / name for name in (manifest.files if manifest else ()))}
        used = sum(path.stat().st_blocks * 512 for path in paths if path.exists())
        free = shutil.disk_usage(next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())).free
        if free + used < self.nbytes:
            raise OSError(
                f"memory.nvme_dir={str(self.folder)!r}: needs {self.nbytes:,} bytes, but only {free + used:,} are free;"
                " make room, or choose another folder"
            )

    def matches(self, digests: Sequence[str]) -> bool:
        """True if the files have this layout and the checksums of one of these digests (`seal`). Reads all files."""
        manifest = read_manifest(self.folder)
        if not manifest or manifest.digest not in digests or manifest.layout != self.layout:
            return False
        self._digest = manifest.digest if self._checksums() == manifest.checksums else None
        return self._digest is not None

    def allocate(self) -> None:
        """Create the files in full size, so that no later write finds the disk full. Raises OSError."""
        manifest = read_manifest(self.folder)
        for name in set(manifest.files if manifest else ()) - {path.name for path in self.files}:
            (self.folder / name).unlink(missing_ok=True)  # of another mesh
        self._write_manifest(None)
        try:
            for path, size in self.files.items():
                with open(path, "ab") as file:
                    file.truncate(size)
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise self._full(error) from None

    def blocks(self, name: str, leaf: int) -> dict[jax.Device, Block]:
        """Return the block of each device of this process of a stacked array, a leaf of the state of a group."""
        return self._arrays[name][leaf].blocks

    def write_rows(self, name: str, block: Block, x: np.ndarray) -> None:
        """Write a device's shard of a stacked array into the files of all subgroups."""
        for i, values in enumerate(x.reshape(-1, *block.shape)):
            self._view((name, i), block, "r+")[...] = values

    def read_rows(self, name: str, block: Block) -> np.ndarray:
        """Read a device's shard of a stacked array, as `write_rows` takes it."""
        self.flush()
        return np.concatenate([self._view((name, i), block, "r") for i in range(self.groups[name].num_subgroups)])

    def put(self, name: str, i: int, state: Tree) -> None:
        """Write the state of a subgroup behind; block while MAX_PENDING_WRITES are pending. Raises OSError."""
        while len(self._pending_writes) >= MAX_PENDING_WRITES:
            self._pending_writes.popleft().result()
        self._last_writes[name, i] = self._writer.submit(self._write, (name, i), state)
        self._pending_writes.append(self._last_writes[name, i])

    def update(self, update: dict[str, Update], carry: Any) -> Any:
        """Call update[name](carry, state, i) for every subgroup and write its new state; -> the carry.

        Returns before the last writes are done; the next read of a subgroup waits for its write. Raises OSError.
        """
        if self._digest:
            self._write_manifest(None)
        read_ahead = self._reader.submit(self._read, self.subgroups[0])
        for (name, i), following in zip(self.subgroups, [*self.subgroups[1:], None], strict=True):
            state = read_ahead.result()
            if following:
                read_ahead = self._reader.submit(self._read, following)
            carry, state = update[name](carry, state, i)
            self.put(name, i, state)
        return carry

    def flush(self) -> None:
        """Wait until everything is written. Raises OSError."""
        for future in self._last_writes.values():
            future.result()

    def seal(self) -> str:
        """Flush, fsync and checksum the files, and write the manifest; -> its digest (see `matches`)."""
        self.flush()
        if not self._digest:
            for path in self.files:
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
            self._write_manifest(self._checksums())
        return self._digest

    def close(self) -> None:
        for pool in self._reader, self._writer:
            pool.shutdown(cancel_futures=True)

    def _read(self, subgroup: tuple[str, int]) -> Tree:
        name, _ = subgroup
        if subgroup in self._last_writes:
            self._last_writes[subgroup].result()
        arrays = []
        for array in self._arrays[name]:
            values = {block: np.array(self._view(subgroup, block, "r")) for block in set(array.blocks.values())}
            shards = [jax.device_put(values[block], device) for device, block in array.blocks.items()]
            arrays.append(jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards))
        return jax.tree.unflatten(jax.tree.structure(self.groups[name].state), arrays)

    def _write(self, subgroup: tuple[str, int], state: Tree) -> None:
        for array, x in zip(self._arrays[subgroup[0]], jax.tree.leaves(state), strict=True):
            owned = [shard for shard in x.addressable_shards if array.blocks[shard.device].device == shard.device]
            for shard in owned:
                self._view(subgroup, array.blocks[shard.device], "r+")[...] = np.asarray(shard.data)

    def _view(self, subgroup: tuple[str, int], block: Block, mode: str) -> np.ndarray:
        """Return a block of a file, memory-mapped while the result is alive."""
        return np.memmap(self._path(subgroup, block.device), block.dtype, mode, block.start, block.shape)

    def _path(self, subgroup: tuple[str, int], device: jax.Device) -> Path:
        return self.folder / f"{subgroup[0]}-{subgroup[1]:05d}.{device.id:05d}"

    def _checksums(self) -> dict[str, int]:
        def checksum(path: Path) -> int | None:
            try:
                if path.stat().st_size != self.files[path]:
                    return None
                return zlib.crc32(np.memmap(path, np.uint8, "r"))
            except OSError:
                return None

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # zlib releases the GIL
            return dict(zip((path.name for path in self.files), pool.map(checksum, self.files), strict=True))

    def _full(self, error: OSError) -> OSError:
        return OSError(f"memory.nvme_dir={str(self.folder)!r}: {error.strerror}; make room and start again")

    @property
    def has_invalid_manifest(self) -> bool:
        """True if a manifest exists but cannot be read."""
        return (self.folder / MANIFEST).exists() and read_manifest(self.folder) is None

    def _write_manifest(self, checksums: dict[str, int] | None) -> None:
        """Write the manifest. checksums: of the current files; None: the files are about to become dirty."""
        self._digest = checksums and _sha256(json.dumps(checksums, sort_keys=True).encode())
        names = [path.name for path in self.files]
        manifest = Manifest(model=self.model, layout=self.layout, files=names, digest=self._digest, checksums=checksums)
        try:
            durable.write(self.folder / MANIFEST, manifest.encode())
        except OSError as error:
            raise self._full(error) from None


@contextmanager
def opened(store: Store) -> Iterator[Store]:
    """Yield the store; flush and end its threads with the context. Raises OSError if a write failed."""
    try:
        yield store
        store.flush()
    finally:
        store.close()


def _arrays(group: GroupShape) -> list[Array]:
    """Lay out the arrays of a subgroup in its files, one after the other; replicas share the first device's block."""
    ends: dict[jax.Device, int] = {}
    arrays = []
    for x in jax.tree.leaves(group.state):
        shape = (x.shape[0] // group.num_subgroups, *x.shape[1:])
        like = jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)
        blocks = _blocks(like, ends)
        ends |= {block.device: block.padded_stop for block in blocks.values()}
        arrays.append(Array(like.shape, like.sharding, blocks))
    return arrays


def _blocks(x: jax.ShapeDtypeStruct, starts: dict[jax.Device, int]) -> dict[jax.Device, Block]:
    """Return the block of each device of this process. starts: offset of this array in the file of a device (default
    0)."""
    owners: dict[str, jax.Device] = {}  # index of a shard -> the first device that has it
    blocks: dict[jax.Device, Block] = {}
    indices = x.sharding.addressable_devices_indices_map(x.shape)
    for device, index in sorted(indices.items(), key=lambda d: d[0].id):
        owner = owners.setdefault(str(index), device)
        new = Block(device, starts.get(device, 0), x.sharding.shard_shape(x.shape), np.dtype(x.dtype))
        blocks[device] = new if owner == device else blocks[owner]
    return blocks


def _sizes(arrays: Sequence[Array]) -> dict[jax.Device, int]:
    """Return the size of each device's file of a subgroup."""
    sizes: dict[jax.Device, int] = {}
    for block in (block for array in arrays for block in array.blocks.values()):
        sizes[block.device] = max(sizes.get(block.device, 0), block.padded_stop)
    return sizes
