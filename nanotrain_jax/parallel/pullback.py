"""The backward of a layer as plain functions of arrays, for loops that run it by hand: much later, or in two parts.

`jax.vjp` runs a layer and returns a pullback that holds what the layer's rematerialisation keeps. Here the arrays in it
are taken out, so that they can wait in a buffer, and put back in. Those that are the weights are told by identity and
not kept twice.

The two parts (arXiv 2401.10241, section 2) are the pullback's jaxpr cut along its data flow: `early` is what the
gradient of x depends on, `late` the matmuls that it does not depend on, which are gradients of weights, and what only
they need. Nothing is computed in both. The cut does not go through loops: a layer that has one inside makes all in
`early`, gradients of weights too, and hands them over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

Tree = Any  # a pytree of arrays
Types = list[Any]  # of arrays, as `jax.typeof` says: shape, dtype, the axes it varies over, the memory it rests in

INLINED = ("checkpoint", "remat2", "pjit", "jit", "closed_call")  # the cut goes through them
MATMULS = ("dot_general", "conv_general_dilated")


class Pullback(NamedTuple):
    """Functions of the arrays of one layer; kept and handed are lists of arrays.

    forward(weights, inputs, x)              -> y, kept
    whole(kept, weights, inputs, g)          -> gradients of inputs, of x
    early(kept, weights, inputs, g)          -> gradient of x, handed
    late(kept, weights, inputs, handed)      -> gradients of inputs
    """

    kept: Types
    handed: Types
    early_keeps: list[int]  # which of kept early uses
    late_keeps: list[int]
    forward: Callable[..., tuple[jax.Array, list]]
    whole: Callable[..., tuple[Tree, jax.Array]]
    early: Callable[..., tuple[jax.Array, list]]
    late: Callable[..., Tree]


def pullback(
    layer: Callable[[Tree, Tree, jax.Array], jax.Array], weights: Tree, inputs: Tree, x: jax.Array
) -> Pullback:
    """The backward of layer(weights, inputs, x) -> y with respect to inputs and x, at arrays of these types.

    early and late take kept in full, and use only early_keeps and late_keeps of it: the others may be None.
    """

    def run(weights: Tree, inputs: Tree, x: jax.Array) -> tuple:
        y, pull = jax.vjp(lambda inputs, x: layer(weights, inputs, x), inputs, x)
        leaves, tree = jax.tree.flatten(pull)
        known = jax.tree.leaves((weights, inputs))
        return y, leaves, tree, [next((i for i, w in enumerate(known) if w is leaf), None) for leaf in leaves]

    place, tree, graph, types = [], None, None, []  # place: of each leaf which of weights and inputs it is, if one

    def put_back(kept: Sequence, weights: Tree, inputs: Tree) -> Callable:
        known, kept = jax.tree.leaves((weights, inputs)), iter(kept)
        return jax.tree.unflatten(tree, [next(kept) if i is None else known[i] for i in place])

    def whole(kept: Sequence, weights: Tree, inputs: Tree, g: jax.Array) -> tuple[Tree, jax.Array]:
        return put_back(kept, weights, inputs)(g)

    def look(weights: Tree, inputs: Tree, x: jax.Array) -> None:
        nonlocal tree, graph
        y, leaves, tree, place[:] = run(weights, inputs, x)
        kept = [leaf for leaf, i in zip(leaves, place, strict=True) if i is None]
        types[:] = map(jax.typeof, kept)
        graph = jax.make_jaxpr(whole)(kept, weights, inputs, y)
        flat = lambda *arrays: _evaluate(graph.jaxpr, graph.consts, arrays)
        graph = jax.make_jaxpr(flat)(*jax.tree.leaves((kept, weights, inputs, y)))

    jax.eval_shape(look, weights, inputs, x)
    cut = _cut(graph.jaxpr, len(jax.tree.leaves(inputs)))
    structure = jax.tree.structure(inputs)
    first, own = graph.jaxpr.invars[: len(types)], graph.jaxpr.invars[len(types) : -1]

    def forward(weights: Tree, inputs: Tree, x: jax.Array) -> tuple[jax.Array, list]:
        y, leaves, *_ = run(weights, inputs, x)
        return y, [leaf for leaf, i in zip(leaves, place, strict=True) if i is None]

    def environment(kept: Sequence, weights: Tree, inputs: Tree) -> dict[Var, Any]:
        values = [*graph.consts, *kept, *jax.tree.leaves((weights, inputs))]
        return dict(zip([*graph.jaxpr.constvars, *first, *own], values, strict=True))

    def early(kept: Sequence, weights: Tree, inputs: Tree, g: jax.Array) -> tuple[jax.Array, list]:
        values = environment(kept, weights, inputs) | {graph.jaxpr.invars[-1]: g}
        _run(cut.early, values)
        return _read(values, graph.jaxpr.outvars[-1]), [values[v] for v in cut.handed]

    def late(kept: Sequence, weights: Tree, inputs: Tree, handed: Sequence) -> Tree:
        values = environment(kept, weights, inputs) | dict(zip(cut.handed, handed, strict=True))
        _run(cut.late, values)
        return structure.unflatten([_read(values, v) for v in graph.jaxpr.outvars[:-1]])

    reads = lambda equations: {v for equation in equations for v in _reads(equation)}
    where = lambda used: [i for i, v in enumerate(first) if v in used]
    outputs = {v for v in graph.jaxpr.outvars[:-1] if isinstance(v, Var)}
    return Pullback(
        kept=types,
        handed=[v.aval for v in cut.handed],
        early_keeps=where(reads(cut.early)),
        late_keeps=where(reads(cut.late) | outputs),
        forward=forward,
        whole=whole,
        early=early,
        late=late,
    )


class _Parts(NamedTuple):
    early: list[JaxprEqn]
    late: list[JaxprEqn]
    handed: list[Var]


def _cut(jaxpr: Jaxpr, grads: int) -> _Parts:
    """Cut the equations: early is what the last output needs, late the matmuls that it does not, and what uses them.

    Of what only late needs, late also computes what takes no more to be handed than its result would: a gather.
    """
    outputs = [v for v in jaxpr.outvars[:grads] if isinstance(v, Var)]
    needed, rest = {v for v in jaxpr.outvars[grads:] if isinstance(v, Var)}, []
    for i, equation in reversed(list(enumerate(jaxpr.eqns))):
        if needed.intersection(equation.outvars):
            needed.update(_reads(equation))
        else:
            rest.insert(0, i)
    late, made_late = set(), set()
    for i in rest:
        equation = jaxpr.eqns[i]
        if equation.primitive.name in MATMULS or made_late.intersection(_reads(equation)):
            late.add(i)
            made_late.update(equation.outvars)
    for i in reversed(rest):
        takes, makes = set(_reads(jaxpr.eqns[i])), set(jaxpr.eqns[i].outvars)
        users = [j for j in rest if makes.intersection(_reads(jaxpr.eqns[j]))]
        is_small = sum(map(_bytes, takes - set(jaxpr.constvars))) <= sum(map(_bytes, makes))
        if users and late.issuperset(users) and is_small and not makes.intersection(outputs):
            late.add(i)
    first = [e for i, e in enumerate(jaxpr.eqns) if i not in late]
    second = [e for i, e in enumerate(jaxpr.eqns) if i in late]
    made = {v for e in first for v in e.outvars} | {jaxpr.invars[-1]}
    used = [*(v for e in second for v in _reads(e)), *outputs]
    return _Parts(first, second, list(dict.fromkeys(v for v in used if v in made)))


def _bytes(v: Var) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _reads(equation: JaxprEqn) -> list[Var]:
    return [v for v in equation.invars if isinstance(v, Var)]


def _read(values: dict[Var, Any], v: Var | Literal) -> Any:
    return v.val if isinstance(v, Literal) else values[v]


def _run(equations: Sequence[JaxprEqn], values: dict[Var, Any]) -> None:
    """Evaluate equations one after the other; calls are opened, barriers left out."""
    for equation in equations:
        arguments, name = [_read(values, v) for v in equation.invars], equation.primitive.name
        if name == "optimization_barrier":
            results = arguments
        elif name in INLINED:
            inner = equation.params["jaxpr"]
            results = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", []), arguments)
        else:
            with equation.ctx.manager:
                params = equation.primitive.get_bind_params(equation.params)
                results = equation.primitive.bind(*arguments, **params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))


def _evaluate(jaxpr: Jaxpr, consts: Sequence, arguments: Sequence) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    _run(jaxpr.eqns, values)
    return [_read(values, v) for v in jaxpr.outvars]
