"""Arrays that rest in host memory, and loops that stream them through the device, a piece at a time.

ZeRO-Offload (arXiv 2101.06840) keeps master weights and moments in host memory, ZeRO-Infinity (arXiv 2104.07857) the
weights too. JAX's memory spaces do the moving: a type says where an array rests (`float32<host>[8,4]`), and only
`to_device` and `to_host` go between. These functions ask the type, so that what is on the device already is left there.

A loop is double-buffered (`stream`): as one piece leaves the next one comes. By the program the device holds two at a
time; as XLA lays the loop out up to four, so pieces are small. On a CPU both spaces are the same memory, and the same
code runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any  # a pytree of arrays

HOST = "pinned_host"  # the memory kind (of a `jax.sharding.NamedSharding`) that a GPU reads and writes by itself
PIECE = 2**24  # elements
TOO_MANY = 16  # times more pieces than it takes


def placed(mesh: Mesh, spec: PartitionSpec, host: bool) -> NamedSharding:
    """The sharding of an array that rests on the host, or on the device."""
    if not host:
        return NamedSharding(mesh, spec)
    sharding = NamedSharding(mesh, spec, memory_kind=HOST)
    # Devices that only the compiler sees have no memories to name; it takes the abstract mesh's word.
    return sharding if sharding.memory_kind else NamedSharding(mesh.abstract_mesh, spec, memory_kind=HOST)


def on_host(x: Any) -> bool:
    """Whether x, an array or a type (`jax.typeof`), rests in host memory."""
    kind = jax.typeof(x) if isinstance(x, jax.Array) else x
    return getattr(kind, "memory_space", None) == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """Each leaf in device memory. Moves those that rest on the host: their bytes, host to device."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, tree)


def to_host(tree: Tree) -> Tree:
    """Each leaf in host memory. Moves those that rest on the device: their bytes, device to host."""
    return jax.tree.map(lambda x: x if on_host(x) else jax.device_put(x, jax.memory.Space.Host), tree)


def rows(x: jax.Array, i: jax.Array, count: int) -> jax.Array:
    """x[n count ...] -> its i-th piece of count rows [count ...], where x rests."""
    return lax.dynamic_slice_in_dim(x, i * count, count)


def put_rows(x: jax.Array, i: jax.Array, piece: jax.Array) -> jax.Array:
    """x[n count ...] with piece[count ...] as its i-th, moved to where x rests."""
    piece = to_host(piece) if on_host(x) else piece
    return lax.dynamic_update_slice_in_dim(x, piece, i * len(piece), 0)


def pieces(size: int, count: int, limit: int) -> int:
    """Into how many equal pieces to cut an array of so many elements and rows, for at most limit elements in each.

    Where the rows have no divisor for it, as many as come next: fewer, and larger.
    """
    wanted = -(-size // limit)
    small = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    divisors = sorted({*small, *(count // n for n in small)})
    enough = [n for n in divisors if wanted <= n <= TOO_MANY * wanted]
    return enough[0] if enough else max(n for n in divisors if n <= wanted)


def stream(
    work: Callable[[Tree, Tree], Tree], values: Tree, given: Tree, count: int, after: jax.Array | float = 0
) -> Tree:
    """values, of which each piece is work(its values, what is given for it): arrays [n ...], cut into count pieces.

    The first piece comes once after is known: nothing else would keep XLA from fetching it at the program's start.
    In place, if values are donated. What rests on the host moves to the device once, and what of it are values back
    once; one piece more than there are comes to the device, and is not used.

        for i in pieces:
            next  = to_device(values[i + 1], given[i + 1])     while work(piece i) computes
            values[i] = to_host(work(piece i))                 once the same array's next piece is here

    The last line makes XLA write in place; it would copy the array otherwise. Arrays leave while others come.
    """
    leaves, tree = jax.tree.flatten((values, given))
    last = len(jax.tree.leaves(values))
    sizes = [len(x) // count for x in leaves]

    def fetch(leaves: list, i: jax.Array) -> list:
        return [to_device(rows(x, i, size)) if on_host(x) else None for x, size in zip(leaves, sizes, strict=True)]

    def turn(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
        changing, here = carry
        leaves_now = [*changing, *leaves[last:]]
        coming = fetch(leaves_now, jnp.minimum(i + 1, count - 1))
        now = [rows(x, i, n) if y is None else y for x, y, n in zip(leaves_now, here, sizes, strict=True)]
        new = jax.tree.leaves(work(*tree.unflatten(now)))
        for k in range(last):
            if coming[k] is not None:
                coming[k], new[k] = lax.optimization_barrier((coming[k], new[k]))
        changing = [put_rows(x, i, y) for x, y in zip(changing, new, strict=True)]
        return (changing, coming), None

    if count == 1:
        new = work(*to_device((values, given)))
        return jax.tree.map(lambda y, x: to_host(y) if on_host(x) else y, new, values)
    first, _ = lax.optimization_barrier((jnp.zeros((), jnp.int32), after))
    changed, _ = lax.scan(turn, (leaves[:last], fetch(leaves, first)), jnp.arange(count))[0]
    return jax.tree.unflatten(jax.tree.structure(values), changed)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, where x rests: in place, if x is donated; in pieces, if that is the host."""
    if not on_host(x):
        return x + y
    return stream(lambda x, y: x + y, x, y, pieces(x.size, len(x), PIECE))


def total(part: Callable[[jax.Array], jax.Array], x: jax.Array, count: int) -> jax.Array:
    """The sum of part(piece) over count pieces of x[n ...], which may rest on the host."""
    if not on_host(x) or count == 1:
        return part(to_device(x))

    def fetch(i: jax.Array) -> jax.Array:
        return to_device(rows(x, i, len(x) // count))

    def turn(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
        found, here = carry
        return (found + part(here), fetch(jnp.minimum(i + 1, count - 1))), None

    first = fetch(jnp.zeros((), jnp.int32))
    return lax.scan(turn, (jnp.zeros_like(part(first)), first), jnp.arange(count))[0][0]
