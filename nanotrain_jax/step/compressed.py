"""Gradients summed over replicas compressed (parallel.compress), and what error feedback keeps of them.

ZeRO reduces gradients inside a replica as ever; each device then holds its gradient, or shard of it, of its replica's
rows. `sum_over_replicas` sums these: large arrays compressed (`parallel/gradients/compression.py`), small ones whole.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import tree_map_with_path

from nanotrain_jax.config.schema import EIGHT_BITS
from nanotrain_jax.models.contract import LAYERS
from nanotrain_jax.parallel.collectives import Tree, all_reduce, as_varying, varying_axes
from nanotrain_jax.parallel.gradients import compression
from nanotrain_jax.parallel.gradients.compression import BLOCK, Matrices, Sum
from nanotrain_jax.parallel.gradients.local_steps import AXIS, with_replicas
from nanotrain_jax.parallel.mesh import AXES
from nanotrain_jax.parallel.sharding import path_name
from nanotrain_jax.parallel.zero.optimizer_step import merge, select
from nanotrain_jax.step.plan import Plan, layers_of_rows, with_rows


class Feedback(NamedTuple):
    """What compressed sums keep between steps: trees like the parameters, with None for arrays that are summed whole.

    residual   float32 [... R]: of each of R replicas, what it has not yet sent; laid out as the master weights
    basis      powersgd: float32 [layers columns rank], laid out as these dims of the master weights; else None
    """

    residual: Tree
    basis: Tree | None


def init(plan: Plan, params: Tree, in_model_order: bool = False) -> Feedback | None:
    """Return residuals of zeros and random bases; None without error feedback.

    params: weights or their shapes, layers in stage order unless in_model_order.
    """
    how = plan.compression
    if not how.has_residual:
        return None
    replicas = plan.mesh.shape[AXIS]
    residual = jax.tree.map(lambda w: jnp.zeros((*w.shape, replicas), jnp.float32), select(params, plan.compressed))
    order = None if in_model_order else plan.layer_order
    return Feedback(residual, bases(plan, params, order) if how.kind == "powersgd" else None)


def bases(plan: Plan, params: Tree, order: np.ndarray | None) -> Tree:
    """Return the random bases from which low-rank sums start, the same in every layout. order: of rows of layers."""
    rank, L = plan.compression.rank, plan.config.model.main_layers
    structure = jax.tree.structure(params)
    keys = jax.random.split(jax.random.key(plan.config.train.seed), structure.num_leaves)

    def basis(path: tuple, w: jax.Array, key: jax.Array, matrices: Matrices | None) -> jax.Array | None:
        if matrices is None:
            return None
        found = jax.random.normal(key, (*w.shape[: matrices.rows], *w.shape[matrices.columns :], rank))
        is_reordered = order is not None and path[0].key == LAYERS
        return found[np.minimum(order, L - 1)] if is_reordered else found  # nothing uses rows of padding

    return tree_map_with_path(basis, params, structure.unflatten(list(keys)), of_matrices(plan))


def of_matrices(plan: Plan) -> Tree:
    """Return how each array that powersgd compresses divides into matrices; None for the others."""
    _, specs = plan.zero.storage(plan.specs, plan.shards.cuts)

    def matrices(path: tuple, w: jax.ShapeDtypeStruct, spec: PartitionSpec, chosen: bool) -> Matrices | None:
        is_stacked = path[0].key in (LAYERS, *plan.model.stacks)
        is_matrix = chosen and plan.compression.kind == "powersgd"
        return compression.matrices_of(w.shape, spec, is_stacked) if is_matrix else None

    return tree_map_with_path(matrices, plan.model.shapes, specs, plan.compressed)


def specs(plan: Plan, opt_specs: Tree) -> Feedback | None:
    """Return PartitionSpecs of Feedback, or None. opt_specs: those of the master weights."""
    if not plan.compression.has_residual:
        return None

    def of_residual(w: jax.ShapeDtypeStruct, spec: PartitionSpec) -> PartitionSpec:
        return with_replicas(spec, w.ndim)

    def of_basis(w: jax.ShapeDtypeStruct, spec: PartitionSpec, matrices: Matrices | None) -> PartitionSpec | None:
        dims = [*spec, *[None] * (w.ndim - len(spec))]
        return matrices and PartitionSpec(*dims[: matrices.rows], *dims[matrices.columns :])

    shapes = plan.model.shapes
    residual = select(jax.tree.map(of_residual, shapes, opt_specs), plan.compressed)
    if plan.compression.kind != "powersgd":
        return Feedback(residual, None)
    return Feedback(residual, jax.tree.map(of_basis, shapes, opt_specs, of_matrices(plan)))


def to_read(feedback: Feedback, stored: Mapping[str, tuple[int, ...]]) -> Feedback:
    """Return what to read of a checkpoint: ShapeDtypeStructs, and None for what it does not have in this form.

    feedback: shapes and shardings of this run. stored: path -> shape.
    """

    def residual(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        return x if f"feedback/residual/{path_name(path)}" in stored else None

    def basis(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        shape = stored.get(f"feedback/basis/{path_name(path)}")
        return x if shape == x.shape else None

    return Feedback(tree_map_with_path(residual, feedback.residual), tree_map_with_path(basis, feedback.basis))


def adopted(plan: Plan, read: Feedback) -> Feedback:
    """Return the feedback with which to resume from what was read (`to_read`), layers in model order.

    Arrays that were not read begin as in a new run.
    """
    start = init(plan, with_rows(plan.model.shapes, len(layers_of_rows(plan.config))), in_model_order=True)
    return jax.tree.map(lambda new, old: new if old is None else old, start, read)


def sum_kept(plan: Plan, grads: Tree, feedback: Feedback | None, step: jax.Array) -> tuple[Tree, Feedback | None]:
    """Sum the gradients over replica that `zero.reduce` has left as they are (parallel.compress, every step)."""
    return sum_over_replicas(plan, grads, feedback, step) if plan.shards.communication.kept else (grads, feedback)


@jax.named_scope("compress")
def sum_over_replicas(
    plan: Plan, tree: Tree, feedback: Feedback | None, step: jax.Array
) -> tuple[Tree, Feedback | None]:
    """Sum a tree like the gradients over replica, as parallel.compress says -> float32 sums, feedback for the next one.

    With error feedback in addition all-reduces one scalar: if an array of one device is not finite, the sums are not a
    number, so that the step is skipped, and the feedback stays as it is.
    """
    how = plan.compression
    tree = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    if how.kind == "none":
        return all_reduce(tree, [AXIS]), None
    if how.kind in EIGHT_BITS:
        communication = plan.shards.communication._replace(reduce=how.kind)
        return jax.tree.map(lambda x: communication.all_reduce([x], [AXIS])[0], tree), None
    is_finite = all_finite(tree)
    whole = jax.tree.map(lambda chosen: not chosen, plan.compressed)
    whole = all_reduce(select(tree, whole), [AXIS])
    chosen, structure = jax.tree.flatten(plan.compressed)
    bases = feedback.basis or structure.unflatten([None] * len(chosen))
    columns = [structure.flatten_up_to(part) for part in (tree, feedback.residual, bases, of_matrices(plan))]
    sums, residuals, bases = [], [], []
    for i, (is_chosen, x, *kept) in enumerate(zip(chosen, *columns, strict=True)):
        key = jax.random.fold_in(jax.random.key(i), step)
        total, after = compressed(plan, key, x, Kept(*kept), is_finite) if is_chosen else (None, Kept())
        sums.append(total)
        residuals.append(after.residual)
        bases.append(after.basis)
    after = Feedback(structure.unflatten(residuals), structure.unflatten(bases) if feedback.basis else None)
    return merge(structure.unflatten(sums), whole), after


class Kept(NamedTuple):
    """The feedback of one array, and the array as matrices."""

    residual: jax.Array | None = None
    basis: jax.Array | None = None
    matrices: Matrices | None = None


def compressed(plan: Plan, key: jax.Array, x: jax.Array, kept: Kept, is_finite: jax.Array) -> tuple[jax.Array, Kept]:
    """Sum one array over replica -> sum, feedback for the next one."""
    x = jnp.where(is_finite, x + kept.residual[..., 0], jnp.nan)
    sums, basis = compressed_sum(plan, key, x, kept)
    residual = jnp.where(is_finite, sums.kept[..., None], kept.residual)
    return sums.total, Kept(residual, None if basis is None else jnp.where(is_finite, basis, kept.basis))


def compressed_sum(plan: Plan, key: jax.Array, x: jax.Array, kept: Kept) -> tuple[Sum, jax.Array | None]:
    """Sum x as parallel.compress says -> sum, with powersgd the next basis."""
    kind, ratio, _ = plan.compression
    count, dtype = max(1, round(ratio * BLOCK)), plan.shards.communication.dtype
    if kind == "topk":
        return compression.top_k(x, AXIS, count, dtype), None
    if kind == "randomk":
        return compression.random_k(x, AXIS, count, key, dtype), None
    return compression.low_rank(x, AXIS, kept.basis, kept.matrices)


def all_finite(tree: Tree) -> jax.Array:
    """True if all elements on all devices are finite. All-reduces one scalar."""
    leaves = jax.tree.leaves(tree)
    axes = [axis for axis in AXES if any(axis in varying_axes(x) for x in leaves)]
    not_finite = sum(as_varying(1.0 - jnp.isfinite(x).all().astype(jnp.float32), axes) for x in leaves)
    return all_reduce(not_finite, axes) == 0
