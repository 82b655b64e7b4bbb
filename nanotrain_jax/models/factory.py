"""Build the model of a config: the decoder, with vision in front of it, or the model of model.factory; check it."""

from collections.abc import Callable, Iterator
from importlib import import_module

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nanotrain_jax.config.execution import Execution, execution
from nanotrain_jax.config.schema import Config
from nanotrain_jax.models import decoder, dpo, vision_language
from nanotrain_jax.models.contract import LAYERS, Model
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.sharding import path_name


def make(config: Config, mesh: Mesh) -> Model:
    """Build the model of a resolved config, with its objective. Raises ValueError if model.factory fails or returns
    another type, or if the model cannot have the objective."""
    if config.vision is not None:
        return vision_language.build(config, mesh)
    if config.model.factory is None:
        return decoder.build(config, mesh)
    model = load_function(config.model.factory, "model.factory")(config, mesh)
    if not isinstance(model, Model):
        raise ValueError(
            f"model.factory={config.model.factory} returned {type(model).__name__}; return a nanotrain_jax.Model"
        )
    return with_objective(model, config)


def with_objective(model: Model, config: Config) -> Model:
    """Return a model with train.objective, unless it has it. Raises ValueError if it cannot have it."""
    return dpo.build(model, config) if config.train.objective and model.of_rows is None else model


def load_function(name: str, key: str) -> Callable:
    """Import "package.module:function", the value of a config key. Raises ValueError."""
    module_name, _, function = name.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{key}={name}: {error}; install its package, or start in the folder that holds it") from None
    if not hasattr(module, function):
        raise ValueError(f"{key}={name}: {module_name} has no {function}; use one of its functions")
    return getattr(module, function)


def check(model: Model, config: Config) -> None:
    """Raise ValueError unless a model's weights have the structure that the step needs, and rows may be split."""
    name = config.model.factory or ("vision" if config.vision else "the model")
    for problem in _problems(model, config.model.num_layers):
        raise ValueError(f"{name}: {problem}")
    if config.parallel.context > 1 and not model.splits_context:
        raise ValueError(
            f"parallel.context={config.parallel.context} splits rows, but {name} does not say that its attention does; "
            "use one of nanotrain_jax.parallel.context and set splits_context=True, or parallel.context=1"
        )
    if bool(config.parallel.vocab_over_pipe) != model.splits_vocab:
        raise ValueError(
            f"parallel.vocab_over_pipe={config.parallel.vocab_over_pipe}, but {name} has splits_vocab="
            f"{model.splits_vocab}; make them equal"
        )
    if model.encode and execution(config) is Execution.OFFLOADED:
        raise ValueError(
            f"{name} has an encoder: gradients and activations in host memory do without one; use parallel.zero below "
            "2, or memory.offload_optimizer=none and offload_activations=none"
        )
    if not (config.data.attend_across_documents or model.splits_documents):
        raise ValueError(
            f'data.attend_across_documents=false, but {name} does not say that it heeds batch["starts"]; '
            "do so and set splits_documents=True, or read text with attend_across_documents=true"
        )


def check_tensor(specs: Tree, config: Config) -> None:
    """Raise ValueError if parallel.tensor would share out no weight. specs: PartitionSpecs of a model's weights."""
    size = config.parallel.tensor
    if size > 1 and not any("tensor" in spec for spec in jax.tree.leaves(specs)):
        raise ValueError(
            f"parallel.tensor={size}, but {config.model.factory or 'the model'} shards no weight over tensor; "
            "write /tensor behind a dim in rules, or use parallel.tensor=1"
        )


def _problems(model: Model, num_layers: int) -> Iterator[str]:
    """Yield the problems of a model. Later checks assume that earlier ones passed."""
    shapes = model.shapes
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    stacks = LAYERS, *model.stacks
    if not isinstance(shapes, dict) or not shapes.keys() > {*stacks}:
        yield f"init must return a dict with {', '.join(stacks)} and further keys; see nanotrain_jax.Model"
        return
    for path, x in leaves:
        if not all(isinstance(key, jax.tree_util.DictKey) for key in path):
            yield (
                f"the weight {path_name(path)} is not in nested dicts; use dicts: of an nnx.State nnx.to_pure_dict, "
                "instead of lists numbered layers"
            )
        if x.dtype != jnp.float32:
            yield f"the weight {path_name(path)} is {x.dtype}; use float32, the step casts weights to precision.compute"
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
        yield "init ignores put, without which layers are not moved to host memory; see Model.init"


def _unused(model: Model) -> Iterator[str]:
    ends = {key: tree for key, tree in model.shapes.items() if key not in (LAYERS, *model.stacks)}
    uses = [model.used_by_first, model.used_by_last, *([model.used_by_encode] if model.encode else [])]
    used = {path for use in uses for path in _paths(use(ends))}
    for path in _paths(ends):
        if path not in used:
            yield f"neither used_by_first nor used_by_last selects {path}; select it in one, or remove it"


def _paths(tree: Tree) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
