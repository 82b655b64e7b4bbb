"""A model whose pipeline stages are different modules, for the trainer: `parallel/pipeline/heterogeneous.py`."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from nanotrain_jax.config.schema import Config
from nanotrain_jax.models.contract import ENDS, Model, join_layers
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.pipeline.heterogeneous import DifferentStages, StageModule
from nanotrain_jax.parallel.pipeline.schedule import SPLIT
from nanotrain_jax.parallel.sharding import Rules

DECAYED, NOT_DECAYED = "decayed", "not_decayed"  # the rows of a module


def model_of_stages(
    config: Config,
    mesh: Mesh,
    modules: Sequence[StageModule],
    loss: Callable[[Tree, Tree], tuple[jax.Array, jax.Array]],
    is_decayed: Callable[[tuple], bool] = Model.is_decayed,
) -> Model:
    """Return the model of different modules, in order, for `model.factory`. Set model.num_layers to their number.

    loss(y, batch) -> float32 sum of losses, number of targets; y: what the last module returns. As y travels like any
    activation, let the last module return losses rather than logits. is_decayed: path of a weight in its module -> True
    if weight decay applies; default: all but biases and scales.

    Stores rows[L/pipe n] of decayed weights and of others, each as long as the longest of any module; ZeRO shards n.
    Raises ValueError if the mesh has a tensor axis, or one of data that does not divide the rows.
    """
    stages = DifferentStages(
        modules,
        dtype=config.precision.compute,
        is_split=config.parallel.schedule in SPLIT and mesh.shape["pipe"] > 1,
        row_of=lambda path: DECAYED if is_decayed(path) else NOT_DECAYED,
    )
    check(stages, config, mesh)
    return Model(
        init=partial(init, stages),
        first=lambda weights, batch, run: stages.first(batch),
        layer=stages.layer,
        last=lambda weights, x, batch: loss(stages.output(x, batch), batch),
        rules=Rules([(f"{DECAYED}|{NOT_DECAYED}", "L n")]),
        is_decayed=lambda path: path[-1].key == DECAYED,
    )


def init(stages: DifferentStages, seed: int, order: Sequence[int] | None = None, put: Callable | None = None) -> Tree:
    """`Model.init`: one module's row after the other."""
    keys = jax.random.split(jax.random.key(seed), len(stages.modules))
    order = jnp.arange(len(keys)) if order is None else jnp.asarray(order)

    def row(number: jax.Array) -> Tree:
        weights = stages.init_row(number, keys[number])
        return weights if put is None else put(weights)

    return join_layers({ENDS: {}}, lax.map(row, order))


def check(stages: DifferentStages, config: Config, mesh: Mesh) -> None:
    """Raise ValueError unless the modules suit each other, and mesh and config their rows."""
    p, d = config.parallel, config.data
    tensor, data = mesh.shape["tensor"], mesh.shape["data"]
    if tensor > 1:
        raise ValueError(f"parallel.tensor={tensor}: different stages are not split over tensor; use parallel.tensor=1")
    for size in stages.row_sizes.values():
        if p.zero and size >= p.persist_below and size % data:
            raise ValueError(
                f"parallel.data={data} does not divide the {size} weights of a stage, which ZeRO shards; use a "
                f"parallel.data that divides {stages.multiple_of}"
            )
    tokens = jax.ShapeDtypeStruct((d.batch_size // (p.replica * p.data * p.microbatches), d.seq_len), jnp.int32)
    with suppress(NameError):  # modules with collectives are checked when the step is traced
        stages.check({"inputs": tokens, "targets": tokens})
