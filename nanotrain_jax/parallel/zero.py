"""How parameters, gradients and optimizer state live on the devices that share a batch (ZeRO, arXiv 1910.02054).

A stage is five pure functions; `step.py` calls them in this order, all but the first inside `shard_map`:

    storage(specs, dims)           where parameters, and where master weights and moments rest: PartitionSpecs
    inputs(stored, dims)           what the loss is differentiated with respect to
    gather(stored, inputs, ...)    what the model computes with; layer by layer, as its scan reaches it
    reduce(grads, stored, ...)     what the backward left on this device -> sums over all devices
    update(...)                    one optimizer step on what this device stores

with N devices along `data`, Psi parameters:

    stage  parameters  gradients  master, moments  moves per step and device, elements (ring, (N-1)/N apart)
    0      whole       whole      whole            all-reduce of the gradients                            2 Psi
    1      whole       whole      1/N              reduce-scatter once per step, all-gather of weights    2 Psi
    2      whole       1/N        1/N              reduce-scatter per microbatch (M), all-gather          (M + 1) Psi
    3      1/N         1/N        1/N              gather, gather again, reduce-scatter per microbatch    3 M Psi

Stages 0 and 1 reduce after the last backward (ZERO), or layer by layer within it (PER_LAYER): the same bytes, but other
layers compute meanwhile. (The last of several microbatches is then a program of its own.) Gathered twice at stage 3 are
layers; embedding and head are gathered at most once per microbatch, not again in the backward.

`replica` axis: sharding inside a group, replication across groups (PyTorch's HYBRID_SHARD): after the reduce-scatter
over `data`, shards are all-reduced over `replica`. Arrays with fewer than persist_below elements (norm gains, biases),
and those with no dim that N divides, stay whole and are all-reduced. Arrays smaller than a bucket are scattered and
gathered together. Parameters may be split over further axes (tensor): then Psi is what a device has of them.

What is differentiated are `inputs`: in ZERO[0] and ZERO[1] the weights themselves, else "taps": zeros in the shape of
what is stored of a gradient, float32, whose cotangent is the reduced gradient. So a layer's whole gradient lives only
as long as that layer's backward, and sums are kept in float32 whatever the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax.mesh import AXES, BATCH_AXES
from nanotrain_jax.parallel import offload
from nanotrain_jax.parallel.collectives import (
    all_gather,
    all_reduce,
    as_varying,
    buckets,
    own_shard,
    reduce_scatter,
    varying_axes,
)
from nanotrain_jax.parallel.update import Opt, update
from nanotrain_jax.sharding import abstract

Tree = Any  # a pytree of arrays
WHOLE = -1  # in a tree of dims: the leaf is not sharded


class Zero(NamedTuple):
    """One stage of sharding, as pure functions (see the top of this file)."""

    storage: Callable[..., tuple[Tree, Tree]]
    inputs: Callable[..., Tree]
    gather: Callable[..., Tree]
    reduce: Callable[..., Tree]
    update: Callable[..., Any]


class Wire(NamedTuple):
    """How things travel: gradients in which dtype; small arrays together, up to how many bytes (as stored)."""

    dtype: jnp.dtype
    bucket: float


def shard_dims(
    params: Tree, size: int, persist_below: int = 10_000, stacked: Sequence[str] = ("layers",), specs: Tree = None
) -> Tree:
    """The dim along which each leaf is sharded over `size` devices: its largest that size divides, or WHOLE (-1).

    Leaves under a top-level key in `stacked` have a leading dim of layers, which is left alone and does not count
    towards persist_below. specs: PartitionSpecs whose dims are taken by other axes.
    """

    def choose(path: tuple, leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        first = int(bool(path) and getattr(path[0], "key", None) in stacked)
        taken = [d for d, axes in enumerate(spec) if axes is not None]
        dims = [d for d in range(first, len(leaf.shape)) if leaf.shape[d] % size == 0 and d not in taken]
        count = leaf.size // max(leaf.shape[0], 1) if first else leaf.size
        return max(dims, key=lambda d: leaf.shape[d]) if dims and size > 1 and count >= persist_below else WHOLE

    return jax.tree_util.tree_map_with_path(choose, params, whole_specs(params) if specs is None else specs)


def zero_specs(
    params: Tree,
    mesh: Mesh,
    stage: int,
    persist_below: int = 10_000,
    stacked: Sequence[str] = (),
    specs: Tree = None,
    axis: str = "data",
) -> tuple[Tree, Tree]:
    """-> (PartitionSpecs of the parameters, PartitionSpecs of their master weights and moments) at a ZeRO stage.

    For any pytree of arrays, ShapeDtypeStructs or numbers (Flax NNX state, Linen variables, plain). specs: layouts over
    other axes, which these are put on top of (`sharding.specs`). axis: the mesh axis that shards lie on. Raises
    ValueError on an unknown stage, an axis that the mesh lacks or specs use, and what is no array.
    """
    if stage not in ZERO:
        raise ValueError(f"zero stage {stage} is unknown; use 0, 1, 2 or 3")
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(mesh.shape)}: pass axis= one of them")
    shapes = abstract(params)
    specs = whole_specs(params) if specs is None else specs
    for spec in jax.tree.leaves(specs):
        if axis in jax.tree.leaves(tuple(spec)):
            raise ValueError(
                f"{spec} is split over {axis} already, where ZeRO puts its shards; lay it out over other axes"
            )
    return ZERO[stage].storage(specs, shard_dims(shapes, mesh.shape[axis], persist_below, stacked, specs), axis)


def whole_specs(params: Tree) -> Tree:
    """-> PartitionSpec() for every leaf."""
    return jax.tree.map(lambda _: PartitionSpec(), params)


def _over(axis: str, specs: Tree, dims: Tree) -> Tree:
    """-> specs with axis at each leaf's dim."""

    def one(spec: PartitionSpec, d: int) -> PartitionSpec:
        axes = [*spec, *[None] * (d + 1 - len(spec))]
        return spec if d == WHOLE else PartitionSpec(*axes[:d], axis, *axes[d + 1 :])

    return jax.tree.map(one, specs, dims)


def _weights(stored: Tree, dims: Tree) -> Tree:
    """The stored weights are what is differentiated; their gradients stay on this device. Moves nothing."""
    return as_varying(stored, BATCH_AXES)


def _taps(stored: Tree, dims: Tree, whole: bool, already: bool = False) -> Tree:
    """Float32 zeros in the shape of what is kept of a gradient: whole, or shards. Moves nothing.

    already: what is stored has the shape of the shards.
    """
    size = jax.lax.axis_size("data")

    def tap(w: jax.Array, d: int) -> jax.Array:
        cut = not (whole or already)
        zeros = jnp.zeros(tuple(n // size if i == d and cut else n for i, n in enumerate(w.shape)), jnp.float32)
        return as_varying(zeros, sorted(varying_axes(w).union(() if whole else BATCH_AXES)))

    return jax.tree.map(tap, stored, dims)


def _in_buckets(
    move: Callable[..., Sequence], wire: Wire, dims: Tree, weights: Tree, *more: Tree, shards: bool
) -> Tree:
    """The tree of move(dims, weights, *more), called with the leaves of one bucket at a time.

    In a bucket either all are WHOLE or none is, all are varying over the same axes and rest in the same memory. shards:
    those that are not WHOLE are given as shards.
    """
    leaves, tree = jax.tree.flatten(weights)
    rows = list(zip(tree.flatten_up_to(dims), leaves, *map(tree.flatten_up_to, more), strict=True))
    kinds, results = {}, {}
    for i, (d, *arrays) in enumerate(rows):
        kind = (x is not None and (varying_axes(x), offload.on_host(x)) for x in arrays)
        kinds.setdefault((d == WHOLE, *kind), []).append(i)
    for (whole, *_), alike in kinds.items():
        pieces = jax.lax.axis_size("data") if shards and not whole else 1
        for bucket in buckets([leaves[i].nbytes * pieces for i in alike], wire.bucket):
            indices = [alike[j] for j in bucket]
            results |= zip(indices, move(*zip(*(rows[i] for i in indices), strict=True)), strict=True)
    return jax.tree.unflatten(tree, [results[i] for i in range(len(leaves))])


def _as_is(stored: Tree, inputs: Tree, sums: None, dims: Tree, wire: Wire) -> Tree:
    """ZERO[0], ZERO[1]: the weights. Moves nothing."""
    return inputs


def _tapped(
    stored: Tree, taps: Tree, sums: Tree | None, dims: Tree, wire: Wire, whole: bool, stored_sharded: bool
) -> Tree:
    """The whole weights, such that their gradient leaves through taps, reduced in the wire's dtype.

    forward, stage 3     w[... D] = all_gather(w[... D/data])                            (N-1)/N
    backward             g[... D/data] = reduce_scatter(g[... D] + sums[... D])          (N-1)/N
    backward, stage 0    g[... D] = all_reduce(g[... D] + sums[... D])                   2 (N-1)/N

    Weights that rest on the host come to the device first, in the forward and again in the backward.

    sums: local gradients of earlier microbatches, if any, which leave together with this one's.
    """

    def together(dims: tuple, weights: tuple, taps: tuple, sums: tuple) -> list:
        sharded = dims[0] != WHOLE

        def forward(weights: tuple) -> list:
            weights = offload.to_device(list(weights))
            return all_gather(weights, "data", dims) if stored_sharded and sharded else weights

        def backward(sums: tuple, grads: list) -> tuple:
            if sums[0] is not None:
                grads = [g.astype(jnp.float32) + s for g, s in zip(grads, sums, strict=True)]
            grads = [g.astype(wire.dtype) for g in grads]
            if whole:
                grads = all_reduce(grads, BATCH_AXES)
            elif sharded:
                grads = reduce_scatter(grads, "data", dims)
            return None, tuple(g.astype(jnp.float32) for g in grads), None

        gathered = jax.custom_vjp(lambda weights, taps, sums: forward(weights))
        gathered.defvjp(lambda weights, taps, sums: (forward(weights), sums), backward)
        return gathered(weights, taps, sums)

    sums = jax.tree.map(lambda _: None, stored) if sums is None else sums
    return _in_buckets(together, wire, dims, stored, taps, sums, shards=stored_sharded)


def _reduce(grads: Tree, stored: Tree, dims: Tree, wire: Wire, scatter: bool) -> Tree:
    """Sums over all devices that hold a part of a gradient: in the wire's dtype, where anything moves.

    stage 0          g[... D] {local} -> all_reduce over replica, data, context          2 (N-1)/N
    stage 1          g[... D] {local} -> reduce_scatter over data -> g[... D/data]       (N-1)/N   (scatter)
    stages 2 and 3   g[... D/data], scattered in the backward                            nothing
    stages 1 to 3    shards -> all_reduce over replica and context
    PER_LAYER[0]     all-reduced in the backward                                         nothing

    Their types tell: the all-reduce is over all axes that a gradient varies over and its parameter (or shard) does not,
    so at every stage also over another axis (tensor), if parameters that are the same there have local gradients. What
    rests on the host has nothing to be summed any more (`settled`).
    """

    def together(dims: tuple, grads: tuple, stored: tuple) -> list:
        if offload.on_host(grads[0]):
            return list(grads)
        own = varying_axes(stored[0]).union(() if dims[0] == WHOLE else ("data",))
        scatters = scatter and dims[0] != WHOLE
        over = [axis for axis in AXES if axis in varying_axes(grads[0]) - own]
        if scatters or any(jax.lax.axis_size(axis) > 1 for axis in over):
            grads = [g.astype(wire.dtype) for g in grads]
        if scatters:
            grads = reduce_scatter(grads, "data", dims)
            over = [axis for axis in over if axis in varying_axes(grads[0])]
        return all_reduce(list(grads), over)

    return _in_buckets(together, wire, dims, grads, stored, shards=not scatter)


def settled(grads: Tree, stored: Tree, dims: Tree, far: Tree, earlier: Tree | None = None) -> Tree:
    """Gradients as a backward leaves them, added to earlier ones; those that are far, and complete, to the host.

    far: at stages 2 and 3 alone. Complete: no other device adds to them in `reduce`. What is added to moves there and
    back, what is not once.
    """

    def one(g: jax.Array, w: jax.Array, d: int, far: bool, earlier: jax.Array | None) -> jax.Array:
        own = varying_axes(w).union(() if d == WHOLE else ("data",))
        left = [axis for axis in AXES if axis in varying_axes(g) - own]
        if not far or any(jax.lax.axis_size(axis) > 1 for axis in left):
            return g if earlier is None else earlier + g
        g = all_reduce(g, left)  # over one device each: nothing moves between devices
        return offload.to_host(g) if earlier is None else offload.add(earlier, g)

    return jax.tree.map(one, grads, stored, dims, far, earlier or jax.tree.map(lambda _: None, grads))


def _update(
    optimizer: optax.GradientTransformation,
    stored: Tree,
    grads: Tree,
    opt: Opt,
    dims: Tree,
    wire: Wire,
    factor: jax.Array,
    finite: jax.Array,
    far: Tree,
    stored_sharded: bool,
) -> tuple[Tree, Opt]:
    """-> stored parameters, optimizer state, after a step with grads times factor; untouched unless finite.

    Each device updates what it has the gradients of; where parameters are stored whole but updated in shards (stages 1
    and 2), the new weights are all-gathered in the dtype they rest in. factor, finite, far: see `parallel/update.py`.
    """

    def own(w: jax.Array, d: int) -> jax.Array:
        return w if d == WHOLE or stored_sharded else own_shard(w, "data", d)

    def share(dims: tuple, weights: tuple) -> list:
        return weights if dims[0] == WHOLE or stored_sharded else all_gather(weights, "data", dims, invarying=True)

    mine, opt = update(optimizer, jax.tree.map(own, stored, dims), grads, opt, factor, finite, far)
    return _in_buckets(share, wire, dims, mine, shards=True), opt


def _stage(params_sharded: bool, state_sharded: bool, in_backward: bool) -> Zero:
    whole = not state_sharded
    return Zero(
        storage=lambda specs, dims, axis="data": (
            _over(axis, specs, dims) if params_sharded else specs,
            _over(axis, specs, dims) if state_sharded else specs,
        ),
        inputs=partial(_taps, whole=whole, already=params_sharded) if in_backward else _weights,
        gather=partial(_tapped, whole=whole, stored_sharded=params_sharded) if in_backward else _as_is,
        reduce=partial(_reduce, scatter=state_sharded and not in_backward),
        update=partial(_update, stored_sharded=params_sharded),
    )


ZERO = {
    0: _stage(params_sharded=False, state_sharded=False, in_backward=False),
    1: _stage(params_sharded=False, state_sharded=True, in_backward=False),
    2: _stage(params_sharded=False, state_sharded=True, in_backward=True),
    3: _stage(params_sharded=True, state_sharded=True, in_backward=True),
}
PER_LAYER = {
    0: _stage(params_sharded=False, state_sharded=False, in_backward=True),
    1: ZERO[2],  # they differ in how often: once per step, after sums; or once per microbatch
}
