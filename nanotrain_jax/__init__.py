"""nanotrain_jax: explicit, readable, proven parallel training of transformers in JAX.

`python -m nanotrain_jax` lists the commands. The public names follow; each is imported when it is first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

_PUBLIC = {
    "Config": "config.schema",
    "load": "config.load",
    "resolve": "config.resolve",
    "layout": "parallel.sharding",
    "Rules": "parallel.sharding",
    "FLAX": "parallel.sharding",
    "HUGGING_FACE_LLAMA": "parallel.sharding",
    "specs": "parallel.sharding",
    "report": "parallel.sharding",
    "describe": "parallel.sharding",
    "shard": "parallel.sharding",
    "zero_specs": "parallel.zero.zero",
    "optimizer_specs": "parallel.sharding",
    "column": "parallel.tensor.tensor",
    "columns": "parallel.tensor.tensor",
    "row": "parallel.tensor.tensor",
    "enter": "parallel.tensor.tensor",
    "leave": "parallel.tensor.tensor",
    "ring_attention": "parallel.context.context",
    "gather_attention": "parallel.context.context",
    "ulysses_attention": "parallel.context.context",
    "as_varying": "parallel.collectives",
    "LayeredModel": "parallel.layered_model",
    "run_schedule": "parallel.pipeline.executor",
    "layer_order": "parallel.pipeline.schedule",
    "Decode": "models.contract",
    "Decoder": "models.decoder",
    "Model": "models.contract",
    "initializer": "models.contract",
    "State": "step.state",
    "Step": "step.build",
    "build": "step.build",
    "load_params": "checkpoint.read",
}
__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"nanotrain_jax.{_PUBLIC[name]}"), name)
    if name == "__version__":
        return version("nanotrain_jax")
    raise AttributeError(f"module 'nanotrain_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
