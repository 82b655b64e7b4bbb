"""What a checkpoint must have in common with the run that resumes from it, and what may differ.

Bound are the tokenizer, the compute dtype and the keys that decide what the model computes. Free is what changes no
weight (`of_weights`), and for rotary positions the context length: llama resumes with another data.seq_len, and then
with another model.rope_theta too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from nanotrain_jax.config import Config

Plain = dict[str, dict[str, Any]]  # section -> key -> value, as `Config.to_dict` gives
SAME_RESULT = {"attention", "loss_chunk"}  # keys of the model that change how it is computed, not what
REPORTED = {  # keys whose change is reported at a resume; None: all of the section
    "model": ("rope_theta",),
    "precision": ("loss_scale", "grad_reduce"),
    "data": ("source", "batch_size", "seq_len", "seed", "val_fraction"),
    "optimizer": None,
    "train": ("steps",),
}


class Position(BaseModel):
    """Where a run stands in its data. position: sequences consumed; fingerprint: of what they are taken from."""

    model_config = ConfigDict(strict=True)
    position: int = Field(ge=0)
    fingerprint: str


class Meta(BaseModel):
    """What a checkpoint holds beside arrays.

    config: resolved, as plain data; tokens: seen by the run so far, None in checkpoints of older versions; nvme: digest
    of the NVMe files.
    """

    model_config = ConfigDict(strict=True)
    config: Plain
    tokenizer: str | None
    data: Position
    tokens: int | None = Field(default=None, ge=0)
    nvme: str | None = None

    @field_validator("config")
    @classmethod
    def _has_what_is_read(cls, config: Plain) -> Plain:
        missing = ({"model"} | REPORTED.keys()) - config.keys()
        if missing:
            raise ValueError(f"config lacks {', '.join(sorted(missing))}")
        seq_len = config["data"].get("seq_len")
        if not isinstance(seq_len, int) or seq_len < 1:
            raise ValueError(f"data.seq_len is {seq_len!r}")
        return config

    @property
    def seq_len(self) -> int:
        """Tokens per sequence of the run that saved it."""
        return self.config["data"]["seq_len"]

    @property
    def tokens_seen(self) -> int:
        """Tokens that the run has seen; where that was not saved, by its position and the length of its sequences."""
        return self.data.position * self.seq_len if self.tokens is None else self.tokens


def of_weights(config: Config) -> dict[str, Any]:
    """The keys of the model that decide which weights there are, with their values, as plain data."""
    free = SAME_RESULT | {"rope_theta", "norm_eps"}
    free |= set() if config.model.features.learned_positions else {"max_seq_len"}
    return {key: value for key, value in config.to_dict()["model"].items() if key not in free}


def check(meta: Meta, asked: Config, config: Config, tokenizer: str | None) -> None:
    """Raise ValueError unless a run may resume from a checkpoint.

    asked: the config before it was resolved, to name the key that the user set; config: resolved.
    """
    remedy = "or start again in another logging.dir"
    if tokenizer != meta.tokenizer:
        raise ValueError(
            f"the data's tokenizer is {tokenizer} but the checkpoint was trained with {meta.tokenizer}; "
            f"resume with the same tokenizer, {remedy}"
        )
    model, then = config.to_dict()["model"], meta.config
    for key in _bound(meta, config):
        now, was = model[key], then["model"].get(key)
        if now == was:
            continue
        if key == "max_seq_len" and asked.model.max_seq_len is None:
            shorter = f", with model.max_seq_len={was} any shorter one" if now < was else ""
            raise ValueError(
                f"data.seq_len={now} but the checkpoint has learned positions for {was} tokens "
                f"(model.family={config.model.family}); "
                f"use data.seq_len={was}{shorter}, {remedy}"
            )
        hint = " (rope_theta may change only together with data.seq_len)" if key == "rope_theta" else ""
        raise ValueError(
            f"model.{key}={now} but the checkpoint was trained with {was}; resume with the same model{hint}, {remedy}"
        )
    now, was = config.precision.compute, then["precision"].get("compute")
    if now != was:
        raise ValueError(
            f"precision.compute={now} but the checkpoint was trained with {was}; resume with the same precision, "
            f"{remedy}"
        )


def _bound(meta: Meta, config: Config) -> list[str]:
    """The keys of the model in which a checkpoint and the run must agree."""
    free = set(SAME_RESULT)
    if config.model.features.learned_positions:
        free |= {"rope_theta"}
    else:
        free |= {"max_seq_len"} if config.data.seq_len == meta.seq_len else {"max_seq_len", "rope_theta"}
    return [key for key in config.to_dict()["model"] if key not in free]


def changes(meta: Meta, config: Config) -> Iterator[str]:
    """What differs from the checkpoint's config among the reported keys, as "key old -> new".

    optimizer.decay_steps is left out where it follows train.steps in both.
    """
    now, then = config.to_dict(), meta.config
    follows = all(plain["optimizer"].get("decay_steps") == plain["train"].get("steps") for plain in (now, then))
    reported = [(section, key) for section, keys in REPORTED.items() for key in keys or now[section]]
    for section, key in reported:
        if key not in then[section] or (key == "decay_steps" and follows):
            continue
        if now[section][key] != then[section][key]:
            yield f"{section}.{key} {then[section][key]} -> {now[section][key]}"
