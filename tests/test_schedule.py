"""Every table is in order, costs what its formula says, and its buffers hold what is read from them; without a device.

python tests/test_schedule.py        writes tests/golden/schedules/ again
"""

import collections
import functools
import importlib.util
import random
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain_jax.parallel import chart
from nanotrain_jax.parallel import schedule as schedules
from nanotrain_jax.parallel.chart import parse, validate
from nanotrain_jax.parallel.schedule import IDLE, SCHEDULES, Schedule, make

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "schedules"
spec = importlib.util.spec_from_file_location("draw_schedule", ROOT / "scripts" / "draw_schedule.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

EQUAL, UNEQUAL = (1, 1, 1), (1, Fraction(13, 10), Fraction(9, 10))  # F, dX, W
ALIKE = (2, 1, 1)  # F = B
FUSED = ("gpipe", "1f1b", "interleaved", "zero_bubble")  # several kinds of work in a tick
CHUNKS = {"interleaved": (1, 2, 3, 4)}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)
hypothesis = settings(deadline=None, derandomize=True, max_examples=300)


def least(name, P):
    """Microbatches without which there is no such schedule."""
    return {"zb_h1": P, "zb_h2": 2 * P - 1}.get(name, 1)


@functools.cache
def sizes(name):
    """(P, M, C): up to 16, 64 and 4."""
    found = []
    for P in range(1, 17):
        many = {1, 2, 3, P, P + 1, 2 * P - 1, 2 * P, 3 * P - 3, 3 * P - 2, 4 * P, 37, 64}
        for M in sorted(M for M in many if least(name, P) <= M <= 64):
            if name != "interleaved" or M % P == 0:
                found += [(P, M, C) for C in CHUNKS.get(name, (1,))]
    return found


made = functools.cache(make)


@functools.cache
def stats(name, P, M, C, costs):
    return chart.stats(made(name, P, M, C), *costs)


def bubble(name, P, C, costs):
    F, dX, W = costs
    whole, split = (P - 1) * (F + dX + W), (P - 1) * (F + dX - W)
    return {"interleaved": Fraction(whole, C), "zero_bubble": split, "zb_h1": split, "zb_h2": split - (P - 1) * W}.get(
        name, whole
    )


def in_flight(name, P, M, C, s):
    """Microbatches (of one chunk each) between F and the last of their backward on stage s."""
    return {
        "gpipe": M,
        "1f1b": min(M, 2 * (P - 1 - s) + 1),
        "1f1b_lean": min(M, P - s),
        "interleaved": min(M * C, (C - 1) * P + 2 * (P - 1 - s) + 1),
        "zero_bubble": min(M, max(min(3 * (P - 1), M), 2 * (P - 1) - s) - s + 1),
        "zb_h1": P,
        "zb_h2": 2 * P - 1,
    }[name]


def ticks(name, P, M, C):
    return {
        "1f1b": M + 2 * (P - 1),
        "zero_bubble": M + 2 * (P - 1),
        "interleaved": M * C + P * C + P - 2,
        "zb_h1": 3 * M + P - 1,
        "zb_h2": 3 * M + P - 1,
    }.get(name, 2 * (M + P - 1))


@every_schedule
def test_every_table_is_in_order(name):
    for P, M, C in sizes(name):
        schedule = made(name, P, M, C)
        validate(schedule)
        assert (schedule.stages, schedule.microbatches, schedule.chunks) == (P, M, C)


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        *((name, costs) for name in FUSED for costs in (EQUAL, UNEQUAL)),
        ("1f1b_lean", ALIKE),
        ("zb_h1", EQUAL),
        ("zb_h2", EQUAL),
    ],
)
def test_stages_wait_as_long_as_the_formula_says(name, costs):
    for P, M, C in sizes(name):
        found, expected = stats(name, P, M, C, costs), bubble(name, P, C, costs)
        if name != "zero_bubble" or M >= 3 * (P - 1):
            assert found.bubble == expected, (P, M, C)
        else:
            assert expected < found.bubble <= bubble("1f1b", P, C, costs), (P, M, C)
        # The first stage begins first and ends last, but with zb_h2 each begins and ends a tick after the one before.
        later = (P - 1) * costs[0] if name == "zb_h2" else 0
        assert found.time == M * sum(costs) + found.bubble + later, (P, M, C)
        assert found.bubble_fraction == pytest.approx(float(1 - M * sum(costs) / found.time), abs=1e-15)


@every_schedule
def test_as_many_ticks_microbatches_in_flight_and_slots_as_are_said(name):
    for P, M, C in sizes(name):
        found, most, split = stats(name, P, M, C, EQUAL), in_flight(name, P, M, C, 0), name.startswith("z")
        assert found.ticks == made(name, P, M, C).ticks == ticks(name, P, M, C)
        assert found.in_flight == [in_flight(name, P, M, C, s) for s in range(P)]
        assert max(found.in_flight) == most
        slots = dict(found.slots)
        assert slots.pop("inputs") == (0 if P * C == 1 else 2 if name == "zb_h2" else 1)
        assert slots.pop("gradients") == (M if name == "gpipe" else 1)
        assert slots.pop("backward") == (min(M, 2 * P - 1) if name == "zero_bubble" else most)
        assert slots.pop("late") == (most if split else 0)
        handed = slots.pop("handed")
        if name == "zero_bubble":  # gradients of weights wait until tick 3 (P-1), backwards come from P - 1 on
            assert handed <= min(M, 2 * P - 1)
            assert handed == 2 * P - 1 or M < 3 * P - 2
        else:
            assert handed == (most if split else 0)
        assert not slots


@every_schedule
def test_as_many_microbatches_are_in_flight_as_the_docstring_says(name):
    for P, M, C in sizes(name):
        said = {
            "gpipe": M,
            "1f1b": 2 * P - 1,
            "1f1b_lean": P,
            "interleaved": P + Fraction(P - 1, C),
            "zero_bubble": 3 * P - 2,
            "zb_h1": P,
            "zb_h2": 2 * P - 1,
        }[name]
        found = Fraction(max(stats(name, P, M, C, EQUAL).in_flight), C)
        assert found == said if M >= 3 * P - 2 else found <= said


@every_schedule
def test_computing_in_idle_ticks_costs_every_slot_of_every_tick(name):
    for P, M, C in sizes(name):
        costs, weights = UNEQUAL if name in FUSED else EQUAL, made(name, P, M, C).weight.shape[-1]
        F, dX, W = costs
        tick = F + dX + W * weights if name.startswith("z") else F + dX + W
        expected = Fraction(ticks(name, P, M, C) * tick, M * C * (F + dX + W))
        assert stats(name, P, M, C, costs).masked == pytest.approx(float(expected), rel=1e-12)


costs = st.tuples(*[st.fractions(Fraction(1, 10), 3, max_denominator=10)] * 3)


@hypothesis
@given(st.integers(1, 6), st.integers(1, 20), costs)
def test_zero_bubble_keeps_its_word_where_w_is_shortest_and_is_never_slower_than_1f1b(P, M, costs):
    F, dX, W = costs
    found = stats("zero_bubble", P, M, 1, costs)
    if F + dX >= W:
        assert found.time <= stats("1f1b", P, M, 1, costs).time
    if min(F, dX) >= W and M >= 3 * (P - 1):
        assert found.bubble == bubble("zero_bubble", P, 1, costs)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
@hypothesis
@given(st.integers(1, 5), st.integers(0, 10), costs)
def test_one_thing_in_a_tick_waits_longer_where_things_take_different_times(name, P, more, costs):
    M = least(name, P) + more
    found = stats(name, P, M, 1, costs)
    assert found.bubble >= bubble(name, P, 1, costs)
    assert found.time <= found.ticks * max(costs)
    equal = stats(name, P, M, 1, (max(costs),) * 3)
    assert equal.time == found.ticks * max(costs)


def megatron_order(P, M, C, s, warm_up):
    """Forwards and backwards of stage s, as Megatron-LM makes them: warm-up, one forward and one backward, the rest."""

    def unit(i, reverse):
        turn, inside = divmod(i, P * C)
        chunk = inside // P
        return (C - 1 - chunk if reverse else chunk) * M + (turn * P + inside % P if C > 1 else i)

    forwards, backwards = [("F", unit(i, False)) for i in range(M * C)], [("B", unit(i, True)) for i in range(M * C)]
    warm_up = min(warm_up, M * C)
    steady = [work for pair in zip(forwards[warm_up:], backwards, strict=False) for work in pair]
    return forwards[:warm_up] + steady + backwards[M * C - warm_up :]


def order(schedule, s, kinds="FBW"):
    """What stage s does, one after the other."""
    done = []
    for t in range(schedule.ticks):
        work = [("F", schedule.forward[t, s]), ("B", schedule.backward[t, s])]
        work += [("W", unit) for unit in schedule.weight[t, s]]
        done += [(kind, int(unit)) for kind, unit in work if unit != IDLE and kind in kinds]
    return done


@every_schedule
def test_a_stage_goes_forward_and_back_in_the_order_of_megatron(name):
    for P, M, C in sizes(name):
        for s in range(P):
            warm_up = {"gpipe": M, "1f1b_lean": P - 1 - s, "zb_h1": P - 1 - s}.get(name, 2 * (P - 1 - s) + (C - 1) * P)
            assert order(made(name, P, M, C), s, "FB") == megatron_order(P, M, C, s, warm_up)


def test_stage_s_of_zb_h1_makes_gradients_of_weights_s_microbatches_late():
    for P, M, _ in sizes("zb_h1"):
        for s in range(P):
            expected = []
            for kind, m in megatron_order(P, M, 1, s, P - 1 - s):
                expected.append((kind, m))
                if kind == "B" and m >= s:
                    expected.append(("W", m - s))
            expected += [("W", m) for m in range(M - s, M)]
            assert order(made("zb_h1", P, M), s) == expected


@st.composite
def named(draw):
    """A schedule that has a name."""
    name, P = draw(st.sampled_from(list(SCHEDULES))), draw(st.integers(1, 6))
    if name == "interleaved":
        return make(name, P, P * draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    return make(name, P, least(name, P) + draw(st.integers(0, 12)))


@st.composite
def anything(draw):
    """A schedule that has none: stages do what they happen to, in any order of microbatches."""
    P, M, C, weights = (draw(st.integers(*range_)) for range_ in ((1, 4), (1, 5), (1, 3), (0, 2)))
    dice = random.Random(draw(st.integers(0, 10**6)))
    when, rows, units = {}, [], range(C * M)
    needs = lambda s: {
        "F": lambda u: (("F", u, s - 1) if s else ("F", u - M, P - 1)) if u >= M or s else None,
        "B": lambda u: (("B", u, s + 1) if s < P - 1 else ("B", u + M, 0)) if u < M * (C - 1) or s < P - 1 else None,
    }
    while len(when) < (3 if weights else 2) * C * M * P:
        t, tables = len(rows), np.full((2 + weights, P), IDLE)
        for s in range(P):
            for row, kind in enumerate("FB" + "W" * weights):
                ready = []
                for u in units:
                    other = needs(s)[kind](u) if kind != "W" else None
                    same = {"F": None, "B": ("F", u, s), "W": ("B", u, s)}[kind]
                    came = other is None or when.get(other, t) < t
                    if (kind, u, s) not in when and came and (same is None or same in when):
                        ready.append(u)
                if ready and dice.random() < 0.6:
                    tables[row, s] = dice.choice(ready)
                    when[kind, int(tables[row, s]), s] = t
        rows.append(tables)
    table = np.stack(rows)
    return Schedule(C, M, table[:, 0], table[:, 1], np.moveaxis(table[:, 2:], 1, 2))


any_schedule = named() | anything()


@hypothesis
@given(any_schedule)
def test_what_is_drawn_is_read_back_the_same(schedule):
    validate(schedule)
    again = parse(chart.draw(schedule))
    assert again[:2] == schedule[:2]
    assert again.forward.tolist() == schedule.forward.tolist()
    assert again.backward.tolist() == schedule.backward.tolist()
    # The gradients of weights of one tick are a set: gaps between them are not drawn.
    as_sets = lambda s: [[set(w[w != IDLE].tolist()) for w in tick] for tick in s.weight]
    assert as_sets(again) == as_sets(schedule)
    if (np.diff((schedule.weight == IDLE).astype(int), axis=-1) >= 0).all():
        width = (schedule.weight != IDLE).sum(-1).max(initial=0)
        assert again.weight.tolist() == schedule.weight[..., :width].tolist()


def run(schedule):
    """The table carried out with numbers of microbatches and pieces for arrays -> how many values were read.

    Raises AssertionError where a slot does not hold what is read from it.
    """
    P, C, M = schedule.stages, schedule.chunks, schedule.microbatches
    buffers, (inputs, gradients) = schedules.buffers(schedule), schedules.arrivals(schedule)
    memory = {name: [[None] * (b.count + 1) for _ in range(P)] for name, b in buffers.items()}
    sent = {"F": [None] * P, "B": [None] * P}
    last, reads = C * P - 1, 0
    name = lambda unit, s: (int(unit) % M, int(unit) // M * P + s)  # microbatch, piece

    for buffer in buffers.values():
        assert (buffer.slot >= 0).all()
        assert (buffer.slot <= buffer.count).all()
        assert (buffer.slot[IDLE] == buffer.count).all()

    def write(buffer, unit, s, value):
        memory[buffer][s][buffers[buffer].slot[unit, s]] = value

    def read(buffer, unit, s, value):
        nonlocal reads
        assert buffers[buffer].slot[unit, s] < buffers[buffer].count
        assert memory[buffer][s][buffers[buffer].slot[unit, s]] == value
        reads += 1

    for t in range(schedule.ticks):
        came = {"F": [sent["F"][s - 1] for s in range(P)], "B": [sent["B"][(s + 1) % P] for s in range(P)]}
        sent = {"F": [None] * P, "B": [None] * P}
        for s in range(P):
            if inputs[t, s] != IDLE:
                m, piece = name(inputs[t, s], s)
                assert came["F"][s] == ("F", m, piece - 1)
            elif came["F"][s]:
                assert came["F"][s][2] == last  # leaves the ring
            write("inputs", inputs[t, s], s, came["F"][s])

            unit = schedule.forward[t, s]
            if unit != IDLE:
                m, piece = name(unit, s)
                if piece:
                    read("inputs", unit, s, ("F", m, piece - 1))
                sent["F"][s] = ("F", m, piece)
                if piece == last:
                    write("gradients", unit, s, ("F", m, piece))
            # An idle stage writes too, into the spare slot.
            write("backward", unit, s, unit != IDLE and ("kept for B", *name(unit, s)))
            write("late", unit, s, unit != IDLE and ("kept for W", *name(unit, s)))

            if gradients[t, s] != IDLE:
                m, piece = name(gradients[t, s], s)
                assert came["B"][s] == ("B", m, piece + 1)
            elif came["B"][s]:
                assert came["B"][s][2] == 0
            write("gradients", gradients[t, s], s, came["B"][s])

            unit = schedule.backward[t, s]
            if unit != IDLE:
                m, piece = name(unit, s)
                read("gradients", unit, s, ("F", m, last) if piece == last else ("B", m, piece + 1))
                read("backward", unit, s, ("kept for B", m, piece))
                sent["B"][s] = ("B", m, piece)
            write("handed", unit, s, unit != IDLE and ("made by B", *name(unit, s)))

            for unit in schedule.weight[t, s]:
                if unit != IDLE:
                    read("late", unit, s, ("kept for W", *name(unit, s)))
                    read("handed", unit, s, ("made by B", *name(unit, s)))
    return reads


@hypothesis
@given(any_schedule)
def test_every_slot_still_holds_what_is_read_from_it(schedule):
    P, C, M = schedule.stages, schedule.chunks, schedule.microbatches
    pieces = P * C
    assert run(schedule) == M * (pieces - 1) + 2 * M * pieces + (2 * M * pieces if schedule.weight.size else 0)


@hypothesis
@given(any_schedule)
def test_no_buffer_has_more_slots_than_values_that_live_at_a_time(schedule):
    """Of `backward`, whose values live from F to B."""
    buffer, live = schedules.buffers(schedule)["backward"], 0
    for s in range(schedule.stages):
        alive = most = 0
        for kind, _ in order(schedule, s, "FB"):
            alive += 1 if kind == "F" else -1
            most = max(most, alive)
        live = max(live, most)
    assert buffer.count == live


def is_in_order(schedule):
    """The definition, once more: each unit once, when its inputs are there."""
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
    """A schedule with one thing changed: (schedule, what was done)."""
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
    else:  # with another unit, or moved to where none is
        table[other, s, j], table[t, s, i] = table[t, s, i], table[other, s, j]
    return schedule, how


def check_mark(schedule, message):
    """The mark of an error stands under the work that the error names."""
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
    assert "\n".join(grid) == chart.draw(schedule)


@settings(hypothesis, max_examples=1000)
@given(damaged())
def test_a_damaged_table_is_refused_unless_it_is_still_in_order(case):
    schedule, how = case
    if is_in_order(schedule):
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
        assert grid == chart.draw(schedule)
        row = re.findall(r"[FBW]\d+[a-z]?", grid.splitlines()[int(found[1])])
        assert row.count(found[2]) == int(found[3]) != 1


GOOD = """
0 | F0 F1 F2   .    B0W0 B1W1 B2W2
1 | .  F0 F1B0 F2B1 B2W0 W1   W2
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("F2   .    B0W0", "F2   B0   W0  ", None),  # the other stage's B0 was in the tick before: still in order
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
def test_a_table_that_is_out_of_order_is_shown_where(before, after, message):
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


def test_the_mark_stands_under_the_work_that_is_too_early():
    with pytest.raises(ValueError) as error:
        validate(parse("F0  F1B0  .   B1\n .   F0B0  F1  B1"))
    assert str(error.value).splitlines() == [
        "stage 0, tick 1: B0 is too early; it needs B0 of stage 1 in tick 0 or before, which is in tick 1",
        " 0 | F0 F1B0 .  B1",
        "        ^^^^",
        " 1 | .  F0B0 F1 B1",
    ]


@pytest.mark.parametrize("unit", [8, -2])
def test_units_that_are_not_there_are_refused(unit):
    schedule = make("1f1b", 4, 8)
    schedule.forward[-1, 0] = unit
    with pytest.raises(ValueError, match=rf"^F of unit {unit}; units are 0 to 7, and -1 is none$"):
        validate(schedule)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f2b", 4, 8),
            "schedule '1f2b' is unknown; use gpipe, 1f1b, 1f1b_lean, interleaved, zero_bubble, zb_h1, zb_h2",
        ),
        (("interleaved", 4, 10, 2), "interleaved: 10 microbatches are not a multiple of 4 stages; use 8 or 12"),
        (("interleaved", 4, 3, 2), "interleaved: 3 microbatches are not a multiple of 4 stages; use 4"),
        (("zb_h1", 4, 3), "zb_h1: 3 microbatches are too few for 4 stages; use at least 4, or 1f1b"),
        (("zb_h2", 4, 6), "zb_h2: 6 microbatches are too few for 4 stages; use at least 7, or 1f1b"),
        *(
            ((name, 4, 8, 2), f"{name}: 2 chunks per stage; use 1, or interleaved")
            for name in SCHEDULES
            if name != "interleaved"
        ),
        (("gpipe", 4, 0), "gpipe: 0 microbatches; use 1 or more"),
        (("gpipe", 0, 8), "gpipe: 0 stages; use 1 or more"),
        (("interleaved", 4, 8, 0), "interleaved: 0 chunks; use 1 or more"),
    ],
)
def test_a_schedule_that_there_is_not_is_refused_with_one_that_there_is(arguments, message):
    with pytest.raises(ValueError) as error:
        make(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 X0", "'X0' is not the work of a tick"),
        ("B0F0", "'B0F0' is not the work of a tick"),
        ("F0 B0\nF0", r"stages have \[1, 2\] ticks"),
        (". .\n. .", "there is no work in the table"),
        ("", r"stages have \[\] ticks"),
    ],
)
def test_text_that_is_no_table_is_refused_with_how_to_write_one(text, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        parse(text)
    assert len(str(error.value).splitlines()) == 1


def test_numbers_of_stages_may_be_left_out():
    plain, numbered = parse("F0 F1 B0W0 B1W1"), parse("\n 0 | F0 F1 B0W0 B1W1\n\n")
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(plain, numbered, strict=True))


@pytest.mark.parametrize("C", [1, 2, 3, 4])
def test_forwards_alone_take_any_number_of_microbatches(C):
    for P in range(1, 9):
        for M in (1, 2, 3, P, P + 1, 2 * P, 2 * P + 3, 37):
            schedule = schedules.forward_only(P, M, C)
            found = schedules.ticks_of(schedule.forward, C * M)
            assert (schedule.forward != IDLE).sum() == C * M * P
            assert (found >= 0).all()  # with the line before: each once
            assert (schedule.backward == IDLE).all()
            assert run(schedule) == M * (P * C - 1)  # each finds its input
            # The last round may not be full; nothing else is lost.
            assert -(-M // P) * P * C + P - 1 >= schedule.ticks >= M * C + P - 1
            assert schedule.ticks == M * C + P - 1 or C > 1
            with pytest.raises(ValueError, match="a schedule without a backward has no bubble"):
                chart.stats(schedule)


def golden_schedule(name):
    return make(name, 4, 8, 2 if name == "interleaved" else 1)


@every_schedule
def test_the_table_is_the_golden_one(name):
    golden = (GOLDEN / f"{name}.txt").read_text()
    assert chart.draw(golden_schedule(name)) + "\n" == golden
    validate(parse(golden))


SVG_TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


@pytest.mark.parametrize("name", ["zero_bubble", "interleaved"])
def test_the_picture_shows_every_microbatch_of_every_stage(name, tmp_path, capsys):
    P, M, C = 3, 6, 2 if name == "interleaved" else 1
    arguments = ["--schedule", name, "--stages", str(P), "--microbatches", str(M), "--chunks", str(C)]
    assert script.main([*arguments, "--costs", "1,1.3,0.9", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert chart.draw(make(name, P, M, C)) in printed
    stem = f"{name}_p3_m6" + ("_c2" if C > 1 else "")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{stem}.png", f"{stem}.svg"]
    assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / f"{stem}.png").stat().st_size > 10_000
    texts = collections.Counter(SVG_TEXT.findall((tmp_path / f"{stem}.svg").read_text()))
    kinds = 3 if name == "zero_bubble" else 2
    for m in range(M):
        assert texts[str(m)] >= P * C * kinds  # a bar for each kind of work; axes have numbers too
    found = chart.stats(make(name, P, M, C), *UNEQUAL)
    share = f"{found.bubble_fraction:.1%}"
    assert share in printed
    assert any(share in text for text in texts)


def test_one_s_own_table_can_be_drawn_and_one_that_is_out_of_order_is_marked(tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text(GOOD)
    assert script.main(["--text", str(mine), "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "mine_p2_m3.svg").exists()
    mine.write_text(GOOD.replace("| .  F0 F1B0", "| F0 .  F1B0"))
    capsys.readouterr()
    assert script.main(["--text", str(mine), "--out", str(tmp_path / "never")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: stage 1, tick 0: F0 is too early; ")
    assert shown.err.splitlines()[-1] == "     ^^"
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schedule zb_h2 --stages 4 --microbatches 6", "zb_h2: 6 microbatches are too few for 4 stages"),
        ("--schedule gpipe --stages 4", "--schedule needs --stages and --microbatches"),
        ("--stages 4 --microbatches 4", "give --schedule, or a table with --text"),
        ("--schedule gpipe --text table.txt", "give --schedule, or a table with --text, not both"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,2", "costs='1,2' are not three positive numbers"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,x,1", "costs='1,x,1' are not three positive numbers"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,0,1/0", "costs='1,0,1/0' are not three positive"),
        ("--text no/such/file.txt", "[Errno 2] No such file or directory"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_in_one_line(arguments, message, tmp_path, capsys):
    assert script.main([*arguments.split(), "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in SCHEDULES:
        (GOLDEN / f"{name}.txt").write_text(chart.draw(golden_schedule(name)) + "\n")
