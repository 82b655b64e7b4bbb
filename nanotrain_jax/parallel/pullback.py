"""The backward of a layer as functions of arrays, for loops that run it later than its forward, or in two parts.

`jax.vjp` runs a layer and returns a function of its residuals: what the layer's rematerialisation keeps. Here the
residuals are taken out of it, so that they can wait in a buffer, and put back. Residuals that are weights of the layer
(compared by identity) are not kept a second time.

The split backward (zero-bubble, arXiv 2401.10241, section 2) is the jaxpr of this function cut along its data flow:
`backward_x` is what the gradient of x depends on; `backward_weights` is the matmuls that it does not depend on, which
make gradients of weights, and what only they need. Nothing is computed in both. Loops are not cut: a layer with a loop
inside makes its gradients of weights in `backward_x`, and `backward_weights` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

Tree = Any  # a pytree of arrays
Types = list[Any]  # of arrays, as `jax.typeof` gives them: shape, dtype, varying axes, memory space
Layer = Callable[[Tree, Tree, Tree], Tree]  # (weights, inputs, x) -> y

INLINED = ("checkpoint", "remat2", "pjit", "jit", "closed_call")  # calls that the cut goes through
MATMULS = ("dot_general", "conv_general_dilated")


class _Parts(NamedTuple):
    """The equations of a backward, cut in two."""

    for_x: list[JaxprEqn]
    for_weights: list[JaxprEqn]
    handed: list[Var]  # from the first part to the second


@dataclass(frozen=True)
class SplitVjp:
    """The forward and backward of one layer; residuals and handed are lists of arrays.

    forward(weights, inputs, x)                             -> y, residuals
    backward(residuals, weights, inputs, g)                 -> gradients of inputs, of x
    backward_x(residuals, weights, inputs, g)               -> gradient of x, handed
    backward_weights(residuals, weights, inputs, handed)    -> gradients of inputs

    x, y are trees of arrays, g the gradient of y. The two parts use only some of the residuals; the others may be None.
    """

    layer: Layer
    tree: Any  # the structure of what `jax.vjp` returns
    places: list[int | None]  # of each leaf of it: which leaf of (weights, inputs) it is; None: a residual
    residuals: Types
    jaxpr: Jaxpr  # flat: (residuals, weights, inputs, g) -> gradients of inputs, of x; calls inlined
    consts: list
    gradients: int  # how many outputs are gradients of inputs
    parts: _Parts

    @property
    def handed(self) -> Types:
        """What backward_x makes for backward_weights."""
        return [v.aval for v in self.parts.handed]

    @property
    def residuals_for_x(self) -> list[int]:
        """Which residuals backward_x uses."""
        return self._where(_read_by(self.parts.for_x))

    @property
    def residuals_for_weights(self) -> list[int]:
        """Which residuals backward_weights uses."""
        outputs = {v for v in self.jaxpr.outvars[: self.gradients] if isinstance(v, Var)}
        return self._where(_read_by(self.parts.for_weights) | outputs)

    def forward(self, weights: Tree, inputs: Tree, x: Tree) -> tuple[Tree, list]:
        """-> y, residuals"""
        y, vjp = _vjp(self.layer, weights, inputs, x)
        leaves = zip(jax.tree.leaves(vjp), self.places, strict=True)
        return y, [leaf for leaf, place in leaves if place is None]

    def backward(self, residuals: Sequence, weights: Tree, inputs: Tree, g: Tree) -> tuple[Tree, Tree]:
        """-> gradients of inputs, of x"""
        return _backward(self.tree, self.places, residuals, (weights, inputs), g)

    def backward_x(self, residuals: Sequence, weights: Tree, inputs: Tree, g: Tree) -> tuple[Tree, list]:
        """-> gradient of x, what backward_weights needs of it"""
        gradients, tree = jax.tree.flatten(g)
        g_vars = self.jaxpr.invars[-len(gradients) :]
        values = self._values(residuals, weights, inputs) | dict(zip(g_vars, gradients, strict=True))
        _run(self.parts.for_x, values)
        of_x = [_read(values, v) for v in self.jaxpr.outvars[self.gradients :]]
        return tree.unflatten(of_x), [values[v] for v in self.parts.handed]

    def backward_weights(self, residuals: Sequence, weights: Tree, inputs: Tree, handed: Sequence) -> Tree:
        """-> gradients of inputs"""
        values = self._values(residuals, weights, inputs) | dict(zip(self.parts.handed, handed, strict=True))
        _run(self.parts.for_weights, values)
        gradients = [_read(values, v) for v in self.jaxpr.outvars[: self.gradients]]
        return jax.tree.structure(inputs).unflatten(gradients)

    def _values(self, residuals: Sequence, weights: Tree, inputs: Tree) -> dict[Var, Any]:
        """Variables of the jaxpr -> arrays; all but g."""
        arrays = [*self.consts, *residuals, *jax.tree.leaves((weights, inputs))]
        variables = [*self.jaxpr.constvars, *self.jaxpr.invars][: len(arrays)]
        return dict(zip(variables, arrays, strict=True))

    def _where(self, used: set[Var]) -> list[int]:
        return [i for i, v in enumerate(self.jaxpr.invars[: len(self.residuals)]) if v in used]


def split_vjp(layer: Layer, weights: Tree, inputs: Tree, x: Tree) -> SplitVjp:
    """The backward of layer(weights, inputs, x) -> y with respect to inputs and x, for arrays of these types."""
    traced: list[SplitVjp] = []

    def trace(weights: Tree, inputs: Tree, x: Tree) -> None:
        traced.append(_trace(layer, weights, inputs, x))

    jax.eval_shape(trace, weights, inputs, x)
    return traced[0]


def _trace(layer: Layer, weights: Tree, inputs: Tree, x: Tree) -> SplitVjp:
    y, vjp = _vjp(layer, weights, inputs, x)
    leaves, tree = jax.tree.flatten(vjp)
    known = jax.tree.leaves((weights, inputs))
    places = [next((i for i, weight in enumerate(known) if weight is leaf), None) for leaf in leaves]
    residuals = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]

    def backward(residuals: list, weights: Tree, inputs: Tree, g: Tree) -> tuple[Tree, Tree]:
        return _backward(tree, places, residuals, (weights, inputs), g)

    nested = jax.make_jaxpr(backward)(residuals, weights, inputs, y)
    flat = jax.tree.leaves((residuals, weights, inputs, y))
    closed = jax.make_jaxpr(lambda *arrays: _evaluate(nested.jaxpr, nested.consts, arrays))(*flat)
    gradients = len(jax.tree.leaves(inputs))
    types = [jax.typeof(x) for x in residuals]
    parts = _cut(closed.jaxpr, gradients, len(jax.tree.leaves(y)))
    return SplitVjp(layer, tree, places, types, closed.jaxpr, closed.consts, gradients, parts)


def _vjp(layer: Layer, weights: Tree, inputs: Tree, x: Tree) -> tuple[Tree, Callable]:
    return jax.vjp(lambda inputs, x: layer(weights, inputs, x), inputs, x)


def _backward(
    tree: Any, places: Sequence[int | None], residuals: Sequence, known: Tree, g: jax.Array
) -> tuple[Tree, Tree]:
    """Call the function of structure tree, its leaves put together from residuals and known: (weights, inputs)."""
    known, residuals = jax.tree.leaves(known), iter(residuals)
    vjp = jax.tree.unflatten(tree, [next(residuals) if place is None else known[place] for place in places])
    return vjp(g)


def _cut(jaxpr: Jaxpr, gradients: int, g_arrays: int) -> _Parts:
    """Cut the equations: for x is what the outputs after the first (gradients) need, for weights the matmuls that they
    do not, and what uses them. The last (g_arrays) inputs are g.

    Of what only these matmuls need, the second part also computes what takes no more bytes to be handed than its result
    would: a gather.
    """
    outputs = {v for v in jaxpr.outvars[:gradients] if isinstance(v, Var)}
    needed = {v for v in jaxpr.outvars[gradients:] if isinstance(v, Var)}
    not_for_x = []
    for i, equation in reversed(list(enumerate(jaxpr.eqns))):
        if needed.intersection(equation.outvars):
            needed.update(_reads(equation))
        else:
            not_for_x.insert(0, i)
    late, made_late = set(), set()
    for i in not_for_x:
        equation = jaxpr.eqns[i]
        if equation.primitive.name in MATMULS or made_late.intersection(_reads(equation)):
            late.add(i)
            made_late.update(equation.outvars)
    for i in reversed(not_for_x):
        takes, makes = set(_reads(jaxpr.eqns[i])), set(jaxpr.eqns[i].outvars)
        users = [j for j in not_for_x if makes.intersection(_reads(jaxpr.eqns[j]))]
        is_small = sum(map(_bytes, takes - set(jaxpr.constvars))) <= sum(map(_bytes, makes))
        if users and late.issuperset(users) and is_small and not makes.intersection(outputs):
            late.add(i)
    for_x = [equation for i, equation in enumerate(jaxpr.eqns) if i not in late]
    for_weights = [equation for i, equation in enumerate(jaxpr.eqns) if i in late]
    made = {v for equation in for_x for v in equation.outvars} | set(jaxpr.invars[-g_arrays:])
    used = [*(v for equation in for_weights for v in _reads(equation)), *jaxpr.outvars[:gradients]]
    handed = dict.fromkeys(v for v in used if isinstance(v, Var) and v in made)
    return _Parts(for_x, for_weights, list(handed))


def _bytes(v: Var) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _reads(equation: JaxprEqn) -> list[Var]:
    return [v for v in equation.invars if isinstance(v, Var)]


def _read_by(equations: Sequence[JaxprEqn]) -> set[Var]:
    return {v for equation in equations for v in _reads(equation)}


def _read(values: dict[Var, Any], v: Var | Literal) -> Any:
    return v.val if isinstance(v, Literal) else values[v]


def _run(equations: Sequence[JaxprEqn], values: dict[Var, Any]) -> None:
    """Evaluate equations in order, from and into values."""
    for equation in equations:
        arguments = [_read(values, v) for v in equation.invars]
        values.update(zip(equation.outvars, _results(equation, arguments), strict=True))


def _results(equation: JaxprEqn, arguments: list) -> Sequence:
    """Evaluate one equation; calls are inlined, barriers dropped."""
    name = equation.primitive.name
    if name == "optimization_barrier":
        return arguments
    if name in INLINED:
        inner = equation.params["jaxpr"]
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", []), arguments)
    with equation.ctx.manager:
        params = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*arguments, **params)
    return results if equation.primitive.multiple_results else [results]


def _evaluate(jaxpr: Jaxpr, consts: Sequence, arguments: Sequence) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    _run(jaxpr.eqns, values)
    return [_read(values, v) for v in jaxpr.outvars]
