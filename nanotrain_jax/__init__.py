"""nanotrain_jax: explicit, readable, proven parallel training of transformers in JAX.

Commands: python -m nanotrain_jax.train, .plan, .launch, .generate. The public names follow; each is imported when it is
first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

_PUBLIC = {
    "Config": "config",
    "load": "runtime.request",
    "resolve": "resolved",
    "layout": "sharding",
    "Rules": "sharding",
    "FLAX": "sharding",
    "HUGGING_FACE_LLAMA": "sharding",
    "specs": "sharding",
    "report": "sharding",
    "describe": "sharding",
    "shard": "sharding",
    "zero_specs": "parallel.zero",
    "optimizer_specs": "sharding",
    "column": "parallel.tensor",
    "columns": "parallel.tensor",
    "row": "parallel.tensor",
    "enter": "parallel.tensor",
    "leave": "parallel.tensor",
    "as_varying": "parallel.collectives",
    "LayeredModel": "parallel.layered_model",
    "run_schedule": "parallel.pipeline.executor",
    "layer_order": "parallel.schedule",
    "Decoder": "model",
    "Model": "models.contract",
    "initializer": "models.contract",
    "State": "step.state",
    "Step": "step.build",
    "build": "step.build",
    "load_params": "runtime.restore",
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
