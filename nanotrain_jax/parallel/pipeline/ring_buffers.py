"""Ring buffers of a stage: residuals and intermediates of layers, in the slots of their unit, until they are used."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel import loops
from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes
from nanotrain_jax.parallel.offload.host_offload import on_host, to_device, to_host
from nanotrain_jax.parallel.pipeline.stage import Residuals, Stage


def index(stage: Stage, buffer: str, unit: jax.Array, i: jax.Array) -> jax.Array:
    """Index in a ring buffer of the i-th layer of the unit's chunk."""
    return stage.slot(buffer, unit) * stage.layers_per_chunk + i


def load(rings: list[jax.Array], i: jax.Array) -> list[jax.Array]:
    """Entry i of each ring buffer."""
    return [loops.as_stored(loops.get(ring, i)) for ring in rings]


def store(stage: Stage, buffers: Residuals, residuals: list, unit: jax.Array, i: jax.Array) -> Residuals:
    """The buffers with the residuals of the i-th layer of the unit's chunk."""
    backward = [residuals[k] for k in stage.backward_residuals]
    backward_weight = [residuals[k] for k in stage.weight_residuals]
    return Residuals(
        backward=loops.put(buffers.backward, index(stage, "backward", unit, i), backward),
        backward_weight=loops.put(buffers.backward_weight, index(stage, "backward_weight", unit, i), backward_weight),
    )


def prefetch(
    stage: Stage, buffers: Residuals, unit: jax.Array, i: jax.Array, names: Sequence[str] = Residuals._fields
) -> dict[int, jax.Array]:
    """Copy the residuals of the i-th layer that are in host memory to the device -> index of a residual, residual."""
    entries = _entries(stage, buffers, unit, i, names)
    return {k: to_device(loops.get(ring, entry)) for k, (ring, entry) in entries.items() if on_host(ring)}


def residuals_of(stage: Stage, buffers: Residuals, unit: jax.Array, i: jax.Array, prefetched: dict) -> list:
    """Residuals of the i-th layer of the unit's chunk: prefetched, or else from the buffers; None where discarded."""
    residuals = dict(prefetched)
    for k, (ring, entry) in _entries(stage, buffers, unit, i).items():
        if k not in residuals:
            (residuals[k],) = load([ring], entry)
    return [residuals.get(k) for k in range(len(stage.vjp.residuals))]


def _entries(
    stage: Stage, buffers: Residuals, unit: jax.Array, i: jax.Array, names: Sequence[str] = Residuals._fields
) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Index of a residual -> its ring buffer, its entry for the i-th layer of the unit's chunk."""
    indices = {"backward": stage.backward_residuals, "backward_weight": stage.weight_residuals}
    entries = {}
    for name in names:
        entry = index(stage, name, unit, i)
        rings = zip(indices[name], getattr(buffers, name), strict=True)
        entries |= {k: (ring, entry) for k, ring in rings}
    return entries


def zeros(like: Tree, axis: str, count: int | None = None, dtype: Any = None) -> Tree:
    """Return zeros [count ...] of each type of a tree, varying also over axis. count=None: without that dim.

    Types in host memory: zeros are copied there one by one, so the device never holds all of them.
    """

    def of_type(like: Any) -> jax.Array:
        shape = like.shape if count is None or on_host(like) else (count, *like.shape)
        x = as_varying(jnp.zeros(shape, dtype or like.dtype), sorted(varying_axes(like) | {axis}))
        return lax.scan(lambda x, _: (x, to_host(x)), x, length=count)[1] if on_host(like) else x

    return jax.tree.map(of_type, like)
