"""The config: every key with its default and meaning, in frozen, strict sections; pure validation.

runtime/request.py reads what the user wrote; resolved.py fills in what only the machine and the data know (mesh sizes,
vocabulary). Everything downstream receives the resolved config and never changes it. Every error is a ValueError of
one line that names the value, the rule and the remedy.
"""

from __future__ import annotations

from math import isqrt, lcm
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nanotrain_jax.fields import (
    Axis,
    Choice,
    Count,
    Factory,
    Layers,
    Path,
    Positive,
    Remat,
    Seed,
    Sequences,
    Source,
    Tokens,
    Vocabulary,
    Width,
)
from nanotrain_jax.models import families

Pair = Field(strict=False)  # YAML has lists where we want tuples


def _key(default: Any, meaning: str, **rules: Any) -> Any:
    return Field(default=default, description=meaning, **rules)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(_Section):
    """The decoder, or with `factory` another model, which may read the same keys."""

    factory: Factory | None = _key(
        None, "package.module:function that makes another model (models/contract.py); null: the decoder"
    )
    family: families.Name = _key(
        "llama", "; ".join(f"{name}: {family.meaning}" for name, family in families.FAMILIES.items())
    )
    num_layers: Layers = _key(4, "transformer layers")
    d_model: Width = _key(128, "width of the residual stream")
    num_heads: Width = _key(4, "query heads; head dim = d_model / num_heads")
    num_kv_heads: Width | None = _key(None, "key and value heads (grouped-query attention); null: num_heads")
    d_ff: Width | None = _key(
        None, "hidden width of the MLP; null: 4 d_model (gpt2), 8/3 d_model rounded up to 256 (llama)"
    )
    vocab_size: Vocabulary | None = _key(None, "rows of the embedding; null: taken from the tokenizer")
    max_seq_len: Tokens | None = _key(None, "longest sequence the model accepts; null: data.seq_len")
    rope_theta: float = _key(10000.0, "base of the rotary frequencies (llama)", gt=0)
    norm_eps: float = _key(1e-5, "epsilon of the norms", gt=0)
    tie_embeddings: bool | None = _key(None, "use the embedding as output head; null: true for gpt2, false for llama")
    attention: Literal["auto", "xla", "cudnn"] = _key(
        "auto", "attention kernel; auto: cudnn flash attention on a GPU in 16 bit, else xla"
    )
    loss_chunk: Count = _key(0, "tokens whose logits exist at a time, on a device; 0: all of a microbatch")

    @property
    def features(self) -> families.Family:
        """model.family as a value."""
        return families.FAMILIES[self.family]

    @model_validator(mode="after")
    def _heads(self) -> Model:
        if self.factory:
            return self
        if self.d_model % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}; "
                f"use {near_divisors(self.d_model, self.num_heads)}"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use {near_divisors(self.num_heads, self.num_kv_heads)}"
            )
        if not self.features.learned_positions and (self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"head dim {self.d_model // self.num_heads} (model.d_model / model.num_heads) is odd, but rotary "
                "embeddings turn pairs; choose an even head dim"
            )
        return self


class Parallel(_Section):
    """How many devices each mesh axis has."""

    data: Axis = _key(-1, "data-parallel devices; -1: whatever devices remain")
    replica: Axis = _key(1, "groups of data-parallel devices (replicas of the whole)")
    tensor: Axis = _key(1, "tensor-parallel devices: heads, d_ff and vocabulary are split over them")
    sequence_parallel: bool = _key(True, "with tensor: activations between its matmuls are split over tokens")
    pipe: Axis = _key(1, "pipeline stages: layers are split over them")
    schedule: Literal["gpipe", "1f1b", "1f1b_lean", "interleaved", "zero_bubble", "zb_h1", "zb_h2"] = _key(
        "1f1b", "what a stage does when; parallel/schedule.py compares them"
    )
    chunks: Layers = _key(1, "with schedule=interleaved: pieces of the model on each stage")
    idle: Literal["skip", "mask"] = _key(
        "skip", "a stage without work in a tick does none, or computes (both ends of the model too) and throws away"
    )
    context: Axis = _key(1, "context-parallel devices (only 1 so far)")
    zero: Annotated[Literal[0, 1, 2, 3], Choice] = _key(
        0, "shard over data: 1 optimizer state, 2 and gradients, 3 and parameters (ZeRO); 0: nothing"
    )
    grad_reduce: Literal["after_backward", "per_layer"] = _key(
        "after_backward", "zero 0 and 1: when gradients leave; per_layer: while the last microbatch's backward goes on"
    )
    prefetch: bool = _key(
        False, "zero 3: gather the weights of the next layer while a layer computes (two layers whole at a time)"
    )
    bucket_mb: float = _key(
        25.0, "arrays smaller than this are scattered and gathered together, in flat buckets", ge=0, le=1e6
    )
    persist_below: Count = _key(10_000, "parameters with fewer elements (per layer) stay whole at zero 1-3")
    microbatches: Sequences = _key(
        1, "pieces of the local batch, run one after the other; gradients are reduced once per step"
    )

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis -> size as asked for (one of them may be -1)."""
        return {axis: getattr(self, axis) for axis in ("pipe", "replica", "data", "context", "tensor")}

    @model_validator(mode="after")
    def _implemented(self) -> Parallel:
        if self.prefetch and self.zero != 3:
            raise ValueError(
                f"parallel.prefetch=true with parallel.zero={self.zero}: only zero=3 gathers weights layer by layer; "
                "use zero=3, or leave it out"
            )
        for axis, size in self.axes.items():
            if size < 1 and size != -1:
                raise ValueError(f"parallel.{axis}={size}: an axis has 1 or more devices, or -1 for the rest")
        if self.context != 1:
            raise ValueError(
                f"parallel.context={self.context} is not implemented yet; use 1 and spread over parallel.data"
            )
        return self


class Precision(_Section):
    """Dtypes."""

    compute: Literal["bfloat16", "float16", "float32"] = _key(
        "bfloat16", "dtype of matmuls and activations; softmax, norms and loss stay float32"
    )
    loss_scale: str | float = _key(
        "none", "factor on the loss that keeps float16 gradients from vanishing: none | dynamic | NUMBER"
    )
    grad_reduce: Literal["float32", "bfloat16"] = _key("float32", "dtype in which gradients travel between devices")
    master: Literal["float32"] = _key("float32", "dtype of master weights and optimizer moments")

    @model_validator(mode="after")
    def _scale(self) -> Precision:
        scale = self.loss_scale
        if scale not in ("none", "dynamic") and (isinstance(scale, str) or scale <= 0):
            raise ValueError(f"precision.loss_scale={scale!r} is unknown; use none, dynamic or a number above 0")
        return self


class Memory(_Section):
    """What is traded for memory."""

    remat: str = _key(
        "none", "what layers keep for their backward: none (all) | selective (matmul outputs) | full (inputs) | block:N"
    )
    offload_optimizer: Literal["none", "host", "nvme"] = _key(
        "none",
        "where master weights and moments rest: on the device, in host memory, in files in nvme_dir; with both of the "
        "latter, from zero 2 on gradients in host memory",
    )
    offload_params: Literal["none", "host"] = _key(
        "none", "zero 3: where the weights rest; host: each layer comes while the one before it computes"
    )
    offload_activations: Literal["none", "host"] = _key(
        "none", "where what remat=selective, full or block:N keeps waits for the backward"
    )
    nvme_dir: Path | None = _key(
        None, "offload_optimizer=nvme: folder on a fast disk of this machine, of one run alone"
    )

    @property
    def rematerialization(self) -> Remat:
        """memory.remat as a value."""
        return Remat.parse(self.remat)

    @model_validator(mode="after")
    def _policy(self) -> Memory:
        Remat.parse(self.remat)
        if self.offload_optimizer == "nvme" and not self.nvme_dir:
            raise ValueError("memory.offload_optimizer='nvme' needs a folder for its files; set memory.nvme_dir")
        if self.nvme_dir and self.offload_optimizer != "nvme":
            raise ValueError(
                f"memory.nvme_dir={self.nvme_dir!r} is of no use with memory.offload_optimizer="
                f"{self.offload_optimizer!r}; leave it out, or use nvme"
            )
        return self


class Data(_Section):
    """What is read. Documents are joined, an end token after each, and cut into sequences of seq_len tokens; no
    attention mask separates the documents of a sequence."""

    source: Source = _key(
        "stdlib",
        'stdlib (Python\'s own library, as text) | "text:GLOB" | "tokens:DIR" (scripts/prepare_data.py) | synthetic',
    )
    tokenizer: Path | None = _key(
        None,
        "bytes | path of a tokenizer.json, as in a Hugging Face model repository; null: bytes, or what made the token "
        "files",
    )
    batch_size: Sequences = _key(32, "sequences per step, over all devices")
    seq_len: Tokens = _key(256, "tokens per sequence, which may span documents: attention sees all of them")
    seed: Seed = _key(0, "order of the training sequences")
    val_fraction: float = _key(0.05, "share of the text held out, in whole documents; 0: none", ge=0, lt=1)
    verify: bool = _key(True, "check the checksum of token files before training")


class Optimizer(_Section):
    """Learning rates and AdamW."""

    name: Literal["adamw"] = _key("adamw", "AdamW; no decay on norms, biases and learned positions")
    lr: float = _key(1e-3, "peak learning rate", gt=0)
    min_lr: float = _key(0.0, "learning rate at the end of cosine, linear and wsd", ge=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = _key(
        "cosine", "shape after warm-up; wsd: constant, then linear over the last decay_fraction"
    )
    warmup_steps: Count = _key(0, "steps of linear warm-up")
    decay_steps: Positive | None = _key(None, "step at which min_lr is reached; null: train.steps")
    decay_fraction: float = _key(0.1, "share of decay_steps in which wsd decays", gt=0, le=1)
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Pair] = _key(
        (0.9, 0.95), "decay of the first and second moment"
    )
    eps: float = _key(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = _key(0.1, "decoupled weight decay", ge=0)
    grad_clip: float = _key(1.0, "largest global norm of the gradients; 0: no clipping", ge=0)


class Train(_Section):
    """The length of the run."""

    steps: Positive = _key(100, "optimizer steps of the whole run, resumed parts included")
    seed: Seed = _key(0, "initialisation of the parameters")
    eval_every: Count = _key(0, "steps between evaluations; 0: never")
    eval_steps: Positive = _key(10, "batches per evaluation (at most what the held-out text gives)")
    log_every: Count = _key(1, "steps between logged steps (evaluations and the last step always are); 0: only those")


class Checkpoint(_Section):
    """What is kept."""

    dir: Path | None = _key(None, "where checkpoints go; null: <logging.dir>/checkpoints")
    every: Count = _key(100, "steps between checkpoints (one more at the end and on SIGTERM or Ctrl-C); 0: never any")
    keep: Positive = _key(3, "newest checkpoints kept")
    asynchronous: bool = Field(
        default=True, alias="async", description="write in the background while training goes on"
    )
    resume: Path = _key(
        "auto", "auto: newest checkpoint in dir, if any | never | path of another run's checkpoints to begin from"
    )
    verify: bool = _key(True, "compare a checkpoint with its checksums before it is used; damaged: the one before it")


class Logging(_Section):
    """What people look at."""

    dir: Path | None = _key(None, "where the run is written; null: runs/<name of the config file>")
    tensorboard: bool = _key(True, "write TensorBoard files")
    progress: Literal["auto", "bar", "lines", "none"] = _key("auto", "auto: a bar on a terminal, plain lines elsewhere")


class Runtime(_Section):
    """Devices and compiler."""

    simulate: Count = _key(
        0, "run on this many simulated CPU devices, of all processes; 0: the machine's own devices", le=4096
    )
    coordinator: str | None = _key(None, "host:port of process 0; null: as launcher, Slurm, ... say; or one process")
    processes: Positive | None = _key(None, "number of processes, where coordinator is given")
    process: Count | None = _key(None, "which of them this is, from 0; each takes all the GPUs that it sees")
    join_timeout: Positive = _key(300, "seconds to wait for the other processes at the start")
    hang_timeout: Positive | None = _key(
        None, "seconds without progress that end the run with a report; null: 20 median steps, at least 600"
    )
    compile_cache: bool = _key(
        True, "keep compiled programs in ~/.cache/nanotrain_jax for the next run; not with simulate"
    )
    deterministic: bool = _key(False, "ask XLA for deterministic GPU kernels (slower)")
    profile_steps: Annotated[tuple[int, int], Pair] | None = _key(
        None, "[first, last] step written to <logging.dir>/profile for TensorBoard or Perfetto"
    )

    @model_validator(mode="after")
    def _profile(self) -> Runtime:
        if self.profile_steps and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(
                f"runtime.profile_steps={list(self.profile_steps)} is not [first, last] with 1 <= first <= last; "
                "write e.g. [10, 12]"
            )
        return self


class Config(_Section):
    """Everything a run is asked for: one section per field."""

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

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data that `request.parse` reads back."""
        return self.model_dump(mode="json", by_alias=True)

    def replace(self, section: str, **changes: Any) -> Config:
        """This config with some keys of a section changed. Checks nothing."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=changes)})


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding: with tensor parallelism the next multiple of 128 and of its devices, so that each has as
    many, and almost always as many as matmuls like; else as they are."""
    return -(-vocab_size // lcm(128, tensor)) * lcm(128, tensor) if tensor > 1 else vocab_size


def fits_flash(model: Model, compute: str) -> bool:
    """Whether a GPU's flash attention (cuDNN) takes these heads, and is not told off: then no scores are stored."""
    head = model.d_model // model.num_heads
    return model.attention != "xla" and compute != "float32" and head <= 128 and head % 8 == 0


def near_divisors(number: int, wanted: int) -> str:
    """The divisors of number on either side of wanted."""
    found = divisors(number)
    below, above = [d for d in found if d < wanted][-1:], [d for d in found if d > wanted][:1]
    return " or ".join(map(str, below + above))


def divisors(number: int) -> list[int]:
    """The divisors of number in order; above 10**10 those below 10**5, and what they divide number into."""
    small = [d for d in range(1, min(isqrt(number), 10**5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
