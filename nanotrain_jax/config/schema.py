"""Config schema: every key with its default and description, in frozen, strict sections. Validation only.

config/load.py reads the YAML file and the overrides; config/resolve.py fills in what depends on the machine and the
data (mesh sizes, vocabulary). All other code receives the resolved config and never changes it. Every error is a
one-line ValueError with the value, the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from nanotrain_jax.config.data import Data
from nanotrain_jax.config.model import Model
from nanotrain_jax.config.run_sections import Checkpoint, Logging, Runtime, Train
from nanotrain_jax.config.section import Pair, Section, key
from nanotrain_jax.config.values import (
    Axis,
    Choice,
    Compression,
    Count,
    Factory,
    Layers,
    Path,
    Positive,
    Remat,
    Sequences,
    near_divisors,
)
from nanotrain_jax.config.vision import Vision

EIGHT_BITS = "float8", "int8"  # values of precision.grad_reduce and precision.gather


class Parallel(Section):
    """Mesh axis sizes, ZeRO, pipeline schedule and communication. `parallel: auto` is a section with auto: true."""

    auto: bool = key(
        False,
        "take the planner's first layout for the devices that are here, also memory.remat and model.loss_chunk; keys "
        "of parallel beside it stay",
    )
    data: Axis = key(-1, "data-parallel size; -1: all remaining devices")
    expert: Axis = key(
        1, "devices of data that share the experts of a mixture, each with num / expert of them; divides data"
    )
    expert_exchange: Literal["padded", "ragged"] = key(
        "padded", "with expert > 1: all places of the buffers of rows travel, or (on GPUs) those with a row"
    )
    replica: Axis = key(1, "replicas of the data-parallel group; ZeRO shards inside a replica (HSDP)")
    sync_every: Count = key(
        0,
        "with replica > 1: replicas step apart, and an outer optimizer joins their weights every sync_every steps "
        "(DiLoCo); 0: off, gradients are summed over replicas in every step",
    )
    tensor: Axis = key(1, "tensor-parallel size; shards heads, d_ff and vocabulary")
    sequence_parallel: bool = key(
        True, "with tensor > 1: shard activations outside tensor-parallel matmuls over the sequence"
    )
    overlap_tensor: bool = key(
        False,
        "with tensor > 1 and sequence_parallel: communicate activations in hops, each behind a part of its matmul",
    )
    pipe: Axis = key(1, "pipeline-parallel size (number of stages)")
    schedule: Literal["gpipe", "1f1b", "1f1b_lean", "interleaved", "zero_bubble", "zb_h1", "zb_h2"] = key(
        "1f1b", "pipeline schedule; parallel/pipeline/schedule.py compares them"
    )
    chunks: Layers = key(1, "model chunks per stage (virtual stages), for schedule=interleaved and zero_bubble")
    vocab_over_pipe: bool | None = key(
        None,
        "with pipe > 1: split embedding, head and loss over all stages; null: if that makes a step shorter",
    )
    idle: Literal["skip", "mask"] = key(
        "skip",
        "stages without work in a tick; skip: no compute (one host sync per branch on a GPU); mask: compute, discard",
    )
    context: Axis = key(1, "context-parallel size; shards the tokens of each sequence")
    context_attention: Literal["ring", "gather", "ulysses"] = key(
        "ring",
        "attention with context > 1; ring: keys and values travel, behind attention; gather: they are gathered; "
        "ulysses: tokens are exchanged for heads",
    )
    zero: Annotated[Literal[0, 1, 2, 3], Choice] = key(
        0, "ZeRO stage; shard over data and context: 1 optimizer state, 2 also gradients, 3 also parameters; 0: off"
    )
    grad_reduce: Literal["after_backward", "per_layer"] = key(
        "after_backward", "when to reduce gradients (zero 0 and 1); per_layer: during the last microbatch's backward"
    )
    prefetch: bool = key(
        False, "zero 3: gather the next layer's weights and scatter the previous one's gradients while a layer computes"
    )
    bucket_mb: float = key(
        25.0, "bucket size in MB; arrays smaller than this are reduced and gathered in flat buckets", ge=0, le=1e6
    )
    persist_below: Count = key(10_000, "zero 1-3: do not shard parameters with fewer elements than this (per layer)")
    microbatches: Sequences = key(
        1, "microbatches per step (gradient accumulation); zero 0 and 1 reduce gradients once per step"
    )

    compress: str = key(
        "none",
        "with replica > 1: sum gradients over replica compressed; none | float8 | int8 | with error feedback "
        "topk:RATIO | randomk:RATIO | powersgd:RANK",
    )
    full_sync_steps: Count = key(
        0, "with compress or sync_every: the first so many steps of a stage are without, gradients are summed whole"
    )

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis -> requested size (one may be -1). Those of data and expert multiply to the key data."""
        sizes = {axis: getattr(self, axis) for axis in ("pipe", "replica", "data", "expert", "context", "tensor")}
        return sizes | {"data": self.data if self.data == -1 else self.data // self.expert}

    @staticmethod
    def keys_of(axes: Mapping[str, int]) -> dict[str, int]:
        """Return the keys of mesh axes with their sizes: the inverse of `axes`."""
        return dict(axes) | {"data": axes["data"] * axes.get("expert", 1)}

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the vocabulary: tensor, with vocab_over_pipe also pipe; without axes of one device."""
        axes = ("pipe", "tensor") if self.vocab_over_pipe else ("tensor",)
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def vocab_shards(self) -> int:
        return prod(getattr(self, axis) for axis in self.vocab_axes)

    @property
    def compression(self) -> Compression:
        return Compression.parse(self.compress)

    @property
    def is_blockwise(self) -> bool:
        """True if attention is computed block by block, over tokens in zig-zag order (parallel/context/)."""
        return self.context > 1 and self.context_attention != "ulysses"

    @model_validator(mode="after")
    def _sizes(self) -> Parallel:
        Compression.parse(self.compress)
        if self.prefetch and self.zero != 3:
            raise ValueError(
                f"parallel.prefetch=true with parallel.zero={self.zero}: only zero=3 gathers weights layer by layer; "
                "use parallel.zero=3, or remove parallel.prefetch"
            )
        if self.full_sync_steps and not self.sync_every and self.compress == "none":
            raise ValueError(
                f"parallel.full_sync_steps={self.full_sync_steps} has no effect without parallel.compress or "
                "sync_every; remove it"
            )
        for axis in self.axes:
            size = getattr(self, axis)
            if size < 1 and (size != -1 or axis == "expert"):
                remaining = "" if axis == "expert" else ", or -1 for all remaining devices"
                raise ValueError(f"parallel.{axis}={size}: must be at least 1{remaining}")
        if self.data != -1 and self.data % self.expert:
            raise ValueError(
                f"parallel.expert={self.expert} does not divide parallel.data={self.data}: it is a part of these "
                f"devices; use {near_divisors(self.data, self.expert)}"
            )
        return self


class Precision(Section):
    """Dtypes and loss scaling."""

    compute: Literal["bfloat16", "float16", "float32"] = key(
        "bfloat16", "dtype of matmuls and activations; softmax, norms and loss stay float32"
    )
    loss_scale: str | float = key("none", "loss scale, against underflow of float16 gradients: none | dynamic | NUMBER")
    grad_reduce: Literal["float32", "bfloat16", "float8", "int8"] = key(
        "float32", "gradients on the wire; float8, int8: in blocks of 128 with a float32 scale each, summed in float32"
    )
    matmul: Literal["bfloat16", "float8"] | None = key(
        None, "matmuls of layers; float8: e4m3, gradients e5m2 (Hopper and later GPUs); null: precision.compute"
    )
    gather: Literal["bfloat16", "float8", "int8"] | None = key(
        None, "zero 3: weights of layers on the wire; float8: e4m3, int8: in blocks of 128; null: precision.compute"
    )
    logits: Literal["float32"] | None = key(
        None, "dtype in which the loss stores logits, for a float32 softmax; null: precision.compute"
    )
    master: Literal["float32"] = key("float32", "dtype of master weights and optimizer moments")

    @model_validator(mode="after")
    def _scale(self) -> Precision:
        scale = self.loss_scale
        if scale not in ("none", "dynamic") and (isinstance(scale, str) or scale <= 0):
            raise ValueError(f"precision.loss_scale={scale!r} must be none, dynamic or a number above 0")
        return self


class Memory(Section):
    """Rematerialization and offload."""

    remat: str = key(
        "none",
        "rematerialization: none | selective (save matmul outputs) | full (save layer inputs) | block:N (every N-th)",
    )
    offload_optimizer: Literal["none", "host", "nvme"] = key(
        "none",
        "offload master weights and moments to host memory or to files in nvme_dir; from zero 2 on, also gradients "
        "to host memory",
    )
    offload_params: Literal["none", "host"] = key(
        "none", "zero 3: offload weights to host memory; the next layer is prefetched while a layer computes"
    )
    offload_activations: Literal["none", "host"] = key(
        "none", "offload the residuals that remat=selective, full or block:N saves to host memory until the backward"
    )
    nvme_dir: Path | None = key(
        None,
        "offload_optimizer=nvme: folder on a fast local disk, used by one run at a time; several processes have a "
        "folder each below it",
    )

    @property
    def rematerialization(self) -> Remat:
        return Remat.parse(self.remat)

    @model_validator(mode="after")
    def _policy(self) -> Memory:
        Remat.parse(self.remat)
        if self.offload_optimizer == "nvme" and not self.nvme_dir:
            raise ValueError("memory.offload_optimizer='nvme' needs a folder; set memory.nvme_dir")
        if self.nvme_dir and self.offload_optimizer != "nvme":
            raise ValueError(
                f"memory.nvme_dir={self.nvme_dir!r} has no effect with memory.offload_optimizer="
                f"{self.offload_optimizer!r}; remove it, or use memory.offload_optimizer=nvme"
            )
        return self


class Optimizer(Section):
    """The optimizer and the learning rate schedule."""

    name: Literal["adamw", "muon"] = key(
        "adamw",
        "optimizer; muon: orthogonalized momentum for matrices of layers, AdamW for the rest, one learning rate. No "
        "weight decay on norms, biases and learned positions",
    )
    factory: Factory | None = key(
        None,
        "package.module:function that builds an element-wise optax optimizer (step/optimizer.py); null: `name`",
    )
    lr: float = key(1e-3, "peak learning rate", gt=0)
    min_lr: float = key(0.0, "final learning rate of cosine, linear and wsd", ge=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = key(
        "cosine", "learning rate after warm-up; wsd: constant, then linear decay over the last decay_fraction"
    )
    warmup_steps: Count = key(0, "linear warm-up, in steps")
    decay_steps: Positive | None = key(None, "step at which the learning rate reaches min_lr; null: train.steps")
    decay_fraction: float = key(0.1, "wsd: fraction of decay_steps spent decaying", gt=0, le=1)
    lr_by_batch: Literal["sqrt", "linear", "none"] = key(
        "sqrt",
        "train.batch_schedule, batch_growth: learning rate of a smaller batch; sqrt: times the root of batch / "
        "data.batch_size, for Adam; linear: times batch / data.batch_size, for SGD; none: the same",
    )
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Pair] = key(
        (0.9, 0.95), "decay rates of first and second moment"
    )
    momentum: float = key(0.95, "muon: decay rate of the momentum of matrices", ge=0, lt=1)
    eps: float = key(1e-8, "epsilon, added to the square root of the second moment", gt=0)
    weight_decay: float = key(0.1, "decoupled weight decay", ge=0)
    grad_clip: float = key(1.0, "clip gradients to this global norm; 0: off", ge=0)
    outer_lr: float = key(0.7, "parallel.sync_every: learning rate of the outer optimizer, SGD", gt=0)
    outer_momentum: float = key(0.9, "parallel.sync_every: Nesterov momentum of the outer optimizer", ge=0, lt=1)


class Config(Section):
    """The whole config: one field per section."""

    model: Model = Model()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    memory: Memory = Memory()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    runtime: Runtime = Runtime()
    vision: Vision | None = None

    @property
    def is_decoder(self) -> bool:
        """True if the model is the built-in decoder, alone."""
        return self.is_built_in and self.vision is None

    @property
    def is_built_in(self) -> bool:
        """True if the model is ours, not of model.factory: its costs are known in closed form."""
        return self.model.factory is None

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Return every section by name."""
        types = ((name, get_args(field.annotation) or [field.annotation]) for name, field in cls.model_fields.items())
        return {name: annotation[0] for name, annotation in types}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data that `load.parse` reads back; without sections that are None."""
        tree = {name: keys for name, keys in self.model_dump(mode="json", by_alias=True).items() if keys is not None}
        if self.train.epochs is not None:
            del tree["train"]["steps"]  # they follow
        return tree

    def replace(self, section: str, **changes: Any) -> Config:
        """Return a copy with some keys of a section changed. Validates nothing."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=changes)})
