"""Read the weights of a model folder of Hugging Face, in any layout of a mesh.

Every device, and so every process, reads only the bytes that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nanotrain_jax.checkpoint import directory
from nanotrain_jax.checkpoint.safetensors import Tensors, read_json
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import hugging_face
from nanotrain_jax.models.hugging_face import Stored
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.run.model_config import CONFIG, resolved_model


@dataclass(frozen=True)
class Folder:
    """A model folder whose headers are read and match its config.json.

    stored: the tensor of each of our arrays, by path and layer (None: outside layers); copy: the name of a copy of the
    tied embedding, if there is one.
    """

    path: Path
    config: Mapping[str, Any]
    kind: str
    model: Model
    tensors: Tensors
    stored: Mapping[tuple[str, int | None], Stored]
    copy: str | None
    dtype: np.dtype

    def read(self, path: str, layer: int | None, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read one of our arrays, of a stack that of one layer, or a part of it. index: a slice for each dim."""
        tensor = self.stored[path, layer]
        whole = (slice(None),) * len(tensor.words)
        return hugging_face.part(tensor, path, index or whole, partial(self.tensors.read, tensor.name))

    @property
    def paths(self) -> list[tuple[str, int | None]]:
        """Path and layer of each of our arrays, layer by layer."""
        return list(self.stored)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path -> shape of each of our arrays, layers stacked."""
        table = hugging_face.ours.table(self.model)
        return {path: (self.model.num_layers,) * row.is_stacked + row.shape for path, row in table.items()}


def opened(path: Path) -> Folder:
    """Read and check the headers of a folder. Raises ValueError or OSError in one line."""
    config = read_json(path / CONFIG)
    model = resolved_model(hugging_face.section(config, str(path / CONFIG)))
    kind, tensors = config["model_type"], Tensors(path)
    found, copy = hugging_face.located(kind, model, tensors.shapes, str(path))
    dtype = tensors.dtype([x.name for x in found], hugging_face.dtype_of(config))
    stored = {(name, x.layer): x for x in found for name in x.paths}
    return Folder(path, config, kind, model, tensors, stored, copy, dtype)


def weights(folder: Folder, like: Tree, order: np.ndarray | None) -> Tree:
    """Read the weights onto the shardings of like (ShapeDtypeStructs), each array in its dtype.

    order: the layer of each row of a stack; None: model order. Rows of padding are zero.
    """

    def array(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        read = _Blocks(folder, directory.path_name(path), x, order)
        return jax.make_array_from_callback(x.shape, x.sharding, read)

    return jax.tree_util.tree_map_with_path(array, like)


class _Blocks:
    """Reads blocks of an array, each once: several devices may hold the same one."""

    def __init__(self, folder: Folder, path: str, like: jax.ShapeDtypeStruct, order: np.ndarray | None):
        self.folder, self.path, self.like = folder, path, like
        self.is_stacked = path.startswith(f"{LAYERS}/")
        self.order = np.arange(folder.model.num_layers) if order is None else order
        self.seen: dict[tuple, np.ndarray] = {}

    def __call__(self, index: tuple[slice, ...]) -> np.ndarray:
        ranges = tuple(s.indices(size)[:2] for s, size in zip(index, self.like.shape, strict=True))
        if ranges not in self.seen:
            self.seen[ranges] = self.block([slice(*r) for r in ranges])
        return self.seen[ranges]

    def block(self, index: list[slice]) -> np.ndarray:
        """Read a block; rows beyond those of the folder are zero."""
        block = np.zeros([s.stop - s.start for s in index], self.like.dtype)
        if self.is_stacked:
            layers = enumerate(self.order[index[0]])
            for row, layer in [(row, layer) for row, layer in layers if layer < self.folder.model.num_layers]:
                block[row] = self.folder.read(self.path, int(layer), index[1:])
            return block
        (rows, *_) = self.folder.shapes[self.path]
        stop = min(index[0].stop, rows)
        if index[0].start < stop:
            x = self.folder.read(self.path, None, [slice(index[0].start, stop), *index[1:]])
            block[: len(x)] = x
        return block
