"""What is outside of the decoder's layers (Flax NNX): embedding, final norm, head and loss."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import decoder_table
from nanotrain_jax.models.decoder_layer import Norm
from nanotrain_jax.models.modules import Split, fill
from nanotrain_jax.models.ops import add, project
from nanotrain_jax.models.parameters import ENDS, under
from nanotrain_jax.parallel.collectives import own_shard, position
from nanotrain_jax.parallel.tensor import accuracy, embedding, tensor, vocabulary


class Ends(nnx.Module):
    """Embedding, final norm, head and loss: tokens[B T] -> x[B T D], and x[B T D] -> logits or loss.

    With a Split, V is padded with rows of zeros (`padded_vocab`); the loss ignores them, their gradient is zero.
    If it is split over pipe, all stages run `embed` and `loss` together (`LayeredModel.split_ends`): x is the sum of
    what they embed.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs, split: Split):
        self.vocab_size, self.loss_chunk, self.split = config.vocab_size, config.loss_chunk, split
        self.learns_positions = config.features.learned_positions
        self.scale = math.sqrt(config.d_model) if config.features.scaled_embeddings else 1.0
        rows = under(decoder_table.table(config, split.size, split.vocab_shards), ENDS)
        fill(self, {name: row for name, row in rows.items() if row.is_used("first")}, rngs)
        self.norm = Norm(config, decoder_table.NORM_LAST)
        fill(self, {name: row for name, row in rows.items() if not row.is_used("first")}, rngs)

    @jax.named_scope("embed")
    def embed(self, tokens_BT: jax.Array, starts_BT: jax.Array | None = None) -> jax.Array:
        """tokens[B T] -> x[B T D], under sequence parallelism x[1 BT/tensor D]. starts: as of `Attention`."""
        positions = self.split.positions(tokens_BT.shape[1], starts_BT) if self.learns_positions else None
        return self.embed_at(tokens_BT, positions)

    def embed_at(self, tokens_BT: jax.Array, positions: jax.Array | None) -> jax.Array:
        """As `embed`, of tokens at these positions, int32 [T] or [B T]; None: 0 to T-1."""
        x_BTD = self.look_up(tokens_BT.reshape(1, -1) if self.split.sequence_parallel else tokens_BT)
        if self.scale != 1.0:
            x_BTD = x_BTD * self.scale
        if not self.learns_positions:
            return x_BTD
        learned = self.learned_positions(tokens_BT.shape, positions)
        if "pipe" in self.split.vocab_axes:  # one stage adds them
            learned = jnp.where(position("pipe") == 0, learned, jnp.zeros_like(learned))
        return add(x_BTD, learned)

    def learned_positions(self, shape: tuple[int, int], positions: jax.Array | None) -> jax.Array:
        """Return what `embed` adds, [T D] or [B T D]. shape: [B T], of the tokens; positions: of them, or None."""
        B, T = shape
        if positions is None and not self.split.sequence_parallel:
            return self.positions_TD[:T]
        if self.split.sequence_parallel:  # x holds a part of the B sequences, one after another
            in_row_BT = jnp.broadcast_to(jnp.arange(T) if positions is None else positions, (B, T))
            positions = own_shard(in_row_BT.reshape(-1), self.split.axis, 0)
        return self.positions_TD[...].astype(jnp.float32)[positions]

    def look_up(self, tokens_BT: jax.Array) -> jax.Array:
        """tokens[B T] -> their embeddings x[B T D]"""
        axis, sequence_parallel, axes = self.split.axis, self.split.sequence_parallel, self.split.vocab_axes
        return embedding.look_up(self.embedding_VD[...], tokens_BT, axis, sequence_parallel, axes)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """x[B T D] -> logits[B T V] in float32. Not with a Split."""
        return project(self.norm(x_BTD), self.head())

    def head(self) -> jax.Array:
        """head[V D]"""
        return self.head_VD[...] if hasattr(self, "head_VD") else self.embedding_VD[...]

    def loss_options(self) -> vocabulary.LossOptions:
        """Return the options of the loss."""
        split = self.split
        return vocabulary.LossOptions(
            self.vocab_size,
            self.loss_chunk,
            logits=split.logits,
            gradient=jnp.dtype(split.head_gradient),
            kernels=split.kernels,
            trains_head=split.trains_head,
        )

    @jax.named_scope("loss")
    def loss(self, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x[B T D], targets[B T] -> (sum of cross-entropies in nats, number of targets), float32 and int32 scalars.

        Negative targets are padding and are ignored.
        """
        x_BTD = tensor.enter(self.norm(x_BTD), self.split.axis, self.split.sequence_parallel)
        return vocabulary.cross_entropy(x_BTD, self.head(), targets_BT, self.split.vocab_axes, self.loss_options())

    @jax.named_scope("loss")
    def losses(self, x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """x[B T D], targets[B T] -> the cross-entropy of each token in nats, float32 [B T]; 0 for negative targets"""
        x_BTD = tensor.enter(self.norm(x_BTD), self.split.axis, self.split.sequence_parallel)
        return vocabulary.losses_of_tokens(x_BTD, self.head(), targets_BT, self.split.vocab_axes, self.loss_options())

    @jax.named_scope("accuracy")
    def correct(self, x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """x[B T D], targets[B T] -> number of targets whose most likely token is right (`accuracy.correct`)."""
        x_BTD = tensor.enter(self.norm(x_BTD), self.split.axis, self.split.sequence_parallel)
        return accuracy.correct(
            x_BTD, self.head(), targets_BT, self.split.vocab_axes, self.vocab_size, self.loss_chunk or None
        )
