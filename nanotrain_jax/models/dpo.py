"""DPO: train on pairs of completions, of which one is preferred (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    reward(y) = beta (log p(y) - log r(y))          p: the model, r: the frozen reference; sums over y's tokens
    loss      = -(1 - e) log sigmoid(m) - e log sigmoid(-m),    m = reward(chosen) - reward(rejected)

e is label_smoothing, the fraction of pairs that are the wrong way round (Mitchell 2023, "A note on DPO with noisy
preferences"). The loss of a batch is the mean over its pairs.

A row holds pairs, each as two examples: the chosen one, then the rejected one. log r comes with the batch, "reference"
[B P 2], so a step runs one model. Moves, beyond what the losses of tokens do, 2 P float32 for each row over context.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from nanotrain_jax.config.schema import Config
from nanotrain_jax.models.contract import Model
from nanotrain_jax.parallel.collectives import Tree, all_reduce, position
from nanotrain_jax.parallel.context.context import own_positions

CONTEXT = "context"


def build(model: Model, config: Config) -> Model:
    """Return the model with DPO as its objective. Raises ValueError for a model without `token_losses`."""
    if model.token_losses is None:
        raise ValueError(
            f"train.objective with {config.model.factory or 'this model'}, which does not give the losses of tokens; "
            "set token_losses (nanotrain_jax.Model)"
        )
    objective, p, pairs = config.train.objective, config.parallel, config.data.pairs_per_row

    def summed(values_BT: jax.Array, batch: Tree) -> jax.Array:
        """values[B T/context] -> their sums over each completion, float32 [B P 2]; the same along context"""
        example_BT = examples(batch["starts"])
        if p.context > 1:
            example_BT = example_BT[:, own_positions(values_BT.shape[1], CONTEXT, p.is_blockwise)]
        rows_B1 = jnp.arange(len(values_BT))[:, None]
        zeros = jnp.zeros_like(values_BT, shape=(len(values_BT), 2 * pairs))
        sums = zeros.at[rows_B1, example_BT].add(values_BT, mode="drop")
        return all_reduce(sums, (CONTEXT,)).reshape(-1, pairs, 2)

    def exists(batch: Tree) -> jax.Array:
        """Return which pairs there are, [B P]: both completions have targets. One device along context counts them."""
        targets_BP2 = summed((batch["targets"] >= 0).astype(jnp.float32), batch)
        return (targets_BP2 > 0).all(-1) & (position(CONTEXT) == 0)

    def log_probabilities(ends: Tree, x: Tree, batch: Tree) -> jax.Array:
        return -summed(model.token_losses(ends, x, batch), batch)

    def margins(ends: Tree, x: Tree, batch: Tree) -> jax.Array:
        """-> how much higher the reward of the chosen completion is than that of the rejected one, [B P]"""
        rewards_BP2 = objective.beta * (log_probabilities(ends, x, batch) - batch["reference"])
        return rewards_BP2[..., 0] - rewards_BP2[..., 1]

    def last(ends: Tree, x: Tree, batch: Tree) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        margin_BP, exists_BP = margins(ends, x, batch), exists(batch)
        right_BP, wrong_BP = jax.nn.log_sigmoid(margin_BP), jax.nn.log_sigmoid(-margin_BP)
        losses_BP = -(1 - objective.label_smoothing) * right_BP - objective.label_smoothing * wrong_BP
        measures = {
            "accuracy": (exists_BP & (margin_BP > 0)).sum(dtype=jnp.float32),
            "margin": jnp.where(exists_BP, margin_BP, 0.0).sum(),
        }
        return jnp.where(exists_BP, losses_BP, 0.0).sum(), exists_BP.sum(dtype=jnp.int32), measures

    return replace(
        model,
        last=last,
        correct=None,
        measures={"accuracy": (), "margin": ()},
        count=lambda batch: exists(batch).sum(dtype=jnp.float32),
        of_rows=log_probabilities,
        further_inputs={**model.further_inputs, "reference": jax.ShapeDtypeStruct((pairs, 2), jnp.float32)},
    )


def examples(starts_BT: jax.Array) -> jax.Array:
    """starts[B T] -> the number of each token's example in its row, from 0, int32 [B T]"""
    begins_BT = starts_BT == jnp.arange(starts_BT.shape[1], dtype=starts_BT.dtype)[None]
    return jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32) - 1
