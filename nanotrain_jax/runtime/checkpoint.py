"""Checkpoints by orbax: asynchronous, sharded, atomic; the state, the position in the data and the resolved config.

A checkpoint is written under a temporary name and renamed when it is whole, so a run that is killed at any moment
leaves the previous one usable. State that is too large to be in memory at a time (runtime/nvme.py) is written first,
one array at a time, to a folder beside it; it counts once the checkpoint does, and goes with it. Checksums are made of
its files once it is whole, in the background, and compared before it is used: orbax does not see a flipped bit.

Every process writes and checks its part; folders are of all of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nanotrain_jax.config import Checkpoint, Config
from nanotrain_jax.processes import PASSING, everyone, may_pass, refuse, together
from nanotrain_jax.runtime import checksums

Save = Callable[..., None]  # see `writing`
# Folders in a folder of checkpoints:
APART = "arrays"  # <step>/<path of an array>
SUMS = "checksums"  # <step>/, see checksums.py
DAMAGED = "damaged"  # <step>/<step>, as it was found

FINISHED = "_CHECKPOINT_METADATA"  # a file that is in each checkpoint
REMOVED = ".removed"
UNFINISHED = r"\d+\.(removed|orbax-checkpoint-tmp.*)"
MOST = 50  # checkpoints that are looked at
LONGEST = 4 * 3600  # seconds to write one


@contextmanager
def alone(key: str, folder: str | Path) -> Iterator[None]:
    """Within, no other run writes to this folder, which exists. Raises OSError, naming the key, if one does now, or if
    it is not the same folder for all processes.
    """
    path, index = Path(folder) / f".{key}.lock", jax.process_index()
    mark = everyone(uuid.uuid4().hex)[0]
    with ExitStack() as held:

        def take() -> None:
            lock = held.enter_context(open(path, "a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however that ends
            except BlockingIOError:
                raise OSError(f"{folder} is in use by another run; stop it, or choose another {key}") from None
            except OSError as error:
                text = f"{folder} cannot be locked ({error.strerror}); mount its file system with locks (Lustre: flock)"
                raise OSError(f"{text}, or choose another {key}") from None
            path.write_text(mark)

        def see() -> None:
            until = time.monotonic() + checksums.LAG
            while not (path.exists() and path.read_text() == mark):
                if time.monotonic() > until:
                    text = f"{folder} of process {index} is not that of process 0"
                    raise OSError(f"{text}; choose a {key} on a disk that all hosts share")
                time.sleep(1)

        together(take if index == 0 else lambda: None)
        together(see)
        yield


@contextmanager
def writing(config: Checkpoint) -> Iterator[Save]:
    """Yields save(step, state, meta, apart, apart_bytes); meta: plain JSON data.

    It returns once the state is copied, so that it may be donated, and writes in the background; leaving waits for the
    last one. apart: trees like state, each of one array and None for the rest, which are made, written and dropped one
    after the other before it returns. Raises OSError, here or at the next save, if something cannot be written.
    """
    root = Path(config.dir).absolute()
    # (orbax's manager, which keeps the newest by itself, waits for all processes before it tells that one has failed.)
    files = ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(), async_options=ocp.options.AsyncOptions(timeout_secs=LONGEST)
    )
    background, written = ThreadPoolExecutor(1), Future()
    written.set_result(None)

    def full(reason: str) -> OSError:
        newest = latest_step(config.dir)
        rest = "the beginning" if newest is None else f"step {newest}"
        return OSError(
            f"no checkpoint can be written to {config.dir}: {reason}; make room and start again: "
            f"the run goes on from {rest}"
        )

    @contextmanager
    def disk_errors():
        try:
            yield
        except Exception as error:
            # What the disk says reaches us as a ValueError of tensorstore.
            found = re.search(r"os_error_code='(\d+)'", str(error))
            code = int(found[1]) if found else getattr(error, "errno", None)
            if code is None or code in PASSING:
                raise
            raise full(os.strerror(code)) from None

    def save(step: int, state: Any, meta: dict[str, Any], apart: Iterable[Any] = (), apart_bytes: int = 0) -> None:
        nonlocal written
        with disk_errors():
            written.result()
        need = (sum(x.nbytes for x in jax.tree.leaves(state)) + apart_bytes) * 11 // 10 + (1 << 20)
        together(lambda: room(need))
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        for tree in apart:
            with disk_errors(), ocp.StandardCheckpointer() as one:
                one.save(_apart(config.dir, step) / next(iter(_shapes(tree))).replace("/", "."), tree)
            del tree  # before the next one is made
        with disk_errors():
            files.save(root / str(step), args=items, force=True)
            if not config.asynchronous:
                files.wait_until_finished()
        written = background.submit(finish, step)

    def finish(step: int) -> None:
        files.wait_until_finished()
        checksums.record(root, _parts(step), root / SUMS / str(step), jax.process_index(), jax.process_count())
        for old in _finished(root)[config.keep :] if jax.process_index() == 0 else ():
            (root / str(old)).rename(root / f"{old}{REMOVED}")  # what is half removed is no checkpoint
            shutil.rmtree(root / f"{old}{REMOVED}", ignore_errors=True)

    def room(need: int) -> None:
        if jax.process_index() == 0:
            clean()
            if shutil.disk_usage(root).free < need:
                raise full(f"it needs {need:,} bytes and {shutil.disk_usage(root).free:,} are free")

    def clean() -> None:
        """Remove what is of checkpoints that are no more, or never came to be."""
        keep = {str(number) for number in _finished(root)}
        unfinished = (path for path in root.glob("*") if re.fullmatch(UNFINISHED, path.name))
        for folder in [*unfinished, *(root / APART).glob("*"), *(root / SUMS).glob("*")]:
            if folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)

    def close() -> None:
        background.shutdown()
        with suppress(Exception):
            files.close()
            if jax.process_index() == 0:
                clean()

    try:
        yield save
        with disk_errors():
            written.result()
    except BaseException:
        if jax.process_count() > 1:
            raise  # what follows would wait for processes that may never come
        close()
        raise
    close()


def agree(config: Checkpoint) -> Path | None:
    """-> what `find` says, once all processes see the same newest checkpoint. Raises ValueError if they never do."""
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


def choose(folder: str | Path, verify: bool) -> tuple[int, dict[int, str]]:
    """-> the newest finished checkpoint in a folder that is whole, and what is wrong with newer ones.

    All processes come to the same. One that has no checksums (its run ended before they were made) is taken as whole;
    verify=False takes the newest. Raises ValueError if there is none.
    """
    root, damaged = Path(folder).absolute(), {}
    for step in json.loads(everyone(json.dumps(_finished(folder)[:MOST]))[0]):
        sums = root / SUMS / str(step)
        check = checksums.recorded(sums) and verify
        mine = jax.process_index(), jax.process_count()
        found = everyone(checksums.damage(root, sums, *mine) if check else "")
        if not any(found):
            return step, damaged
        damaged[step] = next(filter(None, found))
    refuse(
        f"no checkpoint in {folder} is whole: {'; '.join(damaged.values())}; begin anew in another logging.dir, or use "
        "checkpoint.verify=false to go on from damaged files"
    )


def set_aside(folder: str | Path, steps: Iterable[int]) -> None:
    """Move damaged checkpoints out of the way, to <folder>/damaged. Raises OSError."""
    root = Path(folder).absolute()

    def move() -> None:
        for step in map(str, steps):
            shutil.rmtree(root / DAMAGED / step, ignore_errors=True)
            for part in (step, f"{APART}/{step}", f"{SUMS}/{step}"):
                if (root / part).exists():
                    (root / DAMAGED / step / part).parent.mkdir(parents=True, exist_ok=True)
                    (root / part).rename(root / DAMAGED / step / part)

    together(move if jax.process_index() == 0 else lambda: None)


def find(config: Checkpoint) -> Path | None:
    """The folder of the checkpoint that `resume` asks for (see `choose`); None: begin anew.

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


def latest_step(folder: str | Path) -> int | None:
    """The newest finished checkpoint in a folder, or None."""
    return next(iter(_finished(folder)), None)


def _finished(folder: str | Path) -> list[int]:
    """The finished checkpoints in a folder, newest first."""
    folder = Path(folder).absolute()
    steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
    return sorted((s for s in steps if (folder / str(s) / FINISHED).exists()), reverse=True)


def _parts(step: int) -> tuple[str, str]:
    """The folders of a checkpoint's files, below that of all checkpoints."""
    return str(step), f"{APART}/{step}"


def read(
    folder: str | Path,
    step: int,
    abstract: Any,
    accept: Callable[[dict[str, Any]], None],
    is_padded: Callable[[str], bool],
) -> tuple[Any, dict[str, Any]]:
    """-> state, meta, after accept(meta), which may raise, has agreed that it is of this model. See `read_state`."""
    options = ocp.CheckpointManagerOptions(create=False, read_only=True)
    with ocp.CheckpointManager(Path(folder).absolute(), options=options) as manager, _readable(folder, step):
        meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
    accept(meta)
    return read_state(folder, step, abstract, is_padded), meta


def read_state(folder: str | Path, step: int, abstract: Any, is_padded: Callable[[str], bool]) -> Any:
    """-> what abstract asks for: ShapeDtypeStructs with shardings, of a mesh that may be another than it was saved
    from; None: not now.

    Arrays whose path ("params/ends/embedding_VD") is_padded may have been saved with more or fewer rows: they are cut,
    or filled up with zeros. Raises ValueError if the checkpoint cannot be read or has other shapes.
    """
    wanted = _shapes(abstract)

    def read(where: Path) -> Any:
        with _readable(folder, step), ocp.StandardCheckpointer() as files:
            stored = _shapes(files.metadata(where).item_metadata.tree)
        for path, shape in stored.items():
            first = int(is_padded(path))  # of the dims that must agree
            if path in wanted and (len(shape), shape[first:]) != (len(wanted[path]), wanted[path][first:]):
                raise ValueError(
                    f"checkpoint {step} in {folder} has {path} of shape {shape}, this run of {wanted[path]}; "
                    "resume with the same model, or begin anew in another logging.dir"
                )
        asked = jax.tree_util.tree_map_with_path(lambda path, x: x if _name(path) in stored else None, abstract)
        if not jax.tree.leaves(asked):
            return asked
        with _readable(folder, step), ocp.StandardCheckpointer() as files:
            return files.restore(where, asked, strict=False)

    found = read(Path(folder).absolute() / str(step) / "state")
    for path in wanted.keys() - _shapes(found).keys():
        more = read(_apart(folder, step) / path.replace("/", "."))
        found = jax.tree.map(lambda x, y: y if x is None else x, found, more, is_leaf=lambda x: x is None)
    return found


@contextmanager
def _readable(folder: str | Path, step: int) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError:  # of a device, or another process
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds for files that are missing or damaged
        if may_pass(error):
            raise
        raise ValueError(
            f"checkpoint {step} in {folder} cannot be read ({type(error).__name__}: {str(error)[:200]}); "
            f"remove {Path(folder) / str(step)} to go on from the one before"
        ) from None


def _apart(folder: str | Path, step: int) -> Path:
    return Path(folder).absolute() / APART / str(step)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {_name(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def check(meta: dict[str, Any], config: Config, tokenizer: str | None) -> None:
    """Raise ValueError unless the checkpoint is of this model and tokenizer; both configs resolved."""
    if tokenizer != meta["tokenizer"]:
        raise ValueError(
            f"the data's tokenizer is {tokenizer} but the checkpoint was trained with {meta['tokenizer']}; "
            "resume with the same tokenizer, or begin anew in another logging.dir"
        )
    now, then = config.to_dict(), meta["config"]
    for section, key in [*(("model", key) for key in now["model"] if key != "attention"), ("precision", "compute")]:
        if now[section][key] != then[section].get(key):
            raise ValueError(
                f"{section}.{key}={now[section][key]} but the checkpoint was trained with {then[section].get(key)}; "
                f"resume with the same {section}, or begin anew in another logging.dir"
            )
