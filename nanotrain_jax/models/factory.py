"""The model of a config: the decoder, or what model.factory makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nanotrain_jax import model as decoder
from nanotrain_jax.config import Config
from nanotrain_jax.models.contract import LAYERS, Model

Tree = Any  # a pytree of arrays


def make(config: Config, mesh: Mesh) -> Model:
    """The model of a resolved config. Raises ValueError."""
    if config.model.factory is None:
        return decoder.build(config, mesh)
    found = find(config.model.factory)(config, mesh)
    if not isinstance(found, Model):
        raise ValueError(
            f"model.factory={config.model.factory} returned {type(found).__name__}; return a nanotrain_jax.Model"
        )
    return found


def find(name: str) -> Callable[[Config, Mesh], Model]:
    """The function "package.module:function". Raises ValueError."""
    module, _, function = name.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        raise ValueError(
            f"model.factory={name}: {error}; install its package, or start in the folder that holds it"
        ) from None
    if not hasattr(found, function):
        raise ValueError(f"model.factory={name}: {module} has no {function}; name a function of it")
    return getattr(found, function)


def check(model: Model, config: Config) -> None:
    """Raise ValueError unless the weights of a model are as the step takes them."""
    for problem in _problems(model, config.model.num_layers):
        raise ValueError(f"{config.model.factory or 'the model'}: {problem}")


def _problems(model: Model, num_layers: int) -> Iterator[str]:
    """What is wrong with a model, the first thing first."""
    shapes = model.shapes
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    stacks = LAYERS, *model.stacks
    if not isinstance(shapes, dict) or not shapes.keys() > {*stacks}:
        yield f"init returns no dict with {', '.join(stacks)} and further keys; see nanotrain_jax.Model"
        return
    for path, x in leaves:
        if not all(isinstance(key, jax.tree_util.DictKey) for key in path):
            yield f"the weight {_name(path)} is not in nested dicts; make its lists dicts"
        if x.dtype != jnp.float32:
            yield f"the weight {_name(path)} is {x.dtype}; make all float32, the step casts them to precision.compute"
    for stack in stacks:
        if len({x.shape[:1] for x in jax.tree.leaves(shapes[stack])} - {()}) != 1:
            yield f"the arrays of {stack} have no common leading dim; stack its layers"
    if (count := jax.tree.leaves(shapes[LAYERS])[0].shape[0]) != num_layers:
        yield f"it has {count} layers, model.num_layers={num_layers}; make them agree"
    yield from _unused(model)
    ordered = jax.eval_shape(lambda: model.init(0, order=jnp.zeros(1, jnp.int32)))
    if jax.tree.leaves(ordered[LAYERS])[0].shape[0] != 1:
        yield "init ignores order, without which chunks of a pipeline run in a wrong order; see Model.init"
    if not isinstance(jax.eval_shape(lambda: model.init(0, put=lambda layer: (layer, layer)))[LAYERS], tuple):
        yield "init ignores put, without which layers do not come to host memory; see Model.init"


def _unused(model: Model) -> Iterator[str]:
    ends = {key: tree for key, tree in model.shapes.items() if key not in (LAYERS, *model.stacks)}
    used = {path for use in (model.used_by_first, model.used_by_last) for path in _paths(use(ends))}
    for path in _paths(ends):
        if path not in used:
            yield f"neither used_by_first nor used_by_last gives {path}; leave it out, or name it there"


def _paths(tree: Tree) -> list[str]:
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
