"""All-reduce written out: the algorithms that a library chooses from, as pure functions of permutes.

Each returns the sum of a tree over a mesh axis, for use inside any `shard_map` (with check_vma=True). The sum is equal
on all devices, but varying in type: a permute cannot tell JAX that it is replicated.

N devices along the axis, S bytes of the tree. A step of m bytes takes alpha + m beta: latency, and the time of a byte
on a link that sends and receives at once. Steps that send in both directions of a ring use two links.

                     steps               bytes the busiest device sends    seconds
    ring             2 (N-1)             2 (N-1)/N S                       2 (N-1) alpha + 2 (N-1)/N S beta
    two_rings        2 (N-1)             2 (N-1)/N S                       2 (N-1) alpha +   (N-1)/N S beta
    halving          2 log2 N            2 (N-1)/N S                       2 log2 N alpha + 2 (N-1)/N S beta
    doubling         log2 N              log2 N S                          log2 N (alpha + S beta)
    binomial_tree    2 ceil(log2 N)      ceil(log2 N) S                    2 ceil(log2 N) (alpha + S beta)
    two_level        as two rings of n inside and m across hosts: 2 (n-1)/n S inside, 2 (m-1)/m S/n across

A ring has the fewest bytes and only neighbours, but its steps grow with N. Doubling has the fewest steps, for small
arrays; halving the fewest bytes in 2 log2 N steps: both send to distant devices, all at once. A tree sends half as much
in all as doubling. `cost` has these formulas for any N. Sums are in the dtype of each array.

NCCL has the ring and a pipelined double tree; XLA's own all-reduce leaves the choice to it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nanotrain_jax.parallel import loops
from nanotrain_jax.parallel.collectives import Tree, as_varying, position, send, shift


def ring(values: Tree, axis: str) -> Tree:
    """values{varying over axis} -> sum over axis.

    A reduce-scatter and an all-gather around a ring (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002): N-1
    steps of S/N bytes each. The sum of the k-th of N parts begins at device k and ends at device k-1.
    """
    return _in_parts(partial(_ring, axis=axis), values, axis, lax.axis_size(axis))


def two_rings(values: Tree, axis: str) -> Tree:
    """values{varying over axis} -> sum over axis.

    `ring` with half of the values in each direction at once: the steps and bytes of one ring, over both directions of
    the links.
    """

    def both(x_PS: jax.Array) -> jax.Array:
        halves = jnp.split(x_PS, 2)
        return jnp.concatenate([_ring(halves[0], axis), _ring(halves[1], axis, -1)])

    return _in_parts(both, values, axis, 2 * lax.axis_size(axis))


def halving(values: Tree, axis: str) -> Tree:
    """values{varying over axis} -> sum over axis.

    Recursive halving, then doubling (Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521, section 4.4):
    device i exchanges half of what is left with i XOR N/2, then a quarter with i XOR N/4, ..., and back. Where N is no
    power of two, the devices from the largest power p on first send all to device i - p, and get the sum at the end:
    2 steps and S bytes more.
    """
    return _in_parts(partial(_folded, _halving, axis=axis), values, axis, _power(lax.axis_size(axis)))


def doubling(values: Tree, axis: str) -> Tree:
    """values{varying over axis} -> sum over axis.

    Recursive doubling (Thakur et al. 2005, section 4.4): device i exchanges all S bytes with i XOR 1, then i XOR 2, and
    so on; where N is no power of two as `halving`.
    """
    return _in_parts(partial(_folded, _doubling, axis=axis), values, axis, 1)


def binomial_tree(values: Tree, axis: str) -> Tree:
    """values{varying over axis} -> sum over axis.

    Reduce to device 0 along a binomial tree, then broadcast along it (Thakur et al. 2005, sections 4.2 and 4.4). All
    S bytes in each step: for small S.
    """
    return _in_parts(partial(_binomial_tree, axis=axis), values, axis, 1)


def two_level(values: Tree, inner: str, outer: str) -> Tree:
    """values{varying over inner and outer} -> sum over both.

    A reduce-scatter inside each host, an all-reduce of the shards across hosts, an all-gather inside (the hierarchy of
    MPI libraries and of `parallel.replica`). inner: the axis of fast links, with n devices; across hosts only S/n
    bytes per device travel.
    """

    def run(x_PS: jax.Array) -> jax.Array:
        own_S = _reduce_scatter(x_PS, inner)
        parts = _padded(own_S, lax.axis_size(outer))
        return _all_gather(_ring(parts, outer).ravel()[: own_S.size], inner)

    return _in_parts(run, as_varying(values, (outer,)), inner, lax.axis_size(inner))


ALGORITHMS: dict[str, Callable[[Tree, str], Tree]] = {
    "ring": ring,
    "two_rings": two_rings,
    "halving": halving,
    "doubling": doubling,
    "binomial_tree": binomial_tree,
}


class Cost(NamedTuple):
    """Of an all-reduce of S bytes over N devices."""

    steps: int
    sent: float  # bytes that the busiest device sends, over S
    in_turn: float  # bytes over S that travel one after another: of the largest message of each step, per link

    def seconds(self, size: float, alpha: float, beta: float) -> float:
        """alpha: seconds per step. beta: seconds per byte of a link, in each direction."""
        return self.steps * alpha + self.in_turn * size * beta


def cost(algorithm: str, N: int) -> Cost:
    """Return steps and bytes of one of ALGORITHMS. Raises ValueError for another."""
    around, p, depth = 2 * (N - 1) / N, _power(N), (N - 1).bit_length()
    extra, powers = int(p < N), p.bit_length() - 1
    found = {
        "ring": Cost(2 * (N - 1), around, around),
        "two_rings": Cost(2 * (N - 1), around, around / 2),
        "halving": Cost(2 * (powers + extra), 2 * (p - 1) / p + extra, 2 * (p - 1) / p + 2 * extra),
        "doubling": Cost(powers + 2 * extra, powers + extra, powers + 2 * extra),
        "binomial_tree": Cost(2 * depth, depth, 2 * depth),
    }
    if algorithm not in found:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(found)}")
    return found[algorithm]


def _in_parts(run: Callable[[jax.Array], jax.Array], values: Tree, axis: str, parts: int) -> Tree:
    """Return run(x[parts S/parts]) of all leaves of one dtype together, padded with zeros, as a tree again."""
    leaves, tree = jax.tree.flatten(as_varying(values, (axis,)))
    results: dict[int, jax.Array] = {}
    for dtype in sorted({x.dtype for x in leaves}, key=str):
        alike = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        flat = jnp.concatenate([leaves[i].ravel() for i in alike])
        summed = run(_padded(flat, parts)).ravel()
        for i in alike:
            results[i], summed = summed[: leaves[i].size].reshape(leaves[i].shape), summed[leaves[i].size :]
    return jax.tree.unflatten(tree, [results[i] for i in range(len(leaves))])


def _padded(flat: jax.Array, parts: int) -> jax.Array:
    """x[S] -> x[parts S/parts], with zeros at the end."""
    return jnp.pad(flat, (0, -flat.size % parts)).reshape(parts, -1)


def _ring(x_PS: jax.Array, axis: str, direction: int = 1) -> jax.Array:
    return _all_gather(_reduce_scatter(x_PS, axis, direction), axis, direction)


def _reduce_scatter(x_PS: jax.Array, axis: str, direction: int = 1) -> jax.Array:
    """x[N S/N] -> x[S/N]: device i has the sum of part i + direction. N-1 steps."""
    N, i = lax.axis_size(axis), position(axis)

    def step(part_S: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        return shift(part_S, axis, direction) + loops.get(x_PS, (i - direction * k) % N), None

    return lax.scan(step, loops.get(x_PS, i), jnp.arange(1, N))[0]


def _all_gather(part_S: jax.Array, axis: str, direction: int = 1) -> jax.Array:
    """x[S/N] -> x[N S/N], where device i has part i + direction. N-1 steps."""
    N, i = lax.axis_size(axis), position(axis)

    def step(carry: tuple[jax.Array, jax.Array], k: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        part_S, x_PS = carry
        part_S = shift(part_S, axis, direction)
        return (part_S, loops.put(x_PS, (i + direction * (1 - k)) % N, part_S)), None

    x_PS = jnp.broadcast_to(part_S, (N, *part_S.shape))
    return lax.scan(step, (part_S, x_PS), jnp.arange(1, N))[0][1]


def _folded(run: Callable[[jax.Array, str, int], jax.Array], x_PS: jax.Array, axis: str) -> jax.Array:
    """Return run(x, axis, p), a sum over the first p devices, with p the largest power of two of at most N.

    The other devices first send x to one of the first, and get the sum at the end.
    """
    N, i = lax.axis_size(axis), position(axis)
    p = _power(N)
    extra = range(p, N)
    if not extra:
        return run(x_PS, axis, p)
    x_PS = run(x_PS + send(x_PS, axis, [(j, j - p) for j in extra]), axis, p)
    return jnp.where(i < p, x_PS, send(x_PS, axis, [(j - p, j) for j in extra]))


def _exchange(x: jax.Array, axis: str, p: int, distance: int) -> jax.Array:
    """Return x of device i XOR distance, on the first p devices."""
    return send(x, axis, [(j, j ^ distance) for j in range(p)])


def _halving(x_PS: jax.Array, axis: str, p: int) -> jax.Array:
    """x[p S/p] -> the sum over p devices. Written out, log2 p times twice: distances and sizes differ."""
    i, distances = position(axis), _powers(p)
    for distance in reversed(distances):
        lower, upper = jnp.split(x_PS, 2)
        is_upper = (i & distance) > 0
        kept, sent = jnp.where(is_upper, upper, lower), jnp.where(is_upper, lower, upper)
        x_PS = kept + _exchange(sent, axis, p, distance)
    for distance in distances:
        other = _exchange(x_PS, axis, p, distance)
        is_upper = (i & distance) > 0
        x_PS = jnp.concatenate([jnp.where(is_upper, other, x_PS), jnp.where(is_upper, x_PS, other)])
    return x_PS


def _doubling(x_PS: jax.Array, axis: str, p: int) -> jax.Array:
    for distance in _powers(p):
        x_PS = x_PS + _exchange(x_PS, axis, p, distance)
    return x_PS


def _binomial_tree(x_PS: jax.Array, axis: str) -> jax.Array:
    N, i = lax.axis_size(axis), position(axis)
    distances = _powers(N)
    for distance in distances:
        x_PS = x_PS + send(x_PS, axis, [(j, j - distance) for j in range(distance, N, 2 * distance)])
    for distance in reversed(distances):
        pairs = [(j - distance, j) for j in range(distance, N, 2 * distance)]
        receives = i % (2 * distance) == distance
        x_PS = jnp.where(receives, send(x_PS, axis, pairs), x_PS)
    return x_PS


def _powers(N: int) -> list[int]:
    """Return the powers of two below N, in order."""
    return [2**k for k in range((N - 1).bit_length())]


def _power(N: int) -> int:
    """Return the largest power of two of at most N."""
    return 1 << (N.bit_length() - 1)
