"""Make the state from a checkpoint that has it in another form: other replicas, other frozen weights.

Optimizer state of weights that were frozen when it was saved (train.freeze) is not in a checkpoint: float32 weights are
made of the saved ones, moments are zeros.

Replicas that step apart (parallel/gradients/local_steps.py): in a checkpoint that they save every array but `step`,
those of `outer` and of `feedback` has a last dim of size R.

    saved      wanted     new arrays
    [... R]    [... Q]    every replica has the mean over the saved ones; theta and momentum as saved
    [... R]    [...]      the mean over replicas; theta and momentum are not read
    [...]      [... Q]    every replica has the same; theta is the float32 weights, its momentum zero

Weights in 16 bits are those of the mean of the master weights. Of step counts and of the loss scale the smallest is
taken instead of the mean. The outer step is linear in the mean of weights, so a resume within H steps loses nothing of
them.

Float32 weights of a run that takes the weights alone are the master weights, where there are some.

Residuals of parallel.compress have a last dim of size R in every run, and of another number of replicas are read one
array at a time. Those of gradients, which are summed over replicas, are added up and divided among all; with
parallel.sync_every every replica has their mean, since differences of weights are averaged.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nanotrain_jax.parallel.gradients import local_steps

OUTER, THETA = "outer/", "outer/theta/"  # paths of the state of the outer optimizer
MASTER, PARAMS = "opt/master/", "params/"  # paths of float32 weights; params: where there are no master weights
SCALE, FEEDBACK, RESIDUAL, NOISE = "scale/", "feedback/", "feedback/residual/", "noise/"
OPTIMIZER_STATE = re.compile(r"opt/(master|moments/\d+/\w+)/(?P<weight>.+)")
Shapes = dict[str, tuple[int, ...]]  # path -> shape


class Source(NamedTuple):
    """The array of a checkpoint from which one of the state is made."""

    path: str
    array: jax.ShapeDtypeStruct  # as saved; each device holds its part of all replicas
    was_apart: bool = False  # replicas stepped apart


def were_apart(have: Shapes) -> bool:
    """True if replicas stepped apart in the run that saved these arrays, when it did."""
    return any(path.startswith(OUTER) for path in have)


def master_of(path: str) -> str:
    """Return the path of the float32 weights of an array of the parameters; of another array its own."""
    return path.replace(PARAMS, MASTER, 1) if path.startswith(PARAMS) else path


def weights_of(have: Shapes) -> Shapes:
    """Return the weights among the arrays of a checkpoint, and what tells how replicas have them."""
    return {path: shape for path, shape in have.items() if path.startswith((PARAMS, MASTER, OUTER))}


def source(path: str, wanted: jax.ShapeDtypeStruct, have: Shapes, weights_only: bool = False) -> Source | None:
    """Return what to read for an array of the state; None: it is zero. have: the arrays of the checkpoint.

    weights_only: parameters are float32 and made of master weights where there are some.
    """
    was_apart = were_apart(have)
    if path.startswith(FEEDBACK):  # `compressed.to_read` knows what to read
        same = not path.startswith(RESIDUAL) or have[path][-1] == wanted.shape[-1]
        return Source(path, wanted if same else _of_replicas(wanted, have[path][-1:]), was_apart and not same)
    optimized = OPTIMIZER_STATE.fullmatch(path)
    if optimized and path not in have and PARAMS + optimized["weight"] in have:  # it was frozen
        if not path.startswith(MASTER):
            return None
        path = PARAMS + optimized["weight"]
    if path.startswith(NOISE) and path not in have:  # it was not measured
        return None
    if path.startswith(OUTER) and not was_apart:
        weight = path.removeprefix(THETA)
        if weight == path:
            return None
        return Source(MASTER + weight if MASTER + weight in have else PARAMS + weight, wanted)
    master = master_of(path)
    if weights_only and master in have and not was_apart:
        return Source(master, wanted)
    saved = have.get(path, ())[-1:] if was_apart and path != "step" and not path.startswith(OUTER) else ()
    is_apart = _has_replicas(wanted)
    if saved == (wanted.shape[-1:] if is_apart else ()):
        return Source(path, wanted)
    array = _of_replicas(wanted, saved)
    if saved and path.startswith(PARAMS) and master in have:
        return Source(master, array.update(dtype=jnp.float32))
    return Source(path, array)


def _of_replicas(wanted: jax.ShapeDtypeStruct, replicas: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return an array like wanted, but with this last dim of replicas, or none; every device holds all of them."""
    shape = wanted.shape[:-1] if _has_replicas(wanted) else wanted.shape
    sharding = NamedSharding(wanted.sharding.mesh, PartitionSpec(*wanted.sharding.spec[: len(shape)]))
    return jax.ShapeDtypeStruct((*shape, *replicas), wanted.dtype, sharding=sharding)


def convert(path: str, x: jax.Array, wanted: jax.ShapeDtypeStruct, was_apart: bool = False) -> jax.Array:
    """Return the array of the state from that of its `source`. Each device computes its own part: moves nothing."""
    is_apart = _has_replicas(wanted)
    if x.shape == wanted.shape and x.sharding == wanted.sharding:
        return x

    def change(x: jax.Array) -> jax.Array:
        if path.startswith(RESIDUAL):
            return local_steps.copies(x.sum(-1) / (x if was_apart else wanted).shape[-1], wanted.shape[-1])
        if x.ndim > wanted.ndim - is_apart:
            smallest = path.startswith(SCALE) or not jnp.issubdtype(x.dtype, jnp.floating)
            x = x.min(-1) if smallest else x.mean(-1, dtype=jnp.float32).astype(wanted.dtype)
        return local_steps.copies(x, wanted.shape[-1]) if is_apart else x

    return jax.jit(change, out_shardings=wanted.sharding)(x)


def zeros(wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of zeros, in the layout of wanted."""
    shape = wanted.sharding.shard_shape(wanted.shape)
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda _: np.zeros(shape, wanted.dtype))


def _has_replicas(wanted: jax.ShapeDtypeStruct) -> bool:
    is_on_mesh = isinstance(wanted.sharding, NamedSharding)
    return is_on_mesh and local_steps.has_replicas(wanted.sharding.spec, wanted.ndim)
