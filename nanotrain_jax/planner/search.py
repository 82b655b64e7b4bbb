"""Which layout? Every one that the trainer can run on so many GPUs is estimated; the fastest that fit come first.

What is tried, within what model, batch and hosts allow (and the user has not fixed):

    mesh          tensor within NVLink; pipe over even stages; the rest data, in one group or in groups within NVLink
                  (`replica`: the shards of ZeRO then never leave NVLink)
    zero          1, 2, 3 where there is data to shard over; 0 moves and stores more than 1
    microbatches  every number that divides a device's sequences
    schedule      1f1b, zero_bubble, interleaved with every number of chunks; then, for the best, the schedules that do
                  one thing in a tick. gpipe takes as long as 1f1b and stores more
    remat         none, selective, full: the first that fits, since the others only compute more
    loss_chunk    0, then (before the next policy of remat) about 2,048 tokens, where the loss takes too much memory

A layout fits if the estimate and its margin (`estimate.margin`) do; those that fit only without it are left out, unless
there are no others. Offload is not searched: memory.offload_* is as the config has it.

Layouts whose modelled times are within 1% count as equal: then the one with fewer axes, and fewer bytes, comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from math import isqrt
from typing import Any, NamedTuple

from nanotrain_jax.audit import hardware, memory
from nanotrain_jax.config import Config
from nanotrain_jax.planner.estimate import TAKEN, Estimate, estimate, margin, on_hardware, verdict
from nanotrain_jax.resolved import Misfit, resolve

POLICIES = ("none", "selective", "full")
ONE_AT_A_TIME = ("1f1b_lean", "zb_h1", "zb_h2")
LOSS_CHUNK = 2048  # tokens, at most: large enough for matmuls, small enough to hold few logits
MESH = ("parallel.pipe", "parallel.replica", "parallel.data", "parallel.context", "parallel.tensor")
SEARCHED = (
    *MESH,
    "parallel.zero",
    "parallel.schedule",
    "parallel.chunks",
    "parallel.microbatches",
    "memory.remat",
    "model.loss_chunk",
)


class Found(NamedTuple):
    """What a search came to."""

    best: list[Estimate]  # the best of each mesh and schedule, fastest first; all fit, or none does with its margin
    rejected: Counter[str]  # reason -> how many layouts
    tried: int
    smallest: Estimate | None  # that which needs least memory, whether or not it fits; None if there is no mesh at all
    complete: bool = True  # False: it stopped after as many layouts as it was allowed


class Candidates:
    """The layouts that a search has estimated so far, by how they fit."""

    def __init__(self, gpu: str, taken: float) -> None:
        """taken: the share of the GPU's memory that JAX takes."""
        self.gpu, self.taken = gpu, taken
        self.limit = taken * hardware.find(gpu).memory_bytes
        self.capability = hardware.find(gpu).capability
        self.fitting: list[Estimate] = []
        self.within_margin: list[Estimate] = []
        self.rejected: Counter[str] = Counter()
        self.tried = 0
        self.smallest: tuple[float, Config] | None = None

    def reject(self, reason: str) -> None:
        """Count a layout that was not estimated, or does not fit."""
        self.rejected[reason] += 1

    def consider(self, variants: Iterator[Config]) -> bool:
        """Keep the first of some configs that fits, or else the first that does within its margin; False if none does.

        variants: the same layout, cheapest in time first.
        """
        maybe = None
        for variant in variants:
            self.tried += 1
            size = sum(memory.peak(variant, self.capability)[1].values())
            if self.smallest is None or size < self.smallest[0]:
                self.smallest = size, variant
            found = verdict(size, margin(variant), self.limit)
            if found == "fits":
                self.fitting.append(estimate(variant, self.gpu, self.taken))
                return True
            if found == "may not fit":
                maybe = maybe or variant
                self.reject("fits only without the margin of the estimate")
            else:
                self.reject("needs more memory than there is")
        if maybe:
            self.within_margin.append(estimate(maybe, self.gpu, self.taken))
        return maybe is not None

    def found(self, complete: bool = True) -> Found:
        """All of it, ranked."""
        smallest = estimate(self.smallest[1], self.gpu, self.taken) if self.smallest else None
        return Found(ranked(self.fitting or self.within_margin), self.rejected, self.tried, smallest, complete)


def search(
    config: Config,
    gpu: str,
    gpus: int,
    taken: float = TAKEN,
    fixed: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> Found:
    """The layouts of a model and batch on a number of GPUs, by their modelled times.

    config: resolved but for what is searched. taken: the share of a GPU's memory that JAX takes. fixed: "section.key"
    -> value, of SEARCHED keys. most: layouts to estimate before it stops (None: all). Raises ValueError for GPUs that
    are not known, or a number of them that does not fill hosts.
    """
    hardware.check_count(gpu, gpus)
    config, fixed = on_hardware(config, gpu), dict(fixed or {})
    if config.memory.offload_params == "host":  # at stage 3 alone
        config, fixed = config.replace("parallel", zero=3), {"parallel.zero": 3} | fixed
    if config.memory.offload_activations == "host":  # by policy: any but none
        config = config.replace("memory", remat="full")
    candidates = Candidates(gpu, taken)
    for layout in layouts(config, gpu, gpus, fixed, candidates):
        _try_microbatches(layout, fixed, candidates)
        if most is not None and candidates.tried > most:
            return candidates.found(complete=False)
    if not {"parallel.schedule", "parallel.chunks"} & fixed.keys():
        _try_one_at_a_time(candidates)
    return candidates.found()


def layouts(config: Config, gpu: str, gpus: int, fixed: Mapping[str, Any], candidates: Candidates) -> Iterator[Config]:
    """The config on every mesh, with every ZeRO stage and schedule; with one microbatch."""
    for mesh in meshes(config, gpu, gpus, fixed, candidates.rejected):
        if mesh.parallel.pipe == 1 and fixed.get("parallel.chunks", 1) > 1:
            candidates.reject("chunks, without stages")
            continue
        for zero, schedule, chunks in ways(mesh, fixed):
            yield mesh.replace("parallel", zero=zero, schedule=schedule, chunks=chunks)


def _try_microbatches(layout: Config, fixed: Mapping[str, Any], candidates: Candidates) -> None:
    p = layout.parallel
    share = layout.data.batch_size // (p.replica * p.data)
    fits = True
    for pieces in sorted(_options(fixed, "parallel.microbatches", _divisors(share)), reverse=True):
        # Fewer microbatches are larger ones; but a single one needs no sums of gradients.
        if not fits and (pieces > 1 or p.pipe > 1):
            continue
        if p.schedule == "interleaved" and pieces % p.pipe:
            candidates.reject("interleaved, with microbatches that are no multiple of the stages")
            continue
        tried = candidates.tried
        found = candidates.consider(_variants(layout.replace("parallel", microbatches=pieces), fixed, candidates))
        fits = found or candidates.tried == tried


def _variants(layout: Config, fixed: Mapping[str, Any], candidates: Candidates) -> Iterator[Config]:
    """The layout with every policy of remat and chunk of the loss that may help it to fit, cheapest in time first."""
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
    """The largest divisor of a microbatch's tokens on a device up to LOSS_CHUNK; 0 if it would not help."""
    p, d = layout.parallel, layout.data
    tokens = d.batch_size // (p.replica * p.data * p.microbatches) * d.seq_len
    chunk = next(size for size in range(LOSS_CHUNK, 0, -1) if tokens % size == 0) if tokens else 0
    return chunk if LOSS_CHUNK / 8 <= chunk < tokens else 0


def _loss_matters(layout: Config, candidates: Candidates) -> bool:
    """Whether a layout without chunks of the loss could fit if the loss took no memory at all."""
    moments = memory.moments(layout.replace("model", loss_chunk=0), candidates.capability).values()
    return all(sum(parts.values()) - parts["loss"] <= candidates.limit for parts in moments)


def _try_one_at_a_time(candidates: Candidates) -> None:
    """The best layouts with the schedules that do one thing in a tick."""
    best = [e.config for e in ranked(candidates.fitting or candidates.within_margin)[:5]]
    for config, schedule in product([c for c in best if c.parallel.pipe > 1], ONE_AT_A_TIME):
        other = config.replace("parallel", schedule=schedule, chunks=1)
        try:
            candidates.consider(iter([resolve(other, other.parallel.axes)]))
        except Misfit as error:
            candidates.reject(error.reason)


def meshes(config: Config, gpu: str, gpus: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[Config]:
    """The config on every mesh that the model can be laid out on; why the others are not goes into rejected."""
    for axes in _axes(hardware.find(gpu).joined, gpus, fixed, rejected):
        mesh = config.replace("parallel", **axes, microbatches=1, chunks=1, schedule="1f1b", prefetch=False)
        if config.data.batch_size % (axes["replica"] * axes["data"]):
            rejected["data.batch_size is not divisible by replica x data"] += 1
            continue
        try:
            yield resolve(mesh, axes)
        except Misfit as error:
            rejected[error.reason] += 1


def _axes(joined: int, gpus: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[dict[str, int]]:
    """Every mesh of so many GPUs. joined: how many of them NVLink joins."""
    for tensor in _dividing(gpus, "parallel.tensor", fixed, rejected):
        if tensor > joined and "parallel.tensor" not in fixed:
            rejected[f"parallel.tensor over more than the {joined} GPUs that NVLink joins"] += 1
            continue
        for pipe in _dividing(gpus // tensor, "parallel.pipe", fixed, rejected):
            groups = _groups(gpus // tensor // pipe, max(joined // tensor, 1), fixed, rejected)
            yield from ({"pipe": pipe, **group, "context": 1, "tensor": tensor} for group in groups)


def _dividing(gpus: int, key: str, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[int]:
    """Every size of a mesh axis that divides a number of GPUs."""
    for size in _options(fixed, key, _divisors(gpus)):
        if gpus % size:
            rejected[f"{key}={size} does not divide {gpus} GPUs"] += 1
            continue
        yield size


def _groups(copies: int, inside: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[dict[str, int]]:
    """replica and data of so many copies of the model, of which NVLink joins `inside`."""
    groups = [1] + [copies // inside] * (inside > 1 and copies > inside and copies % inside == 0)
    for replica in _options(fixed, "parallel.replica", groups):
        if copies % replica or fixed.get("parallel.data", -1) not in (-1, copies // replica):
            rejected["the axes that were given do not multiply to the GPUs"] += 1
            continue
        yield {"replica": replica, "data": copies // replica}


def ways(config: Config, fixed: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """ZeRO stage, schedule and chunks that make sense on a mesh."""
    stages = _options(fixed, "parallel.zero", (1, 2, 3) if config.parallel.data > 1 else (0,))
    if config.parallel.pipe == 1:
        yield from ((zero, "1f1b", 1) for zero in stages)
        return
    schedules = _options(fixed, "parallel.schedule", ("1f1b", "zero_bubble", "interleaved"))
    for zero, schedule in product(stages, schedules):
        several = [c for c in _divisors(config.model.num_layers // config.parallel.pipe) if c > 1]
        chunks = several if schedule == "interleaved" else [1]
        yield from ((zero, schedule, count) for count in _options(fixed, "parallel.chunks", chunks))


def ranked(found: list[Estimate]) -> list[Estimate]:
    """Fastest first, one for each mesh and schedule; what is within 1% in the order of simplicity and bytes."""

    def simplicity(e: Estimate) -> tuple:
        p = e.config.parallel
        axes = sum(size > 1 for size in p.axes.values())
        return axes, e.config.memory.rematerialization.policy != "none", e.config.model.loss_chunk > 0, p.zero, p.chunks

    best: dict[tuple, Estimate] = {}
    rest = sorted(found, key=lambda e: e.step_seconds)
    while rest:
        equal = [e for e in rest if e.step_seconds <= 1.01 * rest[0].step_seconds]
        for e in sorted(equal, key=lambda e: (*simplicity(e), e.peak_bytes)):
            best.setdefault((*e.config.parallel.axes.values(), e.config.parallel.schedule), e)
        rest = rest[len(equal) :]
    return list(best.values())


def words(config: Config) -> str:
    """The layout in one line."""
    p = config.parallel
    axes = " x ".join(f"{axis} {size}" for axis, size in p.axes.items() if size > 1) or "one device"
    schedule = [p.schedule + (f" of {p.chunks} chunks" if p.chunks > 1 else "")] * (p.pipe > 1)
    sequences = config.data.batch_size // (p.replica * p.data * p.microbatches)
    pieces = f"{p.microbatches} microbatch{'es' * (p.microbatches > 1)} of {sequences}"
    chunk = [f"loss_chunk={config.model.loss_chunk}"] * (config.model.loss_chunk > 0)
    return ", ".join([axes, f"ZeRO {p.zero}", *schedule, pieces, f"remat {config.memory.remat}", *chunk])


def why_nothing_fits(found: Found, gpu: str, gpus: int, taken: float, fixed: Mapping[str, Any]) -> str:
    """By how much it does not fit, and which of a few changes would help."""
    e = found.smallest
    if e is None:
        reasons = " | ".join(reason for reason, _ in found.rejected.most_common(3)) or "no mesh is left"
        return f"no mesh of {gpus} GPUs suits the model and batch: {reasons}; change what stands there, or the GPUs"
    parts = sorted(e.moments[e.peak].items(), key=lambda item: -item[1])[:2]
    most = " and ".join(f"{what} {size / 1e9:,.1f}" for what, size in parts)
    text = (
        f"no layout of {gpus} x {gpu} fits: the smallest ({words(e.config)}) needs {e.peak_bytes / 1e9:,.1f} GB of "
        f"{e.limit_bytes / 1e9:,.1f}, most of it {most}"
    )
    helps = _what_helps(e.config, gpu, gpus, taken, fixed)
    return text + ("; what would do: " + ", or ".join(helps) if helps else "; use a smaller model, or many more GPUs")


def _what_helps(config: Config, gpu: str, gpus: int, taken: float, fixed: Mapping[str, Any]) -> list[str]:
    """Of each kind of change the least with which a layout fits, and the GB that it takes."""
    config = config.replace("parallel", microbatches=1, chunks=1, schedule="1f1b")
    neutral = config.replace("parallel", **dict.fromkeys(config.parallel.axes, 1))
    more = config.data.batch_size // max(gpus, 1)
    on_host = {"offload_optimizer": "host"}
    host = [on_host, on_host | {"offload_params": "host"}] if config.memory.offload_optimizer == "none" else []
    if gpu == hardware.SIMULATED:
        host = []
    kinds = ("model.loss_chunk", "memory", "gpu", "gpus")
    free = {key: value for key, value in fixed.items() if key != "model.loss_chunk"}
    changes = [(kinds[0], "model.loss_chunk={}", neutral, gpu, gpus)] * ("model.loss_chunk" in fixed)
    for keys in host:
        said = " ".join(f"memory.{key}={value}" for key, value in keys.items())
        changes.append((kinds[1], said, neutral.replace("memory", **keys), gpu, gpus))
    changes += [(kinds[2], kind, neutral, kind, gpus) for kind in ("h100", "h200", "b200") if kind != gpu]
    many = [gpus * n for n in (2, 4, 8, 16, 32) if more >= n or gpus * n <= 8]
    changes += [(kinds[3], f"{number} GPUs", neutral, gpu, number) for number in many]
    helps: dict[str, str] = {}
    for kind, what, changed, other_gpu, number in changes:
        if kind in helps:  # the least of its kind
            continue
        try:
            other = search(changed, other_gpu, number, taken, free if kind == kinds[0] else fixed)
        except ValueError:
            continue
        if other.best and other.best[0].fits:
            best = other.best[0]
            helps[kind] = f"{what.format(best.config.model.loss_chunk)} ({best.peak_bytes / 1e9:,.1f} GB)"
    return list(helps.values())


def _options(fixed: Mapping[str, Any], key: str, otherwise: Any) -> list[Any]:
    return [fixed[key]] if fixed.get(key, -1) != -1 else list(otherwise)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
