"""What a checkpoint must have in common with the run that resumes from it, and what may differ."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nanotrain_jax.config import Config


class Position(BaseModel):
    """Where a run stands in its data. position: sequences consumed; fingerprint: of what they are taken from."""

    model_config = ConfigDict(strict=True)
    position: int = Field(ge=0)
    fingerprint: str


class Meta(BaseModel):
    """What a checkpoint holds beside arrays. config: resolved, as plain data; nvme: digest of the NVMe files."""

    model_config = ConfigDict(strict=True)
    config: dict[str, dict[str, Any]]
    tokenizer: str | None
    data: Position
    nvme: str | None = None


def check(meta: Meta, config: Config, tokenizer: str | None) -> None:
    """Raise ValueError unless the checkpoint is of this model and tokenizer; both configs resolved."""
    if tokenizer != meta.tokenizer:
        raise ValueError(
            f"the data's tokenizer is {tokenizer} but the checkpoint was trained with {meta.tokenizer}; "
            "resume with the same tokenizer, or begin anew in another logging.dir"
        )
    now, then = config.to_dict(), meta.config
    for section, key in [*(("model", key) for key in now["model"] if key != "attention"), ("precision", "compute")]:
        if now[section][key] != then[section].get(key):
            raise ValueError(
                f"{section}.{key}={now[section][key]} but the checkpoint was trained with {then[section].get(key)}; "
                f"resume with the same {section}, or begin anew in another logging.dir"
            )
