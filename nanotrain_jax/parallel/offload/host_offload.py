"""Host memory offload: arrays in pinned host memory, and loops that stream them through the device in slices.

ZeRO-Offload (arXiv 2101.06840) stores master weights and moments in host memory, ZeRO-Infinity (arXiv 2104.07857) also
the weights. JAX's memory spaces do the copies: the memory space is part of an array's type (`float32<host>[8,4]`), and
only `to_device` and `to_host` change it. These functions check the type and leave arrays that are there already.

Loops are double-buffered (`stream`): one slice is copied to the device while the one before is copied back. The program
holds two slices on the device; XLA may allocate up to four, so slices are small. On a CPU both spaces are the same
memory, and the same code runs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nanotrain_jax.config.values import divisors
from nanotrain_jax.parallel.collectives import Tree

HOST = "pinned_host"  # the memory kind (of a `jax.sharding.NamedSharding`) that a GPU accesses directly
SLICE_ELEMENTS = 2**24
MAX_SLICE_RATIO = 16  # at most this many times the slices that the limit needs


def named_sharding(mesh: Mesh, spec: PartitionSpec, is_on_host: bool) -> NamedSharding:
    """Return the sharding of an array in host or device memory."""
    if not is_on_host:
        return NamedSharding(mesh, spec)
    sharding = NamedSharding(mesh, spec, memory_kind=HOST)
    # Devices of a compile-only topology list no memories; an abstract mesh accepts the memory kind unchecked.
    return sharding if sharding.memory_kind else NamedSharding(mesh.abstract_mesh, spec, memory_kind=HOST)


def on_host(x: Any) -> bool:
    """True if x, an array or a type (`jax.typeof`), is in host memory."""
    kind = jax.typeof(x) if isinstance(x, jax.Array) else x
    return getattr(kind, "memory_space", None) == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """Copy leaves in host memory to the device: their bytes. Other leaves are unchanged."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, tree)


def to_host(tree: Tree) -> Tree:
    """Copy leaves in device memory to the host: their bytes. Other leaves are unchanged."""
    return jax.tree.map(lambda x: x if on_host(x) else jax.device_put(x, jax.memory.Space.Host), tree)


def get_slice(x: jax.Array, i: jax.Array, count: int) -> jax.Array:
    """x[n count ...] -> the i-th slice of count rows [count ...], in the memory of x."""
    return lax.dynamic_slice_in_dim(x, i * count, count)


def put_slice(x: jax.Array, i: jax.Array, new: jax.Array) -> jax.Array:
    """x[n count ...] with new[count ...] as its i-th slice, copied to the memory of x."""
    new = to_host(new) if on_host(x) else new
    return lax.dynamic_update_slice_in_dim(x, new, i * len(new), 0)


def num_slices(size: int, num_rows: int, limit: int) -> int:
    """Return the number of equal slices of an array of size elements in num_rows rows, at most limit elements each.

    A divisor of num_rows. If none is large enough but at most MAX_SLICE_RATIO times larger than needed: the next
    smaller one, with larger slices.
    """
    needed, possible = -(-size // limit), divisors(num_rows)
    enough = [n for n in possible if needed <= n <= MAX_SLICE_RATIO * needed]
    return enough[0] if enough else max(n for n in possible if n <= needed)


def stream(
    work: Callable[[Tree, Tree], Tree], values: Tree, inputs: Tree, count: int, after: jax.Array | float = 0
) -> Tree:
    """Update values = work(values, inputs), arrays [n ...] streamed through the device in count slices.

    In place, if values are donated. Arrays in host memory move to the device once, values also back once; one extra
    slice is copied to the device and not used.

        for i in slices:
            next  = to_device(values[i + 1], inputs[i + 1])    overlaps with work(slice i)
            values[i] = to_host(work(slice i))                 after the next slice of the same array has arrived

    The order in the last line makes XLA write in place; otherwise it copies the array. Copies in both directions
    overlap. after: the first slice is copied once this value is known; else XLA would copy it at the program's start.
    """
    leaves, tree = jax.tree.flatten((values, inputs))
    num_values = len(jax.tree.leaves(values))
    sizes = [len(x) // count for x in leaves]

    def fetch(leaves: list, i: jax.Array) -> list:
        slices = zip(leaves, sizes, strict=True)
        return [to_device(get_slice(x, i, size)) if on_host(x) else None for x, size in slices]

    def body(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
        updated, fetched = carry
        current_leaves = [*updated, *leaves[num_values:]]
        prefetched = fetch(current_leaves, jnp.minimum(i + 1, count - 1))
        arrays = zip(current_leaves, fetched, sizes, strict=True)
        slices = [get_slice(x, i, size) if y is None else y for x, y, size in arrays]
        new = jax.tree.leaves(work(*tree.unflatten(slices)))
        for k in range(num_values):
            if prefetched[k] is not None:
                prefetched[k], new[k] = lax.optimization_barrier((prefetched[k], new[k]))
        updated = [put_slice(x, i, y) for x, y in zip(updated, new, strict=True)]
        return (updated, prefetched), None

    if count == 1:
        new = work(*to_device((values, inputs)))
        return jax.tree.map(lambda y, x: to_host(y) if on_host(x) else y, new, values)
    first, _ = lax.optimization_barrier((jnp.zeros((), jnp.int32), after))
    updated, _ = lax.scan(body, (leaves[:num_values], fetch(leaves, first)), jnp.arange(count))[0]
    return jax.tree.unflatten(jax.tree.structure(values), updated)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x + y in the memory of x: in place if x is donated, streamed in slices if x is in host memory."""
    if not on_host(x):
        return x + y
    return stream(lambda x, y: x + y, x, y, num_slices(x.size, len(x), SLICE_ELEMENTS))


def sum_over_slices(function: Callable[[jax.Array], jax.Array], x: jax.Array, count: int) -> jax.Array:
    """Return the sum of function(slice) over count slices of x[n ...], streamed if x is in host memory."""
    if not on_host(x) or count == 1:
        return function(to_device(x))

    def fetch(i: jax.Array) -> jax.Array:
        return to_device(get_slice(x, i, len(x) // count))

    def body(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
        total, fetched = carry
        return (total + function(fetched), fetch(jnp.minimum(i + 1, count - 1))), None

    first = fetch(jnp.zeros((), jnp.int32))
    return lax.scan(body, (jnp.zeros_like(function(first)), first), jnp.arange(count))[0][0]
