"""Buffer slots of every schedule: simulated execution reads what was written; without a device."""

import pytest
from hypothesis import given
from schedule_cases import any_schedule, hypothesis, named, order

from nanotrain_jax.parallel.pipeline import schedule as schedules
from nanotrain_jax.parallel.pipeline import schedule_text, slots
from nanotrain_jax.parallel.pipeline.schedule import IDLE


class Execution:
    """Simulated execution of a table, with (microbatch, virtual stage) in place of arrays; `reads` counts reads.

    Raises AssertionError if a slot does not hold the expected value.
    """

    def __init__(self, schedule):
        self.schedule = schedule
        self.buffers = slots.buffers(schedule)
        self.inputs, self.gradients = slots.arrivals(schedule)
        self.last_stage = schedule.chunks * schedule.stages - 1
        stages = range(schedule.stages)
        self.memory = {name: [[None] * (b.count + 1) for _ in stages] for name, b in self.buffers.items()}
        self.reads = 0
        for buffer in self.buffers.values():
            assert (buffer.slot >= 0).all()
            assert (buffer.slot <= buffer.count).all()
            assert (buffer.slot[IDLE] == buffer.count).all()

    def name(self, unit, s):
        """-> microbatch, virtual stage."""
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
        """-> what stage s sends to the next stage."""
        arriving = self.inputs[t, s]
        if arriving != IDLE:
            m, stage = self.name(arriving, s)
            assert arrived == ("F", m, stage - 1)
        elif arrived:
            assert arrived[2] == self.last_stage  # leaves the ring
        self.write("inputs", arriving, s, arrived)
        if self.schedule.split_ends:
            self.receive_from_ends(t, s)

        unit, sent = self.schedule.forward[t, s], None
        if unit != IDLE:
            m, stage = self.name(unit, s)
            if stage or self.schedule.split_ends:
                self.read("inputs", unit, s, ("F", m, stage - 1))
            sent = ("F", m, stage)
            if stage == self.last_stage and not self.schedule.split_ends:
                self.write("gradients", unit, s, sent)
        # An idle stage writes too, into the spare slot.
        self.write("backward", unit, s, unit != IDLE and ("residual of B", *self.name(unit, s)))
        self.write("backward_weight", unit, s, unit != IDLE and ("residual of W", *self.name(unit, s)))
        return sent

    def receive_from_ends(self, t, s):
        """Split ends: the input of the first virtual stage, the gradient of the last; the loss follows F by a tick."""
        unit, before = self.schedule.forward[t, s], self.schedule.forward[t - 1, s]
        loss = slots.end_units(self.schedule).loss[t]
        if unit != IDLE and self.name(unit, s)[1] == 0:
            assert slots.end_units(self.schedule).embedded[t - 1] == unit
            self.write("inputs", unit, s, ("F", self.name(unit, s)[0], -1))
        if s == self.schedule.stages - 1:
            is_last = before != IDLE and self.name(before, s)[1] == self.last_stage
            assert loss == (before if is_last else IDLE)
            self.write("gradients", loss, s, ("F", self.name(loss, s)[0], self.last_stage))

    def backward(self, t, s, arrived):
        """-> what stage s sends to the previous stage."""
        arriving = self.gradients[t, s]
        if arriving != IDLE:
            m, stage = self.name(arriving, s)
            assert arrived == ("B", m, stage + 1)
        elif arrived:
            assert arrived[2] == 0
        self.write("gradients", arriving, s, arrived)

        unit, sent = self.schedule.backward[t, s], None
        if unit != IDLE:
            m, stage = self.name(unit, s)
            self.read("gradients", unit, s, ("F", m, stage) if stage == self.last_stage else ("B", m, stage + 1))
            self.read("backward", unit, s, ("residual of B", m, stage))
            sent = ("B", m, stage)
        self.write("intermediates", unit, s, unit != IDLE and ("intermediate of B", *self.name(unit, s)))
        return sent

    def weights(self, t, s):
        for unit in self.schedule.weight[t, s]:
            if unit != IDLE:
                self.read("backward_weight", unit, s, ("residual of W", *self.name(unit, s)))
                self.read("intermediates", unit, s, ("intermediate of B", *self.name(unit, s)))


def run(schedule):
    """Execute all ticks -> number of reads. Raises AssertionError."""
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
@given(any_schedule | named(split_ends=True))
def test_every_read_finds_the_value_in_its_slot(schedule):
    P, C, M = schedule.stages, schedule.chunks, schedule.microbatches
    virtual_stages = P * C
    inputs = virtual_stages - (not schedule.split_ends)
    assert run(schedule) == M * inputs + 2 * M * virtual_stages + (
        2 * M * virtual_stages if schedule.weight.size else 0
    )


@hypothesis
@given(any_schedule | named(split_ends=True))
def test_buffers_have_no_more_slots_than_live_values(schedule):
    """For the buffer `backward`, whose values live from F to B."""
    buffer, live = slots.buffers(schedule)["backward"], 0
    for s in range(schedule.stages):
        alive = most = 0
        for kind, _ in order(schedule, s, "FB"):
            alive += 1 if kind == "F" else -1
            most = max(most, alive)
        live = max(live, most)
    assert buffer.count == live


@pytest.mark.parametrize("C", [1, 2, 3, 4])
def test_forward_only_supports_any_number_of_microbatches(C):
    for P in range(1, 9):
        for M in (1, 2, 3, P, P + 1, 2 * P, 2 * P + 3, 37):
            schedule = schedules.forward_only(P, M, C)
            found = slots.ticks_of(schedule.forward, C * M)
            assert (schedule.forward != IDLE).sum() == C * M * P
            assert (found >= 0).all()  # with the line above: each exactly once
            assert (schedule.backward == IDLE).all()
            assert run(schedule) == M * (P * C - 1)  # each finds its input
            # The last round may be partial; no other tick is idle on all stages.
            assert -(-M // P) * P * C + P - 1 >= schedule.ticks >= M * C + P - 1
            assert schedule.ticks == M * C + P - 1 or C > 1
            with pytest.raises(ValueError, match="a schedule without a backward has no bubble"):
                schedule_text.stats(schedule)
