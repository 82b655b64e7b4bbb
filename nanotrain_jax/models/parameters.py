"""A row of a model's table of parameters: shape, layout, initialization and use of one array. No JAX.

A table is a dict from the path of an array, as in "layers/mlp/up_DF", to its row. Rules of sharding, initial values,
weight decay, padding and the closed forms of memory, communication and FLOPs are all read from it.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

ENDS, LAYERS = "ends", "layers"  # the two parts of a tree of parameters; arrays of layers are stacked there
TENSOR = "/tensor"  # marks the dim of a layout that is split over the tensor axis

Use = Literal["layer", "first", "last", "both"]


class Parameter(NamedTuple):
    """One array of a model; of a stack of layers, the array of one layer."""

    layout: str  # a word for each dim, after a slash the mesh axis that splits it: "D N/tensor H"
    used: Use = "layer"  # by each layer; before the first one, after the last one, or both
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.0  # of normal
    decay: bool = True  # whether weight decay applies
    is_matmul: bool = False  # whether it multiplies every token
    is_padded: bool = False  # whether the tensor axis needs rows of zeros at the end of its first dim
    is_partial: bool = False  # whether a tensor device that stores it whole uses, and differentiates, only a part of it
    shape: tuple[int, ...] = ()  # whole, with padding; () where sizes are unknown
    padding: int = 0  # rows

    @property
    def part(self) -> Literal["ends", "layers"]:
        """The part of the tree of parameters that it lies in."""
        return LAYERS if self.used == "layer" else ENDS

    @property
    def size(self) -> int:
        """Elements, of one layer."""
        return prod(self.shape)

    @property
    def split_dim(self) -> int | None:
        """The dim that the tensor axis splits."""
        return next((d for d, word in enumerate(self.layout.split()) if word.endswith(TENSOR)), None)

    @property
    def free(self) -> tuple[int, ...]:
        """Sizes of the dims that the tensor axis does not split: the data axis may."""
        return tuple(size for d, size in enumerate(self.shape) if d != self.split_dim)

    def is_used(self, end: Literal["first", "last"]) -> bool:
        """Whether the computation before the layers, or that after them, uses it."""
        return self.used in (end, "both")


Table = dict[str, Parameter]


def under(table: Table, path: str) -> Table:
    """The rows of the arrays directly under a path, by their own names."""
    rows = ((name.rpartition("/"), row) for name, row in table.items())
    return {name: row for (folder, _, name), row in rows if folder == path}
