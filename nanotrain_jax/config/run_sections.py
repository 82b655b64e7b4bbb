"""Sections of a config about a run, whatever it trains: length, checkpoints, logs, devices and processes."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nanotrain_jax.config.mixture import Sources
from nanotrain_jax.config.model import Lora
from nanotrain_jax.config.section import Pair, Section, key
from nanotrain_jax.config.values import HUGGING_FACE, Count, Path, Positive, Resume, Seed, Sequences, Service


def check_pattern(pattern: str) -> None:
    """Raise ValueError unless a pattern is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"freeze: {pattern!r} is not a regular expression ({error}); write e.g. ^layers/") from None


class TrainStage(Section):
    """A stage of training: a new optimizer on the weights of the stage before it."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = key(..., "shown in output")
    steps: Positive = key(..., "optimizer steps of this stage")
    freeze: Annotated[tuple[str, ...], Pair] = key((), "as train.freeze, in addition to it")
    lr: Annotated[float, Field(gt=0)] | None = key(
        None, "peak learning rate, and min_lr in proportion; null: optimizer.lr"
    )
    data: Sources | None = key(None, "as data.source; null: data.source")


class BatchPhase(Section):
    """Some steps with a batch smaller than data.batch_size."""

    steps: Positive = key(..., "optimizer steps of this phase")
    batch_size: Sequences = key(..., "global batch size, in sequences per step")


class BatchGrowth(Section):
    """A batch that doubles, up to data.batch_size, at each check that finds the gradient noise scale above it."""

    batch_size: Sequences = key(..., "global batch size to begin with, in sequences per step")
    every: Positive = key(..., "steps between checks")


class Rollback(Section):
    """The section train.rollback: what a loss spike is (run/rollback.py), and how often to go back from one."""

    deviations: float = key(6.0, "a spike is a loss so many standard deviations above the mean of the window", gt=0)
    window: int = key(128, "steps before it whose losses count; before there are as many none is one", ge=8, le=4096)
    not_finite: Positive = key(3, "a spike are also so many losses in a row that are not finite")
    most: Positive = key(3, "rollbacks of a run; after one more spike it stops with exit code 4")


class Objective(Section):
    """The section train.objective: what is learned of data.source=pairs:GLOB (models/dpo.py)."""

    kind: Literal["dpo"] = key(..., "dpo: direct preference optimization (arXiv 2305.18290)")
    beta: float = key(0.1, "rewards are beta times log p - log r: how far the model may leave the reference", gt=0)
    label_smoothing: float = key(0.0, "fraction of pairs that are the wrong way round", ge=0, lt=0.5)


class Train(Section):
    """Length of the run, evaluation and logging intervals."""

    steps: Positive = key(100, "total optimizer steps, including those before a resume; with stages at most theirs")
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = key(
        None, "instead of steps: how often to go through the training rows, e.g. 3 or 0.5"
    )
    seed: Seed = key(0, "random seed of the parameter initialization")
    noise_scale: bool = key(False, "log the gradient noise scale, in tokens: how large a batch still pays")
    freeze: Annotated[tuple[str, ...], Pair] = key(
        (), "regular expressions: weights in whose path one is found ('^layers/') are frozen"
    )
    lora: Lora | None = key(
        None,
        "{rank, alpha, targets, rslora}: train adapters of these matrices of layers (LoRA) alone; all else is frozen, "
        "with the weights of checkpoint.resume",
    )
    objective: Objective | None = key(
        None,
        "{kind: dpo, beta, label_smoothing}: learn from pairs (data.source=pairs:GLOB) which completion is preferred; "
        "null: predict the next token",
    )
    stages: Annotated[tuple[TrainStage, ...], Pair] = key(
        (),
        "stages of training, [{name, steps, freeze, lr, data}, ...]: each as a run of its own, with the same weights",
    )
    batch_schedule: Annotated[tuple[BatchPhase, ...], Pair] = key(
        (), "smaller batches to begin with, [{steps, batch_size}, ...]; then data.batch_size"
    )
    batch_growth: BatchGrowth | None = key(
        None,
        "{batch_size, every}: a smaller batch to begin with; every so many steps it doubles if the noise scale is "
        "above it, up to data.batch_size",
    )
    eval_every: Count = key(0, "steps between evaluations; 0: never")
    eval_steps: Positive = key(10, "batches per evaluation (fewer if the held-out text is short)")
    tasks: Annotated[tuple[Path, ...], Pair] = key(
        (), "files of multiple choice (evaluate --tasks) to score at each evaluation, as task/NAME"
    )
    max_skipped: Count = key(
        20, "stop, with exit code 4, after so many skipped steps in a row: their gradients were not finite; 0: never"
    )
    rollback: Rollback | None = key(
        None,
        "{deviations, window, not_finite, most}: after a loss spike go back to the newest checkpoint, and never read "
        "the batches since again; null: continue",
    )
    save_hf: bool = key(False, "write <logging.dir>/hf at the end: a model folder of Hugging Face in precision.compute")
    log_every: Count = key(1, "steps between log lines; evaluations and the last step are always logged; 0: only these")

    @model_validator(mode="after")
    def _stages(self) -> Train:
        names = [stage.name for stage in self.stages]
        for pattern in (*self.freeze, *(pattern for stage in self.stages for pattern in stage.freeze)):
            check_pattern(pattern)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"train.stages has two stages {twice!r}; give them different names")
        return self

    @model_validator(mode="before")
    @classmethod
    def _without_steps(cls, keys: Any) -> Any:
        """With epochs an override steps=null takes the steps of a file away."""
        if isinstance(keys, dict) and keys.get("epochs") is not None and keys.get("steps", 0) is None:
            return {key: value for key, value in keys.items() if key != "steps"}
        return keys

    @model_validator(mode="after")
    def _epochs(self) -> Train:
        others = {"steps": "steps" in self.model_fields_set, "stages": self.stages}
        others |= {"batch_schedule": self.batch_schedule, "batch_growth": self.batch_growth}
        other = next((name for name, value in others.items() if value), None)
        if self.epochs is not None and other:
            remedy = ", or take it from a file with an override, train.steps=null" if other == "steps" else ""
            raise ValueError(
                f"train.epochs={self.epochs:g} with train.{other}: both say how long the run is; leave one out{remedy}"
            )
        return self

    @model_validator(mode="after")
    def _batch(self) -> Train:
        if self.batch_growth and self.batch_schedule:
            raise ValueError("train.batch_growth with train.batch_schedule: both choose the batch; leave one out")
        if self.batch_growth and not self.noise_scale:
            raise ValueError("train.batch_growth without the noise scale, which decides; use train.noise_scale=true")
        return self


class Checkpoint(Section):
    """Saving and resuming."""

    dir: Path | None = key(None, "checkpoint folder; null: <logging.dir>/checkpoints")
    every: Count = key(100, "steps between checkpoints; also saves at the end and on SIGTERM or Ctrl-C; 0: never")
    minutes: float = key(0.0, "also save after so many minutes without a save; 0: only by steps", ge=0, le=1e6)
    keep: Positive = key(3, "number of checkpoints to keep (the newest)")
    keep_every: Count = key(
        0, "keep checkpoints of steps that are multiples of this for good, e.g. 10000; a multiple of every; 0: none"
    )
    local_dir: Path | None = key(
        None,
        "folder on a disk of each host: fast copies between checkpoints, each process its shards; a run resumes from "
        "them if they are newer and processes together hold all of the state; null: none",
    )
    local_every: Positive = key(10, "steps between local copies, with local_dir")
    asynchronous: bool = Field(
        default=True, alias="async", description="write in the background while training continues"
    )
    resume: Resume = key(
        "auto",
        "auto: from the newest checkpoint in dir, if any | never | PATH of another run, which continues here | "
        "weights:PATH: its weights alone, at step 0 | hf:FOLDER: those of a model folder of Hugging Face",
    )
    step: Positive | None = key(
        None, "with resume=PATH or weights:PATH: which checkpoint the run starts from; null: the newest"
    )
    verify: bool = key(True, "verify checksums before loading; if damaged, fall back to the previous checkpoint")

    @property
    def is_on(self) -> bool:
        """True if checkpoints are saved."""
        return bool(self.every or self.minutes)

    @model_validator(mode="after")
    def _local(self) -> Checkpoint:
        if self.local_dir is None:
            return self
        key = f"checkpoint.local_dir={self.local_dir!r}"
        if not self.is_on:
            raise ValueError(
                f"{key} with checkpoint.every=0: local copies are lost with their hosts; use checkpoint.every=100"
            )
        if self.every and self.local_every % self.every == 0:
            raise ValueError(
                f"{key} with checkpoint.local_every={self.local_every}, a multiple of checkpoint.every={self.every}: "
                "such steps have a checkpoint already; use a smaller local_every"
            )
        if self.dir and os.path.realpath(self.dir) == os.path.realpath(self.local_dir):
            raise ValueError(f"{key} is checkpoint.dir too; use a folder on a disk of each host")
        return self

    @model_validator(mode="after")
    def _start(self) -> Checkpoint:
        if self.step and (self.resume in ("auto", "never") or self.resume.startswith(HUGGING_FACE)):
            raise ValueError(
                f"checkpoint.step={self.step} with checkpoint.resume={self.resume}: it is a step of another "
                "run; use checkpoint.resume=PATH of that run, and another logging.dir"
            )
        return self

    @model_validator(mode="after")
    def _kept(self) -> Checkpoint:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} is no multiple of checkpoint.every={self.every}: such steps "
                "need not have a checkpoint; use a multiple"
            )
        return self


class Logging(Section):
    """Output for people."""

    dir: Path | None = key(None, "output folder of the run; null: runs/<name of the config file>")
    tensorboard: bool = key(True, "write TensorBoard files")
    wandb: Service = key(False, "log to Weights & Biases: name of a project; true: nanotrain_jax; false: off")
    mlflow: Service = key(False, "log to MLflow: name of an experiment; true: nanotrain_jax; false: off")
    progress: Literal["auto", "bar", "lines", "none"] = key(
        "auto", "progress display; auto: bar on a terminal, else lines"
    )


class Runtime(Section):
    """Devices, processes and compiler."""

    simulate: Count = key(0, "number of simulated CPU devices, over all processes; 0: use the real devices", le=4096)
    coordinator: str | None = key(
        None, "host:port of process 0; null: from the launcher, Slurm, ..., or a single process"
    )
    processes: Positive | None = key(None, "number of processes, if coordinator is set")
    process: Count | None = key(None, "index of this process, from 0; a process uses all GPUs visible to it")
    join_timeout: Positive = key(300, "timeout for all processes to join at startup, in seconds")
    hang_timeout: Positive | None = key(
        None, "abort with a report after this many seconds without progress; null: 20 median steps, at least 600"
    )
    compile_cache: bool = key(True, "cache compiled programs in ~/.cache/nanotrain_jax; off with simulate")
    deterministic: bool = key(False, "use deterministic GPU kernels (slower)")
    verify_every: Count = key(
        0,
        "steps between checks for silent errors of hardware: gradients are computed twice, and copies of arrays "
        "compared between devices; 0: never",
    )
    on_mismatch: Literal["rollback", "stop"] = key(
        "rollback", "after such a check fails: rollback: on from the newest checkpoint | stop, with exit code 4"
    )
    time_devices_every: Count = key(
        0,
        "steps between timings of matmuls on each device alone; one above 1.2 times the median is named; 0: never",
    )
    profile_steps: Annotated[tuple[int, int], Pair] | None = key(
        None, "[first, last] step to profile; written to <logging.dir>/profile for TensorBoard or Perfetto"
    )

    @model_validator(mode="after")
    def _verified(self) -> Runtime:
        if self.verify_every and not (self.deterministic or self.simulate):
            raise ValueError(
                f"runtime.verify_every={self.verify_every} with kernels that need not compute the same bits twice; use "
                "runtime.deterministic=true"
            )
        return self

    @model_validator(mode="after")
    def _profile(self) -> Runtime:
        if self.profile_steps and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(
                f"runtime.profile_steps={list(self.profile_steps)} must be [first, last] with 1 <= first <= last; "
                "write e.g. [10, 12]"
            )
        return self
