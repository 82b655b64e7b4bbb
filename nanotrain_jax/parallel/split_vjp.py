"""The backward of a layer with explicit residuals: run later than the forward, or split in two (zero-bubble).

`jax.vjp` runs a layer and returns a function that holds its residuals: what the layer's rematerialization saves. Here
the residuals are extracted, so that a buffer can hold them, and passed back. Residuals that are constants of the layer
or what is differentiated (compared by identity) are not stored again.

The split backward (zero-bubble, arXiv 2401.10241, section 2) partitions the jaxpr of this function by data flow:
`backward_x` computes what the gradient of x depends on; `backward_weights` the remaining matmuls, which produce weight
gradients, and what only they need. Nothing is computed in both. Loops are not split: a layer that contains a loop
computes its weight gradients in `backward_x`, and `backward_weights` returns them. A conditional is in one part as a
whole (`pipeline/heterogeneous.py` has one for each part).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from nanotrain_jax.parallel.collectives import Tree, as_varying, varying_axes

Types = list[Any]  # of arrays, as `jax.typeof` gives them: shape, dtype, varying axes, memory space
Layer = Callable[[Tree, Tree, Tree], Tree]  # (constants, inputs, x) -> y; constants: what else it computes with

INLINED = "checkpoint", "remat2", "pjit", "jit", "closed_call"  # so that the split can divide these calls
MATMULS = ("dot_general", "conv_general_dilated")


class _Parts(NamedTuple):
    """The equations of a backward, in two parts."""

    for_x: list[JaxprEqn]
    for_weights: list[JaxprEqn]
    intermediates: list[Var]  # computed in the first part, used in the second


@dataclass(frozen=True)
class SplitVjp:
    """The forward and backward of one layer; residuals and intermediates are lists of arrays.

    forward(constants, inputs, x)                                    -> y, residuals
    backward(residuals, constants, inputs, g)                        -> gradients of inputs, of x
    backward_x(residuals, constants, inputs, g)                      -> gradient of x, intermediates
    backward_weights(residuals, constants, inputs, intermediates)    -> gradients of inputs

    x and y are trees of arrays, g is the gradient of y. Each part uses only some of the residuals; others may be None.
    """

    layer: Layer
    tree: Any  # the tree structure of the function that `jax.vjp` returns
    sources: list[int | None]  # for each of its leaves: the index of the leaf of (constants, inputs); None: a residual
    residuals: Types
    jaxpr: Jaxpr  # flat: (residuals, constants, inputs, g) -> gradients of inputs, of x; calls inlined
    consts: list
    gradients: int  # number of outputs that are gradients of inputs
    x_tree: Any  # the tree structure of x
    parts: _Parts

    @property
    def intermediates(self) -> Types:
        """Types of the arrays that backward_x passes to backward_weights."""
        return [v.aval for v in self.parts.intermediates]

    @property
    def residuals_for_x(self) -> list[int]:
        """Indices of the residuals that backward_x uses."""
        return self._where(_read_by(self.parts.for_x))

    @property
    def residuals_for_weights(self) -> list[int]:
        """Indices of the residuals that backward_weights uses."""
        outputs = {v for v in self.jaxpr.outvars[: self.gradients] if isinstance(v, Var)}
        return self._where(_read_by(self.parts.for_weights) | outputs)

    @property
    def residuals_for_backward(self) -> list[int]:
        """Indices of the residuals that backward uses: not those for gradients of frozen weights alone."""
        return sorted({*self.residuals_for_x, *self.residuals_for_weights})

    def forward(self, constants: Tree, inputs: Tree, x: Tree) -> tuple[Tree, list]:
        y, vjp = _vjp(self.layer, constants, inputs, x)
        leaves = zip(jax.tree.leaves(vjp), self.sources, strict=True)
        return y, [leaf for leaf, source in leaves if source is None]

    def backward(self, residuals: Sequence, constants: Tree, inputs: Tree, g: Tree) -> tuple[Tree, Tree]:
        known = zip(residuals, self.residuals, strict=True)
        filled = [_zeros(t) if x is None else x for x, t in known]  # what nothing uses
        return _backward(self.tree, self.sources, filled, (constants, inputs), g)

    def backward_x(self, residuals: Sequence, constants: Tree, inputs: Tree, g: Tree) -> tuple[Tree, list]:
        gradients = jax.tree.leaves(g)
        g_vars = self.jaxpr.invars[-len(gradients) :]
        values = self._values(residuals, constants, inputs) | dict(zip(g_vars, gradients, strict=True))
        _run(self.parts.for_x, values)
        of_x = [_read(values, v) for v in self.jaxpr.outvars[self.gradients :]]
        return self.x_tree.unflatten(of_x), [values[v] for v in self.parts.intermediates]

    def backward_weights(self, residuals: Sequence, constants: Tree, inputs: Tree, intermediates: Sequence) -> Tree:
        values = self._values(residuals, constants, inputs)
        values |= zip(self.parts.intermediates, intermediates, strict=True)
        _run(self.parts.for_weights, values)
        gradients = [_read(values, v) for v in self.jaxpr.outvars[: self.gradients]]
        return jax.tree.structure(inputs).unflatten(gradients)

    def _values(self, residuals: Sequence, constants: Tree, inputs: Tree) -> dict[Var, Any]:
        """Return the arrays of all input variables of the jaxpr but g."""
        arrays = [*self.consts, *residuals, *jax.tree.leaves((constants, inputs))]
        variables = [*self.jaxpr.constvars, *self.jaxpr.invars][: len(arrays)]
        return dict(zip(variables, arrays, strict=True))

    def _where(self, used: set[Var]) -> list[int]:
        return [i for i, v in enumerate(self.jaxpr.invars[: len(self.residuals)]) if v in used]


def split_vjp(layer: Layer, constants: Tree, inputs: Tree, x: Tree) -> SplitVjp:
    """Trace layer(constants, inputs, x) -> y and its backward, with respect to inputs and x, for these types."""
    traced: list[SplitVjp] = []

    def trace(constants: Tree, inputs: Tree, x: Tree) -> None:
        traced.append(_trace(layer, constants, inputs, x))

    jax.eval_shape(trace, constants, inputs, x)
    return traced[0]


def _trace(layer: Layer, constants: Tree, inputs: Tree, x: Tree) -> SplitVjp:
    y, vjp = _vjp(layer, constants, inputs, x)
    leaves, tree = jax.tree.flatten(vjp)
    known = jax.tree.leaves((constants, inputs))
    sources = [next((i for i, array in enumerate(known) if array is leaf), None) for leaf in leaves]
    residuals = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]

    def backward(residuals: list, constants: Tree, inputs: Tree, g: Tree) -> tuple[Tree, Tree]:
        return _backward(tree, sources, residuals, (constants, inputs), g)

    nested = jax.make_jaxpr(backward)(residuals, constants, inputs, y)
    flat = jax.tree.leaves((residuals, constants, inputs, y))
    closed = jax.make_jaxpr(lambda *arrays: _evaluate(nested.jaxpr, nested.consts, arrays))(*flat)
    gradients = len(jax.tree.leaves(inputs))
    types = [jax.typeof(x) for x in residuals]
    parts = _partition(closed.jaxpr, gradients, len(jax.tree.leaves(y)))
    x_tree = jax.tree.structure(x)
    return SplitVjp(layer, tree, sources, types, closed.jaxpr, closed.consts, gradients, x_tree, parts)


def _vjp(layer: Layer, constants: Tree, inputs: Tree, x: Tree) -> tuple[Tree, Callable]:
    return jax.vjp(lambda inputs, x: layer(constants, inputs, x), inputs, x)


def _backward(
    tree: Any, sources: Sequence[int | None], residuals: Sequence, known: Tree, g: jax.Array
) -> tuple[Tree, Tree]:
    """Rebuild the vjp function from its tree structure, residuals and known (constants, inputs), and call it with g."""
    known, residuals = jax.tree.leaves(known), iter(residuals)
    vjp = jax.tree.unflatten(tree, [next(residuals) if source is None else known[source] for source in sources])
    return vjp(g)


def _zeros(t: Any) -> jax.Array:
    """Return zeros of a type."""
    return as_varying(jnp.zeros(t.shape, t.dtype), sorted(varying_axes(t)))


def _partition(jaxpr: Jaxpr, gradients: int, g_arrays: int) -> _Parts:
    """Partition the equations. Part 1 has what the gradients of x need: the outputs after the first (gradients). Part 2
    has the matmuls that these do not need, and what uses their results. The last (g_arrays) inputs are g. What no
    output needs, gradients of frozen weights, is in neither: else its operands would be stored until part 2.

    Part 2 also has equations that only it needs, if their inputs take no more bytes than their result (a gather).
    """
    outputs = {v for v in jaxpr.outvars[:gradients] if isinstance(v, Var)}
    used_for_x, used = _needed_for(jaxpr, jaxpr.outvars[gradients:]), _needed_for(jaxpr, jaxpr.outvars)
    not_for_x = [i for i in used if i not in used_for_x]
    deferred, deferred_results = set(), set()  # equations of part 2, and what they compute
    for i in not_for_x:
        equation = jaxpr.eqns[i]
        if _is_matmul(equation) or deferred_results.intersection(_reads(equation)):
            deferred.add(i)
            deferred_results.update(equation.outvars)
    for i in reversed(not_for_x):
        reads, results = set(_reads(jaxpr.eqns[i])), set(jaxpr.eqns[i].outvars)
        users = [j for j in not_for_x if results.intersection(_reads(jaxpr.eqns[j]))]
        is_small = sum(map(_bytes, reads - set(jaxpr.constvars))) <= sum(map(_bytes, results))
        if users and deferred.issuperset(users) and is_small and not results.intersection(outputs):
            deferred.add(i)
    for_x = [jaxpr.eqns[i] for i in used if i not in deferred]
    for_weights = [jaxpr.eqns[i] for i in used if i in deferred]
    available = {v for equation in for_x for v in equation.outvars} | set(jaxpr.invars[-g_arrays:])
    read = [*(v for equation in for_weights for v in _reads(equation)), *jaxpr.outvars[:gradients]]
    intermediates = dict.fromkeys(v for v in read if isinstance(v, Var) and v in available)
    return _Parts(for_x, for_weights, list(intermediates))


def _needed_for(jaxpr: Jaxpr, results: Sequence[Var | Literal]) -> list[int]:
    """Return the indices of the equations on which results depend, in their order."""
    needed, found = {v for v in results if isinstance(v, Var)}, []
    for i, equation in reversed(list(enumerate(jaxpr.eqns))):
        if needed.intersection(equation.outvars):
            needed.update(_reads(equation))
            found.insert(0, i)
    return found


def _is_matmul(equation: JaxprEqn) -> bool:
    """True for a matmul, and for a conditional with a matmul in any of its branches."""
    if equation.primitive.name != "cond":
        return equation.primitive.name in MATMULS
    return any(_is_matmul(inner) for branch in equation.params["branches"] for inner in branch.jaxpr.eqns)


def _bytes(v: Var) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _reads(equation: JaxprEqn) -> list[Var]:
    return [v for v in equation.invars if isinstance(v, Var)]


def _read_by(equations: Sequence[JaxprEqn]) -> set[Var]:
    return {v for equation in equations for v in _reads(equation)}


def _read(values: dict[Var, Any], v: Var | Literal) -> Any:
    return v.val if isinstance(v, Literal) else values[v]


def _run(equations: Sequence[JaxprEqn], values: dict[Var, Any]) -> None:
    """Evaluate equations in order; reads and extends values."""
    for equation in equations:
        arguments = [_read(values, v) for v in equation.invars]
        values.update(zip(equation.outvars, _results(equation, arguments), strict=True))


def _results(equation: JaxprEqn, arguments: list) -> Sequence:
    """Evaluate one equation, under its name in profiles: inline calls, drop optimization barriers."""
    name = equation.primitive.name
    if name == "optimization_barrier":
        return arguments
    if name in INLINED:
        inner = equation.params["jaxpr"]
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", []), arguments)
    with equation.ctx.manager, jax.named_scope(str(equation.source_info.name_stack)):
        params = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*arguments, **params)
    return results if equation.primitive.multiple_results else [results]


def _evaluate(jaxpr: Jaxpr, consts: Sequence, arguments: Sequence) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    _run(jaxpr.eqns, values)
    return [_read(values, v) for v in jaxpr.outvars]
