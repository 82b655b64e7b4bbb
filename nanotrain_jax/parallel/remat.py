"""Rematerialization (activation checkpointing): which residuals the forward of a layer saves for its backward.

    none       the outputs of matmuls, attention kernels and reductions over devices, and what else the backward needs
    selective  the outputs of matmuls (SAVED names), reduced over devices; attention internals, norms and activations
               are recomputed (Korthikanti et al. 2022, arXiv 2205.05198, section 4), but not what attention over a
               mesh axis communicates
    full       only the input of each layer (Chen et al. 2016, arXiv 1604.06174); with ring and gather attention also
               the output of that, so that the backward neither attends nor communicates again
    block:N    only the input of every N-th layer: the square-root trick (same paper)

No policy saves gathered weights: ZeRO-3 gathers them again in the backward.

offload: store what selective, full and block:N save in host memory (ZeRO-Infinity, arXiv 2104.07857, section 5.1.2):
copied to the host in the forward of its layer, back to the device in its backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.config.values import Remat
from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes

INPUT = "input"  # of a layer, or of a block of them
# Names of values of the techniques. A layer that saves them does not communicate again to recompute them.
BLOCKWISE = "context_out", "context_lse"  # of ring and gather attention: with these it does not attend again either
ULYSSES = "ulysses_q", "ulysses_kv", "ulysses_out"  # what each all-to-all returns
PACKED = "packed_out", "packed_lse"  # of attention within documents: with these it does not attend again
HOPS = "columns", "row"  # results of collective matmuls
MODULE = ("residuals_of_module",)  # what the forward of a pipeline stage that is a different module stores
# Matmul outputs of a layer that its backward needs, and what attention over a mesh axis has communicated.
SAVED = ("q", "k", "v", "attention_out", "router", "gate", "up", "mlp_out", "adapter", *BLOCKWISE, *ULYSSES)

# Includes reductions over devices: otherwise their full-size inputs, partial sums, would be saved and reduced again.
EXPENSIVE = ("dot_general", "dot_product_attention_fwd_wrapper", "reduce_scatter", "psum", "psum_invariant")


class Policy(NamedTuple):
    """Which residuals of a layer are saved, and in which memory."""

    remat: Remat = Remat("none")
    regather: bool = False  # the layer gathers its weights; do not save them
    offload: bool = False  # store what is saved in host memory; has no effect with none
    unroll: bool = False  # write out the layers of a block instead of a loop, so that its backward can be split
    written_out: bool = False  # `scan` writes out the loop over layers: less memory traffic, longer to compile
    ahead: int = 0  # written out, the backward of a layer waits for gradients of the one so many after it; 0: for none


def name(x: jax.Array, what: str) -> jax.Array:
    """Return x, named for policies. what: one of SAVED."""
    return checkpoint_name(x, what)


# Save the outputs of matmuls, attention and reductions, not what is gathered or cheap.
_expensive = jax.checkpoint_policies.save_from_both_policies(
    lambda primitive, *_, **__: primitive.name in EXPENSIVE,
    jax.checkpoint_policies.save_only_these_names(*SAVED, *PACKED, *HOPS, *MODULE),
)


def checkpointed(body: Callable[[Tree, Tree], Tree], policy: Policy) -> tuple[Callable[[Tree, Tree], Tree], int | None]:
    """-> body(x, layer) -> x that saves what policy says; its block size N: it takes N stacked layers. None: one layer,
    not stacked."""

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
        return jax.checkpoint(run, policy=keep)

    if policy.remat.policy == "full":
        return checkpoint(body, BLOCKWISE), None
    if policy.remat.policy == "selective":
        return checkpoint(body, SAVED), None
    if policy.regather:
        body = jax.checkpoint(body, policy=_expensive)
    if policy.remat.policy == "none":
        return body, None
    run_all = _one_after_another if policy.unroll or policy.written_out else _in_a_loop
    return checkpoint(partial(run_all, body)), policy.remat.block


def _in_a_loop(body: Callable[[Tree, Tree], Tree], x: Tree, layers: Tree) -> Tree:
    """Run x = body(x, layer) for each layer of layers[n ...]."""
    return lax.scan(lambda x, layer: (body(x, layer), None), x, layers)[0]


def _one_after_another(body: Callable[[Tree, Tree], Tree], x: Tree, layers: Tree) -> Tree:
    """The same, written out: a program n times as long."""
    for i in range(jax.tree.leaves(layers)[0].shape[0]):
        x = body(x, jax.tree.map(itemgetter(i), layers))
    return x


def in_blocks(layers: Tree, size: int | None) -> Tree:
    """layers[L ...] -> layers[L/size size ...]; None: unchanged. Raises ValueError if size does not divide L."""
    count = jax.tree.leaves(layers)[0].shape[0]
    if size and count % size:
        raise ValueError(f"memory.remat='block:{size}': must divide the {count} layers; use a divisor of {count}")
    return jax.tree.map(lambda w: w.reshape(count // size, size, *w.shape[1:]), layers) if size else layers


def scan(body: Callable[..., Tree], x: Tree, layers: Tree, policy: Policy, fixed: Sequence[Tree] = ()) -> Tree:
    """Run x = body(x, layer, *fixed_layer) for each layer of layers[L ...], rematerialized by policy. Moves nothing
    itself. fixed: further trees of arrays [L ...] that are not differentiated.

    Raises ValueError if block:N does not divide L.
    """
    if policy.written_out:
        return _written_out(body, x, layers, policy, fixed)
    run, size = checkpointed(lambda x, row: body(x, *row), policy)
    return lax.scan(lambda x, row: (run(x, row), None), x, in_blocks((layers, *fixed), size))[0]


def _written_out(body: Callable[..., Tree], x: Tree, layers: Tree, policy: Policy, fixed: Sequence[Tree]) -> Tree:
    """`scan` without a loop in the compiled program: residuals are not copied to and from stacks of all layers, and
    gradients are stacked once. What is fixed is sliced where it is used, so that it is never copied."""

    def run_layer(x: Tree, row: tuple[Tree, jax.Array]) -> Tree:
        layer, i = row
        return body(x, layer, *jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), fixed))

    run, size = checkpointed(run_layer, policy)
    numbers = jnp.arange(jax.tree.leaves((layers, fixed))[0].shape[0])
    rows = in_blocks((jax.tree.map(_stacked_apart, layers), numbers), size)
    ahead, axes = min(policy.ahead, len(rows[1])), varying_axes(jax.tree.leaves(x)[0])
    if not ahead:
        return lax.scan(lambda x, row: (run(x, row), None), x, rows, unroll=True)[0]
    gathers_wait = policy.regather and all(axes <= varying_axes(w) for w in jax.tree.leaves(fixed))
    if gathers_wait:
        rows = rows[0], as_varying(rows[1], sorted(axes))

    def turn(carry: tuple[Tree, list], row: tuple) -> tuple[tuple[Tree, list], None]:
        """Run the first layer that waits; row: of the layer that is policy.ahead after it."""
        x, (now, *waiting) = carry
        layer, i = row
        if gathers_wait:  # else XLA may gather the weights of many layers before the first one runs
            x, i = lax.optimization_barrier((x, i))
        x, layer = _before(run(x, now), layer)
        return (x, [*waiting, (layer, i)]), None

    waiting = [jax.tree.map(itemgetter(k), rows) for k in range(ahead)]
    (x, waiting), _ = lax.scan(turn, (x, waiting), jax.tree.map(lambda w: w[ahead:], rows), unroll=True)
    for row in waiting:
        x = run(x, row)
    return x


@jax.custom_vjp
def _stacked_apart(stack: jax.Array) -> jax.Array:
    """Return a stack. Its gradient is stacked once: XLA might do so again in each kernel that reads it."""
    return stack


_stacked_apart.defvjp(lambda stack: (stack, None), lambda _, g: (lax.optimization_barrier(g),))


@jax.custom_vjp
def _before(x: Tree, layer: Tree) -> tuple[Tree, Tree]:
    """Return both. In the backward the gradient of x is used after that of layer is complete: else XLA may put off
    what layers communicate, and the gradients of weights, until all these wait in memory."""
    return x, layer


def _wait(_: None, grads: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """Return grads, after all of them are complete. The barrier declares all that it returns varying over each axis
    that one of them varies over: a gradient that does not is returned as it came."""

    def same_type(g: jax.Array, waited: jax.Array) -> jax.Array:
        return waited if varying_axes(waited) == varying_axes(g) else g

    return jax.tree.map(same_type, grads, lax.optimization_barrier(grads))


_before.defvjp(lambda x, layer: ((x, layer), None), _wait)
