"""Schedules for tests: the named ones, and random valid ones."""

import functools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from nanotrain_jax.parallel.pipeline.schedule import IDLE, SCHEDULES, Schedule, make

EQUAL, UNEQUAL = (1, 1, 1), (1, Fraction(13, 10), Fraction(9, 10))  # F, dX, W
CHUNKS = {"interleaved": (1, 2, 3, 4), "zero_bubble": (1, 2, 3)}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)
hypothesis = settings(deadline=None, derandomize=True, max_examples=100)


def least(name, P):
    """The minimum number of microbatches of a schedule."""
    return {"zb_h1": P, "zb_h2": 2 * P - 1}.get(name, 1)


made = functools.cache(make)


def order(schedule, s, kinds="FBW"):
    """The work of stage s in order."""
    done = []
    for t in range(schedule.ticks):
        work = [("F", schedule.forward[t, s]), ("B", schedule.backward[t, s])]
        work += [("W", unit) for unit in schedule.weight[t, s]]
        done += [(kind, int(unit)) for kind, unit in work if unit != IDLE and kind in kinds]
    return done


@st.composite
def named(draw, split_ends=False):
    """A named schedule."""
    name, P = draw(st.sampled_from(list(SCHEDULES))), draw(st.integers(1, 6))
    if name in CHUNKS:
        return make(name, P, P * draw(st.integers(1, 4)), draw(st.integers(1, 4)), split_ends)
    return make(name, P, least(name, P) + draw(st.integers(0, 12)), split_ends=split_ends)


def needed_from_another_stage(kind, unit, s, sizes):
    """The work of another stage that this work depends on: (kind, unit, stage), or None. sizes: P, M, C."""
    P, M, C = sizes
    if kind == "F" and (unit >= M or s):
        return ("F", unit, s - 1) if s else ("F", unit - M, P - 1)
    if kind == "B" and (unit < M * (C - 1) or s < P - 1):
        return ("B", unit, s + 1) if s < P - 1 else ("B", unit + M, 0)
    return None


@st.composite
def anything(draw):
    """A random valid schedule: work in any order that dependencies allow."""
    P, M, C, weights = (draw(st.integers(*range_)) for range_ in ((1, 4), (1, 5), (1, 3), (0, 2)))
    dice = random.Random(draw(st.integers(0, 10**6)))
    when, rows, units = {}, [], range(C * M)
    while len(when) < (3 if weights else 2) * C * M * P:
        t, tables = len(rows), np.full((2 + weights, P), IDLE)
        for s in range(P):
            for row, kind in enumerate("FB" + "W" * weights):
                ready = []
                for u in units:
                    other = needed_from_another_stage(kind, u, s, (P, M, C))
                    same = {"F": None, "B": ("F", u, s), "W": ("B", u, s)}[kind]
                    has_arrived = other is None or when.get(other, t) < t
                    if (kind, u, s) not in when and has_arrived and (same is None or same in when):
                        ready.append(u)
                if ready and dice.random() < 0.6:
                    tables[row, s] = dice.choice(ready)
                    when[kind, int(tables[row, s]), s] = t
        rows.append(tables)
    table = np.stack(rows)
    return Schedule(C, M, table[:, 0], table[:, 1], np.moveaxis(table[:, 2:], 1, 2))


any_schedule = named() | anything()


GOOD = """
0 | F0 F1 F2   .    B0W0 B1W1 B2W2
1 | .  F0 F1B0 F2B1 B2W0 W1   W2
"""
