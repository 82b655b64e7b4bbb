"""What the modules of the decoder share: how devices split them, and how they are filled with parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nanotrain_jax.models.parameters import Parameter, Table
from nanotrain_jax.parallel.context import context
from nanotrain_jax.parallel.expert.grouped_matmul import Kernel
from nanotrain_jax.parallel.tensor import tensor


class Split(NamedTuple):
    """How devices share the heads, widths, tokens and vocabulary of a decoder."""

    axis: str | None = None  # mesh axis; None: not split
    size: int = 1
    sequence_parallel: bool = False  # shard activations over tokens between matmuls
    matmuls: tensor.MatmulOptions = tensor.PLAIN_MATMULS  # of `tensor.columns` and `tensor.row`
    context: context.Kind | None = None  # attention over the mesh axis context; None: devices have whole sequences
    vocab_axes: tuple[str, ...] = ()  # mesh axes that split the vocabulary: of pipe and tensor
    vocab_shards: int = 1  # devices along them
    logits: str | None = None  # dtype of the loss's logits; None: the compute dtype
    head_gradient: str = "float32"  # dtype in which the loss computes the gradient of the head
    trains_head: bool = True  # False: the head (or tied embedding) is frozen
    kernels: bool = False  # norms, GELU and softmax by kernels/, on GPUs
    grouped: Kernel | None = None  # multiplies the rows of experts; None: padded matmuls do
    experts: str | None = None  # mesh axis whose devices share the experts of a layer; None: each has all
    is_ragged: bool = False  # rows of experts travel without empty places
    flat: bool = False  # q, k and v by matmuls of two dims, to which XLA:GPU adds the biases; loops would keep copies

    def positions(self, tokens: int, starts_BT: jax.Array | None = None) -> jax.Array | None:
        """Return the positions of this device's tokens, int32 [T/context], with starts [B T/context]; None: 0 to T-1.

        tokens: T/context. starts[B T], of whole rows: positions count from the start of a document.
        """
        axis = "context" if self.context else None
        if starts_BT is None and axis is None:
            return None
        in_row_T = context.own_positions(tokens, axis, self.context in context.ZIGZAG)
        return in_row_T if starts_BT is None else in_row_T[None] - starts_BT[:, in_row_T]


ONE_DEVICE = Split()


def _initial(row: Parameter, rngs: nnx.Rngs | None) -> jax.Array:
    if row.init == "adapter":  # the variance of PEFT's, which are uniform
        return jax.random.normal(rngs.lora(), row.shape) / math.sqrt(3 * math.prod(row.shape[:-1]))
    if row.init != "normal":  # of is_local: `decoder.init`
        return jnp.ones(row.shape) if row.init == "ones" else jnp.zeros(row.shape)
    rows, *dims = row.shape
    drawn = row.std * jax.random.normal(rngs.params(), (rows - row.padding, *dims), jnp.float32)
    return jnp.pad(drawn, [(0, row.padding)] + [(0, 0)] * len(dims)) if row.is_padded else drawn


def fill(module: nnx.Module, rows: Table, rngs: nnx.Rngs | None = None) -> None:
    """Add parameters to a module, initialized in the order of the table."""
    for name, row in rows.items():
        setattr(module, name, nnx.Param(_initial(row, rngs)))
