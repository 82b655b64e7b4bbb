"""How a step runs the layers and makes gradients: the single predicate that decides it."""

from enum import Enum

from nanotrain_jax.config.schema import Config

# Layers that are written out by default: compiling takes a second for each; and without ZeRO 3 XLA keeps a copy of the
# weights of each from forward to backward, which is little up to this width, but not of experts.
MOST_LAYERS, WIDEST = 48, 2048


class Execution(Enum):
    """The ways to make gradients (`step/gradients.py`)."""

    AUTODIFF = "scan over layers, differentiated by JAX; gradients are reduced after the last backward"
    PER_LAYER = "as AUTODIFF, but the last microbatch's backward reduces each layer's gradients as it computes them"
    OFFLOADED = "loop over layers with a hand-written backward; copies to and from host memory one layer ahead"
    PIPELINE = "loop over the ticks of a pipeline schedule (microbatches, if one stage) with a hand-written backward"

    @property
    def is_by_hand(self) -> bool:
        """True if forward and backward are hand-written loops. They use the parameters of each end separately."""
        return self in (Execution.OFFLOADED, Execution.PIPELINE)


def execution(config: Config) -> Execution:
    """Return the execution of a resolved config."""
    p = config.parallel
    if p.pipe > 1 or p.prefetch:
        return Execution.PIPELINE
    if reduces_per_layer(config):
        return Execution.PER_LAYER
    if gradients_on_host(config) or config.memory.offload_activations == "host":
        return Execution.OFFLOADED
    return Execution.AUTODIFF


def writes_layers_out(config: Config, platform: str) -> bool:
    """True if the compiled step has the layers one after another, no loop (`model.unroll`). platform: cpu or gpu.

    Loops whose backward is written by hand keep residuals in buffers of their own, and stay loops. With offload, where
    memory is scarce, XLA would hold more.
    """
    if execution(config).is_by_hand:
        return False
    if config.model.unroll != "auto":
        return config.model.unroll
    m, memory = config.model, config.memory
    offloads = any(mode != "none" for mode in (memory.offload_optimizer, memory.offload_params))
    are_small = m.d_model <= WIDEST and m.experts is None
    fits = m.num_layers <= MOST_LAYERS and (config.parallel.zero == 3 or are_small)
    return platform == "gpu" and fits and not offloads


def gradients_on_host(config: Config) -> bool:
    """True if large gradients are offloaded to host memory until the update: sharded ones, with the optimizer state."""
    return config.parallel.zero >= 2 and config.memory.offload_optimizer != "none"


def keeps_reduced(config: Config) -> bool:
    """True if gradients that ZeRO 2 or 3 reduced in 16 bit stay so until they are added in float32, or used."""
    is_plain = config.parallel.compress == "none" and not config.parallel.sync_every
    return config.parallel.zero >= 2 and execution(config) is Execution.AUTODIFF and is_plain


def head_gradient(config: Config) -> str:
    """Return the dtype in which the gradient of the head leaves its matmul: that in which ZeRO reduces it, if it stays
    so; float32 where chunks of the loss add it up."""
    are_rounded = {config.precision.compute, config.precision.grad_reduce} == {"bfloat16"}
    return "bfloat16" if are_rounded and keeps_reduced(config) and not config.model.loss_chunk else "float32"


def casts_at_use(config: Config) -> bool:
    """True if the weights are stored as float32 shards only, and cast to precision.compute where they are gathered:
    16-bit ZeRO 3, unless the float32 weights are offloaded."""
    m = config.memory
    on_device = m.offload_optimizer == "none" and m.offload_params == "none"
    return config.parallel.zero == 3 and config.precision.compute != "float32" and on_device


def reduces_per_layer(config: Config) -> bool:
    """True if parallel.grad_reduce=per_layer has an effect (ZeRO 0 and 1): ZeRO 2 and 3 always reduce per layer."""
    return config.parallel.grad_reduce == "per_layer" and config.parallel.zero < 2
