"""What a run says of itself on the terminal: at its beginning, and at its end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from nanotrain_jax.audit import cost, memory
from nanotrain_jax.config import Config, padded_vocab
from nanotrain_jax.parallel import chart, schedule
from nanotrain_jax.runtime import checkpoint, data


def introduction(config: Config, mesh: Mesh, dataset: data.Dataset, notes: list[str]) -> str:
    """What is about to run, in a few lines; notes come last. config: resolved."""
    lines = [
        headline(config, mesh),
        f"{config.data.source}: {len(dataset.train):,} training and {len(dataset.val):,} held-out sequences of "
        f"{config.data.seq_len} tokens; {config.data.batch_size} per step",
    ]
    if config.optimizer.warmup_steps > config.train.steps:
        warmup = config.optimizer.warmup_steps
        lines.append(f"warning: the run ends within the warm-up: optimizer.warmup_steps={warmup} > train.steps")
    if dataset.replaced:
        lines.append(f"warning: {dataset.replaced:,} invalid pieces of UTF-8 in the text became U+FFFD")
    vocab, rows = config.model.vocab_size, padded_vocab(config.model.vocab_size, config.parallel.tensor)
    if rows > vocab and not config.model.factory:
        lines.append(f"vocabulary: {vocab:,} tokens padded to {rows:,}, for tensor {config.parallel.tensor}")
    p = config.parallel
    if p.pipe > 1:
        waits = chart.stats(schedule.make(p.schedule, p.pipe, p.microbatches, p.chunks)).bubble_fraction
        lines.append(
            f"schedule {p.schedule}: {p.microbatches} microbatches over {p.pipe} stages; a stage waits {waits:.0%} of "
            "the time (modelled: forward and both halves of the backward take as long)"
        )
    if config.parallel.zero and mesh.shape["data"] == 1:
        lines.append(f"parallel.zero={config.parallel.zero} has nothing to shard over: parallel.data is 1")
    in_host_memory = {} if config.model.factory else memory.on_host(config)
    parts = [f"{what} {size / 1e9:.3g} GB" for what, size in in_host_memory.items()]
    if parts:
        lines.append("in host memory, for each device: " + ", ".join(parts))
        if mesh.devices.flat[0].platform == "cpu":
            lines.append("CPU devices have no other memory: offloading runs the same program here and saves nothing")
    if config.precision.compute == "float16" and config.precision.loss_scale == "none":
        lines.append(
            "warning: float16 without a loss scale: gradients below 6e-8 become zero and the model learns badly or not "
            "at all; use precision.loss_scale=dynamic, or bfloat16"
        )
    return "\n".join(lines + notes)


def headline(config: Config, mesh: Mesh) -> str:
    """Describe model and mesh in one line."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    device = "simulated CPU device" if config.runtime.simulate else mesh.devices.flat[0].device_kind
    model = config.model.factory or f"{config.model.family} of {cost.parameters(config.model):,} parameters"
    return f"{model} on {mesh.size} x {device} ({axes})"


def title(config: Config, mesh: Mesh) -> str:
    """Return the title of a picture of this run."""
    return f"{Path(config.logging.dir).name}: {headline(config, mesh)}"


def summary(config: Config, last: dict[str, Any], bigram: float | None, number: int) -> str:
    """What came out of it after step `number`, where it lies and how to look at it.

    last: the newest value of each metric. bigram: the loss of such a model on the held-out text, if known.
    """
    folder = shlex.quote(config.logging.dir)
    lines = [f"{'stopped' if number < config.train.steps else 'done'} at step {number} of {config.train.steps}"]
    if "loss" in last:
        lines.append(f"  training loss     {last['loss']:.4f}")
    if "val_loss" in last:
        lines.append(f"  validation loss   {last['val_loss']:.4f} nats per token")
    if bigram:
        lines.append(f"  a bigram model    {bigram:.4f} on the same text: all that the previous token alone can tell")
    if "skipped_steps" in last:
        lines.append(f"  skipped steps     {last['skipped_steps']} (gradients were not finite)")
    lines.append(f"  in {config.logging.dir}/: loss.png, metrics.jsonl, config.yaml")
    if config.logging.tensorboard:
        lines.append(f"  TensorBoard       pip install tensorboard; tensorboard --logdir {folder}/tensorboard")
    if config.checkpoint.every and checkpoint.latest_step(config.checkpoint.dir) is not None:
        again = "" if config.checkpoint.resume == "never" else f" (the same command goes on from step {number})"
        lines.append(f"  checkpoints       {config.checkpoint.dir}{again}")
        if config.data.source != "synthetic" and not config.model.factory:
            lines.append(f'  what it writes    python -m nanotrain_jax.generate --run {folder} --prompt "def "')
    return "\n".join(lines)
