"""Read the weights of a model folder of Hugging Face, in any layout of a mesh.

Every device, and so every process, reads only the bytes that it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from nanotrain_jax.checkpoint import directory
from nanotrain_jax.checkpoint.safetensors import Tensors, read_json
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import hugging_face, hugging_face_config
from nanotrain_jax.models.hugging_face import Stored
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.run.model_config import CONFIG, resolved_model


@dataclass(frozen=True)
class Folder:
    """A model folder whose headers are read and match its config.json.

    stored: the tensor of each of our arrays, by path and layer (None: outside layers); constants: arrays that are not
    stored; copy: the name of a copy of the tied embedding, if there is one.
    """

    path: Path
    config: Mapping[str, Any]
    kind: str
    model: Model
    tensors: Tensors
    stored: Mapping[tuple[str, int | None], Stored]
    constants: Mapping[tuple[str, int | None], np.ndarray]
    copy: str | None
    dtype: np.dtype

    def read(self, path: str, layer: int | None, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read one of our arrays, of a stack that of one layer, or a part of it. index: a slice for each dim."""
        if (path, layer) in self.constants:
            return self.constants[path, layer][tuple(index or ())]
        tensor = self.stored[path, layer]
        whole = (slice(None),) * len(tensor.words)
        return hugging_face.part(tensor, path, index or whole, partial(self.tensors.read, tensor.name))

    @property
    def paths(self) -> list[tuple[str, int | None]]:
        """Path and layer of each of our arrays, layer by layer."""
        return [*self.stored, *self.constants]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path -> shape of each of our arrays, layers stacked."""
        table = hugging_face.ours.table(self.model)
        return {path: (self.model.num_layers,) * row.is_stacked + row.shape for path, row in table.items()}


def opened(path: Path) -> Folder:
    """Read and check the headers of a folder. Raises ValueError or OSError in one line."""
    config = read_json(path / CONFIG)
    model = resolved_model(hugging_face_config.section(config, str(path / CONFIG)))
    kind, tensors = config["model_type"], Tensors(path)
    found, copy = hugging_face.located(kind, model, tensors.shapes, str(path))
    dtype = tensors.dtype([x.name for x in found], hugging_face_config.dtype_of(config))
    stored = {(name, x.layer): x for x in found for name in x.paths}
    constants = {place: x.astype(dtype) for place, x in hugging_face.constants(model).items()}
    return Folder(path, config, kind, model, tensors, stored, constants, copy, dtype)


def weights(folder: Folder, like: Tree, order: np.ndarray | None) -> Tree:
    """Read the weights onto the shardings of like (ShapeDtypeStructs), each array in its dtype.

    order: the layer of each row of a stack; None: model order. Rows of padding are zero. The host holds one
    block of one array at a time; a block that several devices of this process have is read once.
    """
    order = np.arange(folder.model.num_layers) if order is None else order

    def array(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        name, owners = directory.path_name(path), defaultdict(list)
        for device, index in x.sharding.addressable_devices_indices_map(x.shape).items():
            bounds = tuple(s.indices(size)[:2] for s, size in zip(index, x.shape, strict=True))
            owners[bounds].append(SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind))
        shards = []
        for bounds, where in owners.items():
            block = _block(folder, name, [slice(*bound) for bound in bounds], order).astype(x.dtype, copy=False)
            shards += jax.block_until_ready([jax.device_put(block, one) for one in where])
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.tree_util.tree_map_with_path(array, like)


def _block(folder: Folder, path: str, index: Sequence[slice], order: np.ndarray) -> np.ndarray:
    """Read a block of an array; rows beyond those of the folder are zero."""
    block = np.zeros([s.stop - s.start for s in index], folder.dtype)
    rows, inner = index[0], index[1:]
    if path.startswith(f"{LAYERS}/"):
        layers = enumerate(order[rows])
        for row, layer in [(row, int(layer)) for row, layer in layers if layer < folder.model.num_layers]:
            block[row] = folder.read(path, layer, inner)
        return block
    stop = min(rows.stop, folder.shapes[path][0])
    if rows.start < stop:
        block[: stop - rows.start] = folder.read(path, None, [slice(rows.start, stop), *inner])
    return block
