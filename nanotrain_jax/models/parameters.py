"""Parameter tables: shape, layout, initialization and use of every array of a model. Needs no JAX.

A table maps the path of an array, as in "layers/mlp/up_DF", to its row. It is the only source for sharding rules,
initial values, weight decay, padding and the closed forms of memory, communication and FLOPs.
"""

from math import prod
from typing import Literal, NamedTuple

ENDS, LAYERS = "ends", "layers"  # top-level keys of a parameter tree; arrays of layers are stacked
DENSE = "dense"  # beside them, stacked too: the first layers of a mixture, which have no experts
VISION, ENCODER = "vision", "encoder"  # beside them with the section vision; arrays of the encoder are stacked
TENSOR = "/tensor"  # marks the dim of a layout that is sharded over the tensor axis
VOCAB = "/vocab"  # marks the vocabulary, sharded over the axes of `Parallel.vocab_axes`
EXPERT = "/expert"  # marks the experts, sharded over the axis expert

CONSTANTS = "is_local", "balance"  # initial values of arrays that have no gradient

Use = Literal["layer", "dense", "first", "last", "both", "encode", "encoder"]


class Parameter(NamedTuple):
    """One array of a model; in a stack of layers, the array of one layer."""

    layout: str  # a word for each dim, after a slash the mesh axis that shards it: "D N/tensor H"
    used: Use = "layer"  # in each layer; in each of the first, dense ones; before all layers, after them, or both; to
    # encode a picture, in each layer of its encoder
    init: Literal["normal", "zeros", "ones", "is_local", "balance", "adapter"] = "normal"
    # is_local: 1 in layers with a window, else 0; balance: zeros, adjusted without a gradient; adapter: normal
    # with variance 1 / (3 D), D inputs, from a stream of random numbers of its own
    std: float = 0.0  # of normal
    decay: bool = True  # True: weight decay applies
    is_matmul: bool = False  # True: it multiplies every token of the decoder
    share: float = 1.0  # of a matmul: the share of it that multiplies a token, of experts those that it goes to
    is_padded: bool = False  # True: its first dim is the vocabulary; where that is sharded, padded with rows of zeros
    is_partial: bool = False  # True: if replicated over tensor, each device uses and differentiates only a part of it,
    # or multiplies its own heads with it
    shape: tuple[int, ...] = ()  # global, with padding; () where sizes are unknown
    padding: int = 0  # rows
    is_frozen: bool = False  # True: it has no gradient; of train.freeze, or a constant of the model

    @property
    def part(self) -> Literal["ends", "layers", "dense", "vision", "encoder"]:
        """Top-level key of the parameter tree."""
        return {"layer": LAYERS, "dense": DENSE, "encode": VISION, "encoder": ENCODER}.get(self.used, ENDS)

    @property
    def is_stacked(self) -> bool:
        """True if the tree has a stack of such arrays, one per layer."""
        return self.part in (LAYERS, DENSE, ENCODER)

    @property
    def size(self) -> int:
        """Number of elements, of one layer."""
        return prod(self.shape)

    @property
    def split_dim(self) -> int | None:
        """The dim that is sharded over tensor, or over the axes of the vocabulary; None if replicated."""
        return next((d for d, word in enumerate(self.layout.split()) if TENSOR in word or VOCAB in word), None)

    @property
    def has_experts(self) -> bool:
        """True if the first dim is that of experts, sharded over the axis expert."""
        return EXPERT in self.layout

    def free(self, expert: int) -> tuple[int, ...]:
        """Sizes of the dims that are not sharded so, nor over expert devices: ZeRO may shard them, but of constants."""
        if self.init in CONSTANTS:
            return ()
        taken = {self.split_dim, 0 if self.has_experts and expert > 1 else None}
        return tuple(size for d, size in enumerate(self.shape) if d not in taken)

    def is_used(self, end: Literal["first", "last"]) -> bool:
        """True if the computation before (first) or after (last) the layers uses it."""
        return self.used in (end, "both")


Table = dict[str, Parameter]


def under(table: Table, path: str) -> Table:
    """Return the rows of the arrays directly under a path, by name."""
    rows = ((name.rpartition("/"), row) for name, row in table.items())
    return {name: row for (folder, _, name), row in rows if folder == path}
