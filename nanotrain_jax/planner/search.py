"""Search layouts: estimate every layout that the trainer can run on the GPUs, rank those that fit by step time.

The search space, as far as model, batch and hosts allow and the user has not fixed it:

    mesh          tensor within an NVLink domain; pipe where at most a quarter of the layers are padding; context where
                  a device then has at least 8,192 tokens of a sequence; the rest data, in one group or in groups within
                  an NVLink domain (`replica`: ZeRO's traffic then stays on NVLink)
    context_attention   ring (gather with pipeline stages) and ulysses
    zero          1, 2, 3 if data x context is larger than 1; 0 communicates and stores more than 1
    microbatches  every divisor of a device's sequences
    schedule      1f1b; zero_bubble and interleaved with every number of chunks; for the best layouts also the schedules
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
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import divisors
from nanotrain_jax.costs import hardware, memory
from nanotrain_jax.parallel.mesh import AXES
from nanotrain_jax.planner.estimate import MEMORY_FRACTION, Estimate, estimate, margin, on_hardware, verdict
from nanotrain_jax.planner.layouts import Rejection, layouts, options

POLICIES = ("none", "selective", "full")
ONE_UNIT_PER_TICK = ("1f1b_lean", "zb_h1", "zb_h2")
LOSS_CHUNK = 2048  # largest, tokens: enough for efficient matmuls, few logits in memory
MESH = tuple(f"parallel.{axis}" for axis in AXES)
SEARCHED = (*MESH, "parallel.context_attention", "parallel.zero", "parallel.schedule", "parallel.chunks")
SEARCHED += ("parallel.vocab_over_pipe", "parallel.microbatches", "memory.remat", "model.loss_chunk")
_moments = lru_cache(maxsize=8)(memory.moments)  # a layout with loss chunks asks for those of the layout without again


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
            size = max(sum(parts.values()) for parts in _moments(variant).values())
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
    for layout in layouts(config, gpu, gpus, fixed, candidates.rejected):
        _try_microbatches(layout, fixed, candidates)
        if most is not None and candidates.tried > most:
            return candidates.result(complete=False)
    _try_variants_of_the_best(fixed, candidates)
    return candidates.result()


def _try_microbatches(layout: Config, fixed: Mapping[str, Any], candidates: Candidates) -> None:
    p = layout.parallel
    share = layout.data.batch_size // (p.replica * p.data)
    fits = True
    for microbatches in sorted(options(fixed, "parallel.microbatches", divisors(share)), reverse=True):
        # Fewer microbatches are larger and need more memory, except that a single one needs no gradient accumulation.
        if not fits and (microbatches > 1 or p.pipe > 1):
            continue
        if p.chunks > 1 and microbatches % p.pipe:
            candidates.reject(Rejection.INTERLEAVED)
            continue
        tried = candidates.tried
        variants = _variants(layout.replace("parallel", microbatches=microbatches), fixed, candidates)
        fits = candidates.consider(variants) or candidates.tried == tried


def _variants(layout: Config, fixed: Mapping[str, Any], candidates: Candidates) -> Iterator[Config]:
    """Yield the layout with every remat policy and loss chunk that may help it to fit, fastest first."""
    policies = options(fixed, "memory.remat", POLICIES)
    chunks = options(fixed, "model.loss_chunk", dict.fromkeys((0, _loss_chunk(layout))))
    for remat, chunk in product(policies, chunks):
        chosen = layout.replace("memory", remat=remat).replace("model", loss_chunk=chunk)
        is_tried = not chunk or "model.loss_chunk" in fixed
        yield from (v for v in _resolved(chosen, candidates) if is_tried or _loss_matters(v, candidates))


def _loss_chunk(layout: Config) -> int:
    """Return the largest divisor of a microbatch's tokens on a device up to LOSS_CHUNK; 0 if it would not help."""
    p, d = layout.parallel, layout.data
    tokens = d.batch_size // (p.replica * p.data * p.microbatches) * d.seq_len // p.context
    chunk = next(size for size in range(LOSS_CHUNK, 0, -1) if tokens % size == 0) if tokens else 0
    return chunk if LOSS_CHUNK / 8 <= chunk < tokens else 0


def _loss_matters(layout: Config, candidates: Candidates) -> bool:
    """True if the layout without loss chunks would fit if the loss took no memory."""
    moments = _moments(layout.replace("model", loss_chunk=0)).values()
    return all(sum(parts.values()) - parts["loss"] <= candidates.limit for parts in moments)


def _try_variants_of_the_best(fixed: Mapping[str, Any], candidates: Candidates) -> None:
    """Try the best layouts with schedules of one unit of work per tick, and with the other vocab_over_pipe."""
    best = [e.config for e in ranked(candidates.fitting or candidates.within_margin)[:5]]
    for config in (c for c in best if c.parallel.pipe > 1):
        variants = [config.replace("parallel", schedule=name, chunks=1) for name in ONE_UNIT_PER_TICK]
        if {"parallel.schedule", "parallel.chunks"} & fixed.keys():
            variants = []
        if fixed.get("parallel.vocab_over_pipe") is None:
            variants.append(config.replace("parallel", vocab_over_pipe=not config.parallel.vocab_over_pipe))
        for variant in variants:
            candidates.consider(_resolved(variant, candidates))


def _resolved(layout: Config, candidates: Candidates) -> Iterator[Config]:
    """Yield the resolved layout, if it is valid."""
    try:
        yield resolve(layout, layout.parallel.axes)
    except Misfit as error:
        candidates.reject(error.reason)


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
