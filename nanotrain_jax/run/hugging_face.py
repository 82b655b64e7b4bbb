"""Read a model folder of Hugging Face: its config, and its weights in any layout of a mesh.

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
from nanotrain_jax.config import load as configs
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.config.values import expanded
from nanotrain_jax.data.batches import TOKENIZER
from nanotrain_jax.models import hugging_face
from nanotrain_jax.models.hugging_face import Stored
from nanotrain_jax.models.parameters import LAYERS
from nanotrain_jax.parallel.collectives import Tree

CONFIG, PREFIX = "config.json", "hf:"
ONE_DEVICE = {"pipe": 1, "replica": 1, "data": 1, "context": 1, "tensor": 1}
PLANNED_TOKENS = 4096  # data.seq_len of a plan without a config, at most


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


def resolved_model(section: Mapping[str, Any]) -> Model:
    """Return a section model with every size. Raises ValueError."""
    return resolve(configs.parse({"model": section, "data": {"seq_len": 1}}), ONE_DEVICE).model


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


def folder_of(resume: str | None) -> Path | None:
    """Return the folder of a value hf:FOLDER of checkpoint.resume; None for others."""
    is_one = isinstance(resume, str) and resume.startswith(PREFIX)
    return Path(expanded(resume.removeprefix(PREFIX))) if is_one else None


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """Load a config as `config.load.load`, with the model of checkpoint.resume=hf:FOLDER. path: as of `read`."""
    return configs.finish(read(path, overrides), path)


def read(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a config as `config.load.read`, with the model of checkpoint.resume=hf:FOLDER.

    path: a YAML file, hf:FOLDER or a config.json: then training starts from the weights of the folder.
    """
    source = Path(path) if Path(path).name == CONFIG else folder_of(path)
    if source is None:
        return _completed(configs.read(path, overrides))
    folder = source.parent if source.name == CONFIG else source
    model = hugging_face.section(read_json(folder / CONFIG), str(folder / CONFIG))
    tokens = min(resolved_model(model).max_seq_len, PLANNED_TOKENS)
    tree = {"model": model, "data": {"seq_len": tokens}, "checkpoint": {"resume": f"{PREFIX}{folder}"}}
    return _completed(configs.nested(overrides, tree))


def _completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a config with the model that checkpoint.resume=hf:FOLDER has, and its tokenizer.

    Raises ValueError if a key of model contradicts it.
    """
    folder = folder_of((tree.get("checkpoint") or {}).get("resume"))
    if folder is None:
        return tree
    known = hugging_face.section(read_json(folder / CONFIG), str(folder / CONFIG))
    if not isinstance(tree.get("model") or {}, dict):
        return tree  # `parse` says what is wrong
    given = {key: value for key, value in (tree.get("model") or {}).items() if value is not None}
    whole = resolved_model(known)
    free = set() if whole.features.learned_positions else {"max_seq_len"}
    for key, value in given.items():
        theirs = getattr(whole, key) if key in known or key == "factory" else value
        if key not in free and value != theirs:
            raise ValueError(
                f"model.{key}={value}, but {folder / CONFIG} says {theirs}; leave model.{key} out, or start from "
                "other weights (checkpoint.resume)"
            )
    return tree | {"model": known | given, "data": _with_tokenizer(tree.get("data"), folder)}


def _with_tokenizer(data: Any, folder: Path) -> Any:
    """Return the section data with the tokenizer of a folder, if it names none and reads text."""
    keys = data or {}
    if not isinstance(keys, dict) or keys.get("tokenizer") is not None or not (folder / TOKENIZER).is_file():
        return data
    is_text = str(keys.get("source", "stdlib")).partition(":")[0] in ("stdlib", "text")
    return keys | {"tokenizer": str(folder / TOKENIZER)} if is_text else data
