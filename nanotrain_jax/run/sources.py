"""Where weights come from, array by array and layer by layer: a model folder, a checkpoint, or a base with adapters.

Every device, and so every process, reads only the bytes that it holds (`on_mesh`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from nanotrain_jax.checkpoint import base as bases
from nanotrain_jax.checkpoint import by_layer, directory
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint.compatibility import Base
from nanotrain_jax.config import load as configs
from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.models import decoder_table
from nanotrain_jax.models.parameters import DENSE
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.run import hugging_face

Index = Sequence[slice]


class Source(Protocol):
    """Weights of a decoder."""

    model: Model  # resolved, without adapters
    dtype: np.dtype

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """Read an array by its path in the table, of a stack that of one layer. index: a part of it, a slice a dim."""


class Checkpoint:
    """The weights of a checkpoint. is_exact: its float32 master weights, if it has some."""

    def __init__(self, folder: Path, step: int, is_exact: bool = False):
        self.meta = restore.read_meta(folder, step)
        self.config: Config = configs.parse(self.meta.config)
        self.model = self.config.model.model_copy(update={"lora": None})
        self.dtype = jnp.dtype(self.config.precision.compute)
        self.weights = by_layer.Weights(folder, step, is_exact)
        self.rows = {path: row.shape[0] for path, row in decoder_table.table(self.model).items() if row.is_padded}

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """As of `Source`; without rows of padding."""
        rows = (slice(self.rows[path]),) if path in self.rows else ()
        return self.weights.read(path, layer, index or rows)


class Adapted:
    """A base with adapters (train.lora): weights are W + scale A B, summed in float32.

    folder, step: of the checkpoint with the adapters. dtype: None: that of the base.
    """

    def __init__(self, base: Source, folder: Path, step: int, dtype: np.dtype | None = None):
        adapters = Checkpoint(folder, step, is_exact=True)
        self.base, self.model, self.dtype = base, base.model, dtype or base.dtype
        self.lora, self.weights = adapters.config.model.lora, adapters.weights
        self.pairs = decoder_table.adapter_paths(adapters.config.model)

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """As of `Source`."""
        w = self.base.read(path, layer, index).astype(self.dtype, copy=False)
        if path not in self.pairs:
            return w
        of_a, of_b = self.pairs[path]
        inputs = len(self.weights.shape(of_a)) - 2  # beside the dims of layers and rank
        index = [*(index or [slice(None)] * w.ndim)]
        a = self.weights.read(of_a, layer, [*index[:inputs], slice(None)]).astype(np.float32)
        b = self.weights.read(of_b, layer, [slice(None), *index[inputs:]]).astype(np.float32)
        return (w.astype(np.float32) + np.float32(self.lora.scale) * np.tensordot(a, b, 1)).astype(w.dtype)


def of_run(folder: Path, step: int, is_exact: bool = False) -> Source:
    """Return the weights of a checkpoint, of one that holds adapters those of its base with them. is_exact: in float32,
    where there are master weights. Raises ValueError or OSError."""
    base = restore.read_meta(folder, step).base
    if base is None:
        return Checkpoint(folder, step, is_exact)
    return Adapted(of_base(base), folder, step, np.dtype("float32") if is_exact else None)


def of_base(base: Base, moved_to: Path | None = None) -> Source:
    """Open the base of adapters, as it was when they were trained. moved_to: where a model folder is now.

    Raises ValueError or OSError.
    """
    folder = moved_to if moved_to and base.step is None else Path(base.folder)
    if not folder.is_dir():
        raise ValueError(f"the base of these adapters, {base.name}, is not there; put it back, or link it there")
    bases.check(base, folder)
    return hugging_face.opened(folder) if base.step is None else Checkpoint(folder, base.step)


def on_mesh(source: Source, like: Tree, order: np.ndarray | None) -> Tree:
    """Read weights onto the shardings of like (ShapeDtypeStructs), each array in its dtype.

    order: the layer of each row of a stack; None: model order. Rows of padding are zero. The host holds one
    block of one array at a time; a block that several devices of this process have is read once.
    """
    order = np.arange(source.model.main_layers) if order is None else order
    table = decoder_table.table(source.model)
    rows = {path: row.shape[0] for path, row in table.items() if not row.is_stacked}
    rows |= {path: np.arange(source.model.dense_layers) for path, row in table.items() if row.part == DENSE}

    def array(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        name, owners = directory.path_name(path), defaultdict(list)
        for device, index in x.sharding.addressable_devices_indices_map(x.shape).items():
            bounds = tuple(s.indices(size)[:2] for s, size in zip(index, x.shape, strict=True))
            owners[bounds].append(SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind))
        shards = []
        for bounds, where in owners.items():
            index = [slice(*bound) for bound in bounds]
            block = _block(source, name, index, rows.get(name, order))
            block = block.astype(x.dtype, copy=False)
            shards += jax.block_until_ready([jax.device_put(block, one) for one in where])
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.tree_util.tree_map_with_path(array, like)


def _block(source: Source, path: str, index: Index, order: np.ndarray | int) -> np.ndarray:
    """Read a block of an array; rows beyond those of the source are zero. order: of its layers, or where it is not
    stacked the number of rows."""
    block = np.zeros([s.stop - s.start for s in index], source.dtype)
    rows, inner = index[0], index[1:]
    if isinstance(order, np.ndarray):
        count = source.model.dense_layers if path.startswith(f"{DENSE}/") else source.model.main_layers
        for row, layer in [(row, int(layer)) for row, layer in enumerate(order[rows]) if layer < count]:
            block[row] = source.read(path, layer, inner)
        return block
    stop = min(rows.stop, order)
    if rows.start < stop:
        block[: stop - rows.start] = source.read(path, None, [slice(rows.start, stop), *inner])
    return block
