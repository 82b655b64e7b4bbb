"""Digests of what each device holds: the sum of the bit patterns of an array, modulo 2^32.

A flipped bit, or any other change of one element, changes the sum; changes of several elements may cancel. Equal bits
have equal digests, in any order of summation.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from nanotrain_jax.parallel.collectives import Tree, all_gather, as_varying
from nanotrain_jax.parallel.mesh import AXES
from nanotrain_jax.parallel.offload import host_offload
from nanotrain_jax.step.state import is_of_layers


def digest(x: jax.Array) -> jax.Array:
    """Return the uint32 sum of the bit patterns of the elements of this device's shard. Moves nothing."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def of_devices(tree: Tree) -> Tree:
    """Return for each leaf the digests of all devices, uint32 [devices] in the order of the mesh, on all of them.

    Arrays in host memory are copied to the device, those of layers a layer at a time. All-gathers 4 bytes per leaf and
    device.
    """

    def of_leaf(path: tuple, x: jax.Array) -> jax.Array:
        if host_offload.on_host(x) and is_of_layers(path):
            rows = lax.map(lambda row: as_varying(digest(host_offload.to_device(row)), AXES), x)
            return jnp.sum(rows, dtype=jnp.uint32)
        return as_varying(digest(host_offload.to_device(x)), AXES)

    own = jax.tree_util.tree_map_with_path(of_leaf, tree)
    leaves, structure = jax.tree.flatten(own)
    if not leaves:
        return own
    (rows,) = all_gather([jnp.stack(leaves)[None]], AXES, [0], invarying=True)  # [devices leaves]
    return jax.tree.unflatten(structure, list(rows.T))


def shared_axes(mesh: Mesh, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes of several devices along which an array has equal copies."""
    used = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in used)


def shared(mesh: Mesh, specs: Tree, tree: Tree) -> Tree:
    """Return the arrays of a tree of which several devices have a copy; None for others. specs: PartitionSpecs."""
    return jax.tree.map(lambda spec, x: x if shared_axes(mesh, spec) else None, specs, tree)
