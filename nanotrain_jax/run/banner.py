"""Terminal output at the start and at the end of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from nanotrain_jax.checkpoint.directory import latest_step
from nanotrain_jax.config.derived import padded_vocab
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import Span, phases, spans
from nanotrain_jax.costs import counts, memory
from nanotrain_jax.data import batches
from nanotrain_jax.data.tokenizer import CHAT_TEMPLATE
from nanotrain_jax.models.experts import way_of_matmuls
from nanotrain_jax.parallel.pipeline import schedule, schedule_text
from nanotrain_jax.run.metrics import EPOCHS, VAL_OF
from nanotrain_jax.run.phases import Phase


def introduction(config: Config, mesh: Mesh, dataset: batches.Dataset, notes: list[str]) -> str:
    """Return the lines printed before training; notes come last. config: resolved."""
    found = phases(config, Span("", 0, config.train.steps))
    batch_sizes = dict.fromkeys(phase.batch_size or config.data.batch_size for phase in found)
    lines = [
        headline(config, mesh),
        f"{config.data.origin}: {len(dataset.train):,} training and {len(dataset.val):,} held-out sequences of "
        f"{config.data.seq_len} tokens; {', '.join(map(str, batch_sizes))} sequences per step",
    ]
    first = config.train.batch_schedule
    if sum(phase.steps for phase in first) >= min(span.last - span.first for span in spans(config)):
        lines.append("warning: the run, or a stage of it, ends before train.batch_schedule comes to data.batch_size")
    if config.train.eval_every and not (dataset.validation or config.train.tasks):
        lines.append("warning: nothing is held out, so train.eval_every has no effect; use data.val_fraction")
    if config.optimizer.warmup_steps > config.train.steps:
        warmup = config.optimizer.warmup_steps
        lines.append(f"warning: the run ends during warm-up: optimizer.warmup_steps={warmup} > train.steps")
    if config.train.epochs:
        lines.append(f"train.epochs={config.train.epochs:g}: {config.train.steps:,} steps")
    if config.data.exhausted == "end":
        lines.append(f"data.exhausted=end: at most {config.train.steps:,} steps, in which no source is read twice")
    for name, rows, _ in dataset.further:
        lines.append(f"validation {name}: {len(rows):,} sequences")
    lines += [*of_data(dataset), *without_effect(config)]
    if config.model.experts:
        lines.append(way_of_matmuls(config))
    p, vocab = config.parallel, config.model.vocab_size
    rows = padded_vocab(vocab, p.vocab_shards)
    if rows > vocab and not config.model.factory:
        axes = " x ".join(f"{axis} {p.axes[axis]}" for axis in p.vocab_axes)
        lines.append(f"vocabulary: {vocab:,} tokens padded to {rows:,} for {axes}")
    if p.pipe > 1:
        table = schedule.make(p.schedule, p.pipe, p.microbatches, p.chunks, bool(p.vocab_over_pipe))
        bubble = schedule_text.stats(table).bubble_fraction
        ends = "split over all stages" if p.vocab_over_pipe else "on the first and last stage"
        lines.append(
            f"pipeline schedule {p.schedule}: {p.microbatches} microbatches over {p.pipe} stages; bubble {bubble:.0%} "
            "(modelled: forward, input-gradient and weight-gradient passes take equal time); embedding and head "
            f"{ends} (parallel.vocab_over_pipe)"
        )
    if config.parallel.zero and p.data == p.context == 1:
        lines.append(f"parallel.zero={config.parallel.zero} has no effect: parallel.data and context are 1")
    on_host = memory.on_host(config) if config.is_built_in and not config.optimizer.factory else {}
    if on_host:
        sizes = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in on_host.items())
        lines.append(f"offloaded to host memory, per device: {sizes}")
        if mesh.devices.flat[0].platform == "cpu":
            lines.append("on CPU devices offloading saves no memory: device and host memory are the same")
    if config.precision.compute == "float16" and config.precision.loss_scale == "none":
        lines.append(
            "warning: float16 without a loss scale: gradients below 6e-8 underflow to zero, which slows or stops "
            "learning; use precision.loss_scale=dynamic, or bfloat16"
        )
    return "\n".join(lines + notes)


def of_data(dataset: batches.Dataset) -> list[str]:
    """Return lines about what is remarkable of data."""
    lines = [*dataset.notes]
    if dataset.pieces:
        lines.append(f"documents too long to be held out are cut at line ends, into {dataset.pieces:,} pieces")
    if not dataset.has_ends:
        lines.append("the tokenizer names no end token: documents run into each other; data.end_token sets one")
    if dataset.replaced:
        lines.append(f"warning: {dataset.replaced:,} invalid UTF-8 sequences in the text were replaced by U+FFFD")
    return lines


def of_later_data(phases: Sequence[Phase]) -> list[str]:
    """Return lines about data that later stages of training read, and the current one does not."""
    data = {phase.config.data.origin: phase.dataset for phase in phases}
    del data[phases[0].config.data.origin]
    return [f"{origin}: {line}" for origin, dataset in data.items() for line in of_data(dataset)]


def without_effect(config: Config) -> list[str]:
    """Return a warning if parallel.compress or sync_every never acts."""
    every, first, steps = config.parallel.sync_every, config.parallel.full_sync_steps, config.train.steps
    longest = max(span.last - span.first for span in spans(config))
    if first >= longest:
        keys = f"parallel.full_sync_steps={first}, steps={longest}"
        return [f"warning: the run ends before parallel.compress or sync_every begins: {keys}"]
    if every and steps - steps % every <= first:
        keys = f"parallel.sync_every={every}, full_sync_steps={first}, train.steps={steps}"
        return [f"warning: the run ends before replicas are joined: {keys}"]
    return []


def headline(config: Config, mesh: Mesh) -> str:
    """Describe model and mesh in one line."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    device = "simulated CPU device" if config.runtime.simulate else mesh.devices.flat[0].device_kind
    model = config.model.factory or f"{config.model.family} with {counts.parameters(config.model):,} parameters"
    if config.model.experts:
        model += f", {counts.matmul_parameters(config.model):,} of them multiply a token"
    if config.vision:
        of_encoder = counts.all_parameters(config) - counts.parameters(config.model)
        model += f" behind an encoder of pictures with {of_encoder:,} ({config.vision.image_size} pixels, "
        model += f"{config.vision.max_tokens} tokens)"
    return f"{model} on {mesh.size} x {device} ({axes})"


def title(config: Config, mesh: Mesh) -> str:
    """Return the title of the loss plot."""
    return f"{Path(config.logging.dir).name}: {headline(config, mesh)}"


def summary(config: Config, latest: dict[str, Any], bigram: float | None, number: int, prompt: str) -> str:
    """Return the lines printed after step `number`: final metrics, output files, next commands.

    latest: the newest value of each metric. bigram: loss of a bigram model on the held-out text, if known. prompt: for
    generated text; "" if there is none.
    """
    folder = shlex.quote(config.logging.dir)
    unit, units = ("pair", "pairs") if config.train.objective else ("token", "targets")
    is_done = number >= config.train.steps
    lines = [f"{'done' if is_done else 'stopped'} at step {number} of {max(number, config.train.steps)}"]
    if number > config.train.steps:
        lines[0] += f", beyond train.steps={config.train.steps}: nothing was trained"
    if "loss" in latest:
        lines.append(f"  training loss     {latest['loss']:.4f}")
    if "val_loss" in latest:
        lines.append(f"  validation loss   {latest['val_loss']:.4f} nats per {unit}")
    for name, value in latest.items():
        if name.startswith(VAL_OF):
            lines.append(f"    {name.removeprefix(VAL_OF):<15} {value:.4f}")
    if "accuracy" in latest:
        lines.append(f"  accuracy          {latest['accuracy']:.1%} of held-out {units}")
    if "margin" in latest:
        lines.append(f"  margin            {latest['margin']:.4f} of rewards of held-out pairs")
    read = {name.removeprefix(EPOCHS): value for name, value in latest.items() if name.startswith(EPOCHS)}
    if read:
        lines.append("  read              " + ", ".join(f"{name} {times:.2f} times" for name, times in read.items()))
    if bigram:
        lines.append(f"  a bigram model    {bigram:.4f} on the same text (predicts from the previous token only)")
    if "skipped_steps" in latest:
        lines.append(f"  skipped steps     {latest['skipped_steps']} (gradients not finite)")
    if "rollbacks" in latest:
        lines.append(f"  rollbacks         {latest['rollbacks']} (loss spikes)")
    if "mismatches" in latest:
        lines.append(f"  silent errors     {latest['mismatches']} (runtime.verify_every)")
    lines.append(f"  output            {config.logging.dir}/: loss.png, metrics.jsonl, config.yaml")
    if config.logging.tensorboard:
        lines.append(f"  TensorBoard       pip install tensorboard; tensorboard --logdir {folder}/tensorboard")
    if config.checkpoint.is_on and latest_step(config.checkpoint.dir) is not None:
        resumes = "" if config.checkpoint.resume == "never" else f" (the same command resumes from step {number})"
        lines.append(f"  checkpoints       {config.checkpoint.dir}{resumes}")
        if config.data.is_chat and Path(config.logging.dir, CHAT_TEMPLATE).exists():
            lines.append(f"  converse          python -m nanotrain_jax.generate --run {folder} --chat")
        if prompt and config.is_decoder:
            command = f"python -m nanotrain_jax.generate --run {folder} --prompt {shlex.quote(prompt)}"
            lines.append(f"  generate text     {command}")
    return "\n".join(lines)
