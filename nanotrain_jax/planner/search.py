"""Which layout? Every one that the trainer can run on so many GPUs is estimated; the fastest that fit come first.

What is tried, within what model, batch and hosts allow (and the user has not fixed):

    mesh          tensor within NVLink; pipe over even stages; the rest data, in one group or in groups within NVLink
                  (`replica`: the shards of ZeRO then never leave NVLink)
    zero          1, 2, 3 where there is data to shard over; 0 moves and stores more than 1
    microbatches  every number that divides a device's sequences
    schedule      1f1b, zero_bubble, interleaved with every number of chunks; then, for the best, the schedules that do
                  one thing in a tick. gpipe takes as long as 1f1b and stores more
    remat         none, selective, full: the first that fits, since the others only compute more

Context parallelism and offload are not among it, since the trainer has neither yet.

Layouts whose modelled times are within 1% count as equal: then the one with fewer axes, and fewer bytes, comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nanotrain_jax.audit import hardware, memory
from nanotrain_jax.config import Config
from nanotrain_jax.planner.estimate import TAKEN, Estimate, estimate, on_hardware
from nanotrain_jax.resolved import resolve

POLICIES = ("none", "selective", "full")
ONE_AT_A_TIME = ("1f1b_lean", "zb_h1", "zb_h2")
MESH = ("parallel.pipe", "parallel.replica", "parallel.data", "parallel.context", "parallel.tensor")
SEARCHED = (*MESH, "parallel.zero", "parallel.schedule", "parallel.chunks", "parallel.microbatches", "memory.remat")


class Found(NamedTuple):
    """What a search came to."""

    best: list[Estimate]  # the best of each mesh and schedule, fastest first
    rejected: Counter[str]  # reason -> how many layouts
    tried: int
    smallest: Estimate | None  # that which needs least memory, whether or not it fits; None if there is no mesh at all


def search(config: Config, gpu: str, gpus: int, taken: float = TAKEN, fixed: Mapping[str, Any] | None = None) -> Found:
    """The layouts of a model and batch on so many GPUs. fixed: "section.key" -> value, of SEARCHED keys.

    config: resolved but for what is searched. Raises ValueError for GPUs that are not known, or a number of them that
    does not fill hosts.
    """
    hardware.check_count(gpu, gpus)
    config = on_hardware(config, gpu)
    fixed = {} if fixed is None else dict(fixed)
    if config.memory.offload_params == "host":  # at stage 3 alone
        config, fixed = config.replace("parallel", zero=3), {"parallel.zero": 3} | fixed
    if config.memory.offload_activations == "host":  # by policy: any but none
        config = config.replace("memory", remat="full")
    limit, capability = taken * hardware.find(gpu).memory_bytes, hardware.find(gpu).capability
    rejected: Counter[str] = Counter()
    fitting: list[Estimate] = []
    smallest: tuple[float, Config] | None = None
    tried = 0

    def consider(candidates: list[Config]) -> bool:
        """Estimate the first of some configs that fits; they differ in remat alone."""
        nonlocal smallest, tried
        for candidate in candidates:
            tried += 1
            size = sum(memory.peak(candidate, capability)[1].values())
            if smallest is None or size < smallest[0]:
                smallest = size, candidate
            if size <= limit:
                fitting.append(estimate(candidate, gpu, taken))
                return True
            rejected["needs more memory than there is"] += 1
        return False

    for mesh in meshes(config, gpu, gpus, fixed, rejected):
        if mesh.parallel.pipe == 1 and fixed.get("parallel.chunks", 1) > 1:
            rejected["chunks, without stages"] += 1
            continue
        for zero, schedule, chunks in ways(mesh, fixed):
            base = mesh.replace("parallel", zero=zero, schedule=schedule, chunks=chunks)
            share = config.data.batch_size // (mesh.parallel.replica * mesh.parallel.data)
            too_large = False
            for pieces in sorted(_options(fixed, "parallel.microbatches", _divisors(share)), reverse=True):
                # Fewer microbatches are larger ones; but a single one needs no sums of gradients.
                if too_large and (pieces > 1 or mesh.parallel.pipe > 1):
                    continue
                if schedule == "interleaved" and pieces % mesh.parallel.pipe:
                    rejected["interleaved, with microbatches that are no multiple of the stages"] += 1
                    continue
                whole, candidates = base.replace("parallel", microbatches=pieces), []
                for remat in _options(fixed, "memory.remat", POLICIES):
                    try:
                        candidates.append(resolve(whole.replace("memory", remat=remat), base.parallel.axes))
                    except ValueError as error:
                        rejected[_reason(error)] += 1
                too_large = bool(candidates) and not consider(candidates)
    if not {"parallel.schedule", "parallel.chunks"} & fixed.keys():
        for found in ranked(fitting)[:5]:
            for schedule in ONE_AT_A_TIME if found.config.parallel.pipe > 1 else ():
                try:
                    other = found.config.replace("parallel", schedule=schedule, chunks=1)
                    other = resolve(other, other.parallel.axes)
                except ValueError as error:
                    rejected[_reason(error)] += 1
                    continue
                consider([other])
    return Found(ranked(fitting), rejected, tried, estimate(smallest[1], gpu, taken) if smallest else None)


def meshes(config: Config, gpu: str, gpus: int, fixed: Mapping[str, Any], rejected: Counter[str]) -> Iterator[Config]:
    """The config on every mesh that the model can be laid out on; why the others are not goes into rejected."""
    joined, batch = hardware.find(gpu).joined, config.data.batch_size
    for tensor in _options(fixed, "parallel.tensor", _divisors(gpus)):
        if gpus % tensor:
            rejected[f"parallel.tensor={tensor} does not divide {gpus} GPUs"] += 1
            continue
        if tensor > joined and "parallel.tensor" not in fixed:
            rejected[f"parallel.tensor over more than the {joined} GPUs that NVLink joins"] += 1
            continue
        for pipe in _options(fixed, "parallel.pipe", _divisors(gpus // tensor)):
            rest = gpus // tensor // pipe
            if tensor * pipe * rest != gpus:
                rejected[f"parallel.pipe={pipe} does not divide {gpus // tensor} GPUs"] += 1
                continue
            inside = max(joined // tensor, 1)
            groups = [1] + [rest // inside] * (inside > 1 and rest > inside and rest % inside == 0)
            for replica in _options(fixed, "parallel.replica", groups):
                if rest % replica or fixed.get("parallel.data", -1) not in (-1, rest // replica):
                    rejected["the axes that were given do not multiply to the GPUs"] += 1
                    continue
                axes = {"pipe": pipe, "replica": replica, "data": rest // replica, "context": 1, "tensor": tensor}
                mesh = config.replace("parallel", **axes, microbatches=1, chunks=1, schedule="1f1b", prefetch=False)
                if batch % rest:
                    rejected["data.batch_size is not divisible by replica x data"] += 1
                    continue
                try:
                    yield resolve(mesh, axes)
                except ValueError as error:
                    rejected[_reason(error)] += 1


def ways(config: Config, fixed: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """ZeRO stage, schedule and chunks that make sense on a mesh."""
    p, L = config.parallel, config.model.num_layers
    stages = _options(fixed, "parallel.zero", (1, 2, 3) if p.data > 1 else (0,))
    for zero in stages:
        if p.pipe == 1:
            yield zero, "1f1b", 1
            continue
        for schedule in _options(fixed, "parallel.schedule", ("1f1b", "zero_bubble", "interleaved")):
            chunks = [c for c in _divisors(L // p.pipe) if c > 1] if schedule == "interleaved" else [1]
            for count in _options(fixed, "parallel.chunks", chunks):
                yield zero, schedule, count


def ranked(found: list[Estimate]) -> list[Estimate]:
    """Fastest first, one for each mesh and schedule; what is within 1% in the order of simplicity and bytes."""

    def simplicity(e: Estimate) -> tuple:
        p = e.config.parallel
        axes = sum(size > 1 for size in p.axes.values())
        return axes, e.config.memory.remat != "none", p.zero, p.chunks

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
    return ", ".join([axes, f"ZeRO {p.zero}", *schedule, pieces, f"remat {config.memory.remat}"])


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
    config = e.config.replace("parallel", microbatches=1, chunks=1, schedule="1f1b")
    neutral = config.replace("parallel", **dict.fromkeys(config.parallel.axes, 1))
    more = config.data.batch_size // max(gpus, 1)
    helps = []
    optimizer = {"offload_optimizer": "host"}
    host = [optimizer, optimizer | {"offload_params": "host"}] if config.memory.offload_optimizer == "none" else []
    said = lambda keys: " ".join(f"memory.{key}={value}" for key, value in keys.items())
    changes = (
        [(said(keys), neutral.replace("memory", **keys), gpu, gpus) for keys in host if gpu != hardware.SIMULATED],
        [("model.loss_chunk=1024", neutral.replace("model", loss_chunk=1024), gpu, gpus)],
        [(kind, neutral, kind, gpus) for kind in ("h100", "h200", "b200") if kind != gpu],
        [(f"{gpus * n} GPUs", neutral, gpu, gpus * n) for n in (2, 4, 8, 16, 32) if more >= n or gpus * n <= 8],
    )
    for group in changes:
        for what, changed, kind, number in group:
            try:
                other = search(changed, kind, number, taken, fixed)
            except ValueError:
                continue
            if other.best:
                helps.append(f"{what} ({other.best[0].peak_bytes / 1e9:,.1f} GB)")
                break  # the least of its kind
    return text + ("; what would do: " + ", or ".join(helps) if helps else "; use a smaller model, or many more GPUs")


def _options(fixed: Mapping[str, Any], key: str, otherwise: Any) -> list[Any]:
    return [fixed[key]] if fixed.get(key, -1) != -1 else list(otherwise)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _reason(error: ValueError) -> str:
    """What is wrong, without the remedy."""
    return str(error).split(";")[0].split(" and ")[0]
