"""Write and read the weights of a checkpoint an array of one layer at a time, without a mesh: memory for one array.

Orbax writes a checkpoint of zeros, which takes no space, then tensorstore writes the layers into its arrays: their
chunks are layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from nanotrain_jax.checkpoint import checksums, directory
from nanotrain_jax.checkpoint.conversions import MASTER, PARAMS, were_apart
from nanotrain_jax.checkpoint.read import saved_shapes
from nanotrain_jax.models.parameters import DENSE, LAYERS

CHUNK = 1 << 26  # bytes of a chunk of an array outside layers


def create(
    folder: Path, step: int, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, meta: dict[str, Any]
) -> None:
    """Write a checkpoint of weights alone, all zeros. Raises OSError.

    shapes: path ("ends/embedding_VD") -> shape; meta: plain JSON data.
    """
    zero = np.zeros((), dtype)
    zeros = {PARAMS + path: np.broadcast_to(zero, shape) for path, shape in shapes.items()}
    options = {path: _save_args(path, x) for path, x in zeros.items()}
    by_reference = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, by_reference))
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(_tree(zeros), save_args=_tree(options)), meta=ocp.args.JsonSave(meta)
    )
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        "meta": ocp.JsonCheckpointHandler(),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as files:
        files.save(folder.absolute() / str(step), args=items)


def _save_args(path: str, x: np.ndarray) -> ocp.SaveArgs:
    if not path.startswith((f"{PARAMS}{LAYERS}/", f"{PARAMS}{DENSE}/")):
        return ocp.SaveArgs(chunk_byte_size=CHUNK)
    return ocp.SaveArgs(chunk_byte_size=max(x.nbytes // len(x), 1), shard_axes=(0,))


def _tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested dict of values by path."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return tree


def seal(folder: Path, step: int) -> None:
    """Record the checksums of a checkpoint, once all its arrays are written. Raises OSError."""
    checksums.record(folder, directory.parts(step), folder / directory.SUMS / str(step))


class Weights:
    """The weights of a checkpoint. A path is that of the table of parameters: "layers/mlp/up_DF".

    is_exact: read float32 master weights where there are some, else the weights in the compute dtype.
    """

    def __init__(self, folder: Path, step: int, is_exact: bool = False):
        self.folder, self.step, self.shapes = Path(folder).absolute(), step, saved_shapes(folder, step)
        self.is_apart = were_apart(self.shapes)
        self.parts = (MASTER, PARAMS) if is_exact else (PARAMS,)
        self.opened: dict[str, tensorstore.TensorStore] = {}

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of an array, with all layers."""
        return tuple(self._array(path).shape)

    def read(self, path: str, layer: int | None, index: Sequence[slice] = ()) -> np.ndarray:
        """Read an array, of a stack that of one layer. index: the part of it; ranges for its first dims."""
        array = self._array(path)
        array = array if layer is None else array[layer]
        x = array[tuple(index)].read().result() if index else array.read().result()
        return x.mean(-1, dtype=np.float32).astype(x.dtype) if self.is_apart else x

    def write(self, path: str, layer: int | None, x: np.ndarray) -> None:
        """Write an array, in a stack that of one layer. Raises OSError."""
        array = self._array(path)
        try:
            (array if layer is None else array[layer]).write(x).result()
        except ValueError as error:  # tensorstore's
            code = directory.os_error_code(error)
            raise (OSError(code, str(error)) if code else error) from None

    def _array(self, path: str) -> tensorstore.TensorStore:
        if path not in self.opened:
            base, name = self._place(path)
            kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{base}/"}, "path": f"{name}/"}
            self.opened[path] = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
        return self.opened[path]

    def _place(self, path: str) -> tuple[Path, str]:
        """Return the folder that orbax wrote an array to, and its name there."""
        for part in self.parts:
            name = (part + path).replace("/", ".")
            apart = directory.apart_folder(self.folder, self.step) / name
            if apart.exists():
                return apart, name
            if part + path in self.shapes:
                return self.folder / str(self.step) / "state", name
        raise ValueError(f"checkpoint {self.step} in {self.folder} has no weight {path}; give a run of our decoder")
