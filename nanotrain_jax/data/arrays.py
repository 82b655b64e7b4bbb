"""Rows of named arrays in memory-mapped files, for `data.source=arrays:DIR`: pictures, inputs, targets, ...

A folder (`write`, `read`) contains
    train/NAME.npy, val/NAME.npy   an array of a batch; its first dim is rows: inputs, targets int32 [R T], ...
    meta.json                      format, vocab_size, SHA-256 of each file; what else the writer says, e.g. the words;
                                   picture_places: the places of a row before its text, if they are for a picture

Targets below 0 are ignored. Arrays that no model asks for may be there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanotrain_jax.data import corpus
from nanotrain_jax.data.stored import mapped_array

FORMAT = "nanotrain_jax arrays 1"
SIDES = "train", "val"
TOKENS = "inputs", "targets"
Row = dict[str, np.ndarray]  # one row of each array


class Rows:
    """Random access to rows: item i is row i of each array, by name."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = dict(arrays)
        self.count = len(self.arrays["inputs"])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Row:
        return {name: np.asarray(array[int(i)]) for name, array in self.arrays.items()}

    def only(self, names: list[str]) -> Rows:
        """Return the rows of these arrays."""
        return Rows({name: self.arrays[name] for name in names})


class Folder(NamedTuple):
    """What `read` finds. fingerprint identifies the content of all files; picture_places: None if not said."""

    train: Rows
    val: Rows
    vocab_size: int
    fingerprint: str
    picture_places: int | None


def write(folder: Path, sides: Mapping[str, Mapping[str, np.ndarray]], vocab_size: int, about: dict[str, Any]) -> None:
    """Write a folder atomically. sides: "train" and "val" -> arrays by name. about: further entries of meta.json.

    Raises ValueError if the folder exists, OSError if it cannot be written.
    """
    with corpus.new_folder(folder) as partial:
        sums = {}
        for path, array in {f"{side}/{name}.npy": sides[side][name] for side in SIDES for name in sides[side]}.items():
            (partial / path).parent.mkdir(exist_ok=True)
            np.save(partial / path, array)
            sums[path] = corpus.digest(partial / path)
        meta = {"format": FORMAT, "vocab_size": vocab_size, "sha256": sums} | about
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def read(folder: Path, seq_len: int, verify: bool = True) -> Folder:
    """Memory-map a folder. Raises ValueError if it is incomplete, was modified (with verify), or does not fit."""
    source, remedy = f"data.source='arrays:{folder}'", "create it again (scripts/examples/make_shapes.py is an example)"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']!r}, not {FORMAT!r}")
        vocab_size, sums = int(meta["vocab_size"]), {str(path): str(digest) for path, digest in meta["sha256"].items()}
        places = int(meta["picture_places"]) if "picture_places" in meta else None
    except FileNotFoundError:
        raise ValueError(f"{source} has no meta.json; {remedy}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise ValueError(f"{source} is damaged ({error!r}); {remedy}") from None
    for path, digest in sums.items() if verify else ():
        if not (folder / path).is_file() or corpus.digest(folder / path) != digest:
            raise ValueError(f"{folder}/{path} is missing or does not match meta.json: it was modified; {remedy}")
    train, val = (_open(folder / side, seq_len, f"{source}: {side}/", remedy) for side in SIDES)
    if not len(train):
        raise ValueError(f"{source} has no training rows; {remedy}")
    if verify and max(int(side.arrays[name].max(initial=0)) for side in (train, val) for name in TOKENS) >= vocab_size:
        raise ValueError(f"{source} has tokens from vocab_size={vocab_size} on; {remedy}")
    fingerprint = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]
    return Folder(train, val, vocab_size, fingerprint, places)


def _open(folder: Path, seq_len: int, name: str, remedy: str) -> Rows:
    """Memory-map the files of a side. Raises ValueError."""
    found = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            found[path.stem] = mapped_array(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{name}{path.name} cannot be read ({error}); {remedy}") from None
    for tokens in TOKENS:
        if tokens not in found:
            raise ValueError(f"{name}{tokens}.npy is missing; {remedy}")
        array = found[tokens]
        if array.dtype != np.int32 or array.ndim != 2:
            raise ValueError(f"{name}{tokens}.npy is {_kind(array)}; must be int32 [rows tokens]; {remedy}")
        if array.shape[1] != seq_len:
            raise ValueError(
                f"{name}{tokens}.npy has {array.shape[1]} tokens in a row, but data.seq_len={seq_len}; use "
                f"data.seq_len={array.shape[1]}"
            )
    if len({len(array) if array.ndim else 0 for array in found.values()}) != 1:
        sizes = ", ".join(f"{stem} {_kind(array)}" for stem, array in found.items())
        raise ValueError(f"{name} has arrays with different numbers of rows ({sizes}); {remedy}")
    return Rows(found)


def check(rows: Rows, shapes: Mapping[str, Any], source: str) -> None:
    """Raise ValueError unless there is each array of a batch, with rows of its shape and dtype.

    shapes: name -> ShapeDtypeStruct of the whole batch (`Step.batch`).
    """
    for name, wanted in shapes.items():
        if name not in rows.arrays:
            raise ValueError(
                f"data.source={source!r} has no {name}.npy, which the model reads; it has "
                f"{', '.join(sorted(rows.arrays))}; add the file"
            )
        array = rows.arrays[name]
        if array.shape[1:] != wanted.shape[1:] or array.dtype != wanted.dtype:
            rule = f"{np.dtype(wanted.dtype)} [rows {' '.join(map(str, wanted.shape[1:]))}]"
            raise ValueError(f"data.source={source!r}: {name}.npy is {_kind(array)}, but the model reads {rule}")


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} [{' '.join(map(str, array.shape))}]"
