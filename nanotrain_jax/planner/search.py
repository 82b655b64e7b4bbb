"""Search layouts: estimate every layout that the trainer can run on the GPUs, rank those that fit by step time.

The search space, as far as model, batch and hosts allow and the user has not fixed it:

    mesh          tensor within an NVLink domain; pipe where at most a quarter of the layers are padding; context where
                  a device then has at least 8,192 tokens of a sequence; the rest data, in one group or in groups within
                  an NVLink domain (`replica`: ZeRO's traffic then stays on NVLink)
    context_attention   ring (gather with pipeline stages) and ulysses
    zero          1, 2, 3 if data x context is larger than 1; 0 communicates and stores more than 1
    microbatches  every divisor of a device's sequences
    schedule      1f1b, zero_bubble, interleaved with every number of chunks; for the best layouts also the schedules
                  with one unit of work per tick. gpipe takes as long as 1f1b and stores more
    vocab_over_pipe   as `resolve` chooses; for the best layouts also the other
    remat         none, selective, full: the first that fits, as the others only recompute more
    loss_chunk    0, then (before the next remat policy) about 2,048 tokens, if the loss takes too much memory

A layout fits if its estimate and the margin (`estimate.margin`) do; layouts that fit only without the margin are
returned only if no others fit. Offload is not searched: memory.offload_* stays as in the config.

Layouts with modelled step times within 1% rank as equal: fewer mesh axes first, then fewer bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import product
from math import isqrt, prod
from typing import Any, NamedTuple

from nanotrain_jax.config.resolve import Misfit, resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import counts, hardware, memory
from nanotrain_jax.planner.estimate import MEMORY_FRACTION, Estimate, estimate, margin, on_hardware, verdict

POLICIES = ("none", "selective", "full")
ONE_UNIT_PER_TICK = ("1f1b_lean", "zb_h1", "zb_h2")
LOSS_CHUNK = 2048  # largest, tokens: enough for efficient matmuls, few logits in memory
MOST_PADDING = 0.25  # rows of layers that are padding, over layers
LONG = 8192  # fewest tokens of a sequence on a device, where context splits sequences
MESH = ("parallel.pipe", "parallel.replica", "parallel.data", "parallel.context", "parallel.tensor")
SEARCHED = (
    *MESH,
    "parallel.context_attention",
    "parallel.zero",
    "parallel.schedule",
    "parallel.chunks",
    "parallel.vocab_over_pipe",
    "parallel.microbatches",
    "memory.remat",
    "model.loss_chunk",
)


class Rejection(StrEnum):
    """Reasons to reject a layout; `Misfit.reason` and mesh sizes add others as text."""

    MEMORY = "needs more memory than there is"
    MARGIN = "fits only without the margin of the estimate"
    BATCH = "data.batch_size is not divisible by replica x data"
    CHUNKS = "chunks, without stages"
    PADDING = "more than a quarter of the layers would be padding"
    INTERLEAVED = "interleaved, with microbatches that are no multiple of the stages"
    AXES = "the given axes do not multiply to the number of GPUs"


class SearchResult(NamedTuple):
    """The outcome of a search."""

    best: list[Estimate]  # the best of each mesh and schedule, fastest first; all fit, or none does with its margin
    rejected: Counter[str]  # reason -> number of layouts
    tried: int
    smallest: Estimate | None  # the least peak memory, whether it fits or not; None if no mesh is valid
    complete: bool = True  # False: the search stopped at its limit of layouts


class Candidates:
    """The layouts that a search has estimated so far, by how they fit."""

    def __init__(self, gpu: str, memory_fraction: float) -> None:
        """memory_fraction: of the GPU's memory, which JAX preallocates."""
        self.gpu, self.memory_fraction = gpu, memory_fraction
        self.limit = memory_fraction * hardware.find(gpu).memory_bytes
        self.capability = hardware.find(gpu).capability
        self.fitting: list[Estimate] = []
        self.within_margin: list[Estimate] = []
        self.rejected: Counter[str] = Counter()
        self.tried = 0
        self.smallest: tuple[float, Config] | None = None

    def reject(self, reason: str) -> None:
        """Count a layout that is invalid or does not fit."""
        self.rejected[reason] += 1

    def consider(self, variants: Iterator[Config]) -> bool:
        """Keep the first variant that fits, else the first that fits without the margin; return False if none does.

        variants: of one layout, fastest first.
        """
        without_margin = None
        for variant in variants:
            self.tried += 1
            size = sum(memory.peak(variant, self.capability)[1].values())
            if self.smallest is None or size < self.smallest[0]:
                self.smallest = size, variant
            fit = verdict(size, margin(variant), self.limit)
            if fit == "fits":
                self.fitting.append(estimate(variant, self.gpu, self.memory_fraction))
                return True
            if fit == "may not fit":
                without_margin = without_margin or variant
                self.reject(Rejection.MARGIN)
            else:
                self.reject(Rejection.MEMORY)
        if without_margin:
            self.within_margin.append(estimate(without_margin, self.gpu, self.memory_fraction))
        return without_margin is not None

    def result(self, complete: bool = True) -> SearchResult:
        """Return the ranked layouts."""
        smallest = estimate(self.smallest[1], self.gpu, self.memory_fraction) if self.smallest else None
        return SearchResult(ranked(self.fitting or self.within_margin), self.rejected, self.tried, smallest, complete)


def search(
    config: Config,
    gpu: str,
    gpus: int,
    memory_fraction: float = MEMORY_FRACTION,
    fixed: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> SearchResult:
    """Search the layouts of a model and batch on a number of GPUs, and rank them by modelled step time.

    config: resolved except for SEARCHED keys. memory_fraction: of a GPU's memory, which JAX preallocates. fixed:
    "section.key" -> value, of SEARCHED keys. most: layouts to estimate before it stops (None: all). Raises ValueError
    for an unknown GPU, or a number of them that does not fill hosts.
    """
    hardware.check_count(gpu, gpus)
    config, fixed = on_hardware(config, gpu), dict(fixed or {})
    if config.memory.offload_params == "host":  # requires ZeRO 3
        config, fixed = config.replace("parallel", zero=3), {"parallel.zero": 3} | fixed
    if config.memory.offload_activations == "host":  # requires remat other than none
        config = config.replace("memory", remat="full")
    candidates = Candidates(gpu, memory_fraction)
    for layout in layouts(config, gpu, gpus, fixed, candidates):
        _try_microbatches(layout, fixed, candidates)
        if most is not None and candidates.tried > most:
            return candidates.result(complete=False)
    _try_variants_of_the_best(fixed, candidates)
    return candidates.result()


def layouts(config: Config, gpu: str, gpus: int, fixed: Mapping[str, Any], candidates: Candidates) -> Iterator[Config]:
    """Yield the config on every mesh with every ZeRO stage and schedule, with one microbatch."""
    for mesh in meshes(config, gpu, gpus, fixed, candidates.rejected):
        if mesh.parallel.pipe == 1 and fixed.get("parallel.chunks", 1) > 1:
            candidates.reject(Rejection.CHUNKS)
            continue
        for zero, schedule, chunks in zero_and_schedules(mesh, fixed):
            layout = mesh.replace("parallel", zero=zero, schedule=schedule, chunks=chunks)
            if counts.stage_layers(layout) * mesh.parallel.pipe > (1 + MOST_PADDING) * mesh.model.num_layers:
                candidates.reject(Rejection.PADDING)
                continue
            yield layout.replace("parallel", vocab_over_pipe=fixed.get("parallel.vocab_over_pipe"))


def _try_microbatches(layout: Config, fixed: Mapping[str, Any], candidates: Candidates) -> None:
    p = layout.parallel
    share = layout.data.batch_size // (p.replica * p.data)
    fits = True
    for microbatches in sorted(_options(fixed, "parallel.microbatches", _divisors(share)), reverse=True):
        # Fewer microbatches are larger and need more memory, except that a single one needs no gradient accumulation.
        if not fits and (microbatches > 1 or p.pipe > 1):
            continue
        if p.schedule == "interleaved" and microbatches % p.pipe:
            candidates.reject(Rejection.INTERLEAVED)
            continue
        tried = candidates.tried
        variants = _variants(layout.replace("parallel", microbatches=microbatches), fixed, candidates)
        fits = candidates.consider(variants) or candidates.tried == tried


def _variants(layout: Config, fixed: Mapping[str, Any], candidates: Candidates) -> Iterator[Config]:
    """Yield the layout with every remat policy and loss chunk that may help it to fit, fastest first."""
    policies = _options(fixed, "memory.remat", POLICIES)
    chunks = _options(fixed, "model.loss_chunk", dict.fromkeys((0, _loss_chunk(layout))))
    for remat, chunk in product(policies, chunks):
        variant = layout.replace("memory", remat=remat).replace("model", loss_chunk=chunk)
        try:
            variant = resolve(variant, layout.parallel.axes)
        except Misfit as error:
            candidates.reject(error.reason)
            continue
        if not chunk or "model.loss_chunk" in fixed or _loss_matters(variant, candidates):
            yield variant


def _loss_chunk(layout: Config) -> int:
    """Return the largest divisor of a microbatch's tokens on a device up to LOSS_CHUNK; 0 if it would not help."""
    p, d = layout.parallel, layout.data
    tokens = d.batch_size // (p.replica * p.data * p.microbatches) * d.seq_len // p.context
    chunk = next(size for size in range(LOSS_CHUNK, 0, -1) if tokens % size == 0) if tokens else 0
    return chunk if LOSS_CHUNK / 8 <= chunk < tokens else 0


def _loss_matters(layout: Config, candidates: Candidates) -> bool:
    """True if the layout without loss chunks would fit if the loss took no memory."""
    moments = memory.moments(layout.replace("model", loss_chunk=0), candidates.capability).values()
    return all(sum(parts.values()) - parts["loss"] <= candidates.limit for parts in moments)


def _try_variants_of_the_best(fixed: Mapping[str, Any], candidates: Candidates) -> None:
    """Try the best layouts with schedules of one unit of work per tick, and with the other vocab_over_pipe."""
    best = [e.config for e in ranked(candidates.fitting or candidates.within_margin)[:5]]
    variants: list[Config] = []
    for config in (c for c in best if c.parallel.pipe > 1):
        if not {"parallel.schedule", "parallel.chunks"} & fixed.keys():
            variants += [config.replace("parallel", schedule=s, chunks=1) for s in ONE_UNIT_PER_TICK]
        if fixed.get("parallel.vocab_over_pipe") is None:
            variants.append(config.replace("parallel", vocab_over_pipe=not config.parallel.vocab_over_pipe))
    for variant in variants:
        try:
            candidates.consider(iter([resolve(variant, variant.parallel.axes)]))
        except Misfit as error:
            candidates.reject(error.reason)


def meshes(config: Config, gpu: str, gpus: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[Config]:
    """Yield the config on every valid mesh; count the reasons of the others in rejected."""
    most = max(config.data.seq_len // LONG, 1)
    for axes in _axes(hardware.find(gpu).joined, gpus, most, fixed, rejected):
        mesh = config.replace("parallel", **axes, microbatches=1, chunks=1, schedule="1f1b", prefetch=False)
        if config.data.batch_size % (axes["replica"] * axes["data"]):
            rejected[Rejection.BATCH] += 1
            continue
        yield from _with_attention(mesh, axes, fixed, rejected)


def _with_attention(
    mesh: Config, axes: Mapping[str, int], fixed: Mapping[str, Any], rejected: Counter[str]
) -> Iterator[Config]:
    """Yield a mesh, resolved, with every kind of attention over context worth trying."""
    blockwise = "gather" if axes["pipe"] > 1 and mesh.parallel.idle == "skip" else "ring"
    kinds = [mesh.parallel.context_attention]
    if axes["context"] > 1:
        kinds = _options(fixed, "parallel.context_attention", (blockwise, "ulysses"))
    for kind in kinds:
        try:
            yield resolve(mesh.replace("parallel", context_attention=kind), axes)
        except Misfit as error:
            rejected[error.reason] += 1


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
    for size in _options(fixed, key, _divisors(gpus)):
        if gpus % size:
            rejected[f"{key}={size} does not divide {gpus} GPUs"] += 1
            continue
        yield size


def _groups(copies: int, joined: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[dict[str, int]]:
    """Yield replica and data for a number of model copies, `joined` of them in an NVLink domain."""
    groups = [1] + [copies // joined] * (joined > 1 and copies > joined and copies % joined == 0)
    for replica in _options(fixed, "parallel.replica", groups):
        if copies % replica or fixed.get("parallel.data", -1) not in (-1, copies // replica):
            rejected[Rejection.AXES] += 1
            continue
        yield {"replica": replica, "data": copies // replica}


def zero_and_schedules(config: Config, fixed: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Yield ZeRO stage, schedule and chunks worth trying on a mesh."""
    stages = _options(fixed, "parallel.zero", (1, 2, 3) if counts.zero_devices(config) > 1 else (0,))
    if config.parallel.pipe == 1:
        yield from ((zero, "1f1b", 1) for zero in stages)
        return
    schedules = _options(fixed, "parallel.schedule", ("1f1b", "zero_bubble", "interleaved"))
    for zero, schedule in product(stages, schedules):
        several = [c for c in _divisors(counts.stage_layers(config)) if c > 1]
        chunks = several if schedule == "interleaved" else [1]
        yield from ((zero, schedule, count) for count in _options(fixed, "parallel.chunks", chunks))


def ranked(estimates: list[Estimate]) -> list[Estimate]:
    """Return the best of each mesh and schedule, fastest first; within 1% simpler layouts, then fewer bytes first."""

    def simplicity(e: Estimate) -> tuple:
        p = e.config.parallel
        axes = sum(size > 1 for size in p.axes.values())
        return axes, e.config.memory.rematerialization.policy != "none", e.config.model.loss_chunk > 0, p.zero, p.chunks

    best: dict[tuple, Estimate] = {}
    rest = sorted(estimates, key=lambda e: e.step_seconds)
    while rest:
        equal = [e for e in rest if e.step_seconds <= 1.01 * rest[0].step_seconds]
        for e in sorted(equal, key=lambda e: (*simplicity(e), e.peak_bytes)):
            best.setdefault((*e.config.parallel.axes.values(), e.config.parallel.schedule), e)
        rest = rest[len(equal) :]
    return list(best.values())


def describe(config: Config) -> str:
    """Describe the layout in one line."""
    p = config.parallel
    axes = " x ".join(f"{axis} {size}" for axis, size in p.axes.items() if size > 1) or "one device"
    schedule = [p.schedule + (f" of {p.chunks} chunks" if p.chunks > 1 else "")] * (p.pipe > 1)
    schedule += ["vocabulary over pipe"] * bool(p.vocab_over_pipe)
    sequences = config.data.batch_size // (p.replica * p.data * p.microbatches)
    microbatches = f"{p.microbatches} microbatch{'es' * (p.microbatches > 1)} of {sequences}"
    chunk = [f"loss_chunk={config.model.loss_chunk}"] * (config.model.loss_chunk > 0)
    axes += f" ({p.context_attention})" * (p.context > 1)
    return ", ".join([axes, f"ZeRO {p.zero}", *schedule, microbatches, f"remat {config.memory.remat}", *chunk])


def why_nothing_fits(
    result: SearchResult, gpu: str, gpus: int, memory_fraction: float, fixed: Mapping[str, Any]
) -> str:
    """Return the error message of a search without a layout: the excess, and the changes that would make one fit."""
    e = result.smallest
    if e is None:
        reasons = " | ".join(reason for reason, _ in result.rejected.most_common(3)) or "no mesh is left"
        return f"no mesh of {gpus} GPUs suits the model and batch: {reasons}; change these, or the number of GPUs"
    parts = sorted(e.moments[e.peak].items(), key=lambda item: -item[1])[:2]
    largest = " and ".join(f"{part} {size / 1e9:,.1f}" for part, size in parts)
    text = (
        f"no layout of {gpus} x {gpu} fits: the smallest ({describe(e.config)}) needs {e.peak_bytes / 1e9:,.1f} GB of "
        f"{e.limit_bytes / 1e9:,.1f}, most of it {largest}"
    )
    remedies = _remedies(e.config, gpu, gpus, memory_fraction, fixed)
    return text + ("; would fit with " + ", or ".join(remedies) if remedies else "; use a smaller model or more GPUs")


def _remedies(config: Config, gpu: str, gpus: int, memory_fraction: float, fixed: Mapping[str, Any]) -> list[str]:
    """Return the smallest change of each kind with which a layout fits, and the peak memory in GB."""
    config = config.replace("parallel", microbatches=1, chunks=1, schedule="1f1b")
    neutral = config.replace("parallel", **dict.fromkeys(config.parallel.axes, 1))
    sequences = config.data.batch_size // max(gpus, 1)
    on_host = {"offload_optimizer": "host"}
    host = [on_host, on_host | {"offload_params": "host"}] if config.memory.offload_optimizer == "none" else []
    if gpu == hardware.SIMULATED:
        host = []
    kinds = ("model.loss_chunk", "memory", "gpu", "gpus")
    free = {key: value for key, value in fixed.items() if key != "model.loss_chunk"}
    changes = [(kinds[0], "model.loss_chunk={}", neutral, gpu, gpus)] * ("model.loss_chunk" in fixed)
    for keys in host:
        overrides = " ".join(f"memory.{key}={value}" for key, value in keys.items())
        changes.append((kinds[1], overrides, neutral.replace("memory", **keys), gpu, gpus))
    changes += [(kinds[2], other, neutral, other, gpus) for other in ("h100", "h200", "b200") if other != gpu]
    numbers = [gpus * n for n in (2, 4, 8, 16, 32) if sequences >= n or gpus * n <= 8]
    changes += [(kinds[3], f"{number} GPUs", neutral, gpu, number) for number in numbers]
    remedies: dict[str, str] = {}
    for kind, change, changed, other_gpu, number in changes:
        if kind in remedies:  # the smallest of its kind
            continue
        try:
            result = search(changed, other_gpu, number, memory_fraction, free if kind == kinds[0] else fixed)
        except ValueError:
            continue
        if result.best and result.best[0].fits:
            best = result.best[0]
            remedies[kind] = f"{change.format(best.config.model.loss_chunk)} ({best.peak_bytes / 1e9:,.1f} GB)"
    return list(remedies.values())


def _options(fixed: Mapping[str, Any], key: str, default: Any) -> list[Any]:
    return [fixed[key]] if fixed.get(key, -1) != -1 else list(default)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
