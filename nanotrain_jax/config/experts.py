"""The section model.experts of a config: a mixture of experts in place of MLPs. Needs no JAX."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from nanotrain_jax.config.section import Section, key
from nanotrain_jax.config.values import Count, Width


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
    balance: Literal["loss", "bias", "none"] = key(
        "loss", "how experts are balanced; loss: by one beside the model's; bias: of the choice, without a gradient"
    )
    balance_weight: float = key(0.01, "balance=loss: weight of that loss, which is 1 where experts are balanced", ge=0)
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
        return self.balance_weight if self.balance == "loss" else 0.0

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
        return self
