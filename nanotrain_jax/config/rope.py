"""Scaling of rotary positions, for sequences longer than those a model was trained on first. Needs no JAX."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from nanotrain_jax.config.section import Section, key
from nanotrain_jax.config.values import Tokens


class RopeScaling(Section):
    """The section model.rope_scaling, with the keys of Hugging Face's rope_scaling; models/ops.py computes it."""

    type: Literal["linear", "llama3", "yarn"] = key(..., "which frequencies are divided by factor")
    factor: float = key(..., "divides frequencies", ge=1)
    original_max_seq_len: Tokens | None = key(None, "llama3, yarn: tokens of a sequence before scaling")
    low_freq_factor: float = key(1.0, "llama3: waves that turn less often in that many tokens are scaled", gt=0)
    high_freq_factor: float = key(4.0, "llama3: those that turn more often are not", gt=0)
    beta_fast: float = key(32.0, "yarn: waves that turn more often are not scaled", gt=0)
    beta_slow: float = key(1.0, "yarn: those that turn less often are", gt=0)
    attention_factor: float | None = key(None, "yarn: multiplies queries and keys; null: 0.1 ln(factor) + 1", gt=0)

    @model_validator(mode="after")
    def _fits(self) -> RopeScaling:
        if self.type != "linear" and self.original_max_seq_len is None:
            raise ValueError(
                f"model.rope_scaling.type={self.type} without original_max_seq_len: it decides which frequencies are "
                "scaled; set model.rope_scaling.original_max_seq_len"
            )
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high or self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"model.rope_scaling: low_freq_factor={low} and beta_slow={self.beta_slow} must be below "
                f"high_freq_factor={high} and beta_fast={self.beta_fast}; exchange them"
            )
        return self
