"""Whether the files of shards are what was written: sizes, first bytes, checksums. One line for each that is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from nanotrain_jax.data import shards, stored
from nanotrain_jax.data.shards import KINDS, Counts, Place


def faults(found: Sequence[tuple[Place, Counts]], readers: int) -> Iterator[str | None]:
    """Read all of some shards, once -> for each, in order, what is wrong with it, or None."""
    with ThreadPoolExecutor(readers) as pool:
        yield from pool.map(fault, *zip(*found, strict=True))


def fault(place: Place, counts: Counts) -> str | None:
    """Return what is wrong with a shard; None if nothing is. Reads all of it."""
    try:
        check_heads([(place, counts)])
        check_content(place, counts)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _remedy(place: Place) -> str:
    return f"copy the file again, or create {place.folder} again with python -m nanotrain_jax.prepare"


def check_heads(some: Iterable[tuple[Place, Counts]]) -> None:
    """Raise ValueError unless the files of shards have their sizes and first bytes, OSError if they cannot be read."""
    for place, counts in some:
        for kind in KINDS:
            check_head(place, kind, counts)


def check_head(place: Place, kind: str, counts: Counts) -> None:
    """As check_heads, for one file."""
    path, expected = place.path(kind), place.size(kind, counts)
    try:
        size, head = stored.size(path), stored.part(path, 0, shards.HEAD)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {_remedy(place)}") from None
    if size != expected:
        raise ValueError(
            f"{path} has {size:,} bytes, but must have {expected:,}: it is truncated or of another folder; "
            f"{_remedy(place)}"
        )
    if head != place.head(kind):
        said, due = (" ".join(text.decode(errors="replace").split()) for text in (head, place.head(kind)))
        raise ValueError(
            f"{path} begins with {said!r}, but must begin with {due!r}: it is another shard's, or of another "
            f"tokenizer; {_remedy(place)}"
        )


def check_content(place: Place, counts: Counts, sample: np.random.Generator | None = None) -> None:
    """Raise ValueError unless a shard has the checksums it was written with. sample: chooses a block of each file, and
    no others are read."""
    try:
        text = stored.content(place.path("json"))
        is_same = shards.digest(text) == counts.sums
        found = shards.Finished.model_validate_json(text) if is_same else None
    except FileNotFoundError:
        raise ValueError(f"{place.path('json')} is missing; {_remedy(place)}") from None
    if found is None:
        raise ValueError(f"{place.path('json')} does not match header.json: it was modified; {_remedy(place)}")
    if file := shards.damaged(place, found, sample):
        raise ValueError(f"{place.folder / file} does not match its SHA-256: it was modified; {_remedy(place)}")
