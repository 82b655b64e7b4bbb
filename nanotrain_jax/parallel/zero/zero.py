"""ZeRO: shard optimizer state, gradients and parameters over data and context (arXiv 1910.02054).

A stage is six pure functions. The step calls them in this order, all but the first inside `shard_map`:

    storage(specs, shards)             PartitionSpecs of parameters, and of master weights and moments
    inputs(stored, shards)             what the loss is differentiated with respect to
    gather(stored, inputs, sums, ...)  stored weights -> full weights, layer by layer
    reduce(grads, stored, shards)      gradients of this device -> sums over all devices
    own_shards(stored, shards)         the weights that this device updates
    gather_updated(updated, shards)    updated weights -> stored weights

With N devices along ZeRO's axes (data, expert and context: devices with other tokens of a row compute other parts of
a gradient too), and Psi parameters:

    stage  parameters  gradients  master, moments  moves per step and device, elements (ring, times (N-1)/N)
    0      full        full       full             all-reduce of the gradients                            2 Psi
    1      full        full       1/N              reduce-scatter once per step, all-gather of weights    2 Psi
    2      full        1/N        1/N              reduce-scatter per microbatch (M), all-gather          (M + 1) Psi
    3      1/N         1/N        1/N              two all-gathers and a reduce-scatter per microbatch    3 M Psi

Stages 0 and 1 reduce after the last backward (ZERO), or layer by layer within it (PER_LAYER): the same bytes, but
overlapped with the backward of other layers. (The last of several microbatches is then a separate program.) Stage 3
gathers layers twice; embedding and head at most once per microbatch, not again in the backward. In 16 bit it may store
float32 shards alone and cast them as it gathers (`Communication.weights`): 12 bytes per parameter, not 14.

`replica` axis: shard inside a group, replicate across groups (PyTorch's HYBRID_SHARD): after the reduce-scatter inside
it, shards are all-reduced over `replica`. Arrays with fewer than persist_below elements (norm gains, biases), and
those with no dim that N divides, stay replicated and are all-reduced. Arrays smaller than a bucket are scattered and
gathered together; `communication.py` decides in which dtype, or in 8 bits. Parameters may also be sharded over other
axes (tensor): then Psi counts this device's shards. ZeRO shards those over some of its own axes (experts, over expert)
over the rest of these, and sums their gradients over the rest.

`inputs` are what is differentiated: in ZERO[0] and ZERO[1] the weights, else "taps": zeros in the shape of the stored
gradient, whose cotangent is the reduced gradient. So a layer's full gradient lives only during that layer's backward,
and gradients accumulate in float32 whatever the compute dtype. Those of one microbatch may stay in the dtype in which
they were reduced, which taps then have.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax.parallel.collectives import (
    Tree,
    all_gather,
    all_reduce,
    as_varying,
    buckets,
    own_shard,
    varying_axes,
)
from nanotrain_jax.parallel.mesh import AXES, BATCH_AXES
from nanotrain_jax.parallel.offload import host_offload
from nanotrain_jax.parallel.sharding import abstract
from nanotrain_jax.parallel.zero.communication import Communication
from nanotrain_jax.parallel.zero.cuts import UNSHARDED, Cut, choose_cuts


class Shards(NamedTuple):
    """What ZeRO shards, and how it communicates."""

    cuts: Tree  # of each array
    communication: Communication


def zero_specs(
    params: Tree,
    mesh: Mesh,
    stage: int,
    persist_below: int = 10_000,
    specs: Tree = None,
    axis: str = "data",
) -> tuple[Tree, Tree]:
    """-> (PartitionSpecs of the parameters, PartitionSpecs of their master weights and moments) at a ZeRO stage.

    For any pytree of arrays, ShapeDtypeStructs or numbers (Flax NNX state, Linen variables, plain). specs: layouts over
    other axes (`sharding.specs`); ZeRO's axis is added to them. axis: the mesh axis to shard over. Raises ValueError on
    an unknown stage, an axis that the mesh lacks or specs use, and a leaf that is not an array.
    """
    if stage not in ZERO:
        raise ValueError(f"zero stage {stage} is unknown; use 0, 1, 2 or 3")
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(mesh.shape)}: pass axis= one of them")
    shapes = abstract(params)
    specs = jax.tree.map(lambda _: PartitionSpec(), params) if specs is None else specs
    for spec in jax.tree.leaves(specs):
        if axis in jax.tree.leaves(tuple(spec)):
            raise ValueError(f"{spec} is already sharded over {axis}, the axis of ZeRO; use other axes in specs")
    return ZERO[stage].storage(specs, choose_cuts(shapes, {axis: mesh.shape[axis]}, persist_below, (), specs))


def _over(specs: Tree, cuts: Tree) -> Tree:
    """-> specs with the axes of each leaf's cut added at its dim."""

    def add_axes(spec: PartitionSpec, cut: Cut) -> PartitionSpec:
        if cut == UNSHARDED:
            return spec
        entries = [*spec, *[None] * (cut.dim + 1 - len(spec))]
        entry = cut.axes if len(cut.axes) > 1 else cut.axes[0]
        return PartitionSpec(*entries[: cut.dim], entry, *entries[cut.dim + 1 :])

    return jax.tree.map(add_axes, specs, cuts)


def _in_buckets(move: Callable[..., Sequence], shards: Shards, sent: Tree, *more: Tree, are_shards: bool) -> Tree:
    """Return the tree of move(axes, dims, arrays, *others), called once per bucket.

    sent: the arrays to communicate. more: trees like it, or with None. Arrays of a bucket are alike: sharded over the
    same axes (none: replicated), varying over the same axes, in the same memory. are_shards: sharded arrays are given
    as shards.
    """
    leaves, tree = jax.tree.flatten(sent)
    cuts = tree.flatten_up_to(shards.cuts)
    rows = list(zip([cut.dim for cut in cuts], leaves, *map(tree.flatten_up_to, more), strict=True))
    kinds: dict[tuple, list[int]] = {}
    results: dict[int, Any] = {}
    for i, (cut, (_, *arrays)) in enumerate(zip(cuts, rows, strict=True)):
        kind = (x is not None and (varying_axes(x), host_offload.on_host(x)) for x in arrays)
        kinds.setdefault((cut.axes, *kind), []).append(i)
    for (axes, *_), alike in kinds.items():
        num_shards = jax.lax.axis_size(axes) if are_shards and axes else 1
        for bucket in buckets([leaves[i].nbytes * num_shards for i in alike], shards.communication.bucket_bytes):
            indices = [alike[j] for j in bucket]
            results |= zip(indices, move(axes, *zip(*(rows[i] for i in indices), strict=True)), strict=True)
    return jax.tree.unflatten(tree, [results[i] for i in range(len(leaves))])


def _cast(stored: Tree, dtype: jnp.dtype | None) -> Tree:
    """Return stored weights in the dtype in which they are gathered. Moves nothing; None: as stored."""

    def cast(w: jax.Array) -> jax.Array:
        # The barrier keeps the cast of a layer in the loop over layers.
        return w if w.dtype == dtype else jax.lax.optimization_barrier(w.astype(dtype))

    return stored if dtype is None else jax.tree.map(cast, stored)


def gather_ahead(stored: Tree, shards: Shards) -> Tree:
    """Stage 3 with prefetch: w[... D] = all_gather(w[... D/N]), (N-1)/N, outside the layer that uses it.

    The layer is then differentiated with respect to full weights; `scatter_behind` scatters its gradients.
    """

    def gather_bucket(axes: tuple[str, ...], dims: tuple, weights: tuple) -> Sequence:
        return shards.communication.all_gather(weights, axes, dims) if axes else weights

    return _in_buckets(gather_bucket, shards, _cast(stored, shards.communication.weights), are_shards=True)


def scatter_behind(grads: Tree, shards: Shards) -> Tree:
    """Stage 3 with prefetch: g[... D/N] = reduce_scatter(g[... D]), (N-1)/N, outside the layer that computes g.

    Returns float32. Arrays that are not sharded stay local.
    """

    def scatter_bucket(axes: tuple[str, ...], dims: tuple, grads: tuple) -> list:
        grads = [g.astype(shards.communication.dtype) for g in grads]
        if axes:
            grads = shards.communication.reduce_scatter(grads, axes, dims)
        return [g.astype(jnp.float32) for g in grads]

    return _in_buckets(scatter_bucket, shards, grads, are_shards=False)


def accumulate_on_host(grads: Tree, stored: Tree, shards: Shards, on_host: Tree, earlier: Tree | None = None) -> Tree:
    """Add gradients to those of earlier microbatches; offload them to host memory where on_host and complete.

    on_host: at stages 2 and 3 only. Complete: `reduce` adds nothing from other devices. Each gradient moves to the host
    once; with earlier gradients, these move to the device and back too.
    """

    def accumulate(g: jax.Array, w: jax.Array, cut: Cut, on_host: bool, earlier: jax.Array | None) -> jax.Array:
        own = varying_axes(w).union(cut.axes)
        unreduced = [axis for axis in AXES if axis in varying_axes(g) - own]
        if not on_host or any(jax.lax.axis_size(axis) > 1 for axis in unreduced):
            return g if earlier is None else earlier + g
        g = all_reduce(g, unreduced)  # axes of one device each: moves nothing
        return host_offload.to_host(g) if earlier is None else host_offload.add(earlier, g)

    earlier = earlier or jax.tree.map(lambda _: None, grads)
    return jax.tree.map(accumulate, grads, stored, shards.cuts, on_host, earlier)


class Zero(NamedTuple):
    """A ZeRO stage: what it shards, and its functions, which are pure (see the top of this file)."""

    params_sharded: bool
    state_sharded: bool  # master weights and moments; reduced gradients too
    in_backward: bool  # gradients are reduced in the backward

    def storage(self, specs: Tree, cuts: Tree) -> tuple[Tree, Tree]:
        """-> PartitionSpecs of parameters; of master weights and moments."""
        sharded = _over(specs, cuts)
        return sharded if self.params_sharded else specs, sharded if self.state_sharded else specs

    def inputs(self, stored: Tree, shards: Shards, dtype: jnp.dtype = jnp.float32) -> Tree:
        """The weights, cast so that gradients stay local. In the backward: zeros of this dtype in the shape of the
        stored gradient, full or sharded ("taps"). Moves nothing.
        """
        if not self.in_backward:
            return as_varying(stored, BATCH_AXES)
        divide = self.state_sharded and not self.params_sharded

        def tap(w: jax.Array, cut: Cut) -> jax.Array:
            size = jax.lax.axis_size(cut.axes) if cut.axes and divide else 1
            zeros = jnp.zeros(tuple(n // size if i == cut.dim else n for i, n in enumerate(w.shape)), dtype)
            return as_varying(zeros, sorted(varying_axes(w).union(BATCH_AXES if self.state_sharded else ())))

        return jax.tree.map(tap, stored, shards.cuts)

    def gather(self, stored: Tree, inputs: Tree, sums: Tree | None, shards: Shards) -> Tree:
        """The full weights. In the backward their reduced gradient becomes the cotangent of the taps:

        forward, stage 3     w[... D] = all_gather(w[... D/N])                               (N-1)/N
        backward             g[... D/N] = reduce_scatter(g[... D] + sums[... D])             (N-1)/N
        backward, stage 0    g[... D] = all_reduce(g[... D] + sums[... D])                   2 (N-1)/N

        Gradients are reduced in the dtype of communication, or in 8 bits. Weights in host memory are copied to the
        device first, in the forward and again in the backward. inputs: None for weights that are not differentiated.
        sums: local gradients of earlier microbatches, reduced together with this one's.
        """
        if not self.in_backward:
            return jax.tree.map(lambda w, x: x if w is None else w, inputs, stored, is_leaf=lambda w: w is None)

        def gather_bucket(axes: tuple[str, ...], dims: tuple, weights: tuple, taps: tuple, sums: tuple) -> list:
            def forward(weights: tuple) -> list:
                weights = host_offload.to_device(list(weights))
                return shards.communication.all_gather(weights, axes, dims) if self.params_sharded and axes else weights

            def backward(sums: tuple, grads: list) -> tuple:
                if sums[0] is not None:
                    grads = [g.astype(jnp.float32) + s for g, s in zip(grads, sums, strict=True)]
                grads = [g.astype(shards.communication.dtype) for g in grads]
                if not self.state_sharded:
                    over = [axis for axis in BATCH_AXES if axis not in varying_axes(taps[0])]
                    grads = shards.communication.all_reduce(grads, over)
                elif axes:
                    grads = shards.communication.reduce_scatter(grads, axes, dims)
                return None, tuple(g.astype(tap.dtype) for g, tap in zip(grads, taps, strict=True)), None

            if taps[0] is None:
                return forward(weights)
            gathered = jax.custom_vjp(lambda weights, taps, sums: forward(weights))
            gathered.defvjp(lambda weights, taps, sums: (forward(weights), sums), backward)
            return gathered(weights, taps, sums)

        sums = jax.tree.map(lambda _: None, stored) if sums is None else sums
        stored = _cast(stored, shards.communication.weights)
        return _in_buckets(gather_bucket, shards, stored, inputs, sums, are_shards=self.params_sharded)

    @jax.named_scope("reduce")
    def reduce(self, grads: Tree, stored: Tree, shards: Shards) -> Tree:
        """Sum gradients over devices, in the dtype of communication, or 8 bits, where anything moves.

        stage 0          g[... D] {local} -> all_reduce over replica, data, context          2 (N-1)/N
        stage 1          g[... D] {local} -> reduce_scatter over ZeRO's axes -> g[... D/N]   (N-1)/N
        stages 2 and 3   g[... D/N], scattered in the backward                               nothing
        stages 1 to 3    shards -> all_reduce over replica
        PER_LAYER        reduced in the backward                                             nothing

        Types and shapes decide what remains to be done. The all-reduce is over all axes that a gradient varies over and
        its parameter (or shard) does not: at every stage also over another axis (tensor), if parameters replicated
        there have local gradients. Gradients in host memory are complete (`accumulate_on_host`).
        """

        def is_local(g: jax.Array, w: jax.Array, axes: tuple[str, ...]) -> bool:
            return bool(axes) and not self.params_sharded and g.shape == w.shape

        def reduce_bucket(axes: tuple[str, ...], dims: tuple, grads: tuple, stored: tuple) -> list:
            if host_offload.on_host(grads[0]):
                return list(grads)
            own = varying_axes(stored[0]).union(axes)
            over = [axis for axis in AXES if axis in varying_axes(grads[0]) - own.union(shards.communication.kept)]
            scatters = is_local(grads[0], stored[0], axes)
            if scatters or any(jax.lax.axis_size(axis) > 1 for axis in over):
                grads = [g.astype(shards.communication.dtype) for g in grads]
            if scatters:
                grads = shards.communication.reduce_scatter(grads, axes, dims)
                over = [axis for axis in over if axis in varying_axes(grads[0])]
            return shards.communication.all_reduce(grads, over)

        found = jax.tree.map(lambda g, w, cut: is_local(g, w, cut.axes), grads, stored, shards.cuts)
        are_local = any(jax.tree.leaves(found))
        return _in_buckets(reduce_bucket, shards, grads, stored, are_shards=not are_local)

    def own_shards(self, stored: Tree, shards: Shards) -> Tree:
        """The part of the weights that this device has gradients of. Moves nothing."""
        if self.params_sharded:
            return stored
        return jax.tree.map(lambda w, cut: own_shard(w, cut.axes, cut.dim) if cut.axes else w, stored, shards.cuts)

    def gather_updated(self, updated: Tree, shards: Shards) -> Tree:
        """Stages 1 and 2: w[... D] = all_gather(w[... D/N]) as stored, (N-1)/N; else nothing."""

        def gather_bucket(axes: tuple[str, ...], dims: tuple, weights: tuple) -> Sequence:
            if not axes or self.params_sharded:
                return weights
            return all_gather(weights, axes, dims, invarying=True)

        return _in_buckets(gather_bucket, shards, updated, are_shards=True)


ZERO = {
    0: Zero(params_sharded=False, state_sharded=False, in_backward=False),
    1: Zero(params_sharded=False, state_sharded=True, in_backward=False),
    2: Zero(params_sharded=False, state_sharded=True, in_backward=True),
    3: Zero(params_sharded=True, state_sharded=True, in_backward=True),
}
PER_LAYER = {
    0: Zero(params_sharded=False, state_sharded=False, in_backward=True),
    1: ZERO[2],  # stage 1 reduces once per step, with sums; stage 2 once per microbatch
}
