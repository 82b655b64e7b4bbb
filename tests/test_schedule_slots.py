"""The buffers of every schedule hold what is read from them, and no more; without a device."""

import pytest
from hypothesis import given
from schedule_cases import any_schedule, hypothesis, order

from nanotrain_jax.parallel import chart
from nanotrain_jax.parallel import schedule as schedules
from nanotrain_jax.parallel.schedule import IDLE


class Execution:
    """A table carried out with numbers of microbatches and pieces for arrays; `reads` counts the values that are read.

    Raises AssertionError where a slot does not hold what is read from it.
    """

    def __init__(self, schedule):
        self.schedule = schedule
        self.buffers = schedules.buffers(schedule)
        self.inputs, self.gradients = schedules.arrivals(schedule)
        self.last_piece = schedule.chunks * schedule.stages - 1
        stages = range(schedule.stages)
        self.memory = {name: [[None] * (b.count + 1) for _ in stages] for name, b in self.buffers.items()}
        self.reads = 0
        for buffer in self.buffers.values():
            assert (buffer.slot >= 0).all()
            assert (buffer.slot <= buffer.count).all()
            assert (buffer.slot[IDLE] == buffer.count).all()

    def name(self, unit, s):
        """-> microbatch, piece."""
        chunk, microbatch = divmod(int(unit), self.schedule.microbatches)
        return microbatch, chunk * self.schedule.stages + s

    def write(self, buffer, unit, s, value):
        self.memory[buffer][s][self.buffers[buffer].slot[unit, s]] = value

    def read(self, buffer, unit, s, value):
        slot = self.buffers[buffer].slot[unit, s]
        assert slot < self.buffers[buffer].count
        assert self.memory[buffer][s][slot] == value
        self.reads += 1

    def forward(self, t, s, arrived):
        """-> what stage s sends on."""
        arriving = self.inputs[t, s]
        if arriving != IDLE:
            m, piece = self.name(arriving, s)
            assert arrived == ("F", m, piece - 1)
        elif arrived:
            assert arrived[2] == self.last_piece  # leaves the ring
        self.write("inputs", arriving, s, arrived)

        unit, sent = self.schedule.forward[t, s], None
        if unit != IDLE:
            m, piece = self.name(unit, s)
            if piece:
                self.read("inputs", unit, s, ("F", m, piece - 1))
            sent = ("F", m, piece)
            if piece == self.last_piece:
                self.write("gradients", unit, s, sent)
        # An idle stage writes too, into the spare slot.
        self.write("backward", unit, s, unit != IDLE and ("kept for B", *self.name(unit, s)))
        self.write("late", unit, s, unit != IDLE and ("kept for W", *self.name(unit, s)))
        return sent

    def backward(self, t, s, arrived):
        """-> what stage s sends back."""
        arriving = self.gradients[t, s]
        if arriving != IDLE:
            m, piece = self.name(arriving, s)
            assert arrived == ("B", m, piece + 1)
        elif arrived:
            assert arrived[2] == 0
        self.write("gradients", arriving, s, arrived)

        unit, sent = self.schedule.backward[t, s], None
        if unit != IDLE:
            m, piece = self.name(unit, s)
            self.read("gradients", unit, s, ("F", m, piece) if piece == self.last_piece else ("B", m, piece + 1))
            self.read("backward", unit, s, ("kept for B", m, piece))
            sent = ("B", m, piece)
        self.write("handed", unit, s, unit != IDLE and ("made by B", *self.name(unit, s)))
        return sent

    def weights(self, t, s):
        for unit in self.schedule.weight[t, s]:
            if unit != IDLE:
                self.read("late", unit, s, ("kept for W", *self.name(unit, s)))
                self.read("handed", unit, s, ("made by B", *self.name(unit, s)))


def run(schedule):
    """Carry out all ticks -> how many values were read. Raises AssertionError."""
    execution, stages = Execution(schedule), range(schedule.stages)
    forwards = [None] * schedule.stages
    backwards = [None] * schedule.stages
    for t in range(schedule.ticks):
        inputs = [forwards[s - 1] for s in stages]
        gradients = [backwards[(s + 1) % schedule.stages] for s in stages]
        for s in stages:
            forwards[s] = execution.forward(t, s, inputs[s])
            backwards[s] = execution.backward(t, s, gradients[s])
            execution.weights(t, s)
    return execution.reads


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
