"""Layouts in the notation of our docstrings: `layout("B/replica,data T/context")` is a PartitionSpec."""

from __future__ import annotations

import re

from jax.sharding import PartitionSpec


def layout(text: str) -> PartitionSpec:
    """Text -> PartitionSpec: each dim by name, after a slash the mesh axes it is split over.

    "D/data F/tensor" -> PartitionSpec("data", "tensor"); "L D" -> PartitionSpec(None, None).
    A dim may be split over several axes, major first: "B/replica,data". Raises ValueError on a word that is not
    `dim` or `dim/axis[,axis]`, and on a mesh axis used twice.
    """
    entries, used = [], set()
    for word in text.split():
        match = re.fullmatch(r"(\w+)(?:/(\w+(?:,\w+)*))?", word)
        if not match:
            raise ValueError(
                f"layout {text!r}: {word!r} is not of the form dim or dim/axis; write e.g. 'D/data F/tensor'"
            )
        axes = tuple(match[2].split(",")) if match[2] else ()
        for axis in axes:
            if axis in used:
                raise ValueError(f"layout {text!r}: mesh axis {axis!r} is used twice; an axis can split one dim only")
            used.add(axis)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)
