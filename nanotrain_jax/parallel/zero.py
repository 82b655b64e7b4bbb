"""How parameters, gradients and optimizer state live on the devices that share a batch (ZeRO, arXiv 1910.02054).

A stage is six pure functions; the step calls them in this order, all but the first inside `shard_map`:

    storage(specs, dims)              PartitionSpecs of parameters, and of master weights and moments
    inputs(stored, dims)              what the loss is differentiated with respect to
    gather(stored, inputs, sums, ...) what the model computes with; layer by layer, as its loop reaches it
    reduce(grads, stored, shards)     what the backward left on this device -> sums over all devices
    own(stored, dims)                 the weights that this device updates
    share(updated, shards)            updated weights -> what is stored

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
from nanotrain_jax.sharding import abstract

Tree = Any  # a pytree of arrays
WHOLE = -1  # in a tree of dims: the leaf is not sharded


class Zero(NamedTuple):
    """One stage of sharding, as pure functions (see the top of this file)."""

    storage: Callable[..., tuple[Tree, Tree]]
    inputs: Callable[[Tree, Tree], Tree]
    gather: Callable[[Tree, Tree, Tree | None, Shards], Tree]
    reduce: Callable[[Tree, Tree, Shards], Tree]
    own: Callable[[Tree, Tree], Tree]
    share: Callable[[Tree, Shards], Tree]


class Communication(NamedTuple):
    """How arrays travel between devices."""

    dtype: jnp.dtype  # of gradients on the wire
    bucket_bytes: float  # arrays are sent together up to this size, as stored


class Shards(NamedTuple):
    """What ZeRO shards over data, and how it travels."""

    dims: Tree  # of each array the dim that is sharded, or WHOLE
    communication: Communication


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


def _in_buckets(move: Callable[..., Sequence], shards: Shards, sent: Tree, *more: Tree, are_shards: bool) -> Tree:
    """-> the tree of move(dims, arrays, *others), called with the arrays of one bucket at a time.

    sent: what travels. more: trees like it, or with None. Arrays of one bucket are alike: all sharded or all whole,
    varying over the same axes, in the same memory. are_shards: what is sharded is given as shards.
    """
    leaves, tree = jax.tree.flatten(sent)
    rows = list(zip(tree.flatten_up_to(shards.dims), leaves, *map(tree.flatten_up_to, more), strict=True))
    kinds: dict[tuple, list[int]] = {}
    results: dict[int, Any] = {}
    for i, (d, *arrays) in enumerate(rows):
        kind = (x is not None and (varying_axes(x), offload.on_host(x)) for x in arrays)
        kinds.setdefault((d == WHOLE, *kind), []).append(i)
    for (whole, *_), alike in kinds.items():
        pieces = jax.lax.axis_size("data") if are_shards and not whole else 1
        for bucket in buckets([leaves[i].nbytes * pieces for i in alike], shards.communication.bucket_bytes):
            indices = [alike[j] for j in bucket]
            results |= zip(indices, move(*zip(*(rows[i] for i in indices), strict=True)), strict=True)
    return jax.tree.unflatten(tree, [results[i] for i in range(len(leaves))])


def _as_is(stored: Tree, inputs: Tree, sums: None, shards: Shards) -> Tree:
    """ZERO[0], ZERO[1]: the weights. Moves nothing."""
    return inputs


def _tapped(stored: Tree, taps: Tree, sums: Tree | None, shards: Shards, whole: bool, stored_sharded: bool) -> Tree:
    """The whole weights, such that their gradient leaves through taps, reduced in the dtype of communication.

    forward, stage 3     w[... D] = all_gather(w[... D/data])                            (N-1)/N
    backward             g[... D/data] = reduce_scatter(g[... D] + sums[... D])          (N-1)/N
    backward, stage 0    g[... D] = all_reduce(g[... D] + sums[... D])                   2 (N-1)/N

    Weights in host memory come to the device first, in the forward and again in the backward.

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
            grads = [g.astype(shards.communication.dtype) for g in grads]
            if whole:
                grads = all_reduce(grads, BATCH_AXES)
            elif sharded:
                grads = reduce_scatter(grads, "data", dims)
            return None, tuple(g.astype(jnp.float32) for g in grads), None

        gathered = jax.custom_vjp(lambda weights, taps, sums: forward(weights))
        gathered.defvjp(lambda weights, taps, sums: (forward(weights), sums), backward)
        return gathered(weights, taps, sums)

    sums = jax.tree.map(lambda _: None, stored) if sums is None else sums
    return _in_buckets(together, shards, stored, taps, sums, are_shards=stored_sharded)


def gather_ahead(stored: Tree, shards: Shards) -> Tree:
    """Stage 3: w[... D] = all_gather(w[... D/data]), (N-1)/N, apart from the layer that uses it.

    What is made of it is differentiated as at stage 2: the weights are whole, their gradients are scattered.
    """

    def together(dims: tuple, weights: tuple) -> Sequence:
        return weights if dims[0] == WHOLE else all_gather(list(weights), "data", dims)

    return _in_buckets(together, shards, stored, are_shards=True)


def _reduce(grads: Tree, stored: Tree, shards: Shards, stored_sharded: bool) -> Tree:
    """Sums over all devices that hold a part of a gradient: in the dtype of communication, where anything moves.

    stage 0          g[... D] {local} -> all_reduce over replica, data, context          2 (N-1)/N
    stage 1          g[... D] {local} -> reduce_scatter over data -> g[... D/data]       (N-1)/N
    stages 2 and 3   g[... D/data], scattered in the backward                            nothing
    stages 1 to 3    shards -> all_reduce over replica and context
    PER_LAYER        reduced in the backward                                             nothing

    Types and shapes tell what is left to do. The all-reduce is over all axes that a gradient varies over and its
    parameter (or shard) does not, so at every stage also over another axis (tensor), if parameters that are the same
    there have local gradients. Gradients in host memory are complete (`accumulate_on_host`).
    """

    def is_local(g: jax.Array, w: jax.Array, d: int) -> bool:
        return d != WHOLE and not stored_sharded and g.shape == w.shape

    def together(dims: tuple, grads: tuple, stored: tuple) -> list:
        if offload.on_host(grads[0]):
            return list(grads)
        own = varying_axes(stored[0]).union(() if dims[0] == WHOLE else ("data",))
        over = [axis for axis in AXES if axis in varying_axes(grads[0]) - own]
        scatters = is_local(grads[0], stored[0], dims[0])
        if scatters or any(jax.lax.axis_size(axis) > 1 for axis in over):
            grads = [g.astype(shards.communication.dtype) for g in grads]
        if scatters:
            grads = reduce_scatter(grads, "data", dims)
            over = [axis for axis in over if axis in varying_axes(grads[0])]
        return all_reduce(list(grads), over)

    are_local = any(jax.tree.leaves(jax.tree.map(is_local, grads, stored, shards.dims)))
    return _in_buckets(together, shards, grads, stored, are_shards=not are_local)


def accumulate_on_host(grads: Tree, stored: Tree, dims: Tree, on_host: Tree, earlier: Tree | None = None) -> Tree:
    """Gradients as a backward leaves them, added to earlier ones: in host memory where on_host and complete.

    on_host: at stages 2 and 3 alone. Complete: no other device adds to them in `reduce`. Earlier gradients come to the
    device and go back, else each gradient goes once.
    """

    def one(g: jax.Array, w: jax.Array, d: int, on_host: bool, earlier: jax.Array | None) -> jax.Array:
        own = varying_axes(w).union(() if d == WHOLE else ("data",))
        left = [axis for axis in AXES if axis in varying_axes(g) - own]
        if not on_host or any(jax.lax.axis_size(axis) > 1 for axis in left):
            return g if earlier is None else earlier + g
        g = all_reduce(g, left)  # over one device each: nothing moves between devices
        return offload.to_host(g) if earlier is None else offload.add(earlier, g)

    return jax.tree.map(one, grads, stored, dims, on_host, earlier or jax.tree.map(lambda _: None, grads))


def _own(stored: Tree, dims: Tree, whole: bool) -> Tree:
    """The part of the weights that this device has gradients of. Moves nothing. whole: weights are stored as that."""
    return stored if whole else jax.tree.map(lambda w, d: w if d == WHOLE else own_shard(w, "data", d), stored, dims)


def _share(updated: Tree, shards: Shards, whole: bool) -> Tree:
    """Stages 1 and 2: w[... D] = all_gather(w[... D/data]) in the dtype of storage, (N-1)/N. Else nothing moves."""

    def together(dims: tuple, weights: tuple) -> Sequence:
        return weights if dims[0] == WHOLE or whole else all_gather(weights, "data", dims, invarying=True)

    return _in_buckets(together, shards, updated, are_shards=True)


def _stage(params_sharded: bool, state_sharded: bool, in_backward: bool) -> Zero:
    whole = not state_sharded
    return Zero(
        storage=lambda specs, dims, axis="data": (
            _over(axis, specs, dims) if params_sharded else specs,
            _over(axis, specs, dims) if state_sharded else specs,
        ),
        inputs=partial(_taps, whole=whole, already=params_sharded) if in_backward else _weights,
        gather=partial(_tapped, whole=whole, stored_sharded=params_sharded) if in_backward else _as_is,
        reduce=partial(_reduce, stored_sharded=params_sharded),
        own=partial(_own, whole=params_sharded),
        share=partial(_share, whole=params_sharded),
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
