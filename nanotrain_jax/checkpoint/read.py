"""Find, verify and restore checkpoints: the state onto any mesh, or the weights alone without a mesh.

If a checkpoint cannot be read, `newest` falls back to an older one and reports why. An intact checkpoint with another
tree of arrays is not damaged; that error names the arrays that differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from nanotrain_jax.checkpoint import checksums, conversions, directory, starting_point
from nanotrain_jax.checkpoint.compatibility import Meta
from nanotrain_jax.config import load
from nanotrain_jax.config.schema import Config
from nanotrain_jax.distributed import processes
from nanotrain_jax.distributed.processes import all_gather_text, on_all_processes, raise_on_all
from nanotrain_jax.models.parameters import LAYERS

T = TypeVar("T")
MAX_NAMED = 3  # arrays named in an error message


class Unreadable(ValueError):
    """A checkpoint cannot be read: its files are missing or damaged. reason: why, in a few words."""

    def __init__(self, folder: str | Path, step: int, reason: str):
        super().__init__(f"checkpoint {step} in {folder} is damaged: {reason}")
        self.reason = reason


def newest(
    folder: str | Path, verify: bool, use: Callable[[int], T], steps: Sequence[int] | None = None
) -> tuple[int, T, dict[int, str]]:
    """Find the newest intact checkpoint -> its step, use(step), {newer damaged step: what is wrong}.

    steps: where to look, newest first; None: all.

    A checkpoint is intact if its files match their checksums and use(step) does not raise Unreadable. With
    verify=False, or without checksums (the run ended before they were written), only use(step) decides. All processes
    return the same. Raises ValueError if no checkpoint is intact, and other exceptions of use(step).
    """
    damaged: dict[int, str] = {}
    steps = directory.finished(folder)[: starting_point.CANDIDATES] if steps is None else steps
    for step in json.loads(all_gather_text(json.dumps(steps))[0]):
        problem, result = _damage(folder, step) if verify else "", None
        if not problem:
            result, problem = _attempt(use, step)
        if not problem:
            return step, result, damaged
        damaged[step] = problem
    problems = "; ".join(f"checkpoint {step}: {problem}" for step, problem in damaged.items())
    raise_on_all(
        f"no checkpoint in {folder} is intact: {problems}; start again in another logging.dir"
        + ", or use checkpoint.verify=false to resume from damaged files" * verify
    )


def _damage(folder: str | Path, step: int) -> str:
    """Return what is wrong with the files of a checkpoint, on any process; "" if nothing.

    Each process verifies the checksums of its share of the files. Without checksums, reading the state detects damage;
    arrays written one at a time are not part of that, so they are read here once.
    """
    root = Path(folder).absolute()
    sums, share = root / directory.SUMS / str(step), (jax.process_index(), jax.process_count())
    if not all(all_gather_text("recorded" if checksums.recorded(sums) else "")):
        problem = _unreadable_apart(folder, step)
    else:
        problem = on_all_processes(lambda: checksums.damage(root, sums, *share))
    return next(filter(None, all_gather_text(problem)), "")


def _unreadable_apart(folder: str | Path, step: int) -> str:
    """Read this process's share of the arrays written one at a time -> why one cannot be read; "" if all can."""
    own, count = jax.process_index(), jax.process_count()
    try:
        with _readable(folder, step), ocp.StandardCheckpointer(multiprocessing_options=_alone()) as files:
            for where in sorted(directory.apart_folder(folder, step).glob("*"))[own::count]:
                files.restore(where, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), _metadata(where)))
    except Unreadable as error:
        return error.reason
    return ""


def _attempt(use: Callable[[int], T], step: int) -> tuple[T | None, str]:
    """Return use(step), and why the checkpoint is unreadable on any process ("" if it is not)."""
    result, problem = None, ""
    try:
        result = use(step)
    except Unreadable as error:
        problem = error.reason
    return result, next(filter(None, all_gather_text(problem)), "")


def _alone() -> ocp.options.MultiprocessingOptions:
    """Options to read without waiting for other processes: if one of them fails, all fall back and none hangs."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process{index}"
    )


def read_meta(folder: str | Path, step: int) -> Meta:
    """Read the metadata of a checkpoint. Raises Unreadable."""
    options = ocp.CheckpointManagerOptions(create=False, read_only=True, multiprocessing_options=_alone())
    with _readable(folder, step), ocp.CheckpointManager(Path(folder).absolute(), options=options) as manager:
        return Meta.model_validate(manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta)


def read_state(
    folder: str | Path, step: int, abstract: Any, is_padded: Callable[[str], bool], weights_only: bool = False
) -> Any:
    """Restore the arrays of a checkpoint onto the shardings of abstract -> a tree like abstract.

    abstract: ShapeDtypeStructs with shardings, on a mesh that may differ from the saved one; None: do not read. Arrays
    for whose path ("params/ends/embedding_VD") is_padded is true may have been saved with more or fewer rows (padding
    of the vocabulary or of layers): they are truncated, or padded with zeros. Arrays of replicas that step apart may
    have been saved for another number of them (checkpoint/conversions.py). weights_only: as if the checkpoint held no
    more. Raises Unreadable if files are missing or damaged, ValueError if the checkpoint has other arrays or shapes.
    """
    wanted = dict(_leaves(abstract))
    state = Path(folder).absolute() / str(step) / "state"
    with _readable(folder, step):
        stored = {state: _metadata(state)}
        names = {*wanted, *map(conversions.master_of, wanted)} if weights_only else {*wanted}
        for path in names - directory.shapes(stored[state]).keys():
            apart = directory.apart_folder(folder, step) / path.replace("/", ".")
            if apart.exists():
                stored[apart] = _metadata(apart)
    have = {path: shape for tree in stored.values() for path, shape in directory.shapes(tree).items()}
    have = conversions.weights_of(have) if weights_only else have
    sources = {path: conversions.source(path, x, have, weights_only) for path, x in wanted.items()}
    needed = {source.path: source.array for source in sources.values() if source}
    differences = _differences(needed, have, [*unread(abstract), *wanted], is_padded)
    if differences:
        raise ValueError(
            f"checkpoint {step} in {folder} has other arrays: {differences}; resume with the same model, or start "
            "again in another logging.dir"
        )
    as_saved = {path: x for path, x in wanted.items() if sources[path] == conversions.Source(path, x)}
    arrays: dict[str, Any] = {}
    for where, tree in stored.items():
        with _readable(folder, step):
            arrays |= _restore(where, tree, as_saved)
    for path in wanted.keys() - as_saved.keys():  # one at a time: a device holds all replicas of one array
        with _readable(folder, step):
            arrays[path] = _convert(path, sources[path], stored, wanted[path])
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[directory.path_name(path)], abstract)


class Saved(NamedTuple):
    """A checkpoint in a folder."""

    folder: Path
    step: int
    weights_only: bool = False  # of what it holds only these are wanted

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `saved_shapes`."""
        return saved_shapes(self.folder, self.step)

    def state(self, abstract: Any, is_padded: Callable[[str], bool]) -> Any:
        """See `read_state`."""
        return read_state(self.folder, self.step, abstract, is_padded, self.weights_only)


def saved_shapes(folder: str | Path, step: int) -> dict[str, tuple[int, ...]]:
    """Return the path and shape of each array of a checkpoint's state. Raises Unreadable."""
    with _readable(folder, step):
        return directory.shapes(_metadata(Path(folder).absolute() / str(step) / "state"))


def unread(abstract: Any) -> list[str]:
    """Return the paths of the None leaves of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract, is_leaf=lambda x: x is None)
    return [directory.path_name(path) for path, x in leaves if x is None]


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a tree."""
    return ((directory.path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree))


def _metadata(where: Path) -> Any:
    """Return the tree saved in a folder, with the metadata of each array as leaves."""
    with ocp.StandardCheckpointer(multiprocessing_options=_alone()) as files:
        return files.metadata(where).item_metadata.tree


def _restore(where: Path, tree: Any, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """Restore the wanted arrays of a saved tree -> {path: array}."""
    requested = jax.tree_util.tree_map_with_path(lambda path, _: wanted.get(directory.path_name(path)), tree)
    if not jax.tree.leaves(requested):
        return {}
    with ocp.StandardCheckpointer(multiprocessing_options=_alone()) as files:
        return dict(_leaves(files.restore(where, requested, strict=False)))


def _convert(
    path: str, source: conversions.Source | None, stored: dict[Path, Any], wanted: jax.ShapeDtypeStruct
) -> jax.Array:
    """Restore an array that is not as saved. stored: the trees of the checkpoint, by folder."""
    if source is None:
        return conversions.zeros(wanted)
    read = {}
    for where, tree in stored.items():
        read |= _restore(where, tree, {source.path: source.array})
    return conversions.convert(path, read[source.path], wanted, source.was_apart)


def _differences(
    wanted: dict[str, Any], have: dict[str, tuple[int, ...]], unread: list[str], is_padded: Callable[[str], bool]
) -> str:
    """Return how saved arrays differ from the wanted ones, in a few words; "" if they match."""

    def is_other(path: str) -> bool:
        first = int(is_padded(path))  # first dim that must match
        shape = tuple(wanted[path].shape)
        return (len(have[path]), have[path][first:]) != (len(shape), shape[first:])

    def is_unread(path: str) -> bool:
        return any(path == name or path.startswith(f"{name}/") for name in unread)

    groups = {
        "missing": sorted(wanted.keys() - have.keys()),
        "extra": sorted(path for path in have.keys() - wanted.keys() if not is_unread(path)),
        "of another shape": [
            f"{path} {list(have[path])}, not {list(wanted[path].shape)}"
            for path in sorted(wanted.keys() & have.keys())
            if is_other(path)
        ],
    }
    return "; ".join(f"{what} {_few(names)}" for what, names in groups.items() if names)


def _few(names: list[str]) -> str:
    """Join the first names, and the number of further ones."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def load_params(folder: str | Path, step: int | None = None) -> tuple[Any, Config]:
    """Load the weights of a run -> {"ends": ..., "layers": ...} as NumPy arrays, and the resolved config.

    folder: a run's folder (with checkpoints/ in it) or a checkpoint folder. step: None: the newest intact checkpoint.
    Needs no mesh, whatever the layout of the run was. Arrays are unsharded, in the run's compute dtype; those of layers
    have a leading layer dim, in model order; a padded vocabulary (`derived.padded_vocab`) stays padded. Of replicas
    that stepped apart: the mean of their weights. Of a run with train.lora: the adapters alone. Raises ValueError or
    OSError if there is no such checkpoint, or no intact one.
    """
    return of_run(folder, step, _weights)


def of_run(folder: str | Path, step: int | None, use: Callable[[Path, int], T]) -> T:
    """Return use(folder of checkpoints, step) of the newest intact checkpoint of a run, or of that step.

    folder: a run's folder (with checkpoints/ in it) or a checkpoint folder. Raises ValueError or OSError if there is no
    such checkpoint, or no intact one.
    """
    checkpoints = directory.of_run(folder)
    steps = directory.finished(checkpoints)
    if not steps:
        raise ValueError(f"{folder} holds no finished checkpoint; give the folder of a run or of its checkpoints")
    if step is None:
        _, used, _ = newest(checkpoints, True, lambda number: use(checkpoints, number))
        return used
    if step not in steps:
        stored = " or ".join(map(str, reversed(steps)))
        raise ValueError(f"{checkpoints} holds no checkpoint of step {step}; use {stored}")
    problem = _damage(checkpoints, step)
    if problem:
        raise Unreadable(checkpoints, step, problem)
    return use(checkpoints, step)


def _weights(folder: str | Path, step: int) -> tuple[Any, Config]:
    """Load the parameters of one checkpoint to the host, and its config. Raises Unreadable, or ValueError (config)."""
    meta = read_meta(folder, step)
    where = Path(folder).absolute() / str(step) / "state"
    with _readable(folder, step), ocp.PyTreeCheckpointer() as files:
        saved = _metadata(where)
        params = {"params": saved["params"]}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), params)
        requested = ocp.args.PyTreeRestore(params, restore_args=as_numpy, partial_restore=True)
        weights = files.restore(where, args=requested)["params"]
    config = load.parse(meta.config)
    if conversions.were_apart(directory.shapes(saved)):
        weights = jax.tree.map(lambda w: w.mean(-1, dtype=np.float32).astype(w.dtype), weights)
    weights[LAYERS] = jax.tree.map(lambda w: w[: config.model.main_layers], weights[LAYERS])  # without padding
    return weights, config


@contextmanager
def _readable(folder: str | Path, step: int) -> Iterator[None]:
    """Turn exceptions of orbax, tensorstore and pydantic for missing or damaged files into Unreadable."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError):  # failure of a device, another process or this machine
        raise
    except Exception as error:
        code = directory.os_error_code(error)
        if processes.is_transient(error) or code in (*processes.TRANSIENT_ERRNOS, *checksums.OURS):
            raise
        text = " ".join(str(error).split())[:100]
        raise Unreadable(folder, step, f"it cannot be read ({type(error).__name__}: {text})") from None
