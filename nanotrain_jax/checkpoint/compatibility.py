"""Check that a run may resume from a checkpoint, and report what changed.

Tokenizer, compute dtype and the model keys that decide what the model computes must match. Other keys may change, and
with rotary positions also the context length: such a model resumes with another data.seq_len, and then also with
another model.rope_theta and rope_scaling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from nanotrain_jax.config.experts import fixed
from nanotrain_jax.config.schema import Config
from nanotrain_jax.data.tokenizer import begin_apart

Plain = dict[str, dict[str, Any]]  # section -> key -> value, from `Config.to_dict`
# Model keys that do not change the result, but for rounding.
SAME_RESULT = {"attention", "kernels", "grouped_matmul", "loss_chunk", "unroll"}
ROPE = {"rope_theta", "rope_scaling"}
NEWER = {"head_dim", "qkv_bias", "qk_norm", "global_layers", "lora"}  # model keys that older versions do not save
# Section, key, value where it is not saved: must be the same, besides the keys of `_must_match`.
MUST_MATCH = ("optimizer", "name", "adamw"), ("optimizer", "factory", None), ("precision", "compute", None)
REPORTED = {  # keys whose change is reported on resume: all that may change a bit of the result; None: whole sections
    "model": ("rope_theta", "rope_scaling", *sorted(SAME_RESULT)),
    "model.experts": None,
    "vision": None,
    "parallel": None,
    "precision": None,
    "memory": None,
    "data": None,
    "optimizer": None,
    "train": None,
    "runtime": ("deterministic",),
}
# Sections that checkpoints of all versions have.
REQUIRED = "model", "parallel", "precision", "data", "optimizer", "train"


class Position(BaseModel):
    """Position in the training data. position: sequences consumed; fingerprint: identifies the data; read: sequences
    consumed of data that stages read before, by fingerprint."""

    model_config = ConfigDict(strict=True)
    position: int = Field(ge=0)
    fingerprint: str
    read: dict[str, int] = Field(default_factory=dict)


class Base(BaseModel):
    """The frozen weights that adapters belong to (checkpoint/base.py).

    folder: a model folder of Hugging Face, or of checkpoints; step: of the checkpoint, None for a model folder. files:
    path below the folder -> [bytes, CRC-32] of each file that holds weights.
    """

    model_config = ConfigDict(strict=True)
    folder: str
    step: int | None = Field(default=None, ge=0)
    files: dict[str, list[int]]

    @property
    def name(self) -> str:
        """The base in words."""
        return self.folder if self.step is None else f"checkpoint {self.step} in {self.folder}"


class Meta(BaseModel):
    """Metadata of a checkpoint.

    config: resolved, as plain data; tokens: consumed so far; batch_size: sequences of the last step (both None in
    checkpoints of older versions); nvme: digest of the NVMe files of each process. weights_only: it holds no state of
    an optimizer, or none that is wanted. base: of adapters (train.lora), which are then the only weights in it. losses:
    those of the newest steps; rollbacks: their number so far (both with train.rollback). mismatches: checks of the
    hardware that failed.
    """

    model_config = ConfigDict(strict=True)
    config: Plain
    tokenizer: str | None
    data: Position
    tokens: int | None = Field(default=None, ge=0)
    batch_size: int | None = Field(default=None, ge=1)
    nvme: list[str] | str | None = None  # a string in those of older versions
    weights_only: bool = False
    base: Base | None = None
    losses: list[float] = Field(default_factory=list)
    rollbacks: int = Field(default=0, ge=0)
    mismatches: int = Field(default=0, ge=0)

    @field_validator("config")
    @classmethod
    def _has_required_keys(cls, config: Plain) -> Plain:
        missing = {*REQUIRED} - config.keys()
        if missing:
            raise ValueError(f"config lacks {', '.join(sorted(missing))}")
        seq_len = config["data"].get("seq_len")
        if not isinstance(seq_len, int) or seq_len < 1:
            raise ValueError(f"data.seq_len is {seq_len!r}")
        return config

    def of_weights(self) -> Meta:
        """Return what of it holds for a run that takes the weights alone."""
        start = Position(position=0, fingerprint="")
        return Meta(
            config=self.config, tokenizer=self.tokenizer, data=start, tokens=0, weights_only=True, base=self.base
        )

    @property
    def seq_len(self) -> int:
        """Sequence length of the run that saved it."""
        return self.config["data"]["seq_len"]

    @property
    def nvme_digests(self) -> list[str]:
        """Digests of the NVMe files of each process."""
        return [self.nvme] if isinstance(self.nvme, str) else self.nvme or []

    @property
    def tokens_seen(self) -> int:
        """Tokens consumed so far; if not saved, position x sequence length."""
        return self.data.position * self.seq_len if self.tokens is None else self.tokens


def of_weights(config: Config) -> dict[str, Any]:
    """Return the model keys that determine the weights, with values, as plain data."""
    free = SAME_RESULT | ROPE | {"norm_eps", "activation", "sliding_window", "rope_local_theta"}
    free |= set() if config.model.features.learned_positions else {"max_seq_len"}
    free |= {key for key in NEWER if getattr(config.model, key) is None}
    keys = {key: value for key, value in config.to_dict()["model"].items() if key not in free}
    return keys | {"experts": fixed(keys["experts"])}


def check(meta: Meta, requested: Config, config: Config, tokenizer: str | None) -> None:
    """Raise ValueError unless a run may resume from a checkpoint.

    requested: the config before `resolve`, to name the key that the user set; config: resolved.
    """
    remedy = "or start again in another logging.dir"
    is_unknown = meta.weights_only and None in (tokenizer, meta.tokenizer)  # synthetic data; a model without one
    if tokenizer != meta.tokenizer and not is_unknown:
        begin = begin_apart(tokenizer, meta.tokenizer)
        raise ValueError(
            f"the data's tokenizer is {tokenizer} but the checkpoint was trained with {meta.tokenizer}; "
            f"resume with the same tokenizer{f' (data.begin_token: {begin})' if begin else ''}, {remedy}"
        )
    model, then = config.to_dict()["model"], meta.config
    for key in _must_match(meta, config):
        now, was = model[key], then["model"].get(key)
        if key == "experts":
            key, now, was = _of_experts(now, was)
        if now == was:
            continue
        if key == "max_seq_len" and requested.model.max_seq_len is None:
            shorter = f", with model.max_seq_len={was} any shorter one" if now < was else ""
            raise ValueError(
                f"data.seq_len={now} but the checkpoint has learned positions for {was} tokens "
                f"(model.family={config.model.family}); "
                f"use data.seq_len={was}{shorter}, {remedy}"
            )
        hint = f" ({key} may change only together with data.seq_len)" if key in ROPE else ""
        name = "train.lora" if key == "lora" else f"model.{key}"
        raise ValueError(
            f"{name}={now} but the checkpoint was trained with {was}; resume with the same model{hint}, {remedy}"
        )
    for section, key, default in () if meta.weights_only else MUST_MATCH:
        now, was = getattr(getattr(config, section), key), then[section].get(key, default)
        if now != was:
            raise ValueError(
                f"{section}.{key}={now} but the checkpoint was trained with {was}; resume with the same {section}, "
                f"{remedy}"
            )


def _of_experts(now: Plain | None, was: Plain | None) -> tuple[str, Any, Any]:
    """Return the first key of model.experts that a trained model fixes and that differs, and its values; of two that
    are alike the whole."""
    now, was = fixed(now), fixed(was)
    differ = (name for name in now or {} if was and now[name] != was[name])
    name = next(differ, None)
    return (f"experts.{name}", now[name], was[name]) if name else ("experts", now, was)


def _must_match(meta: Meta, config: Config) -> list[str]:
    """Return the model keys that must be the same in the checkpoint and the run."""
    free = set(SAME_RESULT)
    if config.model.features.learned_positions:
        free |= {"rope_theta"}
    else:
        free |= {"max_seq_len"} if config.data.seq_len == meta.seq_len else ROPE | {"max_seq_len"}
    return [key for key in config.to_dict()["model"] if key not in free]


def changes(meta: Meta, config: Config) -> Iterator[str]:
    """Yield the changes of the reported keys since the checkpoint, as "key old -> new".

    optimizer.decay_steps is omitted if it equals train.steps in both.
    """
    now, then = map(_with_experts, (config.to_dict(), meta.config))
    follows = all(plain["optimizer"].get("decay_steps") == plain["train"].get("steps") for plain in (now, then))
    both = [(section, keys) for section, keys in REPORTED.items() if section in now and section in then]
    reported = [(section, key) for section, keys in both for key in keys or now[section]]
    for section, key in reported:
        if key not in then[section] or key not in now[section] or (key == "decay_steps" and follows):
            continue
        if now[section][key] != then[section][key]:
            yield f"{section}.{key} {then[section][key]} -> {now[section][key]}"


def _with_experts(config: Plain) -> Plain:
    """Return a config with model.experts as a section."""
    return config | {"model.experts": config["model"].get("experts") or {}}
