"""Check that a mixture of experts goes with the other keys of a config."""

from math import gcd

from nanotrain_jax.config.derived import fits_grouped_kernel
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import near_divisors
from nanotrain_jax.kernels.limits import GROUPED_TILE


def check_experts(config: Config) -> None:
    """Raise Misfit for what a mixture of experts (model.experts) is not made for yet."""
    m, p = config.model, config.parallel
    if m.experts is None and p.expert > 1:
        raise Misfit(f"parallel.expert={p.expert} without model.experts: there are none to share", "use 1")
    if p.expert_exchange != "padded" and p.expert == 1:
        raise Misfit(
            f"parallel.expert_exchange={p.expert_exchange} with parallel.expert=1: nothing is exchanged", "leave it out"
        )
    if m.experts is None:
        if m.grouped_matmul != "padded":
            raise Misfit(f"model.grouped_matmul={m.grouped_matmul} without model.experts", "leave it out")
        return
    if m.experts.num % p.expert:
        raise Misfit(
            f"parallel.expert={p.expert} does not divide model.experts.num={m.experts.num}: each device has as many",
            f"use {near_divisors(gcd(m.experts.num, p.data), p.expert)}",
        )
    of_mlp = [name for name in (m.lora.targets if m.lora else ()) if name in ("gate", "up", "down")]
    refused = {  # what -> remedy
        "model.factory": m.factory and "leave one of them out",
        "vision": config.vision and "leave one of them out",
        f"train.lora.targets with {', '.join(of_mlp)}": of_mlp and "use train.lora.targets=[q, k, v, out]",
        "parallel.vocab_over_pipe=true and first_dense": p.vocab_over_pipe
        and m.dense_layers
        and "use parallel.vocab_over_pipe=false",
        f"balance=bias and parallel.sync_every={p.sync_every}": p.sync_every
        and m.experts.balance == "bias"
        and "use model.experts.balance=loss",
    }
    if m.grouped_matmul == "tokamax" and not fits_grouped_kernel(config):
        raise Misfit(
            f"model.grouped_matmul=tokamax with precision.compute={config.precision.compute}, matmul="
            f"{config.precision.matmul}, model.d_model={m.d_model} and model.experts.d_ff={m.experts.d_ff} over "
            f"parallel.tensor={p.tensor}: its kernel needs 16 bits and widths that {GROUPED_TILE} divides",
            "use model.grouped_matmul=padded",
        )
    for what, remedy in refused.items():
        if remedy:
            raise Misfit(f"model.experts with {what}: not supported for a mixture of experts yet", remedy)
