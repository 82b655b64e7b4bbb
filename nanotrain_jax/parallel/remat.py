"""Rematerialisation: what the forward of a layer keeps for its backward, as data.

    none       everything that a matmul, an attention kernel or a sum over devices returned, and what the rest needs for
               its backward
    selective  the outputs of the matmuls (SAVED names), summed over devices; attention internals, norms and activations
               are computed again (Korthikanti et al. 2022, arXiv 2205.05198, section 4)
    full       nothing but the input of each layer (Chen et al. 2016, arXiv 1604.06174)
    block:N    nothing but the input of every N-th layer: the square-root trick (same paper)

Gathered weights are kept by no policy: ZeRO-3 gathers them again in the backward.

offload: what selective, full and block:N keep waits in host memory (ZeRO-Infinity, arXiv 2104.07857, section 5.1.2):
each copy leaves in the forward of its layer and comes back in its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.fields import Remat

INPUT = "input"  # of a layer, or of a block of them
SAVED = ("q", "k", "v", "attention_out", "gate", "up")  # matmul outputs of a layer that its backward needs

# Sums over devices are among it, or partial sums would be kept in their place, whole, and summed again.
EXPENSIVE = ("dot_general", "dot_product_attention_fwd_wrapper", "reduce_scatter", "psum", "psum_invariant")

Tree = Any  # a pytree of arrays


class Policy(NamedTuple):
    """What the backward of a layer finds, and where."""

    remat: Remat = Remat("none")
    regather: bool = False  # the layer gathers its weights, which are not to be kept
    prefetch: bool = False  # leave the compiler free to gather a layer's weights before its turn in the backward
    offload: bool = False  # what is kept goes to host memory in the forward, and comes back in the backward; not none


def name(x: jax.Array, what: str) -> jax.Array:
    """x, known to policies by one of the names in SAVED."""
    return checkpoint_name(x, what)


def _expensive(primitive: Any, *_: Any, **__: Any) -> bool:
    """What matmuls, attention kernels and sums over devices return is kept; what was gathered or is cheap is not."""
    return primitive.name in EXPENSIVE


def unit(body: Callable[[Tree, Tree], Tree], policy: Policy) -> tuple[Callable[[Tree, Tree], Tree], int | None]:
    """-> (body(x, layer) -> x, such that its backward keeps what policy says; how many layers, stacked, it takes).

    None: one layer, not stacked.
    """

    def checkpoint(body: Callable, saved: Sequence[str] = ()) -> Callable:
        keep = jax.checkpoint_policies.save_only_these_names(*saved)
        if policy.offload:
            keep = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[*saved, INPUT],
                offload_src="device",
                offload_dst="pinned_host",
            )
        run = (lambda x, layer: body(name(x, INPUT), layer)) if policy.offload else body
        return jax.checkpoint(run, policy=keep, prevent_cse=not policy.prefetch)

    if policy.remat.policy == "full":
        return checkpoint(body), None
    if policy.remat.policy == "selective":
        return checkpoint(body, SAVED), None
    if policy.regather:
        body = jax.checkpoint(body, policy=_expensive, prevent_cse=not policy.prefetch)
    if policy.remat.policy == "none":
        return body, None
    block = checkpoint(lambda x, layers: lax.scan(lambda x, layer: (body(x, layer), None), x, layers)[0])
    return block, policy.remat.block


def stacked(layers: Tree, size: int | None) -> Tree:
    """Layers stacked along a leading dim -> the same in stacks of size (None: as they are).

    Raises ValueError if size does not divide their number.
    """
    count = jax.tree.leaves(layers)[0].shape[0]
    if size and count % size:
        raise ValueError(f"memory.remat='block:{size}': {count} layers are not a multiple of {size}; use a divisor")
    return jax.tree.map(lambda w: w.reshape(count // size, size, *w.shape[1:]), layers) if size else layers


def scan(body: Callable[[Tree, Tree], Tree], x: Tree, layers: Tree, policy: Policy) -> Tree:
    """x after body(x, layer) for each layer in turn, keeping what policy says (see `unit`). Moves nothing by itself.

    layers: arrays stacked along a leading dim. Raises ValueError if block:N does not divide their number.
    """
    run, size = unit(body, policy)
    return lax.scan(lambda x, layer: (run(x, layer), None), x, stacked(layers, size))[0]
