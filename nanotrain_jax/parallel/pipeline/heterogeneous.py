"""Pipelines whose stages are different modules: other weights, other computations, other activations in each.

A single program runs all stages, so every array of a loop has one type. Here L modules become a stack of L layers:

    weights      each module's are flattened into a row; rows are as long as the longest: rows[L n], padded with zeros.
                 pipe shards L, ZeRO shards n
    activations  travel in one flat buffer per dtype, as long as the largest, beside the number of the next module
    layer        lax.switch(number, modules): unpack the row and the input, run, pack the output

The number is in x, not in the mesh: any schedule, chunks and number of stages that suit L layers run it.

The backward is written by hand, since autodiff of a switch stores the residuals of all its branches. Here those of the
module that ran are stored in flat buffers too, as long as the largest; and where the schedule splits the backward
(zero-bubble, arXiv 2401.10241) it is two switches: gradients of activations in B, matmuls for the weights in W.

Costs: a device stores the longest row, in each slot the largest residuals, and every hop moves the largest activation.
A tick lasts as long as the slowest stage: choose modules that compute about the same. Nothing else moves.

Modules may use collectives, since all devices of a stage take the same branch, but on CPU no permutes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes
from nanotrain_jax.parallel.layered_model import LayeredModel
from nanotrain_jax.parallel.pipeline.packing import Buffers, Packing, by_dtype, by_type, empty, largest, packing_of
from nanotrain_jax.parallel.remat import MODULE
from nanotrain_jax.parallel.sharding import path_name
from nanotrain_jax.parallel.split_vjp import SplitVjp, split_vjp

NUMBER = "number"  # in x, beside its buffers: of the module that runs next, a float
ONE_ROW = "weights"


class StageModule(NamedTuple):
    """One module of a pipeline of different modules.

    init(key) -> weights                  a nested dict of float32 arrays
    apply(weights, x, microbatch) -> y    x: what the module before returned, a tree of float arrays of any shapes;
                                          None for the first module, which takes the microbatch
    """

    name: str
    init: Callable[[jax.Array], Tree]
    apply: Callable[[Tree, Tree, Tree], Tree]


@dataclass(frozen=True, eq=False)
class DifferentStages:
    """Different modules as a stack of alike layers, for `LayeredModel`.

    multiple_of   rows are rounded up to a multiple of it: the number of devices over which ZeRO shards must divide it
    dtype         in which modules get their weights
    is_split      the schedule has W: the gradients of weights are apart from those of activations
    row_of        path of a weight -> key of the row that holds it, if not all are in one (weight decay for some only)
    """

    modules: Sequence[StageModule]
    multiple_of: int = 1024
    dtype: str = "float32"
    is_split: bool = False
    row_of: Callable[[tuple], str] = lambda path: ONE_ROW

    @cached_property
    def weights(self) -> list[Packing]:
        """Of the weights of each module in its row. Raises ValueError unless they are float32."""
        types = [_types_of_weights(module) for module in self.modules]
        return [packing_of(tree, lambda path, x: self.row_of(path)) for tree in types]

    @cached_property
    def row_sizes(self) -> dict[str, int]:
        """Number of elements of a row, by key: those of the longest, rounded up."""
        return {key: -(-n // self.multiple_of) * self.multiple_of for key, n in largest(self.weights).items()}

    def init_row(self, number: jax.Array | int, key: jax.Array) -> Buffers:
        """-> the row [n] of a module with its first weights, float32, by key."""
        row = {name: jnp.zeros(size) for name, size in self.row_sizes.items()}

        def branch(i: int, key: jax.Array) -> Buffers:
            return self.weights[i].pack(self.modules[i].init(key), row)

        return _switch(number, branch, len(self.modules), key)

    def init(self, key: jax.Array) -> Buffers:
        """-> rows[L n] of all modules with their first weights, float32, by key."""
        keys = jax.random.split(key, len(self.modules))
        rows = [self.init_row(i, keys[i]) for i in range(len(self.modules))]
        return jax.tree.map(lambda *rows: jnp.stack(rows), *rows)

    def unpack(self, rows: Buffers) -> list[Tree]:
        """rows[L n], in model order -> the weights (or gradients) of each module."""
        return [packing.unpack({k: x[i] for k, x in rows.items()}) for i, packing in enumerate(self.weights)]

    def layered(self, rows: Buffers, loss: Callable[[Tree, Tree], jax.Array], axis: str = "pipe") -> LayeredModel:
        """Return the model of `run_schedule`, with this stage's rows[L/axis n]; no ends.

        loss(y, microbatch) -> scalar, from what the last module returns. Raises ValueError on another number of rows.
        """
        stages, (count, *_) = lax.axis_size(axis), jax.tree.leaves(rows)[0].shape
        if stages * count != len(self.modules):
            raise ValueError(
                f"{len(self.modules)} modules, but {stages} stages x {count} rows = {stages * count}; "
                f"use a number of stages that divides {len(self.modules)}, and one row for each module"
            )
        return LayeredModel(
            first=lambda ends, microbatch: self.first(microbatch),
            layer=self.layer,
            last=lambda ends, x, microbatch: loss(self.output(x, microbatch), microbatch),
            ends={},
            layers=rows,
        )

    def check(self, microbatch: Tree) -> None:
        """Raise ValueError unless the modules suit each other. microbatch: types. Outside of `shard_map` NameError if a
        module uses collectives.
        """
        _Types(self, microbatch, ())

    def first(self, microbatch: Tree) -> Buffers:
        """-> x before the first module: empty buffers."""
        axes = _axes(microbatch)
        return _Types(self, microbatch, axes).x | as_varying({NUMBER: jnp.zeros(())}, axes)

    def layer(self, rows: Buffers, x: Buffers, microbatch: Tree) -> Buffers:
        """rows[n] of one module, its x -> x of the next. Moves nothing but what the module does."""
        rows = jax.tree.map(lambda row: row.astype(self.dtype), rows)
        rows, x, microbatch = as_varying((rows, x, microbatch), _axes((rows, x, microbatch)))
        number = lax.stop_gradient(x[NUMBER])
        buffers = {key: buffer for key, buffer in x.items() if key != NUMBER}
        run = jax.custom_vjp(partial(_run, self))
        run.defvjp(partial(_forward, self), partial(_backward, self))
        return run(rows, buffers, microbatch, number) | {NUMBER: number + 1}

    def output(self, x: Buffers, microbatch: Tree) -> Tree:
        """x after the last module -> what it returned."""
        return _Types(self, microbatch, _axes((x, microbatch))).packings[-1].unpack(x)


def _types_of_weights(module: StageModule) -> Tree:
    types = jax.eval_shape(module.init, jax.random.key(0))
    for path, x in jax.tree_util.tree_leaves_with_path(types):
        if x.dtype != jnp.float32:
            raise ValueError(f"module {module.name}: the weight {path_name(path)} is {x.dtype}; use float32")
    return types


def _axes(tree: Tree) -> list[str]:
    """Return the mesh axes over which any array varies."""
    return sorted({axis for x in jax.tree.leaves(tree) for axis in varying_axes(x)})


class _Types:
    """Types and packings of what travels between modules, for a microbatch; all of it varying over axes.

    Raises ValueError if a module does not take what the one before returns, or returns no floats.
    """

    def __init__(self, stages: DifferentStages, microbatch: Tree, axes: Sequence[str]):
        self.stages, self.microbatch, self.axes = stages, microbatch, axes
        self.activations = [None, *self._activations()]
        self.packings = [packing_of(types, by_dtype) for types in self.activations]
        self.x = empty(largest(self.packings), axes)

    @cached_property
    def weights(self) -> list[Tree]:
        def zeros(packing: Packing) -> Tree:
            arrays = [jnp.zeros(shape, self.stages.dtype) for shape in packing.shapes]
            return as_varying(packing.tree.unflatten(arrays), self.axes)

        return [jax.eval_shape(partial(zeros, packing)) for packing in self.stages.weights]

    def _activations(self) -> Iterator[Tree]:
        """Yield the types of what each module returns."""
        x, source = None, "the microbatch"
        for i, module in enumerate(self.stages.modules):
            try:
                y = jax.eval_shape(partial(self.apply, i), self.microbatch, self.weights[i], x)
            except NameError:  # a collective outside of shard_map
                raise
            except Exception as error:
                what = source if x is None else f"{source}, {_in_words(x)}"
                first_line = next(iter(str(error).splitlines()), type(error).__name__)
                raise ValueError(f"module {module.name} does not take {what}: {first_line}") from error
            if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(y)):
                raise ValueError(
                    f"module {module.name} returns {_in_words(y)}: only floats travel between stages; return floats, "
                    "or compute integers from the microbatch where they are used"
                )
            x, source = y, f"the output of module {module.name}"
            yield y

    def apply(self, i: int, microbatch: Tree, weights: Tree, x: Tree) -> Tree:
        return as_varying(self.stages.modules[i].apply(weights, x, microbatch), self.axes)

    @cached_property
    def vjps(self) -> list[SplitVjp]:
        types = zip(self.weights, self.activations[:-1], strict=True)
        return [split_vjp(partial(self.apply, i), self.microbatch, w, x) for i, (w, x) in enumerate(types)]

    def flat(self, lists: list[list]) -> tuple[list[Packing], Buffers]:
        """-> packings of a list of types of each module, empty buffers that hold any of them."""
        packings = [packing_of(types, by_type) for types in lists]
        return packings, empty(largest(packings))


def _in_words(types: Tree) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(types))


def _switch(number: jax.Array | int, branch: Callable, count: int, *operands: Tree) -> Tree:
    """Return branch(number, *operands); branch takes a Python integer."""
    return lax.switch(jnp.asarray(number, jnp.int32), [partial(branch, i) for i in range(count)], *operands)


def _run(stages: DifferentStages, rows: Buffers, x: Buffers, microbatch: Tree, number: jax.Array) -> Buffers:
    """Run a module, without a backward."""
    types = _Types(stages, microbatch, _axes(x))

    def branch(i: int, rows: Buffers, x: Buffers, microbatch: Tree) -> Buffers:
        y = types.apply(i, microbatch, stages.weights[i].unpack(rows), types.packings[i].unpack(x))
        return types.packings[i + 1].pack(y, types.x)

    return _switch(number, branch, len(stages.modules), rows, x, microbatch)


def _forward(
    stages: DifferentStages, rows: Buffers, x: Buffers, microbatch: Tree, number: jax.Array
) -> tuple[Buffers, tuple]:
    types = _Types(stages, microbatch, _axes(x))
    packings, like = types.flat([vjp.residuals for vjp in types.vjps])

    def branch(i: int, rows: Buffers, x: Buffers, microbatch: Tree) -> tuple[Buffers, Buffers]:
        weights, x = stages.weights[i].unpack(rows), types.packings[i].unpack(x)
        y, residuals = types.vjps[i].forward(microbatch, weights, x)
        return types.packings[i + 1].pack(y, types.x), packings[i].pack(residuals, like)

    y, residuals = _switch(number, branch, len(stages.modules), rows, x, microbatch)
    return y, (rows, microbatch, number, checkpoint_name(residuals, *MODULE))


def _backward(stages: DifferentStages, saved: tuple, g: Buffers) -> tuple[Buffers, Buffers, None, None]:
    """-> gradients of rows, of x"""
    rows, microbatch, number, residuals = saved
    types = _Types(stages, microbatch, _axes(g))
    packings, _ = types.flat([vjp.residuals for vjp in types.vjps])
    between, like = types.flat([vjp.intermediates for vjp in types.vjps])
    count = len(stages.modules)

    def arguments(i: int, rows: Buffers, residuals: Buffers, microbatch: Tree) -> tuple[list, Tree, Tree]:
        return packings[i].unpack(residuals), microbatch, stages.weights[i].unpack(rows)

    def whole(i: int, g: Buffers, *of_layer: Tree) -> tuple[Buffers, Buffers]:
        g = types.packings[i + 1].unpack(g)
        of_weights, g = types.vjps[i].backward(*arguments(i, *of_layer), g)
        return stages.weights[i].pack(of_weights, rows), types.packings[i].pack(g, types.x)

    def of_x(i: int, g: Buffers, *of_layer: Tree) -> tuple[Buffers, Buffers]:
        g = types.packings[i + 1].unpack(g)
        g, intermediates = types.vjps[i].backward_x(*arguments(i, *of_layer), g)
        return types.packings[i].pack(g, types.x), between[i].pack(intermediates, like)

    def of_weights(i: int, intermediates: Buffers, *of_layer: Tree) -> Buffers:
        of_weights = types.vjps[i].backward_weights(*arguments(i, *of_layer), between[i].unpack(intermediates))
        return stages.weights[i].pack(of_weights, rows)

    if not stages.is_split:
        return *_switch(number, whole, count, g, rows, residuals, microbatch), None, None
    g, intermediates = _switch(number, of_x, count, g, rows, residuals, microbatch)
    return _switch(number, of_weights, count, intermediates, rows, residuals, microbatch), g, None, None
