"""What the equations of a traced program (a jaxpr) depend on, once XLA has simplified it: the loops above all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

CALLS = {  # XLA inlines them
    "pjit", "jit", "closed_call", "eval_jaxpr", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call",
}  # fmt: skip
MOVES = {"broadcast_in_dim", "pvary", "convert_element_type", "reshape"}  # zeros stay zeros


class Loop(NamedTuple):
    """A while or scan. A turn takes constants, carry and, of a scan, slices; it returns carry and slices."""

    turn: Jaxpr
    constants: int
    passed_on: dict[int, int]  # results that are just what the loop got -> which argument of a turn that is
    unread: set[int]  # arguments of a turn that are used for nothing else

    def varying(self) -> list[bool]:
        """Return which arguments of a turn are not the same in all of them."""
        same = {*range(self.constants), *self.passed_on.values()}
        return [i not in same for i in range(len(self.turn.invars))]


def turn_of(equation: JaxprEqn) -> Jaxpr | None:
    """Return the body of a loop; None of other equations."""
    key = {"while": "body_jaxpr", "scan": "jaxpr"}.get(equation.primitive.name)
    return equation.params[key].jaxpr if key else None


def loop_of(equation: JaxprEqn) -> Loop | None:
    """Return the parts of a loop; None of other equations."""
    turn = turn_of(equation)
    if turn is None:
        return None
    is_while = equation.primitive.name == "while"
    carried = len(turn.outvars) if is_while else whole(equation.outvars, turn.outvars)
    constants = (len(turn.invars) if is_while else whole(equation.invars, turn.invars)) - carried
    origins, read = _flow(turn)
    returned = [_origin(origins, v) for v in turn.outvars]
    passed_on = {i: constants + i for i in range(carried) if returned[i] is turn.invars[constants + i]}
    read |= {v for i, v in enumerate(returned) if i not in passed_on and isinstance(v, Var)}
    if is_while:
        condition = equation.params["cond_jaxpr"].jaxpr
        _, by_condition = _flow(condition)
        of_carry = zip(turn.invars[constants:], condition.invars[-carried:], strict=True)
        read |= {v for v, same in of_carry if same in by_condition}
    return Loop(turn, constants, passed_on, {i for i, v in enumerate(turn.invars) if v not in read})


def whole(outside: Sequence, inside: Sequence) -> int:
    """Return how many arrays a turn of a scan takes or returns whole, not as a slice."""
    return sum(x.aval.ndim == y.aval.ndim for x, y in zip(outside, inside, strict=True))


def passed_on_by(equation: JaxprEqn, are_zero: Sequence[bool] = ()) -> tuple[dict[int, int], set[int]]:
    """Return the results that are just an operand -> which; and the operands that are used for nothing else.

    are_zero: for each operand; () if that is not known.
    """
    name = equation.primitive.name
    if name in ("optimization_barrier", "pvary"):  # XLA:CPU drops barriers
        places = range(len(equation.outvars))
        return dict(zip(places, places, strict=True)), set(places)
    if name in ("add", "add_any") and any(are_zero):
        return {0: 1 - list(are_zero).index(True)}, {0, 1}
    loop = loop_of(equation)
    if loop is None:
        return {}, set()
    first = len(equation.invars) - len(loop.turn.invars)
    return {i: first + k for i, k in loop.passed_on.items()}, {first + k for k in loop.unread}


def read_for(jaxpr: Jaxpr, equations: Sequence[JaxprEqn]) -> set[Var]:
    """Return all variables of a jaxpr that some of its equations depend on."""
    return _needed(jaxpr, {v for equation in equations for v in _operands(equation)})


def _needed(jaxpr: Jaxpr, wanted: set[Var]) -> set[Var]:
    """Return wanted variables of a jaxpr, and all that these depend on."""
    needed = set(wanted)
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(_operands(equation))
    return needed


def _operands(equation: JaxprEqn) -> list[Var]:
    """Return the variables that an equation computes with: of a call those that its results need."""
    if equation.primitive.name not in CALLS:
        return [v for v in equation.invars if isinstance(v, Var)]
    (inner,) = jaxprs_in_params(equation.params)
    needed = _needed(inner, {v for v in inner.outvars if isinstance(v, Var)})
    pairs = zip(equation.invars, inner.invars, strict=True)
    return [v for v, inside in pairs if isinstance(v, Var) and inside in needed]


def depend_on(jaxpr: Jaxpr, is_one: Callable[[JaxprEqn], bool]) -> set[Var]:
    """Return all variables of a jaxpr that depend on some of its equations."""
    found: set[Var] = set()
    for equation in jaxpr.eqns:
        if is_one(equation) or found.intersection(v for v in equation.invars if isinstance(v, Var)):
            found.update(equation.outvars)
    return found


def _flow(jaxpr: Jaxpr) -> tuple[dict[Var, Any], set[Var]]:
    """Return the variables that are just another value -> that, and those that equations compute with."""
    origins: dict[Var, Any] = {}
    read: set[Var] = set()
    zeros: set[Var] = set()
    for equation in jaxpr.eqns:
        operands = [_origin(origins, v) for v in equation.invars]
        are_zero = [_is_zero(v) if isinstance(v, Literal) else v in zeros for v in operands]
        passed_on, unread = passed_on_by(equation, are_zero)
        origins |= {equation.outvars[i]: operands[k] for i, k in passed_on.items()}
        read |= {v for k, v in enumerate(operands) if isinstance(v, Var) and k not in unread}
        if equation.primitive.name in MOVES and are_zero[0]:
            zeros.update(equation.outvars)
    return origins, read


def _origin(origins: dict[Var, Any], v: Var | Literal) -> Var | Literal:
    return v if isinstance(v, Literal) else origins.get(v, v)


def _is_zero(v: Literal) -> bool:
    return not v.aval.shape and jnp.issubdtype(v.aval.dtype, jnp.number) and v.val == 0
