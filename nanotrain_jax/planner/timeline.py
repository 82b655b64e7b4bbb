"""Memory of the compiled step over its instructions: what holds it, from which line of source, in which phase.

Kinds are the parts of the estimate (`costs/memory.py`). They differ in where an array was traced, its shape and
how long it lives: activations are alive in the forward and in the backward; gradients and gathered weights have the
dims of a weight; the rest is the working set of a layer, or of the update.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain_jax.audit import hlo, live_ranges
from nanotrain_jax.audit.live_ranges import Origin, Timeline
from nanotrain_jax.audit.stacks import Stack
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import counts
from nanotrain_jax.step import build as steps
from nanotrain_jax.step.gradients import GRADIENTS

PACKAGE = Path(__file__).parents[1]
PHASES = "forward", "backward", "update"
FORWARD = "jvp(", "at_most_once_forward"  # in op_name
BACKWARD = "transpose(", "at_most_once_backward", "at_most_once_weight"
STATE = {"state.params": "params", "state": "optimizer", "batch": "batch"}  # path of an argument -> kind
KINDS = "params", "optimizer", "batch", "outputs", "gradients", "activations", "loss", "layer", "buffers", "update"
# Instructions that run nothing.
BOOKKEEPING = {"argument", "parameter", "get-tuple-element", "tuple", "bitcast", "constant", ""}
POINTS = 300  # of a curve, at most
HOLDERS = 60  # of the peak, at most

Dims = tuple[int, ...]  # sorted, without those of size 1


def summary(timeline: Timeline, config: Config) -> dict[str, Any]:
    """Return the timeline of a step in the form of `plan --json`. Bytes per device.

    peak_bytes; at: the point of the peak. curve: bytes of each kind at each point; phase: of each point. A point is a
    run of instructions, shown by the one with most memory. holders: of the peak, largest first.
    """
    phases = _phases(timeline)
    kinds = _Kinds(timeline, config)
    numbers = [KINDS.index(kinds.of(span.origin, phases[span.first : span.last + 1])) for span in timeline.spans]
    table = live_ranges.in_use(timeline, numbers)
    points = _points(timeline, table.sum(axis=1))
    peak = int(table.sum(axis=1).argmax())
    held: Counter[tuple[str, Origin]] = Counter()
    for span, size in live_ranges.holders(timeline, peak).items():
        held[KINDS[numbers[span]], timeline.spans[span].origin] += size
    return {
        "peak_bytes": int(table[peak].sum()),
        "at": int(np.searchsorted(points, peak)),
        "curve": {
            kind: table[points, number].astype(int).tolist() for number, kind in enumerate(KINDS[: table.shape[1]])
        },
        "phase": [PHASES[phases[point]] for point in points],
        "holders": [_holder(kind, origin, size) for (kind, origin), size in held.most_common(HOLDERS)],
    }


def _holder(kind: str, origin: Origin, size: int) -> dict[str, Any]:
    phase = phase_of(origin)
    is_argument = origin.opcode == "argument"
    return {
        "bytes": size,
        "kind": kind,
        "phase": "" if is_argument or phase is None else PHASES[phase],
        "type": origin.type.partition("{")[0],
        "source": origin.op_name if is_argument else source(origin.frames),
        "op_name": origin.op_name,
    }


def source(frames: Stack) -> str:
    """Return the innermost line of this package, else of any: `models/ops.py:30 normalize`; "" if unknown."""
    own = [frame for frame in frames if Path(frame.file).is_relative_to(PACKAGE)]
    if not (own or frames):
        return ""
    file, line, function = (own or frames)[0]
    name = Path(file).relative_to(PACKAGE) if own else Path(file).name
    return f"{name}:{line} {function.replace('<locals>.', '')}"


def phase_of(origin: Origin) -> int | None:
    """Return the number of the phase in PHASES in which an instruction was traced; None if it does not say.

    JAX names what it differentiates jvp(...), and the backward transpose(jvp(...)); hand-written loops name their
    work (`loops.cond_in_place`). The update is what the step calls after the gradients.
    """
    if any(name in origin.op_name for name in BACKWARD):
        return PHASES.index("backward")
    if any(name in origin.op_name for name in FORWARD):
        return PHASES.index("forward")
    functions = {frame.function for frame in origin.frames}
    is_after = steps.train.__name__ in functions and not functions & {f.__name__ for f in GRADIENTS.values()}
    return PHASES.index("update") if is_after and len(origin.frames) > 1 else None


def _phases(timeline: Timeline) -> np.ndarray:
    """Return the phase of each instruction; one that does not say has that of the one before."""
    found, phase = np.zeros(len(timeline.instructions), int), 0
    for number, origin in enumerate(timeline.instructions):
        own = None if origin.opcode in BOOKKEEPING else phase_of(origin)
        found[number] = phase = phase if own is None else own
    return found


def _points(timeline: Timeline, totals: np.ndarray) -> np.ndarray:
    """Return the instructions to draw: of each run of instructions the one with most memory."""
    run = np.array([n for n, origin in enumerate(timeline.instructions) if origin.opcode not in BOOKKEEPING])
    run = np.union1d(run, totals.argmax())
    return np.array([part[totals[part].argmax()] for part in np.array_split(run, min(POINTS, len(run)))])


class _Kinds:
    """Tells the kind of an array."""

    def __init__(self, timeline: Timeline, config: Config):
        axes = config.parallel.axes
        shards = counts.zero_devices(config)
        arguments = {span.origin for span in timeline.spans if span.origin.opcode == "argument"}
        stored = [_dims(origin.type) for origin in arguments if origin.op_name.startswith("state")]
        self.weights = {shape for dims in stored for shape in _forms(dims, shards)}
        vocabulary = config.model.vocab_size
        self.vocabulary = {vocabulary // n for n in (1, axes["tensor"], axes["pipe"], axes["tensor"] * axes["pipe"])}

    def of(self, origin: Origin, phases: np.ndarray) -> str:
        """Return the kind of an array. phases: of the instructions during which it is alive."""
        if origin.opcode == "argument":
            return next(kind for path, kind in STATE.items() if origin.op_name.startswith(path))
        if not origin.opcode:
            return "outputs"
        dims, phase, operation = _sorted(_dims(origin.type)), phase_of(origin), origin.op_name.split("/")[-1]
        if dims in self.weights or any(frame.file.endswith("parallel/zero/zero.py") for frame in origin.frames):
            is_copy = "gather" in operation or operation == "while" or "rematted_computation" in origin.op_name
            return "buffers" if is_copy or phase == PHASES.index("forward") else "gradients"
        if self.vocabulary & set(dims):
            return "loss"
        if origin.opcode.removesuffix("-start") in hlo.OPERATIONS:
            return "buffers"
        if {PHASES.index("forward"), PHASES.index("backward")} <= set(phases.tolist()):
            return "activations"
        return "update" if PHASES.index("update") in (phase, phases[0]) else "layer"


def _dims(kind: str) -> Dims:
    """Return the dims of the first array of an HLO type."""
    found = hlo.ARRAY.search(kind)
    return tuple(int(n) for n in found[2].split(",") if n) if found else ()


def _sorted(dims: Dims) -> Dims:
    return tuple(sorted(n for n in dims if n > 1))


def _forms(dims: Dims, shards: int) -> set[Dims]:
    """Return the dims that a stored weight has on a device: its shard or all of it, of all layers or of one."""
    whole = [dims, *((*dims[:k], dims[k] * shards, *dims[k + 1 :]) for k in range(len(dims)))]
    return {_sorted(form) for full in whole for form in (full, full[1:]) if len(_sorted(form)) > 1}
