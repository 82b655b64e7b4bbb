"""Optimizer state on NVMe: memory-mapped files, one per piece and device, streamed through the device in each step.

After ZeRO-Infinity (arXiv 2104.07857, sections 5.2.2 and 6.3). In an update, while the device computes a piece, a
thread reads the next one and another writes the last one:

    reader    read(piece + 1) -> device
    device    weights[piece], state[piece] = update(weights[piece], gradients[piece], state[piece])
    writer    device -> write(piece - 1)

so memory holds a few pieces, whatever the size of the model.

Files hold the state of a step only while they are sealed: a manifest gives their checksums, and their digest is part of
the checkpoint of that step. It is taken away before the first of them changes. So a run that goes on from a checkpoint
takes files that are exactly its own, after it has read them once to see that, and else rebuilds them from the
checkpoint: what a killed process left half written is never used, nor is a manifest with a flipped bit.
"""

from __future__ import annotations

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

from nanotrain_jax.runtime import durable

Tree = Any  # a pytree of arrays
Update = Callable[[Any, Tree, int], tuple[Any, Tree]]  # (what it changes, state of a piece, its number) -> the same

AT_A_TIME = 2  # pieces that wait to be written
ALIGN = 4096  # bytes
MANIFEST = "manifest.json"


class Stack(NamedTuple):
    """Arrays that are cut alike. state: ShapeDtypeStructs, stacked; count: equal parts of each device's rows."""

    state: Tree
    count: int


class Block(NamedTuple):
    """Where a device's part of an array lies in the file of a piece."""

    device: jax.Device  # whose file it is: the first that has it
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def stop(self) -> int:
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def padded_stop(self) -> int:
        """Where the next block of the file begins."""
        return -(-self.stop // ALIGN) * ALIGN


class Array(NamedTuple):
    """An array of a piece: what it is, and for each device its block."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    blocks: dict[jax.Device, Block]


class Manifest(BaseModel):
    """What is known of the files in a folder.

    model, layout: as `Store` takes them. checksums: CRC-32 of each file, digest: of all checksums; both None while the
    files change.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    model: dict[str, Any]
    layout: dict[str, Any]
    files: list[str]
    digest: str | None
    checksums: dict[str, int | None] | None

    def encode(self) -> bytes:
        """-> a line of JSON, and one with its SHA-256."""
        body = self.model_dump_json().encode()
        return body + b"\n" + _sha256(body).encode() + b"\n"


def decode(content: bytes) -> Manifest | None:
    """What `Manifest.encode` gave; None if a bit of it has changed, or if it is anything else."""
    body, _, checksum = content.partition(b"\n")
    if checksum != _sha256(body).encode() + b"\n":
        return None
    try:
        return Manifest.model_validate_json(body)
    except ValidationError:
        return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Store:
    """The files, and the threads that read and write them; to be used within `opened`. For runs of one process."""

    def __init__(self, folder: str | Path, stacks: dict[str, Stack], model: dict[str, Any], layout: dict[str, Any]):
        """Nothing is written yet. model, layout: plain data that say of which model the state is, and all that decides
        what lies in which file.

        Raises ValueError if the folder has files of another model, or this is one of several processes; OSError if
        there is no room.
        """
        if jax.process_count() > 1:
            raise ValueError(
                f"memory.offload_optimizer=nvme with {jax.process_count()} processes: files are of one process; "
                "use memory.offload_optimizer=host, or one process for all GPUs of a machine"
            )
        self.folder, self.stacks, self.model, self.layout = Path(folder), stacks, model, layout
        self.pieces = [(name, i) for name, stack in stacks.items() for i in range(stack.count)]
        self._arrays = {name: _arrays(stack) for name, stack in stacks.items()}
        self._manifest = self.folder / MANIFEST
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._written: dict[tuple[str, int], Future] = {}
        self._leaving: deque[Future] = deque()
        self._digest: str | None = None
        self.files = {
            self._path(piece, device): size
            for piece in self.pieces
            for device, size in _sizes(self._arrays[piece[0]]).items()
        }
        self.nbytes = sum(self.files.values())
        self._check()

    def _check(self) -> None:
        there = self._read_manifest()
        keys = [key for key in self.model if there and self.model[key] != there.model.get(key)]
        if keys:
            raise ValueError(
                f"memory.nvme_dir={str(self.folder)!r} holds the state of another model (another {', '.join(keys)}); "
                "choose another folder, or remove it"
            )
        ours = {*(path.name for path in self.files), *(there.files if there else ())}
        have = sum((self.folder / name).stat().st_blocks * 512 for name in ours if (self.folder / name).exists())
        free = shutil.disk_usage(next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())).free
        if free + have < self.nbytes:
            raise OSError(
                f"memory.nvme_dir={str(self.folder)!r} has {free + have:,} bytes free and {self.nbytes:,} are needed; "
                "make room, or choose another folder"
            )

    def holds(self, digest: str | None) -> bool:
        """Whether the files are whole, laid out alike, and those that `seal` gave this digest. Reads all of them."""
        there = self._read_manifest()
        if not there or digest is None or there.digest != digest or there.layout != self.layout:
            return False
        self._digest = digest if self._checksums() == there.checksums else None
        return self._digest is not None

    def make(self) -> None:
        """Make the files, of their full size, so that the disk cannot be full later. Raises OSError."""
        there = self._read_manifest()
        for name in set(there.files if there else ()) - {path.name for path in self.files}:
            (self.folder / name).unlink(missing_ok=True)  # of another mesh
        self._write_manifest(None)
        try:
            for path, size in self.files.items():
                with open(path, "ab") as file:
                    file.truncate(size)
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise self._refuse(error) from None

    def fill(self, name: str, number: int, x: np.ndarray) -> None:
        """Write a stacked array, the number-th of the leaves of a stack, into all its pieces."""
        for block, index in self._shards(name, number):
            for i, values in enumerate(x[index].reshape(-1, *block.shape)):
                self._view((name, i), block, "r+")[...] = values

    def stacked(self, name: str, number: int) -> np.ndarray:
        """The array that `fill` takes."""
        self.settle()
        like = jax.tree.leaves(self.stacks[name].state)[number]
        x = np.empty(like.shape, like.dtype)
        for block, index in self._shards(name, number):
            rows = x[index]  # a view
            for i, part in enumerate(np.split(rows, self.stacks[name].count)):
                part[...] = self._view((name, i), block, "r")
        return x

    def _shards(self, name: str, number: int) -> Iterator[tuple[Block, tuple]]:
        """Each block of an array, with what it is of the stacked one: all pieces of a device's rows."""
        like = jax.tree.leaves(self.stacks[name].state)[number]
        for device, index in like.sharding.devices_indices_map(like.shape).items():
            block = self._arrays[name][number].blocks[device]
            if block.device == device:
                yield block, index

    def put(self, name: str, i: int, state: Tree) -> None:
        """Write the state of a piece, in the background, once fewer than AT_A_TIME wait. Raises OSError."""
        while len(self._leaving) >= AT_A_TIME:
            self._leaving.popleft().result()
        self._written[name, i] = self._writer.submit(self._write, (name, i), state)
        self._leaving.append(self._written[name, i])

    def update(self, update: dict[str, Update], changing: Any) -> Any:
        """-> what is changing, after update[name](changing, state, i) of every piece, whose new state is written.

        Returns before the last pieces are written; the next read of each waits for that. Raises OSError.
        """
        if self._digest:
            self._write_manifest(None)
        coming = self._reader.submit(self._read, self.pieces[0])
        for (name, i), following in zip(self.pieces, [*self.pieces[1:], None], strict=True):
            state = coming.result()
            if following:
                coming = self._reader.submit(self._read, following)
            changing, state = update[name](changing, state, i)
            self.put(name, i, state)
        return changing

    def settle(self) -> None:
        """Wait until everything is written. Raises OSError."""
        for future in self._written.values():
            future.result()

    def seal(self) -> str:
        """-> digest of the files as they are now, which `holds` knows again until they change."""
        self.settle()
        if not self._digest:
            for path in self.files:
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
            self._write_manifest(self._checksums())
        return self._digest

    def close(self) -> None:
        """Wait for the threads."""
        for pool in self._reader, self._writer:
            pool.shutdown(cancel_futures=True)

    def _read(self, piece: tuple[str, int]) -> Tree:
        name, _ = piece
        if piece in self._written:
            self._written[piece].result()
        arrays = []
        for array in self._arrays[name]:
            values = {block: np.array(self._view(piece, block, "r")) for block in set(array.blocks.values())}
            shards = [jax.device_put(values[block], device) for device, block in array.blocks.items()]
            arrays.append(jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards))
        return jax.tree.unflatten(jax.tree.structure(self.stacks[name].state), arrays)

    def _write(self, piece: tuple[str, int], state: Tree) -> None:
        for array, x in zip(self._arrays[piece[0]], jax.tree.leaves(state), strict=True):
            own = [shard for shard in x.addressable_shards if array.blocks[shard.device].device == shard.device]
            for shard in own:
                self._view(piece, array.blocks[shard.device], "r+")[...] = np.asarray(shard.data)

    def _view(self, piece: tuple[str, int], block: Block, mode: str) -> np.ndarray:
        """The block in its file, mapped as long as the result lives."""
        return np.memmap(self._path(piece, block.device), block.dtype, mode, block.start, block.shape)

    def _path(self, piece: tuple[str, int], device: jax.Device) -> Path:
        return self.folder / f"{piece[0]}-{piece[1]:05d}.{device.id:05d}"

    def _checksums(self) -> dict[str, int]:
        def one(path: Path) -> int | None:
            try:
                if path.stat().st_size != self.files[path]:
                    return None
                return zlib.crc32(np.memmap(path, np.uint8, "r"))
            except OSError:
                return None

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # zlib lets others run meanwhile
            return dict(zip((path.name for path in self.files), pool.map(one, self.files), strict=True))

    def _refuse(self, error: OSError) -> OSError:
        return OSError(f"memory.nvme_dir={str(self.folder)!r}: {error.strerror}; make room and start again")

    @property
    def damaged(self) -> bool:
        """Whether there is a manifest that cannot be used."""
        return self._manifest.exists() and self._read_manifest() is None

    def _read_manifest(self) -> Manifest | None:
        try:
            return decode(self._manifest.read_bytes())
        except OSError:  # if the folder is unusable, whoever makes it says so
            return None

    def _write_manifest(self, checksums: dict[str, int] | None) -> None:
        """Checksums: of the files as they are; None: they are about to change."""
        self._digest = checksums and _sha256(json.dumps(checksums, sort_keys=True).encode())
        names = [path.name for path in self.files]
        manifest = Manifest(model=self.model, layout=self.layout, files=names, digest=self._digest, checksums=checksums)
        try:
            durable.write(self._manifest, manifest.encode())
        except OSError as error:
            raise self._refuse(error) from None


@contextmanager
def opened(store: Store) -> Iterator[Store]:
    """The same; its threads end with the context. Raises OSError if something could not be written."""
    try:
        yield store
        store.settle()
    finally:
        store.close()


def _arrays(stack: Stack) -> list[Array]:
    """How the arrays of a piece lie in its files: one after the other, what several devices have in the first's."""
    ends: dict[jax.Device, int] = {}
    arrays = []
    for x in jax.tree.leaves(stack.state):
        like = jax.ShapeDtypeStruct((x.shape[0] // stack.count, *x.shape[1:]), x.dtype, sharding=x.sharding)
        blocks = _blocks(like, ends)
        ends |= {block.device: block.padded_stop for block in blocks.values()}
        arrays.append(Array(like.shape, like.sharding, blocks))
    return arrays


def _blocks(x: jax.ShapeDtypeStruct, starts: dict[jax.Device, int]) -> dict[jax.Device, Block]:
    """-> the block of each device. starts: where that of an array begins in the file of a device (0 by default)."""
    owners: dict[str, jax.Device] = {}  # part of the array -> the first device that has it
    blocks: dict[jax.Device, Block] = {}
    for device, index in sorted(x.sharding.devices_indices_map(x.shape).items(), key=lambda d: d[0].id):
        owner = owners.setdefault(str(index), device)
        new = Block(device, starts.get(device, 0), x.sharding.shard_shape(x.shape), np.dtype(x.dtype))
        blocks[device] = new if owner == device else blocks[owner]
    return blocks


def _sizes(arrays: Sequence[Array]) -> dict[jax.Device, int]:
    """The size of each device's file of a piece."""
    sizes: dict[jax.Device, int] = {}
    for block in (block for array in arrays for block in array.blocks.values()):
        sizes[block.device] = max(sizes.get(block.device, 0), block.padded_stop)
    return sizes
