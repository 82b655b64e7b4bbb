"""Collectives of a program for XLA:CPU in one order.

XLA:CPU does not wait for a loop or branch that holds collectives before it starts a collective, or another such loop,
that does not depend on it: simulated devices would run them in different orders (audit/collective_order.py). As it
drops barriers, only the flow of data orders them. `in_order` adds the flow that is missing to a traced program, so that
no technique needs to know of it. A program without such a pair stays as it is, and programs for GPUs are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from nanotrain_jax.parallel.data_flow import CALLS, depend_on, loop_of, passed_on_by, read_for, turn_of, whole

COLLECTIVES = {
    "psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_to_all", "ragged_all_to_all", "all_gather",
    "all_gather_invariant", "reduce_scatter",
}  # fmt: skip
NOTHING: frozenset[int] = frozenset()


def in_order(function: Callable) -> Callable:
    """Return a function of this device's shards, for use inside of `shard_map` on XLA:CPU: the same numbers, and of a
    collective and a loop or branch that holds collectives, or of two of these, one depends on the other."""

    def ordered(*arguments: Any) -> Any:
        traced, outputs = jax.make_jaxpr(function, return_shape=True)(*arguments)
        if not _is_in_order(traced, keeps=False):
            traced = _ordered(traced)
        return jax.tree.unflatten(jax.tree.structure(outputs), jaxpr_as_fun(traced)(*jax.tree.leaves(arguments)))

    ordered.__name__ = getattr(function, "func", function).__name__  # of a partial; the compiled program has it
    return ordered


class _Value(NamedTuple):
    array: jax.Array | None  # None: only dependencies are looked at
    needs: frozenset[int]  # the events that it depends on


class _Event(NamedTuple):
    """A collective, or a loop or branch that holds some; or a turn of a loop."""

    runs_others: bool
    results: list[jax.Array | None]  # there when all its collectives have run
    needs: frozenset[int]


def _is_in_order(traced: ClosedJaxpr, keeps: bool, varying: Sequence[bool] = ()) -> bool:
    """Return True if `_ordered` would change nothing. keeps: also look for what XLA would move out of loops."""
    computation = _Computation(keeps, evaluates=False)
    computation.run_all(traced, [None] * len(traced.in_avals), varying)
    return not computation.waits


def _ordered(traced: ClosedJaxpr, varying: Sequence[bool] = ()) -> ClosedJaxpr:
    """Return one computation of a program, in order; the same object if it is.

    varying: which arguments of a turn of a loop are not the same in all turns. XLA would move a collective that depends
    on none of them out of the loop, beside others: it waits for one.
    """
    if _is_in_order(traced, True, varying):
        return traced
    return jax.make_jaxpr(lambda *arrays: _Computation().run_all(traced, arrays, varying))(*traced.in_avals)


class _Computation:
    """The equations of one computation of the compiled program: calls are inlined, loops and branches are not."""

    def __init__(self, keeps: bool = True, evaluates: bool = True) -> None:
        self.keeps = keeps  # no collective leaves a loop
        self.evaluates = evaluates  # False: only find what must wait
        self.events: list[_Event] = []
        self.waits = False

    def run_all(self, traced: ClosedJaxpr, arrays: Sequence, varying: Sequence[bool]) -> list:
        """Evaluate the computation with these arguments -> its results."""
        places = [i for i, varies in enumerate(varying) if varies and _is_number(traced.in_avals[i])]
        if places:
            self.events = [_Event(True, [arrays[min(places, key=lambda i: _bytes(traced.in_avals[i]))]], NOTHING)]
        values = [_Value(x, frozenset({0}) if i in places else NOTHING) for i, x in enumerate(arrays)]
        return [x.array for x in self.run(traced.jaxpr, traced.consts, values)]

    def run(self, jaxpr: Jaxpr, consts: Sequence, arguments: Sequence[_Value]) -> list[_Value]:
        known: dict[Var, _Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {v: _Value(x, NOTHING) for v, x in zip(jaxpr.constvars, consts, strict=True)}

        def read(v: Var | Literal) -> _Value:
            return _Value(v.val, NOTHING) if isinstance(v, Literal) else known[v]

        for equation in _used(jaxpr):
            results = self.evaluate(equation, list(map(read, equation.invars)))
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def evaluate(self, equation: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        if not _has_collectives(equation):
            return _values(equation, self.results(equation, inputs), inputs, _needs(equation, inputs))
        if equation.primitive.name in CALLS:
            return self.inline(equation, inputs)
        if equation.params.get("length") == 1:
            return self.only_turn(equation, inputs)
        return self.event(equation, inputs)

    def results(self, equation: JaxprEqn, inputs: Sequence[_Value]) -> list:
        """Evaluate an equation, under the names it was traced with."""
        if not self.evaluates:
            return [None] * len(equation.outvars)
        arrays, primitive = [x.array for x in inputs], equation.primitive
        with _named(equation), equation.ctx.manager:
            results = primitive.bind(*arrays, **primitive.get_bind_params(equation.params))
        return list(results) if primitive.multiple_results else [results]

    def inline(self, call: JaxprEqn, inputs: Sequence[_Value]) -> list[_Value]:
        (inner,) = jaxprs_in_params(call.params)
        consts = next((x.consts for x in call.params.values() if isinstance(x, ClosedJaxpr)), [])
        if call.params.get("differentiated") and call.params["prevent_cse"]:  # as JAX lowers jax.checkpoint
            inputs = self.each(lax.optimization_barrier, inputs)
        with _named(call):
            return self.run(inner, consts, inputs)

    def only_turn(self, scan: JaxprEqn, inputs: Sequence[_Value]) -> list[_Value]:
        """Evaluate a scan of one turn: XLA inlines it."""
        turn = scan.params["jaxpr"]
        taken, carried = whole(scan.invars, turn.jaxpr.invars), whole(scan.outvars, turn.jaxpr.outvars)
        slices = self.each(lambda x: lax.squeeze(x, (0,)), inputs[taken:])
        with _named(scan):
            results = self.run(turn.jaxpr, turn.consts, [*inputs[:taken], *slices])
        return [*results[:carried], *self.each(lambda x: lax.expand_dims(x, (0,)), results[carried:])]

    def each(self, function: Callable, values: Sequence[_Value]) -> list[_Value]:
        return [x._replace(array=function(x.array)) for x in values] if self.evaluates else list(values)

    def event(self, equation: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        """Evaluate a collective, loop or branch, after those before it that it must not run beside."""
        runs_others = equation.primitive.name not in COLLECTIVES
        needs = _needs(equation, inputs)
        waits = []
        for i, event in reversed(list(enumerate(self.events))):
            if i not in needs and (event.runs_others or runs_others):
                waits += event.results
                needs |= event.needs | {i}
        if waits:
            self.waits = True
            for k in _deciding(equation):
                inputs[k : k + 1] = self.each(lambda x: _after(waits, x), inputs[k : k + 1])
        if runs_others:
            equation = self.with_ordered_parts(equation)
        results = self.results(equation, inputs)
        self.events.append(_Event(runs_others, [results[i] for i in _last_results(equation)], needs))
        return _values(equation, results, inputs, needs | {len(self.events) - 1})

    def with_ordered_parts(self, equation: JaxprEqn) -> JaxprEqn:
        """Return a loop or branch whose computations are in order."""
        params, loop = dict(equation.params), loop_of(equation)
        for key, value in equation.params.items():
            varying = loop.varying() if loop and self.keeps and key != "cond_jaxpr" else ()
            if isinstance(value, ClosedJaxpr):
                params[key] = self.ordered(value, varying)
            if key == "branches":
                params[key] = tuple(self.ordered(branch) for branch in value)
        return equation.replace(params=params)

    def ordered(self, traced: ClosedJaxpr, varying: Sequence[bool] = ()) -> ClosedJaxpr:
        if self.evaluates:
            return _ordered(traced, varying)
        self.waits |= not _is_in_order(traced, self.keeps, varying)
        return traced


def _named(equation: JaxprEqn) -> AbstractContextManager:
    names = str(equation.source_info.name_stack)
    return jax.named_scope(names) if names else nullcontext()


def _needs(equation: JaxprEqn, inputs: Sequence[_Value]) -> frozenset[int]:
    """Return what an equation depends on: not on what it only passes on."""
    _, unread = passed_on_by(equation)
    return NOTHING.union(*(x.needs for k, x in enumerate(inputs) if k not in unread))


def _values(equation: JaxprEqn, results: Sequence, inputs: Sequence[_Value], needs: frozenset[int]) -> list[_Value]:
    """Return the results of an equation with what they depend on: those that it passes on depend on what it got."""
    passed_on, _ = passed_on_by(equation)
    return [_Value(x, inputs[passed_on[i]].needs if i in passed_on else needs) for i, x in enumerate(results)]


def _used(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations that the outputs need: waiting for others would keep them in the program."""
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
    used = []
    for equation in reversed(jaxpr.eqns):
        acts = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)  # not only communicates
        if equation.primitive.name == "optimization_barrier":
            equation = _of_barrier(equation, needed)
        if acts or needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if isinstance(v, Var))
            used.append(equation)
    return used[::-1]


def _of_barrier(barrier: JaxprEqn, needed: set[Var]) -> JaxprEqn:
    """Return a barrier that passes on no more than what is needed."""
    kept = [i for i, v in enumerate(barrier.outvars) if v in needed]
    return barrier.replace(invars=[barrier.invars[i] for i in kept], outvars=[barrier.outvars[i] for i in kept])


def _has_collectives(equation: JaxprEqn) -> bool:
    if equation.primitive.name in COLLECTIVES:
        axes = equation.params.get("axes", equation.params.get("axis_name"))
        return math.prod(map(lax.axis_size, (axes,) if isinstance(axes, str) else axes)) > 1
    return any(_has_collectives(inner) for jaxpr in jaxprs_in_params(equation.params) for inner in jaxpr.eqns)


def _deciding(equation: JaxprEqn) -> list[int]:
    """Return which operands to compute later, so that all collectives of an equation run later.

    Of a collective each: XLA may run it once for each array. Of a branch its index; of a loop the smallest that its
    condition reads, or else its collectives.
    """
    loop = loop_of(equation)
    if loop is None:
        return [0] if equation.primitive.name == "cond" else list(range(len(equation.invars)))
    read = read_for(loop.turn, list(filter(_has_collectives, loop.turn.eqns)))
    varying = {v for v, varies in zip(loop.turn.invars, loop.varying(), strict=True) if varies}
    operands = _operands(equation, loop.turn, read & varying) or _operands(equation, loop.turn, read)
    if equation.primitive.name == "while":
        condition = equation.params["cond_jaxpr"].jaxpr
        operands = _operands(equation, condition, read_for(condition, condition.eqns)) or operands
    return [min(operands, key=lambda k: _bytes(equation.invars[k].aval))]


def _operands(equation: JaxprEqn, computation: Jaxpr, read: set[Var]) -> list[int]:
    """Return which operands of a loop these arguments of its turn or condition are, but for constants."""
    first = len(equation.invars) - len(computation.invars)
    places = [first + i for i, v in enumerate(computation.invars) if v in read and _is_number(v.aval)]
    return [k for k in places if not isinstance(equation.invars[k], Literal)]


def _last_results(equation: JaxprEqn) -> list[int]:
    """Return which results are there only when all collectives of an equation have run: of a loop the smallest that
    depends on one, of a branch the smallest, of a collective each."""
    results = [i for i, v in enumerate(equation.outvars) if _is_number(v.aval)]
    if equation.primitive.name in COLLECTIVES:
        return results
    turn = turn_of(equation)
    if turn:
        communicated = depend_on(turn, _has_collectives)
        results = [i for i in results if turn.outvars[i] in communicated] or results  # none: XLA drops them
    return [min(results, key=lambda i: _bytes(equation.outvars[i].aval))]


def _is_number(aval: Any) -> bool:
    return aval.size > 0 and (jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool)


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _after(others: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Return x, computed after the others: it depends on whether one of them is no number and above zero.

    A conditional, not a select: XLA fuses it with nothing, so all else is compiled as without it.
    """
    values = [lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(()).astype(jnp.float32) for y in others]
    never = reduce(jnp.logical_or, (jnp.isnan(y) & (y > 0) for y in values))
    return lax.cond(never, _other, lambda x: x, x)


def _other(x: jax.Array) -> jax.Array:
    return ~x if x.dtype == jnp.bool else x + jnp.ones((), x.dtype)
