"""Find a checkpoint, see that it is whole, and read it: the state, onto any mesh; or the weights alone, onto none.

A checkpoint that cannot be read never ends a run while an older one can: `newest` falls back and reports why. A
checkpoint that is whole but holds another tree is not damaged; that error says which arrays differ.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from nanotrain_jax.config import Checkpoint, Config
from nanotrain_jax.processes import PASSING, everyone, may_pass, refuse, together
from nanotrain_jax.runtime import checksums, request
from nanotrain_jax.runtime.checkpoint import (
    SUMS,
    apart_folder,
    finished,
    latest_step,
    os_error_code,
    path_name,
    shapes,
)
from nanotrain_jax.runtime.compatibility import Meta

T = TypeVar("T")
CANDIDATES = 50  # newest checkpoints that are tried
NAMED_AT_MOST = 3  # arrays in an error message
OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)  # of this process, not of the checkpoint


class Unreadable(ValueError):
    """A checkpoint cannot be read: its files are missing or damaged. reason: of that, in a few words."""

    def __init__(self, folder: str | Path, step: int, reason: str):
        super().__init__(f"checkpoint {step} in {folder} is damaged: {reason}")
        self.reason = reason


def agree(config: Checkpoint) -> Path | None:
    """Return what `find` returns, once all processes see the same newest checkpoint.

    Raises ValueError if they do not within `checksums.LAG` seconds.
    """
    for waited in range(checksums.LAG + 1):
        folder = together(lambda: find(config))
        seen = everyone(f"step {latest_step(folder)} in {folder}" if folder else "none")
        if len(set(seen)) == 1:
            return folder
        time.sleep(waited < checksums.LAG)
    other = next(i for i, text in enumerate(seen) if text != seen[0])
    refuse(
        f"the newest checkpoint that process 0 sees is {seen[0]}, and process {other} {seen[other]}; "
        "choose a logging.dir on a disk that all hosts share"
    )


def find(config: Checkpoint) -> Path | None:
    """The folder of checkpoints that `resume` asks for; None: begin at step 0.

    The run's own checkpoints come before another run's, so that a run that began from a path can be restarted by the
    same command. Raises ValueError if there is nothing at a given path, or if this run would mix with another.
    """
    own = latest_step(config.dir)
    if own is not None:
        if config.resume == "never":
            raise ValueError(
                f"checkpoint.dir={config.dir!r} already holds step {own}, which checkpoint.resume=never would mix with "
                "another run; use checkpoint.resume=auto to go on, or another checkpoint.dir (or logging.dir)"
            )
        return Path(config.dir)
    if config.resume in ("auto", "never"):
        return None
    if latest_step(config.resume) is None:
        raise ValueError(
            f"checkpoint.resume={config.resume!r} holds no finished checkpoint; give a folder that does, auto or never"
        )
    return Path(config.resume)


def newest(folder: str | Path, verify: bool, use: Callable[[int], T]) -> tuple[int, T, dict[int, str]]:
    """-> the newest whole checkpoint of a folder, use(its step), and what is wrong with newer ones.

    A checkpoint is whole if its files equal their checksums and use(step) does not raise Unreadable. verify=False, and
    one without checksums (its run ended before they were made), leave it to use(step).
    All processes return the same. Raises ValueError if no checkpoint is whole, and what else use(step) raises.
    """
    damaged: dict[int, str] = {}
    for step in json.loads(everyone(json.dumps(finished(folder)[:CANDIDATES]))[0]):
        problem, used = _damage(folder, step) if verify else "", None
        if not problem:
            used, problem = _attempt(use, step)
        if not problem:
            return step, used, damaged
        damaged[step] = problem
    problems = "; ".join(f"checkpoint {step}: {problem}" for step, problem in damaged.items())
    refuse(
        f"no checkpoint in {folder} is whole: {problems}; start again in another logging.dir"
        + ", or use checkpoint.verify=false to resume from damaged files" * verify
    )


def _damage(folder: str | Path, step: int) -> str:
    """What is wrong with the files of a checkpoint, on any process; "" if nothing.

    Each process compares its share of the files with their checksums. Where there are none, reading the state tells,
    and arrays that were written one at a time, which are not read with it, are read once.
    """
    root = Path(folder).absolute()
    sums, mine = root / SUMS / str(step), (jax.process_index(), jax.process_count())
    if not all(everyone("recorded" if checksums.recorded(sums) else "")):
        found = _unreadable_apart(folder, step)
    else:
        found = checksums.damage(root, sums, *mine)
    return next(filter(None, everyone(found)), "")


def _unreadable_apart(folder: str | Path, step: int) -> str:
    """Why an array that was written one at a time cannot be read; "" if all can."""
    try:
        with _readable(folder, step), ocp.StandardCheckpointer(multiprocessing_options=_alone()) as files:
            for where in sorted(apart_folder(folder, step).glob("*")):
                files.restore(where, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), _metadata(where)))
    except Unreadable as error:
        return error.reason
    return ""


def _attempt(use: Callable[[int], T], step: int) -> tuple[T | None, str]:
    """-> use(step), and why the checkpoint is unreadable on any process ("" if it is not)."""
    used, problem = None, ""
    try:
        used = use(step)
    except Unreadable as error:
        problem = error.reason
    return used, next(filter(None, everyone(problem)), "")


def _alone() -> ocp.options.MultiprocessingOptions:
    """Read without waiting for other processes: where one of them cannot, all fall back, and none hangs."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process{index}"
    )


def read_meta(folder: str | Path, step: int) -> Meta:
    """What was saved beside the state. Raises Unreadable."""
    options = ocp.CheckpointManagerOptions(create=False, read_only=True, multiprocessing_options=_alone())
    with _readable(folder, step), ocp.CheckpointManager(Path(folder).absolute(), options=options) as manager:
        return Meta.model_validate(manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta)


def read_state(folder: str | Path, step: int, abstract: Any, is_padded: Callable[[str], bool]) -> Any:
    """Read the arrays of a checkpoint that abstract asks for -> a tree like abstract.

    abstract: ShapeDtypeStructs with shardings, of a mesh that may differ from the one that saved; None for what is not
    to be read. Arrays whose path ("params/ends/embedding_VD") is_padded may have been saved with more or fewer rows:
    they are cut, or filled up with zeros. Raises Unreadable if files are missing or damaged, ValueError if the
    checkpoint holds other arrays or shapes.
    """
    wanted = dict(_leaves(abstract))
    state = Path(folder).absolute() / str(step) / "state"
    with _readable(folder, step):
        stored = {state: _metadata(state)}
        for path in wanted.keys() - shapes(stored[state]).keys():
            apart = apart_folder(folder, step) / path.replace("/", ".")
            if apart.exists():
                stored[apart] = _metadata(apart)
    have = {path: shape for tree in stored.values() for path, shape in shapes(tree).items()}
    differences = _differences(wanted, have, _unread(abstract), is_padded)
    if differences:
        raise ValueError(
            f"checkpoint {step} in {folder} has other arrays: {differences}; resume with the same model, or start "
            "again in another logging.dir"
        )
    found: dict[str, Any] = {}
    for where, tree in stored.items():
        with _readable(folder, step):
            found |= _restore(where, tree, wanted)
    return jax.tree_util.tree_map_with_path(lambda path, _: found[path_name(path)], abstract)


def _unread(abstract: Any) -> list[str]:
    """Paths of the parts of a tree that are None."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract, is_leaf=lambda x: x is None)
    return [path_name(path) for path, x in leaves if x is None]


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    return ((path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree))


def _metadata(where: Path) -> Any:
    """The tree of what was saved to a folder, with a description of each array."""
    with ocp.StandardCheckpointer(multiprocessing_options=_alone()) as files:
        return files.metadata(where).item_metadata.tree


def _restore(where: Path, tree: Any, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """Path -> array, of those in a saved tree that are wanted."""
    asked = jax.tree_util.tree_map_with_path(lambda path, _: wanted.get(path_name(path)), tree)
    if not jax.tree.leaves(asked):
        return {}
    with ocp.StandardCheckpointer(multiprocessing_options=_alone()) as files:
        return dict(_leaves(files.restore(where, asked, strict=False)))


def _differences(
    wanted: dict[str, Any], have: dict[str, tuple[int, ...]], unread: list[str], is_padded: Callable[[str], bool]
) -> str:
    """How the arrays of a checkpoint differ from those that are wanted, in a few words; "" if they fit."""

    def is_other(path: str) -> bool:
        first = int(is_padded(path))  # of the dims that must agree
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
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def load_params(folder: str | Path, step: int | None = None) -> tuple[Any, Config]:
    """Load the weights of a run -> {"ends": ..., "layers": ...} as NumPy arrays, and the config that made them.

    folder: of a run (with checkpoints/ in it) or of checkpoints. step: None is the newest whole checkpoint. Needs no
    mesh, whatever the layout of the run was. Arrays are whole, in the run's compute dtype; those of layers carry a
    leading dim of layers, in the order of the model; a padded vocabulary (`config.padded_vocab`) stays padded. The
    config is resolved. Raises ValueError or OSError if there is no such checkpoint, or none that is whole.
    """
    inside = Path(folder) / "checkpoints"
    folder = inside if latest_step(inside) is not None else Path(folder)
    steps = finished(folder)
    if not steps:
        raise ValueError(f"{folder} holds no finished checkpoint; give the folder of a run, or of its checkpoints")
    if step is None:
        _, loaded, _ = newest(folder, True, lambda number: _weights(folder, number))
        return loaded
    if step not in steps:
        raise ValueError(f"{folder} holds no checkpoint of step {step}; use {' or '.join(map(str, reversed(steps)))}")
    problem = _damage(folder, step)
    if problem:
        raise Unreadable(folder, step, problem)
    return _weights(folder, step)


def _weights(folder: str | Path, step: int) -> tuple[Any, Config]:
    """The parameters of one checkpoint on the host, and its config. Raises Unreadable, or ValueError (the config)."""
    meta = read_meta(folder, step)
    where = Path(folder).absolute() / str(step) / "state"
    with _readable(folder, step), ocp.PyTreeCheckpointer() as files:
        params = {"params": _metadata(where)["params"]}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), params)
        asked = ocp.args.PyTreeRestore(params, restore_args=as_numpy, partial_restore=True)
        found = files.restore(where, args=asked)["params"]
    return found, request.parse(meta.config)


@contextmanager
def _readable(folder: str | Path, step: int) -> Iterator[None]:
    """Turn what orbax, tensorstore and pydantic raise for missing or damaged files into Unreadable."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError):  # of a device, another process or this machine
        raise
    except Exception as error:
        code = os_error_code(error)
        if may_pass(error) or code in PASSING or code in OURS:
            raise
        text = " ".join(str(error).split())[:100]
        raise Unreadable(folder, step, f"it cannot be read ({type(error).__name__}: {text})") from None
