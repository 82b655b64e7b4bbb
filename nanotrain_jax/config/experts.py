"""The section model.experts of a config: a mixture of experts in place of MLPs. Needs no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from nanotrain_jax.config.section import Section, key
from nanotrain_jax.config.values import Count, Width

# Keys that a trained model fixes; others may change when its training continues.
FIXED = "num", "top_k", "d_ff", "shared", "first_dense", "router", "normalize", "gate_scale"

WEIGHT = 0.01  # balance_weight with balance=loss


class Experts(Section):
    """A mixture of experts (models/experts.py): each token goes to top_k of num gated MLPs. No token is dropped where
    each device has all experts."""

    num: Width = key(..., "experts of a layer")
    top_k: Width = key(..., "experts that a token goes to")
    d_ff: Width = key(..., "hidden size of an expert")
    shared: Count = key(0, "further experts of that size, to which every token goes")
    first_dense: Count = key(
        0, "the first so many layers have an MLP of model.d_ff in place of experts (DeepSeek-V2, arXiv 2405.04434)"
    )
    router: Literal["softmax", "sigmoid"] = key("softmax", "scores of experts: softmax over them, or sigmoid of each")
    normalize: bool = key(True, "scale the scores of a token's experts to sum to 1")
    gate_scale: float = key(1.0, "what multiplies the scores of a token's experts (DeepSeek-V3: 2.5)", gt=0)
    balance: Literal["loss", "bias", "none"] = key(
        "loss", "how experts are balanced; loss: by one beside the model's; bias: of the choice, without a gradient"
    )
    balance_weight: float | None = key(
        None,
        "weight of a loss that is 1 where experts are balanced, with balance=bias beside the bias; null: 0.01 with "
        "balance=loss, else 0",
        ge=0,
    )
    bias_rate: float = key(0.001, "balance=bias: how far a step moves the bias of an expert", gt=0)
    capacity: float = key(
        1.25,
        "parallel.expert > 1: how many rows devices have room for, over those of balanced experts; what is beyond is "
        "dropped and logged",
        ge=1,
        le=2**20,
    )
    z_loss: float = key(0.0, "weight of the mean square of the router's logsumexp, which keeps logits small", ge=0)

    @property
    def weight(self) -> float:
        """Weight of the loss that balances experts."""
        if self.balance == "none":
            return 0.0
        default = WEIGHT if self.balance == "loss" else 0.0
        return default if self.balance_weight is None else self.balance_weight

    @property
    def adds_loss(self) -> bool:
        """True if training has a further loss."""
        return self.weight > 0 or self.z_loss > 0

    @model_validator(mode="after")
    def _fits(self) -> Experts:
        if self.top_k > self.num:
            raise ValueError(
                f"model.experts.top_k={self.top_k} exceeds model.experts.num={self.num}: a token goes to each expert "
                f"at most once; use at most {self.num}"
            )
        is_given = self.balance_weight not in (None, 0.0, WEIGHT)  # older versions saved the default, whatever balances
        if self.balance == "none" and is_given:
            raise ValueError(
                f"model.experts.balance_weight={self.balance_weight:g} with model.experts.balance=none: nothing "
                "balances; use balance=loss, or leave balance_weight out"
            )
        if self.balance != "bias" and self.bias_rate != type(self).model_fields["bias_rate"].default:
            raise ValueError(
                f"model.experts.bias_rate={self.bias_rate:g} with model.experts.balance={self.balance}: no bias moves; "
                "use balance=bias, or leave bias_rate out"
            )
        return self


def fixed(keys: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return of a section model.experts, as plain data, what a trained model fixes; a key that it lacks (one of an
    older version) has its default. None: without experts."""
    if keys is None:
        return None
    values = {name: keys.get(name, Experts.model_fields[name].default) for name in FIXED}
    return values | {"balance": "bias" if keys.get("balance") == "bias" else "loss or none"}  # it has an array
