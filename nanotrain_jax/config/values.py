"""Types of config keys: integers with upper bounds, paths with `~` expanded; divisors for error messages.

The bounds are far above any real model or run: larger values are typos that would overflow or never finish.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field


def expanded(path: str) -> str:
    """Expand `~` or `~user` in a path. Raises ValueError, also for a remote one (gs://...)."""
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise ValueError(f"path {path!r} is remote; give a folder of this machine, where {scheme[0]} may be mounted")
    if "\0" in path:
        raise ValueError(f"path {path!r} must not contain NUL; remove it")
    absolute = os.path.expanduser(path)
    if absolute.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"no home directory {user}; write ./{user} for a folder of this name")
    return absolute


def is_remote(path: str) -> bool:
    """True for a path in an object store that token folders are read from."""
    return path.startswith(("gs://", "s3://", "az://"))


def with_message(error: OSError, text: str) -> OSError:
    """Return an OSError with another message and the same errno, which tells if the error may be transient."""
    other = OSError(text)
    other.errno = error.errno
    return other


@contextmanager
def naming(problem: str, remedy: str) -> Iterator[None]:
    """Say in an OSError of a file which key or option names it, and what to do: "PROBLEM (reason); REMEDY"."""
    try:
        yield
    except OSError as error:
        raise with_message(error, f"{problem} ({error.strerror or error}); {remedy}") from None


def _expanded_source(source: str) -> str:
    kind, _, where = source.partition(":")
    if kind == "tokens" and is_remote(where):
        return source
    return f"{kind}:{expanded(where)}" if kind in ("text", "tokens", "arrays", "chat", "pairs") else source


def _no_mapping(source: Any) -> Any:
    if isinstance(source, dict) and len(source) == 1:
        kind = next(iter(source))
        raise ValueError(
            f"YAML reads a colon before a space or the end as a mapping; write {kind}:WHERE, without a space"
        )
    return source


def is_chat(source: Any) -> bool:
    """True if a value of data.source is conversations and completions, or pairs of them."""
    return isinstance(source, str) and source.startswith(("chat:", "pairs:"))


def _expanded_resume(resume: str) -> str:
    kind = next((kind for kind in (HUGGING_FACE, WEIGHTS) if resume.startswith(kind)), "")
    return kind + expanded(resume.removeprefix(kind))


def _factory(name: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        raise ValueError(f"{name!r} must be package.module:function; write e.g. scripts.examples.your_model:build")
    return name


def _verify(value: Any) -> Any:
    """true and false, as YAML reads on and off, are full and off."""
    return {True: "full", False: "off"}[value] if isinstance(value, bool) else value


def _service(value: Any) -> Any:
    if not isinstance(value, bool) and not (isinstance(value, str) and 0 < len(value) <= 128):
        raise ValueError("must be a name of 1 to 128 characters, true or false")
    return value


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool | float):  # a Literal accepts true and 1.0, which equal 1
        raise ValueError("input should be an integer")
    return value


HUGGING_FACE = "hf:"  # of a path: a model folder
WEIGHTS = "weights:"  # of a path: only the weights of a run's checkpoints
INT32 = 2**31 - 1  # range of the step and token counters on a device
Positive = Annotated[int, Field(gt=0, le=INT32)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Layers = Annotated[int, Field(gt=0, le=10**6)]
Width = Annotated[int, Field(gt=0, le=2**24)]  # width of activations; number of heads
Vocabulary = Annotated[int, Field(gt=0, le=2**27)]
Tokens = Annotated[int, Field(gt=0, le=2**30)]  # per sequence
Verify = Annotated[Literal["full", "sample", "off"], BeforeValidator(_verify)]
Sequences = Annotated[int, Field(gt=0, le=2**18)]  # per batch
Axis = Annotated[int, Field(le=2**20)]  # size of a mesh axis, or -1
Choice = BeforeValidator(_not_a_bool)  # for a Literal of integers
SCHEDULE_CELLS = 2**20  # ticks x stages of a pipeline schedule: 128 stages with 8,000 microbatches

Path = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(expanded)]
Service = Annotated[bool | str, BeforeValidator(_service)]  # name of a project, or on or off
Factory = Annotated[str, AfterValidator(_factory)]  # builds a model
Resume = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_expanded_resume)]
Source = Annotated[
    str, Field(min_length=1, max_length=4096), BeforeValidator(_no_mapping), AfterValidator(_expanded_source)
]


class Remat(NamedTuple):
    """Rematerialization policy (see `parallel/remat.py`)."""

    policy: Literal["none", "selective", "full", "block"]
    block: int = 1  # layers recomputed together

    @classmethod
    def parse(cls, text: str) -> Remat:
        """Parse memory.remat. Raises ValueError."""
        if not re.fullmatch(r"none|selective|full|block:[1-9]\d{0,6}", text):
            raise ValueError(f"memory.remat={text!r} must be none, selective, full or block:N")
        policy, _, block = text.partition(":")
        return cls(policy, int(block or 1))

    def __str__(self) -> str:
        return f"block:{self.block}" if self.policy == "block" else self.policy

    @property
    def recomputes_layers(self) -> bool:
        """True if the backward recomputes whole layers."""
        return self.policy in ("full", "block")


class Compression(NamedTuple):
    """How gradients are summed over the axis replica (compression.py, quantization.py in parallel/gradients/)."""

    kind: Literal["none", "float8", "int8", "topk", "randomk", "powersgd"]
    ratio: float = 1.0  # of the entries that travel: topk, randomk
    rank: int = 0  # powersgd

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Parse parallel.compress. Raises ValueError."""
        kind, _, amount = text.partition(":")
        if text in ("none", "float8", "int8"):
            return cls(text)
        if kind in ("topk", "randomk") and re.fullmatch(r"[\d.e-]+", amount) and _is_ratio(amount):
            return cls(kind, ratio=float(amount))
        if kind == "powersgd" and re.fullmatch(r"[1-9]\d{0,3}", amount):
            return cls(kind, rank=int(amount))
        raise ValueError(
            f"parallel.compress={text!r} must be none, float8, int8, topk:RATIO, randomk:RATIO (1/1024 <= RATIO <= 1) "
            "or powersgd:RANK"
        )

    @property
    def has_residual(self) -> bool:
        """True if devices keep what they do not send."""
        return self.kind in ("topk", "randomk", "powersgd")


def _is_ratio(text: str) -> bool:
    try:
        return 1 / 1024 <= float(text) <= 1  # parallel/gradients/compression.py sends at least 1 of each block of 1,024
    except ValueError:
        return False


def near_divisors(number: int, wanted: int) -> str:
    """Return the divisors of number next below and above wanted, as text."""
    below = [d for d in divisors(number) if d < wanted][-1:]
    above = [d for d in divisors(number) if d > wanted][:1]
    return " or ".join(map(str, below + above))


def near_multiples(number: int, of: int) -> str:
    """Return the multiples of `of` next below and above number, as text; only positive ones."""
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n)


def divisors(number: int) -> list[int]:
    """Return the divisors of number in order; above 10**10 only those below 10**5 and their cofactors."""
    small = [d for d in range(1, min(isqrt(number), 10**5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
