"""Every schedule is valid and costs what its formula says; without a device.

PYTHONPATH=tests python tests/parallel/pipeline/test_schedule.py        rewrites tests/golden/schedules/
"""

import functools
from fractions import Fraction

import pytest
from conftest import ROOT, cover
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import CHUNKS, EQUAL, UNEQUAL, every_schedule, hypothesis, least, made, order

from nanotrain_jax.parallel.pipeline import schedule_text
from nanotrain_jax.parallel.pipeline.schedule import SCHEDULES, make
from nanotrain_jax.parallel.pipeline.schedule_text import parse, validate

GOLDEN = ROOT / "tests" / "golden" / "schedules"
ALIKE = (2, 1, 1)  # F = B
FUSED = ("gpipe", "1f1b", "interleaved", "zero_bubble")  # several kinds of work per tick


STAGES = (*range(1, 6), 8)  # in the default run
OTHERS = tuple(sorted({*range(1, 17)} - {*STAGES}))
every_size = pytest.mark.parametrize("stages", cover([STAGES], [OTHERS], name=lambda stages: f"{len(stages)} sizes"))


@functools.cache
def sizes(name, stages):
    """(P, M, C): up to 16, 64 and 4."""
    found = []
    for P in stages:
        many = {1, 2, 3, P, P + 1, 2 * P - 1, 2 * P, 3 * P - 3, 3 * P - 2, 4 * P, 37, 64}
        for M in sorted(M for M in many if least(name, P) <= M <= 64):
            found += [(P, M, C) for C in CHUNKS.get(name, (1,)) if C == 1 or M % P == 0]
    return found


@functools.cache
def stats(name, P, M, C, costs):
    return schedule_text.stats(made(name, P, M, C), *costs)


def bubble(name, P, C, costs):
    F, dX, W = costs
    unsplit, split = (P - 1) * (F + dX + W), (P - 1) * (F + dX - W)
    return {
        "interleaved": Fraction(unsplit, C),
        "zero_bubble": Fraction(split, C),
        "zb_h1": split,
        "zb_h2": split - (P - 1) * W,
    }.get(name, unsplit)


def in_flight(name, P, M, C, s):
    """Microbatches (of one chunk each) between F and the last of their backward on stage s."""
    return {
        "gpipe": M,
        "1f1b": min(M, 2 * (P - 1 - s) + 1),
        "1f1b_lean": min(M, P - s),
        "interleaved": min(M * C, (C - 1) * P + 2 * (P - 1 - s) + 1),
        "zero_bubble": min(M * C, P * C + P - 1 - (s > 0)),
        "zb_h1": P,
        "zb_h2": 2 * P - 1,
    }[name]


def ticks(name, P, M, C):
    return {
        "1f1b": M + 2 * (P - 1),
        "zero_bubble": M * C + P * C + P - 2,
        "interleaved": M * C + P * C + P - 2,
        "zb_h1": 3 * M + P - 1,
        "zb_h2": 3 * M + P - 1,
    }.get(name, 2 * (M + P - 1))


@every_schedule
@every_size
def test_every_table_is_valid(name, stages):
    for P, M, C in sizes(name, stages):
        schedule = made(name, P, M, C)
        validate(schedule)
        assert (schedule.stages, schedule.microbatches, schedule.chunks) == (P, M, C)


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        *(pytest.param(name, EQUAL, marks=pytest.mark.long) for name in FUSED),
        *((name, UNEQUAL) for name in FUSED),
        ("1f1b_lean", ALIKE),
        ("zb_h1", EQUAL),
        ("zb_h2", EQUAL),
    ],
)
@every_size
def test_bubbles_equal_the_formulas(name, costs, stages):
    for P, M, C in sizes(name, stages):
        found, expected = stats(name, P, M, C, costs), bubble(name, P, C, costs)
        if name != "zero_bubble" or M * C >= P * C + P - 2:
            assert found.bubble == expected, (P, M, C)
        else:
            assert expected < found.bubble <= bubble("interleaved", P, C, costs), (P, M, C)
        # The first stage begins first and ends last; with zb_h2 each stage begins and ends a tick after the previous.
        later = (P - 1) * costs[0] if name == "zb_h2" else 0
        assert found.time == M * sum(costs) + found.bubble + later, (P, M, C)
        assert found.bubble_fraction == pytest.approx(float(1 - M * sum(costs) / found.time), abs=1e-15)


@every_schedule
@every_size
def test_ticks_microbatches_in_flight_and_slots_equal_the_formulas(name, stages):
    for P, M, C in sizes(name, stages):
        found, most, split = stats(name, P, M, C, EQUAL), in_flight(name, P, M, C, 0), name.startswith("z")
        assert found.ticks == made(name, P, M, C).ticks == ticks(name, P, M, C)
        assert found.in_flight == [in_flight(name, P, M, C, s) for s in range(P)]
        assert max(found.in_flight) == most
        slots = dict(found.slots)
        assert slots.pop("inputs") == (0 if P * C == 1 else 2 if name == "zb_h2" else 1)
        assert slots.pop("gradients") == (M if name == "gpipe" else 1)
        assert slots.pop("backward") == most
        assert slots.pop("backward_weight") == (most if split else 0)
        intermediates = slots.pop("intermediates")
        if name == "zero_bubble":
            assert intermediates <= min(M * C, max(2 * P - (C == 1) - 1, 1))
            assert intermediates >= 2 * P - (C == 1) - 1 or M * C < P * C + P - 2
        else:
            assert intermediates == (most if split else 0)
        assert not slots


@every_schedule
@every_size
def test_microbatches_in_flight_are_those_of_the_docstring(name, stages):
    for P, M, C in sizes(name, stages):
        documented = {
            "gpipe": M,
            "1f1b": 2 * P - 1,
            "1f1b_lean": P,
            "interleaved": P + Fraction(P - 1, C),
            "zero_bubble": P + Fraction(P - 1, C),
            "zb_h1": P,
            "zb_h2": 2 * P - 1,
        }[name]
        found = Fraction(max(stats(name, P, M, C, EQUAL).in_flight), C)
        assert found == documented if M >= 3 * P - 2 else found <= documented


@every_schedule
@every_size
def test_masked_stages_pay_for_every_slot_of_every_tick(name, stages):
    for P, M, C in sizes(name, stages):
        costs, weights = UNEQUAL if name in FUSED else EQUAL, made(name, P, M, C).weight.shape[-1]
        F, dX, W = costs
        tick = F + dX + W * weights if name.startswith("z") else F + dX + W
        expected = Fraction(ticks(name, P, M, C) * tick, M * C * (F + dX + W))
        assert stats(name, P, M, C, costs).masked == pytest.approx(float(expected), rel=1e-12)


costs = st.tuples(*[st.fractions(Fraction(1, 10), 3, max_denominator=10)] * 3)


@hypothesis
@given(st.integers(1, 6), st.integers(1, 20), costs)
def test_zero_bubble_has_its_bubble_if_w_is_shortest_and_is_never_slower_than_1f1b(P, M, costs):
    F, dX, W = costs
    found = stats("zero_bubble", P, M, 1, costs)
    if F + dX >= W:
        assert found.time <= stats("1f1b", P, M, 1, costs).time
    if min(F, dX) >= W and M >= 2 * (P - 1):
        assert found.bubble == bubble("zero_bubble", P, 1, costs)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
@hypothesis
@given(st.integers(1, 5), st.integers(0, 10), costs)
def test_one_kind_per_tick_has_larger_bubbles_if_kinds_take_different_times(name, P, more, costs):
    M = least(name, P) + more
    found = stats(name, P, M, 1, costs)
    assert found.bubble >= bubble(name, P, 1, costs)
    assert found.time <= found.ticks * max(costs)
    equal = stats(name, P, M, 1, (max(costs),) * 3)
    assert equal.time == found.ticks * max(costs)


def megatron_order(P, M, C, s, warm_up):
    """Forwards and backwards of stage s in Megatron-LM's order: warm-up, 1F1B, cool-down."""

    def unit(i, reverse):
        round_, offset = divmod(i, P * C)
        chunk = offset // P
        return (C - 1 - chunk if reverse else chunk) * M + (round_ * P + offset % P if C > 1 else i)

    forwards, backwards = [("F", unit(i, False)) for i in range(M * C)], [("B", unit(i, True)) for i in range(M * C)]
    warm_up = min(warm_up, M * C)
    steady = [work for pair in zip(forwards[warm_up:], backwards, strict=False) for work in pair]
    return forwards[:warm_up] + steady + backwards[M * C - warm_up :]


@every_schedule
@every_size
def test_forwards_and_backwards_have_the_order_of_megatron(name, stages):
    for P, M, C in sizes(name, stages):
        for s in range(P):
            warm_up = {"gpipe": M, "1f1b_lean": P - 1 - s, "zb_h1": P - 1 - s}.get(name, 2 * (P - 1 - s) + (C - 1) * P)
            assert order(made(name, P, M, C), s, "FB") == megatron_order(P, M, C, s, warm_up)


@every_size
def test_zb_h1_defers_weight_gradients_of_stage_s_by_s_microbatches(stages):
    for P, M, _ in sizes("zb_h1", stages):
        for s in range(P):
            expected = []
            for kind, m in megatron_order(P, M, 1, s, P - 1 - s):
                expected.append((kind, m))
                if kind == "B" and m >= s:
                    expected.append(("W", m - s))
            expected += [("W", m) for m in range(M - s, M)]
            assert order(made("zb_h1", P, M), s) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f2b", 4, 8),
            "schedule '1f2b' is unknown; use gpipe, 1f1b, 1f1b_lean, interleaved, zero_bubble, zb_h1, zb_h2",
        ),
        (("zero_bubble", 4, 10, 2), "zero_bubble: 10 microbatches are not a multiple of 4 stages; use 8 or 12"),
        (("interleaved", 4, 10, 2), "interleaved: 10 microbatches are not a multiple of 4 stages; use 8 or 12"),
        (("interleaved", 4, 3, 2), "interleaved: 3 microbatches are not a multiple of 4 stages; use 4"),
        (("zb_h1", 4, 3), "zb_h1: 3 microbatches are too few for 4 stages; use at least 4, or 1f1b"),
        (("zb_h2", 4, 6), "zb_h2: 6 microbatches are too few for 4 stages; use at least 7, or 1f1b"),
        *(
            ((name, 4, 8, 2), f"{name}: 2 chunks per stage; use 1, or interleaved or zero_bubble")
            for name in SCHEDULES
            if name not in CHUNKS
        ),
        (("gpipe", 4, 0), "gpipe: 0 microbatches; use 1 or more"),
        (("gpipe", 0, 8), "gpipe: 0 stages; use 1 or more"),
        (("interleaved", 4, 8, 0), "interleaved: 0 chunks; use 1 or more"),
    ],
)
def test_an_unsupported_schedule_raises_and_names_a_supported_one(arguments, message):
    with pytest.raises(ValueError) as error:
        make(*arguments)
    assert str(error.value) == message


def golden_schedule(name):
    return make(name, 4, 8, 2 if name == "interleaved" else 1)


@every_schedule
def test_the_table_equals_its_golden_file(name):
    golden = (GOLDEN / f"{name}.txt").read_text()
    assert schedule_text.draw(golden_schedule(name)) + "\n" == golden
    validate(parse(golden))


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in SCHEDULES:
        (GOLDEN / f"{name}.txt").write_text(schedule_text.draw(golden_schedule(name)) + "\n")
