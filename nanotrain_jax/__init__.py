"""nanotrain_jax: explicit, readable, proven parallel training of transformers in JAX.

Commands: python -m nanotrain_jax.train, .plan, .launch, .generate. The public names follow; each is imported when it is
first used.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Config": "config",
    "load": "runtime.request",
    "resolve": "resolved",
    "layout": "sharding",
    "Rules": "sharding",
    "specs": "sharding",
    "shard": "sharding",
    "zero_specs": "parallel.zero",
    "column": "parallel.tensor",
    "row": "parallel.tensor",
    "run_schedule": "parallel.pipeline",
    "Decoder": "model",
    "State": "step",
    "Step": "step",
    "build": "step",
    "load_params": "runtime.restore",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"nanotrain_jax.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'nanotrain_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
