"""Tasks that a run scores at each evaluation (`train.tasks`), with its current weights, on its own devices.

The weights are copied to the layout of generation: sharded over tensor as in training, whole on each device otherwise,
and the copy is freed afterwards. So a device needs room for 1/tensor of the model in precision.compute; with several
chunks per stage also for a copy of its part of the state, in the order of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nanotrain_jax.config.schema import Config
from nanotrain_jax.data.tokenizer import Tokenizer
from nanotrain_jax.evaluation import samples, tasks
from nanotrain_jax.evaluation.samples import Kept, Sample
from nanotrain_jax.generation import load
from nanotrain_jax.generation.engine import Engine, split_up
from nanotrain_jax.generation.load import Loaded, Placement
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.run.metrics import TASK

ROWS = 32  # scored together
KEY = "train.tasks"


class Tasks:
    """The questions of a run's tasks. config: resolved; tokenizer: of its data. Raises ValueError or OSError."""

    def __init__(self, config: Config, mesh: Mesh, tokenizer: Tokenizer | None):
        check(config, tokenizer)
        devices, dtype = list(mesh.devices.flat), config.precision.compute
        resolved, apart, model = load.build(
            config.model.model_dump(), Placement(config.parallel.tensor, dtype), devices
        )
        self.types = load.abstract(model, resolved, apart)
        self.loaded = Loaded(Engine(model, apart, {}, dtype), tokenizer, resolved, Path(config.logging.dir))
        self.of_task: dict[str, list[Sample]] = {}
        for path in config.train.tasks:
            self.of_task[Path(path).stem] = tasks.samples(tasks.read(path, key=KEY), self.loaded)

    def scores(self, params: Tree) -> dict[str, float]:
        """Return acc as task/NAME and acc_norm as task/NAME_norm. params: stacked layers in model order."""
        engine, found = self.loaded.engine, {}
        engine.params = split_up(engine.model, fitted(self.types, params))
        for name, own in self.of_task.items():
            summary = tasks.summary(samples.run(engine, own, Kept(None, self.loaded), ROWS, _nothing))
            found |= {f"{TASK}{name}": summary["acc"], f"{TASK}{name}_norm": summary["acc_norm"]}
        engine.params = {}
        return found


def check(config: Config, tokenizer: Tokenizer | None) -> None:
    """Raise ValueError unless a run can score tasks."""
    paths = [Path(path).stem for path in config.train.tasks]
    twice = next((name for name in paths if paths.count(name) > 1), None)
    wrong = {
        "with the section vision: its model cannot score texts": bool(config.vision),
        f"with data.source={config.data.origin}, which has no tokenizer": tokenizer is None,
        "with memory.offload_params=host: the weights are not on the devices": config.memory.offload_params != "none",
        "without evaluations; set train.eval_every": not config.train.eval_every,
        f"with two files named {twice!r}": twice is not None,
    }
    for reason, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{KEY} {reason}; or leave {KEY} out")


def fitted(types: Tree, params: Tree) -> Tree:
    """Return new arrays of these types and shardings: with other padding at the end of each dim."""
    places = jax.tree.map(lambda kind: kind.sharding, types)
    return jax.jit(partial(jax.tree.map, _fitted, types), out_shardings=places)(params)


def _fitted(kind: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
    x = x[tuple(slice(size) for size in kind.shape)]
    return jnp.pad(x, [(0, new - old) for new, old in zip(kind.shape, x.shape, strict=True)]).astype(kind.dtype)


_nothing: Callable[[], None] = dict  # of each sample that is done
