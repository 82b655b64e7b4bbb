"""Types of the config's keys: integers with upper bounds, and paths in which `~` is the home directory.

The bounds are far above every real model and run: what is beyond is a typing error, and would overflow or never end.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field


def expanded(path: str) -> str:
    """A path with the home directory in place of `~` or `~user`. Raises ValueError."""
    if "\0" in path:
        raise ValueError(f"the path {path!r} holds the character NUL; leave it out")
    found = os.path.expanduser(path)
    if found.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"there is no home directory {user}; write ./{user} for a folder of this name")
    return found


def retold(error: OSError, text: str) -> OSError:
    """An OSError that says text and has the errno of another, which tells whether it may pass."""
    told = OSError(text)
    told.errno = error.errno
    return told


def _expanded_source(source: str) -> str:
    kind, _, where = source.partition(":")
    return f"{kind}:{expanded(where)}" if kind in ("text", "tokens") else source


def _factory(name: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        raise ValueError(f"{name!r} is not package.module:function; write e.g. scripts.your_model:build")
    return name


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool | float):  # true and 1.0 equal 1, which is all that a Literal asks
        raise ValueError("input should be an integer")
    return value


INT32 = 2**31 - 1  # what counters of steps and tokens hold on a device
Positive = Annotated[int, Field(gt=0, le=INT32)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Layers = Annotated[int, Field(gt=0, le=10**6)]
Width = Annotated[int, Field(gt=0, le=2**24)]  # of activations; heads
Vocabulary = Annotated[int, Field(gt=0, le=2**27)]
Tokens = Annotated[int, Field(gt=0, le=2**30)]  # of a sequence
Sequences = Annotated[int, Field(gt=0, le=2**18)]  # of a batch
Axis = Annotated[int, Field(le=2**20)]  # devices of a mesh axis, or -1
Choice = BeforeValidator(_not_a_bool)  # of a Literal of numbers
SCHEDULE_CELLS = 2**20  # ticks x stages of a pipeline schedule: 128 stages with 8,000 microbatches

Path = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(expanded)]
Factory = Annotated[str, AfterValidator(_factory)]  # of a model
Source = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_expanded_source)]


class Remat(NamedTuple):
    """What layers keep for their backward (`parallel/remat.py` explains the policies)."""

    policy: Literal["none", "selective", "full", "block"]
    block: int = 1  # layers that are computed again together

    @classmethod
    def parse(cls, text: str) -> Remat:
        """The value of memory.remat. Raises ValueError."""
        if not re.fullmatch(r"none|selective|full|block:[1-9]\d{0,6}", text):
            raise ValueError(f"memory.remat={text!r} is unknown; use none, selective, full or block:N")
        policy, _, block = text.partition(":")
        return cls(policy, int(block or 1))

    def __str__(self) -> str:
        return f"block:{self.block}" if self.policy == "block" else self.policy

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are computed again."""
        return self.policy in ("full", "block")
