"""How the layers of a model run in a step: the one place where that is decided."""

from __future__ import annotations

from enum import Enum

from nanotrain_jax.config import Config


class Execution(Enum):
    """The ways to make gradients (`step/gradients.py`)."""

    AUTODIFF = "a scan over layers, differentiated by JAX; gradients are reduced after the last backward"
    PER_LAYER = "the same; the backward of the last microbatch reduces the gradients of each layer as it makes them"
    OFFLOADED = "a loop over layers with a backward by hand, which copies to and from host memory one layer ahead"
    PIPELINE = "a loop over the ticks of a pipeline schedule (one stage: of microbatches), with a backward by hand"

    @property
    def is_by_hand(self) -> bool:
        """Whether forward and backward are loops of their own. They use the parameters of each end separately."""
        return self in (Execution.OFFLOADED, Execution.PIPELINE)


def execution(config: Config) -> Execution:
    """The execution of a resolved config."""
    p = config.parallel
    if p.pipe > 1 or (p.prefetch and p.microbatches > 1):
        return Execution.PIPELINE
    if p.grad_reduce == "per_layer" and p.zero < 2:
        return Execution.PER_LAYER
    if gradients_on_host(config) or config.memory.offload_activations == "host":
        return Execution.OFFLOADED
    return Execution.AUTODIFF


def gradients_on_host(config: Config) -> bool:
    """Whether large gradients wait in host memory for the update: sharded ones, where its state does too."""
    return config.parallel.zero >= 2 and config.memory.offload_optimizer != "none"
