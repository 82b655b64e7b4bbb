"""Read the weights of a model folder of Hugging Face, array by array: a source of weights (run/sources.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nanotrain_jax.checkpoint import checksums
from nanotrain_jax.checkpoint.safetensors import Tensors, read_json
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import hugging_face, hugging_face_config
from nanotrain_jax.models.hugging_face import Stored
from nanotrain_jax.run.model_config import CONFIG, resolved_model

ROWS = 1 << 12  # of an embedding that are compared at a time


@dataclass(frozen=True)
class Folder:
    """A model folder whose headers are read and match its config.json.

    stored: the tensor of each of our arrays, by path and layer (None: outside layers); constants: arrays that are not
    stored.
    """

    path: Path
    config: Mapping[str, Any]
    kind: str
    model: Model
    tensors: Tensors
    stored: Mapping[tuple[str, int | None], Stored]
    constants: Mapping[tuple[str, int | None], np.ndarray]
    dtype: np.dtype

    def read(self, path: str, layer: int | None, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read one of our arrays, of a stack that of one layer, or a part of it. index: a slice for each dim."""
        if (path, layer) in self.constants:
            return self.constants[path, layer][tuple(index or ())]
        tensor = self.stored[path, layer]
        whole = (slice(None),) * len(tensor.words)
        return hugging_face.part(tensor, path, index or whole, partial(hugging_face.read, tensor, self.tensors.read))

    @property
    def paths(self) -> list[tuple[str, int | None]]:
        """Path and layer of each of our arrays, layer by layer."""
        return [*self.stored, *self.constants]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path -> shape of each of our arrays, layers stacked."""
        model, ours = self.model, hugging_face.ours
        table = ours.table(model).items()
        return {path: (ours.layers_of(model, row),) * row.is_stacked + row.shape for path, row in table}


def opened(path: Path) -> Folder:
    """Read and check the headers of a folder, and of one that we wrote this process's share of its checksums.

    The first process also reads the copy of a tied embedding that a folder may hold.

    Raises ValueError or OSError in one line.
    """
    checksums.check(path, jax.process_index(), jax.process_count())
    config = read_json(path / CONFIG)
    model = resolved_model(hugging_face_config.section(config, str(path / CONFIG)))
    kind, tensors = config["model_type"], Tensors(path)
    found, copy = hugging_face.located(kind, model, tensors.shapes, str(path))
    dtype = tensors.dtype([name for x in found for name in x.pieces], hugging_face_config.dtype_of(config))
    stored = {(name, x.layer): x for x in found for name in x.paths}
    constants = {place: x.astype(dtype) for place, x in hugging_face.constants(model).items()}
    embedding = stored[hugging_face.ours.EMBEDDING, None].name
    if copy and jax.process_index() == 0 and not are_equal(tensors, embedding, copy):
        raise ValueError(
            f"{path}: {copy} is not {embedding}, but config.json says tie_word_embeddings; set that to false, or save "
            "the model again"
        )
    return Folder(path, config, kind, model, tensors, stored, constants, dtype)


def are_equal(tensors: Tensors, first: str, second: str) -> bool:
    """True if two matrices of a folder are the same, bit for bit. Reads some rows at a time."""
    if (tensors.shapes[first], tensors.dtypes[first]) != (tensors.shapes[second], tensors.dtypes[second]):
        return False
    count, _ = tensors.shapes[first]
    parts = [(slice(start, min(start + ROWS, count)), slice(None)) for start in range(0, count, ROWS)]
    return all(tensors.read(first, rows).tobytes() == tensors.read(second, rows).tobytes() for rows in parts)
