"""The buffers of every schedule hold what is read from them, and no more; without a device."""

import pytest
from hypothesis import given
from schedule_cases import any_schedule, hypothesis, order

from nanotrain_jax.parallel import chart
from nanotrain_jax.parallel import schedule as schedules
from nanotrain_jax.parallel.schedule import IDLE


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
