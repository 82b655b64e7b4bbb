"""The model of a config: the decoder, or what model.factory makes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import jax
from jax.sharding import Mesh

from nanotrain_jax import model as decoder
from nanotrain_jax.config import Config
from nanotrain_jax.models.contract import LAYERS, Model


def make(config: Config, mesh: Mesh) -> Model:
    """The model of a resolved config. Raises ValueError."""
    if config.model.factory is None:
        return decoder.build(config, mesh)
    found = find(config.model.factory)(config, mesh)
    if not isinstance(found, Model):
        raise ValueError(
            f"model.factory={config.model.factory} returned {type(found).__name__}; return a nanotrain_jax.Model"
        )
    check(found, config)
    return found


def find(name: str) -> Callable[[Config, Mesh], Model]:
    """The function "package.module:function". Raises ValueError."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except ImportError as error:
        raise ValueError(
            f"model.factory={name}: {error}; install its package, or start in the folder that holds it"
        ) from None
    except AttributeError:
        raise ValueError(f"model.factory={name}: {module} has no {function}; name a function of it") from None


def check(model: Model, config: Config) -> None:
    """Raise ValueError unless the weights of a model are as the step takes them."""
    name, shapes = config.model.factory, model.shapes
    if not isinstance(shapes, dict) or LAYERS not in shapes or len(shapes) < 2:
        raise ValueError(f"model.factory={name}: init returns no dict with {LAYERS!r} and other keys; see Model.init")
    for stack in (LAYERS, *model.stacks):
        if len({x.shape[:1] for x in jax.tree.leaves(shapes.get(stack))}) != 1:
            raise ValueError(f"model.factory={name}: weights[{stack!r}] is no stack; give its arrays one leading dim L")
    layers = jax.tree.leaves(shapes[LAYERS])[0].shape[0]
    if layers != config.model.num_layers:
        raise ValueError(
            f"model.factory={name} makes {layers} layers, model.num_layers={config.model.num_layers}; make them agree"
        )
