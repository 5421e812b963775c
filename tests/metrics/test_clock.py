"""The step clock: closure, gaps, collections, overflow, spans from threads."""

from __future__ import annotations

import gc
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainpath.metrics import NULL_CLOCK, NullClock, Span, StepClock, lineage
from trainpath.metrics import segments as S


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns


def seconds_of(record, segment):
    """Return what `record` charged to `segment`, in nanoseconds."""
    return record.segments_ns[segment]


stage_lists = st.lists(
    st.tuples(st.integers(0, S.NUM_SEGMENTS - 1), st.integers(0, 300_000), st.integers(0, 300_000)),
    max_size=5,
)
operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["switch", "ask", "got", "arrive", "depart", "end_step", "gc", "stage", "tick"]
        ),
        st.integers(0, S.NUM_SEGMENTS - 1),
        st.integers(0, 400_000),
        stage_lists,
    ),
    max_size=80,
)


def perform(clock, time, operation, segment, stages):
    """Do one thing that a step thread can do."""
    if operation == "switch":
        clock.switch(segment)
    elif operation == "got":
        clock.got([(s, time.ns - 400_000 + a, time.ns - 400_000 + a + b) for s, a, b in stages])
    elif operation == "depart":
        clock.depart(segment)
    elif operation == "gc":
        clock._on_gc("start", {})
        time.ns += 70_000
        clock._on_gc("stop", {})
    elif operation == "stage":
        with lineage.recording(clock), lineage.stage(segment):
            time.ns += 1000
    elif operation != "tick":
        getattr(clock, operation)()


@settings(max_examples=150, deadline=None)
@given(operations)
def test_parts_sum_to_the_wall_and_steps_leave_no_gap(sequence):
    """Whatever the step thread does, parts >= 0 sum to the wall and steps follow without gap."""
    time = Time()
    clock = StepClock(now_ns=time)
    begin = time.ns
    for operation, segment, duration, stages in sequence:
        time.ns += duration
        perform(clock, time, operation, segment, stages)
    clock.end_step()

    records, _ = clock.drain()

    assert [sum(record.segments_ns) for record in records] == [r.wall_ns for r in records]
    assert min(min(record.segments_ns) for record in records) >= 0
    assert records[0].start_ns == begin
    ends = [record.start_ns + record.wall_ns for record in records]
    assert ends[:-1] == [record.start_ns for record in records[1:]]
    assert ends[-1] == time.ns
    assert [record.step for record in records] == list(range(len(records)))
    for record in records:
        assert all(0 <= a <= b for a, b in zip(record.after_ns, record.segments_ns, strict=True))


def test_real_time_closes_too():
    """On the real clock, with real collections, each step closes to the nanosecond."""
    clock = StepClock()
    clock.watch_gc()
    try:
        for _ in range(20):
            clock.ask()
            gc.collect(0)
            clock.got([])
            clock.switch(S.FORWARD)
            [[] for _ in range(1000)]
            clock.end_step()
    finally:
        clock.close()

    records, _ = clock.drain()

    assert [sum(r.segments_ns) - r.wall_ns for r in records] == [0] * 20
    assert all(seconds_of(r, S.PYTHON_GC) > 0 for r in records)


def test_collection_inside_a_wait():
    """A collection inside a data wait is python.gc, not data, and the wait still closes."""
    time = Time()
    clock = StepClock(now_ns=time)
    clock.ask()
    asked = time.ns
    time.ns += 1_000_000
    clock._on_gc("start", {})
    time.ns += 3_000_000
    clock._on_gc("stop", {})
    time.ns += 6_000_000
    clock.got([(S.DATA_DECODE, asked, time.ns)])
    clock.end_step()

    (record,), _ = clock.drain()

    assert seconds_of(record, S.PYTHON_GC) == 3_000_000
    assert seconds_of(record, S.DATA_DECODE) == 7_000_000
    assert record.wall_ns == 10_000_000


def test_collection_in_the_middle_of_a_switch():
    """A collection after `switch` has read the time is charged to gc, never below zero."""
    time = Time()
    clock = StepClock(now_ns=time)

    def collecting() -> int:
        now = time.ns
        clock._now = time
        clock._on_gc("start", {})
        time.ns += 5_000
        clock._on_gc("stop", {})
        return now

    time.ns += 100
    clock._now = collecting
    clock.switch(S.FORWARD)
    time.ns += 1000
    clock.end_step()

    (record,), _ = clock.drain()

    assert seconds_of(record, S.PYTHON) == 100
    assert seconds_of(record, S.PYTHON_GC) == 5_000
    assert seconds_of(record, S.FORWARD) == 1000


def test_collections_of_other_threads_are_not_charged():
    """A collection on another thread leaves python.gc of the step thread at zero."""
    clock = StepClock()
    clock.watch_gc()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    clock.end_step()
    clock.close()

    (record,), _ = clock.drain()

    assert seconds_of(record, S.PYTHON_GC) == 0


def test_stages_marked_on_the_step_thread_are_not_counted_twice():
    """With no workers the dataset marks stages on the clock itself, inside the wait."""
    time = Time()
    clock = StepClock(now_ns=time)
    clock.ask()
    time.ns += 100_000
    with lineage.recording(clock), lineage.stage(S.DATA_DECODE):
        time.ns += 500_000
    time.ns += 200_000
    clock.got([])
    clock.end_step()

    (record,), _ = clock.drain()

    assert seconds_of(record, S.DATA_DECODE) == 500_000
    assert seconds_of(record, S.DATA_QUEUE) == 300_000


def test_overflow_is_counted():
    """Steps overwritten before anybody drained them are counted, the newest are kept."""
    clock = StepClock(capacity=8)
    for _ in range(8):
        clock.end_step()
    assert len(clock.drain()[0]) == 8
    assert clock.num_dropped == 0
    for _ in range(20):
        clock.end_step()

    records, _ = clock.drain()

    assert [record.step for record in records] == list(range(20, 28))
    assert clock.num_dropped == 12


def test_lost_spans_are_counted():
    """Spans that did not fit are counted."""
    clock = StepClock(capacity=1)
    for _ in range(20):
        clock.add_span(Span(lane="w", segment=S.DATA_DECODE, start_ns=1, end_ns=2))
    assert clock.num_spans_dropped == 4


def test_spans_of_threads_all_arrive():
    """Spans added by four threads while another drains are each counted exactly once."""
    clock = StepClock()
    running = 4
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal running
        for index in range(500):
            begin = index * 10
            clock.add_span(
                Span(lane=f"w{number}", segment=S.DATA_DECODE, start_ns=begin, end_ns=begin + 7)
            )
        with lock:
            running -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    busy = 0
    num_spans = 0
    while running or num_spans < 2000:
        clock.end_step()
        records, spans = clock.drain()
        busy += sum(record.busy_ns[S.DATA_DECODE] for record in records)
        num_spans += len(spans)
    for thread in threads:
        thread.join()

    assert num_spans == 2000
    assert busy == 4 * 500 * 7


def test_spans_wait_for_the_step_they_end_in():
    """A span is counted in the step in which it ended, also when drained in between."""
    time = Time()
    clock = StepClock(now_ns=time)
    clock.add_span(Span(lane="w", segment=S.DATA_DECODE, start_ns=time.ns, end_ns=time.ns + 5))
    assert clock.drain() == ([], [])
    time.ns += 100
    clock.end_step()
    late = Span(lane="w", segment=S.DATA_COLLATE, start_ns=time.ns + 1, end_ns=time.ns + 9)
    clock.add_span(late)

    (record,), spans = clock.drain()

    assert record.busy_ns[S.DATA_DECODE] == 5
    assert record.busy_ns[S.DATA_COLLATE] == 0
    assert len(spans) == 1
    assert clock.drain(final=True) == ([], [late])


def test_overlapping_spans_of_a_lane_count_once():
    """Busy time of a lane is the union of its spans; lanes add up."""
    time = Time()
    clock = StepClock(now_ns=time)
    t = time.ns
    for lane, begin, end in [("a", 0, 10), ("a", 5, 8), ("a", 6, 14), ("b", 0, 10)]:
        clock.add_span(Span(lane=lane, segment=S.COMM_TRANSFER, start_ns=t + begin, end_ns=t + end))
    time.ns += 20
    clock.end_step()

    (record,), _ = clock.drain()

    assert record.busy_ns[S.COMM_TRANSFER] == 24


def test_after_the_departure():
    """`after_ns` holds what came after the gradients were there, and nothing else."""
    time = Time()
    clock = StepClock(now_ns=time)
    for segment, duration in [(S.FORWARD, 10), (S.BACKWARD, 20)]:
        clock.switch(segment)
        time.ns += duration
    before = clock.arrive()
    assert before == S.BACKWARD
    arrived = time.ns
    time.ns += 30
    clock.depart(S.OPTIMIZER)
    time.ns += 40
    clock.end_step()
    time.ns += 1
    clock.end_step()

    (first, second), _ = clock.drain()

    assert (first.arrive_ns, first.depart_ns) == (arrived, arrived + 30)
    assert first.segments_ns[S.COMM_TRANSFER] == 30
    assert first.after_ns[S.OPTIMIZER] == sum(first.after_ns) == 40
    assert (second.arrive_ns, second.depart_ns, sum(second.after_ns)) == (0, 0, 0)


def test_start_forgets_what_was_before():
    """`start(step)` begins that step now; time before it belongs to no step."""
    time = Time()
    clock = StepClock(now_ns=time)
    time.ns += 500
    clock.start(7)
    time.ns += 3
    clock.end_step()

    (record,), _ = clock.drain()

    assert (record.step, record.wall_ns, record.segments_ns[S.PYTHON]) == (7, 3, 3)


def test_stamps_are_the_newest_switches():
    """The stamps ring keeps the newest switches, oldest first."""
    time = Time()
    clock = StepClock(capacity=4, now_ns=time)
    for segment in range(6):
        time.ns += 1
        clock.switch(segment)

    assert [segment for _, segment in clock.stamps()] == [2, 3, 4, 5]


def test_null_clock_charges_nothing():
    """The null clock takes every call and keeps nothing."""
    clock = NullClock()
    clock.ask()
    clock.got([])
    clock.switch(S.FORWARD)
    clock.arrive()
    clock.depart()
    clock.end_step()
    clock.watch_gc()
    clock.add_span(Span(lane="w", segment=0, start_ns=0, end_ns=1))
    clock.add_stages("w", [(0, 0, 1)])
    clock.charge_loss(1)
    clock.close()

    assert clock.drain() == ([], [])
    assert clock.step_count == NULL_CLOCK.num_switches == 0


@pytest.mark.parametrize("name", S.SEGMENTS)
def test_segment_names(name):
    """Each segment's constant has the name's index, and looks itself up."""
    constant = name.upper().replace(".", "_")
    assert getattr(S, constant) == S.segment_index(name)


def test_steps_between_the_recorded_ones_are_passed_over_whole():
    """With `record_every` the kept steps are exact, and what ended between them is not theirs."""
    now = iter(range(0, 10**6, 10))
    clock = StepClock(now_ns=lambda: next(now))
    clock.record_every = 4
    clock.start()
    for _ in range(10):
        began = clock.now_ns()
        clock.switch(S.FORWARD)
        clock.depart(clock.arrive())
        clock.add_span(Span("lane", S.DATA_DECODE, began, began + 7))
        clock.end_step()
    records, _ = clock.drain()

    assert [record.step for record in records] == [0, 4, 8]
    assert clock.num_skipped == 7
    assert clock.num_dropped == 0
    for record in records:
        assert sum(record.segments_ns) == record.wall_ns == records[0].wall_ns
        assert record.busy_ns[S.DATA_DECODE] == 7
        assert record.start_ns < record.arrive_ns < record.depart_ns
