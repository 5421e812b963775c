"""Replaying events: lost events, late ones, the loss function's time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainpath.metrics import StepClock
from trainpath.metrics import segments as S


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns


def do_step(clock, time, num_switches):
    """Do a step of which each switch takes 10 ns."""
    for index in range(num_switches):
        clock.switch(index % 3 + S.FORWARD)
        time.ns += 10
    clock.end_step()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40))
def test_lost_events_never_make_a_torn_step(lengths):
    """Where more happened than is kept, every step is returned whole or counted as dropped."""
    time = Time()
    clock = StepClock(capacity=8, now_ns=time)
    for length in lengths:
        do_step(clock, time, length)
    records, _ = clock.drain()
    do_step(clock, time, 7)
    more, _ = clock.drain()

    assert len(records) + len(more) + clock.num_dropped == len(lengths) + 1
    for record in records + more:
        length = [*lengths, 7][record.step]
        assert record.wall_ns == sum(record.segments_ns) == 10 * length
        assert record.segments_ns[S.FORWARD] == 10 * ((length + 2) // 3)
    assert more[-1].step == len(lengths)


def test_a_step_may_be_drained_in_pieces():
    """Draining in the middle of a step changes nothing about it."""
    whole, pieces = Time(), Time()
    clocks = [StepClock(now_ns=whole), StepClock(now_ns=pieces)]
    found = []
    for clock, time in zip(clocks, (whole, pieces), strict=True):
        for segment in (S.FORWARD, S.PYTHON, S.BACKWARD, S.OPTIMIZER):
            clock.switch(segment)
            time.ns += 100
            if time is pieces:
                assert clock.drain()[0] == []
        clock.end_step()
        found.append(clock.drain()[0])

    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_a_late_event_takes_no_time_back():
    """An event whose time is before the last one's charges nothing, and the step closes."""
    time = Time()
    clock = StepClock(now_ns=time)
    time.ns += 100
    clock.switch(S.FORWARD)
    time.ns -= 40
    clock.switch(S.BACKWARD)
    time.ns += 60
    clock.end_step()

    (record,), _ = clock.drain()

    assert record.wall_ns == sum(record.segments_ns) == 120
    assert min(record.segments_ns) == 0
    assert record.segments_ns[S.PYTHON] == 100


def test_the_loss_takes_no_more_than_was_python_since_forward():
    """`charge_loss` moves at most the python since forward was left, and the step closes."""
    time = Time()
    clock = StepClock(now_ns=time)
    time.ns += 1000  # python before forward: not the loss
    for segment, duration in [(S.FORWARD, 10), (S.PYTHON, 50), (S.DATA_CACHE, 7), (S.PYTHON, 30)]:
        clock.switch(segment)
        time.ns += duration
    clock.switch(S.BACKWARD)
    clock.charge_loss(10_000)
    clock.end_step()
    clock.switch(S.FORWARD)
    time.ns += 10
    clock.switch(S.PYTHON)
    time.ns += 50
    clock.switch(S.BACKWARD)
    clock.charge_loss(20)
    clock.end_step()

    (most, some), _ = clock.drain()

    assert (most.segments_ns[S.PYTHON], most.segments_ns[S.FORWARD]) == (1000, 90)
    assert (some.segments_ns[S.PYTHON], some.segments_ns[S.FORWARD]) == (30, 30)
    assert sum(most.segments_ns) == most.wall_ns == 1097
    assert S.FORWARD not in [segment for _, segment in clock.stamps()][-2:]


def test_a_collection_while_the_current_segment_is_python_gc():
    """A collection inside a stretch marked as python.gc is charged once."""
    time = Time()
    clock = StepClock(now_ns=time)
    clock.switch(S.PYTHON_GC)
    clock._on_gc("start", {})
    time.ns += 70
    clock._on_gc("stop", {})
    clock.end_step()

    (record,), _ = clock.drain()

    assert record.segments_ns[S.PYTHON_GC] == record.wall_ns == 70
