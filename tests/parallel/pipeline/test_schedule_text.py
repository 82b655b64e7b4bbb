"""Schedules as text: drawn, parsed and validated."""

import collections
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import GOOD, any_schedule, hypothesis, order

from nanotrain_jax.parallel.pipeline import schedule_text
from nanotrain_jax.parallel.pipeline.schedule import IDLE, make
from nanotrain_jax.parallel.pipeline.schedule_text import parse, validate


def weights_as_sets(schedule):
    return [[set(w[w != IDLE].tolist()) for w in tick] for tick in schedule.weight]


@hypothesis
@given(any_schedule)
def test_parse_inverts_draw(schedule):
    validate(schedule)
    again = parse(schedule_text.draw(schedule))
    assert again[:2] == schedule[:2]
    assert again.forward.tolist() == schedule.forward.tolist()
    assert again.backward.tolist() == schedule.backward.tolist()
    # The W of one tick are a set: gaps between them are not drawn.
    assert weights_as_sets(again) == weights_as_sets(schedule)
    if (np.diff((schedule.weight == IDLE).astype(int), axis=-1) >= 0).all():
        width = (schedule.weight != IDLE).sum(-1).max(initial=0)
        assert again.weight.tolist() == schedule.weight[..., :width].tolist()


def is_valid(schedule):
    """An independent definition of validity: each unit once, after its inputs."""
    P, M, units = schedule.stages, schedule.microbatches, schedule.chunks * schedule.microbatches
    kinds = "FBW" if schedule.weight.size else "FB"
    everything = collections.Counter((kind, u, s) for kind in kinds for u in range(units) for s in range(P))
    if collections.Counter((*work, s) for s in range(P) for work in order(schedule, s)) != everything:
        return False
    before, now = set(), set()
    for t in range(schedule.ticks):
        for s in range(P):
            only = schedule._replace(
                forward=schedule.forward[t : t + 1],
                backward=schedule.backward[t : t + 1],
                weight=schedule.weight[t : t + 1],
            )
            for kind, u in order(only, s):
                if kind == "F" and (s or u >= M) and ("F", *((u, s - 1) if s else (u - M, P - 1))) not in before:
                    return False
                if kind == "B" and ("F", u, s) not in now:
                    return False
                after = (u, s + 1) if s < P - 1 else (u + M, 0)
                if kind == "B" and after[0] < units and ("B", *after) not in before:
                    return False
                if kind == "W" and ("B", u, s) not in now:
                    return False
                now.add((kind, u, s))
        before = set(now)
    return True


def cells(schedule):
    """Kind of work -> its table [ticks P n], a view."""
    return {"F": schedule.forward[..., None], "B": schedule.backward[..., None], "W": schedule.weight}


@st.composite
def damaged(draw):
    """A schedule with one change: (schedule, the change)."""
    schedule = draw(any_schedule)
    schedule = schedule._replace(**{k: getattr(schedule, k).copy() for k in ("forward", "backward", "weight")})
    kind = draw(st.sampled_from("FBW" if schedule.weight.size else "FB"))
    table = cells(schedule)[kind]
    places = np.argwhere(table != IDLE)
    t, s, i = places[draw(st.integers(0, len(places) - 1))]
    other, j = draw(st.integers(0, schedule.ticks - 1)), draw(st.integers(0, table.shape[-1] - 1))
    how = draw(st.sampled_from(["dropped", "doubled", "exchanged", "exchanged"]))
    if how == "dropped":
        table[t, s, i] = IDLE
    elif how == "doubled":
        table[other, s, j] = table[t, s, i]
    else:  # with another unit, or moved to an idle slot
        table[other, s, j], table[t, s, i] = table[t, s, i], table[other, s, j]
    return schedule, how


def check_mark(schedule, message):
    """Check that the mark of an error is under the work that the error names."""
    first, *grid = message.splitlines()
    found = re.match(
        r"stage (\d+), tick (\d+): ([FBW]\d+[a-z]?) is too early; it needs ([FB]\d+[a-z]?) of stage", first
    )
    stage, tick, work = int(found[1]), int(found[2]), found[3]
    (mark,) = [i for i, line in enumerate(grid) if line.strip(" ^") == ""]
    assert mark == stage + 1
    start, end = grid[mark].index("^"), len(grid[mark])
    marked = grid[stage][start:end]
    assert (grid[stage] + " ")[start - 1] == (grid[stage] + " ")[end] == " "
    assert len(marked.rstrip()) == end - start
    assert work in re.findall(r"[FBW]\d+[a-z]?", marked)
    assert grid[stage][5:start].split() == grid[stage].split("|")[1].split()[:tick]
    del grid[mark]
    assert "\n".join(grid) == schedule_text.draw(schedule)


@hypothesis
@given(damaged())
def test_a_damaged_table_raises_unless_it_is_still_valid(case):
    schedule, how = case
    if is_valid(schedule):
        assert how != "dropped"
        return validate(schedule)
    with pytest.raises(ValueError, match=r"^stage \d+") as error:
        validate(schedule)
    message = str(error.value)
    if "is too early" in message:
        check_mark(schedule, message)
    else:
        first, grid = message.split("\n", 1)
        found = re.fullmatch(r"stage (\d+) has ([FBW]\d+[a-z]?) (\d+) times, not once", first)
        assert grid == schedule_text.draw(schedule)
        row = re.findall(r"[FBW]\d+[a-z]?", grid.splitlines()[int(found[1])])
        assert row.count(found[2]) == int(found[3]) != 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("F2   .    B0W0", "F2   B0   W0  ", None),  # the other stage's B0 is in the tick before: still valid
        ("F0 F1 F2  ", "F0 F1 F0  ", "stage 0 has F0 2 times, not once"),
        ("F1B0 F2B1", "F1   F2B1", "stage 1 has B0 0 times, not once"),
        ("B1W1 B2W2", "B1W1 B2", "stage 0 has W2 0 times, not once"),
        (
            "| .  F0 F1B0",
            "| F0 .  F1B0",
            "stage 1, tick 0: F0 is too early; it needs F0 of stage 0 in tick -1 or before",
        ),
        ("F1B0 F2B1 B2W0", "F1B0 F2B2 B1W0", None),  # B1 later, W1 and B1 of stage 0 after it
        ("F1B0 F2B1 B2W0", "B0   F1B1 F2B2W0", None),
        ("F1B0 F2B1 B2W0", "B1   F1B0 F2B2W0", "stage 1, tick 2: B1 is too early; it needs F1 of stage 1 in tick 2 or"),
        (
            "F2   .    B0W0 B1W1",
            "F2B0 .    W0   B1W1",
            "stage 0, tick 2: B0 is too early; it needs B0 of stage 1 in tick 1",
        ),
        (".    B0W0 B1W1", "W0   B0   B1W1", "stage 0, tick 3: W0 is too early; it needs B0 of stage 0 in tick 3 or"),
    ],
)
def test_an_invalid_table_raises_at_the_first_error(before, after, message):
    validate(parse(GOOD))
    assert GOOD.count(before) == 1
    rows = GOOD.replace(before, after)
    if message is None:
        return validate(parse(rows))
    with pytest.raises(ValueError) as error:
        validate(parse(rows))
    assert str(error.value).startswith(message)
    if "early" in message:
        check_mark(parse(rows), str(error.value))


def test_the_mark_is_under_the_work_that_is_too_early():
    with pytest.raises(ValueError) as error:
        validate(parse("F0  F1B0  .   B1\n .   F0B0  F1  B1"))
    assert str(error.value).splitlines() == [
        "stage 0, tick 1: B0 is too early; it needs B0 of stage 1 in tick 0 or before, which is in tick 1",
        " 0 | F0 F1B0 .  B1",
        "        ^^^^",
        " 1 | .  F0B0 F1 B1",
    ]


@pytest.mark.parametrize("unit", [8, -2])
def test_invalid_units_raise(unit):
    schedule = make("1f1b", 4, 8)
    schedule.forward[-1, 0] = unit
    with pytest.raises(ValueError, match=rf"^F of unit {unit}: units are 0 to 7; use -1 for idle$"):
        validate(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 X0", "'X0' is not the work of a tick"),
        ("B0F0", "'B0F0' is not the work of a tick"),
        ("F0 B0\nF0", r"stages have \[1, 2\] ticks"),
        (". .\n. .", "the table has no work"),
        ("", r"stages have \[\] ticks"),
    ],
)
def test_invalid_text_raises_with_an_example(text, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        parse(text)
    assert len(str(error.value).splitlines()) == 1


def test_stage_numbers_are_optional():
    plain, numbered = parse("F0 F1 B0W0 B1W1"), parse("\n 0 | F0 F1 B0W0 B1W1\n\n")
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(plain, numbered, strict=True))
