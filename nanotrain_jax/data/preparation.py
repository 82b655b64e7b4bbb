"""Writing a token folder: shards in parallel, resumable, appendable. Needs no JAX.

    plan.json   which input each new shard has: written first, removed when header.json tells of the new shards

A preparation that finds a plan.json of its input continues it: shards that are finished and whole stay. What one has
follows from the plan alone, so any number of workers and hosts writes the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from nanotrain_jax.data import corpus, shards, spans, text_files, token_folder
from nanotrain_jax.data import tokenizer as tokenizers
from nanotrain_jax.data.shards import Finished, Place
from nanotrain_jax.data.spans import Span
from nanotrain_jax.data.text_files import Field
from nanotrain_jax.data.token_folder import HEADER, PLAN, Header
from nanotrain_jax.data.tokenizer import Tokenizer


class Plan(BaseModel):
    """plan.json. shards: the spans of input of each new one; first: its number; preparation: identifies the input, the
    tokenizer and the split. held_out_below: texts with a smaller hash are held
    out; None: a single small shard chooses it (`shards.threshold`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    preparation: str
    first: int
    val_fraction: float
    held_out_below: int | None
    shards: list[list[Span]]

    @property
    def cut(self) -> set[Path]:
        """Files whose text is cut into documents."""
        return {Path(span.path) for shard in self.shards for span in shard if span.piece}

    @property
    def numbers(self) -> range:
        """Numbers of the new shards."""
        return range(self.first, self.first + len(self.shards))


class Task(NamedTuple):
    """A shard to write. held_out_below: as of Plan; skips: bad lines of .jsonl are skipped and counted."""

    place: Place
    spans: list[Span]
    val_fraction: float
    held_out_below: int | None
    field: Field
    skips: bool

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(span.stop - span.start for span in self.spans)


class Asked(NamedTuple):
    """What a user asks for. trained: "train-bpe:SIZE" if the tokenizer is; before: the header of the folder to append
    to."""

    paths: Sequence[Path]
    field: str
    val_fraction: float
    tokenizer: Tokenizer
    trained: str = ""
    before: Header | None = None


def plan_of(asked: Asked) -> Plan:
    """Return the plan for files. Raises OSError."""
    divided, before = spans.shards_of(asked.paths), asked.before
    is_small = len(divided) == 1 and sum(span.stop - span.start for span in divided[0]) <= spans.LEAST
    below = before.held_out_below if before else None if is_small else int(asked.val_fraction * shards.KEYS)
    content = json.dumps([asked.tokenizer.name, asked.trained, asked.val_fraction, asked.field, divided])
    return Plan(
        preparation=shards.digest(content.encode())[:16],
        first=len(before.shards) if before else 0,
        val_fraction=asked.val_fraction,
        held_out_below=below,
        shards=divided,
    )


def begin(folder: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Write the tokenizer and the plan, or find the same plan. Raises ValueError if another one is not finished, or
    OSError."""
    text = plan.model_dump_json() + "\n"
    if (folder / PLAN).exists() and (folder / PLAN).read_text() != text:
        raise ValueError(
            f"--out={folder}: another preparation of it is not finished; finish it with the same files and options, or "
            f"remove {folder / PLAN} to give it up"
        )
    folder.mkdir(parents=True, exist_ok=True)
    shards.write_text(folder / PLAN, text)  # first: a folder with it is one of ours
    for name, content in tokenizer.files.items():
        shards.write_text(folder / name, content)


def tasks(folder: Path, plan: Plan, tokenizer: Tokenizer, field: Field, skips: bool) -> list[Task]:
    """Return the shards that a plan has."""
    places = [Place(folder, n, plan.preparation, tokenizer.name, tokenizer.dtype.str) for n in plan.numbers]
    return [
        Task(place, divided, plan.val_fraction, plan.held_out_below, field, skips)
        for place, divided in zip(places, plan.shards, strict=True)
    ]


@contextmanager
def alone(folder: Path, part: tuple[int, int]) -> Iterator[None]:
    """Be the only process that writes part i of n of a folder. Raises ValueError."""
    with open(folder / f".prepare-{part[0]}-of-{part[1]}.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        except BlockingIOError:
            raise ValueError(f"--out={folder} is being written by another process; wait for it or stop it") from None
        yield


class Written(NamedTuple):
    """A shard that is finished. was_there: before."""

    tokens: int
    was_there: bool


def written(chosen: Sequence[Task], workers: int) -> Iterator[tuple[Task, Written]]:
    """Write shards in several processes -> each as it is finished.

    Raises ValueError or OSError of the first that fails; what is finished stays.
    """
    if min(workers, len(chosen)) <= 1:
        yield from ((task, write(task)) for task in chosen)
        return
    pool = ProcessPoolExecutor(min(workers, len(chosen)), multiprocessing.get_context("spawn"), _begin_worker)
    try:
        futures = {pool.submit(write, task): task for task in chosen}
        yield from ((futures[future], future.result()) for future in as_completed(futures))
    except BrokenProcessPool:
        raise OSError(
            "a worker was killed (by lack of memory?); give the command again, with fewer --workers"
        ) from None
    finally:
        for worker in multiprocessing.active_children():  # busy ones only after an error
            worker.terminate()
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells of Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def write(task: Task) -> Written:
    """Write a shard, unless it was finished before and is whole. Raises ValueError or OSError."""
    if found := shards.finished(task.place):
        return Written(found.counts.tokens, True)
    skipped = Counter()
    texts = spans.documents(task.spans, task.field, skipped if task.skips else None)
    documents = corpus.encoded(texts, _tokenizer_in(task.place.folder, task.place.tokenizer))
    below = task.held_out_below
    if below is None:
        documents = list(documents)
        below = shards.threshold(documents, task.val_fraction)
    return Written(shards.write(task.place, documents, below, skipped).counts.tokens, False)


@lru_cache(maxsize=1)
def _tokenizer_in(folder: Path, name: str) -> Tokenizer:
    """Return the tokenizer that `begin` wrote. name: keeps apart those of one folder."""
    return tokenizers.load("bytes" if name == "bytes" else str(folder))


def finish(
    folder: Path, plan: Plan, tokenizer: Tokenizer, before: Header | None
) -> tuple[Header | None, list[Finished]]:
    """Write the header if all shards are finished, else return None; and the shards that are.

    Raises ValueError if there is no text in them, and OSError.
    """
    paths = [folder / f"{number:05}.json" for number in plan.numbers]
    texts = [path.read_bytes() for path in paths if path.exists()]
    found = [Finished.model_validate_json(text) for text in texts]
    if len(found) < len(paths):
        return None, found
    if not any(one.counts.documents for one in found):
        raise ValueError("the files contain no text; nothing was written")
    counts = [
        one.counts.model_copy(update={"sums": shards.digest(text)}) for one, text in zip(found, texts, strict=True)
    ]
    header = Header(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        dtype=tokenizer.dtype.str,
        end=tokenizer.end,
        val_fraction=plan.val_fraction,
        held_out_below=found[0].held_out_below,
        preparations=[*(before.preparations if before else []), plan.preparation],
        shards=[*(before.shards if before else []), *counts],
        wholes=sorted({*(before.wholes if before else []), *map(text_files.key_of, plan.cut)}),
    )
    token_folder.write_header(folder, header)
    (folder / PLAN).unlink(missing_ok=True)
    for lock in folder.glob(".prepare-*.lock"):
        lock.unlink(missing_ok=True)
    return header, found


def give_up(folder: Path, plan: Plan) -> None:
    """Leave a folder as it was before a plan, unless shards of it are finished, which the next attempt keeps."""
    finished = [folder / f"{number:05}.json" for number in plan.numbers if (folder / f"{number:05}.json").exists()]
    if any(Finished.model_validate_json(path.read_bytes()).counts.documents for path in finished):
        return
    if (folder / HEADER).exists():
        (folder / PLAN).unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
