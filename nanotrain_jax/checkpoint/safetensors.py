"""Read and write folders of safetensors files, block by block. Needs no JAX.

A folder has model.safetensors, or several files with model.safetensors.index.json, which says which one holds a tensor.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nanotrain_jax.config.values import with_message

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
SHARD = 10**9  # bytes of a file, unless one tensor is larger: so much is in memory at once
MAX_JSON = 1 << 26  # bytes


class Tensors:
    """The tensors of a folder. shapes: of each, by name; dtypes: as in the files, "F32"."""

    def __init__(self, folder: str | Path):
        """Read the headers of all files. Raises ValueError or OSError in one line."""
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.files: dict[str, Path] = {}
        weight_map = self._weight_map()
        names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        for path in [self.folder / name for name in names]:
            self._read_header(path)
        for name, file in (weight_map or {}).items():
            if self.files.get(name, Path()).name != file:
                raise ValueError(f"{self.folder / INDEX}: {file} has no tensor {name}; download both again")

    def _weight_map(self) -> dict[str, str] | None:
        """Return the file of each tensor; None if there is one file."""
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is no folder; give the folder of a model")
        if (self.folder / SINGLE).exists():
            return None
        if not (self.folder / INDEX).exists():
            pickles = sorted(path.name for path in self.folder.glob("pytorch_model*.bin"))
            if pickles:
                raise ValueError(
                    f"{self.folder / pickles[0]} is a pickle, which can run code, and is not read; save the model "
                    "again with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)"
                )
            raise ValueError(f"{self.folder} has neither {SINGLE} nor {INDEX}; give the folder of a model")
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{self.folder / INDEX} has no weight_map; download it again")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{self.folder / INDEX}: {file!r} must be the name of a file in the same folder")
        return weight_map

    def _read_header(self, path: Path) -> None:
        """Read the names, shapes and dtypes of a file."""
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                if name in self.files:
                    raise ValueError(f"{path} has {name}, as {self.files[name].name} has; remove one of them")
                piece = file.get_slice(name)
                self.files[name], self.dtypes[name] = path, piece.get_dtype()
                self.shapes[name] = tuple(piece.get_shape())

    def read(self, name: str, index: Sequence[slice] = ()) -> np.ndarray:
        """Read a tensor, or a block of it: only the bytes of the block. Raises ValueError or OSError."""
        with _opened(self.files[name]) as file:
            return file.get_slice(name)[tuple(index)] if index else file.get_tensor(name)

    def dtype(self, names: Sequence[str], named: str | None) -> np.dtype:
        """Return the dtype that these tensors have in common. named: by config.json. Raises ValueError."""
        known = {name: str(dtype) for name, dtype in DTYPES.items()}
        for name in names:
            found, first = self.dtypes[name], self.dtypes[names[0]]
            if found not in known:
                raise ValueError(f"{self.files[name]}: {name} is {found}; give weights in {', '.join(known.values())}")
            if named is not None and known[found] != named:
                raise ValueError(
                    f"{self.files[name]}: {name} is {known[found]}, but config.json says torch_dtype {named}; correct "
                    "config.json, or save the model again in one dtype"
                )
            if found != first:
                raise ValueError(
                    f"{self.files[name]}: {name} is {known[found]}, but {names[0]} {known[first]}; save the model "
                    "again in one dtype"
                )
        return DTYPES[self.dtypes[names[0]]]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with safetensors, which checks its header and length. Raises ValueError or OSError in one line."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); download it again") from None
    except FileNotFoundError as error:
        raise with_message(error, f"{path} is missing; download it") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping. Raises ValueError or OSError in one line."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(MAX_JSON))
    except OSError as error:
        raise with_message(error, f"{path} cannot be read ({error.strerror}); give the folder of a model") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is a {type(content).__name__}, not a mapping; download it again")
    return content


def write(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, get: Callable[[str], np.ndarray]
) -> None:
    """Write tensors to files of at most SHARD bytes, and their index if there are several. Raises OSError.

    get(name) -> array of that shape and dtype; called in order, and dropped once its file is written.
    """
    shards, total = [[]], 0
    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, shape in shapes.items()}
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > SHARD:
            shards.append([])
        shards[-1].append(name)
        total += size
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file, names in zip(files, shards, strict=True):
        save({name: get(name) for name in names}, folder / file)
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write tensors to one file. Raises OSError."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # it is private
    except SafetensorError as error:  # it has no errno
        raise OSError(errno.EIO, str(error)) from None


def load(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of one file. Raises ValueError or OSError in one line."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file. Raises OSError."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with open(path, "rb") as file:
        os.fsync(file.fileno())
