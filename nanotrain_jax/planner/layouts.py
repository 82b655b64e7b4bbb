"""Every layout of a model on a number of GPUs: what a search tries.

`search.py` describes the space. Functions count what they leave out, by reason, in `rejected`. fixed: "section.key" ->
value, of the keys that the user has chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import product
from math import gcd, prod
from typing import Any

from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import divisors
from nanotrain_jax.costs import counts, hardware

MOST_PADDING = 0.25  # rows of layers that are padding, over layers
LONG = 8192  # fewest tokens of a sequence on a device, where context splits sequences
# Keys of train that some numbers of microbatches suit -> value that all suit.
OF_MICROBATCHES = {"noise_scale": False, "batch_schedule": (), "batch_growth": None}


class Rejection(StrEnum):
    """Reasons to reject a layout; `Misfit.reason` and mesh sizes add others as text."""

    MEMORY = "needs more memory than there is"
    MARGIN = "fits only without the margin of the estimate"
    BATCH = "data.batch_size is not divisible by replica x data"
    CHUNKS = "chunks, without stages"
    PADDING = "more than a quarter of the layers would be padding"
    INTERLEAVED = "several chunks, with microbatches that are no multiple of the stages"
    AXES = "the given axes do not multiply to the number of GPUs"
    EXPERT = "parallel.expert does not divide parallel.data"


def layouts(config: Config, gpu: str, gpus: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[Config]:
    """Yield the config on every mesh with every ZeRO stage and schedule, with one microbatch."""
    for mesh in meshes(config, gpu, gpus, fixed, rejected):
        if mesh.parallel.pipe == 1 and fixed.get("parallel.chunks", 1) > 1:
            rejected[Rejection.CHUNKS] += 1
            continue
        yield from layouts_of_mesh(mesh, fixed, rejected)


def layouts_of_mesh(mesh: Config, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[Config]:
    """Yield a mesh with every ZeRO stage and schedule; count those with too much padding in rejected."""
    split_ends = fixed.get("parallel.vocab_over_pipe")
    for zero, schedule, chunks in zero_and_schedules(mesh, fixed):
        keys = {"zero": zero, "schedule": schedule, "chunks": chunks, "vocab_over_pipe": split_ends}
        layout = mesh.replace("parallel", **keys)
        if counts.stage_layers(layout) * mesh.parallel.pipe > (1 + MOST_PADDING) * mesh.model.main_layers:
            rejected[Rejection.PADDING] += 1
        else:
            yield layout


def meshes(config: Config, gpu: str, gpus: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[Config]:
    """Yield the config on every valid mesh; count the reasons of the others in rejected."""
    most = max(config.data.seq_len // LONG, 1)
    for axes in _axes(hardware.find(gpu).joined, gpus, most, fixed, rejected):
        mesh = config.replace("parallel", **axes, microbatches=1, chunks=1, schedule="1f1b", prefetch=False)
        if config.data.batch_size % (axes["replica"] * axes["data"]):
            rejected[Rejection.BATCH] += 1
            continue
        inside = max(hardware.find(gpu).joined // (axes["context"] * axes["tensor"]), 1)
        sizes = options(fixed, "parallel.expert", expert_sizes(config, axes["data"], inside))
        fitting = [size for size in sizes if axes["data"] % size == 0]
        if not fitting:
            rejected[Rejection.EXPERT] += 1
        for size in fitting:
            yield from _with_attention(
                mesh.replace("parallel", expert=size, expert_exchange=exchange(config, size)), axes, fixed, rejected
            )


def exchange(config: Config, expert: int) -> str:
    """Return parallel.expert_exchange of a layout; with all experts on each device nothing is exchanged."""
    return config.parallel.expert_exchange if expert > 1 else "padded"


def expert_sizes(config: Config, data: int, inside: int) -> list[int]:
    """Return the values of parallel.expert worth trying: 1; the largest, and the largest within an NVLink domain, where
    `inside` devices of data are."""
    experts = config.model.experts
    sizes = divisors(gcd(data, experts.num)) if experts else [1]
    return sorted({1, max(size for size in sizes if size <= inside), max(sizes)})


def _with_attention(
    mesh: Config, axes: Mapping[str, int], fixed: Mapping[str, Any], rejected: Counter[str]
) -> Iterator[Config]:
    """Yield a mesh, resolved, with every kind of attention over context worth trying."""
    blockwise = "gather" if axes["pipe"] > 1 and mesh.parallel.idle == "skip" else "ring"
    kinds = [mesh.parallel.context_attention]
    if axes["context"] > 1:
        kinds = options(fixed, "parallel.context_attention", (blockwise, "ulysses"))
    for kind in kinds:
        plain = mesh.replace("parallel", context_attention=kind).replace("train", **OF_MICROBATCHES)
        try:
            resolved = resolve(plain, mesh.parallel.axes)
        except Misfit as error:
            rejected[error.reason] += 1
            continue
        yield resolved.replace("train", **{key: getattr(mesh.train, key) for key in OF_MICROBATCHES})


def _axes(
    joined: int, gpus: int, most_context: int, fixed: Mapping[str, Any], rejected: Counter[str]
) -> Iterator[dict[str, int]]:
    """Yield every mesh of a number of GPUs. joined: GPUs of an NVLink domain; most_context: unless fixed."""
    for tensor in _dividing(gpus, "parallel.tensor", fixed, rejected):
        if tensor > joined and "parallel.tensor" not in fixed:
            rejected[f"parallel.tensor is larger than an NVLink domain of {joined} GPUs"] += 1
            continue
        for pipe in _dividing(gpus // tensor, "parallel.pipe", fixed, rejected):
            yield from _copies(joined, gpus, {"pipe": pipe, "tensor": tensor}, most_context, fixed, rejected)


def _copies(
    joined: int,
    gpus: int,
    model_axes: Mapping[str, int],
    most_context: int,
    fixed: Mapping[str, Any],
    rejected: Counter[str],
) -> Iterator[dict[str, int]]:
    """Yield the meshes with these sizes of pipe and tensor: context, replica and data share the other GPUs."""
    copies, inside = gpus // prod(model_axes.values()), joined // model_axes["tensor"]
    for context in _dividing(copies, "parallel.context", fixed, rejected):
        if context <= most_context or "parallel.context" in fixed:
            groups = _groups(copies // context, max(inside // context, 1), fixed, rejected)
            yield from (model_axes | group | {"context": context} for group in groups)


def _dividing(gpus: int, key: str, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[int]:
    """Yield every size of a mesh axis that divides a number of GPUs."""
    for size in options(fixed, key, divisors(gpus)):
        if gpus % size:
            rejected[f"{key}={size} does not divide {gpus} GPUs"] += 1
            continue
        yield size


def _groups(copies: int, joined: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[dict[str, int]]:
    """Yield replica and data for a number of model copies, `joined` of them in an NVLink domain."""
    groups = [1] + [copies // joined] * (joined > 1 and copies > joined and copies % joined == 0)
    for replica in options(fixed, "parallel.replica", groups):
        if copies % replica or fixed.get("parallel.data", -1) not in (-1, copies // replica):
            rejected[Rejection.AXES] += 1
            continue
        yield {"replica": replica, "data": copies // replica}


def zero_and_schedules(config: Config, fixed: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Yield ZeRO stage, schedule and chunks worth trying on a mesh."""
    stages = options(fixed, "parallel.zero", (1, 2, 3) if counts.zero_devices(config) > 1 else (0,))
    if config.parallel.pipe == 1:
        yield from ((zero, "1f1b", 1) for zero in stages)
        return
    schedules = options(fixed, "parallel.schedule", ("1f1b", "zero_bubble", "interleaved"))
    for zero, schedule in product(stages, schedules):
        several = [c for c in divisors(counts.stage_layers(config)) if c > 1]
        chunks = {"interleaved": several, "zero_bubble": [1, *several]}.get(schedule, [1])
        yield from ((zero, schedule, count) for count in options(fixed, "parallel.chunks", chunks))


def options(fixed: Mapping[str, Any], key: str, default: Any) -> list[Any]:
    """Return the values of a key to try: the given one, else the defaults."""
    return [fixed[key]] if fixed.get(key, -1) != -1 else list(default)
